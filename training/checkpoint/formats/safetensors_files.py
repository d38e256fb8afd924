"""safetensors: weights under their plain names in NAME.safetensors, the optimizer's state beside it.

NAME.optimizer.safetensors has `<parameter>.<state>`; step, settings and extra are JSON in the metadata of the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from training.checkpoint.formats.content import Content, bare_weights
from training.errors import CheckpointError

_OURS = "ebbflow"
_OPTIMIZER = ".optimizer.safetensors"


def read_safetensors(path: Path, weights_only: bool) -> Content:
    """One file, or a folder whose files together hold the weights."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.glob("*.safetensors") if not file.name.endswith(_OPTIMIZER))
    state: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for file in files:
        tensors, metadata = _read(file)
        if doubled := set(tensors) & set(state):
            raise CheckpointError(f"{path}: {sorted(doubled)[:3]} are in more than one of its files")
        state |= tensors
        about |= json.loads(metadata.get(_OURS, "{}"))
    content = Content(weights=bare_weights(state, str(path)), step=about.get("step", 0), extra=about.get("extra", {}))
    beside = _beside(path)
    if not weights_only and beside.exists() and about.get("settings") is not None:
        content.settings = about["settings"]
        for name, tensor in _read(beside)[0].items():
            parameter, key = name.rsplit(".", 1)
            content.moments.setdefault(parameter, {})[key] = tensor
    return content


def write_safetensors(content: Content, path: Path) -> None:
    from safetensors.torch import save_file

    about = {"step": content.step, "extra": content.extra, "settings": content.settings}
    metadata = {"format": "pt", _OURS: json.dumps(about)}
    save_file({name: tensor.contiguous() for name, tensor in content.weights.items()}, path, metadata=metadata)
    if content.settings is not None:
        flat = {f"{name}.{key}": t for name, states in content.moments.items() for key, t in states.items()}
        save_file({name: tensor.contiguous() for name, tensor in flat.items()}, _beside(path))


def _beside(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".safetensors") + _OPTIMIZER)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(f"{path}: the package safetensors is missing; fix: pip install safetensors") from error
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
