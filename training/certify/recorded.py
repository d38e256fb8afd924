"""Any workload with a witness: what every batch held is written down, as a hash, before it is trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from infra.config.schema import RunConfig
from training.certify.small import FOLDER_OPTION, RECORDED, WORKLOAD_OPTION
from training.workload import Batch, Cursor, WorkloadContext
from training.workloads.loader import make_workload, prepare_data


class Recorded:
    """Options: those of the workload itself, its name, and the folder for the records; the latter two it never sees."""

    def __init__(self, context: WorkloadContext) -> None:
        self._workload: Any = make_workload(own_config(context.config), _own_context(context))
        self._name = str(context.options[WORKLOAD_OPTION] or "the built-in one")
        self._path = Path(str(context.options[FOLDER_OPTION])) / f"rank-{context.rank}.jsonl"

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        """What the workload itself prepares."""
        return prepare_data(own_config(context.config), _own_context(context))

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Batch:
        batch = self._workload.next_batch(model, cursor)
        record = {"first": cursor.first, "count": cursor.count, "sha256": content_sha256(batch)}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._workload, name)


def own_config(config: RunConfig) -> RunConfig:
    """The configuration as the workload itself is to see it."""
    assert config.workload == RECORDED
    options = dict(config.workload_options)
    options.pop(FOLDER_OPTION)
    return config.model_copy(update={"workload": options.pop(WORKLOAD_OPTION) or None, "workload_options": options})


def _own_context(context: WorkloadContext) -> WorkloadContext:
    return dataclasses.replace(context, config=own_config(context.config))


def content_sha256(batch: Any) -> str:
    """Of every tensor and number that a batch holds, in the order of its fields."""
    digest = hashlib.sha256()
    for part in _parts(batch):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        yield f"{array.dtype}{tuple(array.shape)}".encode()
        yield array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _parts(vars(value))
    else:
        yield repr(value).encode()
