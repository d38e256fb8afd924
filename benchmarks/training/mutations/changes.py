"""Single changes to a checkpoint's files, drawn at random, and undone again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """Files of one kind of a checkpoint, in the order of ranks. earlier: their counterparts of the
    one before it.
    """

    files: list[Path]
    earlier: list[Path]


@dataclass(frozen=True)
class Parts:
    """The files of a checkpoint below `root`, by kind.

    Where there is data, its ranks are at least two.
    """

    root: Path
    by_name: dict[str, Part]


def kinds(parts: Parts) -> list[str]:
    """The changes that this format can meet: one without indexes has none to flip."""
    found = [f"{change} {name}" for name in parts.by_name for change in [*_IN_PLACE, "extra"]]
    for name, part in parts.by_name.items():
        if part.earlier:
            found += [f"{name} of another step", f"{name} swapped between steps"]
        if len(part.files) > 1 and part.earlier:  # what has no earlier one is not by rank
            found.append(f"{name} swapped between ranks")
    return found


@contextmanager
def changed(parts: Parts, kind: str, chance: random.Random) -> Iterator[str]:
    """One change, for as long as the block lasts; then all files below the root are as before.

    Yields what was done.
    """
    before = _snapshot(parts.root)
    written = _drawn(parts, kind, chance)
    if all(before.get(path) == data for path, data in written.items()):
        raise RuntimeError(f"{kind}: changes nothing")
    try:
        for path, data in written.items():
            _write(path, data)
        yield (
            f"{kind}: "
            f"{'; '.join(_told(parts, path, before.get(path), data) for path, data in written.items())}"
        )
    finally:
        now = _snapshot(parts.root)
        for path in now.keys() | before.keys():
            if now.get(path) != before.get(path):
                _write(path, before.get(path))


def _drawn(parts: Parts, kind: str, chance: random.Random) -> dict[Path, bytes | None]:
    """The new content of each file that is changed, None: it is removed."""
    for name, part in parts.by_name.items():
        place = chance.randrange(len(part.files))
        path = part.files[place]
        if kind == f"extra {name}":
            return {_neighbour(path, chance): chance.randbytes(64)}
        if kind == f"{name} of another step":
            return {path: part.earlier[place].read_bytes()}
        if kind == f"{name} swapped between steps":
            return _swapped(path, part.earlier[place])
        if kind == f"{name} swapped between ranks":
            return _swapped(*chance.sample(part.files, 2))
        for change, make in _IN_PLACE.items():
            if kind == f"{change} {name}":
                return {path: make(path.read_bytes(), chance)}
    raise ValueError(f"no such change: {kind}")


def _swapped(first: Path, second: Path) -> dict[Path, bytes | None]:
    return {first: second.read_bytes(), second: first.read_bytes()}


def _neighbour(path: Path, chance: random.Random) -> Path:
    """A name that is not taken and looks like its neighbour's: its last run of letters and digits
    drawn anew.
    """
    while True:
        stem = path.stem
        tail = stem[len(stem.rstrip("0123456789abcdef")) :]
        drawn = "".join(
            chance.choice("0123456789" if tail.isdigit() else "0123456789abcdef") for _ in tail
        )
        found = path.with_name(
            f"{stem[: len(stem) - len(tail)]}{drawn or chance.randrange(100)}{path.suffix}"
        )
        if not found.exists():
            return found


def _snapshot(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _write(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(data)


def _told(parts: Parts, path: Path, before: bytes | None, after: bytes | None) -> str:
    place = path.relative_to(parts.root)
    if before is None or after is None:
        return f"{place} {'added' if before is None else 'removed'}"
    shorter = min(len(before), len(after))
    first = next((at for at in range(shorter) if before[at] != after[at]), shorter)
    if len(before) == len(after):
        size = f"{len(before)} bytes"
    else:
        size = f"{len(before)} to {len(after)} bytes"
    return f"{place} ({size}) from byte {first}"


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
