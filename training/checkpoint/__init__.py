"""Asynchronous, sharded, verified commits with lineage. The names here are the public door; `docs/` has the protocol.

Names are resolved on first use, so that lineage, uploader and commands, which import this package, load no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "Checkpointer": "training.checkpoint.checkpointer",
    "CommitReader": "training.checkpoint.dcp_reader",
    "CommitRef": "training.checkpoint.lineage",
    "Generation": "training.checkpoint.generations",
    "Rejected": "training.checkpoint.restore",
    "Restored": "training.checkpoint.restore",
    "RetentionPolicy": "training.checkpoint.retention",
    "FROM_SCRATCH": "training.checkpoint.lineage",
    "newest_commits": "training.checkpoint.lineage",
    "open_generation": "training.checkpoint.lineage",
    "permit": "training.checkpoint.rollback",
    "read_generation": "training.checkpoint.generations",
    "reachable_commits": "training.checkpoint.lineage",
    "trace_lineage": "training.checkpoint.lineage",
    "verify_commit": "training.checkpoint.verify",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
