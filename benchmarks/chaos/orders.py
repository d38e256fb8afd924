"""How a fault is ordered from outside and carried out inside a rank: one small file in, one small
file out.

The rank looks once per step; where nothing is ordered that is one failed rename, about two
microseconds. What it leaves behind says when and where it struck, so that the time to notice is
counted from the fault and not from its order.
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
    """hook: name of what is to be done (`ebbflow.training.rehearse`). settings: its keyword
    arguments.
    """

    hook: str
    number: int
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Strike:
    """When a fault happened: t_wall is Unix time, t_mono this machine's monotonic clock. step: -1
    where unknown.
    """

    t_wall: float
    t_mono: float
    step: int = -1
    pid: int = 0

    @classmethod
    def now(cls, *, step: int = -1, pid: int = 0) -> Strike:
        return cls(t_wall=time.time(), t_mono=time.monotonic(), step=step, pid=pid)


class Orders:
    """One folder for one job: `give` from outside, `take` in the rank, which says with `strike`
    that it did.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def give(self, rank: int, order: Order) -> None:
        """The rank carries it out at its next step. An order that was never taken is replaced."""
        temporary = self.folder / f"rank-{rank}.tmp"
        temporary.write_text(json.dumps(asdict(order)))
        temporary.replace(self.folder / f"rank-{rank}.order")

    def withdraw(self, rank: int) -> bool:
        """Whether there was an order that nobody had taken."""
        try:
            (self.folder / f"rank-{rank}.order").unlink()
        except FileNotFoundError:
            return False
        return True

    def take(self, rank: int) -> Order | None:
        """What this rank is to do now, once."""
        taken = f"{self.folder}/rank-{rank}.taken"
        try:
            os.rename(f"{self.folder}/rank-{rank}.order", taken)
        except FileNotFoundError:
            return None
        return Order(**json.loads(Path(taken).read_text()))

    def strike(self, order: Order, *, step: int) -> None:
        """To be called right before the fault: what comes after may never return."""
        path = self.folder / f"strike-{order.number}.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(Strike.now(step=step, pid=os.getpid()))))
        temporary.replace(path)

    def forget(self, number: int) -> None:
        """For another try: a strike that came too late to be waited for."""
        (self.folder / f"strike-{number}.json").unlink(missing_ok=True)

    def struck(self, number: int) -> Strike | None:
        try:
            return Strike(**json.loads((self.folder / f"strike-{number}.json").read_text()))
        except FileNotFoundError:
            return None
