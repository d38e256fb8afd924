"""Where a rank stands, from outside: py-spy where tracing is allowed, else faulthandler, asked by a signal.

py-spy with --nonblocking reads the memory of the process and so works on one that is stopped, or whose GIL is held.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ebbflow.infra.program import PACKAGE_ROOT

DUMP_SIGNAL = signal.SIGRTMIN + 3  # nobody else's: SIGUSR1 and 2 belong to schedulers and to users
_SPY_SECONDS = 3.0
_ANSWER_SECONDS = 1.0
_LAST_BYTES = 65536
_MAIN = "MainThread"
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)', re.MULTILINE)
_WAITING_FILES = ("training/gang.py", "training/pulse.py", "training/wire.py")
_EXCHANGE_FILES = ("training/gang.py", "training/wire.py")
# There, who called it is where a rank stands.
_EXCHANGE = ("gather", "gather_numbers", "_tell", "_hear", "_read", "_lost")
_ENGINE_PLACES = (*_WAITING_FILES, "training/assembly.py", "training/guards/", "training/trainer.py")
_WAITING_FUNCTIONS = (
    "exchange_pulse",
)  # where the host of a GPU waits for its stream, and so for the collectives on it
_NOT_WAITING = ("/torch/distributed/checkpoint/", "/torch/distributed/elastic/")
# The kernel ends what is run by this (its path and arguments follow) with the thread that waits for it.
_WITH_ME = (
    *(sys.executable, "-I", "-S", "-c"),
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])",
)


def in_engine(where: str) -> bool:
    """Whether a place, as `Stack.where` has it, is the engine's own collective, to which all ranks come."""
    return where.startswith(_ENGINE_PLACES)


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    name: str

    @property
    def ours(self) -> bool:
        """Of the project or of the user, and not of a library, the interpreter's included."""
        parts = ("site-packages", "dist-packages", "/lib/python3")
        return not self.file.startswith("<") and not any(part in self.file for part in parts)

    @property
    def exchange(self) -> bool:
        """How rows of numbers go from rank to rank, whoever has called for it."""
        return self.file.endswith(_EXCHANGE_FILES) and self.name.endswith(_EXCHANGE)

    @property
    def collective(self) -> bool:
        """It waits for other ranks, or for what they do together."""
        if "/torch/distributed/" in self.file:
            return not any(part in self.file for part in _NOT_WAITING)
        return (
            self.file.endswith(_WAITING_FILES)
            or self.name.endswith(_WAITING_FUNCTIONS)
            or "/torch/nn/parallel/distributed.py" in self.file
        )

    def __str__(self) -> str:
        path, real = Path(self.file), Path(self.file).resolve()
        if real.is_relative_to(PACKAGE_ROOT):
            return f"{real.relative_to(PACKAGE_ROOT)}:{self.line} in {self.name}"
        return f"{'/'.join(path.parts[-2:]).lstrip('/')}:{self.line} in {self.name}"


@dataclass(frozen=True)
class Stack:
    """The main thread's frames, innermost first, and the text of all threads. idle: it used no processor."""

    frames: Sequence[Frame]
    text: str
    idle: bool = False

    @property
    def where(self) -> str:
        """The innermost frame of ours that is no mere exchange of rows; without one, the innermost."""
        ours = [frame for frame in self.frames if frame.ours and not frame.exchange]
        return next((str(frame) for frame in [*ours, *self.frames]), "")

    @property
    def reason(self) -> str:
        """What a C++ exception that nobody caught said of itself."""
        found = re.search(r"^  what\(\):\s*(.*)", self.text, re.MULTILINE)
        return found[1][:300] if found else ""

    @property
    def waiting(self) -> bool:
        """That what it does at the innermost frame of ours is to wait for other ranks.

        A CPU's backward runs collectives below one frame of torch: there an idle thread waits.
        """
        for frame in self.frames:
            if frame.collective or (self.idle and frame.name.endswith("_engine_run_backward")):
                return True
            if frame.ours:
                return False
        return False


def take_stack(pid: int, answer: Path | None) -> Stack | None:
    """A rank's stack, within 4 s. answer: the file that its faulthandler writes to. None when neither way is open."""
    return _spy(pid) or (_ask(pid, answer) if answer else None)


def parse_spy(text: str) -> Stack:
    """What `py-spy dump --json` printed."""
    threads = json.loads(text)
    main = next((thread for thread in threads if thread["thread_name"] == _MAIN), threads[-1])
    return Stack(_spy_frames(main), "\n\n".join(map(_describe, threads)), idle=not main["active"])


def parse_faulthandler(text: str) -> Stack:
    """What faulthandler wrote: the thread that took the signal, the main one as a rule, is called the current one. A
    thread of C++ has no frames to show; then it is the last one, which is the oldest."""
    blocks = re.split(r"^(?=Thread |Current thread )", text, flags=re.MULTILINE)
    stacks = [(block.startswith("Current"), _frames(block)) for block in blocks]
    told = [(current, frames) for current, frames in stacks if frames]
    frames = next((frames for current, frames in told if current), told[-1][1] if told else [])
    return Stack(frames, text, idle=True)


def last_words(log: Path) -> Stack | None:
    """Where a rank was when a signal such as SIGSEGV or SIGABRT ended it. torch's @record turns faulthandler on, which
    writes to the rank's log then."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    before, fatal, after = text.rpartition("Fatal Python error")
    stack = parse_faulthandler(after)
    return Stack(stack.frames, before[-2000:] + fatal + after, idle=True) if fatal else None


def parse_traceback(text: str) -> str:
    """The innermost place of ours in an exception's traceback, as `Stack.where`; "" without one."""
    lines = re.findall(r'  File "(.*)", line (\d+), in (.*)', text)
    frames = [Frame(file, int(line), name) for file, line, name in reversed(lines)]
    return Stack(frames, text).where


def _spy(pid: int) -> Stack | None:
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [*_WITH_ME, program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_SPY_SECONDS,
        )
        return parse_spy(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, IndexError):
        return None


def _ask(pid: int, answer: Path) -> Stack | None:
    """The signal would end a process that has no handler for it, so the kernel is asked first."""
    if not _handles(pid, DUMP_SIGNAL):
        return None
    try:
        before, text = answer.stat().st_size, ""
        os.kill(pid, DUMP_SIGNAL)
        limit = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < limit:
            time.sleep(0.05)
            with open(answer) as file:
                file.seek(before)
                newer = file.read()
            if newer and newer == text:
                return parse_faulthandler(newer)
            text = newer
    except OSError:
        return None
    return None


def _handles(pid: int, number: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    except (OSError, StopIteration, ValueError):
        return False


def _frames(text: str) -> list[Frame]:
    return [Frame(found["file"], int(found["line"]), found["name"]) for found in _FRAME.finditer(text)]


def _spy_frames(thread: dict) -> list[Frame]:
    return [Frame(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"]]


def _describe(thread: dict) -> str:
    state = "active" if thread["active"] else "idle"
    lines = [f"  {frame.file}:{frame.line} in {frame.name}" for frame in _spy_frames(thread)]
    return "\n".join(
        [f"thread {thread['thread_name']} ({state}{', holds the GIL' if thread['owns_gil'] else ''})", *lines]
    )
