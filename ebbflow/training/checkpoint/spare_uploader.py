"""The uploader that a rank forks before it has threads, and hands its work later.

A rank that a standby forked has imported what an uploader needs. Its fork takes a hundredth of a
second of a core, the imports of a new interpreter a third: eight ranks that start on two cores would
wait for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import IO, NoReturn

from ebbflow.core.process import die_with_parent
from ebbflow.training.checkpoint import uploader

_PR_SET_NAME = 15  # <linux/prctl.h>
_LONGEST_ORDER = 1 << 20
_MOST_DESCRIPTORS = 16
_LOOK_SECONDS = 0.005

_spare: SpareUploader | None = None


class SpareUploader:
    """Handle of the forked process, with the methods of `subprocess.Popen` that its client uses."""

    def __init__(self, pid: int, orders: socket.socket, commands: int, answers: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin: IO[str] = os.fdopen(commands, "w")
        self.stdout: IO[str] = os.fdopen(answers, "r")
        self._orders = orders
        self._reaping = threading.Lock()  # two threads may see the end at once

    def begin(self, arguments: Sequence[str], buffers: Sequence[int]) -> bool:
        """Send its arguments, this process's environment and the staging buffers.

        Return False if it has ended.
        """
        order = {"arguments": list(arguments), "environment": dict(os.environ)}
        try:
            with self._orders:
                socket.send_fds(self._orders, [json.dumps(order).encode()], list(buffers))
        except OSError:
            self.kill()
            return False
        return True

    def poll(self) -> int | None:
        with self._reaping:
            if self.returncode is not None:
                return self.returncode
            try:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the user's code has waited for any child
                self.returncode = 0
            else:
                if ended:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        began = time.monotonic()
        while True:
            code = self.poll()
            if code is not None:
                return code
            if timeout is not None and time.monotonic() - began > timeout:
                raise subprocess.TimeoutExpired(f"uploader {self.pid}", timeout)
            time.sleep(_LOOK_SECONDS)

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def fork_spare_uploader() -> None:
    """Fork the uploader of this rank, which waits for its work.

    Call it in the main thread, before the rank has other threads or opens a device. Without memory
    or descriptors for it there is none, and the rank starts a program instead.
    """
    global _spare
    with contextlib.suppress(OSError), contextlib.ExitStack() as its_ends:
        orders, its_orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        its_ends.callback(its_orders.close)
        its_commands, commands = os.pipe()
        its_ends.callback(os.close, its_commands)
        answers, its_answers = os.pipe()
        its_ends.callback(os.close, its_answers)
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            orders.close()
            os.close(commands)
            os.close(answers)
            _run(own_pid, its_orders, its_commands, its_answers)
        _spare = SpareUploader(pid, orders, commands, answers)


def take_spare_uploader(arguments: Sequence[str], buffers: Sequence[int]) -> SpareUploader | None:
    """Start the forked uploader and return it. Return None if there is none left that lives."""
    global _spare
    spare = _spare
    _spare = None
    if spare is None or spare.poll() is not None or not spare.begin(arguments, buffers):
        return None
    return spare


def _run(parent_pid: int, orders: socket.socket, commands: int, answers: int) -> NoReturn:
    """Await the order, then upload. The process ends here: the code of the rank must not run in it."""
    code = 1
    try:
        die_with_parent(parent_pid)
        # As in `uploader.main`, which runs only after the order
        for number in uploader.IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(commands, 0)
        os.dup2(answers, 1)
        os.close(commands)
        os.close(answers)
        if sys.platform.startswith("linux"):
            ctypes.CDLL(None).prctl(_PR_SET_NAME, b"uploader", 0, 0, 0)
        with orders:
            text, buffers, _, _ = socket.recv_fds(orders, _LONGEST_ORDER, _MOST_DESCRIPTORS)
        if not text:  # the rank has ended
            os._exit(0)
        order = json.loads(text)
        os.environ.clear()
        os.environ.update(order["environment"])
        gc.enable()
        code = uploader.main([*order["arguments"], *map(str, buffers)])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
