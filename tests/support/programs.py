"""Programs that a test pretends to start: they last for some looks, and end with the codes that the
test gives.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Started:
    command: list[str]
    options: dict[str, Any]


@dataclass
class Programs:
    """Stands in place of `subprocess.Popen`, and of the process that it returns.

    Attributes:
        codes: Exit codes, one for each start.
        looks: How often a program is looked at in vain before it ends; `during` has a look for each
            of its calls.
        during: Called one after the other, one at each look in vain.
        at_start: Called when a program starts.
        gone: Whether the process no longer exists when it gets a signal.
    """

    pid = 2**22 + 1  # above the kernel's largest PID
    codes: list[int] = field(default_factory=list)
    looks: int = 0
    during: Sequence[Callable[[], object]] = ()
    at_start: Callable[[], object] = lambda: None
    gone: bool = False
    returncode: int | None = None
    started: list[Started] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    kills: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, command: Sequence[str], **options: Any) -> Programs:
        self.started.append(Started(list(command), options))
        self.returncode = None
        self._looked = 0
        self.at_start()
        return self

    def wait(self, timeout: float) -> int:
        self.waits.append(timeout)
        if self._looked < max(self.looks, len(self.during)):
            self._looked += 1
            if self._looked <= len(self.during):
                self.during[self._looked - 1]()
            raise subprocess.TimeoutExpired("program", timeout)
        self.returncode = self.codes.pop(0)
        return self.returncode

    def kill(self, pid: int, number: int) -> None:
        """Stands in place of `os.kill`."""
        if self.gone:
            raise ProcessLookupError
        self.kills.append((pid, number))
