"""One rank that loads weights in each mode and prints their digest: `python -m tests.support.weights_rank CONFIG`."""

from __future__ import annotations

import sys

import torch

from infra.config.schema import ParallelConfig, RunConfig
from tests.support.spread_rank import ModelOnly
from training.gang import connect, disconnect, leave
from training.parallel import spread_model
from training.weights.digest import weights_sha256
from training.weights.load import load_weights


def main() -> None:
    config = RunConfig.model_validate_json(sys.argv[1])
    torch.set_num_threads(1)
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    for mode, shard_size in (("ddp", None), ("fsdp2", None), ("hsdp", 2)):
        parallel = ParallelConfig(mode=mode, shard_size=shard_size)
        spread = spread_model(ModelOnly(config), config.model_copy(update={"parallel": parallel}), gang)
        load_weights(config.training.initial_weights, spread.module)
        print("sha256", mode, weights_sha256(spread.module))
    disconnect()
    leave(0)


if __name__ == "__main__":
    main()
