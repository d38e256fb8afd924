"""Single changes to a checkpoint's files, drawn at random, and undone again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Parts:
    """The files of one checkpoint by part, and the data files of an earlier one, in the same order of ranks."""

    data: list[Path]
    index: list[Path]
    manifest: list[Path]
    earlier: list[Path]


def kinds(parts: Parts) -> list[str]:
    """The changes that this format can meet: one without indexes has none to flip."""
    named = {"data": parts.data, "index": parts.index, "manifest": parts.manifest}
    found = [f"{change} {name}" for name, files in named.items() if files for change in _IN_PLACE]
    return [*found, "shard of another step", "shards of two ranks swapped", "extra object"]


@contextmanager
def changed(parts: Parts, kind: str, chance: random.Random) -> Iterator[str]:
    """One change, for as long as the block lasts. Yields what was done."""
    if kind == "shard of another step":
        number = chance.randrange(len(parts.data))
        written = {parts.data[number]: parts.earlier[number].read_bytes()}
    elif kind == "shards of two ranks swapped":
        first, second = parts.data[:2]
        written = {first: second.read_bytes(), second: first.read_bytes()}
    elif kind == "extra object":
        near = chance.choice(parts.data)
        written = {near.with_name(f"{chance.randrange(10, 99):05d}{near.suffix}"): chance.randbytes(64)}
    else:
        change, _, name = kind.rpartition(" ")
        path = chance.choice(getattr(parts, name))
        written = {path: _IN_PLACE[change](path.read_bytes(), chance)}
    before = {path: path.read_bytes() if path.exists() else None for path in written}
    try:
        for path, data in written.items():
            _write(path, data)
        yield f"{kind}: {', '.join(path.name for path in written)}"
    finally:
        for path, data in before.items():
            _write(path, data)


def _write(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data)


def _flip(data: bytes, chance: random.Random) -> bytes:
    bit = chance.randrange(len(data) * 8)
    return data[: bit // 8] + bytes([data[bit // 8] ^ (1 << bit % 8)]) + data[bit // 8 + 1 :]


def _truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


def _extend(data: bytes, chance: random.Random) -> bytes:
    return data + chance.randbytes(chance.randint(1, 64))


_IN_PLACE: dict[str, Callable[[bytes, random.Random], bytes | None]] = {
    "bit flipped in": _flip,
    "truncated": _truncate,
    "extended": _extend,
    "missing": lambda *_: None,
}
