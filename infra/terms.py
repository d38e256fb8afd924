"""The money terms a job trains under: made by `cost`, handed over by the flow, only multiplied by `training`."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What training needs to know of money. Floats: these drive decisions, the ledger itself is Decimal.

    usd_per_rank_second: price of the planned capacity divided over its ranks.
    budget_usd: the most the job may cost; None means no limit.
    spent_usd: what earlier attempts of the same job have already cost.
    reserve_usd: kept back from the budget for the last save and the drain.
    deadline_utc: Unix time by which the job must be done; None means no deadline.
    hazard_per_hour: expected interruptions of the planned pool per hour (a gang in one pool is one hazard).
    price_kind: how the price is known: "live", "recorded" (on a date), "estimated" or "simulated".
    """

    usd_per_rank_second: float
    budget_usd: float | None = None
    spent_usd: float = 0.0
    reserve_usd: float = 0.0
    deadline_utc: float | None = None
    hazard_per_hour: float = 0.0
    price_kind: str = "recorded"

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Terms:
        return cls(**data)
