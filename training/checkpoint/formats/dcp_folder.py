"""A folder of torch's distributed checkpoint. Its `.metadata` is a pickle: import only folders that you trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training.checkpoint.formats.content import Content, named_optimizer
from training.checkpoint.formats.torch_file import parse_document


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
    dcp.save(document, storage_writer=FileSystemWriter(path, single_file_per_rank=True), no_dist=True)


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
