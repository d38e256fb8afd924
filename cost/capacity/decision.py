"""Choose the queue and the machines of a job's next attempt on AWS Batch: `choose_placement`.

The choice depends only on the plan, the queues and the past attempts. A policy makes it, and the safety net checks it:
Spot while there is slack (time to the deadline beyond the remaining work), on-demand at the last safe moment. AWS Batch
differs in two points from the situation that policies assume:

- Waiting for capacity is free, and a job in state RUNNABLE starts as soon as there is capacity. So if a policy would
  wait, the job is submitted to the next best Spot pool, for as long as waiting is safe (`Placement.runnable_seconds`).
- An on-demand attempt runs to the end of the job, because nothing takes its machines away. So it does not begin before
  the last safe moment, whatever the policy answers.

Policies assume that all pools have the same speed. So the remaining work is that of the slowest pool shown to the
policy, and each price p is scaled such that finishing in that pool, with one start, has its real cost: price = p ·
(w_pool + d + Δ) / (w + d + Δ), with w for the remaining hours of work, d for the changeover and Δ for the tick.

Policies use no random numbers and no clock, so the same states in the same order give the same policy. The state of
each decision is recorded with its placement and replayed before the next decision. The replay shows the pool of each
attempt as running while the attempt ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.capacity.placement import (
    NEVER_STARTED,
    NOT_MADE,
    RECLAIMED,
    TERMINATED,
    USER_CODE,
    AttemptHistory,
    PastAttempt,
    Placement,
    QueueOffer,
    explain_no_offer,
    find_offers,
    memory_mib,
    reserve_usd,
)
from ebbflow.cost.catalogue import Catalogue, InstanceType, load_catalogue
from ebbflow.cost.errors import PlacementError
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.policy import policies
from ebbflow.cost.policy.interface import MINIMUM_HOURS, Action, Market, Policy, PoolView, State, UsePool
from ebbflow.cost.policy.safety_net import SafetyNet
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import Outcome

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState


HOUR = 3600.0
# Shortest useful time in RUNNABLE: an instance must boot before a job can start (an assumption, not measured).
LEAST_TRY_HOURS = 5 / 60
# A faster on-demand fallback may cost more by this factor if Spot can only be tried with it.
_DEARER = 1.25
# Most Spot pools shown to a policy, the best of the plan; the state of each decision is recorded.
_MOST_SHOWN = 16


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Input of one decision.

    Attributes:
        state: State for the policy; None without an on-demand pool, because no deadline can be guaranteed then.
        shown: Offers (pools with a queue) by the pool's id in the state.
        spare_hours: Slack beyond that needed for the shortest Spot try; negative if no Spot try is safe.
        start_within_hours: For each Spot pool, the longest wait and start-up of an attempt after which on-demand would
            still finish in time.
    """

    state: State | None
    shown: dict[str, QueueOffer]
    spare_hours: float
    start_within_hours: dict[str, float] = field(default_factory=dict)


def build_situation(
    plan: Plan, found: Sequence[QueueOffer], history: AttemptHistory, *, runnable_hours: float, now_utc: float
) -> Situation:
    """Build the input of one decision.

    Args:
        found: Pools with a queue that can run them.
        runnable_hours: Longest wait for capacity. It is the assumed on-demand delay, and the most time that a Spot
            start without capacity costs.
        now_utc: Unix time.
    """
    now = (now_utc - plan.started_utc) / HOUR
    deadline = math.inf if plan.deadline_hours is None else plan.deadline_hours
    spots = [offer for offer in found if offer.is_spot]
    on_demand = _fallback_offers(found, history)
    if not on_demand:
        return Situation(state=None, shown={one.id: one for one in found}, spare_hours=0.0)
    changeover = max(one.candidate.case.fixed_lost_hours for one in found)

    def spare(offer: QueueOffer, last_resort: QueueOffer) -> float:
        """Return the hours of slack that remain if this Spot start fails and on-demand must still finish in time."""
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
    within = {offer.id: spare(offer, last_resort) + changeover for offer in open_spots}  # changeover: with the start-up
    spare_hours = most[last_resort.id] - least
    return Situation(state=state, shown=shown_by_id, spare_hours=spare_hours, start_within_hours=within)


def _budget_usd(plan: Plan, last_resort: QueueOffer, tick_hours: float) -> float:
    """Return the budget for the safety net in dollars: that of the plan, without the price of the last checkpoint.

    The safety net reserves one on-demand tick for billing by whole ticks. AWS bills by the second, with a one-minute
    minimum, so the rest of that tick is added back.
    """
    if plan.budget_usd is None:
        return math.inf
    given_back = max(0.0, tick_hours - MINIMUM_HOURS) * last_resort.candidate.gang_usd_per_hour
    return plan.budget_usd - reserve_usd(plan, last_resort.candidate) + given_back


def _fallback_offers(found: Sequence[QueueOffer], history: AttemptHistory) -> list[QueueOffer]:
    """Return the on-demand offers, cheapest first, without those that lacked capacity in the last attempts.

    If this leaves none, return all on-demand offers.
    """
    refused = set()
    for attempt in reversed(history.attempts):
        if not attempt.refused:
            break
        refused.add(attempt.placement.pool)
    all_of_them = [offer for offer in found if not offer.is_spot]
    return [offer for offer in all_of_them if offer.id not in refused] or all_of_them


def _view(offer: QueueOffer, history: AttemptHistory, plan: Plan, now: float, work: float, start: float) -> PoolView:
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


def _last_seen(offer: QueueOffer, history: AttemptHistory, plan: Plan, now: float) -> tuple[bool | None, float | None]:
    """Return whether the pool had capacity at its last attempt, and at which hour; (None, None) if it was never tried.

    The end of the job's last attempt counts as observed now. On-demand always has capacity.
    """
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
    """Return the state as strict JSON data. An infinite deadline or budget becomes null."""
    data = {name: value for name, value in asdict(state).items() if not name.startswith("_")}
    limits = {name: None for name in _INFINITE if math.isinf(data[name])}
    return {**data, **limits, "pools": [dict(pool) for pool in data["pools"]]}


def state_from_json(data: dict[str, Any]) -> State:
    """Read the result of `state_json`. Raises TypeError, KeyError or ValueError for the state of another version."""
    limits = {name: math.inf if data[name] is None else data[name] for name in _INFINITE}
    pools = tuple(PoolView(**{**pool, "market": Market(pool["market"])}) for pool in data["pools"])
    return State(**{**data, **limits, "pools": pools})


def as_running(state: State, pool: str, now_hours: float, work_done_hours: float) -> State:
    """Return a later state at `now_hours`, in which the pool's machines run and did `work_done_hours` of work."""
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


# Most states replayed per attempt. They suffice, because a policy learns from hours with capacity, not from ticks.
_MOST_REPLAYED = 50


def replay_attempts(policy: Policy, history: AttemptHistory, *, started_utc: float) -> None:
    """Show a new policy all states of the job's earlier decisions and attempts, so that it learns from them again.

    Errors of the policy are not caught.

    Args:
        started_utc: Unix time of hour 0 of the job's clock.
    """
    for attempt in history.attempts:
        for state in _replayed_states(attempt, started_utc):
            policy.decide(state)


def _replayed_states(attempt: PastAttempt, started_utc: float) -> Iterator[State]:
    try:
        decided = state_from_json(attempt.placement.state or {})
    except (KeyError, TypeError, ValueError):
        return  # recorded by another version
    yield decided
    pool = attempt.placement.pool
    if attempt.started_utc is None or pool not in {view.id for view in decided.pools}:
        return
    first = max(decided.now_hours, (attempt.started_utc - started_utc) / HOUR)
    last = max(first, (attempt.ended_utc - started_utc) / HOUR)
    step = max(decided.tick_hours, (last - first) / _MOST_REPLAYED)
    for number in range(math.floor((last - first) / step) + 1):
        done = max(0.0, number * step - decided.changeover_hours)
        yield as_running(decided, pool, first + number * step, done)


LEAST_WALL_SECONDS = 60
# Limit without budget and deadline: this multiple of the expected hours, and at least Metaflow's own limit.
_WALL_TIMES, _WALL_AT_LEAST_SECONDS = 4, 5 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class _Choice:
    offer: QueueOffer
    reason: str
    policy: str = ""
    runnable_hours: float | None = None
    start_within_hours: float = math.inf


def choose_placement(
    config: RunConfig,
    *,
    plan: Plan,
    history: AttemptHistory,
    queues: Mapping[str, QueueState],
    now_utc: float,
    catalogue: Catalogue | None = None,
) -> Placement:
    """Choose the queue, instance type and number of nodes of the next attempt.

    Args:
        plan: A new plan of the remaining work, with all its pools.
        queues: AWS Batch queues by name, from `ebbflow.infra.batch.queues.describe_queues`.
        now_utc: Unix time.
        catalogue: None means the shipped tables.

    Raises:
        PlacementError: The plan is refused (budget, deadline, no capacity), or no queue can run any of its pools.
    """
    if plan.refusal is not None:
        raise PlacementError(plan.refusal.outcome, f"{plan.refusal.message} ({plan.refusal.hint})")
    kinds = load_catalogue() if catalogue is None else catalogue
    region = config.batch.region or _region_of(queues)
    found = find_offers(plan.ranked, queues, region=region, catalogue=kinds)
    if not found:
        why = explain_no_offer(plan.ranked, queues, region=region, catalogue=kinds)
        raise PlacementError(
            Outcome.NO_CAPACITY,
            f"none of {len(queues)} queues can run any of the plan's {len(plan.ranked)} pools: {why}; fix: "
            "batch.queues, or cluster.instance_types, cluster.nodes and cluster.market",
        )
    runnable = config.batch.runnable_minutes / 60
    seen = build_situation(plan, found, history, runnable_hours=runnable, now_utc=now_utc)
    choice = _after_a_bug(found, history) or _ask_policy(seen, history, plan) or _only_one_market(found, history)
    kind = kinds[choice.offer.candidate.instance_type]
    wall = wall_seconds(config, plan, choice.offer, now_utc)
    state = None if seen.state is None else state_json(seen.state)
    start_by = now_utc + choice.start_within_hours * HOUR
    placement = _placement(choice, kind, wall, choice.runnable_hours or runnable, state)
    return placement if math.isinf(start_by) else replace(placement, start_by_utc=start_by)


def _region_of(queues: Mapping[str, QueueState]) -> str | None:
    """Return the region named in the queues' ARNs (arn:aws:batch:REGION:…); None if there is none, or more than one."""
    said = {queue.arn.split(":")[3] for queue in queues.values() if queue.arn.count(":") > 3}
    return said.pop() if len(said) == 1 else None


def _placement(
    choice: _Choice, kind: InstanceType, wall: int, runnable_hours: float, state: dict[str, Any] | None
) -> Placement:
    one = choice.offer.candidate
    return Placement(
        queue=choice.offer.queue,
        market=one.market,
        instance_type=one.instance_type,
        region=one.region,
        zone=one.zone,
        nodes=one.nodes,
        processes_per_node=one.processes_per_node,
        cpu=kind.vcpu,
        gpu=min(one.processes_per_node, kind.gpu_count),
        memory_mib=memory_mib(kind),
        wall_seconds=wall,
        runnable_seconds=math.ceil(runnable_hours * HOUR),
        usd_per_hour=one.usd_per_hour,
        quoted_usd_per_hour=one.quoted_usd_per_hour,
        price_kind=one.price_kind,
        expected_hours=one.expected_hours,
        expected_usd=one.expected_usd,
        reason=choice.reason,
        policy=choice.policy,
        state=state,
    )


def wall_seconds(config: RunConfig, plan: Plan, offer: QueueOffer, now_utc: float) -> int:
    """Return the longest paid time of an attempt in seconds, so that it stays within budget and deadline.

    The job normally stops earlier, because both limits include the time for its last checkpoint.
    """
    one, limits = offer.candidate, []
    if plan.budget_usd is not None and one.gang_usd_per_hour > 0:
        limits.append((plan.budget_usd - plan.spent_usd) / one.gang_usd_per_hour * HOUR)
    if plan.deadline_hours is not None:
        left = plan.started_utc + plan.deadline_hours * HOUR - now_utc
        limits.append(left + config.checkpoint.deadline_seconds)
    if not limits:
        limits.append(max(_WALL_AT_LEAST_SECONDS, _WALL_TIMES * one.expected_hours * HOUR))
    return max(LEAST_WALL_SECONDS, math.floor(min(limits)))


def _after_a_bug(found: tuple[QueueOffer, ...], history: AttemptHistory) -> _Choice | None:
    """Choose the pool of the last attempt, or one that costs no more, if the user's code ended that attempt.

    Returns:
        None if the last attempt ended for another reason.

    Raises:
        PlacementError: The pool is no longer available, and all others cost more.
    """
    last = history.last
    if last is None or last.cause != USER_CODE:
        return None
    before = last.placement
    how = (
        "was ended by the program itself" if last.started_utc is not None else "had no container, as without its image"
    )
    same = next((one for one in found if one.id == before.pool), None)
    if same is not None:
        reason = f"stays on {before}: the attempt before {how}, which no other capacity cures"
        return _Choice(offer=same, reason=reason)
    limit = before.gang_usd_per_hour
    cheaper = [one for one in found if one.candidate.gang_usd_per_hour <= limit]
    if not cheaper:
        raise PlacementError(
            Outcome.NO_CAPACITY,
            f"the attempt before, on {before}, {how}; that place is not to be had any more, "
            f"and every other one is dearer than its ${limit:.4f}/h, on which a bug is not tried again",
        )
    reason = f"{before} is not to be had any more; {cheaper[0].id} is not dearer, and a bug gets nothing dearer"
    return _Choice(offer=cheaper[0], reason=reason)


def _only_one_market(found: tuple[QueueOffer, ...], history: AttemptHistory) -> _Choice:
    """Choose the cheapest Spot pool that did not lack capacity recently, without an on-demand pool to fall back on."""
    gone = [attempt.placement.pool for attempt in history.attempts[-len(found) :] if attempt.refused]
    order = sorted(found, key=lambda one: gone.index(one.id) + 1 if one.id in gone else 0)
    return _Choice(
        offer=order[0],
        reason=f"{_last_end(history)}no on-demand pool within queues, deadline and budget: Spot only",
    )


def _ask_policy(seen: Situation, history: AttemptHistory, plan: Plan) -> _Choice | None:
    """Let the policy choose, under the safety net. Return None if there is no on-demand pool to fall back on."""
    state = seen.state
    if state is None:
        return None
    if not state.spot_pools:
        return _Choice(offer=seen.shown[state.on_demand.id], reason=_last_end(history) + _why_no_spot(seen, plan))
    name = "greedy" if math.isinf(state.deadline_hours) else "adaptive"
    policy = policies()[name]()
    try:
        replay_attempts(policy, history, started_utc=plan.started_utc)
        net = SafetyNet(policy)
        decided = net.decide(state)
        action = None if net.broken else decided
    except Exception:
        action = None
    if action is None:
        name = "greedy"
        action = SafetyNet(policies()[name]()).decide(state)
    spot = _spot_of(action, state) or _queued_for(state)
    if spot is None:
        last = (
            f"on-demand at the last safe moment: {state.slack_hours:.2f} h of slack are too few for another Spot start"
        )
        return _Choice(offer=seen.shown[state.on_demand.id], reason=_last_end(history) + last, policy=name)
    why = f"{_last_end(history)}Spot while slack lasts ({_slack(state)})"
    limits = {"runnable_hours": state.tick_hours, "start_within_hours": seen.start_within_hours[spot]}
    return _Choice(offer=seen.shown[spot], reason=why, policy=name, **limits)


class _FixedPolicy:
    """Policy that always gives the same answer. It shows whether the safety net allows that answer."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def decide(self, state: State) -> Action:
        return self._action


def _spot_of(action: Action, state: State) -> str | None:
    return (
        action.pool if isinstance(action, UsePool) and action.pool in {pool.id for pool in state.spot_pools} else None
    )


def _queued_for(state: State) -> str | None:
    """Return the Spot pool in whose queue the job should wait; None if the safety net allows none.

    Cheaper pools come first. Pools last observed without capacity come after all others, the oldest observation first.
    """

    def rank(pool: PoolView) -> tuple[float, float, str]:
        gone = (pool.seen_at_hours or 0.0) if pool.available is False else -math.inf
        return gone, pool.usd_per_hour, pool.id

    order = [pool.id for pool in sorted(state.spot_pools, key=rank)]
    wanted: Policy = _FixedPolicy(UsePool(order[0], tuple(order[1:])))
    return _spot_of(SafetyNet(wanted).decide(state), state)


def _why_no_spot(seen: Situation, plan: Plan) -> str:
    assert seen.state is not None
    if seen.spare_hours == -math.inf:
        return "on-demand: no usable queue runs a Spot pool of the plan"
    return (
        f"on-demand at the last safe moment: a start of Spot needs {-seen.spare_hours:.2f} h more slack than the "
        f"{seen.state.slack_hours:.2f} h that are left"
    )


def _slack(state: State) -> str:
    return "no deadline" if math.isinf(state.deadline_hours) else f"{state.slack_hours:.2f} h"


def _last_end(history: AttemptHistory) -> str:
    """Describe the end of the last attempt, as the beginning of the reason for the next placement."""
    last = history.last
    if last is None:
        return ""
    return f"{last.placement} {_ENDS.get(last.cause, 'ended for an unknown reason')}; "


_ENDS = {
    RECLAIMED: "was reclaimed",
    NEVER_STARTED: "had no capacity",
    NOT_MADE: "had capacity, and no container in time",
    TERMINATED: "was terminated",
    USER_CODE: "was ended by the program",
    "ended": "ended",
}
