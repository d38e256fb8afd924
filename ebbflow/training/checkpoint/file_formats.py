"""Read and write checkpoint files of other programs: DCP folders, safetensors and torch files.

Imports torch.

No format requires all tensors to be in memory at once while a file is written. A torch file is
written in two passes: first everything except the tensors' bytes, for which
`torch.serialization.skip_data` reserves space, then these bytes. The file is a zip archive of
uncompressed entries. Their CRC-32 is filled in too, so that unzip and Python's zipfile can read the
file.

Safetensors files hold weights. The optimizer's tensors are in a second file,
NAME.optimizer.safetensors, with names `<parameter>.<state>`. The first file's metadata contains, as
JSON, the step, the optimizer settings and `extra` (the trainer's further data).
"""

import errno
import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.json_values import JsonObject
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.checkpoint.foreign_files import (
    METADATA,
    FolderFiles,
    check_file,
    check_names_of_index,
    list_folder_files,
    load_dcp,
    load_torch_file,
)
from ebbflow.training.checkpoint.hugging_face import their_name, write_settings
from ebbflow.training.checkpoint.model_folder import abbreviate
from ebbflow.training.checkpoint.portable_state import (
    PortableState,
    add_optimizer,
    named_optimizer,
    torch_optimizer,
    unwrap_weights,
)
from ebbflow.training.errors import CheckpointError, NoRoom, TrainingError

KINDS = ("dcp", "safetensors", "torch")
# PKWARE APPNOTE.TXT 4.3.7, 4.3.9, 4.3.12: local header, data descriptor, directory entry
_LOCAL_BYTES = 30
_LOCAL_LENGTHS = 26
_DESCRIPTOR = b"PK\x07\x08"
_DESCRIPTOR_CRC = 4
_ENTRY = b"PK\x01\x02"
_ENTRY_BYTES = 46
_ENTRY_CRC = 16
_ENTRY_LENGTHS = 28
_MODEL_KEYS = ("model", "state_dict", "model_state_dict", "model_state", "module")
_OPTIMIZER_KEYS = (
    "optimizer",
    "optim",
    "optimizer_state_dict",
    "optim_state_dict",
    "optimizer_state",
)
_OURS = "ebbflow"
_OPTIMIZER = ".optimizer.safetensors"
_WEIGHTS = "model."
_STATES = "optimizer."
_ALIGNMENT = 8
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
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


def read_file(
    path: Path, *, weights_only: bool = False, allow_pickle: bool = False
) -> PortableState:
    """Read a DCP folder, a model folder of Hugging Face, a safetensors file or a torch file.

    Args:
        path: the file or folder
        weights_only: leave out the optimizer
        allow_pickle: run the code that a torch file or DCP folder names

    Raises:
        TrainingError: it cannot be read, is incomplete, or needs `allow_pickle`
    """
    _refuse_special_files(path)
    kind = _kind_of(path)
    try:
        if kind == "dcp":
            return read_dcp(path, weights_only, allow_pickle)
        if kind == "torch":
            document = load_torch_file(path, allow_pickle=allow_pickle)
            return parse_document(document, str(path), weights_only)
        return read_weight_files(path, weights_only, allow_pickle)
    except TrainingError:
        raise
    except Exception as error:  # each library raises its own exceptions
        cause = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: cannot be read as {kind}: {type(error).__name__}: {cause}; hint: copy it again"
        ) from error


def write_file(
    content: PortableState, path: Path, kind: str, config: RunConfig | None = None
) -> None:
    """Write `content` in the format `kind`: one of KINDS or "hugging-face".

    Only "hugging-face" uses `config`.

    After an error, remove the incomplete output.

    Raises CheckpointError (the path exists), NoRoom (the disk is full).
    """
    if os.path.lexists(path) and not path.is_char_device():
        raise CheckpointError(f"{path}: exists already; hint: choose another name")
    try:
        if config is not None and kind == "hugging-face":
            write_hugging_face(content, path, config)
        else:
            {"dcp": write_dcp, "safetensors": write_safetensors, "torch": write_torch}[kind](
                content, path
            )
    except Exception as error:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif not path.is_char_device():
            path.unlink(missing_ok=True)
        if is_full(error):
            cause = " ".join(str(error).split())[:200]
            raise NoRoom(
                f"{path}: the disk is full ({cause}); hint: free space, or export to another disk"
            ) from error
        raise


def is_full(error: BaseException | None) -> bool:
    """Return whether this error, or one of the errors that caused it, reports a full disk or an
    exhausted quota.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        text = str(error)
        if (
            "unexpected pos" in text
            or "No space left on device" in text
            or "Disk quota exceeded" in text
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def read_dcp(path: Path, weights_only: bool, allow_pickle: bool) -> PortableState:
    document = load_dcp(path, allow_pickle=allow_pickle)
    if isinstance(document.get("extra"), str):
        document["extra"] = json.loads(document["extra"])
    return parse_document(document, str(path), weights_only)


def write_dcp(content: PortableState, path: Path) -> None:
    """Write a DCP folder for `dcp.load` and `set_state_dict`, with the same names as
    `get_state_dict`.
    """
    document: dict[str, Any] = {
        "model": content.weights,
        "step": content.step,
        "extra": json.dumps(content.extra),
    }
    if content.settings is not None:
        document["optimizer"] = named_optimizer(content)
    # With CUDA the writer would otherwise request a tensor before the previous one is written.
    writer = FileSystemWriter(path, single_file_per_rank=True, per_thread_copy_ahead=0)
    try:
        dcp_save(document, storage_writer=writer, planner=_Planner(content), no_dist=True)
    except CheckpointException as error:  # a BaseException around the cause
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def save_hollow(document: Any, names: Mapping[int, str], path: Path) -> list[str]:
    """Write a torch file without the tensors' values, which `fill` adds.

    Return the tensors' names in file order.

    `document` has nested dictionaries and lists with tensors, as for `torch.save`; `names` maps a
    tensor's `id` to its name.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes a second to import

    order: list[str] = []
    with FakeTensorMode():  # torch.save refuses tensors on the device "meta"
        hollow = _hollow_copy(document, names, order)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(hollow, path)
    return order


def fill(path: Path, tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Write values of tensors into the file that `save_hollow` wrote.

    `tensors` yields (name, value) in the order that `save_hollow` returned.
    """
    with path.open("r+b") as file:
        with zipfile.ZipFile(file) as archive:
            entries = [
                info for info in archive.infolist() if info.filename.split("/")[1:-1] == ["data"]
            ]
            directory = archive.start_dir
        sums: dict[str, int] = {}
        for number, (name, tensor) in enumerate(tensors):
            raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
            if number < len(entries):
                info = entries[number]
            else:
                info = None
            if info is None or (info.filename.rsplit("/", 1)[-1], info.file_size) != (
                str(number),
                len(raw),
            ):
                raise CheckpointError(
                    f"{path}: no room was left for {name}, {len(raw)} bytes; there is {info}"
                )
            sums[info.filename] = zlib.crc32(raw)
            file.seek(info.header_offset + _LOCAL_LENGTHS)
            start = info.header_offset + _LOCAL_BYTES + sum(struct.unpack("<HH", file.read(4)))
            file.seek(start)
            file.write(raw)
            if file.read(len(_DESCRIPTOR)) == _DESCRIPTOR:
                file.seek(start + len(raw) + _DESCRIPTOR_CRC)
                file.write(struct.pack("<I", sums[info.filename]))
        _fill_directory(file, directory, sums)


def write_torch(content: PortableState, path: Path) -> None:
    document: dict[str, Any] = {
        "model": content.weights,
        "step": content.step,
        "extra": content.extra,
    }
    if content.settings is not None:
        document["optimizer"] = torch_optimizer(content)
    if content.source is None:
        torch.save(document, path)
    else:
        names = save_hollow(
            document, {id(tensor): name for name, tensor in content.named().items()}, path
        )
        fill(path, content.stream(names))


def parse_document(document: Any, what: str, weights_only: bool) -> PortableState:
    """Extract the weights from a loaded checkpoint and, unless `weights_only`, the optimizer's
    state.

    `document` is a state dict, or a mapping that has a state dict under a usual name, such as
    "model" or "state_dict".
    """
    if not isinstance(document, Mapping):
        raise CheckpointError(f"{what}: is a {type(document).__name__}, not a state dict")
    if all(isinstance(value, Tensor) for value in document.values()):
        return PortableState(weights=unwrap_weights(document, what))
    key = next((key for key in _MODEL_KEYS if isinstance(document.get(key), Mapping)), None)
    if key is None:
        found = ", ".join(map(str, list(document)[:8]))
        raise CheckpointError(
            f"{what}: no weights under any of {', '.join(_MODEL_KEYS)}; it has {found}"
        )
    content = PortableState(weights=unwrap_weights(document[key], what))
    if isinstance(document.get("extra"), Mapping):  # written by us: training continues at its step
        content.step = int(document["step"])
        content.extra = dict(document["extra"])
    for key in () if weights_only else _OPTIMIZER_KEYS:
        found = document.get(key)
        if isinstance(found, Mapping) and {"state", "param_groups"} <= set(found):
            add_optimizer(content, found, what)
            break
    return content


def read_weight_files(path: Path, weights_only: bool, allow_pickle: bool) -> PortableState:
    """Read the weights from a safetensors file or a folder of weight files.

    Unless `weights_only`, also read the optimizer's file beside it, if there is one.
    """
    if path.is_dir():
        found = list_folder_files(path, ignored=_OPTIMIZER)
    else:
        found = FolderFiles(files=[path])
    state: dict[str, Tensor] = {}
    about: dict[str, Any] = {}
    for file in found.files:
        tensors, metadata = _read(file, allow_pickle=allow_pickle)
        about |= json.loads(metadata.get(_OURS, "{}"))
        if doubled := set(tensors) & set(state):
            raise CheckpointError(
                f"{path}: {sorted(doubled)[:3]} are in more than one of its files"
            )
        state |= tensors
    if found.index is not None:
        check_names_of_index(found.index, set(state))
    for file in found.passed_over:
        tensors, _ = _read(file, allow_pickle=allow_pickle)
        more = sorted(set(tensors) - set(state))
        if more:
            raise CheckpointError(
                f"{file}: has tensors that {found.files[0].name} beside it lacks: "
                f"{abbreviate(more)}; hint: move it away, or import {found.files[0]} alone"
            )
    content = PortableState(
        weights=unwrap_weights(state, str(path)),
        step=about.get("step", 0),
        extra=about.get("extra", {}),
    )
    beside = _optimizer_path(path)
    if not weights_only and beside.exists() and about.get("settings") is not None:
        content.settings = about["settings"]
        for name, tensor in _read(beside)[0].items():
            parameter, key = name.rsplit(".", 1)
            content.moments.setdefault(parameter, {})[key] = tensor
    return content


def write_safetensors(content: PortableState, path: Path) -> None:
    """Write the weights to one file and the optimizer's tensors to a second file, reading one
    tensor at a time.
    """
    about = {"step": content.step, "extra": content.extra, "settings": content.settings}
    metadata = {"format": "pt", _OURS: json.dumps(about)}
    _write(content, _WEIGHTS, path, metadata)
    if content.settings is not None:
        _write(content, _STATES, _optimizer_path(path), {"format": "pt"})


def write_hugging_face(content: PortableState, path: Path, config: RunConfig) -> None:
    """Write a folder for transformers: config.json, model.safetensors, and the tokenizer's files if
    there are any.

    Raises WorkloadError if transformers has no such model.
    """
    settings = write_settings(config.model)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    _write(content, _WEIGHTS, path / "model.safetensors", {"format": "pt"}, their_name)
    tokenizer = PROJECT_ROOT / Path(config.data.tokenizer).expanduser()
    if tokenizer.is_dir():
        folder = tokenizer
    else:
        folder = tokenizer.parent
    sources = {name: folder / name for name in _TOKENIZER_FILES}
    if tokenizer.is_file():
        sources["tokenizer.json"] = tokenizer
    for name, source in sources.items() if config.data.tokenizer != "bytes" else ():
        if source.is_file():
            shutil.copyfile(source, path / name)


def _refuse_special_files(path: Path) -> None:
    """Raise CheckpointError for FIFOs, sockets and devices, which could block a reader forever."""
    paths = [path]
    if path.is_dir():
        paths += path.iterdir()
    for place in paths:
        if place.exists() and not (place.is_file() or place.is_dir()):
            raise CheckpointError(f"{place}: is not a regular file")


def _kind_of(path: Path) -> str:
    if path.is_dir():
        return "dcp" if (path / METADATA).exists() else "safetensors"
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return "safetensors"
    return "torch"


class _Planner(DefaultSavePlanner):
    """DCP save planner that needs only shapes to plan.

    It reads each tensor's values only when they are written.
    """

    def __init__(self, content: PortableState) -> None:
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
        # The previous tensor has been written and is not read again
        name, value = next(self._values)
        if name != self._name(write_item):
            raise CheckpointError(
                f"torch's writer requests {self._name(write_item)}, but {name} is next in the plan"
            )
        return value

    def _name(self, item: WriteItem) -> str:
        return self._names[id(self.lookup_object(item.index))]


def _hollow_copy(value: Any, names: Mapping[int, str], order: list[str]) -> Any:
    """Copy nested dictionaries and lists, and replace each tensor by an uninitialised one of its
    shape and dtype.

    The tensors' names are appended to `order`, in the order in which pickle visits the tensors.
    """
    if isinstance(value, Tensor):
        order.append(names[id(value)])
        return torch.empty(value.shape, dtype=value.dtype)
    if isinstance(value, dict):
        return {key: _hollow_copy(inner, names, order) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_hollow_copy(inner, names, order) for inner in value)
    return value


def _fill_directory(file: BinaryIO, start: int, sums: Mapping[str, int]) -> None:
    at = start
    while True:
        file.seek(at)
        entry = file.read(_ENTRY_BYTES)
        if entry[: len(_ENTRY)] != _ENTRY:
            return
        lengths = struct.unpack("<HHH", entry[_ENTRY_LENGTHS : _ENTRY_LENGTHS + 6])
        crc = sums.get(file.read(lengths[0]).decode())
        if crc is not None:
            file.seek(at + _ENTRY_CRC)
            file.write(struct.pack("<I", crc))
        at += _ENTRY_BYTES + sum(lengths)


def _write(
    content: PortableState,
    prefix: str,
    path: Path,
    metadata: dict[str, str],
    rename: Callable[[str], str] = lambda name: name,
) -> None:
    """Write the tensors whose names begin with `prefix` to one safetensors file.

    `rename` gets names without `prefix`.

    Format (https://github.com/huggingface/safetensors, "Format"): the length of the header in eight
    bytes, the header as JSON, and the tensors' bytes without gaps. Tensors with larger elements
    come first, so that each is aligned.
    """
    named = {name: tensor for name, tensor in content.named().items() if name.startswith(prefix)}
    order = sorted(named, key=lambda name: -named[name].element_size())
    header: JsonObject = {"__metadata__": metadata}
    end = 0
    for name in order:
        start = end
        end = end + named[name].numel() * named[name].element_size()
        about = {
            "dtype": _dtype(named[name], name),
            "shape": list(named[name].shape),
            "data_offsets": [start, end],
        }
        header[rename(name.removeprefix(prefix))] = about
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for _, tensor in content.stream(order):
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _dtype(tensor: Tensor, name: str) -> str:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{name} is {tensor.dtype}, which safetensors has no name for; hint: --kind dcp"
        )
    return _DTYPES[tensor.dtype]


def _optimizer_path(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".safetensors") + _OPTIMIZER)


def _read(path: Path, *, allow_pickle: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file, or the tensors of a torch file.

    The suffix of the file decides which of the two it is.
    """
    if path.suffix != ".safetensors":
        return load_torch_file(path, allow_pickle=allow_pickle), {}
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{path}: the package safetensors is missing; fix: pip install safetensors"
        ) from error
    check_file(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
