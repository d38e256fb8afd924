"""Files of model folders: those that an index names, and those that cannot hold weights.

Imports no torch.
"""

import json
from collections.abc import Iterable
from pathlib import Path, PurePath

from ebbflow.training.errors import WorkloadError

INDEX = "model.safetensors.index.json"
_NAMED = 3
_HEAD_BYTES = 64


def list_indexed_files(index: Path) -> list[Path]:
    """Return the files that the index of a model folder names. Raises WorkloadError."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WorkloadError(
            f"{index}: is not an index of weight files: {type(error).__name__}: {error}"
        ) from error
    for name in names:
        if not isinstance(name, str) or PurePath(name).name != name:
            raise WorkloadError(f"{index}: {name!r} is no file name; fix: name files beside it")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WorkloadError(
            f"{index}: {len(missing)} of its {len(names)} files are missing: "
            f"{abbreviate(missing)}; fix: copy them too"
        )
    return [index.parent / name for name in names]


def describe_wrong_file(path: Path) -> str | None:
    """Describe, from the first bytes of a file, why it cannot hold weights, and the fix.

    Return None if it may hold weights.
    """
    try:
        with path.open("rb") as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        return f"cannot be opened: {error.strerror}"
    if not head:
        return "is empty (0 bytes); fix: copy it again"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file itself; fix: git lfs pull"
    if head.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "is a web page, not the file itself; fix: download it with a login, if it needs one"
    return None


def abbreviate(names: Iterable[str]) -> str:
    """Join the first three names with commas, and add the number of further names."""
    names = list(names)
    if len(names) > _NAMED:
        more = f" and {len(names) - _NAMED} more"
    else:
        more = ""
    return ", ".join(names[:_NAMED]) + more
