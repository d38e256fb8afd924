"""Each rank's raw log as JSON lines: what it printed, when, and at which step. Written by the agent, which outlives it.

The rank writes its raw log itself, so that nothing it says depends on an agent. The agent follows that file and puts
one record per line beside it, in `rank-N.jsonl`; should it be killed, `infra.logs` reads the rest from the raw log.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from infra.logs.line import LogLine, split_lines, utc_text
from training.launch.watch.heartbeat import Beat
from training.launch.workers import Worker, WorkerGroup

# A rank that prints without end must not fill the disk twice, nor hold up the watching.
RANK_LIMIT_BYTES = 64 * 1024 * 1024
TAIL_BYTES = 1024 * 1024
_BYTES_PER_LOOK = 256 * 1024

Pass = Callable[[int, list[bytes]], None]


class RankLog:
    """Follows one raw log. limit_bytes: of raw log that get records; after that only the last `tail_bytes` do."""

    def __init__(
        self,
        raw: Path,
        *,
        job: str,
        generation: int,
        node: int,
        rank: int,
        limit_bytes: int = RANK_LIMIT_BYTES,
        tail_bytes: int = TAIL_BYTES,
    ) -> None:
        self._raw, self._records = raw, raw.with_suffix(".jsonl")
        self._job, self._generation, self._node, self._rank = job, generation, node, rank
        self._limit, self._tail = limit_bytes, tail_bytes
        self._read = 0
        self._torn = False  # the last write failed, perhaps in mid-line

    def follow(self, beat: Beat) -> list[bytes]:
        """The records of the whole lines that have come since the last look; they are in the file by then."""
        room = min(_BYTES_PER_LOOK, self._limit - self._read, self._left())
        return self._take(room, beat, at_end=False) if room > 0 else []

    def finish(self, beat: Beat) -> list[bytes]:
        """The records of all that is left, once the rank has ended."""
        records: list[bytes] = []
        while (left := self._left()) > 0 and (room := min(_BYTES_PER_LOOK, self._limit - self._read)) > 0:
            found = self._take(room, beat, at_end=room >= left)
            if not found:
                break
            records += found
        if self._left() > 0:
            records += self._skip_to_tail(beat)
            records += self._take(self._left(), beat, at_end=True)
        return records

    def _left(self) -> int:
        return self._raw.stat().st_size - self._read

    def _take(self, size: int, beat: Beat, *, at_end: bool) -> list[bytes]:
        with open(self._raw, "rb") as log:
            log.seek(self._read)
            pieces = split_lines(log.read(size), at_end=at_end)
        now, at, records = time.time(), self._read, []
        for piece, more in pieces:
            text = piece.removesuffix(b"\n").decode(errors="replace")
            records.append(self._record(now, beat, text, start=at, end=at + len(piece), more=more))
            at += len(piece)
        self._append(records)
        self._read = at  # not before: what could not be written is tried again
        return records

    def _skip_to_tail(self, beat: Beat) -> list[bytes]:
        skipped = max(0, self._left() - self._tail)
        if not skipped:
            return []
        text = f"[{skipped} bytes are left out here: the rank printed too much; they stand in {self._raw.name}]"
        record = self._record(time.time(), beat, text, start=self._read, end=self._read, dropped=skipped)
        self._append([record])
        self._read += skipped
        return [record]

    def _record(self, now: float, beat: Beat, text: str, **place: int) -> bytes:
        line = LogLine(
            t=utc_text(now),
            job=self._job,
            generation=self._generation,
            node=self._node,
            rank=self._rank,
            step=beat.step,
            phase=beat.phase,
            text=text,
            **place,
        )
        return line.to_json().encode()

    def _append(self, records: list[bytes]) -> None:
        """In one write where the system lets it be one, so that a crash of this process tears the last line at most."""
        if not records:
            return
        data = memoryview((b"\n" if self._torn else b"") + b"\n".join(records) + b"\n")
        self._torn = True
        descriptor = os.open(self._records, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        finally:
            os.close(descriptor)
        self._torn = False


class GangLines:
    """All ranks of a node. pass_on: told each rank's new records, for whoever carries them away.

    A disk that is full costs the records, never the training: it is said once, and tried again with the next look.
    """

    def __init__(
        self, group: WorkerGroup, *, job: str, generation: int, node: int, pass_on: Pass, say: Callable
    ) -> None:
        self._logs: list[tuple[Worker, RankLog]] = [
            (worker, RankLog(worker.log_path, job=job, generation=generation, node=node, rank=worker.rank))
            for worker in group.workers
        ]
        self._pass_on, self._say = pass_on, say
        self._failed = False

    def follow(self) -> None:
        self._each(RankLog.follow)

    def finish(self) -> None:
        self._each(RankLog.finish)

    def _each(self, look: Callable[[RankLog, Beat], list[bytes]]) -> None:
        for worker, log in self._logs:
            try:
                records = look(log, worker.beat)
            except OSError as error:
                if not self._failed:
                    self._say(f"logs: WARNING: no JSON lines of rank {worker.rank}, its raw log stands: {error}")
                self._failed = True
                continue
            if records:
                self._pass_on(worker.rank, records)
