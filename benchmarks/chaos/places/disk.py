"""A store on a small tmpfs, which can be filled to the last byte."""

from __future__ import annotations

import contextlib
from pathlib import Path

from benchmarks.chaos.places.place import Place, needs_tools, run_tool
from ebbflow.training.errors import GangError

SMALL_DISK_MIB = 48


class SmallDisk(Place):
    """Needs root and mounts of this process's own."""

    own_mounts = True
    most_faults = 1

    @classmethod
    def missing(cls) -> str:
        return needs_tools(["mount", "umount"], root=True)

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    def set_up(self) -> None:
        self.disk.mkdir()
        run_tool(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MIB}m", "none", str(self.disk)])
        self.store = str(self.disk)

    def take_down(self) -> None:
        with contextlib.suppress(GangError):
            run_tool(["umount", "-l", str(self.disk)])
