"""A reader of commits for DCP (`torch.distributed.checkpoint`), which selects a rank's pieces at any world size."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.manifest import Manifest, TensorEntry, TensorPiece
from ebbflow.training.checkpoint.reader import ReadFigures, VerifiedReader, WantedRange, read_manifest
from ebbflow.training.errors import CorruptCommit

_Finish = Callable[[], object]


class CommitReader(StorageReader):
    """Reader that verifies the commit `key` of a job's store; also usable with `dcp.load`.

    `parallel` chunks are read at once; default: 2 from a local store, 8 from a remote one.
    """

    def __init__(self, job_store: Store, key: str, *, parallel: int | None = None) -> None:
        self.manifest: Manifest = read_manifest(job_store, key)
        self._reader = VerifiedReader(job_store, self.manifest.data, parallel=parallel)

    @property
    def figures(self) -> ReadFigures:
        return self._reader.figures

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(state_dict_metadata={name: _storage(e) for name, e in self.manifest.tensors.items()})

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

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
        return False  # a commit is identified by a store and a key, not by one path

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a load plan.

        Each chunk is read once, straight into a tensor where the tensor's memory is contiguous.
        """
        wanted: list[WantedRange] = []
        finishes: list[_Finish] = []
        targets = []
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            targets.append((item, target))
            piece = self._piece(item)
            self._want(self.manifest.tensors[item.storage_index.fqn], piece, item, target, wanted, finishes)
        self._reader.read(wanted)
        for finish in finishes:
            finish()
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_whole(self, *names: str) -> dict[str, torch.Tensor]:
        """Read the named tensors completely into new CPU memory, and return them by name."""
        found: dict[str, torch.Tensor] = {}
        for name in names:
            entry = self.manifest.tensors[name]
            found[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        self.read_into(found)
        return found

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the given tensors completely. Their names, shapes and dtypes are those of the commit."""
        wanted: list[WantedRange] = []
        finishes: list[_Finish] = []
        for name, target in targets.items():
            entry = self.manifest.tensors[name]
            for piece in entry.pieces:
                box = target
                for dimension, (offset, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                    box = box.narrow(dimension, offset, size)
                self._want(entry, piece, None, box, wanted, finishes)
        self._reader.read(wanted)
        for finish in finishes:
            finish()

    def _piece(self, item: ReadItem) -> TensorPiece:
        entry = self.manifest.tensors[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset or ())
        return next(piece for piece in entry.pieces if piece.offsets == offsets)

    def _want(
        self,
        entry: TensorEntry,
        piece: TensorPiece,
        item: ReadItem | None,
        target: torch.Tensor,
        wanted: list[WantedRange],
        finishes: list[_Finish],
    ) -> None:
        """Add the request that reads one piece of a tensor into `target`.

        Bytes that do not fit the memory of `target` as they are stored are read into a temporary tensor first.

        Args:
            item: selects the rows to read; None means the whole piece.
            wanted: list to which the request is added.
            finishes: list to which the copy from the temporary tensor is added, to be called after the read.
        """
        dtype = getattr(torch, entry.dtype)
        sizes = piece.sizes or (1,)  # a scalar is a row of one element
        if math.prod(sizes) * dtype.itemsize != piece.length:
            raise CorruptCommit(f"a piece of {list(piece.sizes)} {entry.dtype} cannot have {piece.length} bytes")
        offsets, lengths = ((0,) * len(sizes), sizes) if item is None else (item.storage_offsets, item.lengths)
        offsets, lengths = tuple(offsets) or (0,), tuple(lengths) or (1,)
        if math.prod(lengths) == 0:
            return
        start = piece.start + offsets[0] * math.prod(sizes[1:]) * dtype.itemsize
        if lengths[1:] == sizes[1:] and (view := _memory(target, dtype)) is not None:
            wanted.append(WantedRange(piece.rank, start, view))
            return
        rows = torch.empty((lengths[0], *sizes[1:]), dtype=dtype)
        box = rows
        for dimension in range(1, len(sizes)):
            box = box.narrow(dimension, offsets[dimension], lengths[dimension])
        view = _memory(rows, dtype)
        assert view is not None
        wanted.append(WantedRange(piece.rank, start, view))
        finishes.append(lambda: target.copy_(box.view(target.shape) if target.dim() == 0 else box))


def _memory(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return the tensor's memory if stored bytes can be read straight into it; else None."""
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return None
    return tensor.view(-1).view(torch.uint8).numpy().data


def _storage(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
