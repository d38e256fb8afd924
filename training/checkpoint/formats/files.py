"""One file or folder of another kind: which it is, reading it, and writing it without leaving half of it behind."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ebbflow.training.checkpoint.formats.content import Content
from ebbflow.training.checkpoint.formats.dcp_folder import read_dcp, write_dcp
from ebbflow.training.checkpoint.formats.safetensors_files import read_safetensors, write_safetensors
from ebbflow.training.checkpoint.formats.torch_file import read_torch, write_torch
from ebbflow.training.errors import CheckpointError, NoRoom

KINDS = ("dcp", "safetensors", "torch")
_WRITERS: dict[str, Callable[[Content, Path], None]] = {
    "dcp": write_dcp,
    "safetensors": write_safetensors,
    "torch": write_torch,
}


def read_file(path: Path, *, weights_only: bool = False) -> Content:
    """What is at `path`, whatever its kind. Raises CheckpointError."""
    _refuse_what_is_no_file(path)
    kind = _kind_of(path)
    try:
        return {"dcp": read_dcp, "safetensors": read_safetensors, "torch": read_torch}[kind](path, weights_only)
    except CheckpointError:
        raise
    except Exception as error:  # each library has exceptions of its own for what it cannot read
        cause = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{path}: cannot be read as {kind}: {type(error).__name__}: {cause}") from error


def _refuse_what_is_no_file(path: Path) -> None:
    """A FIFO would be waited for without end. Raises CheckpointError."""
    for one in [path, *(path.iterdir() if path.is_dir() else ())]:
        if one.exists() and not (one.is_file() or one.is_dir()):
            raise CheckpointError(f"{one}: is no regular file")


def write_file(content: Content, path: Path, kind: str) -> None:
    """Raises CheckpointError when something is there already, NoRoom when the disk is full; then nothing is left."""
    if os.path.lexists(path) and not _is_device(path):
        raise CheckpointError(f"{path}: is there already; hint: give another name")
    try:
        _WRITERS[kind](content, path)
    except Exception as error:
        remove(path)
        if is_full(error):
            cause = " ".join(str(error).split())[:200]
            raise NoRoom(f"{path}: the disk is full ({cause}); hint: free space, or export to another disk") from error
        raise


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk or a used-up quota is behind an error. torch's file writer says only that it is not where it
    should be ("unexpected pos 704 vs 662"): it takes a short write for its own mistake."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return True
        text = str(error)
        if "unexpected pos" in text or "No space left on device" in text or "Disk quota exceeded" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    elif not _is_device(path):
        path.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    return path.is_char_device()


def _kind_of(path: Path) -> str:
    if path.is_dir():
        if (path / ".metadata").exists():
            return "dcp"
        if any(path.glob("*.safetensors")):
            return "safetensors"
        raise CheckpointError(f"{path}: neither a DCP folder (no .metadata) nor one with *.safetensors")
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    return "safetensors" if path.suffix == ".safetensors" else "torch"
