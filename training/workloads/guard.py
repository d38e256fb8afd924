"""A workload on a rank: a mistake in the user's code is said to be one, and not tried again as an interruption is."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from training.errors import WorkloadError
from training.workload import Workload
from training.workloads.door import REQUIRED, own_line

# What a program raises by being wrong, the same at every attempt since a sample is a function of its index. Not
# RuntimeError, OSError or ValueError: memory that ran out, a lost peer or half a file may be better next time.
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)


def guarded(workload: Workload, name: str) -> Workload:
    """`workload`, whose required methods raise WorkloadError with file and line for a mistake in the user's own line.

    Everything else passes as it is: what a library raises may come from another rank or machine.
    """
    return cast(Workload, _Guarded(workload, name))


class _Guarded:
    def __init__(self, workload: Workload, name: str) -> None:
        self._workload, self._name = workload, name

    def __getattr__(self, key: str) -> Any:
        found = getattr(self._workload, key)
        return _named(found, f"{self._name}.{key}") if key in REQUIRED else found


def _named(method: Callable[..., Any], what: str) -> Callable[..., Any]:
    @wraps(method)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return method(*arguments, **options)
        except _MISTAKES as error:
            line = own_line(error)
            if line is None:
                raise
            text = " ".join(str(error).split()) or "no message"
            raise WorkloadError(f"{line}{what} raised {type(error).__name__}: {text}") from error

    return call
