"""Read and write one file of `torch.save`: ours, a plain state dict, or the usual containers; written tensor by tensor.

First everything but the tensors' bytes, whose places `torch.serialization.skip_data` leaves free; then these bytes, at
the places that the file's own directory gives them. The file is a zip archive of stored entries; the CRC-32 of what
is filled in is written too, so that unzip and Python's zipfile read it as well as torch does.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ebbflow.training.checkpoint.formats.content import Content, add_optimizer, bare_weights, torch_optimizer
from ebbflow.training.errors import CheckpointError

# APPNOTE.TXT of PKWARE, 4.3.7, 4.3.9, 4.3.12: of a local header, a data descriptor, and an entry of the directory
_LOCAL_BYTES, _LOCAL_LENGTHS = 30, 26
_DESCRIPTOR, _DESCRIPTOR_CRC = b"PK\x07\x08", 4
_ENTRY, _ENTRY_BYTES, _ENTRY_CRC, _ENTRY_LENGTHS = b"PK\x01\x02", 46, 16, 28


def save_hollow(document: Any, names: Mapping[int, str], path: Path) -> list[str]:
    """Save `document`, whose tensors have no values, with room for them. names: of each tensor, by its `id`.

    Returns the names in the order of the storages in the file, each of which belongs to one tensor.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # a second, and only here

    order: list[str] = []
    with FakeTensorMode():  # torch.save refuses tensors on the device "meta"
        hollow = _faked(document, names, order)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(hollow, path)
    return order


def fill(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Put the values of the tensors, given in the order of the storages, where room was left for them."""
    with path.open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            entries = [info for info in archive.infolist() if info.filename.split("/")[1:-1] == ["data"]]
            directory = archive.start_dir
        sums: dict[str, int] = {}
        for number, (name, tensor) in enumerate(tensors):
            raw = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
            info = entries[number] if number < len(entries) else None
            if info is None or (info.filename.rsplit("/", 1)[-1], info.file_size) != (str(number), len(raw)):
                raise CheckpointError(f"{path}: no room was left for {name}, {len(raw)} bytes; there is {info}")
            sums[info.filename] = zlib.crc32(raw)
            _fill_entry(file, info, raw, sums[info.filename])
        _fill_directory(file, directory, sums)


def _faked(value: Any, names: Mapping[int, str], order: list[str]) -> Any:
    """The same in the order in which pickle walks through it, with tensors that have a storage in name only."""
    if isinstance(value, Tensor):
        order.append(names[id(value)])
        return torch.empty(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _faked(inner, names, order) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_faked(inner, names, order) for inner in value)
    return value


def _fill_entry(file: BinaryIO, info: zipfile.ZipInfo, raw: memoryview, crc: int) -> None:
    file.seek(info.header_offset + _LOCAL_LENGTHS)
    start = info.header_offset + _LOCAL_BYTES + sum(struct.unpack("<HH", file.read(4)))
    file.seek(start)
    file.write(raw)
    if file.read(len(_DESCRIPTOR)) == _DESCRIPTOR:
        file.seek(start + len(raw) + _DESCRIPTOR_CRC)
        file.write(struct.pack("<I", crc))


def _fill_directory(file: BinaryIO, start: int, sums: Mapping[str, int]) -> None:
    at = start
    while True:
        file.seek(at)
        entry = file.read(_ENTRY_BYTES)
        if entry[: len(_ENTRY)] != _ENTRY:
            return
        lengths = struct.unpack("<HHH", entry[_ENTRY_LENGTHS : _ENTRY_LENGTHS + 6])
        if (crc := sums.get(file.read(lengths[0]).decode())) is not None:
            file.seek(at + _ENTRY_CRC)
            file.write(struct.pack("<I", crc))
        at += _ENTRY_BYTES + sum(lengths)


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
