"""Logs of the ranks: records of single lines, their reading and merging, and `ebbflow logs`.

A record is one line of JSON with these fields:

    {"t": "2026-11-21T04:22:17.123Z", "job", "generation", "node", "rank", "step", "phase", "text",
    "start", "end"}

t is the time at which the agent read the line, usually within 50 ms after the rank wrote the line.
start and end are the line's byte offsets in the rank's raw log, line feed included. They show which
records are duplicates, and which lines have no record.

On this machine, a rank writes its raw log to `logs/<generation>-<id>/rank-N.log`, and its agent
writes the records to `rank-N.jsonl` beside it. Agents also put records into the store, several per
object (a segment). A line found in both places is shown once.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ebbflow.core.errors import InfraError, Outcome, StoreError
from ebbflow.core.layout import (
    check_job_name,
    find_local_folder,
    job_prefix,
    known_job,
    runs_folder,
)
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import one_line, printable, strip_colours

# A longer line becomes several records; `more` marks all but the last.
LONGEST_LINE_BYTES = 16 * 1024

# Limit for a raw log without records (its agent was killed): the newest part, as large as records
# would be.
_UNRECORDED_BYTES = 64 * 1024 * 1024
_READERS = 16
_SEGMENT = re.compile(r"logs/\d{6}/\d+-\d+-[^/]+\.jsonl")

# A warning of torch's C++ code, such as "[W1122 20:53:08.732392175 WorkerServer.cpp:113] [c10d]
# Server …", and the stack that may follow it.
_NATIVE_NOTE = re.compile(r"(?:\[rank\d+\]:)?\[[WI]\d{4} \d\d:\d\d:\d\d\.\d+ [^\s\]]+:\d+\] ")
_NATIVE_STACK = re.compile(r"Exception raised from |frame #\d+: ")
_STEP = "step:"
_REQUEST_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """Record of one line of a rank's output."""

    t: str  # UTC time at which the agent read the line, in ISO 8601
    job: str
    generation: int
    node: int
    rank: int
    step: int | None  # step in the rank's last heartbeat before the line; None: unknown
    phase: str | None  # phase in this heartbeat; None: unknown
    text: str  # the line without its line feed
    # start, end: byte offsets of the line in the raw log
    start: int
    end: int
    more: bool = False  # whether the line was too long and continues in the next record
    # Number of bytes after `end` that have no record, because the rank printed more than is kept
    dropped: int = 0

    @property
    def identity(self) -> tuple[int, int, int, int, str]:
        """Key that identifies this record, so that copies of it can be recognized.

        Records of a deleted job with the same name have other keys.
        """
        return self.generation, self.node, self.rank, self.start, self.t

    def to_json(self) -> str:
        """Serialize the record as one line of JSON that is safe to print, without empty optional
        fields.
        """
        record = dict(self.__dict__)
        for name in ("more", "dropped"):
            if not record[name]:
                del record[name]
        return printable(json.dumps(record, separators=(",", ":"), ensure_ascii=False))

    @classmethod
    def from_json(cls, line: str | bytes) -> LogLine:
        """Parse a record. Raises ValueError or TypeError if the line is not a record."""
        record = cls(**json.loads(line))
        places = (record.generation, record.node, record.rank, record.start, record.end)
        if (
            not isinstance(record.t, str)
            or not isinstance(record.text, str)
            or not all(type(x) is int for x in places)
        ):
            raise ValueError("a field has another type")
        return record

    def render(self) -> str:
        if self.step is None:
            step = "step ?"
        else:
            step = f"step {self.step}"
        return (
            f"{one_line(self.t)} g{self.generation} n{self.node} r{self.rank} {step} | "
            f"{escape_controls(self.text)}"
        )


class NativeWarnings:
    """Filter that removes messages of torch's C++ code, and their stacks, from log lines."""

    def __init__(self) -> None:
        self._inside = False

    def remove_from(self, lines: Sequence[str]) -> Iterator[str]:
        """Yield the lines outside C++ messages and stacks.

        Pass a log in order, since a stack may span calls.
        """
        for line in lines:
            note = _NATIVE_NOTE.match(line) is not None
            self._inside = note or (self._inside and _NATIVE_STACK.match(line) is not None)
            if not self._inside:
                yield line


class LogsError(InfraError, outcome=Outcome.CONFIG):
    """Error: a job's logs cannot be shown."""


def escape_controls(text: str) -> str:
    """Strip colours from a line of a rank's output, and escape other control characters.

    A progress bar that overwrites itself is reduced to its last state, preceded by the number of
    overwritten states.
    """
    parts = [part for part in strip_colours(text).split("\r") if part.strip()]
    if not parts:
        return ""
    if len(parts) > 1:
        overwritten = f"[{len(parts) - 1} overwritten] "
    else:
        overwritten = ""
    return overwritten + printable(parts[-1].rstrip("\n")).replace("\n", "\\u000a")


@dataclass
class JobLogs:
    """The log lines of a job, with warnings about files that could not be read completely."""

    lines: list[LogLine] = field(default_factory=list)  # sorted by time
    # Warnings of files that were not read completely
    notices: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LogFilter:
    """Conditions that select log lines. None means any value."""

    # rank, node, generation: select only lines with this number
    rank: int | None = None
    node: int | None = None
    generation: int | None = None
    # Only the lines nearest to this step, with lines before and after them
    around_step: int | None = None
    # How many before and after the nearest; without around_step, how many at the end
    lines: int | None = None

    def matches(self, line: LogLine) -> bool:
        pairs = ((self.rank, line.rank), (self.node, line.node), (self.generation, line.generation))
        return all(wanted is None or wanted == found for wanted, found in pairs)


@dataclass(frozen=True)
class JobPlace:
    """Locations in which a job's files are searched: its store, and folders on this machine."""

    name: str  # name of the job
    uri: str  # URI of the store, or the path of its folder
    folders: list[Path]  # existing folders of the job on this machine
    # the places that were searched, for error messages: a folder in runs/, and the job's part of
    # the store
    looked: tuple[str, str]

    def open_store(self) -> Store | None:
        """Open the job's part of its store.

        Return None if the store's folder does not exist. Raises StoreError.
        """
        # Opening it would create the folder
        if "://" not in self.uri and not Path(self.uri).is_dir():
            return None
        return Store.open(self.uri, request_timeout_seconds=_REQUEST_SECONDS, create=False).sub(
            job_prefix(self.name)
        )


def utc_text(unix_seconds: float) -> str:
    """Format a Unix time as ISO 8601 in UTC with milliseconds.

    Sorting such texts sorts them by time.
    """
    milliseconds = round(unix_seconds * 1000)
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(milliseconds // 1000))
    return f"{whole}.{milliseconds % 1000:03d}Z"


def split_lines(data: bytes, *, at_end: bool, most: int | None = None) -> list[tuple[bytes, bool]]:
    """Split `data` into lines, and lines longer than 16 KiB into pieces of whole UTF-8 characters.

    For each piece, return its bytes including any line feed, and whether the line continues in the
    next piece.

    at_end: no more data will follow. An incomplete last line is then returned too.
    most: return at most so many pieces.
    """
    pieces: list[tuple[bytes, bool]] = []
    at = 0
    while at < len(data) and (most is None or len(pieces) < most):
        feed = data.find(b"\n", at, at + LONGEST_LINE_BYTES)
        if feed >= 0:
            pieces.append((data[at : feed + 1], False))
        elif len(data) - at > LONGEST_LINE_BYTES:
            pieces.append((_whole_characters(data[at : at + LONGEST_LINE_BYTES]), True))
        elif at_end:
            pieces.append((data[at:], False))
        else:
            break
        at += len(pieces[-1][0])
    return pieces


def read_logs(folders: Sequence[Path], stores: Sequence[Store]) -> JobLogs:
    """Read all log lines of a job from its folders on this machine and from its part of each store.

    Raises StoreError.

    Each of the folders has a subfolder `logs/`. A line found in several places is returned once. A
    damaged line is skipped, with a warning in the result.
    """
    logs = JobLogs()
    found = {}
    for folder in folders:
        files = (folder / "logs").glob("*-*/rank-*.*")
        for path in sorted(
            {path.with_suffix(".log") for path in files if path.suffix in (".log", ".jsonl")}
        ):
            for line in _read_rank(path, logs.notices):
                found.setdefault(line.identity, line)
    for store in stores:
        keys = [meta.key for meta in store.list("logs") if _SEGMENT.fullmatch(meta.key)]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="logs") as pool:
            for key, segment in zip(keys, pool.map(store.get, keys), strict=True):
                for line in _parse(segment, f"{store.uri}/{key}", logs.notices):
                    found.setdefault(line.identity, line)
    logs.lines = sorted(
        found.values(), key=lambda line: (line.t, line.generation, line.node, line.rank, line.start)
    )
    return logs


def filter_lines(lines: Iterable[LogLine], wanted: LogFilter) -> list[LogLine]:
    matching = [line for line in lines if wanted.matches(line)]
    if wanted.around_step is None:
        if wanted.lines is None:
            return matching
        return matching[max(0, len(matching) - wanted.lines) :]
    return _around(matching, wanted.around_step, 10 if wanted.lines is None else wanted.lines)


def render_lines(lines: Sequence[LogLine]) -> str:
    """Summarize log lines in one sentence: their number, generations, nodes, ranks and steps."""
    if not lines:
        return "no lines at all"
    parts = [f"{len(lines)} lines"]
    for name in ("generation", "node", "rank"):
        numbers = sorted({getattr(line, name) for line in lines})
        parts.append(f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    steps = [line.step for line in lines if line.step is not None]
    return "; ".join([*parts, f"steps {min(steps)} to {max(steps)}" if steps else "no known steps"])


def add_logs_command(commands: argparse._SubParsersAction, project_root: Path) -> None:
    """Add the command `logs`.

    It looks for jobs in EBBFLOW_RUNS or, if that is not set, in `project_root`/runs.
    """
    command = commands.add_parser("logs", help="what the ranks of a job printed, merged by time")
    command.add_argument("job", metavar="JOB", help="a job's name, or latest")
    command.add_argument("--rank", type=int, metavar="R", help="of this rank only")
    command.add_argument("--node", type=int, metavar="N", help="of this node only")
    command.add_argument(
        "--generation", type=int, metavar="G", help="of this start of the gang only"
    )
    command.add_argument(
        "--around", type=_step, metavar="step:N", help="the lines nearest to that step"
    )
    command.add_argument(
        "--lines",
        type=_count,
        metavar="K",
        help="the last K; with --around K before and after (10)",
    )
    command.add_argument(
        "--json", action="store_true", help="the records as they are, one per line"
    )
    command.add_argument(
        "--store", metavar="URI", help="the job's store, if this machine has no note of it"
    )
    command.set_defaults(command=lambda options: show_logs(options, project_root))


def show_logs(options: argparse.Namespace, project_root: Path) -> int:
    """Print the matching lines, and return the exit code.

    The exit code is 0 on success, 1 if no line matches or the store does not answer, and 2 if the
    job is unknown.
    """
    numbers = {name: getattr(options, name) for name in ("rank", "node", "generation", "lines")}
    wanted = LogFilter(around_step=options.around, **numbers)
    logs = find_logs(options.job, options.store, project_root)
    for notice in logs.notices:
        print(f"logs: {notice}", file=sys.stderr)
    chosen = filter_lines(logs.lines, wanted)
    if not chosen:
        print(
            f"logs: no line matches; job {options.job} has {render_lines(logs.lines)}",
            file=sys.stderr,
        )
        return Outcome.FAILED.exit_code
    for line in chosen:
        print(line.to_json() if options.json else line.render())
    return Outcome.COMPLETED.exit_code


def find_job(job: str, store_uri: str | None, project_root: Path) -> JobPlace:
    """Find a job by its name, or by "latest". Raises LayoutError if the name is invalid."""
    place = find_local_folder(project_root, job)
    if place.exists():
        name = place.resolve().name
    else:
        name = check_job_name(job)
    known = known_job(place)  # else the default store
    uri = (
        store_uri or (str(runs_folder(project_root)) if known is None else known.store)
    ).removeprefix("file://")
    if "://" in uri:
        in_store = []
    else:
        in_store = [Path(uri).resolve() / job_prefix(name)]
    folders = [folder for folder in dict.fromkeys([place.resolve(), *in_store]) if folder.is_dir()]
    return JobPlace(name, uri, folders, (str(place), f"{uri}/{job_prefix(name)}"))


def find_logs(job: str, store_uri: str | None, project_root: Path) -> JobLogs:
    """Read a job's logs from this machine and from the job's store.

    If the store fails, return the logs of this machine with a warning. Raises LogsError (unknown
    job), LayoutError (invalid job name), StoreError (the store failed and this machine has no
    logs).
    """
    place = find_job(job, store_uri, project_root)
    try:
        store = place.open_store()
        if store is not None and store.list("logs", limit=1):
            return read_logs(place.folders, [store])
    except StoreError as error:
        logs = read_logs(place.folders, [])
        if not logs.lines:
            raise
        logs.notices.append(
            f"shown is what this machine has, the job's store does not answer: {error}"
        )
        return logs
    if not place.folders:
        raise unknown_job(job, place, project_root)
    return read_logs(place.folders, [])


def unknown_job(job: str, place: JobPlace, project_root: Path) -> LogsError:
    """Return the error for an unknown job.

    It names the searched places and the newest jobs of this machine.
    """
    runs = runs_folder(project_root)
    found = [path for path in runs.glob("*") if (path / "logs").is_dir() and path.name != "latest"]
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:5]
    there = ", ".join(path.name for path in newest) or "no job with logs"
    looked = f"  {place.looked[0]}\n  {place.looked[1]}/logs"
    hint = f"{runs} has {there}, or name its store: --store URI"
    return LogsError(f"no job {job!r} to be found; looked at\n{looked}\n  hint: {hint}")


def _whole_characters(piece: bytes) -> bytes:
    for tail in range(1, min(4, len(piece))):
        byte = piece[-tail]
        if byte & 0xC0 == 0x80:
            continue
        if byte >= 0xF0:
            needed = 4
        elif byte >= 0xE0:
            needed = 3
        elif byte >= 0xC0:
            needed = 2
        else:
            needed = 1
        if needed > tail:
            return piece[:-tail]
        return piece
    return piece


def _around(lines: list[LogLine], step: int, context: int) -> list[LogLine]:
    """Return the lines nearest to `step`, with `context` lines before and after them.

    Often no line has exactly this step, since ranks do not print at every step. If lines of several
    generations are equally near, return lines of each of these generations.
    """
    distances = [abs(line.step - step) for line in lines if line.step is not None]
    nearest = min(distances, default=None)
    chosen: list[LogLine] = []
    for generation in sorted({line.generation for line in lines if line.step is not None}):
        mine = [line for line in lines if line.generation == generation]
        hits = [
            at
            for at, line in enumerate(mine)
            if line.step is not None and abs(line.step - step) == nearest
        ]
        if hits:
            chosen += mine[max(0, hits[0] - context) : hits[-1] + context + 1]
    return chosen


def _read_rank(raw: Path, notices: list[str]) -> list[LogLine]:
    records = raw.with_suffix(".jsonl")
    try:
        if records.exists():
            data = records.read_bytes()
        else:
            data = b""
        # A crash of the agent can cut the last record; its line is then read from the raw log.
        whole = data[: data.rfind(b"\n") + 1]
        lines = _parse(whole, str(records), notices)
        return lines + _unrecorded(raw, lines, notices)
    except OSError as error:
        notices.append(f"{raw}: {error.strerror or error}")
        return []


def _unrecorded(raw: Path, lines: list[LogLine], notices: list[str]) -> list[LogLine]:
    """Make records for the last lines of a raw log, if the agent was killed before it recorded
    them.

    Their time is the raw log's time of modification.
    """
    if not raw.exists():
        return []
    status = raw.stat()
    begin = max((line.end + line.dropped for line in lines), default=0)
    if status.st_size <= begin:
        return []
    place = _place(raw, lines)
    if place is None:
        notices.append(
            f"{raw}: {status.st_size - begin} bytes are in no record, and whose they are is not "
            "known"
        )
        return []
    found: list[LogLine] = []
    common = {"t": utc_text(status.st_mtime), "step": None, "phase": None, **place}
    with open(raw, "rb") as log:
        parts = list(_ranges(log.fileno(), begin, status.st_size))
        if sum(end - start for start, end, is_hole in parts if not is_hole) > _UNRECORDED_BYTES:
            start = status.st_size - _UNRECORDED_BYTES
            notices.append(
                f"{raw}: {start - begin} bytes are in no record and not shown; they stand there"
            )
            parts = list(_ranges(log.fileno(), start, status.st_size))
        for begin, end, is_hole in parts:
            if is_hole:
                text = (
                    f"[{end - begin} bytes are left out here: the rank printed more than "
                    "survival.rank_log_mib keeps]"
                )
                found.append(
                    LogLine(text=text, start=begin, end=begin, dropped=end - begin, **common)
                )
                continue
            for piece, more in split_lines(os.pread(log.fileno(), end - begin, begin), at_end=True):
                text = piece.removesuffix(b"\n").decode(errors="replace")
                found.append(
                    LogLine(text=text, start=begin, end=begin + len(piece), more=more, **common)
                )
                begin += len(piece)
    return found


def _ranges(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the data blocks and holes of a part of a file, each as (start, end, is_hole).

    Agents punch holes to save space.
    """
    while start < end:
        try:
            data = min(end, os.lseek(descriptor, start, os.SEEK_DATA))
        except OSError as error:  # ENXIO: only a hole up to the end
            if error.errno == errno.ENXIO:
                data = end
            else:
                data = start
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
    """Return the job, generation, node and rank of a raw log, or None if unknown.

    They are read from the log's records or from its spec file.
    """
    if lines:
        return {name: getattr(lines[0], name) for name in ("job", "generation", "node", "rank")}
    try:
        spec = json.loads(raw.with_suffix(".spec.json").read_text())
        rank = int(raw.stem.removeprefix("rank-"))
        return {
            "job": spec["job"],
            "generation": spec["generation"],
            "node": spec["node"],
            "rank": rank,
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parse(data: bytes, where: str, notices: list[str]) -> list[LogLine]:
    lines = []
    damaged = []
    for number, text in enumerate(data.split(b"\n"), start=1):
        if not text:
            continue
        try:
            lines.append(LogLine.from_json(text))
        except (ValueError, TypeError):
            damaged.append(number)
    if damaged:
        if len(damaged) > 1:
            which = f"{len(damaged)} damaged lines"
        else:
            which = "a damaged line"
        notices.append(
            f"{where}:{damaged[0]}: {which}, passed over; the raw log of the rank has the text"
        )
    return lines


def _step(text: str) -> int:
    number = text.removeprefix(_STEP)
    if not text.startswith(_STEP) or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not step:N, such as step:120")
    return int(number)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines, 1 or more")
    return int(text)
