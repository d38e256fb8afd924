"""Process that observes a running job, started by `python -m ebbflow.observe.observer`.

One reader of the job's event log serves all outputs: the live page, the trackers and the
notification channels. Each output works in threads of its own, so that a slow or failing output
delays neither the reader nor the others. A launcher starts this process
(`ebbflow.core.observer_process`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.events import Event
from ebbflow.core.launchers import running_launcher
from ebbflow.core.layout import job_prefix, write_atomically
from ebbflow.core.observer_process import READY
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.errors import CostError
from ebbflow.cost.report.charts import RUNNING
from ebbflow.cost.report.render_text import render_closing
from ebbflow.cost.report.report import RunReport
from ebbflow.cost.report.verdict import render_progress
from ebbflow.observe.feeds import JobFeeds, has_feeds
from ebbflow.observe.job_report import replace_live_page, write_report_files
from ebbflow.observe.outputs import JobView, Output, OutputThread
from ebbflow.observe.watch import (
    WAITING,
    LiveReport,
    describe_parent,
    read_earlier_reports,
    render_page,
    render_waiting,
)

_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 2.0  # between two looks at the event log
_IDLE_SHARE = 4  # a long log is folded, and its page rendered, at most a fifth of the time
_END_SECONDS = 12.0  # after the launcher has ended
_RETRY_SECONDS = 0.2
_PROGRESS_SECONDS = 10.0
_ANY_WIDTH = 10_000  # columns; terminals and log viewers wrap lines themselves


class JobObserver:
    """Reader of a job's event log, which passes new events and reports to several outputs."""

    def __init__(self, live: LiveReport, outputs: Sequence[Output]) -> None:
        self._live = live
        self._outputs = outputs
        self._due = 0.0  # monotonic time of the next report

    def look(self, *, last: bool = False) -> None:
        """Read new events, and pass them and the newest report to the outputs.

        Args:
            last: Whether the launcher has ended, so that no more events will come.

        Raises:
            CostError, InfraError: The log cannot be read, or no report can be built from it.
        """
        for new in self._live.read_new():
            for output in self._outputs:
                output.add(new)
        if not self._live.events:
            return
        try:
            if last or time.monotonic() >= self._due:
                began = time.monotonic()
                view = JobView(self._live.build(last=last), self._live.events, last)
                for output in self._outputs:
                    output.show(view)
                self._due = time.monotonic() + _IDLE_SHARE * (time.monotonic() - began)
        finally:  # without a report, steps are sent all the same
            for output in self._outputs:
                output.wake(last=last)

    def leave_to_launcher(self) -> bool:
        """Drop the outputs that the launcher replaces at its end, and return whether others
        remain.
        """
        self._outputs = [output for output in self._outputs if not output.ends_with_launcher]
        return bool(self._outputs)

    def report_problem(self, error: Exception) -> None:
        for output in self._outputs:
            output.report_problem(error)

    def finish(self, seconds: float) -> bool:
        """Wait at most `seconds` for all outputs, and return whether they have ended."""
        limit = time.monotonic() + seconds
        ended = [output.finish(limit - time.monotonic()) for output in self._outputs]
        return all(ended)


class PageFile:
    """Output that keeps the file of a job's live page up to date.

    The file is replaced atomically, so that a reader never sees a part of it. At the end of the job
    the report takes its place.

    Args:
        ends_with_launcher: Whether a launcher that ends replaces the page with the report.
    """

    def __init__(self, job: str, path: Path, *, ends_with_launcher: bool = True) -> None:
        self.ends_with_launcher = ends_with_launcher
        self._job = job
        self._path = path
        self._report: RunReport | None = None
        self._problem = WAITING
        self._earlier: list[RunReport] = []
        self._due = 0.0  # monotonic time of the next page
        self._thread = OutputThread("live page", self._write, lambda _text: None)
        self._thread.start()
        self._thread.wake()  # with a page that waits for the first event

    def add(self, events: Sequence[Event]) -> None:
        """Ignore new events, because the page is rendered from the report."""

    def show(self, view: JobView) -> None:
        self._report = view.report

    def wake(self, *, last: bool) -> None:
        self._thread.wake(last=last)

    def report_problem(self, error: Exception) -> None:
        self._problem = one_line(error)
        if self._report is None:
            self._thread.wake()

    def finish(self, seconds: float) -> bool:
        return self._thread.finish(seconds)

    def _write(self, last: bool) -> None:
        if not last and time.monotonic() < self._due:
            return
        began = time.monotonic()
        report = self._report
        if report is None:
            page = render_waiting(self._job, self._problem)
        else:
            if not self._earlier:
                self._earlier = read_earlier_reports(report.job)
            page = render_page(report, self._earlier)
            self._due = time.monotonic() + _IDLE_SHARE * (time.monotonic() - began)
        with contextlib.suppress(OSError):  # the next page may be written
            write_atomically(self._path, page)


class ProgressLines:
    """Output that prints a line about the job's progress every few seconds."""

    ends_with_launcher = True

    def __init__(self) -> None:
        self._step = 0
        self._due = 0.0  # monotonic time of the next line

    def add(self, events: Sequence[Event]) -> None:
        """Ignore new events, because the line is rendered from the report."""

    def show(self, view: JobView) -> None:
        report = view.report
        step = report.progress.get("step") or 0
        if view.last or report.state != RUNNING or step == self._step:
            return
        if time.monotonic() >= self._due:
            self._step = step
            self._due = time.monotonic() + _PROGRESS_SECONDS
            print_line(render_progress(report))

    def wake(self, *, last: bool) -> None:
        """Do nothing, since `show` writes its line at once."""

    def report_problem(self, error: Exception) -> None:
        """Do nothing, because the live page shows the problem."""

    def finish(self, seconds: float) -> bool:  # noqa: ARG002 - it has no thread
        return True


def observe(observer: JobObserver, ending: threading.Event, parent: int) -> bool:
    """Update the outputs repeatedly until the launcher has ended, then once more.

    Return whether all outputs have ended.

    Args:
        ending: Set when the launcher asks this process to end.
        parent: Process id of the launcher; 0 without one.
    """
    limit = math.inf
    while True:
        orphaned = bool(parent) and os.getppid() != parent
        last = ending.is_set() or orphaned
        if last and not orphaned and not observer.leave_to_launcher():
            return True
        if last:
            limit = min(limit, time.monotonic() + _END_SECONDS)
        try:
            observer.look(last=last)
            if last:
                return observer.finish(_END_SECONDS)
        except (CostError, InfraError) as error:
            observer.report_problem(error)
            if time.monotonic() > limit or (last and isinstance(error, CostError)):
                return observer.finish(_END_SECONDS)
        if last:
            time.sleep(_RETRY_SECONDS)
        else:
            ending.wait(_PAUSE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--store", required=True)
    parser.add_argument("--parent", type=int, required=True)  # the launcher, which runs the job
    parser.add_argument("--page", type=Path, default=None)
    parser.add_argument("--only-page", action="store_true")
    parser.add_argument("--progress", action="store_true")
    parser.add_argument("--report-folder", type=Path, default=None)
    arguments = parser.parse_args()
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    print_line(READY)
    config = RunConfig.model_validate_json(sys.stdin.read())
    os.nice(10)
    launcher = describe_parent(arguments.parent)
    live = LiveReport(arguments.job, arguments.store, launcher=launcher)
    place = f"{arguments.store}/{job_prefix(arguments.job)}"
    store = Store.open(place, request_timeout_seconds=_REQUEST_SECONDS)
    outputs: list[Output] = []
    if arguments.progress:
        outputs.append(ProgressLines())
    if arguments.page is not None:
        in_flow = arguments.report_folder is None
        outputs.append(PageFile(arguments.job, arguments.page, ends_with_launcher=in_flow))
    if has_feeds(config) and not arguments.only_page:
        outputs.append(JobFeeds(store, arguments.job, config, print_line))
    done = observe(JobObserver(live, outputs), ending, arguments.parent)
    if arguments.report_folder is not None and not runs_elsewhere(store, arguments.parent):
        finish_job(arguments.job, store, arguments.report_folder)
    with contextlib.suppress(OSError):  # the launcher has ended
        sys.stdout.flush()
    # Libraries wait for their servers as the interpreter ends
    os._exit(Outcome.COMPLETED.exit_code if done else Outcome.FAILED.exit_code)


def finish_job(job: str, job_store: Store, folder: Path) -> None:
    """Write the report of a job whose launcher writes none, and print its closing lines.

    The report's page replaces the live page.
    """
    try:
        report, _ = write_report_files(job, job_store, folder)
        replace_live_page(folder)
    except (CostError, InfraError, OSError) as error:
        print_line(f"no report: {one_line(error)}; fix: ebbflow report {job}")
        return
    page = folder / "report.html"
    if page.is_relative_to(Path.cwd()):
        page = page.relative_to(Path.cwd())
    print_line(render_closing(report, str(page), width=_ANY_WIDTH))


def runs_elsewhere(job_store: Store, parent: int) -> bool:
    """Return whether a process other than `parent` now runs the job.

    This happens, for example, after torchrun has restarted the script.
    """
    try:
        found = running_launcher(job_store)
    except InfraError:
        return False
    if found is None:
        return False
    return not found.launcher.is_process(parent)


def print_line(text: str) -> None:
    with contextlib.suppress(OSError):  # the launcher has ended
        print(text, flush=True)


if __name__ == "__main__":
    main()
