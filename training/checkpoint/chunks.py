"""Which chunks hold what is wanted, and where in memory each byte of a chunk belongs. Pure arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ebbflow.training.checkpoint.manifest import DataObject
from ebbflow.training.errors import CorruptCommit

_MOST_PIECES = 512  # of one read; of more and smaller ones a copy is cheaper than the list of them


@dataclass(frozen=True)
class Wanted:
    """`len(view)` bytes from `start` of data object number `object`, to be put into `view`, which can be written."""

    object: int
    start: int
    view: memoryview


@dataclass(frozen=True)
class _Part:
    """What of a chunk belongs where: `view` from `at`, counted from the chunk's beginning."""

    at: int
    view: memoryview


@dataclass(frozen=True)
class ChunkRead:
    """Chunk `number` of data object `object`: `length` bytes from `start`; `parts` in the order of their places."""

    object: int
    number: int
    start: int
    length: int
    parts: tuple[_Part, ...]

    @property
    def disjoint(self) -> bool:
        """Whether one read can put every byte where it belongs."""
        ends = [part.at + len(part.view) for part in self.parts]
        return len(ends) <= _MOST_PIECES and all(
            end <= part.at for end, part in zip(ends, self.parts[1:], strict=False)
        )

    def buffers(self, gap: memoryview) -> list[memoryview]:
        """The memory that the chunk's bytes fill, in order; what nobody wants goes to `gap`, of the chunk's length."""
        found, at = [], 0
        for part in self.parts:
            if part.at > at:
                found.append(gap[at : part.at])
            found.append(part.view)
            at = part.at + len(part.view)
        if at < self.length:
            found.append(gap[at : self.length])
        return found

    def place(self, data: memoryview) -> None:
        """Copy the chunk's bytes to where they belong."""
        for part in self.parts:
            part.view[:] = data[part.at : part.at + len(part.view)]


def plan_chunks(wanted: Iterable[Wanted], objects: Sequence[DataObject]) -> list[ChunkRead]:
    """Each chunk that is needed, once, in the order of the bytes. Raises CorruptCommit beyond an object's end."""
    parts: dict[tuple[int, int], list[_Part]] = defaultdict(list)
    for want in wanted:
        data, end = objects[want.object], want.start + len(want.view)
        if want.start < 0 or end > data.size:
            raise CorruptCommit(f"{data.key}: bytes {want.start} to {end} are beyond its {data.size}")
        size = data.chunk_bytes
        for number in range(want.start // size, -(-end // size) if len(want.view) else 0):
            low, high = max(want.start, number * size), min(end, (number + 1) * size)
            piece = want.view[low - want.start : high - want.start]
            parts[want.object, number].append(_Part(low - number * size, piece))
    chunks = []
    for (place, number), found in sorted(parts.items(), key=lambda item: item[0]):
        data = objects[place]
        base = number * data.chunk_bytes
        length = min(data.chunk_bytes, data.size - base)
        chunks.append(ChunkRead(place, number, base, length, tuple(sorted(found, key=lambda part: part.at))))
    return chunks
