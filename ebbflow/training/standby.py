"""The standby process, `python -m ebbflow.training --standby`: it has imported everything and forks
ranks on request.

A forked rank starts in hundredths of a second, both at the first start of a gang and after a fault,
and shares the libraries' memory. The standby process starts no thread and opens no device, because
neither survives a fork.

It exchanges lines of JSON with its node's agent over stdin and stdout:

    agent → {"start": 7, "environment": {…}, "log": "…/rank-3.log", "name": "rank 3"}
    agent ← {"ready": pid}  {"started": 7, "pid": 4711}  {"ended": 4711, "status": -9}
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
from typing import TypedDict

from ebbflow.core.process import die_with_parent

_PR_SET_NAME = 15  # <linux/prctl.h>
# The agent decides how its ranks end. Slurm sends its signals to every process of a task.
_LEFT_TO_THE_AGENT = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class RankRequest(TypedDict):
    """Request to the standby to start a rank: its number, environment, log file and name."""

    start: int
    environment: dict[str, str]
    log: str
    name: str


def serve(agent_pid: int) -> None:
    """Fork ranks on request, and exit when the agent closes the pipe.

    This function returns only in the forked ranks, each with its own environment.
    """
    die_with_parent(agent_pid)
    for number in _LEFT_TO_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    _import_for_ranks()
    gc.collect()
    gc.freeze()  # the collector does not write to these pages, so they remain shared
    own_pid = os.getpid()
    _become(_await_request(), own_pid)


def _import_for_ranks() -> None:
    """Import the modules that a rank needs before its first step, once for all forked ranks."""
    import numpy.random  # noqa: F401
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor
    import torch.nn.attention
    import torch.nn.parallel

    import ebbflow.diagnose.bundle  # redacts an error's text
    import ebbflow.training.worker  # noqa: F401
    from ebbflow.training.workload_loader import find_default_workload

    find_default_workload()
    # torch imports its compiler with this setting: 190 modules, which took each rank longer than the
    # rest of its start
    torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


def _await_request() -> RankRequest:
    """Fork a child for each request of the agent, and report to the agent when a child ends.

    This function returns only in the children, each with its request.
    """
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    _answer({"ready": os.getpid()})
    unread = b""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(-1, os.WNOHANG)
                while ended:
                    _answer({"ended": ended, "status": os.waitstatus_to_exitcode(status)})
                    ended, status = os.waitpid(-1, os.WNOHANG)
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 20)
        if not data:
            os._exit(0)  # the agent has closed the pipe and wants no more ranks
        *lines, unread = (unread + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(waker)
                return request
            _answer({"started": request["start"], "pid": pid})


def _answer(message: dict[str, int]) -> None:
    """Send one line to the agent. A line is short enough for the pipe to write it atomically."""
    os.write(1, json.dumps(message).encode() + b"\n")


def _become(request: RankRequest, parent_pid: int) -> None:
    """Give a forked child the session, signal handlers, output files, environment and name of its
    rank.
    """
    die_with_parent(parent_pid)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for descriptor, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, target)
    os.close(log)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(request["environment"])
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_NAME, request["name"].encode(), 0, 0, 0)
    import numpy

    numpy.random.seed()  # otherwise all forked ranks would draw the same numbers
