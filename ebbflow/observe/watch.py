"""`ebbflow watch`: show the live page of a job in a browser, write it to a file, or print it
once.
"""

import argparse
import contextlib
import getpass
import json
import math
import secrets
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ebbflow.core.errors import InfraError, Outcome, StoreError
from ebbflow.core.event_payloads import StepPayload
from ebbflow.core.events import COMMIT, GENERATION_ENDED, STEP, Event, LogFollower, is_event
from ebbflow.core.grouping import sum_by_key
from ebbflow.core.launchers import Launcher, RunningJob, RunningLauncher
from ebbflow.core.layout import job_prefix, runs_folder, write_atomically
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.rank_logs import LogLine, read_logs
from ebbflow.core.segments import Damage
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.errors import CostError, ReportError
from ebbflow.cost.jobs import (
    find_job_uri,
    find_running_launcher,
    list_known_jobs,
    load_report,
    read_job_log,
)
from ebbflow.cost.report.render_html import escape, fill_page, render
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.cost.report.verdict import summarize_status

_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 2.0  # between two looks at the event log
_IDLE_SHARE = 4  # a long log is folded at most a fifth of the time
_COMPARED_JOBS = 8
_MOST_UNMERGED = 20_000  # events
_MOST_PLOTTED = 8192  # events
WAITING = "waiting for the job's first event"


class MergingFollower(LogFollower):
    """Reader of a growing event log that keeps its events in memory, merged to a shorter list.

    See `merge_committed_steps`.
    """

    def __init__(self, job_store: Store) -> None:
        super().__init__(job_store)
        self.events: list[Event] = []  # sorted by wall time
        self.count = 0  # of all events that were read
        self._merge_at = _MOST_UNMERGED

    def read_new(self) -> Iterator[list[Event]]:
        """Yield the new events, a few thousand at a time, before they are merged. Raises
        StoreError.
        """
        for new in super().read_new():
            self.count += len(new)
            self.events = sorted(
                [*self.events, *new], key=lambda event: (event.t_wall, event.t_mono)
            )
            if len(self.events) > self._merge_at:
                self.events = merge_committed_steps(self.events)
                self._merge_at = len(self.events) + _MOST_UNMERGED
            yield new


class LiveReport:
    """Report of a job that may still be running, rebuilt as its event log grows.

    Args:
        launcher: The launcher that is known to run the job, as JSON values; None to look up its
            claim in the store.
    """

    def __init__(self, job: str, store: str | None, *, launcher: RunningJob | None = None) -> None:
        self.job = job
        self.ended = False
        self._store = store
        self._launcher = launcher
        self._follower: MergingFollower | None = None
        self._job_store: Store | None = None
        # Output of the ranks, and the number of ended generations when it was read
        self._logs: list[LogLine] = []
        self._logs_of = -1
        self._damage: Sequence[Damage] = ()  # of the ended job

    @property
    def events(self) -> list[Event]:
        """Events read so far, merged to a shorter list (`merge_committed_steps`)."""
        if self._follower is None:
            return []
        return self._follower.events

    def read_new(self) -> Iterator[list[Event]]:
        """Yield the new events, a few thousand at a time, before they are merged.

        Raises CostError if the job is unknown, and StoreError.
        """
        if self._follower is None:
            if self._launcher and self._store:
                place = f"{self._store.rstrip('/')}/{job_prefix(self.job)}"
            else:
                place = find_job_uri(self.job, self._store)
            self._job_store = Store.open(place, request_timeout_seconds=_REQUEST_SECONDS)
            self._follower = MergingFollower(self._job_store)
        yield from self._follower.read_new()

    def build(self, *, last: bool = False) -> RunReport:
        """Build the report from the events that were read so far; there must be at least one.

        Args:
            last: Whether the launcher has ended. If so, the report shows the job as ended.

        Raises:
            CostError, InfraError: The report cannot be built.
        """
        assert self._follower is not None
        if last:
            running = None
        else:
            running = self._launcher or find_running_launcher(self.job, self.events, self._store)
        # Once: a damaged part of the log may also be a missing one
        if running is None and not self.ended:
            self._damage = self._find_damage(self._follower.count)
        if running is None:
            damage = self._damage
        else:
            damage = self._follower.damage
        report = build_report(self.events, running=running, logs=self._read_logs, damage=damage)
        self.ended = running is None
        return report

    def _find_damage(self, count: int) -> Sequence[Damage]:
        """Return the damage to the log of an ended job.

        It is taken from the job's report if that covers all `count` events; otherwise the log is
        read again.
        """
        # No report of this kind
        with contextlib.suppress(StoreError, ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(self._job_store.get("report.json") if self._job_store else "")
            reported = document["events"]
            if sum(reported["counts"].values()) == count:
                return [Damage(**damage) for damage in reported["damage"]]
        return read_job_log(self.job, self._store).damage

    def _read_logs(self) -> list[LogLine]:
        """Return the log lines of the ranks.

        It is read again only after another generation has ended.
        """
        ended = sum(event.name == GENERATION_ENDED for event in self.events)
        if self._job_store is not None and self._logs_of != ended:
            self._logs_of = ended
            self._logs = read_logs([], [self._job_store]).lines
        return self._logs


class LivePage:
    """HTML page of a job that may still be running.

    The page is rendered again when the job's event log has grown.
    """

    def __init__(self, job: str, store: str | None) -> None:
        self._live = LiveReport(job, store)
        self._lock = threading.Lock()
        self._built = b""
        self._due = 0.0
        self._earlier: list[RunReport] = []
        self._problem = WAITING

    @property
    def ended(self) -> bool:
        return self._live.ended

    @property
    def pause_seconds(self) -> float:
        return max(0.1, self._due - time.monotonic())

    def render(self) -> bytes:
        """Return the page's HTML, which is at most a few seconds old."""
        with self._lock:
            if not self._built or time.monotonic() >= self._due:
                began = time.monotonic()
                first = not self._built  # only the first look reads the whole log
                try:
                    self._refresh()
                except (CostError, InfraError) as error:
                    self._problem = one_line(error)
                if not self._built or not self._live.events:
                    self._built = render_waiting(self._live.job, self._problem)
                pause = _PAUSE_SECONDS
                if not first:
                    pause = max(pause, _IDLE_SHARE * (time.monotonic() - began))
                self._due = time.monotonic() + pause
            return self._built

    def _refresh(self) -> None:
        for _ in self._live.read_new():
            pass
        if not self._live.events:
            return
        report = self._live.build()
        if not self._earlier:
            self._earlier = read_earlier_reports(report.job)
        self._built = render_page(report, self._earlier)


def merge_committed_steps(events: Sequence[Event]) -> list[Event]:
    """Merge the step events of each rank between two commits into one event.

    For the lowest rank, which supplies the plots, only eight steps are merged at a time, or more if
    that leaves over 8,192 events. A log of several days has millions of steps, too many to evaluate
    every few seconds. Merging does not change the ledger, because the steps between two commits are
    either all in the final weights or all lost. Steps after the last commit are not merged. A
    merged event has the highest loss of its steps, and their number as `merged`.
    """
    commits: dict[int, set[int]] = {}
    lowest: dict[int, int] = {}
    for event in events:
        if event.name == COMMIT and event.step is not None:
            commits.setdefault(event.generation, set()).add(event.step)
        elif event.name == STEP:
            lowest[event.generation] = min(lowest.get(event.generation, event.rank), event.rank)
    bounds = {generation: sorted(steps) for generation, steps in commits.items()}
    newest = max((steps[-1] for steps in bounds.values()), default=0)
    plotted = max(8, 1 << (newest // _MOST_PLOTTED).bit_length())
    found: list[Event] = []
    groups: dict[tuple[str | int, ...], list[Event[StepPayload]]] = {}
    for event in events:
        ends = bounds.get(event.generation, ())
        if (
            not is_event(event, StepPayload)
            or event.step is None
            or not ends
            or event.step > ends[-1]
            or event.payload.skipped
        ):
            found.append(event)
            continue
        if event.rank == lowest[event.generation]:
            part = event.step // plotted
        else:
            part = 0
        writer = event.run, event.attempt, event.generation, event.node, event.rank
        groups.setdefault((*writer, bisect_left(ends, event.step), part), []).append(event)
    found += [_merge(group) for group in groups.values()]
    return sorted(found, key=lambda event: (event.t_wall, event.t_mono))


def render_page(report: RunReport, earlier: Sequence[RunReport]) -> bytes:
    """Render the report as an HTML page, with a comparison to earlier jobs."""
    return render(report, earlier=earlier).encode(errors="backslashreplace")


def render_waiting(job: str, words: str) -> bytes:
    """Render a placeholder page for a job that has no events yet.

    The browser replaces it when the job's page is available.
    """
    main = (
        f'<header id="header"><h1>{escape(one_line(job))}</h1><p class="badge on">starting<span '
        f'id="age"></span></p><p class="verdict">{escape(words)}</p></header>'
    )
    return fill_page(main, '{"figures":[]}', one_line(job), running=True).encode(
        errors="backslashreplace"
    )


def read_earlier_reports(job: str) -> list[RunReport]:
    """Read the newest reports of other jobs on this machine, for comparison; the newest is last.

    Unreadable reports are skipped.
    """
    root = runs_folder(PROJECT_ROOT)
    found = []
    for name in [name for name in list_known_jobs(root) if name != job][-_COMPARED_JOBS:]:
        with contextlib.suppress(CostError, OSError):
            found.append(load_report(str(root / name / "report.json")))
    return found


def _merge(group: Sequence[Event[StepPayload]]) -> Event:
    if len(group) == 1:
        return group[0]
    data: dict[str, Any] = {}
    for event in group:
        data |= event.data
    steps = [event.payload for event in group]
    seconds = sum_by_key(pair for step in steps for pair in (step.seconds or {}).items())
    data |= {"seconds": seconds, "merged": sum(step.merged or 1 for step in steps)}
    for name in ("tokens", "flops", "own_seconds", "slowest_seconds"):
        if name in data:
            data[name] = sum(getattr(step, name) or 0 for step in steps)
    losses = [step.loss for step in steps if step.loss is not None]
    if losses:
        if any(math.isnan(loss) for loss in losses):
            data["loss"] = None
        else:
            data["loss"] = max(losses)
    return replace(group[-1], data=data)


def write_until_ended(page: LivePage, path: Path) -> bool:
    """Write the live page to a file repeatedly until the job ends, and return whether the last
    write succeeded.

    The file is replaced atomically, so that a reader never sees a part of it.
    """
    while True:
        content = page.render()
        try:
            write_atomically(path, content)
            written = True
        except OSError as error:
            written = False
            print(f"{path}: {error.strerror}", file=sys.stderr)
        if page.ended:
            return written
        time.sleep(page.pause_seconds)


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "watch", help="the live page of a job, in this machine's browser or as text"
    )
    parser.add_argument(
        "job", nargs="?", default="latest", metavar="RUN", help="name, folder or s3:// URI"
    )
    parser.add_argument(
        "--store", default=None, metavar="URI", help="the job's store, if not known to this machine"
    )
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0: a free one")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--once", action="store_true", help="print the state and end")
    shape.add_argument(
        "--write",
        type=Path,
        default=None,
        metavar="FILE",
        help="keep this HTML file current instead",
    )
    parser.set_defaults(run=_watch)


def describe_parent(pid: int) -> RunningJob:
    """Describe this process's launcher as JSON values, from its process id."""
    here = socket.gethostname()
    user = getpass.getuser()
    launcher = Launcher(
        number=0, id="", command="run", host=here, user=user, pid=pid, since_utc=time.time()
    )
    return RunningLauncher(launcher, 0.0).to_json()


class _Handler(BaseHTTPRequestHandler):
    """HTTP handler that serves the page, read-only, under a secret path.

    It offers no way to change anything.
    """

    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, _Server)
        host = (self.headers.get("Host") or "").partition(":")[0]
        known = secrets.compare_digest(
            self.path.partition("?")[0].encode(), f"/{server.token}/".encode()
        )
        if not known or host not in ("127.0.0.1", "localhost"):
            self.send_error(404)
            return
        content = server.page.render()
        self.send_response(200)
        for name, value in (
            ("Content-Type", "text/html; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, page: LivePage) -> None:
        self.page = page
        self.token = secrets.token_urlsafe(16)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"


def _watch(arguments: argparse.Namespace) -> int:
    if arguments.once:
        print(
            "\n".join(
                summarize_status(load_report(arguments.job, store=arguments.store, fresh=True))
            )
        )
        return 0
    find_job_uri(arguments.job, arguments.store)  # a wrong name ends with a message
    if arguments.write is not None:
        written = write_until_ended(LivePage(arguments.job, arguments.store), arguments.write)
        return (Outcome.COMPLETED if written else Outcome.FAILED).exit_code
    try:
        server = _Server(arguments.port, LivePage(arguments.job, arguments.store))
    except (OSError, OverflowError) as error:
        raise ReportError(
            f"port {arguments.port} on 127.0.0.1: {error}; fix: leave --port out"
        ) from error
    with server:
        print(f"{server.url}  (only for this machine; Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return Outcome.COMPLETED.exit_code
    return 0
