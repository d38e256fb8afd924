"""The in-flight save of a rank, and the client through which the trainer uses the rank's uploader
process.

A rank has at most one save in flight. The trainer hands it to the uploader, reads the uploader's
answers without blocking, and decides what to do after a failure.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.core.errors import StoreFull
from ebbflow.core.events import COMMIT, COMMIT_FAILED
from ebbflow.core.process import OwnProgram, describe_exit, own_program_line
from ebbflow.core.program import python_path
from ebbflow.core.remarks import remark
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import CheckpointId
from ebbflow.training.checkpoint.upload_messages import (
    CommittedAnswer,
    SaveName,
    UploadAnswer,
    UploadCommand,
    UploadedAnswer,
    UploadWork,
)
from ebbflow.training.checkpoint.verified_io import Deadline
from ebbflow.training.errors import CheckpointError, GenerationSuperseded, NoRoom

_KILLED_SECONDS = 2.0  # a process in a hanging write dies only when the write ends
_LOOK_SECONDS = 5.0
_NICENESS = 10  # of an uploader that no save waits for
_ANSWER_MARGIN_SECONDS = 2.0  # an uploader that is this late counts as stuck
_LONGEST_WAIT_SECONDS = 10.0  # shorter than the hang threshold of this wait
_FAILURES_IN_A_ROW = 2  # the first is only reported; the second in a row ends the gang
_NO_ROOM_HINT = (
    "free space or raise the quota, or use another store; then start again: the last commit is "
    "intact"
)


class UploaderClient:
    """Client of an uploader process. It starts a new process if the old one has died.

    The process inherits the file descriptors `buffers`, which are the staging buffers.
    """

    def __init__(self, store_uri: str, rank: int, buffers: list[int], *, start: bool) -> None:
        self._store_uri = store_uri
        self._rank = rank
        self._buffers = buffers
        self._answers: queue.SimpleQueue[UploadAnswer] = queue.SimpleQueue()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        if start:
            self.start()

    @property
    def pid(self) -> int | None:
        if self._process:
            return self._process.pid
        return None

    def start(self) -> None:
        """Start the process.

        Call this in a long-lived thread: the kernel kills the process when the thread ends.
        """
        arguments = [str(os.getpid()), str(self._rank), self._store_uri, *map(str, self._buffers)]
        self._process = subprocess.Popen(
            own_program_line(OwnProgram.UPLOADER, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=self._buffers,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
        # A separate thread writes the lines, because a write to a stopped process can block.
        self._lines = queue.SimpleQueue()
        threading.Thread(
            target=_write_lines, args=(self._process, self._lines), name="commands", daemon=True
        ).start()
        # Each process has its own queue, so late answers of a killed process are dropped.
        self._answers = queue.SimpleQueue()
        threading.Thread(
            target=_read_answers, args=(self._process, self._answers), daemon=True
        ).start()

    def start_ahead(self) -> None:
        """Start the process, unless it runs already, with lower priority than the ranks.

        No save waits for it yet, and its imports would slow down the steps: many uploaders start at
        once.
        """
        if self._process is None:
            self.start()
            if self.pid is not None:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, self.pid, os.nice(0) + _NICENESS)

    def running(self) -> int | None:
        """Return the uploader's process id, after restarting the uploader if it has died."""
        if self._process is None:
            self.start()
        elif self._process.poll() is not None:
            code = self._process.returncode
            self.start()
            remark(
                f"rank {self._rank}: its uploader process {describe_exit(code)}; another one uploads "
                "from now on"
            )
        return self.pid

    def tell(self, command: UploadCommand) -> None:
        """Send a command without checking that the process is alive; the command may be lost."""
        if self._process is not None:
            self._lines.put(json.dumps(command) + "\n")

    def ask(self, command: UploadCommand) -> None:
        """Send a command; restart the process first if it has died."""
        self.running()
        self.tell(command)

    def answer(self, timeout_seconds: float) -> UploadAnswer | None:
        """Wait for the uploader's next answer and return it.

        Return None if no answer arrives in time.
        """
        try:
            if timeout_seconds > 0:
                return self._answers.get(timeout=timeout_seconds)
            return self._answers.get_nowait()
        except queue.Empty:
            return None

    def give_up(self) -> None:
        """Kill the process. The next `ask` starts another one."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILLED_SECONDS)
            self._process = None

    def close(self, grace_seconds: float) -> None:
        """End the process, after giving it up to `grace_seconds` to finish earlier commands."""
        if self._process is None:
            return
        self.tell({"command": "finish"})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self.give_up()


class UploadCost(NamedTuple):
    """Totals over a rank's uploads: bytes, CPU seconds of the uploader, and seconds until the
    indexes were durable.
    """

    bytes: int
    cpu_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class InflightSave:
    """A save that the trainer has handed to the uploader."""

    save: CheckpointId
    began: float  # `time.monotonic()` when the save was requested
    deadline: Deadline
    size: int  # bytes of this rank's part
    stall_seconds: float  # time for which the save held up training

    @property
    def name(self) -> SaveName:
        return {
            "job": self.save.job,
            "generation": self.save.generation,
            "step": self.save.step,
            "world_size": self.save.world_size,
        }

    @property
    def left_seconds(self) -> float:
        """Seconds that the uploader has for the save, at least one."""
        return max(self.deadline.remaining_seconds, 1.0)


def _write_lines(process: subprocess.Popen[str], lines: queue.SimpleQueue[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError, ValueError):
        while process.poll() is None:
            with contextlib.suppress(queue.Empty):
                line = lines.get(timeout=_LOOK_SECONDS)
                process.stdin.write(line)
                process.stdin.flush()


def _read_answers(process: subprocess.Popen[str], answers: queue.SimpleQueue[UploadAnswer]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        answers.put(json.loads(line))
    answers.put({"event": "ended", "exit_code": process.wait()})


class SaveTracker:
    """Tracker of a rank's saves.

    It hands them to the uploader, at most one at a time, and records their outcomes.
    """

    def __init__(
        self,
        uploader: UploaderClient,
        rank: int,
        emit: Callable[..., object],
        waiting: Callable[[], Callable[[], None]],
    ) -> None:
        self.uploader = uploader
        self._waiting = waiting
        self._rank = rank
        self._emit = emit
        self._current: InflightSave | None = None
        self._seconds_per_byte: float | None = None
        self.durable: tuple[int, float] | None = None
        self._failures = 0
        self._superseded: str | None = None
        self._abandoned: int | None = None
        self._no_room = False
        self.last: InflightSave | None = None
        self.last_commit: CommitRef | None = None
        self.last_failure: str | None = None
        self.failed_step: int | None = None
        self.cost = UploadCost(0, 0.0, 0.0)

    @property
    def busy(self) -> bool:
        self.drain()
        return self._current is not None

    def expected_seconds(self, size: int) -> float | None:
        """Estimate the seconds until `size` more bytes would be durable, at the speed of the last
        durable save.

        Return None before the first durable save.
        """
        if self._seconds_per_byte is None:
            return None
        left = 0.0
        if self._current is not None:
            usual = self._current.size * self._seconds_per_byte
            left = max(usual - (time.monotonic() - self._current.began), 0.0)
        return left + size * self._seconds_per_byte

    def submit(self, flight: InflightSave, command: UploadWork) -> None:
        self.uploader.ask(command)
        self._current = self.last = flight

    def settle(self) -> None:
        """Wait until no save is in flight.

        At the save's deadline, kill the uploader and record the save as failed.
        """
        self.drain()
        least = time.monotonic() + 1.0
        while self._current is not None:
            deadline = self._current.deadline
            left = (
                max(deadline.remaining_seconds, least - time.monotonic()) + _ANSWER_MARGIN_SECONDS
            )
            # Again each time: many bytes may take longer than the hang threshold of the wait
            over = self._waiting()
            answered = self._take_answer(max(min(left, _LONGEST_WAIT_SECONDS), 0.0))
            over()
            if not answered and left <= _LONGEST_WAIT_SECONDS:
                self.uploader.give_up()
                seconds = deadline.seconds
                self._failed(
                    f"rank {self._rank}: its uploader gave no answer within {seconds:g} s and "
                    "was killed"
                )

    def abandon(self, step: int) -> None:
        """Limit the uploader's wait for the commit of `step` to 2 s, because another rank failed to
        save that step.
        """
        self.drain()
        if self._current is not None and self._current.save.step == step != self._abandoned:
            self._abandoned = step
            self.uploader.tell({"command": "abandon", "step": step})

    def drain(self) -> None:
        """Process the uploader's answers that have arrived, without waiting."""
        while self._take_answer(0):
            pass

    def raise_if_hopeless(self) -> None:
        """Raise an error if no further save is worthwhile.

        No save is worthwhile if a newer generation is running, the store is full, or the last two
        saves failed.
        """
        self._raise_if_permanent()
        if self._failures >= _FAILURES_IN_A_ROW:
            raise CheckpointError(
                f"{self._failures} saves in a row have failed, the last: {self.last_failure}"
            )

    def raise_if_lost(self) -> None:
        """Raise an error if the last save did not become a commit."""
        self._raise_if_permanent()
        if self.last_failure is not None:
            raise CheckpointError(self.last_failure)

    def _raise_if_permanent(self) -> None:
        if self._superseded is not None:
            raise GenerationSuperseded(self._superseded)
        # One failure suffices: retention has already deleted all it may, so the next save would
        # fail too.
        if self._no_room and self.last_failure is not None:
            raise NoRoom(f"{self.last_failure}; hint: {_NO_ROOM_HINT}")

    def _take_answer(self, timeout_seconds: float) -> bool:
        answer = self.uploader.answer(timeout_seconds)
        if answer is None:
            return False
        match answer["event"]:
            case "uploaded":
                self._on_uploaded(answer)
            case "committed":
                self._on_committed(answer)
            case "failed":
                self._no_room = answer["cause"] == StoreFull.__name__
                self._failed(answer["message"], answer["step"])
            case "superseded":
                self._superseded = answer["message"]
                self._warn(answer["message"])
            case "warning":
                self._warn(answer["message"])
            case "ended" if self._current is not None:
                self._failed(
                    f"rank {self._rank}: its uploader ended with exit code {answer['exit_code']}"
                )
        return True

    def _on_uploaded(self, answer: UploadedAnswer) -> None:
        """Record that this rank's part is durable.

        On rank 0 the save stays in flight until it is committed.
        """
        was = self.cost
        self.cost = UploadCost(
            was.bytes + answer["bytes"],
            was.cpu_seconds + answer["cpu_seconds"],
            was.seconds + answer["seconds"],
        )
        self._measure(answer["step"], answer["bytes"])
        if self._rank != 0:
            self._done(answer["step"])

    def _on_committed(self, answer: CommittedAnswer) -> None:
        ref = CommitRef.from_key(answer["key"])
        flight = self.last
        if flight is not None and flight.save.step == ref.step and self._rank == 0:
            self._measure(ref.step, flight.size)
            seconds = time.monotonic() - flight.began
            stall = {"stall_seconds": flight.stall_seconds}
            self._emit(
                COMMIT, step=ref.step, key=ref.key, bytes=answer["bytes"], seconds=seconds, **stall
            )
        self.last_commit = ref
        self._done(ref.step)

    def _measure(self, step: int, size: int) -> None:
        flight = self._current
        if flight is not None and flight.save.step == step and size > 0:
            seconds = time.monotonic() - flight.began
            self._seconds_per_byte = seconds / size
            self.durable = (step, seconds)

    def _done(self, step: int) -> None:
        self._failures = 0
        self.last_failure = None
        self.failed_step = None
        self._no_room = False
        if self._current is not None and self._current.save.step == step:
            self._current = None

    def _failed(self, message: str, step: int | None = None) -> None:
        """Record that the save of `step` failed. By default, this is the save in flight."""
        if self._current is not None:
            under_way = self._current.save.step
        else:
            under_way = None
        if step is None:
            step = under_way
        if step == under_way:  # not for the late failure of an earlier save
            self._current = None
        self._failures += 1
        self.last_failure = message
        self.failed_step = step
        self._warn(message)
        self._emit(COMMIT_FAILED, step=step, message=message)

    def _warn(self, message: str) -> None:
        print(f"checkpoint: WARNING: {message}", file=sys.stderr, flush=True)
