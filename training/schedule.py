"""Learning rate as a pure function of the step, so that a resumed run needs no state to go on with it."""

from __future__ import annotations

import math

from ebbflow.infra.config.schema import TrainingConfig

_WSD_DECAY_SHARE = 0.2  # of all steps: warm-up, stable, decay (Hu et al. 2024, MiniCPM, section 4)


def learning_rate(training: TrainingConfig, step: int) -> float:
    """The rate of step `step`, 1 … max_steps.

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
