"""Starting and ending a gang: all the ranks that must live together. One door: `run_gang(spec)`."""

from training.launch.agent import run_gang
from training.launch.spec import GangOutcome, GangSpec

__all__ = ["GangOutcome", "GangSpec", "run_gang"]
