"""Ranks that load weights in each mode and take them:
`python -m tests.support.weights_rank RANKS CONFIG...`.

Each prints the digest, and the loss and the norm of the gradient over all ranks.

They are forked by one process, which imports torch once for all of them; no thread runs in it
before.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ebbflow.core.config.schema import ParallelConfig, RunConfig
from ebbflow.core.process import die_with_parent
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.gang import connect, disconnect, leave
from ebbflow.training.weights.load import load_weights, weights_sha256
from tests.support.spread_rank import ModelOnly


def main() -> int:
    """Exit code 1 when any rank failed."""
    world_size = int(sys.argv[1])
    configs = [RunConfig.model_validate_json(text) for text in sys.argv[2:]]
    pids = [os.fork() or run_rank(rank, world_size, configs) for rank in range(world_size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return int(any(codes))


def run_rank(rank: int, world_size: int, configs: list[RunConfig]) -> NoReturn:
    try:
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        die_with_parent()
        load_in_each_mode(configs)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def load_in_each_mode(configs: list[RunConfig]) -> None:
    torch.set_num_threads(1)
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    for number, config in enumerate(configs):
        for mode, shard_size in (("ddp", None), ("fsdp2", None), ("hsdp", 2)):
            parallel = ParallelConfig(mode=mode, shard_size=shard_size)
            spread = spread_model(
                ModelOnly(config), config.model_copy(update={"parallel": parallel}), gang
            )
            load_weights(config.training.initial_weights, spread.module)
            digest = weights_sha256(spread.module)
            with spread.gradients(last=True):
                loss = text_loss(spread.model, config, gang.rank)
                loss.backward()
            own = torch.stack(
                (loss.detach().double(), spread.square_sum(spread.gradient_tensors()))
            )
            total, square = gang.gather(own).sum(dim=0).tolist()
            norm = gang.world_size * square**0.5  # the modes average gradients over ranks
            # At once: ranks share the output.
            sys.stdout.write(f"sha256 {gang.rank} {number} {mode} {digest} {total} {norm}\n")
    disconnect()


def text_loss(model: nn.Module, config: RunConfig, rank: int) -> Tensor:
    """The summed loss of one sequence, which depends on the rank."""
    length = config.model.sequence_length
    vocabulary = config.model.vocab_size
    tokens = torch.arange(length + 1).mul(7 + rank).add(rank).remainder(vocabulary)
    return cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="sum")


if __name__ == "__main__":
    sys.exit(main())
