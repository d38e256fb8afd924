"""Contestants run lap after lap in turn, so that what disturbs the machine disturbs all of them
alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Lap:
    """seconds and cpu_seconds (of this rank, all its threads): of the steps of this lap. steps:
    taken since the start. loss: of the last step, mean over all ranks."""

    seconds: float
    cpu_seconds: float
    steps: int
    loss: float


class Contestant(Protocol):
    """Goes on from where its last lap ended."""

    def run(self, steps: int) -> Lap: ...


def run_laps(
    contestants: Mapping[str, Contestant], *, rounds: int, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """Laps by contestant; a first round warms up and is not returned.

    Each round begins with another. Collective.
    """
    laps: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            await_all()
            lap = contestants[name].run(steps)
            if number > 0:
                laps[name].append(asdict(lap))
    return laps


def await_all() -> None:
    """All ranks begin together. Collective."""
    if dist.is_initialized():
        dist.barrier()
