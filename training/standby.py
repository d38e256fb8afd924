"""The standby process, `python -m ebbflow.training --standby`: it has imported everything and forks ranks on request.

A forked rank starts in hundredths of a second, both at the first start of a gang and after a fault, and shares the
libraries' memory. The standby process starts no thread and opens no device, because neither survives a fork.

It talks with its node's agent over stdin and stdout, in lines of JSON:

    agent → {"start": 7, "environment": {…}, "log": "…/rank-3.log", "name": "rank 3"}
    agent ← {"ready": pid}  {"started": 7, "pid": 4711}  {"ended": 4711, "status": -9}
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
from typing import Any

from ebbflow.infra.process import die_with_parent

_PR_SET_NAME = 15  # <linux/prctl.h>
_LEFT_TO_THE_AGENT = (signal.SIGINT, signal.SIGTERM)  # the agent decides how its ranks end
# Modules that are imported only when a rank trains, not by importing `ebbflow.training.worker`.
_LATER = (
    "numpy.random",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.nn.attention",
    "ebbflow.training.workloads.language_model",
)


def serve(agent_pid: int) -> None:
    """Fork ranks until the agent closes the pipe, then exit.

    This returns in each forked rank, with the environment that the agent requested.
    """
    die_with_parent(agent_pid)
    for number in _LEFT_TO_THE_AGENT:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # a fifth of the time of these imports, whose objects all stay
    import ebbflow.training.worker  # noqa: F401 - what all this is for

    for name in _LATER:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector does not write to these pages, so they remain shared
    gc.enable()
    own_pid = os.getpid()
    request = _Desk().await_birth()
    _become(request, own_pid)


class _Desk:
    """The connection to the agent: it reads requests to fork, and reports ranks that were started or ended."""

    def __init__(self) -> None:
        self._woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._heard = b""
        self._fds = (self._woken, waker)
        _answer({"ready": os.getpid()})

    def await_birth(self) -> dict[str, Any]:
        """Fork a child for each request. In each child, return the request. The parent never returns."""
        while True:
            ready, _, _ = select.select([0, self._woken], [], [])
            if self._woken in ready:
                os.read(self._woken, 4096)
                _reap()
            if 0 in ready:
                data = os.read(0, 1 << 20)
                if not data:
                    os._exit(0)  # the agent has closed the pipe and wants no more ranks
                *lines, self._heard = (self._heard + data).split(b"\n")
                for line in lines:
                    request = json.loads(line)
                    pid = os.fork()
                    if pid == 0:
                        self._leave()
                        return request
                    _answer({"started": request["start"], "pid": pid})

    def _leave(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in self._fds:
            os.close(descriptor)


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _answer({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _answer(message: dict[str, Any]) -> None:
    """Send one line to the agent. It is short enough for the pipe to write it atomically."""
    os.write(1, json.dumps(message).encode() + b"\n")


def _become(request: dict[str, Any], parent_pid: int) -> None:
    """Finish the fork in the child: set the session, signal handlers, output files, environment and name of its rank.

    Args:
        request: the agent's request.
        parent_pid: the standby process; this process dies with it.
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
