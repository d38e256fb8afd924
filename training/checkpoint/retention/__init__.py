"""What is kept and what goes: the choice (`policy`), its enforcement (`keeper`), deletion that may be cut short at
any point (`deletion`), and what no commit names (`orphans`). Torch-free.
"""

from ebbflow.training.checkpoint.retention.keeper import Retention
from ebbflow.training.checkpoint.retention.policy import RetentionPolicy

__all__ = ["Retention", "RetentionPolicy"]
