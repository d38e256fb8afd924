"""The output of a run while it trains: progress lines, and live metrics for Prometheus.

The metrics are computed from the events that a rank emits.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import (
    COMMIT,
    COMMIT_FAILED,
    EVALUATION,
    PEAK,
    PHASE,
    RESTORE,
    STEP,
    LedgerClass,
)
from ebbflow.core.layout import parse_commit_key
from ebbflow.core.metrics import (
    NODE_METRICS,
    MetricBoard,
    MetricsServer,
    Pusher,
    PushGroup,
    delete_group,
    has_client,
)
from ebbflow.core.process import available_bytes
from ebbflow.core.terms import Terms
from ebbflow.training.launch.gpus import GpuMonitor
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import OrderRecord, WorkerSpec
from ebbflow.training.launch.transport import is_loopback
from ebbflow.training.limits import Limits
from ebbflow.training.reporter import process_start_monotonic

_SECONDS = 0.2
_AGAIN_SECONDS = 0.05  # after a restart, which has an earlier measurement
_SIZE = {"cpu": 1024, "cuda": 4096}
_INTERVAL_SECONDS = 10.0
Emit = Callable[..., object]  # takes (name, step=, flush=, **data)
_GPU_WAIT_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Status:
    step: int
    loss: float
    tokens: float  # the weight of this step's batch over all ranks, in the unit of the workload
    flops: float  # the floating point operations of this step over all ranks
    spent_usd: float  # US dollars that the job has cost so far
    last_commit_step: int | None  # the step of the newest commit; None if there is none
    at_risk_usd: float | None = None  # US dollars spent since the last commit; None if unknown
    drag: str = ""  # a description of the current slowdown, or ""


class Progress:
    """Printer of progress lines with mean rates since the previous line.

    `unit` is what the rates count, such as "tok".
    """

    def __init__(
        self,
        *,
        max_steps: int,
        peak_flops_per_second: float,
        terms: Terms | None,
        unit: str = "tok",
        write: Callable[[str], None] = lambda line: print(line, flush=True),
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_steps = max_steps
        self._peak = peak_flops_per_second
        self._terms = terms
        self._unit = unit
        self._write = write
        self._now = now
        self._since = now()
        self._silent_until = 0.0
        self._steps = 0
        self._tokens = 0.0
        self._flops = 0.0

    def step(self, status: Status) -> None:
        """Count a step.

        Print a line for the first and last step, and if the previous line is at least 10 s old.
        """
        self._steps += 1
        self._tokens += status.tokens
        self._flops += status.flops
        now = self._now()
        if now < self._silent_until and status.step < self._max_steps:
            return
        self._write(self._line(status, max(now - self._since, 1e-9)))
        self._since = now
        self._silent_until = now + _INTERVAL_SECONDS
        self._steps = 0
        self._tokens = 0.0
        self._flops = 0.0

    def _line(self, status: Status, seconds: float) -> str:
        remaining = (self._max_steps - status.step) * seconds / self._steps
        # The first step also compiles and warms up, so that it foretells nothing
        is_first = self._silent_until == 0.0
        parts = [
            f"step {status.step}/{self._max_steps}",
            f"{100 * status.step / self._max_steps:.0f}%",
            f"loss {status.loss:.4f}",
            f"{self._tokens / seconds:,.0f} {self._unit}/s",
            self._mfu(seconds),
            "" if is_first else f"ETA {_duration(remaining)}",
        ]
        terms = self._terms
        if terms is not None and terms.is_priced:
            if terms.budget_usd is not None:
                limit = f" of ${terms.budget_usd:.2f}"
            else:
                limit = ""
            parts.append(f"${status.spent_usd:.4f}{limit} ({terms.price_kind} price)")
        parts.append(
            "no commit yet"
            if status.last_commit_step is None
            else f"commit {status.last_commit_step}"
        )
        if terms is not None and terms.is_priced and status.at_risk_usd is not None:
            parts.append(f"${status.at_risk_usd:.4f} at risk")
        return " · ".join(filter(None, [*parts, status.drag]))

    def _mfu(self, seconds: float) -> str:
        """Return the MFU as text; "" on a CPU, which has none.

        An MFU above 100 % is unknown, because the peak was measured on a busy machine.
        """
        if not self._peak:
            return ""
        share = self._flops / seconds / self._peak
        if share > 1.0:
            return "MFU unknown (faster than the peak measured on a busy machine)"
        return f"MFU {100 * share:.0f}% of measured peak"


class NodeMetrics:
    """The metrics of one node, updated from the events of its local rank 0."""

    def __init__(self, spec: WorkerSpec, config: RunConfig, *, rank: int, world_size: int) -> None:
        constant = {"job": spec.job, "node": str(spec.node)}
        self.board = MetricBoard(NODE_METRICS, constant, before_page=self._look)
        self._terms = spec.terms
        started = process_start_monotonic()
        self._limits = Limits(
            self._terms,
            world_size=world_size,
            elapsed_seconds=lambda: time.monotonic() - started,
            control=OrderRecord(Path(spec.control_path)) if spec.control_path else None,
        )
        self._heartbeats: dict[int, Heartbeat] = {}
        if spec.heartbeat_path:
            ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            for other in range(rank, rank + ranks_of_node):
                path = Path(spec.heartbeat_path).with_name(f"rank-{other}.heartbeat")
                if path.exists():
                    self._heartbeats[other] = Heartbeat(path)
        self._gpus = GpuMonitor(kernel_log=os.devnull)
        self._unshown: set[str] = set()
        # US dollars, and the monotonic time of the event
        self._at_risk: tuple[float, float] | None = None
        board = self.board
        terms = self._terms
        figures = {
            "generation": spec.generation,
            "world_size": world_size,
            "max_steps": config.training.max_steps,
        }
        for name, value in {**figures, "start_time_seconds": _wall(started)}.items():
            board.set(f"ebbflow_{name}", value)
        for name in ("steps_total", "tokens_total", "commit_failures_total"):
            board.add(f"ebbflow_{name}", 0)
        if terms is not None:
            board.set("ebbflow_budget_usd", terms.budget_usd)
            board.set("ebbflow_deadline_timestamp_seconds", terms.deadline_utc)

    def watching(self, emit: Emit) -> Emit:
        """Return a function that calls `emit` and then updates the metrics from the emitted event."""

        def emit_and_show(name: str, *, step: int | None = None, **more: Any) -> object:
            event = emit(name, step=step, **more)
            try:
                self._show(name, step, more)
            except (
                LookupError,
                TypeError,
                ValueError,
            ) as error:  # an event that lacks a field of a metric
                if name not in self._unshown:
                    _say(
                        f"metrics: WARNING: {name} events are not shown: {type(error).__name__}: "
                        f"{error}"
                    )
                self._unshown.add(name)
            return event

        return emit_and_show

    def _show(self, name: str, step: int | None, data: dict[str, Any]) -> None:
        board = self.board
        if name == STEP:
            self._show_step(step, data)
        elif name == PHASE:
            board.add("ebbflow_phase_seconds_total", data["seconds"], str(data["class"]))
        elif name == EVALUATION:
            board.set("ebbflow_held_out_loss", data["metrics"].get("held_out_loss"))
        elif name == RESTORE:  # the age of the restored commit is not known here
            board.set("ebbflow_step", step)
            board.set("ebbflow_last_commit_step", parse_commit_key(data["key"])[0])
        elif name == COMMIT:
            board.set("ebbflow_last_commit_step", step)
            board.set("ebbflow_last_commit_timestamp_seconds", time.time())
            board.add("ebbflow_committed_bytes_total", data["bytes"])
            board.observe("ebbflow_commit_seconds", data["seconds"])
        elif name == COMMIT_FAILED:
            board.add("ebbflow_commit_failures_total", 1)
        elif name == PEAK:
            board.set("ebbflow_peak_flops_per_second", data["flops_per_second"])

    def _show_step(self, step: int | None, data: dict[str, Any]) -> None:
        board = self.board
        seconds = data["seconds"]
        busy = seconds.get(LedgerClass.USEFUL_STEP, 0.0) + seconds.get(LedgerClass.DATA_WAIT, 0.0)
        board.set("ebbflow_step", step)
        for figure in ("loss", "gradient_norm", "learning_rate"):
            board.set(f"ebbflow_{figure}", data.get(figure))
        board.set("ebbflow_tokens_per_second", data["tokens"] / busy if busy > 0 else None)
        board.add("ebbflow_steps_total", 1)
        board.add("ebbflow_tokens_total", data["tokens"])
        board.observe("ebbflow_step_seconds", busy)
        for ledger_class, spent in seconds.items():
            board.add("ebbflow_phase_seconds_total", spent, str(ledger_class))
        if "flops" in data:  # only rank 0's events have figures of the whole gang
            board.add("ebbflow_flops_total", data["flops"])
        if "slowest_rank" in data:
            board.set("ebbflow_slowest_rank", data["slowest_rank"])
            board.set("ebbflow_slowest_rank_ratio", data["slowest_ratio"])
            rank = str(data["slowest_rank"])
            lost = data.get("slowest_seconds", 0.0)
            board.add("ebbflow_slowest_rank_seconds_total", lost, rank)
            if self._terms is not None and self._terms.is_priced:
                usd = lost * self._limits.usd_per_second
                board.add("ebbflow_slowest_rank_usd_total", usd, rank, self._terms.price_kind)
        if "at_risk_usd" in data:
            self._at_risk = data["at_risk_usd"], time.monotonic()

    def _look(self) -> None:
        if self._terms is not None and self._terms.is_priced:
            self.board.set("ebbflow_spent_usd", self._limits.spent_usd, self._terms.price_kind)
            self.board.set(
                "ebbflow_usd_per_hour", 3600 * self._limits.usd_per_second, self._terms.price_kind
            )
            if self._at_risk is not None:
                usd, at = self._at_risk
                since = (time.monotonic() - at) * self._limits.usd_per_second
                self.board.set("ebbflow_at_risk_usd", usd + since, self._terms.price_kind)
        self.board.set("ebbflow_node_memory_available_bytes", available_bytes())
        if found := self._gpus.sample(wait_seconds=_GPU_WAIT_SECONDS):
            for name in (
                "gpus",
                "gpu_memory_used_bytes",
                "gpu_memory_free_bytes",
                "gpu_celsius",
                "gpu_watts",
            ):
                self.board.set(f"ebbflow_{name}", found.get(name))
            busy = found.get("gpu_busy_percent")
            self.board.set("ebbflow_gpu_busy_ratio", None if busy is None else busy / 100)
        for rank, heartbeat in self._heartbeats.items():
            beat = heartbeat.read()
            self.board.set("ebbflow_rank_step", beat.step, str(rank))
            self.board.set(
                "ebbflow_rank_heartbeat_timestamp_seconds", _wall(beat.t_mono), str(rank)
            )


def peak_flops_per_second(
    device: torch.device, dtype: torch.dtype, kept: Path | None = None
) -> float:
    """Return the highest speed measured on this device so far.

    Other load on the machine makes a measurement too low.

    The file `kept` holds the highest measurement of earlier ranks; if this file exists, a restarted
    rank measures only briefly.
    """
    known = {"dtype": str(dtype), "device": str(device)}
    best = 0.0
    if kept is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(kept.read_text())
            if {key: record[key] for key in known} == known:
                best = float(record["flops_per_second"])
    measured = measure_flops_per_second(device, dtype, _AGAIN_SECONDS if best else _SECONDS)
    if kept is not None and measured > best:
        with contextlib.suppress(OSError):
            kept.write_text(json.dumps({**known, "flops_per_second": measured}))
    return max(best, measured)


def measure_flops_per_second(
    device: torch.device, dtype: torch.dtype, seconds: float = _SECONDS
) -> float:
    """Return the speed of the fastest of several matrix products, in FLOP/s.

    All ranks of a machine should call this at the same time.
    """
    size = _SIZE.get(device.type, 1024)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    torch.mm(left, right)
    best = float("inf")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.monotonic()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - start)
    return 2.0 * size**3 / best


@contextlib.contextmanager
def live_metrics(spec: WorkerSpec, *, rank: int, world_size: int, emit: Emit) -> Iterator[Emit]:
    """Yield a function that calls `emit` and also updates this node's metrics.

    Only local rank 0 has metrics, and only if they are configured; otherwise, yield `emit` itself.
    If the port or the push gateway is unavailable, print a warning.
    """
    config = spec.config
    metrics = config.metrics
    if int(os.environ.get("LOCAL_RANK", "0")) != 0 or (
        metrics.port is None and metrics.push_url is None
    ):
        yield emit
        return
    if not has_client():
        _say(
            "metrics: WARNING: prometheus-client is not installed, so that there are none; fix: pip "
            "install 'ebbflow[flow]'"
        )
        yield emit
        return
    node = NodeMetrics(spec, config, rank=rank, world_size=world_size)
    with contextlib.ExitStack() as ends:
        if metrics.port is not None:
            _serve(node.board, metrics.port, _address(metrics.address), spec.node, ends)
        if metrics.push_url is not None:
            group = PushGroup(metrics.push_url, spec.job, spec.node)
            pusher = Pusher(
                group, node.board.registry(), interval_seconds=metrics.interval_seconds, say=_say
            )
            # Otherwise the agent deletes the group, because it outlives this rank
            if spec.agent_pid is None:
                ends.callback(delete_group, group, say=_say)
            ends.callback(pusher.close)
        yield node.watching(emit)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def _address(configured: str | None) -> str:
    """Return the address on which to serve metrics: `configured` if it is set, else a default.

    The default is "" (all interfaces) in a container and in a gang of several machines, otherwise
    loopback.
    """
    if configured is not None:
        return configured
    contained = any(name in os.environ for name in ("AWS_BATCH_JOB_ID", "KUBERNETES_SERVICE_HOST"))
    if not contained and is_loopback(os.environ.get("MASTER_ADDR", "localhost")):
        return "127.0.0.1"
    return ""


def _serve(
    board: MetricBoard, port: int, address: str, node: int, ends: contextlib.ExitStack
) -> None:
    try:
        server = MetricsServer(port, board.page, address=address)
    except OSError as error:
        _say(
            f"metrics: WARNING: node {node} serves none, training goes on: metrics.port {port}: "
            f"{error}"
        )
        return
    ends.callback(server.close)
    if server.port != port:
        taken = f" (metrics.port {port} is taken)"
    else:
        taken = ""
    if address in ("", "0.0.0.0", "::"):
        host = os.uname().nodename
    elif ":" in address:
        host = f"[{address}]"
    else:
        host = address
    _say(f"metrics: node {node} at http://{host}:{server.port}/metrics{taken}")


def _wall(monotonic_seconds: float) -> float:
    return time.time() - (time.monotonic() - monotonic_seconds)


def _say(text: str) -> None:
    print(text, flush=True)
