"""A commit as content, and content as the first commit of a new job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from infra.layout import data_key, index_key
from infra.multipart import Throttle, open_sink
from infra.store import Store
from training.checkpoint.commit import put_settled, try_commit
from training.checkpoint.dcp_reader import CommitReader
from training.checkpoint.deadline import Deadline, retried
from training.checkpoint.formats.content import Content
from training.checkpoint.lineage import CommitRef, newest_number, open_generation
from training.checkpoint.manifest import ALIGNMENT, Item, RankIndex, Save
from training.checkpoint.parts import PartSettings, PartUploader
from training.errors import CheckpointError

_OBJECT_BYTES = 2 * 2**30  # of one data object: memory that an import needs besides what it reads


def read_commit(store: Store, key: str) -> Content:
    """All of it, verified, in memory; the random states of the ranks are left out."""
    reader = CommitReader(store, key)
    manifest = reader.manifest
    names = [name for name in manifest.tensors if name.startswith(("model.", "optimizer."))]
    tensors = reader.read_whole(*names)
    content = Content(weights={}, step=manifest.save.step, extra=manifest.common.get("extra") or {})
    content.settings = manifest.common.get("optimizer")
    for name in names:
        kind, _, rest = name.partition(".")
        if kind == "model":
            content.weights[rest] = tensors[name]
        else:
            parameter, key = rest.rsplit(".", 1)
            content.moments.setdefault(parameter, {})[key] = tensors[name]
    return content


def commit_content(store: Store, content: Content, *, source: str, seconds: float = 3600.0) -> CommitRef:
    """Make `content` the first commit of a job that has none: a start from it goes on with what is there.

    seconds: for all of it. Raises CheckpointError, also when the job has been started before.
    """
    if newest_number(store):
        raise CheckpointError(f"{store.uri}: the job has been started already; hint: import into a new job's name")
    generation = open_generation(store, run="import", attempt=0)
    deadline = Deadline(seconds)
    objects = list(_objects(content.named()))
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
    commit = retried("commit", lambda: try_commit(store, save), deadline).commit
    if commit is None:
        raise CheckpointError(f"{store.uri}: the indexes that were put are not there")
    return commit


def _job(store: Store) -> str:
    return store.uri.rsplit("/", 1)[-1]


def _objects(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, as many as fit into one object; a larger one has an object of its own."""
    found: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        length = tensor.numel() * tensor.element_size()
        if found and size + length > _OBJECT_BYTES:
            yield found
            found, size = {}, 0
        found[name] = tensor
        size += length
    yield found


def _packed(tensors: dict[str, Tensor]) -> tuple[tuple[Item, ...], memoryview]:
    items: list[Item] = []
    end = 0
    for name, tensor in tensors.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        length = tensor.numel() * tensor.element_size()
        end = start + length
        shape: tuple[Any, ...] = tuple(tensor.shape)
        boxes: dict[str, Any] = {"shape": shape, "offsets": (0,) * len(shape), "sizes": shape}
        items.append(
            Item(name=name, dtype=str(tensor.dtype).removeprefix("torch."), start=start, length=length, **boxes)
        )
    whole = torch.zeros(end, dtype=torch.uint8)
    for item, tensor in zip(items, tensors.values(), strict=True):
        if item.length:
            whole[item.start : item.start + item.length].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return tuple(items), memoryview(whole.numpy())
