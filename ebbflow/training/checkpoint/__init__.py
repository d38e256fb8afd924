"""The public names of the checkpoint package (docs/checkpoints.md), each imported on first use.

Therefore the package and its torch-free modules, such as lineage, uploader and commands, can be
imported without torch.
"""

import importlib
from typing import Any

_HOME = {
    "Checkpointer": "ebbflow.training.checkpoint.checkpointer",
    "CommitReader": "ebbflow.training.checkpoint.dcp_reader",
    "CommitRef": "ebbflow.training.checkpoint.lineage",
    "Generation": "ebbflow.training.checkpoint.lineage",
    "RejectedCommit": "ebbflow.training.checkpoint.restore",
    "RestoreResult": "ebbflow.training.checkpoint.restore",
    "RetentionPolicy": "ebbflow.training.checkpoint.retention",
    "FROM_SCRATCH": "ebbflow.training.checkpoint.lineage",
    "newest_commits": "ebbflow.training.checkpoint.lineage",
    "open_generation": "ebbflow.training.checkpoint.lineage",
    "record_permits": "ebbflow.training.checkpoint.rollback",
    "read_generation": "ebbflow.training.checkpoint.lineage",
    "reachable_commits": "ebbflow.training.checkpoint.lineage",
    "trace_lineage": "ebbflow.training.checkpoint.lineage",
    "verify_commit": "ebbflow.training.checkpoint.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
