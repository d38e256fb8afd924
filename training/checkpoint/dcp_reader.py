"""Our commits as a storage of torch's DCP: its planner finds out which pieces a rank needs, at any world size."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

from infra.store import Store
from training.checkpoint.manifest import Manifest, Piece, TensorEntry
from training.checkpoint.reader import VerifiedObject, read_manifest
from training.errors import CorruptCommit


class CommitReader(StorageReader):
    """Reads the commit `key` of a job's store; every byte is verified. Also usable with `dcp.load`."""

    def __init__(self, job_store: Store, key: str) -> None:
        self.manifest: Manifest = read_manifest(job_store, key)
        self._objects = [VerifiedObject(job_store, data) for data in self.manifest.data]

    @property
    def bytes_read(self) -> int:
        return sum(data.bytes_read for data in self._objects)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return Metadata(state_dict_metadata={name: _storage(e) for name, e in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False  # a store and a key are needed, one path says too little

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """In the order of the bytes, so that each chunk is fetched once."""
        requests = [(self._piece(item), item) for item in plan.items]
        for piece, item in sorted(requests, key=lambda request: (request[0].rank, request[0].start)):
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._box(piece, item))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_whole(self, name: str) -> torch.Tensor:
        """One tensor in full, on the CPU."""
        entry = self.manifest.tensors[name]
        whole = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            box = whole
            for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                box = box.narrow(dimension, offset, size)
            box.copy_(self._rows(entry, piece, 0, piece.sizes[0] if piece.sizes else 1))
        return whole

    def _piece(self, item: ReadItem) -> Piece:
        entry = self.manifest.tensors[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset)
        return next(piece for piece in entry.pieces if piece.offsets == offsets)

    def _box(self, piece: Piece, item: ReadItem) -> torch.Tensor:
        """The part of a piece that is asked for; only the rows it spans are read."""
        entry = self.manifest.tensors[item.storage_index.fqn]
        if not piece.sizes:
            return self._rows(entry, piece, 0, 1)
        box = self._rows(entry, piece, item.storage_offsets[0], item.lengths[0])
        for dimension in range(1, len(piece.sizes)):
            box = box.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
        return box

    def _rows(self, entry: TensorEntry, piece: Piece, first: int, count: int) -> torch.Tensor:
        dtype = getattr(torch, entry.dtype)
        row_elements = 1
        for size in piece.sizes[1:]:
            row_elements *= size
        row_bytes = row_elements * dtype.itemsize
        rows = piece.sizes[0] if piece.sizes else 1
        if rows * row_bytes != piece.length:
            raise CorruptCommit(f"a piece of {list(piece.sizes)} {entry.dtype} cannot have {piece.length} bytes")
        if count * row_bytes == 0:
            return torch.empty((count, *piece.sizes[1:]), dtype=dtype)
        data = self._objects[piece.rank].read(piece.start + first * row_bytes, count * row_bytes)
        tensor = torch.frombuffer(data, dtype=dtype)
        return tensor.view((count, *piece.sizes[1:]) if piece.sizes else ())


def _storage(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
