"""safetensors: weights under their plain names in NAME.safetensors, the optimizer's state beside it.

NAME.optimizer.safetensors has `<parameter>.<state>`; step, settings and extra are JSON in the metadata of the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ebbflow.training.checkpoint.formats.content import Content, bare_weights
from ebbflow.training.errors import CheckpointError

_OURS = "ebbflow"
_OPTIMIZER = ".optimizer.safetensors"
_WEIGHTS, _STATES = "model.", "optimizer."
_ALIGNMENT = 8
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


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
    """One tensor after the other, which the library's own writer does not do: it wants all of them in memory."""
    about = {"step": content.step, "extra": content.extra, "settings": content.settings}
    metadata = {"format": "pt", _OURS: json.dumps(about)}
    _write(content, _WEIGHTS, path, metadata)
    if content.settings is not None:
        _write(content, _STATES, _beside(path), {"format": "pt"})


def _write(content: Content, prefix: str, path: Path, metadata: dict[str, str]) -> None:
    """The tensors of `Content.named` that begin with `prefix`, under their names without it.

    The format (https://github.com/huggingface/safetensors, "Format"): eight bytes with the length of the header, the
    header as JSON, and the bytes of the tensors without gaps. As the library does, larger elements come first, so that
    each tensor is aligned to its own.
    """
    named = {name: tensor for name, tensor in content.named().items() if name.startswith(prefix)}
    order = sorted(named, key=lambda name: -named[name].element_size())
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in order:
        start, end = end, end + named[name].numel() * named[name].element_size()
        about = {"dtype": _dtype(named[name], name), "shape": list(named[name].shape), "data_offsets": [start, end]}
        header[name.removeprefix(prefix)] = about
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, tensor in content.stream(order):
            file.write(memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()))


def _dtype(tensor: Tensor, name: str) -> str:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(f"{name} is {tensor.dtype}, which safetensors has no name for; hint: --kind dcp")
    return _DTYPES[tensor.dtype]


def _beside(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".safetensors") + _OPTIMIZER)


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(f"{path}: the package safetensors is missing; fix: pip install safetensors") from error
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
