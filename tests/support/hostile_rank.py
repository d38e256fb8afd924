"""A workload whose rank 1 loses, once, what its process has from the system.

Option `deed`: what it does.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from torch import nn

from ebbflow.training.workload import Cursor
from tests.support.workload_cases import Points, Sound

STEP = 5


class Hostile(Sound):
    """Options: deed ("close" all descriptors, or "limit" the size of files to 1 KiB), once (a file:
    it was done).
    """

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        options = self.context.options
        batch_size = self.context.config.training.batch_size
        once = Path(options["once"])
        if self.context.rank == 1 and cursor.first >= (STEP - 1) * batch_size and not once.exists():
            once.touch()
            if options["deed"] == "close":
                os.closerange(0, 4096)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        return super().next_batch(model, cursor)
