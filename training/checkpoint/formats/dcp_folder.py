"""A folder of torch's distributed checkpoint. Its `.metadata` is a pickle: import only folders that you trust."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from ebbflow.training.checkpoint.formats.content import Content, named_optimizer
from ebbflow.training.checkpoint.formats.torch_file import parse_document
from ebbflow.training.errors import CheckpointError


def read_dcp(path: Path, weights_only: bool) -> Content:
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    flat: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        tensor = isinstance(entry, TensorStorageMetadata)
        flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if tensor else None
    dcp.load(flat, storage_reader=FileSystemReader(path), no_dist=True)
    paths = metadata.planner_data or {}
    document: Any = {}
    for key, value in flat.items():
        _put(document, tuple(paths.get(key) or (key,)), value)
    document = _listed(document)
    if isinstance(document.get("extra"), str):
        document["extra"] = json.loads(document["extra"])
    return parse_document(document, str(path), weights_only)


def write_dcp(content: Content, path: Path) -> None:
    """As `get_state_dict` names it, so that `dcp.load` and `set_state_dict` take it."""
    document: dict[str, Any] = {"model": content.weights, "step": content.step, "extra": json.dumps(content.extra)}
    if content.settings is not None:
        document["optimizer"] = named_optimizer(content)
    # Copying ahead, which it does where there is CUDA, would ask for a tensor before the one before it is written.
    writer = FileSystemWriter(path, single_file_per_rank=True, per_thread_copy_ahead=0)
    try:
        dcp.save(document, storage_writer=writer, planner=_Planner(content), no_dist=True)
    except CheckpointException as error:  # a BaseException, around what happened
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


class _Planner(DefaultSavePlanner):
    """Plans with shapes alone, and takes each tensor's values from the content when it is written."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content
        self._names = {id(tensor): name for name, tensor in content.named().items()}
        self._values: Iterator[tuple[str, Tensor]] = iter(())

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        self._values = self._content.stream([self._name(item) for item in tensors])
        return plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        name, value = next(self._values)  # the one before it is written: the writer keeps it, but reads it no more
        if name != self._name(write_item):
            raise CheckpointError(f"torch's writer asks for {self._name(write_item)}, and {name} is planned to be next")
        return value

    def _name(self, item: WriteItem) -> str:
        return self._names[id(self.lookup_object(item.index))]


def _put(document: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        document = document.setdefault(part, {})
    document[path[-1]] = value


def _listed(document: Any) -> Any:
    """Where all keys are whole numbers from 0 on, a list was taken apart; keys of mappings are text."""
    if not isinstance(document, dict):
        return document
    inner = {key: _listed(value) for key, value in document.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner
