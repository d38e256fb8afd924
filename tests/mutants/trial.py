"""The trial of mutants: each is written into a copy of the project, and the tests that run its line
are run there.

A trial process has imported what the tests import. For each mutant it forks a child that forgets
the project's own modules, imports them again from the copy, and runs the tests with pytest until
one fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.mutants.line_map import LineMap, copy_project
from tests.mutants.mutations import Mutant

_PR_SET_CHILD_SUBREAPER = 36
_OWN_PACKAGES = ("ebbflow", "tests", "benchmarks")
_FIRST_TESTS = 40  # the nearest tests run first, in a pytest of their own: most mutants end here
# A machine with other work may need this many times the recorded duration of the tests
_SLOWDOWN = 4.0
_START_SECONDS = 60.0
_CONTROL_SECONDS = 30.0


class Verdict(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    SURVIVED = "survived"
    NOT_RUN = "no test runs this line"


@dataclass(frozen=True)
class Result:
    """The verdict about one mutant.

    Attributes:
        mutant: The change.
        verdict: What became of it.
        detail: The test that failed, or how many tests passed.
        seconds: Duration of the trial.
    """

    mutant: Mutant
    verdict: Verdict
    detail: str
    seconds: float


def choose_tests(mutant: Mutant, known: LineMap, *, limit_seconds: float) -> list[str]:
    """Return the tests that run the mutant's line, the nearest and shortest first, up to a total
    duration.

    Code that runs at import has run in whichever test came first, so all tests that run its file
    are chosen.
    """
    covering = known.tests_of_file(mutant.path)
    tests = [test for test, lines in covering.items() if mutant.at_import or mutant.line in lines]
    # The first line of an expression may be none that is executed
    if not tests and "\n" in mutant.before:
        last = mutant.line + mutant.before.count("\n")
        tests = [
            test
            for test, lines in covering.items()
            if any(mutant.line <= line <= last for line in lines)
        ]

    def cost(test: str) -> float:
        return (0.05 + known.seconds[test]) * known.breadth(test)

    chosen: list[str] = []
    total = 0.0
    for test in sorted(
        tests, key=lambda test: (not test.startswith("tests/unit/"), cost(test), test)
    ):
        total += known.seconds[test]
        if total > limit_seconds and chosen:
            break
        chosen.append(test)
    return chosen


def serve_trials(pipe: Connection, root: Path, known: LineMap, limit_seconds: float) -> None:
    """Carry out the orders that come through a pipe, and answer each. None ends the process.

    A `Mutant` is answered with its `Result`, the name of a test with whether it passes on the
    unchanged project. An exception is the answer if the order could not be carried out.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder) / "project"
        copy_project(root, copy)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy)
        sys.path.insert(0, str(copy))
        _forget_own_modules()
        _import_libraries_of_tests()
        while (order := pipe.recv()) is not None:
            try:
                if isinstance(order, Mutant):
                    pipe.send(_try_mutant(order, copy, known, limit_seconds))
                else:
                    pipe.send(_passes_unchanged(order))
            except Exception as error:
                pipe.send(error)


def _import_libraries_of_tests() -> None:
    """Import the libraries that the unit tests import, so that forks of this process have them.

    A child finds out which: collecting tests also starts threads, which do not survive a fork.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        before = set(sys.modules)
        _run_pytest(["--collect-only", "tests/unit"])
        with os.fdopen(writer, "w") as stream:
            stream.write("\n".join(sorted(sys.modules.keys() - before)))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        names = stream.read().split("\n")
    os.waitpid(child, 0)
    with contextlib.redirect_stderr(io.StringIO()):
        for name in names:
            if name.partition(".")[0] not in _OWN_PACKAGES:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)


def _passes_unchanged(test: str) -> bool:
    return _run_in_child([test], LineMap(seconds={test: _CONTROL_SECONDS})) is None


def _try_mutant(mutant: Mutant, copy: Path, known: LineMap, limit_seconds: float) -> Result:
    began = time.monotonic()
    tests = choose_tests(mutant, known, limit_seconds=limit_seconds)
    if not tests:
        return Result(mutant, Verdict.NOT_RUN, "", 0.0)
    file = copy / mutant.path
    source = file.read_bytes()
    file.write_bytes(mutant.apply(source))
    try:
        failed = _first_failure(tests, known)
    finally:
        file.write_bytes(source)
        # Compiled code is chosen by time and size of the source, which may be the same for two
        # mutants.
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*.pyc"):
            compiled.unlink()
    seconds = time.monotonic() - began
    if failed is None:
        return Result(mutant, Verdict.SURVIVED, f"{len(tests)} tests passed", seconds)
    return Result(mutant, Verdict.KILLED, failed, seconds)


def _first_failure(tests: list[str], known: LineMap) -> str | None:
    remaining = tests
    size = _FIRST_TESTS
    while remaining:
        batch = remaining[:size]
        remaining = remaining[size:]
        size = len(tests)
        failed = _run_in_child(batch, known)
        if failed is None:
            continue
        # Tests of real processes can fail on a busy machine: such a failure counts if it happens
        # twice.
        if (
            failed.startswith("tests/unit/")
            or failed not in tests
            or _run_in_child([failed], known) is not None
        ):
            return failed
        remaining = batch[batch.index(failed) + 1 :] + remaining
    return None


def _run_in_child(tests: list[str], known: LineMap) -> str | None:
    """Run tests in a fork of this process.

    Returns:
        The test that failed first, "timeout" if they took too long, "start-up" if pytest itself
        failed, else None.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _be_child(tests, writer)
    os.close(writer)
    deadline = (
        time.monotonic() + _START_SECONDS + _SLOWDOWN * sum(known.seconds[test] for test in tests)
    )
    status = _wait_until(child, deadline)
    _end_descendants()
    with os.fdopen(reader, errors="replace") as stream:
        failed = stream.read()
    if status is None:
        return "timeout"
    if status == pytest.ExitCode.OK:
        return None
    return failed or "start-up"


def _be_child(tests: list[str], writer: int) -> None:
    # A mutant may send signals to the parent of its process, which must not be the trial process.
    os.setsid()
    tests_process = os.fork()
    if tests_process:
        os.close(writer)
        _, status = os.waitpid(tests_process, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    code = 1
    try:
        _forget_own_modules()
        recorder = _FailureRecorder(writer)
        code = _run_pytest(["-x", *tests], recorder)
    finally:
        os._exit(code)


class _FailureRecorder:
    """A pytest plugin that writes the name of the first test that failed into a pipe."""

    def __init__(self, writer: int) -> None:
        self._writer = writer
        self._wrote = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._wrote:
            self._wrote = True
            os.write(self._writer, report.nodeid.encode())


def _run_pytest(words: list[str], plugin: object | None = None) -> int:
    if plugin is None:
        plugins = []
    else:
        plugins = [plugin]
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(
            pytest.main(
                ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *words], plugins=plugins
            )
        )


def _forget_own_modules() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in _OWN_PACKAGES and not name.startswith("tests.mutants"):
            del sys.modules[name]


def _wait_until(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _end_descendants() -> None:
    """Kill what the tests left behind: it became a child of this process, whatever its session."""
    while True:
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not children:
            return
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(int(pid), 0)
