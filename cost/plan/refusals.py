"""Why a plan is refused: which limit binds, the arithmetic, and what would make it fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost.plan.budget import needed_usd, reserve_usd
from cost.plan.candidates import (
    ELSEWHERE,
    HAZARD_UNKNOWN,
    MISSES_DEADLINE,
    NO_ON_DEMAND_PRICE,
    NO_QUEUE,
    NO_SPOT_PRICE,
    Sources,
)
from cost.plan.hints import (
    budget_hint,
    capacity_hint,
    cheapest_without_deadline,
    deadline_hint,
    enough_hours,
    fastest_without_deadline,
    later,
)
from cost.plan.pools import Candidate, Rejection
from infra.config.schema import RunConfig
from infra.outcome import Outcome


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why the job must not start: the outcome it ends with, the arithmetic, and what would make it possible.

    enough: the least value of the limit that binds, dollars or hours, that would do; None when no limit binds.
    """

    outcome: Outcome
    message: str
    hint: str
    enough: float | None = None


def refusal(
    config: RunConfig,
    sources: Sources,
    ranked: list[Candidate],
    rejected: tuple[Rejection, ...],
) -> Refusal | None:
    """None: the job may start on `ranked[0]`, which is what `within_budget` puts there."""
    if ranked:
        return _over_budget(config, sources, ranked[0])
    late = [rejection for rejection in rejected if rejection.kind == MISSES_DEADLINE]
    if late:
        fastest = min(late, key=lambda rejection: rejection.excess)
        message = f"no pool meets the deadline; the fastest, {fastest}, {fastest.reason}"
        pool, first_hours = fastest_without_deadline(config, sources)
        hours = enough_hours(sources, pool)
        needed, budget = needed_usd(config, sources, pool), config.cost.budget_usd
        hint = deadline_hint(config, sources, hours)
        if budget is not None and needed > budget:
            message += f". The budget binds as well: with time enough {pool} would need ${needed:.4f} of ${budget:.4f}"
            hint = f"{later(hours)}, and cost.budget_usd to {math.ceil(needed * 100) / 100:.2f} or more"
        elif pool.expected_hours > first_hours:
            message += f". The first that the budget bears, {pool}, would need {pool.expected_hours:.4g} h"
        return Refusal(outcome=Outcome.DEADLINE, message=message, hint=hint, enough=hours)
    hint = capacity_hint(config, sources, rejected)
    return Refusal(outcome=Outcome.NO_CAPACITY, message=_nothing_fits(config, rejected), hint=hint)


def _over_budget(config: RunConfig, sources: Sources, cheapest: Candidate) -> Refusal | None:
    budget, spent = config.cost.budget_usd, sources.progress.spent_usd
    needed = needed_usd(config, sources, cheapest)
    if budget is None or needed <= budget:
        return None
    other = cheapest.storage_usd + cheapest.transfer_usd
    message = (
        f"cost.budget_usd is ${budget:.4f}; the cheapest pool that can do it, {cheapest}, needs ${needed:.4f} = "
        f"{cheapest.paid_hours:.4g} h × {cheapest.nodes} × ${cheapest.usd_per_hour:.4f}/h "
        f"+ ${other:.4f} storage and transfer + ${reserve_usd(config, cheapest):.4f} reserve for the last save"
        + (f" + ${spent:.4f} spent so far" if spent else "")
    )
    hint = budget_hint(config, sources, cheapest, needed)
    if config.cost.deadline_hours is not None and (slow := cheapest_without_deadline(config, sources)) is not None:
        total = needed_usd(config, sources, slow)
        if total <= budget:
            message += (
                f". The deadline binds as well: {slow} would do it for ${total:.4f} in {slow.expected_hours:.4g} h"
            )
    return Refusal(outcome=Outcome.BUDGET, message=message, hint=hint, enough=needed)


def _nothing_fits(config: RunConfig, rejected: tuple[Rejection, ...]) -> str:
    if not rejected:
        return f"no instance type of the catalogue begins with {', '.join(config.cluster.instance_types)}"
    nearest = min(rejected, key=_distance)
    return f"none of {len(rejected)} pools can run the job; the nearest, {nearest}: {nearest.reason}"


def _distance(rejection: Rejection) -> tuple[int, float]:
    """How far a pool is from running the job: first those that want only a queue or a price, then those too
    small, then others."""
    wanting = (NO_QUEUE, HAZARD_UNKNOWN, NO_SPOT_PRICE, NO_ON_DEMAND_PRICE, ELSEWHERE, "does not fit")
    return wanting.index(rejection.kind) if rejection.kind in wanting else len(wanting), rejection.excess
