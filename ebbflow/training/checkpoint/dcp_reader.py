"""A storage reader for DCP (`torch.distributed.checkpoint`).

With it, DCP can load a commit at any world size.
"""

import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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

from ebbflow.core.store import Store
from ebbflow.training.checkpoint.boxes import own_boxes
from ebbflow.training.checkpoint.manifest import Manifest, TensorEntry, TensorPiece
from ebbflow.training.checkpoint.reader import (
    ReadFigures,
    VerifiedReader,
    WantedRange,
    read_manifest,
)
from ebbflow.training.errors import CorruptCommit


class CommitReader(StorageReader):
    """DCP storage reader for the commit `key` of a job's store.

    It verifies everything that it reads.

    User code can pass such a reader to `dcp.load`.

    Args:
        parallel: number of chunks that are read concurrently.
        group_bytes: bytes per group of reads. Data for a GPU stays on the host until its group has
            been read.
        progress: called after each group.
    """

    def __init__(
        self,
        job_store: Store,
        key: str,
        *,
        parallel: int | None = None,
        group_bytes: int = 2**29,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.manifest: Manifest = read_manifest(job_store, key)
        self._reader = VerifiedReader(job_store, self.manifest.data, parallel=parallel)
        self._group_bytes = group_bytes
        self._progress = progress

    @property
    def figures(self) -> ReadFigures:
        return self._reader.figures

    @cached_property
    def _metadata(self) -> Metadata:
        return Metadata(
            state_dict_metadata={name: _storage(e) for name, e in self.manifest.tensors.items()}
        )

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(
        cls,
        checkpoint_id: str | os.PathLike[str],  # noqa: ARG003 torch's interface
    ) -> bool:
        return False  # a commit is identified by a store and a key, not by one path

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of a load plan.

        Read each chunk once, and directly into contiguous tensors.
        """
        targets = [(item, planner.resolve_tensor(item).detach()) for item in plan.items]
        pieces = [self._piece(item) for item in plan.items]
        self._read(
            (item.storage_index.fqn, piece, item.storage_offsets, item.lengths, target)
            for (item, target), piece in zip(targets, pieces, strict=True)
        )
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def read_into(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the parts of the given tensors that this rank holds.

        Names, whole shapes and dtypes of the tensors must be those of the commit.
        """
        requests = []
        for name, target in targets.items():
            for box, piece in itertools.product(
                own_boxes(target), self.manifest.tensors[name].pieces
            ):
                starts = list(map(max, box.offsets, piece.offsets))
                box_ends = map(operator.add, box.offsets, box.sizes)
                piece_ends = map(operator.add, piece.offsets, piece.sizes)
                ends = map(min, box_ends, piece_ends)
                sizes = list(map(operator.sub, ends, starts))
                if all(size > 0 for size in sizes):
                    part = box.local
                    for dimension, (start, at) in enumerate(zip(starts, box.offsets, strict=True)):
                        part = part.narrow(dimension, start - at, sizes[dimension])
                    requests.append(
                        (name, piece, list(map(operator.sub, starts, piece.offsets)), sizes, part)
                    )
        self._read(requests)

    def _read(
        self,
        requests: Iterable[tuple[str, TensorPiece, Sequence[int], Sequence[int], torch.Tensor]],
    ) -> None:
        """Read pieces of tensors.

        A request is (tensor name, piece, offsets and sizes of the part of the piece to read, tensor
        to fill). If the stored bytes cannot be read directly into the tensor's memory, they are
        read into a temporary tensor first. Requests are read in groups, to limit the memory of
        temporary tensors.
        """
        wanted: list[WantedRange] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        waiting = 0  # bytes of `wanted`

        def read_group() -> None:
            self._reader.read(wanted)
            for target, rows in copies:
                target.copy_(rows)
            wanted.clear()
            copies.clear()
            self._progress()

        # In the order of the stored bytes, so that groups have few chunks in common, which are read
        # twice.
        for name, piece, part_offsets, part_sizes, target in sorted(
            requests, key=lambda request: (request[1].rank, request[1].start)
        ):
            entry = self.manifest.tensors[name]
            dtype = getattr(torch, entry.dtype)
            sizes = piece.sizes or (1,)  # a scalar is a row of one element
            if math.prod(sizes) * dtype.itemsize != piece.length:
                raise CorruptCommit(
                    f"a piece of {list(piece.sizes)} {entry.dtype} cannot have {piece.length} bytes"
                )
            offsets = tuple(part_offsets) or (0,)
            lengths = tuple(part_sizes) or (1,)
            if math.prod(lengths) == 0:
                continue
            start = piece.start + offsets[0] * math.prod(sizes[1:]) * dtype.itemsize
            if lengths[1:] == sizes[1:]:
                view = _memory(target, dtype)
            else:
                view = None
            length = lengths[0] * math.prod(sizes[1:]) * dtype.itemsize
            if waiting + length > self._group_bytes:
                read_group()
                waiting = 0
            waiting += length
            if view is None:
                rows = torch.empty((lengths[0], *sizes[1:]), dtype=dtype)
                view = _memory(rows, dtype)
                for dimension in range(1, len(sizes)):
                    rows = rows.narrow(dimension, offsets[dimension], lengths[dimension])
                copies.append((target, rows.view(target.shape) if target.dim() == 0 else rows))
            assert view is not None
            wanted.append(WantedRange(piece.rank, start, view))
        read_group()

    def _piece(self, item: ReadItem) -> TensorPiece:
        entry = self.manifest.tensors[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset or ())
        return next(piece for piece in entry.pieces if piece.offsets == offsets)


def _memory(tensor: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return the tensor's memory if stored bytes of this dtype can be read directly into it, else
    None.
    """
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        return None
    return tensor.view(-1).view(torch.uint8).numpy().data


def _storage(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces
    ]
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    return TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
