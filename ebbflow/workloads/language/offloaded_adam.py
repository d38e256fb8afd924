"""AdamW that keeps its moments in main memory, while weights and gradients stay on their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from ebbflow.core.config.schema import TrainingConfig
from ebbflow.training.engine.optimizer import make_optimizer

_MOMENTS = ("exp_avg", "exp_avg_sq")


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose update is computed on the CPU, parameter by parameter.

    A step copies each gradient and weight to main memory, and the new weight back: 12 bytes per
    parameter. On a CPU the weights are those of the fused AdamW, bit for bit.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter)

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _MOMENTS:
                state[name] = torch.zeros_like(parameter, device="cpu")
        for name in _MOMENTS:  # a restored commit has put them on the parameter's device
            if state[name].device.type != "cpu":
                state[name] = state[name].cpu()
        weight = _local(parameter)
        gradient = _local(parameter.grad)
        own = weight.cpu()
        averages, squares = ([_local(state[name])] for name in _MOMENTS)
        adamw(
            [own],
            [gradient.cpu()],
            averages,
            squares,
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if own is not weight:
            weight.copy_(own)


def make_offloaded(model: nn.Module, training: TrainingConfig) -> OffloadedAdamW:
    """Return an `OffloadedAdamW` with the parameter groups and settings of the default
    optimizer.
    """
    usual = make_optimizer(model, training)
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]}
        for group in usual.param_groups
    ]
    return OffloadedAdamW(groups, lr=training.learning_rate, betas=usual.param_groups[0]["betas"])


def _local(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor.detach()
