"""Calls of the C library that are slow or fail when they are told to, in every process of a job
(LD_PRELOAD).
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks.chaos.places.place import Place, run_tool
from ebbflow.training.errors import GangError

_COMPILERS = ("gcc", "cc", "clang")
_COMPILE_SECONDS = 120.0
CALLS = ("write", "fsync", "connect")


class Shimmed(Place):
    """The store is a folder; `write` and `fsync` are hurt below it alone, `connect` wherever it
    leads.
    """

    @classmethod
    def missing(cls) -> str:
        if not sys.platform.startswith("linux"):
            return "LD_PRELOAD is Linux's"
        if _compiler() is None:
            return f"there is no C compiler on this machine ({', '.join(_COMPILERS)})"
        return ""

    @property
    def _rules(self) -> Path:
        return self.folder / "rules"

    def set_up(self) -> None:
        files = self.folder / "store"
        library = self.folder / "shim.so"
        files.mkdir()
        self._rules.mkdir()
        command = [_compiler() or "cc", "-shared", "-fPIC", "-O2", "-o", str(library)]
        command += [str(Path(__file__).with_name("shim.c")), "-ldl"]
        run_tool(command, seconds=_COMPILE_SECONDS)
        self.store = str(files)
        self.environment = {
            "LD_PRELOAD": str(library),
            "EBBFLOW_SHIM_RULES": str(self._rules),
            "EBBFLOW_SHIM_FILES": str(files.resolve()),
        }

    def hurt(self, call: str, *, seconds: float = 0.0, errno: int = 0) -> None:
        """From now on each such call takes so much longer, and then fails with that number; 0: does
        its work.
        """
        if call not in CALLS:
            raise GangError(f"the shim knows {', '.join(CALLS)}, and no {call}")
        temporary = self._rules / f"{call}.tmp"
        temporary.write_text(f"{round(1000 * seconds)} {errno}\n")
        temporary.replace(self._rules / call)

    def heal(self) -> None:
        for call in CALLS:
            (self._rules / call).unlink(missing_ok=True)


def _compiler() -> str | None:
    return next((name for name in _COMPILERS if shutil.which(name)), None)
