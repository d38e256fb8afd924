"""Parser of `workload_options`: a dataclass defines the names, types and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from ebbflow.training.errors import WorkloadError

T = TypeVar("T")


def read_options(kind: type[T], given: Mapping[str, Any]) -> T:
    """Create the options dataclass `kind` from the values that the user gave.

    Raises WorkloadError for unknown names and wrong types.
    """
    known = {field.name: type(field.default) for field in fields(kind)}  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            if close:
                hint = f"did you mean {close[0]}?"
            else:
                hint = f"known are {', '.join(known)}"
            refuse_option(f"{name} is unknown; fix: {hint}")
        wanted = known[name]
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            refuse_option(
                f"{name}: {value!r} is a {type(value).__name__}; fix: a {wanted.__name__}"
            )
    return kind(**given)


def refuse_option(problem: str) -> NoReturn:
    raise WorkloadError(f"workload_options.{problem}")
