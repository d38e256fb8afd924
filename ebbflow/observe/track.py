"""`ebbflow track`: send a job's metrics to trackers, and messages about the job to people.

A launcher runs this command as a separate process (`ebbflow.observe.tracking_process`). The
process reads the event log, so it works alike for workloads, for scripts and for every attempt.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import NotificationsConfig, RunConfig, TrackerConfig
from ebbflow.core.errors import InfraError, ObjectNotFound, Outcome
from ebbflow.core.events import (
    BUDGET,
    COMMIT,
    CONFIGURED,
    EVALUATION,
    NODE_HEARTBEAT,
    NOTICE,
    PREPARED,
    RESTORE,
    STEP,
    Event,
)
from ebbflow.core.layout import TRACKED_KEY, job_prefix, runs_folder
from ebbflow.core.process import run_command
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.retry import backoff_pauses
from ebbflow.core.store import Store
from ebbflow.core.terms import BUDGET_THRESHOLDS
from ebbflow.core.untrusted_text import guard_terminal, one_line
from ebbflow.cost.amounts import format_usd
from ebbflow.cost.errors import CostError, ReportError
from ebbflow.cost.jobs import find_job_uri, find_running_launcher
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.cost.report.verdict import render_verdict
from ebbflow.diagnose.bundle import redact, secret_values
from ebbflow.observe.notify import open_channels
from ebbflow.observe.trackers import Point, TrackedRun, Tracker, make_tracker
from ebbflow.observe.watch import MergingFollower, describe_parent

_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 2.0  # between two looks at the event log
_IDLE_SHARE = 4  # a long log is folded at most a fifth of the time
_END_SECONDS = 12.0  # after the launcher has ended
_OLD_SECONDS = 3600.0  # older news are not sent
_LOCK_SECONDS = 60.0  # an earlier attempt's process ends within this time
_RETRY_SECONDS = 0.2
_STEP_METRICS = ("loss", "learning_rate", "gradient_norm")


class StepSeries:
    """Metrics of a job's steps, from the events of rank 0. Several threads may read a series."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[int, tuple[int, Point]] = {}  # by step: generation and point
        self._newest = 0  # of the steps that rank 0 reported
        self._committed = 0, 0  # generation, and the newest step that its commits cover
        self.totals: dict[str, float] = {}  # metrics of the whole job so far

    def add(self, events: Sequence[Event]) -> None:
        with self._lock:
            for event in events:
                if event.step is not None and event.name in (COMMIT, RESTORE):
                    self._committed = max(self._committed, (event.generation, event.step))
                elif (
                    event.step is not None and event.rank == 0 and event.name in (STEP, EVALUATION)
                ):
                    self._add(event)

    def _add(self, event: Event) -> None:
        assert event.step is not None
        known, point = self._points.get(event.step, (-1, None))
        if event.generation < known:
            return  # a redone step has the values of its last execution
        if point is not None and known == event.generation:
            values = dict(point.values)
        else:
            values = {}
        if event.name == STEP:
            found = {name: event.data.get(name) for name in _STEP_METRICS}
            found["step_seconds"] = sum((event.data.get("seconds") or {}).values())
            self._newest = max(self._newest, event.step)
        else:
            found = event.data.get("metrics") or {}
        values |= _numbers(found)
        self._points[event.step] = event.generation, Point(event.step, event.t_wall, values)

    def after(self, step: int, *, live: bool, last: bool) -> list[Point]:
        """Return the points of the steps after `step`, oldest first.

        The newest point also has the job's totals.

        Args:
            live: Whether to return steps that no commit contains yet.
            last: Whether the job emits no more events. If not, the newest step is left out, since
                its evaluation may follow.
        """
        with self._lock:
            if live:
                end = self._newest
            else:
                end = self._committed[1]
            if not last:
                end = min(end, self._newest - 1)
            points = [
                self._points[point][1] for point in sorted(self._points) if step < point <= end
            ]
            points = [point for point in points if point.values]
            if points:
                points[-1] = points[-1]._replace(values=points[-1].values | self.totals)
            return points

    def forget(self, step: int) -> None:
        """Delete the points up to `step`, because every tracker has received them."""
        with self._lock:
            for point in [point for point in self._points if point <= step]:
                del self._points[point]


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(one)
        for name, one in found.items()
        if isinstance(one, int | float) and math.isfinite(one)
    }


class News(NamedTuple):
    """Message about a job for notification channels."""

    key: str  # a message with the same key is not sent twice
    t_wall: float
    text: str


def list_news(events: Sequence[Event], report: RunReport) -> Iterator[News]:
    """Yield all messages that follow from the events and the report of a job so far."""
    for event in events:
        if event.name == PREPARED:
            step = max(
                (
                    one.step or 0
                    for one in events
                    if one.name == COMMIT and one.t_wall < event.t_wall
                ),
                default=0,
            )
            if step:
                words = f"starts again after the commit of step {step:,}"
            else:
                words = "starts"
            yield News(
                f"start:{event.t_wall:.3f}", event.t_wall, f"{words}{_describe_capacity(report)}"
            )
        elif event.name == NOTICE and event.data.get("source"):
            left = event.data.get("seconds_left")
            if left is None:
                time_left = ""
            else:
                time_left = f", {left:.0f} s left"
            words = (
                f"notice ({event.data['source']}, {event.data.get('action') or 'unknown'}) to "
                f"node {event.node}"
            )
            key = f"notice:{event.generation}:{event.node}:{event.data['source']}:{event.data.get('action')}"
            yield News(
                key,
                event.t_wall,
                f"{words}{time_left}; response: {event.data.get('does') or 'unknown'}",
            )
    for failure in report.events.get("failures") or []:
        if failure.get("culprit"):
            culprit = f" ({failure['culprit']})"
        else:
            culprit = ""
        key = f"failure:{failure['generation']}:{failure['what']}"
        yield News(
            key,
            failure["t_wall"],
            f"interruption: {str(failure['what']).replace('_', ' ')}{culprit}",
        )
    budget = float(report.progress.get("budget_usd") or math.inf)
    spent = float(report.total_usd)
    stopped = any(  # a job stops while the money for its last save is left
        event.name == BUDGET
        and event.data["threshold"] >= 1
        and event.data.get("budget_usd") == budget
        for event in events
    )
    for share in BUDGET_THRESHOLDS:
        if spent >= share * budget or (share == 1 and stopped):
            text = f"{share:.0%} of the budget {format_usd(budget)} is spent: {format_usd(spent)}"
            if spent < share * budget:
                text = (
                    f"the job stops within its budget {format_usd(budget)}: {format_usd(spent)} "
                    "is spent"
                )
            yield News(f"budget:{share}:{budget}", events[-1].t_wall, text)


def _describe_capacity(report: RunReport) -> str:
    chosen = (report.plan or {}).get("chosen") or {}
    if not chosen:
        return ""
    place = chosen.get("zone") or chosen.get("region") or ""
    if chosen.get("expected_usd"):
        cost = f", about {format_usd(chosen['expected_usd'])} (estimated)"
    else:
        cost = ""
    market = str(chosen["market"]).replace("_", "-")
    if (report.plan or {}).get("simulated"):
        simulated = ", simulated"
    else:
        simulated = ""
    return (
        f" on {chosen.get('nodes') or 1} × {chosen['instance_type']} {market} {place}".rstrip()
        + cost
        + simulated
    )


class _Sender(threading.Thread):
    """Thread that calls `work` whenever it is woken.

    It prints the first of consecutive errors, and retries.
    """

    def __init__(
        self, name: str, work: Callable[[bool], None], tell: Callable[[str], None]
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._tell = tell
        self._woken = threading.Event()
        self._last = False
        self.failed = ""  # the error since the last success
        self.abandoned = False

    def wake(self, *, last: bool = False) -> None:
        self._last = self._last or last
        self._woken.set()

    def run(self) -> None:
        pauses = backoff_pauses(first_seconds=1.0, longest_seconds=30.0)
        while self._woken.wait() and not self.abandoned:
            self._woken.clear()
            last = self._last
            try:
                self._work(last)
                if self.failed:
                    self._tell(f"{self.name}: works again")
                self.failed = ""
                pauses = backoff_pauses(first_seconds=1.0, longest_seconds=30.0)
            except Exception as error:  # libraries raise many kinds of errors
                if not self.failed:
                    if isinstance(error, InfraError):
                        known = one_line(error)
                    else:
                        known = f"{type(error).__name__}: {error}"
                    self._tell(
                        f"{self.name}: {one_line(known)[:300]}; training goes on, and this is "
                        "sent later"
                    )
                self.failed = str(error) or type(error).__name__
                time.sleep(min(next(pauses), 1.0 if self._last else 30.0))
                self._woken.set()
            else:
                if last:
                    return


class Tracking:
    """Trackers and notification channels of one job, and a record of what was sent to them
    (`trackers.json`).
    """

    def __init__(
        self, store: Store, job: str, config: RunConfig, tell: Callable[[str], None]
    ) -> None:
        self._store = store
        self._job = job
        self.tell = tell
        self._config = config
        self._follower = MergingFollower(store)
        self._series = StepSeries()
        self._lock = threading.Lock()
        self._due = 0.0
        try:
            self._state = json.loads(store.get(TRACKED_KEY))
        except (ObjectNotFound, ValueError):
            self._state = {"schema": 1, "sent": {}, "told": {}}
        self._heard = time.monotonic()
        self._news = list[News]()
        self._marks = dict[str, int]()
        self._report: RunReport | None = None
        self._senders: list[_Sender] = []
        for tracker in config.trackers:
            digest = hashlib.sha256(
                json.dumps(tracker.model_dump(exclude={"live", "key_env"})).encode()
            ).hexdigest()[:8]
            self._start(tracker.type, _TrackerFeed(self, tracker, f"{tracker.type}-{digest}").send)
        for name, send in open_channels(config.notifications).items():
            self._start(name, lambda last, name=name, send=send: self._notify(name, send))

    def _start(self, name: str, work: Callable[[bool], None]) -> None:
        self._senders.append(_Sender(name, work, self.tell))
        self._senders[-1].start()

    @property
    def run(self) -> TrackedRun | None:
        """Job as trackers show it; None before the job has recorded its configuration."""
        configured = [event for event in self._follower.events if event.name == CONFIGURED]
        if not configured:
            return None
        own = secret_values(dict(os.environ))
        rows = [
            row for row in configured[-1].data["settings"] if row.get("value") not in (None, [], {})
        ]
        known = {
            str(row["key"]): redact(f"{row['key']}={row['value']}", own)[0].partition("=")[2]
            for row in rows
        }
        number = hashlib.sha256(self._store.uri.encode()).hexdigest()[:8]
        return TrackedRun(
            id=f"{self._job}-{number}",
            name=self._job,
            report=f"{self._store.uri}/report.html",
            folder=runs_folder(PROJECT_ROOT) / self._job,
            settings=known,
        )

    def look(self, *, running: dict[str, Any] | None, last: bool = False) -> None:
        """Read new events, and wake the senders.

        `last` is True if the launcher has ended, so that no more events will come.
        """
        for new in self._follower.read_new():
            self._series.add(new)
            if any(event.name != NODE_HEARTBEAT for event in new):
                self._heard = time.monotonic()
        events = self._follower.events
        if not events:
            return
        try:
            if last or time.monotonic() >= self._due:
                began = time.monotonic()
                self._fold(events, None if last else running, last)
                self._due = time.monotonic() + _IDLE_SHARE * (time.monotonic() - began)
        finally:  # without a report, steps are sent all the same
            for sender in self._senders:
                sender.wake(last=last)

    def _fold(self, events: Sequence[Event], running: dict[str, Any] | None, last: bool) -> None:
        self._report = report = build_report(events, running=running)
        self._series.totals = _totals(report)
        news = list(list_news(events, report))
        silent = time.monotonic() - self._heard
        at = events[-1].t_wall
        if running and silent > 60 * self._config.notifications.silence_minutes:
            name = events[-1].name.replace("_", " ")
            text = f"no sign of the ranks for {silent / 60:.0f} minutes; the last event was {name}"
            news.append(News(f"silence:{at:.3f}", time.time(), text))
        if last:
            if self._store.head("report.html") is None:  # a script without the flow
                self._store.put("report.html", render(report).encode(errors="backslashreplace"))
            text = f"{render_verdict(report)}; report: {self._store.uri}/report.html"
            news.append(News(f"end:{at:.3f}", at, text))
        self._news = sorted(news, key=lambda one: one.t_wall)

    def finish(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is sent, and return whether it is.

        If it is not, print the names of the trackers and channels that are late.
        """
        limit = time.monotonic() + seconds
        for sender in self._senders:
            sender.join(max(0.0, limit - time.monotonic()))
        late = [sender.name for sender in self._senders if sender.is_alive()]
        for sender in self._senders:
            sender.abandoned = True
        if late:
            self.tell(
                f"not everything is sent to {', '.join(late)}; fix: ebbflow track {self._job}"
            )
        return not late

    def sent_to(self, name: str) -> int:
        return int(self._state["sent"].get(name, 0))

    def record_sent(self, name: str, step: int) -> None:
        with self._lock:
            self._marks[name] = step
            if len(self._marks) == len(self._config.trackers):
                self._series.forget(min(self._marks.values()))
            if self._state["sent"].get(name) != step:
                self._state["sent"][name] = step
                self._store.put(
                    TRACKED_KEY, json.dumps(self._state, indent=1, sort_keys=True).encode()
                )

    def points_after(self, step: int, *, live: bool, last: bool) -> list[Point]:
        return self._series.after(step, live=live, last=last)

    def facts(self) -> dict[str, float | str]:
        """Return the job's totals and outcome, for the summary that a tracker shows."""
        if self._report is None:
            ended = None
        else:
            ended = self._report.outcome
        return {**self._series.totals, **({} if ended is None else {"ebbflow/outcome": str(ended)})}

    def _notify(self, channel: str, send: Callable[[str], None]) -> None:
        with self._lock:
            told: list[str] = self._state["told"].setdefault(channel, [])
        for one in [one for one in self._news if one.key not in told]:
            if one.t_wall > time.time() - _OLD_SECONDS:
                send(f"ebbflow {self._job}: {one_line(one.text)}")
            with self._lock:
                told.append(one.key)
                self._store.put(
                    TRACKED_KEY, json.dumps(self._state, indent=1, sort_keys=True).encode()
                )


def _totals(report: RunReport) -> dict[str, float]:
    # Else the cost is unknown, not zero
    priced = report.actual.get("price_kind") not in (None, "unpriced")
    found = {
        "ebbflow/usd": float(report.total_usd) if priced else None,
        "ebbflow/goodput": report.actual.get("goodput"),
        "ebbflow/interruptions": report.interruptions,
        "ebbflow/redone_steps": report.redone_steps,
    }
    return _numbers(found)


class _TrackerFeed:
    """Connection to one tracker of a job, with the last step that the tracker has received."""

    def __init__(self, tracking: Tracking, config: TrackerConfig, name: str) -> None:
        if config.folder is not None:
            config = config.model_copy(update={"folder": str(PROJECT_ROOT / config.folder)})
        self._tracking = tracking
        self._config = config
        self._name = name
        self._tracker: Tracker | None = None
        self._sent = 0
        self._told = False

    def send(self, last: bool) -> None:
        run = self._tracking.run
        if run is None:
            return
        # After an error it is opened again, and says what it has
        tracker = self._tracker
        self._tracker = None
        if tracker is None:
            tracker = make_tracker(self._config, run)
            self._sent = tracker.open(self._tracking.sent_to(self._name))
            if not self._told:
                self._tracking.tell(f"{self._config.type}: {tracker.place}")
            self._told = True
        if points := self._tracking.points_after(self._sent, live=self._config.live, last=last):
            tracker.log(points)
            self._sent = points[-1].step
        self._tracking.record_sent(self._name, self._sent)
        if last:
            tracker.conclude(self._tracking.facts())
            tracker.close()
        self._tracker = tracker


def main(arguments: Sequence[str] | None = None) -> int:
    guard_terminal()
    parser = argparse.ArgumentParser(
        prog="ebbflow track",
        description="Send a job's metrics to trackers, as far as they lack them.",
    )
    parser.add_argument(
        "job", nargs="?", default="latest", metavar="RUN", help="name, folder or s3:// URI"
    )
    parser.add_argument(
        "--store", default=None, metavar="URI", help="the job's store, if not known to this machine"
    )
    parser.add_argument(
        "--config", default=None, metavar="FILE", help="take trackers from this file, not the job's"
    )
    # The launcher, which runs the job
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(list(sys.argv[1:] if arguments is None else arguments)[1:])
    return run_command(lambda: _track(options))


def _track(arguments: argparse.Namespace) -> int:
    parent = arguments.parent
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    if parent:
        place = f"{arguments.store}/{job_prefix(arguments.job)}"
    else:
        place = find_job_uri(arguments.job, arguments.store)
    store = Store.open(place, request_timeout_seconds=_REQUEST_SECONDS)
    if parent:
        config = RunConfig.model_validate_json(sys.stdin.read())
        os.nice(10)
    else:
        config = _own_config(arguments, store)
        ending.set()
    if parent:
        job = arguments.job
    else:
        job = Path(place).name
    with _alone(store, wait_seconds=_LOCK_SECONDS if parent else 0.0):
        tracking = Tracking(store, job, config, _print_line)
        _follow(tracking, ending, parent)
        done = tracking.finish(_END_SECONDS)
    sys.stdout.flush()
    # Libraries wait for their servers as the interpreter ends
    os._exit(0 if done else Outcome.FAILED.exit_code)


def _follow(tracking: Tracking, ending: threading.Event, parent: int) -> None:
    """Read the event log repeatedly until the launcher has ended, then once more."""
    if parent:
        running = describe_parent(parent)
    else:
        running = None
    problem = ""
    limit = math.inf
    while True:
        last = ending.is_set() or bool(parent and os.getppid() != parent)
        if last:
            limit = min(limit, time.monotonic() + _END_SECONDS)
        try:
            tracking.look(running=running, last=last)
            if last:
                return
        except (CostError, InfraError) as error:
            if not problem:
                tracking.tell(f"trackers: {one_line(error)}; training goes on")
            problem = str(error)
            if time.monotonic() > limit or (last and isinstance(error, CostError)):
                return
        ending.wait(_PAUSE_SECONDS if not last else 0.0)
        if last:
            time.sleep(_RETRY_SECONDS)


def _own_config(arguments: argparse.Namespace, store: Store) -> RunConfig:
    """Return the configuration of a job that has ended, without its notifications.

    Raises ReportError if the job is running or has no trackers.
    """
    if find_running_launcher(arguments.job, (), arguments.store) is not None:
        raise ReportError(f"job {arguments.job} is running; fix: wait until it has ended")
    if arguments.config is not None:
        config = load_config(arguments.config, project_root=PROJECT_ROOT).config
    else:
        config = RunConfig.model_validate(json.loads(store.get("config.json"))["config"])
    if not config.trackers:
        raise ReportError(
            f"job {arguments.job} has no trackers; fix: --config with a file that has trackers"
        )
    return config.model_copy(update={"notifications": NotificationsConfig()})


@contextlib.contextmanager
def _alone(store: Store, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of this job's metrics, so that only one process on this machine sends them.

    Raises ReportError if another process still holds the lock after `wait_seconds`.
    """
    number = hashlib.sha256(store.uri.encode()).hexdigest()[:16]
    limit = time.monotonic() + wait_seconds
    with open(Path(tempfile.gettempdir(), f"ebbflow-track-{os.getuid()}-{number}"), "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= limit:
                    raise ReportError(
                        "another process sends this job's metrics; fix: wait until it ends"
                    ) from error
            time.sleep(_RETRY_SECONDS)
        yield


def _print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
