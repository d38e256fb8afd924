"""Segments of the event log: objects with several events and checksums, and their verification.

A segment is an object with one event per line. Its last line is a seal with the checksums of the
events:

    {"seal":2,"segment":KEY,"checksums":[CRC-32 of each event line],"last":BOOL,"checksum":CRC-32 of
    the seal}

The seal names its own segment, which reveals copied, joined, emptied and truncated segments. Each
writer numbers its segments, which reveals lost segments; `last` marks the writer's final segment.
Segments of version 1 have no seal and are read without verification.

S3 lists new objects at once. Other stores (OpenStack Swift) may omit an object from a listing for a
while, although it can be read by its name. Two things help to find such an object: each writer's
segments are numbered, so the next number can be requested; and the events of a generation show
which processes must have written segments.
"""

import json
import os
import re
import stat
import sys
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ebbflow.core.errors import ObjectNotFound, StoreError, StoreForbidden, StoreUnavailable
from ebbflow.core.store import Store
from ebbflow.core.store.folder import HANG_GUARD

_READERS = 16
_FILES_TOGETHER = 64  # segments that are read in one guarded call
_MOST_HELD = 512  # segments that are held in memory at a time
# Wait for writers without any listed segment; most were killed before they wrote
_PATIENCE_SECONDS = 2.0
_PAUSE_SECONDS = 0.25
_NAME = re.compile(r"(events/\d+/.+)-(\d{6})\.(\w+)\.jsonl")
_SEAL_VERSION = 2
_SEAL_START = b'{"seal":'
_MOST_MISSING = 1000  # limit of missing segments per writer: a file's name may contain any number
_MOST_NODES = 100_000  # limit for a generation: a larger number is damage


@dataclass(frozen=True)
class Damage:
    """A part of the event log that is missing, unreadable or does not match its checksums."""

    segment: str  # key of the segment
    what: str  # description of the damage
    line: int = 0  # number of the line, counted from 1; 0: the whole segment

    @property
    def text(self) -> str:
        return f"{self.segment}{f' line {self.line}' if self.line else ''}: {self.what}"


@dataclass(frozen=True)
class Line:
    """A line of a segment, with one event."""

    segment: str  # key of the segment that contains it
    number: int  # number of the line, counted from 1
    content: bytes  # bytes without the line feed
    sealed: bool  # whether its checksum is in a seal


@dataclass(kw_only=True)
class Segments:
    """Segments (files) of a job's event log, read from a store and not yet verified."""

    contents: dict[str, bytes] = field(default_factory=dict)  # content of each segment, by key
    damage: list[Damage] = field(default_factory=list)  # damage found so far
    unreadable: set[str] = field(default_factory=set)  # listed keys that could not be read

    def lose(self, key: str, what: str) -> None:
        self.unreadable.add(key)
        self.damage.append(Damage(key, what))


@dataclass(kw_only=True)
class Unsealed:
    """The event lines of a log after their checksums were verified, and all damage that was found."""

    lines: list[Line]  # the event lines, without copies
    damage: list[Damage]  # everything that cannot be used
    # Processes with segments, as (prefix of the key, random text in the key)
    writers: set[tuple[str, str]]
    open_writers: set[tuple[str, str]]  # writers of sealed segments, none of them marked `last`


def seal_segment(key: str, lines: Sequence[str], *, last: bool) -> bytes:
    """Encode events as a segment: one JSON line each, then the seal (a line with their checksums).

    last: whether this is the writer's final segment.
    """
    encoded = [line.encode() for line in lines]
    seal = {
        "seal": _SEAL_VERSION,
        "segment": key,
        "checksums": [_checksum(line) for line in encoded],
        "last": last,
    }
    body = json.dumps(seal, separators=(",", ":")).encode()
    sealed = body[:-1] + f',"checksum":"{_checksum(body)}"}}'.encode()
    return b"\n".join([*encoded, sealed]) + b"\n"


def unseal(segments: Segments, *, gaps: bool = True) -> Unsealed:
    """Verify the segments and return their event lines.

    Args:
        gaps: Whether a missing number between a writer's segments is damage. False if `segments` is
            a part of the log.
    """
    own: list[Line] = []
    foreign: list[Line] = []
    damage = list(segments.damage)
    last: dict[str, bool] = {}  # of sealed segments, by key
    for key in sorted(segments.contents):
        _unseal_one(key, segments.contents[key], own, foreign, damage, last)
    lines = _once([*own, *foreign], damage)  # a copy counts if its original is lost
    writers: dict[tuple[str, str], set[int]] = defaultdict(set)
    still_open: set[tuple[str, str]] = set()
    for key in [*segments.contents, *segments.unreadable]:
        if match := _NAME.fullmatch(key):
            writers[match[1], match[3]].add(int(match[2]))
    for writer, numbers in sorted(writers.items()):
        missing = sorted(set(range(max(numbers))) - numbers)
        for number in missing[:_MOST_MISSING] if gaps else ():
            damage.append(
                Damage(_key_of(writer, number), "the segment is missing, and its events with it")
            )
        if gaps and len(missing) > _MOST_MISSING:
            rest = (
                f"{len(missing) - _MOST_MISSING} more segments before it are missing, or its "
                "number is wrong"
            )
            damage.append(Damage(_key_of(writer, max(numbers)), rest))
        sealed = any(_key_of(writer, number) in last for number in numbers)
        if sealed and not last.get(_key_of(writer, max(numbers))):
            still_open.add(writer)
    return Unsealed(lines=lines, damage=damage, writers=set(writers), open_writers=still_open)


def read_segments(job_store: Store) -> Segments:
    """Read every segment of a job.

    Unreadable segments become damage records. Raises StoreError if the store fails.
    """
    found = Segments()
    with ThreadPoolExecutor(_READERS, thread_name_prefix="events") as pool:
        _read_listed(job_store, pool, found)
        _read_next(job_store, pool, found)
        if job_store.local_path("events") is not None:
            return found
        limit = time.monotonic() + _PATIENCE_SECONDS
        while (silent := _silent_writers(found.contents)) and time.monotonic() < limit:
            time.sleep(_PAUSE_SECONDS)
            _read_listed(job_store, pool, found)
            _read_next(job_store, pool, found)
    planned = [writer for writer, by_plan in silent.items() if by_plan]
    if planned:
        text = ", ".join(sorted(planned)[:5])
        print(
            f"events: WARNING: nothing is listed of {text}; figures may be too low",
            file=sys.stderr,
            flush=True,
        )
    return found


def read_new_segments(
    job_store: Store, known: Segments, wanted: Callable[[str], bool]
) -> Iterator[dict[str, bytes]]:
    """Yield the contents of segments that are not in `known`, by key, and add their keys to
    `known`.

    Raises StoreError.
    """
    known.damage.clear()
    known.unreadable.clear()  # they may be readable by now
    with ThreadPoolExecutor(_READERS, thread_name_prefix="events") as pool:
        for contents in _read_unknown(job_store, pool, known, wanted):
            known.contents.update(dict.fromkeys(contents, b""))
            yield contents


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _key_of(writer: tuple[str, str], number: int) -> str:
    return f"{writer[0]}-{number:06d}.{writer[1]}.jsonl"


def _unseal_one(
    key: str,
    content: bytes,
    own: list[Line],
    foreign: list[Line],
    damage: list[Damage],
    last: dict[str, bool],
) -> None:
    """Verify one segment, and add its lines to `own` or `foreign`, and its damage to `damage`.

    A seal is a line with the checksums of the lines before it. `own` gets the lines under the
    segment's own seal or a damaged seal, and all lines of a segment without a seal. `foreign` gets
    the lines under another segment's seal, and those after the last seal. `last` maps the segment's
    key to whether its seal marks it as the writer's last segment.
    """
    numbered = list(enumerate(content.split(b"\n"), start=1))
    if numbered[-1][1] == b"":
        numbered.pop()
    if not numbered:
        damage.append(Damage(key, "the segment is empty"))
    pending: list[tuple[int, bytes]] = []
    seals = 0
    for number, line in numbered:
        if not line.startswith(_SEAL_START):
            pending.append((number, line))
            continue
        seals += 1
        seal = _read_seal(line)
        if seal is None:
            damage.append(
                Damage(
                    key, f"the seal is damaged; {_events(len(pending))} cannot be verified", number
                )
            )
            own += [Line(key, at, event, False) for at, event in pending]
        else:
            name, checksums, is_last = seal
            good, bad = _verify(pending, checksums)
            damage += [
                Damage(key, f"the checksum does not match; {_hint(event)} is left out", at)
                for at, event in bad
            ]
            missing = len(checksums) - len(good) - len(bad)
            if missing > 0:
                damage.append(
                    Damage(key, f"{missing} of its {_events(len(checksums))} are missing")
                )
            if name == key:
                own += [Line(key, at, event, True) for at, event in good]
                last[key] = is_last
            else:
                damage.append(
                    Damage(key, f"holds {_events(len(good))} of another segment, {name}", number)
                )
                foreign += [Line(key, at, event, True) for at, event in good]
        pending = []
    if seals and pending:
        damage.append(
            Damage(key, f"{_events(len(pending))} after the seal cannot be verified", pending[0][0])
        )
        foreign += [Line(key, at, event, False) for at, event in pending]
    else:
        own += [Line(key, at, event, False) for at, event in pending]
    if (
        seals
        and key not in last
        and not any(flaw.segment == key and "seal is damaged" in flaw.what for flaw in damage)
    ):
        damage.append(Damage(key, "its own seal is missing"))


def _once(lines: Sequence[Line], damage: list[Damage]) -> list[Line]:
    """Remove duplicate lines, and add a damage record for each segment that has duplicates.

    Equal lines are always copies, because no two events of a process have the same time.
    """
    first: dict[bytes, str] = {}
    copies: Counter[tuple[str, str]] = Counter()
    found = []
    for line in lines:
        original = first.setdefault(line.content, line.segment)
        if original == line.segment:
            found.append(line)
        else:
            copies[line.segment, original] += 1
    for (segment, original), count in copies.items():
        damage.append(
            Damage(segment, f"holds {_events(count)} that {original} has as well; counted once")
        )
    return found


def _read_seal(line: bytes) -> tuple[str, list[str], bool] | None:
    """Parse a seal into (segment, checksums, last).

    Return None if the seal does not match its own checksum.
    """
    body, mark, checksum = line.rpartition(b',"checksum":')
    if not mark or checksum != f'"{_checksum(body + b"}")}"}}'.encode():
        return None
    try:
        seal = json.loads(line)
        return (
            str(seal["segment"]),
            [str(checksum) for checksum in seal["checksums"]],
            bool(seal["last"]),
        )
    except (ValueError, KeyError, TypeError):
        return None


def _verify(
    pending: list[tuple[int, bytes]], checksums: list[str]
) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
    """Split numbered lines into those whose checksum is in `checksums`, in any order, and the
    rest.
    """
    left = Counter(checksums)
    good = []
    bad = []
    for number, line in pending:
        checksum = _checksum(line)
        fits = left[checksum] > 0
        left[checksum] -= fits
        (good if fits else bad).append((number, line))
    return good, bad


def _events(count: int) -> str:
    return f"{count} event{'' if count == 1 else 's'}"


def _hint(line: bytes) -> str:
    name = re.search(rb'"name":"([a-z0-9_]{1,40})"', line)
    rank = re.search(rb'"rank":(-?\d{1,6})\b', line)
    step = re.search(rb'"step":(\d{1,12})\b', line)
    if rank and int(rank[1]) >= 0:
        parts = [f"rank {int(rank[1])}"]
    else:
        parts = []
    if step:
        parts += [f"step {int(step[1])}"]
    if name:
        kind = f"an event that seems to be {name[1].decode()!r}"
    else:
        kind = "an event"
    if parts:
        return f"{kind} ({', '.join(parts)})"
    return kind


def _read_listed(job_store: Store, pool: ThreadPoolExecutor, found: Segments) -> None:
    for contents in _read_unknown(job_store, pool, found):
        found.contents.update(contents)


def _read_unknown(
    job_store: Store,
    pool: ThreadPoolExecutor,
    found: Segments,
    wanted: Callable[[str], bool] = lambda key: True,  # noqa: ARG005 - a default for all keys
) -> Iterator[dict[str, bytes]]:
    """Yield the contents of segments that are wanted and not yet in `found`.

    Record unreadable segments in `found`.
    """
    folder = job_store.local_path("events")
    if folder is None:
        listed = [meta.key for meta in job_store.list("events")]
    else:
        what = f"list {job_store.uri}/events"
        listed, damage = HANG_GUARD.run(
            lambda: _list_folder(folder), job_store.request_seconds, what
        )
        for flaw in damage:
            if flaw.segment not in found.unreadable and flaw.segment not in found.contents:
                found.lose(flaw.segment, flaw.what)

    def read(keys: Sequence[str]) -> list[bytes | str]:
        if folder is None:
            return [_get(job_store, key) for key in keys]
        # One guard for several files: it starts a thread, which takes longer than the reading.
        return HANG_GUARD.run(
            lambda: [_get(job_store, key) for key in keys],
            job_store.request_seconds,
            f"read {folder}",
        )

    known = found.contents.keys() | found.unreadable
    keys = [key for key in listed if key not in known and wanted(key)]
    for start in range(0, len(keys), _MOST_HELD):
        window = keys[start : start + _MOST_HELD]
        if folder is None:
            size = 1
        else:
            size = max(1, min(_FILES_TOGETHER, len(window) // _READERS))
        parts = [window[at : at + size] for at in range(0, len(window), size)]
        contents = dict(
            zip(window, (one for part in pool.map(read, parts) for one in part), strict=True)
        )
        for key, content in contents.items():
            if isinstance(content, str):
                found.lose(key, f"the segment cannot be read: {content}")
        yield {key: content for key, content in contents.items() if isinstance(content, bytes)}


def _get(job_store: Store, key: str) -> bytes | str:
    """Return an object's content, or a message that says why it is unreadable.

    Raises StoreError if the store fails.
    """
    try:
        return job_store.get(key)
    except StoreUnavailable:
        raise
    except StoreError as error:
        if isinstance(error, StoreForbidden) and job_store.local_path(key) is None:
            raise  # a matter of credentials, not of this object
        return " ".join(str(error).split())


def _list_folder(folder: Path) -> tuple[list[str], list[Damage]]:
    """List the keys of the segments in a folder, and a damage record for each other entry."""
    keys: list[str] = []
    damage: list[Damage] = []
    for name, path in _entries(folder, "events", damage):
        if not path.is_dir():
            continue
        for inner, entry in _entries(path, f"events/{name}", damage):
            key = f"events/{name}/{inner}"
            if not inner.endswith(".jsonl"):
                continue
            try:
                mode = entry.stat().st_mode
            except OSError as error:
                damage.append(Damage(key, f"the segment cannot be read: {error.strerror}"))
                continue
            if stat.S_ISREG(mode) and key.isascii():
                keys.append(key)
            else:
                kinds = {
                    "a directory": stat.S_ISDIR,
                    "a socket": stat.S_ISSOCK,
                    "a pipe": stat.S_ISFIFO,
                }
                kind = next(
                    (kind for kind, test in kinds.items() if test(mode)),
                    "a file of another kind or name",
                )
                damage.append(Damage(key, f"not a segment but {kind}"))
    return sorted(keys), damage


def _entries(folder: Path, key: str, damage: list[Damage]) -> list[tuple[str, Path]]:
    try:
        names = os.listdir(os.fsencode(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        damage.append(Damage(key, f"the folder cannot be read: {error.strerror}"))
        return []
    return [
        (name.decode(errors="backslashreplace"), folder / os.fsdecode(name))
        for name in sorted(names)
    ]


def _read_next(job_store: Store, pool: ThreadPoolExecutor, found: Segments) -> None:
    """Read segments that the store's listing omits.

    The omitted segments have numbers between two listed ones or, in a remote store, after the last
    listed one. At most `_MOST_MISSING` missing segments per writer are requested. `unseal` reports
    all missing segments.
    """
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for key in [*found.contents, *found.unreadable]:
        if match := _NAME.fullmatch(key):
            numbers[match[1], match[3]].add(int(match[2]))
    local = job_store.local_path("events") is not None

    def more(writer: tuple[str, str]) -> dict[str, bytes]:
        known = numbers[writer]
        answers = {}
        number = 0
        missing = 0
        highest = max(known)
        while not (local and number > highest):
            if number not in known:
                key = _key_of(writer, number)
                try:
                    answers[key] = job_store.get(key)
                except ObjectNotFound:
                    missing += 1
                    if number > highest:
                        return answers
                    if missing == _MOST_MISSING:
                        number = highest
            number += 1
        return answers

    for answers in pool.map(more, list(numbers)):
        found.contents.update(answers)


def _silent_writers(found: dict[str, bytes]) -> dict[str, bool]:
    """Find agents and ranks of ended generations whose segments should exist but do not.

    The result maps the key prefix of each such process to whether its generation ended as planned.
    """
    heard = {match[1] for key in found if (match := _NAME.fullmatch(key))}
    ended: dict[int, bool] = {}
    without_ranks: set[int] = set()
    expected: dict[int, set[str]] = defaultdict(set)
    for event in _gang_events(found.values()):
        try:
            number = int(event["generation"])
            data = event["data"]
            folder = f"events/{number:06d}"
            if event["name"] == "generation_started":
                nodes = range(min(int(data["nodes"]), _MOST_NODES))
                expected[number] |= {f"{folder}/{node}-agent" for node in nodes}
            elif event["name"] == "node_started":
                expected[number] |= {f"{folder}/{event['node']}-{rank}" for rank in data["ranks"]}
            else:
                ended[number] = not data.get("culprit")
                if data.get("ranks_started") is False:
                    without_ranks.add(number)
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # a damaged line: the report names it
    return {
        writer: by_plan
        for number, by_plan in ended.items()
        for writer in expected[number] - heard
        if number not in without_ranks or writer.endswith("-agent")
    }


def _gang_events(segments: Iterable[bytes]) -> Iterable[dict]:
    names = tuple(
        f'"name":"{name}"'.encode()
        for name in ("generation_started", "node_started", "generation_ended")
    )
    for segment in segments:
        for line in segment.splitlines():
            if any(name in line for name in names):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue
