"""Parameters of tests that only `make test-long` runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def mark_long(names: Iterable[str], long: Collection[str]) -> list[Any]:
    """Return the names as parameters of a test; those in `long` are for `make test-long`."""
    parameters: list[Any] = []
    for name in names:
        if name in long:
            parameters.append(pytest.param(name, marks=pytest.mark.long))
        else:
            parameters.append(name)
    return parameters
