"""SIGTERM for a task in a container, of AWS Batch or of Kubernetes.

A container is stopped by SIGTERM to its first process, by SIGKILL to all of it some time later (30 s on Batch), and by
the end of the first process. That one is the shell of Metaflow's command, below an image's init or in its place. A
shell that waits for a command dies of SIGTERM at once, and everything with it; as process 1 it never hears of it.
Either way the task would not be told to save and leave. So the command is run by a shell that hands the signal on to
the task and to nobody else (its logs pass through processes that must live as long as it), and stays until the command
has ended by itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Where the task writes its process id, for the shell around it.
_TASK_VARIABLE = "EBBFLOW_TASK_FILE"
# $1: the command. What is below it ignores SIGTERM, so that a signal to all of a process group leaves shell and logs
# alone; the task itself listens again (`listen_to_stop`). Without a task there is nothing to save.
_SHELL = f"""
export {_TASK_VARIABLE}="$PWD/.ebbflow-task-$$"
leave() {{
  told=yes
  if [ -s "${_TASK_VARIABLE}" ]; then kill -TERM "$(cat "${_TASK_VARIABLE}")" 2>/dev/null; else kill -KILL "$child"; fi
}}
trap leave TERM
bash -c "trap '' TERM
$1" &
child=$!
while told=; wait "$child"; code=$?; [ -n "$told" ]; do :; done
rm -f "${_TASK_VARIABLE}"
exit "$code"
"""


def stoppable(command: list[str]) -> list[str]:
    """The command of a container, the shell around it; one that is no `bash -c TEXT` stays as it is.

    TEXT stays the last word.
    """
    return (
        ["bash", "-c", _SHELL, "bash", command[2]] if len(command) == 3 and command[:2] == ["bash", "-c"] else command
    )


def make_stoppable(params: dict[str, Any], **_: Any) -> None:
    """Called by the AWS SDK with each request SubmitJob, before it is made. Changes its commands in place."""
    for overrides in _overrides(params):
        if command := overrides.get("command"):
            overrides["command"] = stoppable(command)


def _overrides(params: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    nodes = (params.get("nodeOverrides") or {}).get("nodePropertyOverrides") or []
    every = [params.get("containerOverrides"), *(node.get("containerOverrides") for node in nodes)]
    return [one for one in every if one]


def listen_to_stop() -> None:
    """In a task's process: from now on SIGTERM is meant for it. Does nothing outside of such a container."""
    path = os.environ.get(_TASK_VARIABLE)
    if path:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Path(path).write_text(str(os.getpid()))
