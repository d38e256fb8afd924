"""Ranks that load weights in each mode and print their digest: `python -m tests.support.weights_rank RANKS CONFIG`.

They are forked by one process, which imports torch once for all of them; no thread runs in it before.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import torch

from ebbflow.infra.config.schema import ParallelConfig, RunConfig
from ebbflow.infra.process import die_with_parent
from ebbflow.training.gang import connect, disconnect, leave
from ebbflow.training.parallel import spread_model
from ebbflow.training.weights.load import load_weights, weights_sha256
from tests.support.spread_rank import ModelOnly


def main() -> int:
    """Exit code 1 when any rank failed."""
    world_size, config = int(sys.argv[1]), RunConfig.model_validate_json(sys.argv[2])
    pids = [os.fork() or run_rank(rank, world_size, config) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return int(any(codes))


def run_rank(rank: int, world_size: int, config: RunConfig) -> NoReturn:
    try:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        die_with_parent()
        load_in_each_mode(config)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def load_in_each_mode(config: RunConfig) -> None:
    torch.set_num_threads(1)
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    for mode, shard_size in (("ddp", None), ("fsdp2", None), ("hsdp", 2)):
        parallel = ParallelConfig(mode=mode, shard_size=shard_size)
        spread = spread_model(ModelOnly(config), config.model_copy(update={"parallel": parallel}), gang)
        load_weights(config.training.initial_weights, spread.module)
        sys.stdout.write(f"sha256 {gang.rank} {mode} {weights_sha256(spread.module)}\n")  # at once: ranks share it
    disconnect()


if __name__ == "__main__":
    sys.exit(main())
