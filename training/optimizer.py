"""The default optimizer and the learning rate schedule.

The learning rate depends on the step number alone, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbflow.infra.config.schema import TrainingConfig
from ebbflow.training.checkpoint.state import AVERAGE

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def make_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer with weight decay for matrices, but not for vectors such as norm weights."""
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95), fused=True)


_AVERAGED_STEPS = "ema_steps"


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Update an average of each parameter after each optimizer step: average = decay · average + (1 - decay) · weight.

    In step n the decay is at most (1 + n) / (10 + n), so that the first weights are soon forgotten.
    """

    def update(optimizer: torch.optim.Optimizer, arguments: Any, options: Any) -> None:
        for group in optimizer.param_groups:
            steps = group[_AVERAGED_STEPS] = group.get(_AVERAGED_STEPS, 0) + 1
            averages, weights = [], []
            for parameter in group["params"]:
                if parameter.grad is None:  # its state may be empty, which tells some optimizers to begin
                    continue
                state = optimizer.state[parameter]
                if AVERAGE not in state:
                    state[AVERAGE] = parameter.detach().clone()
                averages.append(_local(state[AVERAGE]))
                weights.append(_local(parameter.detach()))
            if averages:
                weight = 1.0 - min(decay, (1 + steps) / (10 + steps))
                torch._foreach_lerp_(averages, weights, weight)  # pyright: ignore[reportPrivateImportUsage]  no types

    optimizer.register_step_post_hook(update)


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context in which parameters with an average hold the average. On exit, restore the weights exactly."""

    def swap() -> None:
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                weight, average = _local(parameter.detach()), _local(state[AVERAGE])
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group, multiplied by the group's "lr_scale" if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def scale_and_clip(
    gradients: list[Tensor], *, scale: float | Tensor, norm: float | Tensor, limit: float | None
) -> None:
    """Scale all gradients by `scale` and clip them to the norm `limit`, in place and in one pass.

    `norm` is the gradient norm after scaling and before clipping. `scale` and `norm` are either both numbers or both
    tensors on the gradients' device.
    """
    if limit is not None:
        ratio = limit / (norm + _CLIP_EPSILON)
        scale = scale * (ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio))
    if isinstance(scale, Tensor):
        scale = scale.float()
    torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]  not in torch's type information


def skip_if_non_finite(optimizer: torch.optim.Optimizer, norm: float | Tensor) -> bool:
    """Make the next optimizer step change nothing if `norm`, a tensor on the device, is not finite. No host sync.

    Return whether the optimizer can do this, as torch's fused optimizers can.
    """
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    if able and isinstance(norm, Tensor):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    return able


_WSD_DECAY_SHARE = 0.2  # of all steps: warm-up, stable, decay (Hu et al. 2024, MiniCPM, section 4)


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the learning rate of a step, where steps count from 1 to `max_steps`.

    Every schedule rises linearly to the peak until step `warmup_steps`. After that, "constant" stays at the peak. The
    other schedules fall to `final_ratio` × peak at `max_steps`: "linear_warmup" linearly, "cosine" along half a cosine,
    and "wsd" linearly over the last fifth of all steps.
    """
    scheduler, peak = training.scheduler, training.learning_rate
    if step < scheduler.warmup_steps:
        return peak * step / scheduler.warmup_steps
    start = scheduler.warmup_steps
    if scheduler.type == "wsd":
        start = max(start, training.max_steps - math.ceil(_WSD_DECAY_SHARE * training.max_steps))
    progress = min(max((step - start) / max(training.max_steps - start, 1), 0.0), 1.0)
    match scheduler.type:
        case "constant":
            height = 1.0
        case "linear_warmup" | "wsd":
            height = 1.0 - progress
        case "cosine":
            height = (1.0 + math.cos(math.pi * progress)) / 2.0
    return peak * (scheduler.final_ratio + (1.0 - scheduler.final_ratio) * height)
