"""Output of a node's ranks: on the terminal, as JSON lines on disk, and in the job's store.

A rank writes its output directly to a file (its raw log), so it can write even when the agent is
not running. The agent reads that file and writes one JSON record per line to `rank-N.jsonl` in the
same folder. If the agent is killed, `ebbflow.core.rank_logs` reads the remaining lines from the
raw log. A thread uploads the records in segments, unless the log folder is in the store.

Both files have a size limit (`survival.rank_log_mib`). If a raw log exceeds it, the agent frees the
disk space of the file's middle with fallocate(2), FALLOC_FL_PUNCH_HOLE. The rank can continue to
write meanwhile, and byte offsets in the records stay valid.
"""

import contextlib
import ctypes
import errno
import math
import os
import secrets
import select
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, TextIO

from ebbflow.core.layout import log_key
from ebbflow.core.program import REPLACE_UNPRINTABLE, own_command
from ebbflow.core.rank_logs import LogLine, NativeWarnings, escape_controls, split_lines, utc_text
from ebbflow.core.retry import backoff_pauses
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import printable
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.heartbeat import HeartbeatReading
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.launch.workers import WorkerGroup

_TRACEBACK = "Traceback (most recent call last)"
METRICS_PREFIX = "metrics: "
_PROGRESS_PREFIX = "step "
_LAST_LINES = 15
_LAST_BYTES = 64 * 1024
# An agent that reads logs answers no other agent: each look must take far less than a second, also
# if every line is empty.
_ECHO_BYTES_PER_LOOK = 128 * 1024
_ECHO_BACKLOG_BYTES = 8 * 1024 * 1024  # of more, only the newest lines are shown
_LONGEST_PAUSED_TEXT = 1024 * 1024  # characters
_WRITE_SECONDS = 1.0
_FLUSH_SECONDS = 5.0

TAIL_BYTES = 1024 * 1024
_TAIL_SHARE = 8  # the tail is at most the limit divided by this
_BYTES_PER_LOOK = 256 * 1024
_LINES_PER_LOOK = 1000
_TAIL_LINES = 8000
_CLOSE_RECORDS_SECONDS = 3.0  # for the ranks of a node together, before the tails
_BLOCK_BYTES = 4096  # file systems free whole blocks
_RECORDS_FACTOR = 4  # size limit of the records relative to the raw log: each adds about 150 bytes
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

_INTERVAL_SECONDS = 15.0  # between uploads; each is a paid request
_CLOSE_DEADLINE_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_QUEUE_BYTES = 8 * 1024 * 1024
_shown_failures: dict[str, int] = {}  # generation in which it was shown, by its fingerprint


class TerminalEcho:
    """Printer that copies new lines from the log of the node's first rank to the agent's output.

    It prints all lines of rank 0, and from other nodes only the line with the address of the
    metrics. From the first traceback on, it prints only rank 0's progress lines and lines with an
    address of metrics, because the traceback may not show the cause of the failure.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._path = group.workers[0].log_path
        own_output = group.workers[0].rank == 0
        if own_output:
            self._before = ("",)
        else:
            self._before = (METRICS_PREFIX,)
        if own_output:
            self._after_traceback = (METRICS_PREFIX, _PROGRESS_PREFIX)
        else:
            self._after_traceback = (METRICS_PREFIX,)
        self._passed = 0
        self._muted = False
        self._native = NativeWarnings()

    def echo_new_lines(self) -> None:
        try:
            with open(self._path, "rb") as log:
                skipped = self._skip_backlog(log)
                log.seek(self._passed)
                data = log.read(_ECHO_BYTES_PER_LOOK)
        except OSError:  # user code has removed the log
            return
        whole = b"".join(piece for piece, _ in split_lines(data, at_end=False))
        self._passed += len(whole)
        if skipped:
            _OWN_OUTPUT.write(f"[{skipped} bytes are not shown here: the rank prints too fast]\n")
        # The freed middle of a log file is read as NUL bytes.
        before, traceback, after = (
            whole.replace(b"\0", b"").decode(errors="replace").partition(_TRACEBACK)
        )
        if self._muted:
            after = before + traceback + after
            before = ""
        self._muted = self._muted or bool(traceback)
        for text, prefixes in ((before, self._before), (after, self._after_traceback)):
            if text:
                lines = text.removesuffix("\n").split("\n")
            else:
                lines = []
            lines = [line for line in lines if line.startswith(prefixes)]
            _OWN_OUTPUT.write(
                "".join(f"{escape_controls(line)}\n" for line in self._native.remove_from(lines))
            )

    def _skip_backlog(self, log: BinaryIO) -> int:
        """If too many bytes of the log are unread, skip all but the newest lines.

        Returns:
            The number of skipped bytes.
        """
        size = os.fstat(log.fileno()).st_size
        if size - self._passed <= _ECHO_BACKLOG_BYTES:
            return 0
        log.seek(size - _ECHO_BYTES_PER_LOOK)
        begin = size - _ECHO_BYTES_PER_LOOK + len(log.readline(_ECHO_BYTES_PER_LOOK))
        skipped = begin - self._passed
        self._passed = begin
        return skipped


class NonBlockingOutput:
    """Writer to this process's stdout, in a thread, so that a paused terminal or full pipe cannot
    block the agent.

    `write` waits until the text is written, but at most 1 s. After such a timeout, further calls
    return at once for as long as the output accepts no text. In that time, up to 1 MiB (2^20
    characters) of text is queued; further lines are dropped and counted.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[TextIO, str, threading.Event]] = SimpleQueue()
        self._guard = threading.RLock()  # reentrant: a signal handler may interrupt its holder
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
        with self._guard:
            if self._thread is None:
                return True
            written = self._enqueue("")
        return written.wait(seconds)

    def _enqueue(self, text: str) -> threading.Event:
        if self._dropped:
            note = (
                f"{self._dropped} lines were dropped while this output took none; ebbflow logs "
                "shows them\n"
            )
            text = note + text
            self._dropped = 0
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
            # A strict terminal, a full disk, a pipe that is closed
            with contextlib.suppress(Exception):
                _write_to(output, text)
            written.set()
            with self._guard:
                self._kept -= len(text)
                self._paused = self._paused and not self._waiting.empty()


class RankLog:
    """Raw log of one rank, and the file with its records.

    That file is at most about four times as large as the log.

    If the raw log exceeds `limit_bytes`, only its first part and its last part (the tail) remain.
    The tail has at most an eighth of the limit and at most 1 MiB. `place` has the fields job,
    generation, node and rank of all records.
    """

    def __init__(
        self, raw: Path, *, limit_bytes: int, tail_bytes: int | None = None, **place: Any
    ) -> None:
        self._raw = raw
        self._records = raw.with_suffix(".jsonl")
        self._place = place
        if tail_bytes is None:
            self._tail = min(TAIL_BYTES, limit_bytes // _TAIL_SHARE)
        else:
            self._tail = tail_bytes
        # The tail reaches twice its size before it is cut
        self._head = limit_bytes - 2 * self._tail
        self._records_left = _RECORDS_FACTOR * self._head
        self._read = 0
        # Start of the hole, then its end
        self._freed = -(-self._head // _BLOCK_BYTES) * _BLOCK_BYTES
        self._full = False  # the records of the head are complete
        self._torn = False  # the last write failed, perhaps within a line

    def follow(self, beat: HeartbeatReading) -> list[bytes]:
        """Write a record for each new complete line of the log, within the size limit, and return
        the records.
        """
        room = min(_BYTES_PER_LOOK, self._head - self._read, self._left())
        if room > 0 and not self._full:
            return self._take(room, beat, at_end=False)
        return []

    def finish(
        self,
        beat: HeartbeatReading,
        *,
        until: float = math.inf,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[bytes]:
        """Write records for all remaining lines, and return them.

        Call this when the rank has ended.

        Args:
            until: monotonic time after which only the tail gets records. The raw log keeps all.
            meanwhile: called about twice per second of work.
        """
        records: list[bytes] = []
        while time.monotonic() < until:
            meanwhile()
            left = self._left()
            room = min(_BYTES_PER_LOOK, self._head - self._read)
            if left <= 0 or room <= 0:
                break
            if self._full:
                found = []
            else:
                found = self._take(room, beat, at_end=room >= left)
            if not found:
                break
            records += found
        if self._left() > 0:
            meanwhile()
            records += self._take_tail(beat)
            meanwhile()
        return records

    def free_middle(self) -> None:
        """Free the disk blocks between the first part and the tail.

        Raises OSError if the file system cannot do it.
        """
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

    def _take(self, size: int, beat: HeartbeatReading, *, at_end: bool) -> list[bytes]:
        with open(self._raw, "rb") as log:
            log.seek(self._read)
            pieces = split_lines(log.read(size), at_end=at_end, most=_LINES_PER_LOOK)
        now = time.time()
        at = self._read
        records = []
        room = self._records_left
        full = False
        for piece, more in pieces:
            record = self._encode(now, beat, piece, start=at, end=at + len(piece), more=more)
            if full := len(record) >= room:
                break
            room -= len(record) + 1
            records.append(record)
            at += len(piece)
        self._append(records)
        # After the write, because a failed one is tried again
        self._read = at
        self._records_left = room
        self._full = full
        return records

    def _take_tail(self, beat: HeartbeatReading) -> list[bytes]:
        """Write records for the tail, and return them.

        If bytes were omitted, the first record has their number.
        """
        begin = max(self._read, self._raw.stat().st_size - self._tail)
        with open(self._raw, "rb") as log:
            log.seek(begin)
            data = log.read(self._tail)
        before, *newest = data.rsplit(b"\n", _TAIL_LINES)
        if len(newest) == _TAIL_LINES:  # perhaps there are more lines
            begin += len(before) + 1
            data = data[len(before) + 1 :]
        pieces = split_lines(data, at_end=True)
        now = time.time()
        kept = []
        room = _RECORDS_FACTOR * self._tail
        end = at = begin + sum(len(piece) for piece, _ in pieces)
        for piece, more in reversed(pieces):
            record = self._encode(now, beat, piece, start=at - len(piece), end=at, more=more)
            if kept and len(record) >= room:
                break
            room -= len(record) + 1
            kept.append(record)
            at -= len(piece)
        left_out = at - self._read
        if left_out > 0:
            if at <= self._head:  # its time was over, and its room was not
                why = "the rank printed faster than its agent reads; the raw log has them"
            else:
                why = "the rank printed more than survival.rank_log_mib keeps"
            text = f"[{left_out} bytes are left out here: {why}]"
            place = {"start": self._read, "end": self._read, "dropped": left_out}
            kept.append(self._encode(now, beat, text.encode(), **place))
        self._append(kept[::-1])
        self._read = end
        return kept[::-1]

    def _encode(self, now: float, beat: HeartbeatReading, piece: bytes, **place: Any) -> bytes:
        text = piece.removesuffix(b"\n").decode(errors="replace")
        line = LogLine(
            t=utc_text(now), step=beat.step, phase=beat.phase, text=text, **self._place, **place
        )
        return line.to_json().encode()

    def _append(self, records: list[bytes]) -> None:
        """Append records in one write if possible, so that a crash of this process truncates at
        most one record.
        """
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


class LogUploader:
    """Uploader of records to the job's store. It runs in a thread.

    Each upload writes a new object `logs/<generation>/<node>-<rank>-<segment>.jsonl`. While the
    store is unavailable, the uploader keeps up to `queue_bytes` of records in memory; it drops and
    counts further records.
    """

    def __init__(
        self,
        job_store: Store,
        *,
        generation: int,
        node: int,
        say: Callable[[str], object],
        interval_seconds: float = _INTERVAL_SECONDS,
        queue_bytes: int = _QUEUE_BYTES,
    ) -> None:
        self._store = job_store
        self._generation = generation
        self._node = node
        self._say = say
        self._interval_seconds = interval_seconds
        self._queue_limit = queue_bytes
        self._writer = secrets.token_hex(3)  # keeps the segments of two agents apart
        self._changed = threading.Condition()  # guards what follows
        self._pending: dict[int, list[bytes]] = {}
        self._pending_bytes = self._left_out = 0
        self._segments: dict[int, int] = {}
        self._closed = self._given_up = self._away = False
        self._thread = threading.Thread(target=self._put_forever, name="logs", daemon=True)
        self._thread.start()

    def add(self, rank: int, records: list[bytes]) -> None:
        with self._changed:
            for record in records:
                if self._pending_bytes + len(record) > self._queue_limit:
                    self._left_out += 1
                    continue
                self._pending.setdefault(rank, []).append(record)
                self._pending_bytes += len(record)

    def close(self, *, deadline_seconds: float = _CLOSE_DEADLINE_SECONDS) -> None:
        """Try to upload the remaining records before the deadline.

        Print how many were not uploaded. Never raises.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(deadline_seconds)
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
            rest = self._left_out + sum(map(len, self._pending.values()))
        if rest:
            self._say(
                f"logs: WARNING: {rest} lines did not reach {self._store.uri}/logs; this "
                "machine's disk has them"
            )

    def _put_forever(self) -> None:
        pauses = backoff_pauses(
            first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
        )
        batch = self._next_batch()
        while batch is not None:
            try:
                for rank, records in batch.items():
                    self._put(rank, records)
                self._away = False
                pauses = backoff_pauses(
                    first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS
                )
            except Exception as error:  # the records are kept, and the next try may succeed
                if not self._away:
                    self._say(
                        f"logs: WARNING: {self._store.uri} accepts no logs for now, retrying: "
                        f"{error}"
                    )
                self._away = True
                with self._changed:
                    self._changed.wait_for(lambda: self._given_up, next(pauses))
            batch = self._next_batch()

    def _next_batch(self) -> dict[int, list[bytes]] | None:
        with self._changed:
            if not self._away:
                self._changed.wait_for(lambda: self._closed, self._interval_seconds)
            done = self._given_up or (self._closed and not self._pending)
            if done:
                return None
            return {rank: list(records) for rank, records in self._pending.items()}

    def _put(self, rank: int, records: list[bytes]) -> None:
        """Upload one rank's records.

        A failed upload may still have stored them; readers ignore such duplicates.
        """
        number = self._segments.get(rank, 0)
        key = log_key(self._generation, self._node, rank, f"{number:06d}.{self._writer}")
        self._store.put(key, b"\n".join(records) + b"\n")
        with self._changed:
            self._segments[rank] = number + 1
            self._pending_bytes -= sum(map(len, records))
            del self._pending[rank][: len(records)]
            if not self._pending[rank]:
                del self._pending[rank]


def punch_hole(descriptor: int, start: int, size: int) -> None:
    """Free the disk blocks of a range of a file, which then reads as zeros.

    Raises OSError if that fails.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    if fallocate(descriptor, _PUNCH_HOLE, ctypes.c_int64(start), ctypes.c_int64(size)) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class RankOutput:
    """Output of a node's ranks in one generation.

    If recording fails, the next `follow` or `close` tries again.
    """

    def __init__(
        self, group: WorkerGroup, spec: GangSpec, generation: int, job_store: Store
    ) -> None:
        self._echo = TerminalEcho(group)
        self._uploader: LogUploader | None = None
        local = job_store.local_path("logs")
        if local is None or local.resolve() != Path(spec.log_folder).resolve():
            self._uploader = LogUploader(
                job_store, generation=generation, node=spec.node, say=print_line
            )
        place = {"job": spec.job, "generation": generation, "node": spec.node}
        place["limit_bytes"] = spec.config.survival.rank_log_mib * 2**20
        self._logs = [
            (worker, RankLog(worker.log_path, rank=worker.rank, **place))
            for worker in group.workers
        ]
        self._write_failed = self._unlimited = False

    def follow(self) -> None:
        self._echo.echo_new_lines()
        self._record(RankLog.follow)

    def close(self, meanwhile: Callable[[], object]) -> None:
        """Process the remaining output after the ranks have ended.

        Takes up to 5 s for the upload. `meanwhile` is called so often that no other agent takes
        this one for lost.
        """
        until = time.monotonic() + _CLOSE_RECORDS_SECONDS
        self._echo.echo_new_lines()
        self._record(lambda log, beat: log.finish(beat, until=until, meanwhile=meanwhile))
        if self._uploader:
            self._uploader.close()

    def _record(self, read: Callable[[RankLog, HeartbeatReading], list[bytes]]) -> None:
        for worker, log in self._logs:
            try:
                if not self._unlimited:
                    log.free_middle()
            except FileNotFoundError:  # user code has removed the log
                pass
            except OSError as error:
                trouble = f"their middle cannot be freed: {error}"
                print_line(f"logs: WARNING: raw logs exceed survival.rank_log_mib, {trouble}")
                self._unlimited = True
            try:
                records = read(log, worker.beat)
            except OSError as error:
                if not self._write_failed:
                    print_line(
                        f"logs: WARNING: no JSON lines of rank {worker.rank}, only its raw log: "
                        f"{error}"
                    )
                self._write_failed = True
                continue
            if records and self._uploader:
                self._uploader.add(worker.rank, records)


def show_failed_logs(
    group: WorkerGroup, failures: Sequence[WorkerFailure], *, job: str, generation: int
) -> None:
    """Print the last log lines of the rank that failed first on this node, and the command for
    more.

    Ranks that failed only because of a peer are skipped. A failure that this process has shown is
    named in one line.
    """
    workers = {worker.rank: worker for worker in group.workers}
    own = sorted(
        (failure for failure in failures if not failure.cascade),
        key=lambda failure: failure.priority,
    )
    if not own:
        return
    first = workers[own[0].rank]
    fingerprint = own[0].fingerprint
    # Without a location, failures of one kind may have different causes
    if own[0].where and fingerprint in _shown_failures:
        print_line(
            f"rank {first.rank} failed first on this node, as in generation "
            f"{_shown_failures[fingerprint]} ({fingerprint}): {first.log_path}"
        )
        return
    _shown_failures[fingerprint] = generation
    lines = [f"rank {first.rank} failed first on this node, its last lines ({first.log_path}):"]
    lines += [f"| {line}" for line in _last_lines(first.log_path)]
    lines += [
        f"rank {failure.rank} failed as well: {workers[failure.rank].log_path}"
        for failure in own[1:]
    ]
    place = f"--rank {first.rank} --generation {generation} --around step:{first.beat.step}"
    lines.append(f"more: {own_command()} logs {shlex.quote(job)} {place}")
    print_line("\n".join(lines))  # in one write: the agents of a machine share the terminal


def print_line(text: str) -> None:
    """Print a line on this process's output, with unsafe characters escaped. Never raises, and
    blocks for at most 1 s.
    """
    # Its writer bypasses sys.stdout, and so the filter of `guard_terminal`
    _OWN_OUTPUT.write(printable(text) + "\n")


def flush_output(seconds: float = _FLUSH_SECONDS) -> None:
    """Wait until all output of `print_line` is written, for at most `seconds`."""
    _OWN_OUTPUT.flush(seconds)


def _last_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as log:
            log.seek(max(0, path.stat().st_size - _LAST_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return [f"(no log: {error})"]
    lines = [line for line in text.split("\n") if line.strip()]
    # Warnings are better than nothing, but not the note on our flight recorder's socket
    noted = [line for line in lines if "WorkerServer.cpp" not in line]
    lines = [*NativeWarnings().remove_from(lines)] or noted
    return [escape_controls(line) for line in lines[-_LAST_LINES:]] or ["(it printed nothing)"]


def _write_to(output: TextIO, text: str) -> None:
    """Write text.

    Replace characters that are not in the output's encoding by similar ASCII characters or escapes.
    """
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
    # Bypass the stream: its lock, held during a pause, would keep this process from exiting
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process has set O_NONBLOCK
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()


_OWN_OUTPUT = NonBlockingOutput()
