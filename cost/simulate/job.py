"""A simulated job and what became of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Job:
    """`work_hours` of useful time by `deadline_hours` after the submit, for the whole gang.

    `changeover_hours`: paid time from a start to the first useful hour. `commit_interval_hours`: useful hours between
    commits; a preemption redoes what came after the last one (0: nothing, the published definition).
    `seed` draws the on-demand delays.
    """

    work_hours: float
    deadline_hours: float
    changeover_hours: float
    budget_usd: float = math.inf
    commit_interval_hours: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Reality:
    """What departs from the stated conditions, for measuring what happens then.

    `useful_per_hour`: true throughput over the one the plan assumed. `noticed_after_hours`: useful hours after which
    the job's own estimate of its remaining time uses the true one (inf: never). `on_demand_delays`: hours each
    on-demand start takes, in order, the last for all further ones; None draws them within the rules.
    """

    useful_per_hour: float = 1.0
    noticed_after_hours: float = math.inf
    on_demand_delays: tuple[float, ...] | None = None


@dataclass(slots=True)
class Outcome:
    """What a job cost and did. Dollars for the whole gang; hours of the job's clock."""

    finished_hours: float | None = None
    deadline_hours: float = 0.0
    spot_usd: float = 0.0
    on_demand_usd: float = 0.0
    egress_usd: float = 0.0
    probe_usd: float = 0.0
    redone_hours: float = 0.0
    waited_hours: float = 0.0
    on_demand_hours: float = 0.0
    starts: int = 0
    refused_starts: int = 0
    preemptions: int = 0
    decisions: int = 0
    overruled: int = 0
    tick_usd: float = 0.0
    """Price of the longest tick on demand."""
    timeline: list[tuple[float, str | None]] = field(default_factory=list)
    """(hour, pool) at each change of pool."""

    @property
    def usd(self) -> float:
        return self.spot_usd + self.on_demand_usd + self.egress_usd + self.probe_usd

    @property
    def missed(self) -> bool:
        return self.finished_hours is None or self.finished_hours > self.deadline_hours + 1e-9

    def over_budget(self, budget_usd: float) -> bool:
        """More than one tick of on-demand compute beyond the budget; transfer, probes and minima have no tolerance."""
        return self.usd > budget_usd + self.tick_usd + 1e-9
