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


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
