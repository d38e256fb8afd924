"""Starter of the observer, a process beside a launcher that keeps the job's live page current.

The process also feeds trackers and sends notifications (`ebbflow.observe.observer`).
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ebbflow.core.json_values import Json
from ebbflow.core.process import OwnProgram, describe_exit, own_program_line
from ebbflow.core.program import python_path

LIVE_PAGE = "live.html"
READY = "ready"  # the process's first line: from now on it handles SIGTERM
_LIVE_PAGE_SWITCH = "EBBFLOW_LIVE_PAGE"  # 0: no live page, and no other line of the observer
_PAGE_END_SECONDS = 3.0
_REPORT_END_SECONDS = 30.0  # a long log is read once more
_FEEDS_END_SECONDS = 20.0  # the process ends its last requests within a shorter time
_CHANNELS = ("webhook_env", "command", "smtp_server")


class ObserverProcess:
    """The observer of a running job: a child process, and the thread that starts it.

    The thread stays alive until the process has ended, because after a signal the launcher waits
    for the children of its main thread, and must not wait for this process. If the launcher is
    killed, the process writes the last page, sends the remaining metrics and exits.
    """

    def __init__(
        self,
        job: str,
        store: str,
        config: Mapping[str, Json],
        *,
        page: Path | None,
        tell: Callable[[str], None],
        shows_progress: bool,
        report_folder: Path | None,
    ) -> None:
        words = own_program_line(OwnProgram.OBSERVER, job, "--store", store)
        self._words = [*words, "--parent", str(os.getpid())]
        if page is not None:
            self._words += ["--page", str(page)]
        if shows_progress:
            self._words.append("--progress")
        self._end_seconds = _PAGE_END_SECONDS
        if report_folder is not None:
            self._words += ["--report-folder", str(report_folder)]
            self._end_seconds = _REPORT_END_SECONDS
        self._page = page
        self._feeds = has_feeds(config)
        self._config = json.dumps(config)
        self._tell = tell
        self._ending = False
        self._ready = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the process send the remaining metrics, and wait until it has ended.

        Kill it if this takes too long. It writes no page after this.
        """
        self._ending = True
        seconds = self._end_seconds
        if self._feeds:
            seconds = max(seconds, _FEEDS_END_SECONDS)
        self._ready.wait(seconds)
        for act in (subprocess.Popen.terminate, subprocess.Popen.kill):
            if self._process is not None and self._thread.is_alive():
                act(self._process)
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            code = self._run_once(self._words)
            if code != 0 and self._page is not None and self._feeds and not self._ending:
                # A library of a tracker can end the process, which must not end the live page
                self._feeds = False
                self._tell(
                    f"trackers and notifications: their process {describe_exit(code)}; "
                    "training and the live page go on without them"
                )
                self._run_once([*self._words, "--only-page"])
        except OSError as error:
            if self._page is not None:
                self._tell(f"no live page: {error}")
            if self._feeds:
                self._tell(f"no trackers and no notifications: {error}")
        finally:
            self._ready.set()

    def _run_once(self, words: list[str]) -> int:
        """Run the process until it has ended, and return its exit code."""
        self._process = process = subprocess.Popen(
            words,
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None and process.stdout is not None
        with process.stdin as pipe:
            pipe.write(self._config)
        for line in process.stdout:
            if line.rstrip() == READY:
                self._ready.set()
            else:
                self._tell(line.rstrip())
        return process.wait()


def has_feeds(config: Mapping[str, Json]) -> bool:
    """Return whether the configuration (JSON values) has trackers or notification channels."""
    channels = config.get("notifications")
    if isinstance(channels, Mapping) and any(channels.get(name) for name in _CHANNELS):
        return True
    return bool(config.get("trackers"))


def start_observer(
    job: str,
    store: str,
    config: Mapping[str, Json],
    *,
    page: Path | None = None,
    tell: Callable[[str], None] = print,
    shows_progress: bool = False,
    report_folder: Path | None = None,
) -> ObserverProcess | None:
    """Start the process that observes a job. Return None if there is nothing for it to do.

    Args:
        store: address of the store that holds all jobs.
        config: the configuration as JSON values.
        page: file of the live page; None: without a live page.
        tell: prints a line for the user.
        shows_progress: print a line about the job's progress every 10 s.
        report_folder: folder to which the process writes the report at the end, and after which it
            prints the closing lines; None: the launcher does both.
    """
    if page is None and not shows_progress and report_folder is None and not has_feeds(config):
        return None
    return ObserverProcess(
        job,
        store,
        config,
        page=page,
        tell=tell,
        shows_progress=shows_progress,
        report_folder=report_folder,
    )


def shows_live_page() -> bool:
    """Return whether the job has a live page: yes, unless EBBFLOW_LIVE_PAGE is 0."""
    return os.environ.get(_LIVE_PAGE_SWITCH) != "0"


def describe_start(job: str, work: str, store: str, folder: Path) -> str:
    """Render the line that a job prints at its start, with its work, store and live page in
    `folder`.
    """
    page = folder / LIVE_PAGE
    if page.is_relative_to(Path.cwd()):
        page = page.relative_to(Path.cwd())
    if not shows_live_page():
        return f"ebbflow: job {job}, {work}, store {store}"
    return f"ebbflow: job {job}, {work}, store {store}, live page {page}"


def start_script_observer(
    job: str,
    store: str,
    config: Mapping[str, Json],
    folder: Path,
    *,
    writes_report: bool = True,
) -> ObserverProcess | None:
    """Start the process that observes a script's job, with a live page in `folder` and progress
    lines.

    If it `writes_report`, it also writes the report to `folder` at the end, and prints the closing
    lines. With EBBFLOW_LIVE_PAGE=0, there are only trackers and notifications.
    """
    if not shows_live_page():
        return start_observer(job, store, config)
    page = folder / LIVE_PAGE
    report_folder = folder if writes_report else None
    return start_observer(
        job, store, config, page=page, shows_progress=True, report_folder=report_folder
    )
