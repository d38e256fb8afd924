"""Everything that the ranks of a job printed, merged: over generations, nodes and ranks, from disk and store.

Two kinds of files hold it below `logs/`: `<generation>-<id>/rank-N.jsonl` and the raw `rank-N.log`, which an agent and
its rank wrote on this machine, and the segments that agents carried to the store. What is in both is shown once.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ebbflow.infra.errors import InfraError
from ebbflow.infra.logs.line import LogLine, split_lines, utc_text
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.store import Store

# Of a raw log that has no records (its agent was killed): as much as an agent makes records of, the newest.
_UNRECORDED_BYTES = 64 * 1024 * 1024
_READERS = 16
_SEGMENT = re.compile(r"logs/\d{6}/\d+-\d+-[^/]+\.jsonl")


class LogsError(InfraError):
    """The logs that were asked for cannot be shown, and why."""

    outcome = Outcome.CONFIG


@dataclass
class Logs:
    """lines: by time. notices: what could not be read, one line each."""

    lines: list[LogLine] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Which lines; None: all. around_step: with `lines` before and after the ones nearest to it; else the last ones."""

    rank: int | None = None
    node: int | None = None
    generation: int | None = None
    around_step: int | None = None
    lines: int | None = None

    def matches(self, line: LogLine) -> bool:
        pairs = ((self.rank, line.rank), (self.node, line.node), (self.generation, line.generation))
        return all(wanted is None or wanted == found for wanted, found in pairs)


def read_logs(folders: Sequence[Path], stores: Sequence[Store]) -> Logs:
    """All lines below the `logs/` of these folders of a job and of these stores of it, each once, by time.

    Raises StoreError for a store that does not answer. A damaged line is passed over, with a notice.
    """
    logs, found = Logs(), {}
    for folder in folders:
        files = (folder / "logs").glob("*-*/rank-*.*")
        for path in sorted({path.with_suffix(".log") for path in files if path.suffix in (".log", ".jsonl")}):
            for line in _read_rank(path, logs.notices):
                found.setdefault(line.identity, line)
    for store in stores:
        keys = [meta.key for meta in store.list("logs") if _SEGMENT.fullmatch(meta.key)]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="logs") as pool:
            for key, segment in zip(keys, pool.map(store.get, keys), strict=True):
                for line in _parse(segment, f"{store.uri}/{key}", logs.notices):
                    found.setdefault(line.identity, line)
    logs.lines = sorted(found.values(), key=lambda line: (line.t, line.generation, line.node, line.rank, line.start))
    return logs


def select(lines: Iterable[LogLine], wanted: Wanted) -> list[LogLine]:
    """The lines that match, in their order."""
    matching = [line for line in lines if wanted.matches(line)]
    if wanted.around_step is None:
        return matching if wanted.lines is None else matching[max(0, len(matching) - wanted.lines) :]
    return _around(matching, wanted.around_step, 10 if wanted.lines is None else wanted.lines)


def describe(lines: Sequence[LogLine]) -> str:
    """What there is, for who asked for something else."""
    if not lines:
        return "no lines at all"
    parts = [f"{len(lines)} lines"]
    for name in ("generation", "node", "rank"):
        numbers = sorted({getattr(line, name) for line in lines})
        parts.append(f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    steps = [line.step for line in lines if line.step is not None]
    return "; ".join([*parts, f"steps {min(steps)} to {max(steps)}" if steps else "no known steps"])


def _around(lines: list[LogLine], step: int, context: int) -> list[LogLine]:
    """In each generation that came as near to the step as any: all lines nearest to it, and `context` on both sides.

    A rank prints seldom, so that there need not be a line of the very step.
    """
    known = [line for line in lines if line.step is not None]
    if not known:
        return []
    nearest = min(abs(line.step - step) for line in known)
    chosen: list[LogLine] = []
    for generation in sorted({line.generation for line in known}):
        mine = [line for line in lines if line.generation == generation]
        hits = [at for at, line in enumerate(mine) if line.step is not None and abs(line.step - step) == nearest]
        if hits:
            chosen += mine[max(0, hits[0] - context) : hits[-1] + context + 1]
    return chosen


def _read_rank(raw: Path, notices: list[str]) -> list[LogLine]:
    """The records beside a raw log, and what the log holds beyond them."""
    records = raw.with_suffix(".jsonl")
    try:
        data = records.read_bytes() if records.exists() else b""
        # A crash of the agent can tear the last record; its line is read from the raw log then.
        whole = data[: data.rfind(b"\n") + 1]
        lines = _parse(whole, str(records), notices)
        return lines + _unrecorded(raw, lines, notices)
    except OSError as error:
        notices.append(f"{raw}: {error.strerror or error}")
        return []


def _unrecorded(raw: Path, lines: list[LogLine], notices: list[str]) -> list[LogLine]:
    """Lines of a raw log that no record covers: an agent that is killed leaves some. Their time is the file's."""
    if not raw.exists():
        return []
    status = raw.stat()
    begin = max((line.end + line.dropped for line in lines), default=0)
    if status.st_size <= begin:
        return []
    place = _place(raw, lines)
    if place is None:
        notices.append(f"{raw}: {status.st_size - begin} bytes are in no record, and whose they are is not known")
        return []
    found: list[LogLine] = []
    common = {"t": utc_text(status.st_mtime), "step": None, "phase": None, **place}
    with open(raw, "rb") as log:
        parts = list(_ranges(log.fileno(), begin, status.st_size))
        if sum(end - start for start, end, is_hole in parts if not is_hole) > _UNRECORDED_BYTES:
            start = status.st_size - _UNRECORDED_BYTES
            notices.append(f"{raw}: {start - begin} bytes are in no record and not shown; they stand there")
            parts = list(_ranges(log.fileno(), start, status.st_size))
        for begin, end, is_hole in parts:
            if is_hole:
                text = (
                    f"[{end - begin} bytes are left out here: the rank printed more than survival.rank_log_mib keeps]"
                )
                found.append(LogLine(text=text, start=begin, end=begin, dropped=end - begin, **common))
                continue
            for piece, more in split_lines(os.pread(log.fileno(), end - begin, begin), at_end=True):
                text = piece.removesuffix(b"\n").decode(errors="replace")
                found.append(LogLine(text=text, start=begin, end=begin + len(piece), more=more, **common))
                begin += len(piece)
    return found


def _ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """The parts of a file between two offsets as (begin, end, whether it is a hole that an agent has made)."""
    while start < end:
        try:
            data = min(end, os.lseek(descriptor, start, os.SEEK_DATA))
        except OSError as error:  # ENXIO: nothing but a hole up to the end
            data = end if error.errno == errno.ENXIO else start
        if data > start:
            yield start, data, True
        start = data
        if start < end:
            try:
                data = min(end, os.lseek(descriptor, start, os.SEEK_HOLE))
            except OSError:
                data = end
            yield start, data, False
            start = data


def _place(raw: Path, lines: list[LogLine]) -> dict | None:
    """job, generation, node and rank of a raw log: from its records, else from the specification of its rank."""
    if lines:
        return {name: getattr(lines[0], name) for name in ("job", "generation", "node", "rank")}
    try:
        spec = json.loads(raw.with_suffix(".spec.json").read_text())
        rank = int(raw.stem.removeprefix("rank-"))
        return {"job": spec["job"], "generation": spec["generation"], "node": spec["node"], "rank": rank}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse(data: bytes, where: str, notices: list[str]) -> list[LogLine]:
    lines, damaged = [], []
    for number, text in enumerate(data.split(b"\n"), start=1):
        if not text:
            continue
        try:
            lines.append(LogLine.from_json(text))
        except (ValueError, TypeError):
            damaged.append(number)
    if damaged:
        which = f"{len(damaged)} damaged lines" if len(damaged) > 1 else "a damaged line"
        notices.append(f"{where}:{damaged[0]}: {which}, passed over; the raw log of the rank has the text")
    return lines
