"""What makes a local file durable: obstore's LocalStore renames it into place but never syncs."""

from __future__ import annotations

import os
from pathlib import Path


def sync_file(path: Path, root: Path) -> None:
    """fsync a file and each folder up to `root`: a name is durable only when its folder is."""
    _fsync(path, os.O_RDONLY)
    folder = path.parent
    while True:
        _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)
        if folder == root:
            return
        folder = folder.parent


def write_private(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a whole file that only this user may read (mode 0600), from its first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}#1")  # a name that LocalStore lists as no object
    fresh.unlink(missing_ok=True)
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    fresh.replace(path)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
