"""One file of `torch.save`: ours, or a plain state dict, or the containers that people put it in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.formats.content import Content, add_optimizer, bare_weights, torch_optimizer
from training.checkpoint.formats.torch_hollow import fill, save_hollow
from training.errors import CheckpointError

_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
_OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict", "optim_state_dict")


def read_torch(path: Path, weights_only: bool) -> Content:
    """Without running code from it (`weights_only`)."""
    return parse_document(torch.load(path, map_location="cpu", mmap=True, weights_only=True), str(path), weights_only)


def write_torch(content: Content, path: Path) -> None:
    document: dict[str, Any] = {"model": content.weights, "step": content.step, "extra": content.extra}
    if content.settings is not None:
        document["optimizer"] = torch_optimizer(content)
    if content.source is None:
        torch.save(document, path)
    else:
        names = save_hollow(document, {id(tensor): name for name, tensor in content.named().items()}, path)
        fill(path, content.stream(names))


def parse_document(document: Any, what: str, weights_only: bool) -> Content:
    """A state dict, or a mapping that has one under a usual name."""
    if not isinstance(document, Mapping):
        raise CheckpointError(f"{what}: is a {type(document).__name__}, no state dict")
    if all(isinstance(value, Tensor) for value in document.values()):
        return Content(weights=bare_weights(document, what))
    key = next((key for key in _MODEL_KEYS if isinstance(document.get(key), Mapping)), None)
    if key is None:
        found = ", ".join(map(str, list(document)[:8]))
        raise CheckpointError(f"{what}: no weights under any of {', '.join(_MODEL_KEYS)}; it has {found}")
    content = Content(weights=bare_weights(document[key], what))
    if isinstance(document.get("extra"), Mapping):  # one of ours, which goes on where it was; another's begins anew
        content.step, content.extra = int(document["step"]), dict(document["extra"])
    for key in () if weights_only else _OPTIMIZER_KEYS:
        found = document.get(key)
        if isinstance(found, Mapping) and {"state", "param_groups"} <= set(found):
            add_optimizer(content, found, what)
            break
    return content
