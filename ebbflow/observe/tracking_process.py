"""The process beside a job that feeds its trackers and sends its notifications (`ebbflow track`)."""

import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ebbflow.core.process import OwnProgram, own_program_line
from ebbflow.core.program import python_path

_END_SECONDS = 20.0  # the process ends its last requests within a shorter time


class TrackingProcess:
    """Process that sends a job's metrics to the trackers, and its notifications.

    A separate thread starts it, because the launcher waits for the children of its main thread. If
    the launcher is killed, the process sends the remaining metrics and exits.
    """

    def __init__(
        self, job: str, store: str, config: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        words = ["track", job, "--store", store, "--parent", str(os.getpid())]
        self._words = own_program_line(OwnProgram.COMMAND, *words)
        self._config = json.dumps(config)
        self._tell = tell
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._process = process = subprocess.Popen(
                self._words,
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
            process.wait()
        except OSError as error:
            self._tell(f"no trackers and no notifications: {error}")

    def end(self) -> None:
        """Let the process send the remaining metrics, and wait until it has ended.

        Kill it if this takes too long.
        """
        for act in (subprocess.Popen.terminate, subprocess.Popen.kill):
            if self._process is not None and self._thread.is_alive():
                act(self._process)
            self._thread.join(_END_SECONDS)


def start_tracking(
    job: str, store: str, config: Mapping[str, Any], tell: Callable[[str], None] = print
) -> TrackingProcess | None:
    """Start the process for a job's trackers and notifications. Return None if the job has neither.

    Args:
        store: address of the store that holds all jobs.
        config: the configuration as JSON values.
        tell: prints a line for the user.
    """
    channels = config.get("notifications") or {}
    if not config.get("trackers") and not any(
        channels.get(name) for name in ("webhook_env", "command", "smtp_server")
    ):
        return None
    return TrackingProcess(job, store, config, tell)
