"""Which pools the budget can bear: what is spent already, what the rest is expected to cost, and one last save."""

from __future__ import annotations

from collections.abc import Sequence

from cost.plan.candidates import Sources
from cost.plan.pools import Candidate, Pool, Rejection
from infra.config.schema import RunConfig

OVER_BUDGET = "over the budget"


def reserve_usd(config: RunConfig, pool: Candidate) -> float:
    """The gang's price of `checkpoint.deadline_seconds`: kept back for the last save and the drain."""
    return pool.gang_usd_per_hour * config.checkpoint.deadline_seconds / 3600


def needed_usd(config: RunConfig, sources: Sources, pool: Candidate) -> float:
    """Of the budget, were the job to go on in this pool."""
    return sources.progress.spent_usd + pool.expected_usd + reserve_usd(config, pool)


def within_budget(
    config: RunConfig, sources: Sources, ranked: Sequence[Candidate]
) -> tuple[list[Candidate], list[Rejection]]:
    """The pools that the budget bears, in their order, and the others as rejected; all pools where it bears none,
    the one that needs least first, so that the refusal can say what would do.

    The cheapest pool need not be one of them: the reserve of a dear gang that is quickly done may be too much.
    """
    budget = config.cost.budget_usd
    if budget is None:
        return list(ranked), []
    borne = [pool for pool in ranked if needed_usd(config, sources, pool) <= budget]
    if not borne:
        return sorted(ranked, key=lambda pool: needed_usd(config, sources, pool)), []
    kept = set(map(id, borne))
    return borne, [_rejection(config, sources, pool) for pool in ranked if id(pool) not in kept]


def _rejection(config: RunConfig, sources: Sources, pool: Candidate) -> Rejection:
    budget, spent = config.cost.budget_usd or 0.0, sources.progress.spent_usd
    needed = needed_usd(config, sources, pool)
    reason = (
        f"needs ${needed:.4f} = ${pool.expected_usd:.4f} + ${reserve_usd(config, pool):.4f} reserve for the last save"
        + (f" + ${spent:.4f} spent so far" if spent else "")
        + f", cost.budget_usd is ${budget:.4f}"
    )
    where = {name: getattr(pool, name) for name in Pool.__dataclass_fields__}
    return Rejection(**where, kind=OVER_BUDGET, reason=reason, excess=needed / budget if budget else needed)
