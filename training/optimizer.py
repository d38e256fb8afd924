"""The optimizer, and the learning rate as a pure function of the step: a resumed run needs no scheduler state."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ebbflow.infra.config.schema import TrainingConfig

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def make_optimizer(module: nn.Module, training: TrainingConfig) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only, not on norms and other vectors.

    Fused: one kernel, and one dispatch through DTensor, for all parameters of a group.
    """
    parameters = list(module.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of every group, times the group's "lr_scale" if a workload's own optimizer has one."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def scale_and_clip(gradients: list[Tensor], *, scale: float, norm: float, limit: float | None) -> None:
    """Multiply gradients by `scale`, and clip their norm to `limit`, in place and in one pass.

    Equal to scaling followed by `torch.nn.utils.clip_grad_norm_`.

    Args:
        norm: the norm of all scaled gradients together.
    """
    if limit is not None:
        scale *= min(1.0, limit / (norm + _CLIP_EPSILON))
    torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]  not in torch's type information


_WSD_DECAY_SHARE = 0.2  # of all steps: warm-up, stable, decay (Hu et al. 2024, MiniCPM, section 4)


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the rate of step `step`, from 1 to max_steps.

    All types rise linearly to the peak at step `warmup_steps`. Then: constant stays; linear_warmup falls linearly,
    cosine as half a cosine, to final_ratio × peak at max_steps; wsd stays, and falls linearly over the last fifth.
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
