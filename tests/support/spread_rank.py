"""One rank that spreads a model in each mode and prints its digest:
`python -m tests.support.spread_rank CONFIG`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from ebbflow.core.config.schema import DdpConfig, FsdpConfig, ParallelConfig, RunConfig
from ebbflow.training.engine.parallel import make_mesh, spread_model
from ebbflow.training.gang import connect, disconnect, leave
from ebbflow.training.weights.load import weights_sha256
from ebbflow.workloads.language.language_model import CausalLM

ARRANGEMENTS = {
    "ddp": {"parallel": ParallelConfig(mode="ddp")},
    "ddp-options": {
        "parallel": ParallelConfig(mode="ddp", recompute="full", compile=True),
        "ddp": DdpConfig(static_graph=True, bucket_cap_mb=0.01, gradient_as_bucket_view=False),
        "fsdp": FsdpConfig(use_mixed_precision=True),
    },
    "fsdp2": {"parallel": ParallelConfig(mode="fsdp2", recompute="selective", compile=True)},
    "fsdp2-offload": {
        "parallel": ParallelConfig(mode="fsdp2"),
        "fsdp": FsdpConfig(cpu_offload=True),
    },
    "hsdp-1": {"parallel": ParallelConfig(mode="hsdp", shard_size=1)},
    "hsdp-node": {
        "parallel": ParallelConfig(mode="hsdp"),
        "fsdp": FsdpConfig(use_mixed_precision=True),
    },
}


class ModelOnly:
    """The part of a workload that spreading needs."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return CausalLM(self._config.model)

    def units(self, model: CausalLM) -> list[nn.Module]:
        return model.units()


def main() -> None:
    config = RunConfig.model_validate_json(sys.argv[1])
    torch.set_num_threads(1)
    plain = [name for name, _ in ModelOnly(config).model().named_parameters()]
    gang = connect(start_seconds=60, collective_seconds=61, generation="test")
    for name, group in (
        (name, make_mesh(gang, shard=1)[name].get_group()) for name in ("replicate", "shard")
    ):
        print(
            "timeout",
            name,
            group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        )
    for name, changes in ARRANGEMENTS.items():
        spread_config = config.model_copy(update=changes)
        spread = spread_model(ModelOnly(config), spread_config, gang)
        names = [name for name, _ in spread.module.named_parameters()]
        print(
            "sha256", name, weights_sha256(spread.module), *(["renamed"] if names != plain else [])
        )
    disconnect()
    leave(0)


if __name__ == "__main__":
    main()
