"""What a user sees of a gang while it runs: rank 0's lines, and the last words of a rank that failed."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from infra.logs.line import split_lines, visible
from infra.program import REPLACE_UNPRINTABLE
from training.launch.watch.dump import WorkerFailure
from training.launch.workers import PROJECT_ROOT, Worker, WorkerGroup

_TRACEBACK = "Traceback (most recent call last)"
METRICS_PREFIX = "metrics: "
_PROGRESS_PREFIX = "step "
_LAST_LINES = 15
_LAST_BYTES = 64 * 1024
_BYTES_PER_LOOK = 1024 * 1024
# A warning or note of torch's C++ code, such as "[W1122 20:53:08.732392175 WorkerServer.cpp:113] [c10d] Server …", and
# the stack that may follow it.
_NATIVE_NOTE = re.compile(r"(?:\[rank\d+\]:)?\[[WI]\d{4} \d\d:\d\d:\d\d\.\d+ [^\s\]]+:\d+\] ")
_NATIVE_STACK = re.compile(r"Exception raised from |frame #\d+: ")


class Echo:
    """Passes rank 0's whole lines on to this process's own output; on another node, where its metrics are to be had.

    Up to a traceback: whether that is the cause or only follows from it, the verdict will say. One that is only logged
    ends nothing, so that the lines of progress go on. Warnings of torch's C++ code stay in the raw log.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._path = group.workers[0].log_path
        own_output = group.workers[0].rank == 0
        self._before = ("",) if own_output else (METRICS_PREFIX,)
        self._after_traceback = (METRICS_PREFIX, _PROGRESS_PREFIX) if own_output else (METRICS_PREFIX,)
        self._passed = 0
        self._muted = False
        self._native = NativeNotes()

    def pass_on(self) -> None:
        try:
            with open(self._path, "rb") as log:
                log.seek(self._passed)
                data = log.read(_BYTES_PER_LOOK)
        except OSError:  # the rank has removed its own log
            return
        whole = b"".join(piece for piece, _ in split_lines(data, at_end=False))
        self._passed += len(whole)
        before, traceback, after = _without_hole(whole).decode(errors="replace").partition(_TRACEBACK)
        if self._muted:
            before, after = "", before + traceback + after
        self._muted = self._muted or bool(traceback)
        for text, prefixes in ((before, self._before), (after, self._after_traceback)):
            lines = text.removesuffix("\n").split("\n") if text else []
            lines = [line for line in lines if line.startswith(prefixes)]
            write("".join(f"{visible(line)}\n" for line in self._native.remove_from(lines)))


def _without_hole(data: bytes) -> bytes:
    """Without the zeros that stand where the middle of a log was freed."""
    return data.replace(b"\0", b"")


class NativeNotes:
    """Leaves warnings of torch's C++ code out of a log's lines, with the stacks that follow them; errors stay."""

    def __init__(self) -> None:
        self._inside = False

    def remove_from(self, lines: Sequence[str]) -> Iterator[str]:
        """The other lines. Call it with the log's next lines each time."""
        for line in lines:
            note = _NATIVE_NOTE.match(line) is not None
            self._inside = note or (self._inside and _NATIVE_STACK.match(line) is not None)
            if not self._inside:
                yield line


def show_last_lines(group: WorkerGroup, failures: Sequence[WorkerFailure], *, job: str, generation: int) -> None:
    """The first failing rank's last words, where all of them are, and the command that shows what stood around them.

    Who only followed a lost peer has nothing to tell; of the others' logs the path is enough.
    """
    workers = {worker.rank: worker for worker in group.workers}
    own = sorted((failure for failure in failures if not failure.cascade), key=lambda failure: failure.priority)
    if not own:
        return
    first = workers[own[0].rank]
    say(f"rank {first.rank} failed first on this node, its last lines ({first.log_path}):")
    for line in _last_lines(first.log_path):
        say(f"| {line}")
    for failure in own[1:]:
        say(f"rank {failure.rank} failed as well: {workers[failure.rank].log_path}")
    say(f"more: {_logs_command(job, generation, first)}")


def _last_lines(path: Path) -> list[str]:
    """From the end of the file: a log may be of any length."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - _LAST_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    lines = [line for line in text.split("\n") if line.strip()]
    lines = [*NativeNotes().remove_from(lines)] or lines  # rather a warning than nothing
    return [visible(line) for line in lines[-_LAST_LINES:]] or ["(it printed nothing)"]


def _logs_command(job: str, generation: int, worker: Worker) -> str:
    interpreter = Path(sys.executable)
    if interpreter.is_relative_to(PROJECT_ROOT):  # as a user in the project's folder types it
        interpreter = interpreter.relative_to(PROJECT_ROOT)
    place = f"--rank {worker.rank} --generation {generation} --around step:{worker.beat.step}"
    return f"{shlex.quote(str(interpreter))} -m infra logs {shlex.quote(job)} {place}"


def say(text: str) -> None:
    write(text + "\n")


def write(text: str) -> None:
    """Write to this process's output, which may be a strict terminal, a full disk or a pipe that is closed: none of
    them ends an agent. Characters that its encoding lacks are written as similar ASCII or as escapes."""
    output = sys.stdout
    with contextlib.suppress(OSError, ValueError, AttributeError):
        encoding = getattr(output, "encoding", None) or "utf-8"
        output.write(text.encode(encoding, REPLACE_UNPRINTABLE).decode(encoding))
        output.flush()
