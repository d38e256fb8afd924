"""Read torch files and DCP folders of other programs without running code from them.

Imports torch.

A torch file contains a pickle, and so does the metadata of a DCP folder. A pickle can call any
function that it names. Unless the caller allows that, only the names that tensors, plain values and
DCP's metadata need are resolved, and any other is refused.
"""

import io
import itertools
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint._nested_dict import FLATTEN_MAPPING
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.serialization import MAGIC_NUMBER, get_unsafe_globals_in_checkpoint

from ebbflow.training.checkpoint.model_folder import (
    INDEX,
    abbreviate,
    describe_wrong_file,
    list_indexed_files,
)
from ebbflow.training.errors import CheckpointError

METADATA = ".metadata"
TORCH_INDEX = "pytorch_model.bin.index.json"
_ALLOW = "--allow-pickle runs the code that it names: only for files that you trust"
_CHECKPOINT = "torch.distributed.checkpoint"
# The names in the metadata of DCP folders, besides dtypes
_METADATA_NAMES = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
}
_PATH_NAMES = {
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
# Types whose objects a pickle may give a state
_STATEFUL_TYPES = {
    _StorageInfo,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
}
_PART = re.compile(r"-(\d+)-of-(\d+)\.\w+$")
_MOST_NAMED = 3
_PythonUnpickler: Any = pickle._Unpickler  # the one in C lets no class check BUILD
_MAGIC = MAGIC_NUMBER.to_bytes(10, "little")
_HEAD_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class FolderFiles:
    """Weight files of a Hugging Face model folder."""

    files: Sequence[Path]
    index: Path | None = None  # lists the files and their tensors
    passed_over: Sequence[Path] = ()  # files that neither an index nor a usual name selects


def load_torch_file(path: Path, *, allow_pickle: bool) -> Any:
    """Load a torch file, and return the object that it contains.

    Raises CheckpointError if the file needs more than tensors and plain values.
    """
    check_file(path)
    is_archive = zipfile.is_zipfile(path)
    if is_archive and _is_torchscript(path):
        raise CheckpointError(
            f"{path}: is a TorchScript archive, which is a program; hint: "
            "torch.save(torch.jit.load(PATH).state_dict(), NEW)"
        )
    try:
        # Only archives can be mapped; torch before 1.6 wrote plain pickles
        return torch.load(
            path, map_location="cpu", mmap=is_archive or None, weights_only=not allow_pickle
        )
    except pickle.UnpicklingError as error:
        needed = _needed_names(path) if is_archive else []
        if needed:
            raise CheckpointError(f"{path}: needs {', '.join(needed)}; hint: {_ALLOW}") from error
        if allow_pickle:
            raise
        cause = _shorten(error.__context__ or error)  # torch puts a page of advice around it
        if is_archive or _is_plain(path):
            remedy = _ALLOW
        else:
            remedy = "torch.save did not write it"
        raise CheckpointError(
            f"{path}: cannot be read as torch: {cause}; hint: copy it again if it is damaged; "
            f"{remedy}"
        ) from error


def load_dcp(path: Path, *, allow_pickle: bool) -> dict[Any, Any]:
    """Load the state dict of a DCP folder, nested as it was saved.

    Raises CheckpointError: a file is missing or damaged, or the folder needs more than tensors and
    plain values.
    """
    if allow_pickle:
        reader = FileSystemReader(path)
        planner = DefaultLoadPlanner()
    else:
        reader = _Reader(path)
        planner = _Planner()
    metadata = reader.read_metadata()
    _check_parts(path, metadata)
    flat: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            flat[key] = None
    try:
        dcp_load(flat, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException around the cause
        cause, _ = next(iter(error.failures.values()))
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{path}: {cause}") from cause
        raise CheckpointError(
            f"{path}: cannot be read as dcp: {type(cause).__name__}: {_shorten(cause)}; hint: copy "
            "it again"
        ) from cause
    paths: FLATTEN_MAPPING = metadata.planner_data or {}
    document: dict[Any, Any] = {}
    for key, value in flat.items():
        _put(document, tuple(paths.get(key) or (key,)), value)
    return _restore_lists(document)


def list_folder_files(path: Path, *, ignored: str) -> FolderFiles:
    """Find the weight files of a Hugging Face model folder.

    These are the files in its index; without an index, its single file; otherwise all parts of a
    file. Names that end with `ignored` do not count.

    Raises CheckpointError or WorkloadError if a file or a part is missing.
    """
    candidates: list[list[Path]] = []
    for index, single, pattern in (
        (INDEX, "model.safetensors", "*.safetensors"),
        (TORCH_INDEX, "pytorch_model.bin", "pytorch_model*.bin"),
    ):
        if (path / index).is_file():
            return FolderFiles(files=list_indexed_files(path / index), index=path / index)
        files = sorted(
            file
            for file in path.glob(pattern)
            if not file.name.endswith(ignored) and not file.is_dir()
        )
        if path / single in files:
            files.remove(path / single)
            passed_over = list(itertools.chain(*candidates, files))
            return FolderFiles(files=[path / single], passed_over=passed_over)
        candidates.append(files)
    for files in candidates:
        if files:
            _check_numbers(path, files)
            return FolderFiles(files=files)
    if any(path.glob("**/*_model_states.pt")):
        raise CheckpointError(
            f"{path}: a DeepSpeed checkpoint; hint: python zero_to_fp32.py (it is in the folder) "
            "writes a torch file, which can be imported"
        )
    held = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    raise CheckpointError(
        f"{path}: neither a DCP folder (no {METADATA}) nor one with *.safetensors or "
        f"pytorch_model*.bin; it holds {held}; hint: name a file"
    )


def check_names_of_index(index: Path, names: set[str]) -> None:
    """Raise CheckpointError if the files of an index lack tensors that the index names."""
    promised = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    missing = sorted(promised - names)
    if missing:
        raise CheckpointError(
            f"{index}: its files lack {len(missing)} of {len(promised)} tensors: "
            f"{abbreviate(missing)}; hint: copy the folder again"
        )


def check_file(path: Path) -> None:
    """Raise CheckpointError for an empty file, a pointer of Git LFS or a web page."""
    problem = describe_wrong_file(path)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")


class _Unpickler(_PythonUnpickler):
    """Unpickler that resolves only the names that the metadata of a DCP folder needs.

    It sets attributes only of new DCP objects, because those of a class or function would change
    this process.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_PythonUnpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PATH_NAMES:
            return _join_path
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(f"needs {module}.{name}; hint: {_ALLOW}")

    def load_build(self) -> None:
        target = self.stack[-2]
        if type(target) not in _STATEFUL_TYPES:
            name = getattr(target, "__qualname__", type(target).__qualname__)
            raise CheckpointError(f"sets attributes of {name}; hint: {_ALLOW}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


class _Reader(FileSystemReader):
    """Reader of a DCP folder that runs no code from its metadata."""

    def read_metadata(self, *_: Any, **_unused: Any) -> Metadata:
        place = Path(self.path, METADATA)
        try:
            with place.open("rb") as file:
                metadata = _Unpickler(file).load()
        except CheckpointError as error:
            raise CheckpointError(f"{place}: {error}") from None
        except Exception as error:  # a damaged pickle can raise anything
            raise CheckpointError(
                f"{place}: is damaged: {type(error).__name__}: {_shorten(error)}; hint: copy it "
                "again"
            ) from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{place}: is a {type(metadata).__name__}, not DCP's metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Planner(DefaultLoadPlanner):
    """DCP load planner that reads values other than tensors without running code from them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            value.seek(0)
            needed = ", ".join(_needed_names(value)) or "a pickle"
            raise CheckpointError(f"{name!r} needs {needed}; hint: {_ALLOW}") from error
        if self.flatten_state_dict:
            self.original_state_dict[name] = self.state_dict[name]


def _join_path(*parts: str) -> str:
    """Join the parts of a pickled path."""
    return str(PurePosixPath(*parts))


def _is_torchscript(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _is_plain(path: Path) -> bool:
    """Return whether torch.save wrote the file as plain pickles, in torch's format before 1.6."""
    with path.open("rb") as file:
        return _MAGIC in file.read(_HEAD_BYTES)


def _needed_names(file: Path | io.BytesIO) -> list[str]:
    """Return a few of the names that a torch file needs although they are not allowed."""
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))[:_MOST_NAMED]
    except (ValueError, RuntimeError):
        return []


def _check_parts(path: Path, metadata: Metadata) -> None:
    """Raise CheckpointError if the metadata name a missing file, or one outside of the folder."""
    names = {info.relative_path for info in (metadata.storage_data or {}).values()}
    outside = sorted(
        name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts
    )
    if outside:
        raise CheckpointError(f"{path}: its metadata names {outside[0]}, outside of the folder")
    missing = sorted(name for name in names if not (path / name).is_file())
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of its {len(names)} files are missing: "
            f"{abbreviate(missing)}; hint: copy the folder again"
        )


def _check_numbers(path: Path, files: list[Path]) -> None:
    """Raise CheckpointError if the files are numbered parts and some of the parts are missing."""
    parts = [match for file in files if (match := _PART.search(file.name))]
    if not parts:
        return
    promised = max(int(part[2]) for part in parts)
    present = {int(part[1]) for part in parts}
    if len(present) < promised:
        missing = [number for number in range(1, promised + 1) if number not in present]
        raise CheckpointError(
            f"{path}: {len(missing)} of {promised} parts are missing, the first is part "
            f"{missing[0]}; hint: copy the folder again"
        )


def _put(document: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        document = document.setdefault(part, {})
    document[path[-1]] = value


def _restore_lists(document: Any) -> Any:
    """Convert each nested dictionary whose keys are all integers to a list."""
    if not isinstance(document, dict):
        return document
    inner = {key: _restore_lists(value) for key, value in document.items()}
    if inner and all(isinstance(key, int) for key in inner):
        return [inner[key] for key in sorted(inner)]
    return inner


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
