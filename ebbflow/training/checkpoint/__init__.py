"""The public names of the checkpoint package (docs/checkpoints.md), each imported on first use.

Therefore the package and its torch-free modules, such as lineage, uploader and commands, can be
imported without torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebbflow.training.checkpoint.checkpointer import Checkpointer
    from ebbflow.training.checkpoint.dcp_reader import CommitReader
    from ebbflow.training.checkpoint.lineage import (
        FROM_SCRATCH,
        CommitRef,
        Generation,
        newest_commits,
        open_generation,
        reachable_commits,
        read_generation,
        trace_lineage,
    )
    from ebbflow.training.checkpoint.reader import verify_commit
    from ebbflow.training.checkpoint.restore import RejectedCommit, RestoreResult
    from ebbflow.training.checkpoint.retention import RetentionPolicy
    from ebbflow.training.checkpoint.rollback import record_permits

__all__ = [
    "FROM_SCRATCH",
    "Checkpointer",
    "CommitReader",
    "CommitRef",
    "Generation",
    "RejectedCommit",
    "RestoreResult",
    "RetentionPolicy",
    "newest_commits",
    "open_generation",
    "reachable_commits",
    "read_generation",
    "record_permits",
    "trace_lineage",
    "verify_commit",
]


def __getattr__(name: str) -> Any:
    match name:
        case "Checkpointer":
            from ebbflow.training.checkpoint import checkpointer as module
        case "CommitReader":
            from ebbflow.training.checkpoint import dcp_reader as module
        case "RejectedCommit" | "RestoreResult":
            from ebbflow.training.checkpoint import restore as module
        case "RetentionPolicy":
            from ebbflow.training.checkpoint import retention as module
        case "record_permits":
            from ebbflow.training.checkpoint import rollback as module
        case "verify_commit":
            from ebbflow.training.checkpoint import reader as module
        case _ if name in __all__:
            from ebbflow.training.checkpoint import lineage as module
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
