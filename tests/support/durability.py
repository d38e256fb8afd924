"""What a crash of the machine would lose: a model of a disk that is fed with the calls of a
program.

`DiskModel` knows two rules of a file system. The bytes of a file are durable once the file is
synced after its last write, and its name once its folder is synced after the name was given. The
calls come from `recorded_calls` (this process, by way of the `os` module) or from a library that is
loaded into another process (`preloaded_calls`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LIBRARY_SOURCE = Path(__file__).with_name("durability_log.c")
LOG_VARIABLE = "EBBFLOW_TEST_CALLS"

_CALL_OF = {
    "write": "write",
    "pwrite": "write",
    "fsync": "fsync",
    "mkdir": "mkdir",
    "unlink": "unlink",
    "replace": "rename",
    "link": "link",
}


class Call(NamedTuple):
    """A call that succeeded: write, fsync, rename, link, mkdir, unlink, or answer (a line on
    standard output).
    """

    name: str
    path: str
    new_path: str = ""


class DiskModel:
    """The files and names below `root` that would not survive a crash now."""

    def __init__(self, root: Path) -> None:
        self._root = str(root.resolve())
        self._unsynced_files: set[str] = set()
        self._unsynced_names: set[str] = set()
        self.named: list[str] = []  # relative paths of all objects that got their name, in order
        self.early_names: list[
            str
        ] = []  # objects that had their name before their bytes were durable

    @property
    def at_risk(self) -> list[str]:
        """Relative paths of what a crash would lose or truncate."""
        return sorted(
            os.path.relpath(path, self._root)
            for path in self._unsynced_files | self._unsynced_names
        )

    def feed(self, call: Call) -> None:
        if not call.path.startswith(self._root):
            return
        match call.name:
            case "write":
                self._unsynced_files.add(call.path)
            case "fsync":
                self._unsynced_files.discard(call.path)
                self._unsynced_names -= {
                    path for path in self._unsynced_names if os.path.dirname(path) == call.path
                }
            case "mkdir":
                self._unsynced_names.add(call.path)
            case "rename" | "link":
                if call.path in self._unsynced_files:
                    self.early_names.append(os.path.relpath(call.new_path, self._root))
                    self._unsynced_files.add(call.new_path)
                self._unsynced_names.add(call.new_path)
                self.named.append(os.path.relpath(call.new_path, self._root))
                if call.name == "rename":
                    self._forget(call.path)
            case "unlink":
                self._forget(call.path)

    def _forget(self, path: str) -> None:
        self._unsynced_files.discard(path)
        self._unsynced_names.discard(path)


def feed_all(root: Path, calls: Iterable[Call]) -> DiskModel:
    disk = DiskModel(root)
    for call in calls:
        disk.feed(call)
    return disk


@contextmanager
def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """The calls that this process makes by way of the `os` module while the block lasts."""
    calls: list[Call] = []

    def record(name: str, paths: Callable[..., list[str]]) -> Callable[..., Any]:
        function = getattr(os, name)

        def recording(*arguments: Any, **options: Any) -> Any:
            named = paths(*arguments)  # before the call: a rename changes the path of a descriptor
            result = function(*arguments, **options)
            calls.append(Call(_CALL_OF[name], *named))
            return result

        return recording

    with monkeypatch.context() as patch:
        for name in ("write", "pwrite", "fsync"):
            patch.setattr(os, name, record(name, lambda descriptor, *_: [_path_of(descriptor)]))
        for name in ("mkdir", "unlink"):
            patch.setattr(os, name, record(name, lambda path, *_: [os.fspath(path)]))
        for name in ("replace", "link"):
            patch.setattr(
                os,
                name,
                record(name, lambda path, new_path, *_: [os.fspath(path), os.fspath(new_path)]),
            )
        yield calls


def why_not_preloaded() -> str:
    """Return why no library can be loaded into other processes on this machine; "" if it can."""
    if not sys.platform.startswith("linux"):
        return "LD_PRELOAD is Linux's"
    if shutil.which("cc"):
        return ""
    return "there is no C compiler (cc) on this machine"


def build_call_log(folder: Path) -> Path:
    """Compile the library that writes the calls of a process to a file, and return its path."""
    library = folder / "durability_log.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(LIBRARY_SOURCE), "-ldl"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return library


def preloaded_calls(log: Path) -> list[Call]:
    """Read the file that the library wrote."""
    return [Call(*line.split("\t")) for line in log.read_text().splitlines()]


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")
