"""Streaming reader of logs in any encoding, which finds candidate lines fast and parses their ranks
and times.

A log of 100 MB has about a million lines. `candidates` therefore searches blocks of bytes for
triggers (short texts that a line must contain to match a rule), and yields only the lines that
contain one.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.diagnose.opening import LogStream, open_growing, open_logs

BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 64 * 1024  # a longer line is read in pieces of this size
_LONGEST_READ_BYTES = 8 << 20  # the rest of a longer line is skipped
_MOST_FILES = 20_000
_MOST_SKELETONS = 200_000
# Of lines that differ only in digits, the first ones of a file are all examined, then a sample. In
# many files the first ones are fewer, so that 10,000 files take seconds.
_MOST_EQUAL = 500
_LEAST_EQUAL = 4
_MOST_EQUAL_OF_ALL = 50_000
_SAMPLE = 64

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-9;?]*[ "
    r"-/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-B]|[=>78cDEHM])|[\x00-\x08\x0e-\x1f]"
)
# Keys of the records that log shippers write: of the message, of what it quotes, and of records
# inside a record.
_TEXT_KEYS = (
    "log",
    "message",
    "msg",
    "text",
    "textPayload",
    "MESSAGE",
    "event",
    "line",
    "@message",
)
_MORE_KEYS = (
    "error",
    "err",
    "exception",
    "exc_info",
    "stack",
    "stack_trace",
    "stacktrace",
    "traceback",
)
_INNER_KEYS = ("jsonPayload", "_source", "events", "logEvents", "entries")
_TIME_KEYS = ("t", "time", "timestamp", "@timestamp", "ts")
_CSV = re.compile(r'(\d{13}|20\d\d-[^,"]{6,30}),"(.*?)"?$')
_RECORDS = re.compile(r"(?<=\}),\s*(?=\{)")

_RANK = re.compile(
    r"\[rank[: ]?\s?(\d{1,5})\]|\bglobal_rank[=:\s]+(\d{1,5})|\[default(\d{1,3})\]|\(?\brank[ "
    r"=:#]+(\d{1,5})\b|^\s{0,3}(\d{1,4}): "
    r"|\[(?:pod/)?[\w.-]*?(?:worker|node|master)-(\d{1,4})[\]/]"
    r"|^\W{0,3}\d+,(?:mpirank:)?(\d{1,5})[,\]]|\bmpirank:(\d{1,5})|\[trainer(\d{1,5})(?:\|\d+)?\]",
    re.IGNORECASE,
)
_RANK_OF_PATH = re.compile(
    r"(?:.*rank|worker|proc(?:ess)?|task)[-_.]?(\d{1,5})\b|/attempt_\d+/(\d{1,5})/std(?:err|out)",
    re.IGNORECASE,
)

_MASTER = re.compile(r"(?<![a-z])master-0(?!\d)", re.IGNORECASE)
_MASTER_POD = re.compile(rb"\[(?:pod/)?[\w.\-\[\]]*?master-0[\]/]", re.IGNORECASE)
_NUL_RUN = re.compile(rb"\0{4,}")
# The message of a journal's record, as a list of bytes
_BYTE_LIST = re.compile(rb'("MESSAGE"\s?:\s?)\[([\d,\s]+)\]')
_BOXED = re.compile(r"^\s*[│┃║|] ?(.*?)\s*[│┃║|]\s*$")
_BOXED_CODE = re.compile(r"\s*(?:❱\s*)?\d+\s+[│┃║|]|\s*[│┃║|]")
_HEAD_BYTES = 64 * 1024

_CLOCK = r"(?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d)"
_STAMPS = (
    re.compile(
        r"(?P<year>20\d\d)[-/](?P<month>\d\d)[-/](?P<day>\d\d)[T _](?P<hour>\d\d):(?P<minute>\d\d)"
        r"(?::(?P<second>\d\d)(?:[.,](?P<fraction>\d{1,9}))?)?\s?(?P<zone>Z|[+-]\d\d:?\d\d)?"
    ),
    re.compile(
        rf"\[?[EWIF](?P<month>\d{{1,2}})(?P<day>\d\d) {_CLOCK}(?:\.(?P<fraction>\d{{1,9}}))?"
    ),
    re.compile(
        rf"\b(?P<name>Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\s+(?P<day>\d{{1,2}}) {_CLOCK}"
    ),
    re.compile(rf"\b(?P<month>\d\d)/(?P<day>\d\d)/(?P<year>20\d\d) {_CLOCK}"),
)
_EPOCH = re.compile(r"(?:^|[\s\"\[:])(1[5-9]\d{8})(?:\.(\d+)|(\d{3}))?(?=$|[\s\",\]])")
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"


class DiagnoseError(InfraError, outcome=Outcome.CONFIG):
    """Error: a log does not exist, or a folder has too many files."""


@dataclass(frozen=True, slots=True)
class LogText:
    """One line of a log, with its position, rank and time."""

    file: str  # the path as given; "-" is standard input
    number: int  # line number, counted from 1
    # The line without terminal escape sequences. If the line is a JSON record, only the record's
    # message.
    text: str
    rank: int | None = None  # the rank that wrote the line; None if unknown
    # Unix time in seconds; None if unknown. A timestamp without a year is dated in the current
    # year.
    time: float | None = None


@dataclass
class FileScan:
    """Result of reading one file: its number of lines, its gaps, or why it was refused."""

    file: str
    lines: int = 0
    refused: str | None = None
    unread: str | None = None  # why reading ended before the end of the file
    last: LogText | None = None  # the last line that is not blank
    last_raw: tuple[int, bytes] = (0, b"")
    nul_bytes: int = 0  # NUL bytes, as a loss of power or a truncation leaves them

    def describe_gaps(self) -> str | None:
        """Describe the parts of the log that could not be read; None if there are none."""
        gaps = []
        if self.unread is not None:
            gaps.append(f"read up to line {self.lines}, then: {self.unread}")
        if self.nul_bytes:
            gaps.append(f"{self.nul_bytes:,} NUL bytes skipped")
        return "; ".join(gaps) or None


class OpenLog(NamedTuple):
    """An open log, and the record of what was read from it so far."""

    scan: FileScan
    stream: LogStream | None  # None: it is refused


def log_files(paths: Sequence[str]) -> list[Path]:
    """Return the named files and all files below the named folders. Raises DiagnoseError."""
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found = sorted(
                each for each in path.rglob("*") if each.is_file() and not each.name.startswith(".")
            )
            # A rank's records repeat its raw log.
            found = [
                each
                for each in found
                if each.suffix != ".jsonl" or not each.with_suffix(".log").exists()
            ]
            if len(found) > _MOST_FILES:
                raise DiagnoseError(
                    f"{name} has {len(found)} files, more than {_MOST_FILES}; name a folder of "
                    "one run"
                )
            files += found
        elif path.is_file() or path.is_fifo():
            files.append(path)
        else:
            raise DiagnoseError(f"{name}: no such file or folder, and no job of this name")
    return files


def scan_logs(path: Path | None) -> Iterator["OpenLog"]:
    """Open the logs in a file, which may be compressed or an archive. None is standard input.

    If the file cannot be opened, yield one log that is refused.
    """
    name = "-" if path is None else str(path)
    try:
        stream = sys.stdin.buffer if path is None else open_growing(path)
        with stream:
            for log in open_logs(name, stream):
                yield OpenLog(FileScan(log.name), log)
    except (OSError, EOFError) as error:
        yield OpenLog(FileScan(name, refused=getattr(error, "strerror", None) or str(error)), None)


def candidates(
    log: "OpenLog", triggers: Sequence[bytes], first_worker: int = 0, files: int = 1
) -> Iterator[LogText]:
    """Yield the lines of a log that contain at least one of the words `triggers`, in order.

    The number of lines, and what cannot be read and why, is recorded in the log's `scan`.
    first_worker: the rank of the pod "worker-0"; files: the number of files that are read in all
    """
    scan = log.scan
    stream = log.stream
    if stream is None:
        return
    head = stream.read(_HEAD_BYTES)
    while head and not head.strip(b"\0"):  # a log whose disk or file was cleared under its writer
        scan.nul_bytes += len(head)
        head = stream.read(_HEAD_BYTES)
    encoding = _encoding(head)
    if encoding is None:
        scan.refused = "binary file, not a log"
        return
    if _MASTER_POD.search(head):
        first_worker = 1
    rank = None if scan.file == "-" else rank_of_path(Path(scan.file), first_worker)
    most = min(_MOST_EQUAL, max(_LEAST_EQUAL, _MOST_EQUAL_OF_ALL // files))
    for number, raw in _find_lines(_blocks(head, stream, encoding), triggers, scan, most):
        yield from _parse(scan.file, number, raw, rank, first_worker)
    number, raw = scan.last_raw
    for line in _parse(scan.file, number, raw, rank, first_worker):
        scan.last = line
    scan.unread = stream.damage
    if stream.damage is not None and not scan.lines:
        scan.refused = stream.damage


def names_a_master(files: Sequence[Path | None]) -> bool:
    """Return whether the files belong to pods such as master-0 and worker-0, so that worker-0 is
    rank 1.
    """
    return any(path is not None and _MASTER.search(path.name) for path in files)


def rank_of(text: str, first_worker: int = 0) -> int | None:
    """Parse the rank in the prefix of a line; None if there is none.

    The known prefixes are those of torch, Slurm, Lightning, MPI, Ray and kubectl.

    first_worker: the rank of the pod "worker-0"
    """
    match = _RANK.search(text[:200])
    if match is None:
        return None
    rank = int(next(group for group in match.groups() if group))
    if "worker-" in match[0].lower():
        return rank + first_worker
    return rank


def rank_of_path(path: Path, first_worker: int = 0) -> int | None:
    """Parse the rank in the path of a log file; None if there is none.

    The last "rank" in a path counts. first_worker: the rank of the pod "worker-0"
    """
    match = _RANK_OF_PATH.search("/".join(path.parts[-3:]))
    if match is None:
        if _MASTER.search(path.name):
            return 0
        return None
    rank = int(match[1] or match[2])
    if "rank" not in match[0].lower() and "worker" in match[0].lower():
        return rank + first_worker
    return rank


def time_of(text: str) -> float | None:
    """Parse the timestamp in the first 120 characters of a line.

    Return the Unix time, or None if there is none.
    """
    head = text[:120]
    try:
        match = next(filter(None, (stamp.search(head) for stamp in _STAMPS)), None)
        if match:
            parts = match.groupdict()
            if "name" in parts:
                month = _MONTHS.index(parts["name"]) // 3 + 1
            else:
                month = int(parts["month"])
            date = int(parts.get("year") or datetime.now(UTC).year), month, int(parts["day"])
            moment = datetime(
                *date,
                int(parts["hour"]),
                int(parts["minute"]),
                int(parts["second"] or 0),
                tzinfo=UTC,
            )
            zone = (parts.get("zone") or "Z").replace(":", "")
            offset = 0
            if zone != "Z":
                offset = (int(zone[1:3]) * 3600 + int(zone[3:]) * 60) * (
                    -1 if zone[0] == "-" else 1
                )
            return moment.timestamp() - offset + float(f"0.{parts.get('fraction') or 0}")
        if match := _EPOCH.search(head):
            return float(f"{match[1]}.{match[2] or match[3] or 0}")
    except ValueError:
        pass
    return None


def _encoding(head: bytes) -> str | None:
    """Guess the encoding of a file from its first bytes; return None for a binary file."""
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    nulls = _NUL_RUN.sub(b"", head).count(0)
    if nulls > len(head) // 4:  # UTF-16 without a mark has a zero byte in most characters
        even = head[::2].count(0)
        odd = head[1::2].count(0)
        if min(even, odd) * 20 < max(even, odd):
            if odd > even:
                return "utf-16-le"
            return "utf-16-be"
    head = _NUL_RUN.sub(b"", head)
    controls = sum(head.count(byte) for byte in (*range(1, 7), *range(14, 27), 0))
    if controls > len(head) // 100 + 2:
        return None
    return "utf-8"


def _blocks(head: bytes, stream: LogStream, encoding: str) -> Iterator[bytes]:
    """Yield a log in UTF-8 blocks that end at line ends. A line longer than a block is divided."""
    import codecs

    if encoding == "utf-8":
        decoder = None
    else:
        decoder = codecs.getincrementaldecoder(encoding)("replace")
    if decoder is None:
        rest = head.removeprefix(b"\xef\xbb\xbf")
    else:
        rest = decoder.decode(head).encode()
    long = 0
    while data := stream.read(BLOCK_BYTES):
        block = rest + (data if decoder is None else decoder.decode(data).encode())
        end = block.rfind(b"\n") + 1
        if not end:
            if len(block) < BLOCK_BYTES:
                rest = block
                continue
            long += len(block)
            if long <= _LONGEST_READ_BYTES:
                yield block
            rest = b""
            continue
        long = 0
        yield block[:end]
        rest = block[end:]
    if rest:
        yield rest


def _find_lines(
    blocks: Iterable[bytes], triggers: Sequence[bytes], scan: FileScan, most: int
) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) for each line that contains one of the triggers.

    Lines that differ only in digits count as equal. If a line is repeated more than `most` times,
    only a sample of the rest is yielded. Triggers contain no digits, so equal lines need only one
    search.
    """
    counts: dict[
        bytes, int
    ] = {}  # occurrences of each line, digits removed; -1: it contains no trigger
    for block in blocks:
        scan.nul_bytes += block.count(0)
        if b'"MESSAGE"' in block:
            block = _BYTE_LIST.sub(_text_of_bytes, block)
        lines = block.split(b"\n")
        skeletons = block.lower().translate(None, b"0123456789.").split(b"\n")
        for number, skeleton in enumerate(skeletons, start=scan.lines + 1):
            count = counts.get(skeleton)
            if count is None:
                if any(trigger in skeleton for trigger in triggers):
                    count = 0
                else:
                    count = -1
                if len(counts) < _MOST_SKELETONS:
                    counts[skeleton] = count
            if count < 0:
                continue
            counts[skeleton] = count + 1
            if count > most and count % _SAMPLE:
                continue
            line = lines[number - scan.lines - 1]
            for piece in range(0, max(len(line), 1), LONGEST_LINE_BYTES):
                yield number, line[piece : piece + LONGEST_LINE_BYTES]
        for back in range(len(lines) - 1, -1, -1):
            if lines[back].strip():
                scan.last_raw = (scan.lines + 1 + back, lines[back][:LONGEST_LINE_BYTES])
                break
        scan.lines += len(lines) - 1


def _text_of_bytes(match: re.Match[bytes]) -> bytes:
    """Convert a list of bytes, as journalctl writes lines with colors, to a JSON string."""
    values = [int(value) for value in match[2].split(b",")]
    if not all(0 <= value < 256 for value in values):
        return match[0]
    return match[1] + json.dumps(bytes(values).decode("utf-8", "replace")).encode()


def _unbox(text: str) -> str:
    """Remove the box that a terminal library draws around a line. Quoted code stays boxed."""
    match = _BOXED.match(text)
    if match is None or _BOXED_CODE.match(match[1]):
        return text
    return match[1]


def _parse(
    file: str, number: int, raw: bytes, rank: int | None, first_worker: int
) -> Iterator[LogText]:
    text = _unbox(_ESCAPES.sub("", raw.decode("utf-8", "replace")))
    records: list[tuple[str, str | None, int | None]] = []
    if text.lstrip(" ,[")[:1] == "{":
        records = list(_records(text))
    elif row := _CSV.match(text):
        records = [(row[2].replace('""', '"'), row[1], None)]
    elif text.lstrip()[:1] == '"':  # a line of an indented JSON document
        text = text.replace('\\"', '"')
    for body, stamp, found in records or [(text, None, None)]:
        # A traceback that was logged by its repr has its line ends escaped.
        for part in re.split(r"(?:[\r\n]|\\n)+" if '\\n  File "' in body else r"[\r\n]+", body):
            if part.strip():
                own = rank_of(part, first_worker)
                if own is None:
                    own = rank if found is None else found
                yield LogText(
                    file,
                    number,
                    part.rstrip(),
                    own,
                    time_of(part) or (time_of(stamp) if stamp else None),
                )


def _records(text: str) -> Iterator[tuple[str, str | None, int | None]]:
    """Yield (message, timestamp, rank) of each JSON record in a line.

    The line may be a piece of a longer one, so its first and last record may be incomplete.
    """
    for piece in [text] if len(text) < LONGEST_LINE_BYTES // 2 else _RECORDS.split(text):
        try:
            value = json.loads(piece)
        except ValueError:
            if piece is not text:  # the end or start of a record
                yield piece.replace('\\"', '"'), None, None
            continue
        found = [value]
        for record in found:
            if isinstance(record, list):
                found += record
            if not isinstance(record, dict):
                continue
            found += [
                record[key] for key in _INNER_KEYS if isinstance(record.get(key), list | dict)
            ]
            texts = [
                next((record[key] for key in _TEXT_KEYS if isinstance(record.get(key), str)), "")
            ]
            texts += [record[key] for key in _MORE_KEYS if isinstance(record.get(key), str)]
            stamp = next((str(record[key]) for key in _TIME_KEYS if key in record), None)
            rank = record.get("rank", record.get("global_rank"))
            if any(texts):
                yield "\n".join(texts), stamp, rank if isinstance(rank, int) else None
