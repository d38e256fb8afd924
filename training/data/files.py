"""Which files a job learns from, and which of them it is only ever examined on."""

from __future__ import annotations

import glob
import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from infra.config.schema import DataConfig
from training.errors import DataError

# Folders of the standard library (or of a source tree) whose text is test data, caches or other people's packages.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "node_modules", ".git", ".venv"}
)


@dataclass(frozen=True)
class SourceFile:
    """A file to read; `name` is its path below the data's root, with "/" on every system."""

    name: str
    path: Path


def find_files(data: DataConfig, *, project_root: Path) -> list[SourceFile]:
    """The files of `data`, sorted by name. Relative paths count from `project_root`. Raises DataError."""
    if data.path is None:
        root = Path(sysconfig.get_path("stdlib"))
        return _below(root, tuple(data.suffixes), f"the standard library at {root}")
    path = Path(data.path).expanduser()
    path = path if path.is_absolute() else project_root / path
    if path.is_file():
        return [SourceFile(path.name, path)]
    if path.is_dir():
        return _below(path, tuple(data.suffixes), f"data.path {data.path!r}")
    return _matching(str(path), data.path)


def is_held_out(name: str, fraction: float) -> bool:
    """Whether a file is kept for evaluation: by its name alone, so that other files cannot move it over.

    Whole files are kept apart: windows of one file share vocabulary and copied passages.
    """
    return _lot(name) < fraction


def split_files(files: list[SourceFile], fraction: float) -> tuple[list[SourceFile], list[SourceFile]]:
    """(train, held out), neither of them empty. Raises DataError when there is but one file."""
    if len(files) < 2:
        raise DataError(
            f"one file ({files[0].name}) cannot be split into train and held-out text, which are kept apart by whole "
            "files; fix: split it into several files and set data.path to their folder"
        )
    # With few files all lots can fall on one side; then the lowest (or highest) changes it.
    lots = sorted(_lot(file.name) for file in files)
    limit = min(max(fraction, lots[1]), lots[-1])
    train = [file for file in files if not is_held_out(file.name, limit)]
    return train, [file for file in files if is_held_out(file.name, limit)]


def _lot(name: str) -> float:
    """A number in [0, 1) drawn by the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


def _below(root: Path, suffixes: tuple[str, ...], what: str) -> list[SourceFile]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in names:
            path = Path(folder) / name
            if name.endswith(suffixes) and path.is_file():
                found.append(SourceFile(path.relative_to(root).as_posix(), path))
    if not found:
        raise DataError(
            f"{what} holds no file that ends in {', '.join(suffixes)}; fix: set data.suffixes to the endings there are"
        )
    return sorted(found, key=lambda file: file.name)


def _matching(pattern: str, written: str) -> list[SourceFile]:
    paths = [Path(path) for path in glob.glob(pattern, recursive=True)]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        raise DataError(
            f"data.path {written!r} is no folder, no file, and matches no file as a glob ({pattern}); "
            "fix: name text that exists, or leave data.path out to train on the standard library"
        )
    root = Path(os.path.commonpath([path.parent for path in paths]))
    return sorted((SourceFile(p.relative_to(root).as_posix(), p) for p in paths), key=lambda file: file.name)
