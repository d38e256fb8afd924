"""The same faults for bare torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from training.chaos.fault import Fault


def bare_figures(faults: list[Fault], folder: Path, *, cap_seconds: float) -> dict[str, Any]:
    return {}


def bare_text(figures: dict[str, Any]) -> str:
    return ""
