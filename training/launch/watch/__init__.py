"""Watching a node's ranks: signs of life, limits learned from the run, evidence, and who is to blame.

`Watch` looks and dumps, on each node; `blame` reads the evidence of all nodes. A rank lets itself be watched by
`Observed`. Nothing here imports torch but what runs inside a rank.
"""

from ebbflow.training.launch.watch.blame import Culprit, blame, mismatch_of, settle_seconds
from ebbflow.training.launch.watch.dump import WorkerFailure
from ebbflow.training.launch.watch.gpu import GpuCounters
from ebbflow.training.launch.watch.limits import STORE_PHASE, Deadlines
from ebbflow.training.launch.watch.watch import Watch

__all__ = [
    "STORE_PHASE",
    "Culprit",
    "Deadlines",
    "GpuCounters",
    "Watch",
    "WorkerFailure",
    "blame",
    "mismatch_of",
    "settle_seconds",
]
