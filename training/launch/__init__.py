"""Starting and ending a gang: all the ranks that must live together. One door: `run_gang(spec)`."""

from ebbflow.training.launch.agent import run_gang
from ebbflow.training.launch.spec import GangOutcome, GangSpec

__all__ = ["GangOutcome", "GangSpec", "run_gang"]
