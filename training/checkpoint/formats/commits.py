"""A commit as content, and content as the first commit of a new job."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infra.layout import data_key, index_key
from infra.multipart import Throttle, open_sink
from infra.store import Store
from training.checkpoint.commit import await_commit
from training.checkpoint.dcp_reader import CommitReader
from training.checkpoint.deadline import Deadline, retried
from training.checkpoint.formats.content import Content
from training.checkpoint.generations import newest_number
from training.checkpoint.lineage import CommitRef, open_generation
from training.checkpoint.manifest import ALIGNMENT, Item, Manifest, RankIndex, Save, TensorEntry
from training.checkpoint.parts import PartSettings, PartUploader
from training.checkpoint.settled import put_settled
from training.errors import CheckpointError

_WINDOW_BYTES = 128 * 2**20  # read at once by an export
_OBJECT_BYTES = 2 * 2**30  # of one data object: memory that an import needs besides what it reads


def read_commit(store: Store, key: str) -> Content:
    """Its tensors are read and verified when they are asked for; the random states of the ranks are left out."""
    reader = CommitReader(store, key)
    manifest = reader.manifest
    content = Content(weights={}, step=manifest.save.step, extra=manifest.common.get("extra") or {})
    content.settings = manifest.common.get("optimizer")
    content.source = partial(_stream, reader)
    for name in sorted(manifest.tensors, key=partial(_place, manifest)):
        entry = manifest.tensors[name]
        kind, _, rest = name.partition(".")
        if kind not in ("model", "optimizer"):
            continue
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        if kind == "model":
            content.weights[rest] = tensor
        else:
            parameter, key = rest.rsplit(".", 1)
            content.moments.setdefault(parameter, {})[key] = tensor
    return content


def _place(manifest: Manifest, name: str) -> tuple[int, str]:
    """Tensors in the order in which they lie in the objects share chunks with their neighbours."""
    return min((piece.start for piece in manifest.tensors[name].pieces), default=0), name


def _stream(reader: CommitReader, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """A window of them at a time: whole chunks are read and verified, which are mostly larger than a tensor.

    At the edges of a window a chunk of each object may be read twice: a window is at least as large as two of each.
    All windows use the same memory: what comes and goes in pieces leaves a heap with holes that grows all the same.
    """
    manifest = reader.manifest
    most_bytes = max([_WINDOW_BYTES, *(2 * len(manifest.data) * data.chunk_bytes for data in manifest.data)])
    windows = [_laid_out(window) for window in _windows({n: _bytes(manifest.tensors[n]) for n in names}, most_bytes)]
    memory = memoryview(torch.empty(max(end for _, end in windows), dtype=torch.uint8).numpy())
    for starts, _ in windows:
        targets = {name: _tensor_in(memory, start, manifest.tensors[name]) for name, start in starts.items()}
        reader.read_into(targets)
        yield from targets.items()


def _tensor_in(memory: memoryview, start: int, entry: TensorEntry) -> Tensor:
    """With a storage of its own, of its own size: writers of whole storages would write all the memory else."""
    dtype, length = getattr(torch, entry.dtype), _bytes(entry)
    if not length:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory[start : start + length], dtype=dtype).view(entry.shape)


def commit_content(store: Store, content: Content, *, source: str, seconds: float = 3600.0) -> CommitRef:
    """Make `content` the first commit of a job that has none: a start from it goes on with what is there.

    seconds: for all of it. Raises CheckpointError, also when the job has been started before.
    """
    if newest_number(store):
        raise CheckpointError(f"{store.uri}: the job has been started already; hint: import into a new job's name")
    generation = open_generation(store, run="import", attempt=0)
    deadline = Deadline(seconds)
    named = content.named()
    sizes = {name: _bytes(tensor) for name, tensor in named.items()}
    objects = [{name: named[name] for name in window} for window in _windows(sizes, _OBJECT_BYTES)]
    save = Save(job=_job(store), generation=generation.name, step=content.step, world_size=len(objects))
    extra = {"cursor": 0, **content.extra, "step": content.step, "imported_from": source}
    common = {"extra": extra, "optimizer": content.settings, "parent": None}
    uploader = PartUploader(open_sink(store.uri, Throttle()), PartSettings(), Throttle())
    for rank, tensors in enumerate(objects):
        items, view = _packed(tensors)
        data = uploader.upload(data_key(save.generation, save.step, rank), view, deadline)
        index = RankIndex(save=save, rank=rank, data=data, items=items, common=common if rank == 0 else None)
        key, raw = index_key(save.generation, save.step, rank), index.to_bytes()
        retried(f"put {key}", lambda key=key, raw=raw: put_settled(store, key, raw), deadline)
    commit = await_commit(store, save, deadline).commit
    assert commit is not None
    return commit


def _job(store: Store) -> str:
    return store.uri.rsplit("/", 1)[-1]


def _windows(sizes: dict[str, int], most_bytes: int) -> Iterator[dict[str, int]]:
    """Sizes in bytes by name, in their order, as many as fit; a larger one is alone. At least one, maybe empty."""
    found: dict[str, int] = {}
    size = 0
    for name, length in sizes.items():
        if found and size + length > most_bytes:
            yield found
            found, size = {}, 0
        found[name] = length
        size += length
    yield found


def _laid_out(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Where each begins when they lie behind each other, aligned, and where the last ends."""
    starts: dict[str, int] = {}
    end = 0
    for name, length in sizes.items():
        starts[name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = starts[name] + length
    return starts, end


def _bytes(tensor: Tensor | TensorEntry) -> int:
    dtype = tensor.dtype if isinstance(tensor.dtype, torch.dtype) else getattr(torch, tensor.dtype)
    return math.prod(tensor.shape) * dtype.itemsize


def _packed(tensors: dict[str, Tensor]) -> tuple[tuple[Item, ...], memoryview]:
    starts, end = _laid_out({name: _bytes(tensor) for name, tensor in tensors.items()})
    whole = torch.zeros(end, dtype=torch.uint8)
    items: list[Item] = []
    for name, tensor in tensors.items():
        start, length = starts[name], _bytes(tensor)
        shape: tuple[Any, ...] = tuple(tensor.shape)
        boxes: dict[str, Any] = {"shape": shape, "offsets": (0,) * len(shape), "sizes": shape}
        dtype = str(tensor.dtype).removeprefix("torch.")
        items.append(Item(name=name, dtype=dtype, start=start, length=length, **boxes))
        if length:
            whole[start : start + length].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return tuple(items), memoryview(whole.numpy())
