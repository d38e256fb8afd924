"""What a process has said if it is killed right after: lines that were printed and flushed."""

from __future__ import annotations

import builtins
from typing import Any

import pytest


class FlushedOutput:
    def __init__(self) -> None:
        self.text = ""

    def print(self, *values: Any, flush: bool = False) -> None:
        if flush:
            self.text += " ".join(map(str, values)) + "\n"


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> FlushedOutput:
    output = FlushedOutput()
    monkeypatch.setattr(builtins, "print", output.print)
    return output
