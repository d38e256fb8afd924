"""Budget, deadline and prices of a running job: computed by `cost`, passed on by the flow, used by `training`."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Fractions of the budget that are reported when reached. At the last one a job stops, with the reserve unspent.
BUDGET_THRESHOLDS = (0.5, 0.8, 1.0)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Budget, deadline and prices of a job. Floats, because they only drive decisions; the ledger is Decimal."""

    usd_per_rank_second: float  # price of the planned capacity per rank
    budget_usd: float | None = None  # spending limit of the job; None: no limit
    spent_usd: float = 0.0  # cost of earlier attempts of the job
    reserve_usd: float = 0.0  # part of the budget reserved for the last save and the drain
    deadline_utc: float | None = None  # Unix time by which the job must be done; None: no deadline
    # expected interruptions of the planned pool per hour (a gang in one pool is one hazard)
    hazard_per_hour: float = 0.0
    price_kind: str = "recorded"  # "live", "recorded" (on a date), "estimated" or "simulated"
    last_notified_threshold: float = 0.0  # highest of `BUDGET_THRESHOLDS` that earlier attempts reported; 0: none
    step_seconds: float = 0.0  # expected duration of a step until one is measured; 0: unknown

    @property
    def spendable_usd(self) -> float | None:
        """Return the budget without the reserve; None without a budget."""
        return None if self.budget_usd is None else self.budget_usd - self.reserve_usd

    def reached(self, spent_usd: float) -> list[float]:
        """Return the `BUDGET_THRESHOLDS` that `spent_usd` reaches; for the last one, the reserve counts as spent."""
        if self.budget_usd is None:
            return []
        limits = {share: self.budget_usd * share for share in BUDGET_THRESHOLDS}
        limits[BUDGET_THRESHOLDS[-1]] = self.budget_usd - self.reserve_usd
        return [share for share, usd in limits.items() if spent_usd >= usd]

    def out_of_money(self) -> str:
        """Return why a gang must not start, if only the reserve of the budget is left; "" if it may start."""
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
