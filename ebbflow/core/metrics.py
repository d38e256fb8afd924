"""Prometheus metrics: the catalogue of names, the current values, and how they are served or
pushed.

Names follow Prometheus' conventions. No label has unbounded values such as steps, paths or
messages. A test compares the catalogue with docs/metrics.md, which `docs/generate.py` writes.

A Pushgateway stores values in groups that never expire, and each push replaces a whole group. Every
node therefore pushes to its own group, identified by job and node. A process on the node deletes
this group when training ends there. The group remains if the whole machine is lost or the gateway
cannot be reached.
"""

from __future__ import annotations

import bisect
import errno
import math
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import CommitPayload, StepPayload
from ebbflow.core.events import COMMIT_FAILED, Event, select_events
from ebbflow.core.retry import call_within

# prometheus_client is part of the extra `flow`, so it is imported where it is used
if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family

# Upper bounds in seconds, from a laptop's model to a large one, about a factor of two apart.
STEP_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0)
COMMIT_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

# Kinds of figures, from the most to the least certain.
_STRENGTH = ("measured", "live", "recorded", "estimated", "simulated")

TIMEOUT_SECONDS = 3.0

PORTS_TRIED = 16
_REQUEST_SECONDS = 10.0
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"
_LOOK_SECONDS = 0.1  # interval at which the server checks whether it was closed


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """Name, kind, help text and labels of a metric in the catalogue."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[
        str, ...
    ] = ()  # names of the metric's labels, in addition to its board's constant labels
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram


class MetricBoard:
    """Current values of a set of metrics, which another thread may read safely.

    Values are rendered as a page only on request. The counters of the client library are not used,
    because each of them adds an undocumented `_created` series and is in the same global registry
    as the user's own metrics.

    Args:
        constant: names and values of the labels that all metrics have.
        before_page: function that is called before each rendering, to set values that cost too much
            time to update at every step.
    """

    def __init__(
        self,
        metrics: Iterable[Metric],
        constant: Mapping[str, str],
        before_page: Callable[[], None] = lambda: None,
    ) -> None:
        self._metrics = {metric.name: metric for metric in metrics}
        self._constant = dict(constant)
        self._before_page = before_page
        self._lock = threading.Lock()
        self._numbers: dict[str, dict[tuple[str, ...], float]] = {
            name: {} for name in self._metrics
        }
        histograms = [
            metric for metric in self._metrics.values() if metric.kind is MetricKind.HISTOGRAM
        ]
        self._histograms = {
            histogram.name: _Histogram(histogram.buckets, [0] * (len(histogram.buckets) + 1))
            for histogram in histograms
        }

    def set(self, name: str, value: float | None, *labels: str) -> None:
        """Set a value; None or NaN removes it.

        Raises KeyError for a metric that is not on this board.
        """
        series = self._numbers[name]
        with self._lock:
            if value is None or math.isnan(value):
                series.pop(labels, None)
            else:
                series[labels] = float(value)

    def add(self, name: str, amount: float, *labels: str) -> None:
        series = self._numbers[name]
        with self._lock:
            series[labels] = series.get(labels, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        with self._lock:
            self._histograms[name].observe(value)

    def page(self) -> bytes:
        """Render all values in Prometheus' text format (version 0.0.4)."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry())

    def registry(self) -> CollectorRegistry:
        """Return a registry of only this board's metrics, for functions of the client library."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)  # type: ignore[arg-type] # it calls `collect` alone
        return registry

    def collect(self) -> Iterator[Family]:
        """Yield the metric families with their values; prometheus_client calls this method."""
        self._before_page()
        with self._lock:
            numbers = {name: dict(series) for name, series in self._numbers.items()}
            histograms = {name: (list(h.counts), h.sum) for name, h in self._histograms.items()}
        for name, metric in self._metrics.items():
            if metric.kind is MetricKind.HISTOGRAM:
                yield self._histogram_family(metric, *histograms[name])
            elif numbers[name]:
                yield self._family(metric, numbers[name])

    def _family(self, metric: Metric, series: Mapping[tuple[str, ...], float]) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if metric.kind is MetricKind.COUNTER:
            make = CounterMetricFamily
        else:
            make = GaugeMetricFamily
        family = make(metric.name, metric.help, labels=[*self._constant, *metric.labels])
        for labels, value in sorted(series.items()):
            if len(labels) != len(metric.labels):
                raise ValueError(
                    f"{metric.name} has labels {metric.labels}, and was given {labels}"
                )
            family.add_metric([*self._constant.values(), *labels], value)
        return family

    def _histogram_family(self, metric: Metric, counts: list[int], total: float) -> Family:
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(metric.name, metric.help, labels=list(self._constant))
        buckets = []
        seen = 0
        for bound, count in zip([*map(str, metric.buckets), "+Inf"], counts, strict=True):
            seen += count
            buckets.append((bound, seen))
        family.add_metric(list(self._constant.values()), buckets, total)
        return family


@dataclass(frozen=True)
class PushGroup:
    """A node's group of values in a Pushgateway, identified by job and node."""

    url: str  # address of the Pushgateway
    job: str
    node: int


class Pusher:
    """A thread that pushes metrics to a Pushgateway every `interval_seconds`.

    It prints one warning when pushes begin to fail, and one line when they succeed again.
    """

    def __init__(
        self,
        group: PushGroup,
        registry: CollectorRegistry,
        *,
        interval_seconds: float,
        say: Callable[[str], object],
    ) -> None:
        self._group = group
        self._registry = registry
        self._interval_seconds = interval_seconds
        self._say = say
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._push_forever, name="push", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop pushing, and wait up to 4 s for a push in progress.

        The gateway keeps values until `delete_group`.
        """
        self._ended.set()
        self._thread.join(TIMEOUT_SECONDS + 1)

    def _push_forever(self) -> None:
        from prometheus_client import push_to_gateway

        group = self._group
        key = {"node": str(self._group.node)}
        away = False
        while not self._ended.is_set():
            try:
                push_to_gateway(
                    group.url, group.job, self._registry, grouping_key=key, timeout=TIMEOUT_SECONDS
                )
            except Exception as error:  # from urllib or http.client; none may end the training
                if not away:
                    self._say(f"metrics: WARNING: {group.url} accepts no push, retrying: {error}")
                away = True
            else:
                if away:
                    self._say(f"metrics: {group.url} accepts pushes again")
                away = False
            self._ended.wait(self._interval_seconds)


class MetricsServer:
    """HTTP server for /metrics in its own thread, on the first free of 16 ports from `port` on.

    Several nodes on one machine can thus serve metrics. The attribute `port` is the port in use.
    `address` is the address to listen on, or "" for all addresses. Raises OSError if no port is
    free, or if the port or address is not permitted.
    """

    def __init__(self, port: int, page: Callable[[], bytes], *, address: str) -> None:
        self._server = _listen(address, port, _handler(page))
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_LOOK_SECONDS,), name="metrics", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_REQUEST_SECONDS)


def has_client() -> bool:
    """Return whether prometheus_client is installed, without which no metrics are written."""
    return find_spec("prometheus_client") is not None


def render_job_metrics(report: Mapping[str, Any], events: Sequence[Event]) -> bytes:
    """Render metrics.prom from a job's report and events, for Prometheus' textfile collector."""
    board = MetricBoard(JOB_METRICS, {"job": report["job"]})
    actual = report["actual"]
    plan = report["plan"] or {}
    for outcome in Outcome:
        board.set("ebbflow_job_outcome", float(outcome == report["outcome"]), outcome.value)
    price = str(actual.get("price_kind") or "unpriced")
    for line in report["ledger"]:
        board.set(
            "ebbflow_job_rank_seconds_total", line["rank_seconds"], line["class"], line["kind"]
        )
        if price != "unpriced":  # without a price the cost is unknown, not zero
            board.set(
                "ebbflow_job_usd_total",
                line["usd"],
                line["class"],
                weakest_kind(price, line["kind"]),
            )
    chosen = plan.get("chosen") or {}
    if chosen:
        board.set(
            "ebbflow_job_capacity_info",
            1,
            str(chosen.get("instance_type")),
            str(chosen.get("market")),
        )
        board.set(
            "ebbflow_job_nodes",
            chosen.get("nodes"),
            "simulated" if plan.get("simulated") else "measured",
        )
        board.set("ebbflow_job_planned_usd", chosen.get("expected_usd"), "estimated")
        board.set(
            "ebbflow_job_planned_seconds", _seconds(chosen.get("expected_hours")), "estimated"
        )
    board.set("ebbflow_job_savings_usd", report["savings_usd"], weakest_kind(price, "estimated"))
    board.set("ebbflow_job_mfu_ratio", actual.get("mfu"), "measured")
    slowest = next(
        (
            rank
            for rank in report["charts"].get("ranks") or []
            if rank.get("lost_seconds") is not None
        ),
        {},
    )
    board.set(
        "ebbflow_job_slowest_rank_usd", slowest.get("lost_usd"), weakest_kind(price, "measured")
    )
    # Every rank records the tokens of the whole gang: rank 0's count.
    steps = [event.payload for event in select_events(events, StepPayload) if event.rank == 0]
    commits = {
        event.payload.key or event.step: event.payload
        for event in select_events(events, CommitPayload)
    }.values()
    figures = {
        "interruptions_total": report["interruptions"],
        "failures_total": report["failures"],
        "redone_steps_total": report["redone_steps"],
        "wall_seconds": _seconds(actual.get("wall_hours")),
        "budget_usd": plan.get("budget_usd"),
        "slowest_rank": slowest.get("rank"),
        "slowest_rank_seconds": slowest.get("lost_seconds"),
        "step": actual.get("steps"),
        "loss": report["loss_curve"][-1][1] if report["loss_curve"] else None,
        "held_out_loss": actual.get("held_out_loss"),
        "tokens_per_second": actual.get("tokens_per_second"),
        "goodput_ratio": actual.get("goodput"),
        "unattributed_ratio": actual.get("unattributed_share"),
        "generations_total": actual.get("generations"),
        "commits_total": actual.get("commits"),
        "tokens_total": sum(step.tokens or 0 for step in steps),
        "committed_bytes_total": sum(commit.bytes or 0 for commit in commits),
        "commit_seconds_total": sum(commit.seconds or 0 for commit in commits),
        "commit_failures_total": sum(event.name == COMMIT_FAILED for event in events),
        "last_event_timestamp_seconds": max((event.t_wall for event in events), default=None),
    }
    for name, value in figures.items():
        board.set(f"ebbflow_job_{name}", value)
    return board.page()


def weakest_kind(*words: str) -> str:
    """Return the least certain of several kinds of figures, such as "recorded" rather than
    "measured".

    The kind is the first word of each text, and "" counts as "estimated". The order, from certain
    to uncertain, is measured, live, recorded, estimated, simulated, and any other word.
    """
    kinds = [word.split()[0] if word else "estimated" for word in words]
    return max(
        kinds, key=lambda kind: _STRENGTH.index(kind) if kind in _STRENGTH else len(_STRENGTH)
    )


def delete_group(group: PushGroup, *, say: Callable[[str], object]) -> None:
    """Delete a node's group of values from its Pushgateway, within 4 s.

    Never raises; a missing group is not an error.
    """
    from prometheus_client import delete_from_gateway

    key = {"node": str(group.node)}
    late = TimeoutError(f"no answer within {TIMEOUT_SECONDS + 1:g} s")
    try:  # an absent name server delays a request beyond its time-out
        call_within(
            TIMEOUT_SECONDS + 1,
            lambda: delete_from_gateway(
                group.url, group.job, grouping_key=key, timeout=TIMEOUT_SECONDS
            ),
            "push",
            lambda: late,
        )
    except Exception as error:  # as above
        left = f"{group.url} may still have the group job={group.job}, node={group.node}"
        say(f"metrics: WARNING: {left}, which never expires by itself: {error}")


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, text, labels)


# For metrics.prom: a whole job. Constant label: job.
JOB_METRICS = (
    _gauge(
        "ebbflow_job_outcome", "How the job ended: 1 for that outcome, 0 for the others.", "outcome"
    ),
    _gauge(
        "ebbflow_job_capacity_info", "The planned capacity; always 1.", "instance_type", "market"
    ),
    _gauge("ebbflow_job_nodes", "Nodes of the planned capacity.", "kind"),
    _counter(
        "ebbflow_job_rank_seconds_total",
        "Paid time of all ranks by ledger class, in seconds.",
        "class",
        "kind",
    ),
    _counter(
        "ebbflow_job_usd_total", "What was paid by ledger class, in US dollars.", "class", "kind"
    ),
    _gauge(
        "ebbflow_job_budget_usd", "The limit cost.budget_usd, in US dollars; absent without one."
    ),
    _gauge(
        "ebbflow_job_planned_usd", "What the plan expected the job to cost, in US dollars.", "kind"
    ),
    _gauge(
        "ebbflow_job_planned_seconds",
        "How long the plan expected the job to take, in seconds.",
        "kind",
    ),
    _gauge(
        "ebbflow_job_savings_usd",
        "Useful work alone at the on-demand price, less the total, in US dollars.",
        "kind",
    ),
    _gauge("ebbflow_job_wall_seconds", "From the first event of the job to its last, in seconds."),
    _gauge(
        "ebbflow_job_last_event_timestamp_seconds",
        "When the last event of the job happened, in Unix time.",
    ),
    _gauge("ebbflow_job_step", "The newest step that is part of the job's weights."),
    _counter(
        "ebbflow_job_redone_steps_total", "Steps whose result was thrown away and computed again."
    ),
    _counter(
        "ebbflow_job_tokens_total",
        "Tokens (or whatever the loss is averaged over) of all steps, redone included.",
    ),
    _counter("ebbflow_job_generations_total", "Starts of the gang."),
    _counter(
        "ebbflow_job_interruptions_total", "Generations that ended early, whatever the cause."
    ),
    _counter(
        "ebbflow_job_failures_total",
        "Generations that ended by an error of the program or the user's code.",
    ),
    _counter("ebbflow_job_commits_total", "Durable checkpoints."),
    _counter("ebbflow_job_commit_failures_total", "Saves of a rank that did not become durable."),
    _counter("ebbflow_job_committed_bytes_total", "Bytes of all durable checkpoints."),
    _counter(
        "ebbflow_job_commit_seconds_total",
        "Time from a save to its durability, summed over commits, in seconds.",
    ),
    _gauge("ebbflow_job_loss", "Training loss of the newest step, in the workload's own unit."),
    _gauge(
        "ebbflow_job_held_out_loss",
        "Loss of the newest evaluation on held-out data, in the workload's own unit.",
    ),
    _gauge(
        "ebbflow_job_tokens_per_second",
        "Median speed of the kept steps, in tokens of all ranks per second.",
    ),
    _gauge(
        "ebbflow_job_mfu_ratio",
        "Model flops over those of the machines' measured peak, 0 to 1; absent above 1.",
        "kind",
    ),
    _gauge("ebbflow_job_goodput_ratio", "Useful steps' share of the paid time, 0 to 1."),
    _gauge(
        "ebbflow_job_slowest_rank", "The rank that was slowest most often in the newest generation."
    ),
    _gauge(
        "ebbflow_job_slowest_rank_seconds",
        "Its own time beyond the others' median, over all of its steps, in seconds.",
    ),
    _gauge(
        "ebbflow_job_slowest_rank_usd", "What this time of all ranks cost, in US dollars.", "kind"
    ),
    _gauge(
        "ebbflow_job_unattributed_ratio", "Share of the paid time that no interval covers, 0 to 1."
    ),
)

# For /metrics and the Pushgateway: one running node, from its local rank 0. Constant labels: job,
# node.
NODE_METRICS = (
    _gauge("ebbflow_generation", "Number of this start of the gang."),
    _gauge("ebbflow_world_size", "Ranks of the whole gang."),
    _gauge(
        "ebbflow_start_time_seconds",
        "When the process of this node's first rank started, in Unix time.",
    ),
    _gauge("ebbflow_step", "The newest step taken."),
    _gauge("ebbflow_max_steps", "The last step of the job."),
    _counter("ebbflow_steps_total", "Steps taken by this process."),
    _counter("ebbflow_tokens_total", "Tokens of the whole gang's steps, the same on every node."),
    _counter("ebbflow_flops_total", "Model flops of the whole gang's steps; node 0 only."),
    _gauge(
        "ebbflow_tokens_per_second", "Speed of the newest step, in tokens of all ranks per second."
    ),
    _gauge(
        "ebbflow_loss",
        "Training loss of the newest step over all ranks, in the workload's own unit.",
    ),
    _gauge("ebbflow_held_out_loss", "Loss of the newest evaluation on held-out data; node 0 only."),
    _gauge("ebbflow_gradient_norm", "Global gradient norm of the newest step, before clipping."),
    _gauge("ebbflow_learning_rate", "Learning rate of the newest step."),
    Metric(
        "ebbflow_step_seconds",
        MetricKind.HISTOGRAM,
        "Time of a step and its data, saves and evaluations not, in seconds.",
        buckets=STEP_BUCKETS,
    ),
    _counter(
        "ebbflow_phase_seconds_total", "Time of this rank by ledger class, in seconds.", "class"
    ),
    _gauge("ebbflow_slowest_rank", "The rank that took longest in the newest step; node 0 only."),
    _gauge(
        "ebbflow_slowest_rank_ratio", "Its own time over the median of the others'; node 0 only."
    ),
    _counter(
        "ebbflow_slowest_rank_seconds_total",
        "Its own time beyond that median, in seconds; node 0 only.",
        "rank",
    ),
    _counter(
        "ebbflow_slowest_rank_usd_total",
        "The price of that time of all ranks, in US dollars; node 0 only.",
        "rank",
        "kind",
    ),
    _gauge(
        "ebbflow_rank_step", "The step that a rank of this node is in, by its heartbeat.", "rank"
    ),
    _gauge(
        "ebbflow_rank_heartbeat_timestamp_seconds",
        "When a rank of this node last moved on, in Unix time.",
        "rank",
    ),
    _gauge("ebbflow_last_commit_step", "Step of the newest durable checkpoint; node 0 only."),
    _gauge(
        "ebbflow_last_commit_timestamp_seconds",
        "When it was known to be durable, in Unix time; node 0 only.",
    ),
    _counter("ebbflow_commit_failures_total", "Saves of this rank that did not become durable."),
    _counter(
        "ebbflow_committed_bytes_total",
        "Bytes of the durable checkpoints of this generation; node 0 only.",
    ),
    Metric(
        "ebbflow_commit_seconds",
        MetricKind.HISTOGRAM,
        "Time from a save to its durability, in seconds; node 0 only.",
        buckets=COMMIT_BUCKETS,
    ),
    _gauge(
        "ebbflow_spent_usd",
        "Spent by the whole job so far at the planned price, in US dollars.",
        "kind",
    ),
    _gauge(
        "ebbflow_at_risk_usd",
        "Spent since the state of the newest durable checkpoint, in US dollars; node 0 only.",
        "kind",
    ),
    _gauge(
        "ebbflow_usd_per_hour",
        "What the whole gang costs at the planned price, in US dollars per hour.",
        "kind",
    ),
    _gauge("ebbflow_budget_usd", "The limit cost.budget_usd, in US dollars; absent without one."),
    _gauge(
        "ebbflow_deadline_timestamp_seconds",
        "When the job must be done, in Unix time; absent without a deadline.",
    ),
    _gauge(
        "ebbflow_peak_flops_per_second",
        "Measured peak of this node's first rank, by a matrix product.",
    ),
    _gauge(
        "ebbflow_gpus",
        "GPUs of this node; this and the next five are absent without GPUs or without pynvml.",
    ),
    _gauge("ebbflow_gpu_memory_used_bytes", "Bytes of memory in use on all GPUs of this node."),
    _gauge(
        "ebbflow_gpu_memory_free_bytes", "Bytes of memory free on the fullest GPU of this node."
    ),
    _gauge(
        "ebbflow_gpu_busy_ratio",
        "Share of time in which the least busy GPU of this node ran a kernel, 0 to 1.",
    ),
    _gauge("ebbflow_gpu_celsius", "Temperature of this node's hottest GPU, in degrees Celsius."),
    _gauge("ebbflow_gpu_watts", "Power that all GPUs of this node draw, in watts."),
    _gauge(
        "ebbflow_node_memory_available_bytes",
        "Bytes of memory that processes of this node can still take.",
    ),
)


@dataclass
class _Histogram:
    bounds: Sequence[float]
    counts: list[int]
    sum: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


def _seconds(hours: float | None) -> float | None:
    if hours is None:
        return None
    return hours * 3600


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def server_bind(self) -> None:
        """Bind the socket, but skip HTTPServer's lookup of the host's full name.

        The lookup blocks if no name server answers.
        """
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a connection, such as a client that disconnects."""


class _Server6(_Server):
    address_family = socket.AF_INET6


def _listen(address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> _Server:
    if ":" in address:
        server = _Server6
    else:
        server = _Server
    last = min(port + PORTS_TRIED - 1, 65535)
    for number in range(port, last + 1):
        try:
            return server((address, number), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"ports {port} to {last} are all taken")


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_SECONDS

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/metrics"
            if found:
                content = page()
            else:
                content = b"metrics are at /metrics\n"
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", _TEXT_FORMAT if found else "text/plain")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Print no access log, which would have a line for each scrape."""

    return Handler
