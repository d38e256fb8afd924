"""What a policy sees before an attempt: pools as prices, the job's clock, and what earlier decisions showed.

Policies know one speed. So the work left is that of the slowest pool shown, and each price is such that finishing
there, one start included, costs what that pool would really cost: price = p · (w_pool + d + Δ) / (w + d + Δ).

Policies draw nothing and read no clock, so that the same states in the same order make the same policy. The states of
the decisions are recorded with the placements; between them, as long as an attempt ran, its pool is shown as running.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ebbflow.cost.capacity.history import RECLAIMED, History, PastAttempt
from ebbflow.cost.capacity.placement import Offer, reserve_usd
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.policy.interface import MINIMUM_HOURS, Market, Policy, PoolView, State

HOUR = 3600.0
# Less than this in RUNNABLE is no try: an instance must boot before a job can start (an assumption, not measured).
LEAST_TRY_HOURS = 5 / 60
# A faster on-demand pool to fall back to may be dearer by this factor if only with it Spot can be tried at all.
_DEARER = 1.25
# Spot pools that a policy is shown, the best by the plan: each decision is kept with all that it saw.
_MOST_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Situation:
    """state: None where nothing runs on demand, so that nothing could be promised; the offers are all that can run.

    shown: the offers by the pool's name in the state. spare_hours: slack beyond what the least try of Spot needs;
    below 0: Spot is closed. start_within_hours: of each Spot pool of the state, how long waiting and starting may take
    together, so that on-demand would still be in time after it.
    """

    state: State | None
    shown: dict[str, Offer]
    spare_hours: float
    start_within_hours: dict[str, float] = field(default_factory=dict)


def situation(
    plan: Plan, found: Sequence[Offer], history: History, *, runnable_hours: float, now_utc: float
) -> Situation:
    """runnable_hours: that a job may wait for capacity: the stated delay of on-demand, and what a refused start of Spot
    costs at most."""
    now = (now_utc - plan.started_utc) / HOUR
    deadline = math.inf if plan.deadline_hours is None else plan.deadline_hours
    spots = [offer for offer in found if offer.is_spot]
    on_demand = _to_fall_back_to(found, history)
    if not on_demand:
        return Situation(state=None, shown={one.id: one for one in found}, spare_hours=0.0)
    changeover = max(one.candidate.case.fixed_lost_hours for one in found)

    def spare(offer: Offer, last_resort: Offer) -> float:
        """Of the slack, beyond a start that is refused at once and everything that must be in reserve."""
        reserve = 2 * changeover + runnable_hours + offer.candidate.case.interval_hours
        return deadline - now - max(offer.work_hours, last_resort.work_hours) - reserve

    least = min(LEAST_TRY_HOURS, runnable_hours)
    most = {one.id: max((spare(offer, one) for offer in spots), default=-math.inf) for one in on_demand}
    bearable = [one for one in on_demand if one.candidate.expected_usd <= _DEARER * on_demand[0].candidate.expected_usd]
    last_resort = next((one for one in bearable if most[one.id] >= least), on_demand[0])
    open_spots = [offer for offer in spots if spare(offer, last_resort) >= least][:_MOST_SHOWN]
    shown = [*open_spots, last_resort]
    tick = min([runnable_hours, *(spare(offer, last_resort) for offer in open_spots)])
    work = max(offer.work_hours for offer in shown)
    state = State(
        now_hours=now,
        deadline_hours=deadline,
        work_left_hours=work,
        uncommitted_hours=0.0,
        changeover_hours=changeover,
        on_demand_delay_hours=runnable_hours,
        tick_hours=tick,
        pools=tuple(_view(offer, history, plan, now, work, changeover + tick) for offer in shown),
        current=None,
        startup_left_hours=0.0,
        spent_usd=plan.spent_usd,
        budget_usd=_budget_usd(plan, last_resort, tick),
        checkpoint_region=shown[0].candidate.region or "",
        commit_interval_hours=max(offer.candidate.case.interval_hours for offer in shown),
    )
    shown_by_id = {offer.id: offer for offer in shown}
    within = {offer.id: spare(offer, last_resort) + changeover for offer in open_spots}  # a start is in the changeover
    spare_hours = most[last_resort.id] - least
    return Situation(state=state, shown=shown_by_id, spare_hours=spare_hours, start_within_hours=within)


def _budget_usd(plan: Plan, last_resort: Offer, tick_hours: float) -> float:
    """What the net may count on, the last save's price left out. It keeps the price of one tick on demand back, since
    elsewhere whole ticks may be billed: AWS bills seconds, a minute at least, so that the rest of a tick is given back.
    """
    if plan.budget_usd is None:
        return math.inf
    given_back = max(0.0, tick_hours - MINIMUM_HOURS) * last_resort.candidate.gang_usd_per_hour
    return plan.budget_usd - reserve_usd(plan, last_resort.candidate) + given_back


def _to_fall_back_to(found: Sequence[Offer], history: History) -> list[Offer]:
    """On-demand pools, cheapest first, without those that were just waited for in vain, unless there are no others."""
    refused = set()
    for attempt in reversed(history.attempts):
        if not attempt.refused:
            break
        refused.add(attempt.placement.pool)
    all_of_them = [offer for offer in found if not offer.is_spot]
    return [offer for offer in all_of_them if offer.id not in refused] or all_of_them


def _view(offer: Offer, history: History, plan: Plan, now: float, work: float, start: float) -> PoolView:
    one = offer.candidate
    available, seen = _last_seen(offer, history, plan, now)
    return PoolView(
        id=offer.id,
        region=one.region or "",
        zone=one.zone or one.region or "",
        market=Market.SPOT if offer.is_spot else Market.ON_DEMAND,
        usd_per_hour=one.gang_usd_per_hour * (offer.work_hours + start) / (work + start),
        available=available,
        seen_at_hours=seen,
    )


def _last_seen(offer: Offer, history: History, plan: Plan, now: float) -> tuple[bool | None, float | None]:
    """(had capacity, when) as the newest attempt there has shown; what ended the attempt before this decision is seen
    at this decision."""
    if not offer.is_spot:
        return True, now
    for attempt in reversed(history.attempts):
        if attempt.placement.pool != offer.id:
            continue
        at = now if attempt is history.last else min(now, (attempt.ended_utc - plan.started_utc) / HOUR)
        if attempt.refused or attempt.cause == RECLAIMED:
            return False, at
        if attempt.started_utc is not None:
            return True, at
    return None, None


_INFINITE = ("deadline_hours", "budget_usd")


def state_json(state: State) -> dict[str, Any]:
    """Strict JSON: what has no limit is null."""
    data = {name: value for name, value in asdict(state).items() if not name.startswith("_")}
    limits = {name: None for name in _INFINITE if math.isinf(data[name])}
    return {**data, **limits, "pools": [dict(pool) for pool in data["pools"]]}


def state_from_json(data: dict[str, Any]) -> State:
    """Raises TypeError, KeyError or ValueError for what is no state of this version."""
    limits = {name: math.inf if data[name] is None else data[name] for name in _INFINITE}
    pools = tuple(PoolView(**{**pool, "market": Market(pool["market"])}) for pool in data["pools"])
    return State(**{**data, **limits, "pools": pools})


def running(state: State, pool: str, now_hours: float, work_done_hours: float) -> State:
    """The same state later, with the pool's machines running: capacity was there."""
    pools = tuple(
        replace(view, available=True, seen_at_hours=now_hours) if view.id == pool else view for view in state.pools
    )
    return replace(
        state,
        now_hours=now_hours,
        work_left_hours=max(0.0, state.work_left_hours - work_done_hours),
        pools=pools,
        current=pool,
        may_switch=False,
    )


# An attempt is shown at its decisions' distance, but no more often than this: a policy learns from spells, not ticks.
_MOST_SIGHTS = 50


def remember(policy: Policy, history: History, *, started_utc: float) -> None:
    """Show `policy` what the job's earlier decisions and attempts showed. started_utc: of the job's clock.

    Raises whatever the policy raises: one that cannot bear its own past cannot be asked.
    """
    for attempt in history.attempts:
        for state in _sights(attempt, started_utc):
            policy.decide(state)


def _sights(attempt: PastAttempt, started_utc: float) -> Iterator[State]:
    try:
        decided = state_from_json(attempt.placement.state or {})
    except (KeyError, TypeError, ValueError):
        return  # recorded by another version: less is remembered, and nothing wrong
    yield decided
    pool = attempt.placement.pool
    if attempt.started_utc is None or pool not in {view.id for view in decided.pools}:
        return
    first = max(decided.now_hours, (attempt.started_utc - started_utc) / HOUR)
    last = max(first, (attempt.ended_utc - started_utc) / HOUR)
    step = max(decided.tick_hours, (last - first) / _MOST_SIGHTS)
    for number in range(math.floor((last - first) / step) + 1):
        done = max(0.0, number * step - decided.changeover_hours)
        yield running(decided, pool, first + number * step, done)
