"""Laps of contestants in turn, so that a disturbance of the machine affects all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Lap:
    """The time and processor time of a lap, all steps since the start, and the last mean loss."""

    seconds: float
    cpu_seconds: float
    steps: int
    loss: float


class Contestant(Protocol):
    """A loop that continues where its last lap ended."""

    def run(self, steps: int) -> Lap: ...


def run_laps(
    contestants: Mapping[str, Contestant], *, rounds: int, steps: int
) -> dict[str, list[dict[str, Any]]]:
    """Return laps by contestant, without a first round that warms up. Collective.

    Each round begins with another contestant.
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
    """Wait for all ranks. Collective."""
    if dist.is_initialized():
        dist.barrier()
