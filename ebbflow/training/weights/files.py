"""Find the weights in safetensors files by reading only the headers, and describe the files.

Imports no torch.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ebbflow.core.json_values import JsonObject
from ebbflow.training.checkpoint.model_folder import (
    INDEX,
    describe_wrong_file,
    list_indexed_files,
)
from ebbflow.training.errors import WorkloadError

SINGLE = "model.safetensors"
# Larger files are identified by size and time only: hashing takes about 1.3 s per GB.
_LARGEST_HASHED_BYTES = 4 << 30

Translate = Callable[[str], str | None]


@dataclass(frozen=True)
class StoredTensor:
    """The header entry of a tensor in a safetensors file."""

    name: str  # its name in the file
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it, such as BF16


def find_weights(path: str, translate: Translate | None = None) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file or folder, by their names in the model.

    A folder must contain one safetensors file, or several such files and an index. Only headers are
    read. `translate` maps the name of a stored tensor to its name in the model, or to None if the
    tensor is to be ignored. Raises WorkloadError if files are missing or damaged, or if two tensors
    get the same name.
    """
    found: dict[str, StoredTensor] = {}
    for file in list_weight_files(path):
        for stored in _headers(file):
            if translate is None:
                name = stored.name
            else:
                name = translate(stored.name)
            if name is None:
                continue
            if name in found:
                raise WorkloadError(
                    f"training.initial_weights {path}: {stored.name} in {file.name} and "
                    f"{found[name].name} in {found[name].file.name} are both {name}; fix: "
                    "translate_weights must tell them apart"
                )
            found[name] = stored
    return found


def list_weight_files(path: str) -> list[Path]:
    """Return the safetensors files at `path`. Raises WorkloadError.

    If `path` is a file, this is `path` itself. For a folder, these are the files in its index or,
    if it has no index, its only safetensors file.
    """
    root = Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise WorkloadError(f"training.initial_weights {path}: no such file or folder")
    index = root / INDEX
    if index.is_file():
        return list_indexed_files(index)
    if (root / SINGLE).is_file():
        single = [root / SINGLE]
    else:
        single = sorted(root.glob("*.safetensors"))
    if len(single) == 1:
        return single
    names = ", ".join(sorted(entry.name for entry in root.iterdir())[:5]) or "nothing"
    raise WorkloadError(
        f"training.initial_weights {path}: a folder needs {SINGLE} or {INDEX}; it holds {names}; "
        "fix: name the file, or save it with save_pretrained(safe_serialization=True)"
    )


def describe_files(path: str) -> list[JsonObject]:
    """Return the path, size in bytes, modification time and SHA-256 of each file.

    The SHA-256 is None if the files together are larger than 4 GiB.
    """
    files = list_weight_files(path)
    small = sum(file.stat().st_size for file in files) <= _LARGEST_HASHED_BYTES
    return [
        {
            "path": str(file),
            "bytes": file.stat().st_size,
            "modified_unix": file.stat().st_mtime,
            "sha256": _sha256(file) if small else None,
        }
        for file in files
    ]


def open_weights(file: Path, *, framework: str) -> Any:
    """Open a safetensors file. Raises WorkloadError.

    Its tensors are read as NumPy arrays if `framework` is "np", as torch tensors if it is "pt".
    """
    problem = describe_wrong_file(file)
    if problem is not None:
        raise WorkloadError(f"training.initial_weights {file} {problem}")
    try:
        return safe_open(file, framework=framework, device="cpu")
    except (OSError, SafetensorError) as error:
        text = " ".join(str(error).split())
        raise WorkloadError(
            f"training.initial_weights {file} is not a safetensors file: {text}; fix: convert it "
            "with safetensors.torch.save_file, or copy it again if it was cut off"
        ) from error


def _headers(file: Path) -> Iterator[StoredTensor]:
    with open_weights(file, framework="np") as content:
        for name in content.keys():  # noqa: SIM118 - not a mapping
            part = content.get_slice(name)
            yield StoredTensor(name, file, tuple(part.get_shape()), part.get_dtype())


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
