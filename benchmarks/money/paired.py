"""Paired comparison of policies on the same starts: mean difference with an interval, and the worst decile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 4000
_SEED = 20230215


@dataclass(frozen=True, slots=True)
class Paired:
    """`mean_usd`: first minus second. The 95 % interval is a bootstrap of blocks of neighbouring starts, since jobs
    that overlap in time live through the same interruptions and are not independent."""

    mean_usd: float
    low_usd: float
    high_usd: float


def paired(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], block: int) -> Paired:
    """Dollars per start, in order of time, one sequence per world. `block`: starts within one deadline, at least 1."""
    generator = np.random.default_rng(_SEED)
    differences = [np.asarray(a) - np.asarray(b) for a, b in zip(first, second, strict=True)]
    sums = np.zeros(_RESAMPLES)
    for row in differences:
        length = len(row)
        width = min(max(1, block), length)
        blocks = -(-length // width)
        begins = generator.integers(0, length, size=(_RESAMPLES, blocks))
        index = (begins[:, :, None] + np.arange(width)[None, None, :]).reshape(_RESAMPLES, -1)[:, :length]
        sums += row[index % length].sum(axis=1)
    means = sums / sum(len(row) for row in differences)
    low, high = np.quantile(means, [0.025, 0.975])
    return Paired(float(np.concatenate(differences).mean()), float(low), float(high))


def worst_decile_usd(usd: Sequence[float]) -> float:
    """Mean of the dearest tenth."""
    ordered = np.sort(np.asarray(usd))
    return float(ordered[-max(1, len(ordered) // 10) :].mean())
