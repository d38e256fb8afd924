"""What a user sees of a gang while it runs: rank 0's lines, and the last words of a rank that failed."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ebbflow.infra.program import REPLACE_UNPRINTABLE, own_command
from ebbflow.infra.rank_logs import split_lines, visible
from ebbflow.training.launch.watch.dump import WorkerFailure
from ebbflow.training.launch.workers import Worker, WorkerGroup

_TRACEBACK = "Traceback (most recent call last)"
METRICS_PREFIX = "metrics: "
_PROGRESS_PREFIX = "step "
_LAST_LINES = 15
_LAST_BYTES = 64 * 1024
_BYTES_PER_LOOK = 1024 * 1024
_LONGEST_PAUSED_TEXT = 1024 * 1024  # characters
_WRITE_SECONDS = 1.0
_FLUSH_SECONDS = 5.0
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
    place = f"--rank {worker.rank} --generation {generation} --around step:{worker.beat.step}"
    return f"{own_command()} logs {shlex.quote(job)} {place}"


class OwnOutput:
    """Writes to this process's output in a thread: a reader that pauses (Ctrl-S, a full pipe) does not stop an agent.

    A caller waits until its text is written, but at most 1 s for each pause. 1 MiB of text is kept for the time after
    it; further lines are dropped and counted.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[Any, str, threading.Event]] = SimpleQueue()
        self._guard = threading.RLock()  # the handler of a signal may interrupt its holder
        self._thread: threading.Thread | None = None
        self._kept = self._dropped = 0  # characters, lines
        self._paused = False

    def write(self, text: str) -> None:
        if not text:
            return
        with self._guard:
            if self._kept and self._kept + len(text) > _LONGEST_PAUSED_TEXT:
                self._dropped += text.count("\n")
                return
            written = self._enqueue(text)
        if not self._paused and not written.wait(_WRITE_SECONDS):
            self._paused = True

    def flush(self, seconds: float) -> bool:
        """Whether all that was kept is written within the time."""
        with self._guard:
            if self._thread is None:
                return True
            written = self._enqueue("")
        return written.wait(seconds)

    def _enqueue(self, text: str) -> threading.Event:
        if self._dropped:
            note = f"{self._dropped} lines were dropped while this output took none; ebbflow logs shows them\n"
            text, self._dropped = note + text, 0
        self._kept += len(text)
        written = threading.Event()
        self._waiting.put((sys.stdout, text, written))
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="own output", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: the next text tries again
                self._thread.start()
        return written

    def _run(self) -> None:
        while True:
            output, text, written = self._waiting.get()
            with contextlib.suppress(Exception):  # a strict terminal, a full disk, a pipe that is closed
                _write_to(output, text)
            written.set()
            with self._guard:
                self._kept -= len(text)
                self._paused = self._paused and not self._waiting.empty()


def _write_to(output: Any, text: str) -> None:
    """Characters that the output's encoding lacks are written as similar ASCII or as escapes."""
    encoding = getattr(output, "encoding", None) or "utf-8"
    data = text.encode(encoding, REPLACE_UNPRINTABLE)
    try:
        descriptor = output.fileno()
    except (AttributeError, OSError, ValueError):  # an output in memory
        descriptor = None
    if descriptor != 1:
        output.write(data.decode(encoding))
        output.flush()
        return
    output.flush()
    while data:  # not by the stream, whose lock would be held during a pause: this process could not exit
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # a descriptor that another process has set to O_NONBLOCK
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


_OWN_OUTPUT = OwnOutput()


def say(text: str) -> None:
    write(text + "\n")


def write(text: str) -> None:
    """Write to this process's output. No state of it raises, or stops an agent."""
    _OWN_OUTPUT.write(text)


def flush(seconds: float = _FLUSH_SECONDS) -> None:
    """Wait until what was said is written, at most `seconds`: a paused reader may never go on."""
    _OWN_OUTPUT.flush(seconds)
