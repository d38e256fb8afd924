"""Feeds of a job's metrics to trackers and of its news to notification channels.

A record of what was sent is kept in the store.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TypedDict

from ebbflow.core.config.schema import RunConfig, TrackerConfig
from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.event_payloads import ConfiguredPayload, EvaluationPayload, StepPayload
from ebbflow.core.events import (
    COMMIT,
    EVALUATION,
    NODE_HEARTBEAT,
    RESTORE,
    STEP,
    Event,
    is_event,
)
from ebbflow.core.layout import TRACKED_KEY, runs_folder
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.errors import ReportError
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.report import RunReport
from ebbflow.cost.report.verdict import render_verdict
from ebbflow.diagnose.bundle import redact, secret_values
from ebbflow.observe.news import News, list_news
from ebbflow.observe.notify import open_channels
from ebbflow.observe.outputs import JobView, OutputThread
from ebbflow.observe.trackers import Point, TrackedRun, Tracker, make_tracker

_OLD_SECONDS = 3600.0  # older news are not sent
_LOCK_SECONDS = 60.0  # an earlier attempt's process ends within this time


class SentState(TypedDict):
    """Record of what was sent to trackers and channels, as stored in `trackers.json`.

    sent: newest step by tracker. told: keys of the news by notification channel.
    """

    schema: int
    sent: dict[str, int]
    told: dict[str, list[str]]


class JobFeeds:
    """Trackers and notification channels of one job, with a record of what was sent
    (`trackers.json`).

    It is an output of `ebbflow.observe.observer.JobObserver`. Each tracker and channel has a thread of its
    own, which starts as soon as no other process on this machine sends the job's metrics.

    Args:
        tell: prints a line for the user.
        wait_seconds: longest wait for another process to end.
    """

    ends_with_launcher = False

    def __init__(
        self,
        store: Store,
        job: str,
        config: RunConfig,
        tell: Callable[[str], None],
        *,
        wait_seconds: float = _LOCK_SECONDS,
    ) -> None:
        self.tell = tell
        self._store = store
        self._job = job
        self._config = config
        self._lock = threading.Lock()
        self._series = StepSeries()
        self._heard = time.monotonic()  # of the ranks
        self._configured: Event[ConfiguredPayload] | None = None
        self._news: list[News] = []
        self._report: RunReport | None = None
        self._told_problem = False
        self._sole = SoleSender(store)
        self._waited_until = time.monotonic() + wait_seconds
        self._woken = False
        self._state: SentState = {"schema": 1, "sent": {}, "told": {}}
        self._newest_sent: dict[str, int] = {}  # by tracker, in this process
        self._threads: list[OutputThread] = []

    def start(self) -> None:
        """Start the threads, unless another process on this machine already sends the job's
        metrics.

        Raises ReportError if that process does not end in time, and StoreError.
        """
        if not self._sole.acquire():
            if time.monotonic() < self._waited_until:
                return
            raise ReportError("another process sends this job's metrics; fix: wait until it ends")
        with contextlib.suppress(ObjectNotFound, ValueError):
            self._state = json.loads(self._store.get(TRACKED_KEY))
        for tracker in self._config.trackers:
            feed = _TrackerFeed(self, tracker)
            self._threads.append(OutputThread(tracker.type, feed.send, self.tell))
        for name, send in open_channels(self._config.notifications).items():
            notify = partial(self._notify, name, send)
            self._threads.append(OutputThread(name, notify, self.tell))
        for thread in self._threads:
            thread.start()

    def add(self, events: Sequence[Event]) -> None:
        self._series.add(events)
        for event in events:
            if is_event(event, ConfiguredPayload):
                known = self._configured
                if known is None or event.t_wall >= known.t_wall:
                    self._configured = event
            if event.name != NODE_HEARTBEAT:
                self._heard = time.monotonic()

    def show(self, view: JobView) -> None:
        report = view.report
        events = view.events
        self._report = report
        self._series.totals = _totals(report)
        news = list(list_news(events, report))
        at = events[-1].t_wall
        silent = time.monotonic() - self._heard
        if not view.last and silent > 60 * self._config.notifications.silence_minutes:
            name = events[-1].name.replace("_", " ")
            text = f"no sign of the ranks for {silent / 60:.0f} minutes; the last event was {name}"
            news.append(News(f"silence:{at:.3f}", time.time(), text))
        if view.last:
            if self._store.head("report.html") is None:  # a script without the flow
                self._store.put("report.html", render(report).encode(errors="backslashreplace"))
            text = f"{render_verdict(report)}; report: {self._store.uri}/report.html"
            news.append(News(f"end:{at:.3f}", at, text))
        self._news = sorted(news, key=lambda message: message.t_wall)

    def wake(self, *, last: bool) -> None:
        self._woken = True
        if not self._threads:
            self.start()
        for thread in self._threads:
            thread.wake(last=last)

    def report_problem(self, error: Exception) -> None:
        if not self._told_problem:
            self.tell(f"trackers: {one_line(error)}; training goes on")
        self._told_problem = True

    def finish(self, seconds: float) -> bool:
        """Wait at most `seconds` until everything is sent, and return whether that succeeded.

        If not, print the names of the trackers and channels that are late.
        """
        limit = time.monotonic() + seconds
        late = []
        if self._woken and not self._threads:  # another process sends
            late += [tracker.type for tracker in self._config.trackers]
            late += open_channels(self._config.notifications)
        for thread in self._threads:
            if not thread.finish(limit - time.monotonic()):
                late.append(thread.name)
        self._sole.release()
        if late:
            self.tell(
                f"not everything is sent to {', '.join(late)}; fix: ebbflow track {self._job}"
            )
        return not late

    @property
    def run(self) -> TrackedRun | None:
        """The job as trackers show it, or None before the job has recorded its configuration."""
        if self._configured is None:
            return None
        secrets = secret_values(dict(os.environ))
        settings = {}
        for setting in self._configured.payload.settings:
            if setting.value not in (None, [], {}):
                shown = redact(f"{setting.key}={setting.value}", secrets)[0]
                settings[str(setting.key)] = shown.partition("=")[2]
        number = hashlib.sha256(self._store.uri.encode()).hexdigest()[:8]
        return TrackedRun(
            id=f"{self._job}-{number}",
            name=self._job,
            report=f"{self._store.uri}/report.html",
            folder=runs_folder(PROJECT_ROOT) / self._job,
            settings=settings,
        )

    def sent_to(self, name: str) -> int:
        return int(self._state["sent"].get(name, 0))

    def record_sent(self, name: str, step: int) -> None:
        with self._lock:
            self._newest_sent[name] = step
            if len(self._newest_sent) == len(self._config.trackers):
                self._series.forget(min(self._newest_sent.values()))
            if self._state["sent"].get(name) != step:
                self._state["sent"][name] = step
                self._save_state()

    def points_after(self, step: int, *, live: bool, last: bool) -> list[Point]:
        return self._series.after(step, live=live, last=last)

    def facts(self) -> dict[str, float | str]:
        """Return the job's totals and outcome, for the summary that a tracker shows."""
        facts: dict[str, float | str] = {**self._series.totals}
        if self._report is not None and self._report.outcome is not None:
            facts["ebbflow/outcome"] = str(self._report.outcome)
        return facts

    def _notify(self, channel: str, send: Callable[[str], None], _last: bool) -> None:
        with self._lock:
            told: list[str] = self._state["told"].setdefault(channel, [])
        for message in self._news:
            if message.key in told:
                continue
            if message.t_wall > time.time() - _OLD_SECONDS:
                send(f"ebbflow {self._job}: {one_line(message.text)}")
            with self._lock:
                told.append(message.key)
                self._save_state()

    def _save_state(self) -> None:
        document = json.dumps(self._state, indent=1, sort_keys=True)
        self._store.put(TRACKED_KEY, document.encode())


class StepSeries:
    """Metrics of a job's steps, collected from rank 0's events. Several threads may read them."""

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
        payload = event.payload
        if isinstance(payload, StepPayload):
            values |= _numbers(
                {
                    "loss": payload.loss,
                    "learning_rate": payload.learning_rate,
                    "gradient_norm": payload.gradient_norm,
                    "step_seconds": sum((payload.seconds or {}).values()),
                }
            )
            self._newest = max(self._newest, event.step)
        elif isinstance(payload, EvaluationPayload):
            values |= _numbers(payload.metrics or {})
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
        """Delete the points up to `step`, which every tracker has received."""
        with self._lock:
            for point in [point for point in self._points if point <= step]:
                del self._points[point]


class SoleSender:
    """Lock that lets only one process on this machine send a job's metrics."""

    def __init__(self, store: Store) -> None:
        number = hashlib.sha256(store.uri.encode()).hexdigest()[:16]
        self._path = Path(tempfile.gettempdir(), f"ebbflow-track-{os.getuid()}-{number}")
        self._file: IO[str] | None = None  # open while this process has the lock

    def acquire(self) -> bool:
        """Take the lock, and return whether this process has it.

        The lock is released at the latest when the process ends.
        """
        if self._file is not None:
            return True
        file = open(self._path, "w")  # noqa: SIM115 - stays open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        self._file = file
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def has_feeds(config: RunConfig) -> bool:
    """Return whether the job has trackers or notification channels."""
    return bool(config.trackers or open_channels(config.notifications))


def _numbers(found: Mapping[str, object]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _totals(report: RunReport) -> dict[str, float]:
    # Otherwise the cost is unknown, not zero
    priced = report.actual.get("price_kind") not in (None, "unpriced")
    totals = {
        "ebbflow/goodput": report.actual.get("goodput"),
        "ebbflow/interruptions": report.interruptions,
        "ebbflow/redone_steps": report.redone_steps,
    }
    if priced:
        totals["ebbflow/usd"] = float(report.total_usd)
    return _numbers(totals)


class _TrackerFeed:
    """Feed of a job's metrics to one tracker, from the last step that the tracker has received."""

    def __init__(self, feeds: JobFeeds, config: TrackerConfig) -> None:
        settings = json.dumps(config.model_dump(exclude={"live", "key_env"}))
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        if config.folder is not None:
            config = config.model_copy(update={"folder": str(PROJECT_ROOT / config.folder)})
        self._feeds = feeds
        self._config = config
        self._name = f"{config.type}-{digest}"  # key of its record in `trackers.json`
        self._tracker: Tracker | None = None
        self._sent = 0
        self._told = False

    def send(self, last: bool) -> None:
        run = self._feeds.run
        if run is None:
            return
        # After an error it is opened again, and says what it has
        tracker = self._tracker
        self._tracker = None
        if tracker is None:
            tracker = make_tracker(self._config, run)
            self._sent = tracker.open(self._feeds.sent_to(self._name))
            if not self._told:
                self._feeds.tell(f"{self._config.type}: {tracker.place}")
            self._told = True
        points = self._feeds.points_after(self._sent, live=self._config.live, last=last)
        if points:
            tracker.log(points)
            self._sent = points[-1].step
        self._feeds.record_sent(self._name, self._sent)
        if last:
            tracker.conclude(self._feeds.facts())
            tracker.close()
        self._tracker = tracker
