"""Processes that start at once: forked from one, per process of tests, that has imported torch and
the engine.

Importing them takes two seconds of CPU time, which most small gangs would spend per rank. What is
forked is a process of its own in all else: environment, output, command line and end. An agent's
standby starts ranks in the same way.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ebbflow.core.process import die_with_parent

_ROOT = Path(__file__).resolve().parents[2]
_IMPORTED = (
    "numpy.random",
    "torch.distributed.elastic.multiprocessing.errors",
    "ebbflow.training.worker",
    "ebbflow.workloads.language.language_model",
    "ebbflow.training.attach.entry",
    "torch.distributed.fsdp",
)


class WarmProcess:
    """What `subprocess.Popen` is to a child, of a process that another one has forked."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.started = threading.Event()
        self._ended = threading.Event()

    def told(self, answer: Mapping[str, int]) -> None:
        self.pid = answer["pid"]
        self.started.set()
        if "status" in answer:
            self.returncode = answer["status"]
            self._ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_warm(
    program: str,
    words: list[str],
    *,
    environment: Mapping[str, str],
    output: Path,
    libraries: tuple[str, ...] = (),
) -> WarmProcess:
    """Run a module in the project's folder, or a script (a path) in its own folder, with one
    thread.

    output: file to which it appends what it writes. libraries: modules that are imported before it
        is forked.
    """
    return _server(libraries).start(program, words, environment, output)


class _Server:
    """The process that forks. libraries: modules that it imports besides torch and the engine."""

    def __init__(self, libraries: tuple[str, ...]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tests.support.warm", str(os.getpid()), *libraries]
        self._process = subprocess.Popen(command, cwd=_ROOT, env=environment, **pipes)
        self._children: dict[int, WarmProcess] = {}
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self, program: str, words: list[str], environment: Mapping[str, str], output: Path
    ) -> WarmProcess:
        number = len(self._children)
        child = WarmProcess()
        self._children[number] = child
        request = {"number": number, "program": program, "words": words, "output": str(output)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**request, "environment": dict(environment)}) + "\n")
        self._process.stdin.flush()
        assert child.started.wait(120), f"{program} was not forked: {self._process.poll()}"
        return child

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._children[answer["number"]].told(answer)


_server = functools.cache(_Server)


def _answer(**told: int) -> None:
    os.write(1, json.dumps(told).encode() + b"\n")


def _serve(parent: int, libraries: list[str]) -> NoReturn:
    die_with_parent(parent)
    gc.disable()
    for name in (*_IMPORTED, *libraries):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        server = os.getpid()
        if os.fork() == 0:
            die_with_parent(server)
            _attend(json.loads(line))
    os._exit(0)


def _attend(request: dict[str, Any]) -> NoReturn:
    """Fork the process that was asked for, and tell how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    attendant = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent(attendant)
        _become(request)
    _answer(number=request["number"], pid=pid)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    _answer(number=request["number"], pid=pid, status=status)
    os._exit(0)


def _become(request: dict[str, Any]) -> NoReturn:
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    searched = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in searched if folder and folder not in sys.path]
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        from tests.mutants.contexts import adopt_context

        adopt_context(os.environ)
    program = request["program"]
    code = 1
    sys.argv = [program, *request["words"]]
    try:
        if program.endswith(".py"):
            os.chdir(Path(program).parent)
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        else:
            code = int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        # As the interpreter does before it runs what is registered for the exit
        sys.last_value = error
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
