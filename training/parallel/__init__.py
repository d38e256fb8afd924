"""How one model is spread over the ranks. The names here are the public door.

Names are resolved on first use, so that preflight, which asks for refusals, loads no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Spread": "ebbflow.training.parallel.spread",
    "find_refusals": "ebbflow.training.parallel.refusals",
    "make_mesh": "ebbflow.training.parallel.spread",
    "spread_model": "ebbflow.training.parallel.spread",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
