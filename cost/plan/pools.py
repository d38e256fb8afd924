"""Where a job could run: pools, judged (`Candidate`, `Rejection`) or not (`Pool`). Plain data, from and to JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cost.plan.chance import Case, Outlook
from cost.plan.fit import Fit


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Where and how large: instance type × nodes × ranks per node × market × place. A gang lies in one zone, always.

    region: None for a pool that is ruled out everywhere. zone: its id, or its name where only that is known; None:
    any one zone of the region, since the price is the same in all (on-demand) or known no better (the static table).
    """

    instance_type: str
    nodes: int
    processes_per_node: int
    market: str
    region: str | None = None
    zone: str | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.processes_per_node

    @property
    def place(self) -> str:
        """The zone, else the region; empty for everywhere."""
        return self.zone or self.region or ""

    def __str__(self) -> str:
        place = f" in {self.place}" if self.place else ""
        return f"{self.nodes} × {self.instance_type} {self.market.replace('_', '-')}{place}"


@dataclass(frozen=True, kw_only=True)
class Candidate(Pool):
    """A pool that can run the job, with what it is expected to take. usd_per_hour per node; all else estimated.

    quoted_usd_per_hour: the same price exactly as it was quoted, for the bill. on_demand_usd_per_hour: of the same
    type and region; None: not on record. price_kind: how the price is known, in words that begin with live, recorded
    or estimated. price_age_hours: since it was last known to hold. price_stale: older than cost.max_price_age_hours.
    speed_kind: measured, scaled … or prior; hazard_kind: estimated, or updated by jobs of this store.
    interval_seconds: of training between two saves, as the configuration has it; daly_interval_steps: Daly's.
    paid_hours: of each node; expected_hours: with the waits for capacity after reclaims, which are not paid.
    expected_usd: compute_usd + storage_usd + transfer_usd (`cost.plan.expect`); usd_per_step: of the remaining steps.
    case: what the hours depend on, and how they may vary; outlook: how they may come out, of the best pools only.
    """

    gpu: str
    gpu_count: int
    gpu_memory_bytes: int
    usd_per_hour: float
    quoted_usd_per_hour: str
    on_demand_usd_per_hour: float | None
    price_kind: str
    price_age_hours: float
    price_stale: bool
    micro_batch: int
    fit: Fit
    tokens_per_second: float
    step_seconds: float
    bound: str
    mfu: float
    speed_kind: str
    save_seconds: float
    interval_seconds: float
    hazard_per_hour: float
    hazard_kind: str
    daly_interval_steps: int
    interruptions: float
    paid_hours: float
    expected_hours: float
    compute_usd: float
    storage_usd: float
    transfer_usd: float
    expected_usd: float
    usd_per_step: float
    case: Case
    outlook: Outlook | None = None

    @property
    def gang_usd_per_hour(self) -> float:
        return self.usd_per_hour * self.nodes

    @property
    def savings_percent(self) -> float | None:
        """Of the price per hour, against on-demand; None: no on-demand price of the type and region is on record."""
        on_demand = self.on_demand_usd_per_hour
        return None if on_demand is None else 100.0 * (1.0 - self.usd_per_hour / on_demand)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Candidate:
        outlook = data["outlook"] and Outlook(**data["outlook"])
        return cls(**{**data, "fit": Fit(**data["fit"]), "case": Case.from_json(data["case"]), "outlook": outlook})


@dataclass(frozen=True, kw_only=True)
class Rejection(Pool):
    """A pool that cannot run the job. kind groups like reasons; excess: how much too large, where that has a size."""

    kind: str
    reason: str
    excess: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Rejection:
        return cls(**data)
