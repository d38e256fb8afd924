"""Where the next attempt runs: `place`, a pure function of the plan, the queues and what came before.

The answer is a policy's, through the safety net: Spot while slack lasts, on-demand at the last safe moment. Two things
are particular to Batch. Waiting for capacity is free there and starts the moment there is some: a job in RUNNABLE. So a
policy that would wait gets the next best start of Spot instead, for as long as waiting is safe
(`Placement.runnable_seconds`). And an attempt on demand runs to the end of the job, since nothing takes it away: to
begin it before the last safe moment gives up slack for nothing, so it is not begun earlier, whatever the policy says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ebbflow.cost.capacity.history import NEVER_STARTED, NOT_MADE, RECLAIMED, TERMINATED, USER_CODE, History
from ebbflow.cost.capacity.placement import Offer, Placement, lacking, memory_mib, offers
from ebbflow.cost.capacity.situation import HOUR, Situation, remember, situation, state_json
from ebbflow.cost.catalogue import Catalogue, InstanceType, load_catalogue
from ebbflow.cost.errors import PlacementError
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.policy import policies
from ebbflow.cost.policy.interface import Action, Policy, PoolView, Run, State
from ebbflow.cost.policy.safety_net import SafetyNet
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.outcome import Outcome

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState

LEAST_WALL_SECONDS = 60
# Without budget and deadline: so many times what the rest is expected to take, never less than Metaflow's own limit.
_WALL_TIMES, _WALL_AT_LEAST_SECONDS = 4, 5 * 24 * 3600


@dataclass(frozen=True, kw_only=True)
class _Choice:
    offer: Offer
    reason: str
    policy: str = ""
    runnable_hours: float | None = None
    start_within_hours: float = math.inf


def place(
    config: RunConfig,
    *,
    plan: Plan,
    history: History,
    queues: Mapping[str, QueueState],
    now_utc: float,
    catalogue: Catalogue | None = None,
) -> Placement:
    """The next attempt's place. plan: fresh, of the remaining work, with all its pools. queues: by name, as
    `ebbflow.infra.batch.queues.describe_queues` has them. now_utc: Unix time.

    Raises PlacementError: what refused the plan (budget, deadline, no capacity), or that no queue can run it.
    """
    if plan.refusal is not None:
        raise PlacementError(plan.refusal.outcome, f"{plan.refusal.message} ({plan.refusal.hint})")
    kinds = load_catalogue() if catalogue is None else catalogue
    region = config.batch.region or _region_of(queues)
    found = offers(plan.ranked, queues, region=region, catalogue=kinds)
    if not found:
        why = lacking(plan.ranked, queues, region=region, catalogue=kinds)
        raise PlacementError(
            Outcome.NO_CAPACITY,
            f"none of {len(queues)} queues can run any of the plan's {len(plan.ranked)} pools: {why}; fix: "
            "batch.queues, or cluster.instance_types, cluster.nodes and cluster.market",
        )
    runnable = config.batch.runnable_minutes / 60
    seen = situation(plan, found, history, runnable_hours=runnable, now_utc=now_utc)
    choice = _after_a_bug(found, history) or _asked(seen, history, plan) or _only_one_market(found, history)
    kind = kinds[choice.offer.candidate.instance_type]
    wall = wall_seconds(config, plan, choice.offer, now_utc)
    state = None if seen.state is None else state_json(seen.state)
    start_by = now_utc + choice.start_within_hours * HOUR
    placement = _placement(choice, kind, wall, choice.runnable_hours or runnable, state)
    return placement if math.isinf(start_by) else replace(placement, start_by_utc=start_by)


def _region_of(queues: Mapping[str, QueueState]) -> str | None:
    """As the queues' ARNs have it (arn:aws:batch:REGION:…): prices of another region are none of theirs. None where
    they have none, as queues have that Batch was not asked of."""
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


def wall_seconds(config: RunConfig, plan: Plan, offer: Offer, now_utc: float) -> int:
    """Paid seconds that budget and deadline still bear; the job's own stops come before: the last save is in both."""
    one, limits = offer.candidate, []
    if plan.budget_usd is not None and one.gang_usd_per_hour > 0:
        limits.append((plan.budget_usd - plan.spent_usd) / one.gang_usd_per_hour * HOUR)
    if plan.deadline_hours is not None:
        left = plan.started_utc + plan.deadline_hours * HOUR - now_utc
        limits.append(left + config.checkpoint.deadline_seconds)
    if not limits:
        limits.append(max(_WALL_AT_LEAST_SECONDS, _WALL_TIMES * one.expected_hours * HOUR))
    return max(LEAST_WALL_SECONDS, math.floor(min(limits)))


def _after_a_bug(found: tuple[Offer, ...], history: History) -> _Choice | None:
    """The user's own code ended the attempt: the next one stays, and is never dearer. None: nothing of the kind."""
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


def _only_one_market(found: tuple[Offer, ...], history: History) -> _Choice:
    """Nothing to fall back to: the cheapest Spot that was not just refused or lost."""
    gone = [attempt.placement.pool for attempt in history.attempts[-len(found) :] if attempt.refused]
    order = sorted(found, key=lambda one: gone.index(one.id) + 1 if one.id in gone else 0)
    return _Choice(
        offer=order[0],
        reason=f"{_came(history)}nothing on demand that queues, deadline and budget bear: Spot as it comes",
    )


def _asked(seen: Situation, history: History, plan: Plan) -> _Choice | None:
    """The policy's answer through the net; None without anything on demand."""
    state = seen.state
    if state is None:
        return None
    if not state.spot_pools:
        return _Choice(offer=seen.shown[state.on_demand.id], reason=_came(history) + _why_no_spot(seen, plan))
    name = "greedy" if math.isinf(state.deadline_hours) else "adaptive"
    policy = policies()[name]()
    try:
        remember(policy, history, started_utc=plan.started_utc)
        net = SafetyNet(policy)
        action = net.decide(state)
    except Exception:
        net = None
    if net is None or net.broken:
        name, net = "greedy", SafetyNet(policies()["greedy"]())
        action = net.decide(state)
    spot = _spot_of(action, state) or _queued_for(state)
    if spot is None:
        last = (
            f"on-demand at the last safe moment: {state.slack_hours:.2f} h of slack do not bear another start of Spot"
        )
        return _Choice(offer=seen.shown[state.on_demand.id], reason=_came(history) + last, policy=name)
    why = f"{_came(history)}Spot while slack lasts ({_slack(state)})"
    limits = {"runnable_hours": state.tick_hours, "start_within_hours": seen.start_within_hours[spot]}
    return _Choice(offer=seen.shown[spot], reason=why, policy=name, **limits)


class _Says:
    """A policy with one answer, to ask the net whether it is let through."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def decide(self, state: State) -> Action:
        return self._action


def _spot_of(action: Action, state: State) -> str | None:
    return action.pool if isinstance(action, Run) and action.pool in {pool.id for pool in state.spot_pools} else None


def _queued_for(state: State) -> str | None:
    """The Spot pool to wait for in its queue, as far as the net lets it: pools seen without capacity last, the one that
    was seen so longest ago before the others, else the cheapest."""

    def rank(pool: PoolView) -> tuple[float, float, str]:
        gone = (pool.seen_at_hours or 0.0) if pool.available is False else -math.inf
        return gone, pool.usd_per_hour, pool.id

    order = [pool.id for pool in sorted(state.spot_pools, key=rank)]
    wanted: Policy = _Says(Run(order[0], tuple(order[1:])))
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


def _came(history: History) -> str:
    """What ended the attempt before, as the beginning of a reason."""
    last = history.last
    if last is None:
        return ""
    return f"{last.placement} {_ENDS.get(last.cause, 'ended for a reason that nobody told')}; "


_ENDS = {
    RECLAIMED: "was reclaimed",
    NEVER_STARTED: "had no capacity",
    NOT_MADE: "had capacity, and no container in time",
    TERMINATED: "was terminated",
    USER_CODE: "was ended by the program",
    "ended": "ended",
}
