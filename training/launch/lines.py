"""Each rank's raw log as JSON lines: what it printed, when, and at which step. Written by the agent, which outlives it.

The rank writes its raw log itself, so that nothing it says depends on an agent. The agent follows that file and puts
one record per line beside it, in `rank-N.jsonl`; if it is killed, `infra.rank_logs` reads the rest from the raw log.

Both files have a size limit (`survival.rank_log_mib`). Of a raw log that exceeds it, the agent frees the middle with
fallocate(2), FALLOC_FL_PUNCH_HOLE: the rank writes on undisturbed, and the byte offsets in the records stay valid.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from ebbflow.infra.rank_logs import LogLine, split_lines, utc_text
from ebbflow.training.launch.watch.heartbeat import Beat
from ebbflow.training.launch.workers import Worker, WorkerGroup

TAIL_BYTES = 1024 * 1024
_TAIL_SHARE = 8  # at most this part of the limit is the tail
_BYTES_PER_LOOK = 256 * 1024
_BLOCK_BYTES = 4096  # file systems free whole blocks
# A record is longer than its line, by about 150 bytes: the records of a log may take this many times its limit.
_RECORDS_FACTOR = 4
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

Pass = Callable[[int, list[bytes]], None]


class RankLog:
    """Follows one raw log.

    limit_bytes: of raw log that is kept, on disk and as records: the first part, and the last `tail_bytes` (None: an
    eighth, at most 1 MiB). Between two calls of `free_middle` a raw log can exceed it.
    """

    def __init__(
        self,
        raw: Path,
        *,
        job: str,
        generation: int,
        node: int,
        rank: int,
        limit_bytes: int,
        tail_bytes: int | None = None,
    ) -> None:
        self._raw, self._records = raw, raw.with_suffix(".jsonl")
        self._job, self._generation, self._node, self._rank = job, generation, node, rank
        self._tail = min(TAIL_BYTES, limit_bytes // _TAIL_SHARE) if tail_bytes is None else tail_bytes
        self._head = limit_bytes - 2 * self._tail  # the tail grows to twice its size before its first half is freed
        self._records_left = _RECORDS_FACTOR * self._head
        self._read = 0
        self._freed = -(-self._head // _BLOCK_BYTES) * _BLOCK_BYTES  # the hole's end; it begins here
        self._full = False  # the head has its records
        self._torn = False  # the last write failed, perhaps in mid-line

    def follow(self, beat: Beat) -> list[bytes]:
        """The records of the whole lines that have come since the last look; they are in the file by then."""
        room = min(_BYTES_PER_LOOK, self._head - self._read, self._left())
        return self._take(room, beat, at_end=False) if room > 0 and not self._full else []

    def finish(self, beat: Beat) -> list[bytes]:
        """The records of all that is left, once the rank has ended."""
        records: list[bytes] = []
        while (left := self._left()) > 0 and (room := min(_BYTES_PER_LOOK, self._head - self._read)) > 0:
            found = [] if self._full else self._take(room, beat, at_end=room >= left)
            if not found:
                break
            records += found
        if self._left() > 0:
            records += self._take_tail(beat)
        return records

    def free_middle(self) -> None:
        """Give the disk back what lies between head and tail. Raises OSError where the file system cannot."""
        end = (self._raw.stat().st_size - self._tail) // _BLOCK_BYTES * _BLOCK_BYTES
        if end - self._freed < max(self._tail, _BLOCK_BYTES):
            return
        descriptor = os.open(self._raw, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            punch_hole(descriptor, self._freed, end - self._freed)
        finally:
            os.close(descriptor)
        self._freed = end

    def _left(self) -> int:
        return self._raw.stat().st_size - self._read

    def _take(self, size: int, beat: Beat, *, at_end: bool) -> list[bytes]:
        with open(self._raw, "rb") as log:
            log.seek(self._read)
            pieces = split_lines(log.read(size), at_end=at_end)
        now, at, records, room, full = time.time(), self._read, [], self._records_left, False
        for piece, more in pieces:
            text = piece.removesuffix(b"\n").decode(errors="replace")
            record = self._record(now, beat, text, start=at, end=at + len(piece), more=more)
            if full := len(record) >= room:
                break
            room -= len(record) + 1
            records.append(record)
            at += len(piece)
        self._append(records)
        self._read, self._records_left, self._full = at, room, full  # not before: a failed write is tried again
        return records

    def _take_tail(self, beat: Beat) -> list[bytes]:
        """The records of the last lines, after one that says how much lies between."""
        begin = end = max(self._read, self._raw.stat().st_size - self._tail)
        with open(self._raw, "rb") as log:
            log.seek(begin)
            pieces = split_lines(log.read(self._tail), at_end=True)
        now, kept, room = time.time(), [], _RECORDS_FACTOR * self._tail
        end = at = begin + sum(len(piece) for piece, _ in pieces)
        for piece, more in reversed(pieces):
            text = piece.removesuffix(b"\n").decode(errors="replace")
            record = self._record(now, beat, text, start=at - len(piece), end=at, more=more)
            if kept and len(record) >= room:
                break
            room -= len(record) + 1
            kept.append(record)
            at -= len(piece)
        if at > self._read:
            text = (
                f"[{at - self._read} bytes are left out here: the rank printed more than survival.rank_log_mib keeps]"
            )
            kept.append(self._record(now, beat, text, start=self._read, end=self._read, dropped=at - self._read))
        self._append(kept[::-1])
        self._read = end
        return kept[::-1]

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
        self,
        group: WorkerGroup,
        *,
        job: str,
        generation: int,
        node: int,
        limit_bytes: int,
        pass_on: Pass,
        say: Callable,
    ) -> None:
        place = {"job": job, "generation": generation, "node": node, "limit_bytes": limit_bytes}
        self._logs: list[tuple[Worker, RankLog]] = [
            (worker, RankLog(worker.log_path, rank=worker.rank, **place)) for worker in group.workers
        ]
        self._pass_on, self._say = pass_on, say
        self._failed = self._unlimited = False

    def follow(self) -> None:
        self._each(RankLog.follow)

    def finish(self) -> None:
        self._each(RankLog.finish)

    def _each(self, look: Callable[[RankLog, Beat], list[bytes]]) -> None:
        for worker, log in self._logs:
            self._limit(log)
            try:
                records = look(log, worker.beat)
            except OSError as error:
                if not self._failed:
                    self._say(f"logs: WARNING: no JSON lines of rank {worker.rank}, its raw log stands: {error}")
                self._failed = True
                continue
            if records:
                self._pass_on(worker.rank, records)

    def _limit(self, log: RankLog) -> None:
        """Where a log's middle cannot be freed, it is said once, and the raw logs grow as the ranks print."""
        if self._unlimited:
            return
        try:
            log.free_middle()
        except FileNotFoundError:  # the rank has removed its own log
            return
        except OSError as error:
            self._say(f"logs: WARNING: raw logs exceed survival.rank_log_mib, their middle cannot be freed: {error}")
            self._unlimited = True


def punch_hole(descriptor: int, start: int, size: int) -> None:
    """Free a part of a file; it reads as zeros from then on. Raises OSError, EOPNOTSUPP where there is no such call."""
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
