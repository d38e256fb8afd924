"""The default optimizer and the learning rate schedule.

The learning rate depends on the step number alone, so a resumed run needs no scheduler state.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbflow.core.config.schema import TrainingConfig
from ebbflow.training.checkpoint.boxes import own_boxes
from ebbflow.training.checkpoint.state import AVERAGE

_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_MOMENTUM = 0.95
# Coefficients and number of iterations of Keller Jordan's Muon
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_ITERATIONS = 5
_ADAMW_RMS = 0.2
_AVERAGED_STEPS = "ema_steps"
_WSD_DECAY_SHARE = 0.2  # of all steps: warm-up, stable, decay (Hu et al. 2024, MiniCPM, section 4)


class Muon(torch.optim.AdamW):
    """Muon for the groups with "muon_dtype", whose parameters are matrices [n, m]; AdamW for the
    other groups.

    With gradient G, momentum M and weight decay λ, a step is

        M ← 0.95 · M + 0.05 · G
        W ← (1 - lr · λ) · W - lr · 0.2 · √max(n, m) · orthogonalise(0.95 · M + 0.05 · G)

    Source: https://kellerjordan.github.io/posts/muon, with Nesterov momentum. The factor 0.2 ·
    √max(n, m) gives updates the RMS that AdamW's have, so that its learning rate and weight decay
    hold (Liu et al. 2025, Muon is Scalable for LLM Training, section 2.2).

    Of sharded matrices, one at a time is gathered. Each rank then computes the whole update, and
    applies its shard. `torch.optim.Muon` knows no shards, has no `found_inf`, and always computes
    in bfloat16.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if "muon_dtype" in group else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in groups if "muon_dtype" not in group]
        try:
            # The wrapper would call this optimizer's hooks again
            inspect.unwrap(torch.optim.AdamW.step)(self)
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        skip = getattr(self, "found_inf", None)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, weight, gradient = (
            _local(tensor) for tensor in (state["momentum_buffer"], parameter, parameter.grad)
        )
        mean = momentum.lerp(gradient, 1 - _MOMENTUM)
        whole = _gather(
            gradient.lerp(mean, _MOMENTUM).to(getattr(torch, group["muon_dtype"])), parameter
        )
        update = orthogonalise(whole)
        rate = group["lr"] * _ADAMW_RMS * math.sqrt(max(parameter.shape))
        moved = parameter * (1 - group["lr"] * group["weight_decay"])
        for box in own_boxes(moved):
            box.local.sub_(update[box.slices].to(box.local), alpha=rate)
        for old, new in ((momentum, mean), (weight, _local(moved))):
            old.copy_(new if skip is None else torch.where(skip.to(old.device) > 0, old, new))


def make_optimizer(
    module: nn.Module, training: TrainingConfig, *, muon_dtype: torch.dtype = torch.float32
) -> torch.optim.Optimizer:
    """Return a fused AdamW optimizer, or Muon, as `training.optimizer` says.

    Only matrices have weight decay.

    Muon orthogonalises in `muon_dtype`. With bfloat16, equal steps of different world sizes differ
    by its rounding.
    """
    parameters = list(module.parameters())
    if training.optimizer == "muon":
        hidden = hidden_matrices(module)
    else:
        hidden = []
    others = {id(p) for p in parameters} - {id(p) for p in hidden}
    matrices = [p for p in parameters if p.ndim >= 2 and id(p) in others]
    groups: list[dict[str, Any]] = [
        {
            "params": hidden,
            "weight_decay": training.weight_decay,
            "muon_dtype": str(muon_dtype).partition(".")[2],
        },
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if hidden:
        kind = Muon
    else:
        kind = torch.optim.AdamW
    return kind(groups, lr=training.learning_rate, betas=(0.9, 0.95), fused=True)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the matrices that Muon trains: the weights of all linear layers but the output layer.

    The output layer is the last linear layer. A weight that is also an embedding table is left out.
    """
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    layers: list[Any] = [part for part in module.modules() if isinstance(part, nn.Linear)]
    left_out = tables | {id(part.weight) for part in layers[-1:]}
    return list(
        {
            id(part.weight): part.weight for part in layers if id(part.weight) not in left_out
        }.values()
    )


def orthogonalise(matrix: Tensor) -> Tensor:
    """Approximate U·Vᵀ by Newton-Schulz iterations, where U·S·Vᵀ is the singular value
    decomposition.

    The singular values of the result are between about 0.7 and 1.2, apart from those that were
    almost zero.
    """
    a, b, c = _NEWTON_SCHULZ
    if matrix.shape[0] > matrix.shape[1]:
        x = matrix.T
    else:
        x = matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    if matrix.shape[0] > matrix.shape[1]:
        return x.T
    return x


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Update an average of each parameter after each optimizer step: average = decay · average + (1
    - decay) · weight.

    In step n the decay is at most (1 + n) / (10 + n), so that the first weights are soon forgotten.
    """

    def update(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            steps = group[_AVERAGED_STEPS] = group.get(_AVERAGED_STEPS, 0) + 1
            averages = []
            weights = []
            for parameter in group["params"]:
                # Its state may be empty, which tells some optimizers to begin
                if parameter.grad is None:
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
    """Return a context in which parameters with an average hold the average.

    On exit, restore the weights exactly.
    """

    def swap() -> None:
        for parameter, state in optimizer.state.items():
            if AVERAGE in state:
                weight = _local(parameter.detach())
                average = _local(state[AVERAGE])
                kept = weight.clone()
                weight.copy_(average)
                average.copy_(kept)

    swap()
    try:
        yield
    finally:
        swap()


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of every parameter group, multiplied by the group's "lr_scale" if it
    has one.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def scale_and_clip(
    gradients: list[Tensor], *, scale: float | Tensor, norm: float | Tensor, limit: float | None
) -> None:
    """Scale all gradients by `scale` and clip them to the norm `limit`, in place and in one pass.

    `norm` is the gradient norm after scaling and before clipping. `scale` and `norm` are either
    both numbers or both tensors on the gradients' device.
    """
    if limit is not None:
        ratio = limit / (norm + _CLIP_EPSILON)
        scale = scale * (ratio.clamp(max=1.0) if isinstance(ratio, Tensor) else min(1.0, ratio))
    if isinstance(scale, Tensor):
        scale = scale.float()
    torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]  not in torch's type information


def can_skip_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `skip_if_non_finite` works with this optimizer; it does with torch's fused
    ones.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def skip_if_non_finite(optimizer: torch.optim.Optimizer, norm: float | Tensor) -> None:
    """Make the next optimizer step change nothing if the gradient norm is not finite.

    `norm` is a tensor on the device, for which the host does not wait. Do nothing if it is a
    number, or if the optimizer cannot skip a step (`can_skip_step`).
    """
    if can_skip_step(optimizer) and isinstance(norm, Tensor):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]


def learning_rate(training: TrainingConfig, step: int) -> float:
    """Return the learning rate of a step, where steps count from 1 to `max_steps`.

    Every schedule rises linearly to the peak until step `warmup_steps`. After that, "constant"
    stays at the peak. The other schedules fall to `final_ratio` × peak at `max_steps`:
    "linear_warmup" linearly, "cosine" along half a cosine, and "wsd" linearly over the last fifth
    of all steps.
    """
    scheduler = training.scheduler
    peak = training.learning_rate
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


def _gather(shard: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole matrix, on the device that computes. Collective.

    With CPU offload, this is not the device of the shard.
    """
    if not isinstance(parameter, DTensor):
        return shard
    mesh = parameter.device_mesh
    layout = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(
        shard.to(mesh.device_type), mesh, parameter.placements, **layout
    ).full_tensor()


def _local(tensor: Any) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor
