"""Training by one rank in the test's own process, without the seconds that importing torch takes
another one.
"""

from __future__ import annotations

import signal
from pathlib import Path

from torch import distributed

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.attach.standalone import release_job
from ebbflow.training.gang import Gang
from ebbflow.training.limits import LoopResult
from ebbflow.training.worker import parse_arguments, run_rank, share_spec


def run_alone(config: RunConfig, job: str) -> LoopResult:
    """As `python -m training CONFIG --job JOB` does from its arguments to its result, in this
    process.

    The store must be a folder; the configuration is written beside it.
    """
    path = Path(config.store).parent / "config.yaml"
    path.write_text(config.model_dump_json())  # JSON is a part of YAML
    # A rank watches for them
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return run_rank(share_spec(parse_arguments([str(path), "--job", job]), Gang()), Gang())
    finally:
        release_job()
        if distributed.is_initialized():  # FSDP2 makes a group for its mesh
            distributed.destroy_process_group()
        for number, handler in kept.items():
            signal.signal(number, handler)
