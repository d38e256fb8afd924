"""The saved state: a model sharded as in training, and its AdamW."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.engine.parallel import make_mesh
from ebbflow.training.gang import Gang
from ebbflow.workloads.language.language_model import CausalLM


def trained_state(config: RunConfig, gang: Gang) -> tuple[nn.Module, Optimizer]:
    """Return a model sharded as in training, and its optimizer after a step."""
    torch.manual_seed(config.training.seed + gang.rank)
    with torch.device("meta"):
        model = CausalLM(config.model)
    mesh = make_mesh(gang, shard=gang.world_size)["shard"]
    for unit in [model.embeddings, *model.blocks, model.head]:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=gang.device)
    optimizer = make_optimizer(model, config.training)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.detach().to_local().normal_()
        parameter.grad.to_local().normal_()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def local_state(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield this rank's part of every saved tensor."""
    for parameter in model.parameters():
        states = optimizer.state[parameter].values()
        for tensor in (
            parameter.detach(),
            *(state for state in states if isinstance(state, Tensor)),
        ):
            yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_bytes(model: nn.Module, optimizer: Optimizer) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in local_state(model, optimizer))
