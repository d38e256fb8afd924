"""The process beside a launcher that observes the job: it keeps the live page current, feeds
trackers and sends notifications (`ebbflow.observe.observer`).
"""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ebbflow.core.json_values import Json
from ebbflow.core.process import OwnProgram, own_program_line
from ebbflow.core.program import python_path

_PAGE_END_SECONDS = 3.0
_FEEDS_END_SECONDS = 20.0  # the process ends its last requests within a shorter time
_CHANNELS = ("webhook_env", "command", "smtp_server")


class ObserverProcess:
    """Process that observes a running job.

    A separate thread starts it and stays alive until it has ended, because after a signal the
    launcher waits for the children of its main thread, and must not wait for this process. If the
    launcher is killed, the process writes the last page, sends the remaining metrics and exits.
    """

    def __init__(
        self,
        job: str,
        store: str,
        config: Mapping[str, Json],
        *,
        page: Path | None,
        tell: Callable[[str], None],
    ) -> None:
        words = own_program_line(OwnProgram.OBSERVER, job, "--store", store)
        self._words = [*words, "--parent", str(os.getpid())]
        if page is not None:
            self._words += ["--page", str(page)]
        self._page = page
        self._feeds = has_feeds(config)
        self._config = json.dumps(config)
        self._tell = tell
        self._ending = False
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the process send the remaining metrics, and wait until it has ended.

        Kill it if this takes too long. It writes no page after this.
        """
        self._ending = True
        seconds = _FEEDS_END_SECONDS if self._feeds else _PAGE_END_SECONDS
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
                    f"trackers and notifications: their process ended with exit code {code}; "
                    "training and the live page go on without them"
                )
                self._run_once([*self._words, "--only-page"])
        except OSError as error:
            if self._page is not None:
                self._tell(f"no live page: {error}")
            if self._feeds:
                self._tell(f"no trackers and no notifications: {error}")

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
) -> ObserverProcess | None:
    """Start the process that observes a job. Return None if there is nothing for it to do.

    Args:
        store: address of the store that holds all jobs.
        config: the configuration as JSON values.
        page: file of the live page; None: without a live page.
        tell: prints a line for the user.
    """
    if page is None and not has_feeds(config):
        return None
    return ObserverProcess(job, store, config, page=page, tell=tell)
