"""One rank that measures, as a process: `python -m benchmarks.training.rank TASK.json`, with
torchrun's environment.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import torch

from benchmarks.training.checkpoint_rank import measure_checkpoint
from benchmarks.training.engine_rank import measure_engine
from ebbflow.core.process import die_with_parent
from ebbflow.training.gang import connect, disconnect, leave

_START_SECONDS = 120.0
_COLLECTIVE_SECONDS = 300.0


def main(path: str) -> None:
    """Measure with one thread, and write the result beside the task. Does not return."""
    task = json.loads(Path(path).read_text())
    die_with_parent(task["parent_pid"])
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    gang = connect(
        start_seconds=_START_SECONDS, collective_seconds=_COLLECTIVE_SECONDS, generation="bench"
    )
    measures = {"engine": measure_engine, "checkpoint": measure_checkpoint}
    try:
        result = measures[task["kind"]](task, gang)
    except Exception:
        traceback.print_exc()
        leave(1)
    Path(f"{path}.{gang.rank}").write_text(json.dumps(result))
    disconnect()
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1])
