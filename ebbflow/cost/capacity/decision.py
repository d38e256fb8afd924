"""Choose the queue and the machines of a job's next attempt on AWS Batch: `choose_placement`.

The rule has no parameters: use Spot as long as a start on Spot is safe, then use on-demand until
the job ends. A start on Spot is safe if the job can still finish on demand within deadline and
budget after a failure of Spot (`cost.plan.guarantee`).

AWS Batch starts a job in state RUNNABLE as soon as there is capacity, and waiting is free. An
attempt therefore waits in the queue of a Spot pool for as long as that is safe, at most
`batch.runnable_minutes`. If it has not started by then, the next attempt uses the cheapest Spot
pool that is not known to lack capacity. If all Spot pools lack capacity, it uses the pool whose
refusal is the oldest.

The job changes to on-demand at the last safe moment, not earlier, because waiting for Spot costs
nothing until then.

A capacity reservation or Capacity Block is preferred to both markets if the rest of the job costs
no more in it and waiting for its start is safe. AWS does not take its machines away before it ends,
so it needs no fallback. Without on-demand queues, a reservation is the last resort.

The current time is the caller's clock, or the latest time that AWS Batch reported for an earlier
attempt if that is later. Otherwise a clock that was set back would make the deadline look farther
away.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.terms import Fallback
from ebbflow.cost.capacity import placement
from ebbflow.cost.catalogue import Catalogue, InstanceType
from ebbflow.cost.errors import PlacementError
from ebbflow.cost.kubernetes_pools import catalogue_of, find_pool
from ebbflow.cost.plan.guarantee import (
    DEARER,
    DECIDE_HOURS,
    delay_hours,
    finish_hours,
    hours_until_end,
    make_fallback,
    spare_hours,
    spare_usd,
    start_hours,
    usd_saved_by_moving,
)
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.prices.reservations import Reservation

if TYPE_CHECKING:
    from ebbflow.infra.batch.queues import QueueState

HOUR = 3600.0

RULE = "spot_first"

LEAST_WALL_SECONDS = 60
_MOST_WALL_SECONDS = 2**31 - 1  # the most that AWS Batch takes
# Limit without budget and deadline: this multiple of the expected hours, and at least Metaflow's
# own limit.
_WALL_TIMES = 4
_WALL_AT_LEAST_SECONDS = 5 * 24 * 3600

_ENDS = {
    placement.RECLAIMED: "was reclaimed",
    placement.NEVER_STARTED: "had no capacity",
    placement.NOT_MADE: "had capacity, and no container in time",
    placement.TERMINATED: "was terminated",
    placement.USER_CODE: "was ended by the program",
    "ended": "ended",
}


def choose_placement(
    config: RunConfig,
    *,
    plan: Plan,
    history: placement.AttemptHistory,
    queues: Mapping[str, QueueState],
    now_utc: float,
    catalogue: Catalogue | None = None,
    held: Sequence[Reservation] | None = None,
) -> placement.Placement:
    """Choose the queue, instance type and number of nodes of the next attempt.

    Args:
        plan: A new plan of the remaining work, with all its pools.
        queues: AWS Batch queues by name, from `ebbflow.infra.batch.queues.describe_queues`.
        now_utc: Unix time.
        catalogue: None means the shipped tables.
        held: The account's reservations in their current state. None means as configured.

    Raises:
        PlacementError: The plan is refused (budget, deadline, no capacity), or no queue can run any
            of its pools.
    """
    if plan.refusal is not None:
        raise PlacementError(plan.refusal.outcome, f"{plan.refusal.message} ({plan.refusal.hint})")
    now = history.latest_utc(now_utc)
    if catalogue is None:
        kinds = catalogue_of(config)
    else:
        kinds = catalogue
    region = config.batch.region
    found = placement.find_offers(plan.ranked, queues, region=region, catalogue=kinds)
    if not found:
        why = placement.explain_no_offer(plan.ranked, queues, region=region, catalogue=kinds)
        raise PlacementError(
            Outcome.NO_CAPACITY,
            f"none of {len(queues)} queues can run any of the plan's {len(plan.ranked)} pools: "
            f"{why}; fix: batch.queues, or cluster.instance_types, cluster.nodes and "
            "cluster.market",
        )
    choice = _after_a_bug(found, history)
    if choice is None:
        if held is None:
            known = tuple(map(Reservation.of, config.cost.reservations))
        else:
            known = held
        choice = _with_move(
            config, plan, _apply_rule(config, plan, found, history, now), known, queues, now
        )
    kind = kinds[choice.offer.candidate.instance_type]
    wall = wall_seconds(config, plan, choice.offer, now)
    return _placement(config, choice, kind, wall, now)


def wall_seconds(config: RunConfig, plan: Plan, offer: placement.QueueOffer, now_utc: float) -> int:
    """Return the time limit of an attempt in seconds, given by budget, deadline and the end of a
    reservation.

    If none of these is set, the limit is a multiple of the expected duration. The job itself
    normally stops before the limit, because it keeps a reserve for its last checkpoint.
    """
    pool = offer.candidate
    limits = []
    if plan.budget_usd is not None and pool.gang_usd_per_hour > 0:
        limits.append((plan.budget_usd - plan.spent_usd) / pool.gang_usd_per_hour * HOUR)
    if plan.deadline_hours is not None:
        left = plan.started_utc + plan.deadline_hours * HOUR - now_utc
        limits.append(left + config.checkpoint.deadline_seconds)
    if pool.ends_utc is not None:
        limits.append(pool.ends_utc - now_utc)
    if not limits:
        limits.append(max(_WALL_AT_LEAST_SECONDS, _WALL_TIMES * pool.expected_hours * HOUR))
    return max(LEAST_WALL_SECONDS, math.floor(min(*limits, _MOST_WALL_SECONDS)))


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """The chosen pool and the limits of the attempt.

    `wait_hours` None means the limit `batch.runnable_minutes`.
    """

    offer: placement.QueueOffer
    reason: str
    rule: str = ""
    wait_hours: float | None = None
    start_within_hours: float = math.inf
    fallback: Fallback | None = None


def _apply_rule(
    config: RunConfig,
    plan: Plan,
    found: Sequence[placement.QueueOffer],
    history: placement.AttemptHistory,
    now_utc: float,
) -> _Choice:
    """Choose a reservation if it costs no more than the choice of `_spot_or_on_demand`.

    Else return that choice.
    """
    choice = _spot_or_on_demand(config, plan, found, history, now_utc)
    last = next(
        (offer for offer in found if not offer.is_spot and offer.candidate.reservation is None),
        None,
    )
    if last:
        refused = _refused_lately(history)
    else:
        refused = _refused_last(history)
    for offer in found:
        if offer.candidate.reservation is None or offer.id in refused:
            continue
        begins = offer.candidate.case.wait_hours
        wait = begins + delay_hours(config)
        if plan.deadline_hours is not None:
            left = plan.deadline_hours - (now_utc - plan.started_utc) / HOUR
            # After a wait in vain, another attempt must be placed, on demand if possible.
            if last:
                needed = finish_hours(config, last.candidate)
            else:
                needed = finish_hours(config, offer.candidate) - wait
            wait = min(wait, left - needed - DECIDE_HOURS)
        # A start at the end of the wait must leave time to finish before the reservation's end.
        busy = finish_hours(config, offer.candidate) - begins - delay_hours(config)
        wait = min(wait, hours_until_end(offer.candidate, now_utc) - busy)
        if (
            offer.candidate.expected_usd <= choice.offer.candidate.expected_usd
            and wait >= begins + DECIDE_HOURS
        ):
            reason = (
                f"{_last_end(history)}reservation {offer.candidate.reservation}, where the rest "
                "costs no more"
            )
            return _Choice(offer=offer, reason=reason, rule=RULE, wait_hours=wait)
    return choice


def _with_move(
    config: RunConfig,
    plan: Plan,
    choice: _Choice,
    held: Sequence[Reservation],
    queues: Mapping[str, QueueState],
    now_utc: float,
) -> _Choice:
    """Let an attempt on Spot move to a reservation of the same machines if that saves money.

    The attempt leaves Spot when the reservation begins.
    """
    spot = choice.offer.candidate
    queued = {queue_state.reservation for queue_state in queues.values() if queue_state.usable}
    best = None
    most = 0.0
    for reservation in held if choice.offer.is_spot and config.cluster.market == "auto" else ():
        same = (reservation.instance_type, reservation.region) == (spot.instance_type, spot.region)
        if same and reservation.id in queued and not reservation.why_unusable(spot.nodes, now_utc):
            saved = usd_saved_by_moving(config, spot, reservation, now_utc)
            if saved > most:
                best = reservation
                most = saved
    if best is None:
        return choice
    kept = choice.fallback or replace(
        make_fallback(config, spot, spot, steps=plan.steps), guards=False
    )
    kept = replace(kept, move_utc=best.start_utc, move_to=best.id, move_end_utc=best.end_utc)
    reason = (
        f"{choice.reason}; moves to reservation {best.id} at its begin, which saves about "
        f"${most:.2f}"
    )
    return replace(choice, reason=reason, fallback=kept)


def _spot_or_on_demand(
    config: RunConfig,
    plan: Plan,
    found: Sequence[placement.QueueOffer],
    history: placement.AttemptHistory,
    now_utc: float,
) -> _Choice:
    """Choose Spot if on-demand capacity could still finish the job in time and budget afterwards,
    else on-demand.

    If there is no on-demand pool or no deadline, always choose Spot, provided that there is a Spot
    pool.
    """
    spots = [offer for offer in found if offer.is_spot]
    last_end = _last_end(history)
    on_demand = _fallback_offers(found, history)
    if spots and (not on_demand or plan.deadline_hours is None):
        if not on_demand:
            why = "no on-demand pool within queues, deadline and budget: Spot only"
        else:
            why = "no deadline: Spot"
        return _Choice(offer=_in_order(spots, history)[0], reason=last_end + why, rule=RULE)
    if plan.deadline_hours is None:
        deadline = math.inf
    else:
        deadline = plan.deadline_hours
    hours_left = deadline - (now_utc - plan.started_utc) / HOUR
    if plan.budget_usd is None:
        usd_left = math.inf
    else:
        usd_left = plan.budget_usd - plan.spent_usd

    def spare(spot: placement.QueueOffer, last: placement.QueueOffer) -> tuple[float, float]:
        pair = spot.candidate, last.candidate
        left = min(hours_left, hours_until_end(last.candidate, now_utc))
        return spare_hours(config, *pair, left), spare_usd(config, *pair, usd_left)

    def is_safe(spot: placement.QueueOffer, last: placement.QueueOffer) -> bool:
        hours, usd = spare(spot, last)
        return hours >= min(DECIDE_HOURS, delay_hours(config)) and usd >= 0

    limit = DEARER * on_demand[0].candidate.expected_usd
    bearable = [offer for offer in on_demand if offer.candidate.expected_usd <= limit]
    last = next(
        (offer for offer in bearable if any(is_safe(spot, offer) for spot in spots)), on_demand[0]
    )
    safe = [spot for spot in spots if is_safe(spot, last)]
    if not safe:
        return _Choice(
            offer=last,
            reason=last_end + _why_no_spot([spare(spot, last) for spot in spots]),
            rule=RULE,
        )
    offer = _in_order(safe, history)[0]
    hours = spare(offer, last)[0]
    waits = last.candidate.case.wait_hours
    if waits:
        begin_utc = now_utc + waits * HOUR
    else:
        begin_utc = 0.0
    return _Choice(
        offer=offer,
        reason=f"{last_end}Spot while a start is safe ({hours:.2f} h more than the reserve)",
        rule=RULE,
        wait_hours=min(delay_hours(config), hours),
        start_within_hours=hours + start_hours(offer.candidate),
        fallback=make_fallback(
            config, offer.candidate, last.candidate, steps=plan.steps, begin_utc=begin_utc
        ),
    )


def _in_order(
    spots: Sequence[placement.QueueOffer], history: placement.AttemptHistory
) -> list[placement.QueueOffer]:
    """Sort Spot offers. Pools that are not known to lack capacity come first, in the plan's order.

    The other pools follow: those whose last attempt got no capacity or was reclaimed, the oldest
    attempt first.
    """

    def gone(offer: placement.QueueOffer) -> float:
        last = next(
            (
                attempt
                for attempt in reversed(history.attempts)
                if attempt.placement.pool == offer.id
            ),
            None,
        )
        if last is not None and (last.refused or last.cause == placement.RECLAIMED):
            return last.ended_utc
        return -math.inf

    return sorted(spots, key=gone)


def _fallback_offers(
    found: Sequence[placement.QueueOffer], history: placement.AttemptHistory
) -> list[placement.QueueOffer]:
    """Return the on-demand offers in the plan's order, without pools that lacked capacity in the
    latest attempts.

    If every on-demand pool lacked capacity, return all on-demand offers. Reservations are returned
    only if there are no other on-demand offers, and not the one that was full at the last attempt
    if there is Spot to try instead.
    """
    refused = _refused_lately(history)
    all_of_them = [offer for offer in found if not offer.is_spot]
    plain = [offer for offer in all_of_them if offer.candidate.reservation is None]
    if plain:
        return [offer for offer in plain if offer.id not in refused] or plain
    full = _refused_last(history)
    return [offer for offer in all_of_them if offer.id not in full] or (
        [] if len(all_of_them) < len(found) else all_of_them
    )


def _refused_lately(history: placement.AttemptHistory) -> set[str]:
    """Return the pools that had no capacity for the attempts after the last one that started."""
    latest = itertools.takewhile(lambda attempt: attempt.refused, reversed(history.attempts))
    return {attempt.placement.pool for attempt in latest}


def _refused_last(history: placement.AttemptHistory) -> set[str]:
    if history.last is not None and history.last.refused:
        return {history.last.placement.pool}
    return set()


def _why_no_spot(spares: Sequence[tuple[float, float]]) -> str:
    if not spares:
        return "on-demand: no usable queue runs a Spot pool of the plan"
    hours, usd = max(spares)
    if hours >= DECIDE_HOURS:
        return f"on-demand: a start of Spot needs ${-usd:.4f} more than the budget has left"
    return (
        f"on-demand at the last safe moment: a start of Spot needs {DECIDE_HOURS - hours:.2f} h "
        "more slack"
    )


def _placement(
    config: RunConfig, choice: _Choice, kind: InstanceType, wall: int, now_utc: float
) -> placement.Placement:
    pool = choice.offer.candidate
    if choice.wait_hours is None:
        wait = pool.case.wait_hours + delay_hours(config)
    else:
        wait = choice.wait_hours
    start_by = now_utc + choice.start_within_hours * HOUR
    pool_config = find_pool(config, pool.instance_type)
    return placement.Placement(
        instance_type=pool.instance_type,
        nodes=pool.nodes,
        processes_per_node=pool.processes_per_node,
        market=pool.market,
        region=pool.region,
        zone=pool.zone,
        reservation=pool.reservation,
        price=pool.price,
        expected_hours=pool.expected_hours,
        expected_usd=pool.expected_usd,
        queue=choice.offer.queue,
        cpu=kind.vcpu,
        gpu=min(pool.processes_per_node, kind.gpu_count),
        memory_mib=placement.memory_mib(kind),
        wall_seconds=wall,
        runnable_seconds=math.ceil(wait * HOUR),
        reason=choice.reason,
        policy=choice.rule,
        start_by_utc=None if math.isinf(start_by) else start_by,
        fallback=choice.fallback and asdict(choice.fallback),
        node_selector=None if pool_config is None else dict(pool_config.node_selector),
    )


def _after_a_bug(
    found: tuple[placement.QueueOffer, ...], history: placement.AttemptHistory
) -> _Choice | None:
    """If the user's code ended the last attempt, choose the same pool again, or a pool that costs
    no more.

    Returns:
        None if the last attempt ended for another reason.

    Raises:
        PlacementError: The pool is no longer available, and all other pools cost more.
    """
    last = history.last
    if last is None or last.cause != placement.USER_CODE:
        return None
    before = last.placement
    if last.started_utc is not None:
        how = "was ended by the user's program"
    else:
        how = "got no container: is its image missing?"
    same = next((offer for offer in found if offer.id == before.pool), None)
    if same is not None:
        reason = f"stays on {before}: the previous attempt {how}; other capacity would not help"
        return _Choice(offer=same, reason=reason)
    limit = before.gang_usd_per_hour
    cheaper = [offer for offer in found if offer.candidate.gang_usd_per_hour <= limit]
    if not cheaper:
        raise PlacementError(
            Outcome.NO_CAPACITY,
            f"the previous attempt, on {before}, {how}; this pool is no longer available, and "
            f"all other pools cost more than its ${limit:.4f}/h: fix the failure first",
        )
    reason = (
        f"{before} is no longer available; {cheaper[0].id} costs no more, as required after a "
        "failure of the program"
    )
    return _Choice(offer=cheaper[0], reason=reason)


def _last_end(history: placement.AttemptHistory) -> str:
    """Describe how the last attempt ended.

    The result is placed before the reason for the next placement.
    """
    last = history.last
    if last is None:
        return ""
    return f"{last.placement} {_ENDS.get(last.cause, 'ended for an unknown reason')}; "
