"""One rank that spreads a model in each mode and prints its digest: `python -m tests.support.spread_rank CONFIG`."""

from __future__ import annotations

import sys

import torch
from torch import nn

from infra.config.schema import ParallelConfig, RunConfig
from training.gang import connect, disconnect, leave
from training.model import CausalLM
from training.parallel import spread_model
from training.weights import weights_sha256


class ModelOnly:
    """The part of a workload that spreading needs."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return CausalLM(self._config.model)

    def units(self, model: CausalLM) -> list[nn.Module]:
        return [model.embeddings, *model.blocks, model.head]


def main() -> None:
    config = RunConfig.model_validate_json(sys.argv[1])
    torch.set_num_threads(1)
    gang = connect(start_seconds=60, collective_seconds=60, generation="test")
    for mode in ("ddp", "fsdp2"):
        spread_config = config.model_copy(update={"parallel": ParallelConfig(mode=mode)})
        spread = spread_model(ModelOnly(config), spread_config, gang)
        print("sha256", mode, weights_sha256(spread.module))
    disconnect()
    leave(0)


if __name__ == "__main__":
    main()
