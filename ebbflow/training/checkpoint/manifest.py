"""Define the objects of a commit: one index per rank, and a canonical manifest merged from them.

JSON, no pickle.

data object   a rank's pieces of tensors as little-endian bytes, each piece aligned to 64 bytes
index         the position of each piece, a checksum per chunk (16 MiB by default) and a checksum of the index itself;
              the index of rank 0 also has `extra`: JSON data that the trainer stores, such as its
              position in the job
manifest      all indexes merged: the pieces of each tensor and their positions. It contains no host name and no time,
              so every rank writes the same bytes, under a key that contains their SHA-256
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.layout import data_key, parse_commit_key
from ebbflow.training.checkpoint.verified_io import canonical_json, seal, sha256_text, unseal
from ebbflow.training.errors import CheckpointError, CorruptCommit, MisplacedCommit

VERSION = 1
ALIGNMENT = 64


@dataclass(frozen=True, kw_only=True)
class CheckpointId:
    """The identity of a checkpoint. All objects of the checkpoint contain it."""

    job: str
    generation: str  # name of the generation, that is its number and its random id
    step: int
    world_size: int

    @property
    def generation_number(self) -> int:
        return int(self.generation.split("-")[0])


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """A rectangular piece of a tensor, and the position of its bytes in a rank's data object."""

    name: str
    dtype: str  # as torch names it, without "torch."
    shape: tuple[int, ...]  # shape of the whole tensor
    # Position of the piece's first element in the whole tensor, by dimension
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]  # shape of the piece
    start: int  # offset of the piece in the data object, in bytes
    length: int  # length of the piece in bytes

    def to_json(self) -> list[Json]:
        return list(self.__dict__.values())

    @classmethod
    def from_json(cls, row: Sequence[Json]) -> IndexEntry:
        return cls(**_fields(cls, row))


@dataclass(frozen=True, kw_only=True)
class DataObject:
    """The bytes that one rank uploaded: key, size and CRC64NVME checksums of the whole object and
    of each chunk.
    """

    key: str
    size: int  # size of the object in bytes
    crc64nvme: str
    chunk_bytes: int
    # Checksum of each chunk of `chunk_bytes` bytes; the last chunk may be shorter
    chunks: tuple[str, ...]
    # SHA-256 of each chunk if commits are signed, since a CRC can be forged; otherwise empty and
    # not stored
    sha256: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        return {name: value for name, value in self.__dict__.items() if name != "sha256" or value}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> DataObject:
        sha256 = tuple(document.get("sha256", ()))
        return cls(**{**document, "chunks": tuple(document["chunks"]), "sha256": sha256})


@dataclass(frozen=True, kw_only=True)
class RankIndex:
    """The description of one rank's part of a checkpoint."""

    save: CheckpointId
    rank: int
    data: DataObject
    items: tuple[IndexEntry, ...]
    # extra, optimizer settings and key of the parent commit; only rank 0 stores them
    common: dict[str, Any] | None = None
    # signature of the other fields and the index's key (`signing.Signer`); empty and not stored if
    # unsigned
    hmac: str = ""

    def to_bytes(self) -> bytes:
        document = {
            "version": VERSION,
            **self.save.__dict__,
            "rank": self.rank,
            "data": self.data.to_json(),
            "items": [item.to_json() for item in self.items],
            "common": self.common,
        }
        return seal({**document, "hmac": self.hmac} if self.hmac else document)

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> RankIndex:
        document = unseal(data, key)
        _check_version(document, key)
        try:
            return cls(
                save=_save_of(document),
                rank=document["rank"],
                data=DataObject.from_json(document["data"]),
                items=tuple(IndexEntry.from_json(row) for row in document["items"]),
                common=document["common"],
                hmac=str(document.get("hmac", "")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptCommit(f"{key}: not an index of version {VERSION}: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class TensorPiece:
    """A rectangular piece of a tensor, and the position of its bytes in the data object of `rank`."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """A whole tensor, and the pieces that cover it exactly once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a commit: the indexes of all ranks, merged."""

    save: CheckpointId
    data: tuple[DataObject, ...]  # data objects, in the order of ranks
    indexes: tuple[str, ...]  # SHA-256 of each rank's index
    tensors: dict[str, TensorEntry]  # tensors by name
    # Extra, optimizer settings and key of the parent commit
    common: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Total bytes of the data objects."""
        return sum(item.size for item in self.data)

    def to_bytes(self) -> bytes:
        rows = {}
        for name, entry in self.tensors.items():
            pieces = [list(piece.__dict__.values()) for piece in entry.pieces]
            rows[name] = [entry.dtype, entry.shape, pieces]
        document = {
            "version": VERSION,
            **self.save.__dict__,
            "data": [item.to_json() for item in self.data],
            "indexes": self.indexes,
            "tensors": rows,
            "common": self.common,
        }
        return canonical_json(document)

    @classmethod
    def from_bytes(cls, data: bytes, key: str) -> Manifest:
        """Parse the manifest with the commit key `key`.

        Raises CorruptCommit if the bytes do not have the SHA-256 in the key or are not a manifest
        of this format, and MisplacedCommit if the manifest belongs to another commit's key.
        """
        step, generation, stated = parse_commit_key(key)
        actual = sha256_text(data)
        if actual != stated:
            raise CorruptCommit(f"{key}: the manifest's SHA-256 is {actual}")
        try:
            document = json.loads(data)
            _check_version(document, key)
            tensors = {
                name: TensorEntry(
                    dtype=dtype,
                    shape=tuple(shape),
                    pieces=tuple(TensorPiece(**_fields(TensorPiece, row)) for row in pieces),
                )
                for name, (dtype, shape, pieces) in document["tensors"].items()
            }
            save = _save_of(document)
            if (save.step, save.generation_number) != (step, generation):
                raise MisplacedCommit(
                    f"{key}: its manifest is of step {save.step} of generation {save.generation}"
                )
            manifest = cls(
                save=save,
                data=tuple(DataObject.from_json(item) for item in document["data"]),
                indexes=tuple(document["indexes"]),
                tensors=tensors,
                common=dict(document["common"]),
            )
            wrong = next(manifest._inconsistencies(), "")
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:
            raise CorruptCommit(
                f"{key}: not a manifest of version {VERSION}: {error!r}"[:500]
            ) from error
        if wrong:
            raise CorruptCommit(f"{key}: {wrong}")
        return manifest

    def _inconsistencies(self) -> Iterator[str]:
        """Yield a description of each count or size that contradicts another part of the manifest."""
        world_size = self.save.world_size
        if not len(self.data) == len(self.indexes) == world_size:
            yield f"{len(self.data)} data objects, {len(self.indexes)} indexes, {world_size} ranks"
        for item in self.data:
            if not isinstance(item.key, str) or item.size < 0 or item.chunk_bytes < 1:
                yield f"{item.key!r}: {item.size} bytes in chunks of {item.chunk_bytes}"
            elif len(item.chunks) != -(-item.size // item.chunk_bytes):
                yield (
                    f"{item.key}: {len(item.chunks)} sums for {item.size} bytes in chunks of "
                    f"{item.chunk_bytes}"
                )
            elif item.sha256 and len(item.sha256) != len(item.chunks):
                yield f"{item.key}: {len(item.sha256)} SHA-256 for {len(item.chunks)} chunks"

    def problems(self) -> Iterator[str]:
        """Yield a description of each tensor piece that exceeds its data object or does not match
        its own shape.
        """
        for name, entry in self.tensors.items():
            for piece in entry.pieces:
                if not 0 <= piece.rank < len(self.data):
                    yield (
                        f"{name}: a piece is in the object of rank {piece.rank} of {len(self.data)}"
                    )
                elif piece.start < 0 or piece.start + piece.length > self.data[piece.rank].size:
                    end = piece.start + piece.length
                    size = self.data[piece.rank].size
                    yield f"{name}: bytes {piece.start} to {end} of an object of {size}"
                elif math.prod(piece.sizes) * dtype_bytes(entry.dtype) != piece.length:
                    yield (
                        f"{name}: a piece of {list(piece.sizes)} {entry.dtype} cannot have "
                        f"{piece.length} bytes"
                    )


def merge_indexes(save: CheckpointId, indexes: Sequence[tuple[RankIndex, bytes]]) -> Manifest:
    """Merge the indexes of all ranks into a manifest.

    Each index is given with its serialised bytes, in rank order.

    Raises CheckpointError if an index belongs to another save or names another rank's data object,
    or if the pieces do not cover every tensor exactly once.
    """
    for rank, (index, _) in enumerate(indexes):
        if index.save != save or index.rank != rank:
            raise CheckpointError(
                f"the index of rank {rank} is of rank {index.rank} of {index.save}, not of {save}"
            )
        key = data_key(save.generation, save.step, rank)
        if index.data.key != key:
            raise CheckpointError(
                f"the index of rank {rank} names the data object {index.data.key!r}, not {key}"
            )
    found: dict[str, tuple[tuple[str, tuple[int, ...]], dict[tuple[int, ...], TensorPiece]]] = {}
    for index, _ in indexes:
        for item in index.items:
            kind, pieces = found.setdefault(item.name, ((item.dtype, item.shape), {}))
            if kind != (item.dtype, item.shape):
                raise CheckpointError(
                    f"{item.name} is {item.dtype} {item.shape} on rank {index.rank}, else {kind}"
                )
            box = {
                "offsets": item.offsets,
                "sizes": item.sizes,
                "start": item.start,
                "length": item.length,
            }
            pieces.setdefault(item.offsets, TensorPiece(rank=index.rank, **box))
    tensors = {name: _entry(name, *about) for name, about in found.items()}
    return Manifest(
        save=save,
        data=tuple(index.data for index, _ in indexes),
        indexes=tuple(sha256_text(raw) for _, raw in indexes),
        tensors=tensors,
        common=indexes[0][0].common or {},
    )


def dtype_bytes(dtype: str) -> int:
    """Return the bytes per element of a torch dtype, given its name."""
    bits = re.search(r"\d+", dtype)
    if bits:
        return int(bits[0]) // 8
    return 1


def _entry(
    name: str, kind: tuple[str, tuple[int, ...]], boxes: dict[tuple[int, ...], TensorPiece]
) -> TensorEntry:
    dtype, shape = kind
    covered = sum(math.prod(piece.sizes) for piece in boxes.values())
    if covered != math.prod(shape):
        raise CheckpointError(
            f"{name}: its pieces hold {covered} elements, its shape {list(shape)} "
            f"{math.prod(shape)}"
        )
    return TensorEntry(
        dtype=dtype, shape=shape, pieces=tuple(boxes[offsets] for offsets in sorted(boxes))
    )


def _fields(kind: type, row: Sequence[Json]) -> dict[str, Any]:
    """Convert a JSON list to the fields of the dataclass `kind`, in order.

    Nested lists become tuples.
    """
    values = [tuple(value) if isinstance(value, list) else value for value in row]
    return dict(zip(kind.__dataclass_fields__, values, strict=True))


def _save_of(document: dict[str, Any]) -> CheckpointId:
    return CheckpointId(
        **{name: document[name] for name in ("job", "generation", "step", "world_size")}
    )


def _check_version(document: dict[str, Any], key: str) -> None:
    """Raise CheckpointError if a record has a newer version, and CorruptCommit if it has an invalid
    one.
    """
    version = document.get("version")
    if version == VERSION and not isinstance(version, bool):
        return
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(f"{key}: version {version}; this program reads version {VERSION}")
    raise CorruptCommit(f"{key}: not a record of any version: {version!r}"[:300])
