"""Faults that are ordered from outside and carried out inside a rank: one file in, one file out.

The rank looks once per step, which costs one failed rename, about two microseconds. Its answer has
the time and step of the fault, so that the time to the verdict counts from the fault and not from
its order.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Order:
    """An order to call a hook (`benchmarks.chaos.hooks`) with `settings` as keyword arguments."""

    hook: str
    number: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """The moment of a fault: Unix time, and this machine's monotonic clock. step: -1 if unknown."""

    t_wall: float
    t_mono: float
    step: int = -1
    pid: int = 0

    @classmethod
    def now(cls, *, step: int = -1, pid: int = 0) -> Strike:
        return cls(t_wall=time.time(), t_mono=time.monotonic(), step=step, pid=pid)


class Orders:
    """The orders of one job in a folder: `give` outside, `take` and `strike` in the rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def give(self, rank: int, order: Order) -> None:
        """Order a fault for the rank's next step. An order that was not taken yet is replaced."""
        temporary = self.folder / f"rank-{rank}.tmp"
        temporary.write_text(json.dumps(asdict(order)))
        temporary.replace(self.folder / f"rank-{rank}.order")

    def withdraw(self, rank: int) -> bool:
        """Remove an order. Return whether there was one that was not taken yet."""
        try:
            (self.folder / f"rank-{rank}.order").unlink()
        except FileNotFoundError:
            return False
        return True

    def take(self, rank: int) -> Order | None:
        """Return the order for this rank, once."""
        taken = f"{self.folder}/rank-{rank}.taken"
        try:
            os.rename(f"{self.folder}/rank-{rank}.order", taken)
        except FileNotFoundError:
            return None
        return Order(**json.loads(Path(taken).read_text()))

    def strike(self, order: Order, *, step: int) -> None:
        """Record a fault. Call it right before the fault, which may never return."""
        path = self.folder / f"strike-{order.number}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(Strike.now(step=step, pid=os.getpid()))))
        temporary.replace(path)

    def forget(self, number: int) -> None:
        """Delete the record of a strike that came too late, before another try."""
        (self.folder / f"strike-{number}.json").unlink(missing_ok=True)

    def struck(self, number: int) -> Strike | None:
        try:
            return Strike(**json.loads((self.folder / f"strike-{number}.json").read_text()))
        except FileNotFoundError:
            return None
