"""The money terms a job trains under: made by `cost`, handed over by the flow, only multiplied by `training`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Shares of the budget that are told when they are reached. At the last one, the reserve still unspent, a job stops.
BUDGET_THRESHOLDS = (0.5, 0.8, 1.0)


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
    told_threshold: the highest of `BUDGET_THRESHOLDS` that earlier attempts have told of this budget; 0: none.
    step_seconds: of one step as the plan expects it, until one was measured; 0: nobody knows.
    """

    usd_per_rank_second: float
    budget_usd: float | None = None
    spent_usd: float = 0.0
    reserve_usd: float = 0.0
    deadline_utc: float | None = None
    hazard_per_hour: float = 0.0
    price_kind: str = "recorded"
    told_threshold: float = 0.0
    step_seconds: float = 0.0

    @property
    def spendable_usd(self) -> float | None:
        """What may be spent before the job must stop: the budget less the reserve; None without a budget."""
        return None if self.budget_usd is None else self.budget_usd - self.reserve_usd

    def reached(self, spent_usd: float) -> list[float]:
        """The thresholds that this much spent reaches. The last one counts the reserve as spent: it is spoken for."""
        if self.budget_usd is None:
            return []
        limits = {share: self.budget_usd * share for share in BUDGET_THRESHOLDS}
        limits[BUDGET_THRESHOLDS[-1]] = self.budget_usd - self.reserve_usd
        return [share for share, usd in limits.items() if spent_usd >= usd]

    def out_of_money(self) -> str:
        """Why a gang must not start: nothing is left but the reserve. Empty: it may."""
        if self.spendable_usd is None or self.spent_usd < self.spendable_usd:
            return ""
        return (
            f"budget: ${self.spent_usd:.4f} of ${self.budget_usd:.4f} is spent and ${self.reserve_usd:.4f} is kept for "
            "the last save, so that nothing is left to train with; fix: run the job again with a larger cost.budget_usd"
        )

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Terms:
        return cls(**data)
