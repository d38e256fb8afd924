"""Guarantee that a job with a deadline finishes in time and within budget, by falling back to
on-demand capacity.

On-demand capacity is the last resort. An on-demand job is assumed to start within D =
`batch.runnable_minutes` of its submission, to keep its machines, and to run at the planned speed
and price. Let w be the remaining hours of work, d the hours that a start takes, s the longest time
of a save, I the hours of work that losing the machine would undo, wait the hours of waiting for
Spot capacity, t the hours for which AWS Batch keeps machines after a job (0 elsewhere), and P the
hourly price of all nodes. Each option then needs:

    finish on demand      D + d + w + s hours               (d + w + s + t) · P_on_demand dollars
    keep on Spot          finish + max(I, s) hours          finish + I · P_on_demand + (s + t) · P_spot dollars
    start on Spot         keep + wait + 2 d hours           keep + (2 d + I) · P_spot dollars

A new job is admitted only if it can finish on demand with `DECIDE_HOURS` to spare. An attempt on
Spot starts only if the remaining hours and dollars cover the row "start on Spot". The job moves to
on-demand when the remaining hours or dollars no longer exceed the row "keep on Spot"
(`ebbflow.core.terms.Fallback`). An attempt on Spot ends by a loss of the machine, which undoes I,
or by a last save, never by both.

With 2 d, an attempt may stay although its container is made as late as `Placement.start_by_utc`
allows, or although its ranks fail at their first step and start again. The dollars 2 d + I on Spot
pay for two starts of the ranks and for the work between them that a failure undoes.

While the price of Spot is watched (`cost.price_seconds`), it may rise to `PRICE_RISE` times before the
ranks know. Both rows on Spot then also keep `rise_usd`, and starts count at that multiple.
"""

import math
from collections.abc import Sequence
from typing import Required, TypedDict

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.terms import PRICE_RISE, Fallback, PriceWatch
from ebbflow.cost.plan.candidates import MISSES_DEADLINE, OVER_BUDGET
from ebbflow.cost.plan.pools import Candidate, Rejection, get_idle_seconds
from ebbflow.cost.prices.reservations import Reservation

DECIDE_HOURS = 5 / 60
"""Longest time between two placements, and the shortest useful wait for capacity: an instance must boot (assumed)."""

DEARER = 1.25
"""A faster on-demand fallback may cost more by this factor if only that fallback makes a Spot start safe."""


class MissingGuarantee(TypedDict, total=False):
    """Reason why a deadline or budget cannot be guaranteed, as fields of a `PlanRefusal`."""

    outcome: Required[Outcome]
    message: Required[str]
    hint: Required[str]
    enough: float | None


def start_hours(pool: Candidate) -> float:
    """Return the paid hours from the start of the machines to the first useful step (d in the
    module docstring).
    """
    return max(pool.case.fixed_lost_hours, pool.case.start_hours)


def undone_hours(config: RunConfig, spot: Candidate, last_resort: Candidate) -> float:
    """Return the most on-demand hours that an interruption on Spot may cost.

    They are the work of a checkpoint interval, and hang detection. If the last resort is slower
    than Spot, it takes longer to redo the steps of the interval.
    """
    slowdown = max(1.0, last_resort.step_seconds / spot.step_seconds)
    return spot.case.interval_hours * slowdown + config.survival.hang_floor_seconds / 3600


def delay_hours(config: RunConfig) -> float:
    """Return the longest assumed wait for on-demand machines, in hours (D in the module docstring)."""
    return config.batch.runnable_minutes / 60


def finish_hours(config: RunConfig, pool: Candidate) -> float:
    """Return the hours needed to finish on demand from now, including a last checkpoint and
    expected failures.
    """
    return pool.case.wait_hours + delay_hours(config) + busy_hours(pool) + _save_hours(config)


def finish_usd(config: RunConfig, pool: Candidate) -> float:
    """Return the dollars needed to finish on demand, including a last checkpoint, idle machines
    afterwards, storage and transfer.
    """
    return (
        (busy_hours(pool) + _save_hours(config) + _idle_hours(config)) * pool.gang_usd_per_hour
        + pool.storage_usd
        + pool.transfer_usd
    )


def last_resorts(pools: Sequence[Candidate]) -> list[Candidate]:
    """Return the on-demand pools.

    Reservations are left out if there are other on-demand pools, because a reservation may be full
    or end too early.
    """
    found = [candidate for candidate in pools if candidate.market == "on_demand"]
    return [pool for pool in found if pool.reservation is None] or found


def hours_until_end(pool: Candidate, now_utc: float) -> float:
    """Return the hours until the pool's reservation ends; infinite for other pools."""
    if pool.ends_utc is None:
        return math.inf
    return (pool.ends_utc - now_utc) / 3600


def busy_hours(pool: Candidate) -> float:
    return max(pool.paid_hours, start_hours(pool) + pool.case.work_hours)


def _save_hours(config: RunConfig) -> float:
    return config.checkpoint.deadline_seconds / 3600


def _idle_hours(config: RunConfig) -> float:
    return get_idle_seconds(config.cluster.plan_for) / 3600


def rise_usd(config: RunConfig, pool: Candidate) -> float:
    """Return the dollars that a rise of a watched Spot price may cost before the ranks know of it.

    They include the higher price of a step, a last save and idle machines after it. The result is 0
    for other pools.
    """
    end_hours = _save_hours(config) + _idle_hours(config)
    return pool.rise_usd(PriceWatch.of(config), 3600 * end_hours)


def spare_hours(
    config: RunConfig, spot: Candidate, last_resort: Candidate, hours_left: float
) -> float:
    """Return the hours that a job can wait for Spot and still finish on demand in time; negative if
    it is too late.
    """
    slower = max(0.0, spot.case.work_hours - last_resort.case.work_hours)
    leave = max(undone_hours(config, spot, last_resort), _save_hours(config))
    return hours_left - finish_hours(config, last_resort) - 2 * start_hours(spot) - leave - slower


def spare_usd(config: RunConfig, spot: Candidate, last_resort: Candidate, usd_left: float) -> float:
    """Return the dollars left over if a start on Spot fails and the job finishes on demand;
    negative for a deficit.
    """
    undone = undone_hours(config, spot, last_resort)
    starts = 2 * start_hours(spot) * _start_rise(config, spot)
    end = _save_hours(config) + _idle_hours(config)
    lost = (starts + undone + end) * spot.gang_usd_per_hour
    kept = lost + rise_usd(config, spot)
    return (
        usd_left - finish_usd(config, last_resort) - undone * last_resort.gang_usd_per_hour - kept
    )


def make_fallback(
    config: RunConfig,
    spot: Candidate,
    last_resort: Candidate,
    *,
    steps: int,
    begin_utc: float = 0.0,
) -> Fallback:
    """Return the hours and dollars that an attempt on Spot must keep in reserve to finish on demand
    from any step.

    Args:
        steps: Number of remaining steps. All of them are assumed to take equally long.
        begin_utc: Unix time at which the last resort begins, if it is a reservation.
    """
    save = _save_hours(config)
    price = last_resort.gang_usd_per_hour
    undone = undone_hours(config, spot, last_resort)
    finish = start_hours(last_resort) + save
    idle = _idle_hours(config)
    on_demand_hours = finish + undone + idle
    on_demand_usd = on_demand_hours * price + last_resort.storage_usd + last_resort.transfer_usd
    spot_usd = (save + idle) * spot.gang_usd_per_hour + rise_usd(config, spot)
    step_hours = (busy_hours(last_resort) - start_hours(last_resort)) / max(1, steps)
    return Fallback(
        begin_utc=begin_utc,
        end_utc=last_resort.ends_utc,
        seconds=3600 * (delay_hours(config) + finish + max(undone, save)),
        restart_seconds=3600 * start_hours(spot),
        restart_usd=start_hours(spot) * spot.gang_usd_per_hour * _start_rise(config, spot),
        step_seconds=3600 * step_hours,
        usd=on_demand_usd + spot_usd,
        spot_usd=spot_usd,
        step_usd=step_hours * price,
    )


def usd_saved_by_moving(
    config: RunConfig, spot: Candidate, held: Reservation, now_utc: float
) -> float:
    """Return the dollars that a job saves by moving from Spot to a reservation when that begins.

    The reservation has the same machines. The attempt is assumed to start now and to lose no
    machine until then, so that the least work is left. The result is 0 if the reservation has
    begun, costs the on-demand price, or ends before the work.
    """
    begins = held.wait_hours(now_utc)
    price = spot.gang_usd_per_hour
    left = max(0.0, spot.case.work_hours - max(0.0, begins - start_hours(spot)))
    end_utc = now_utc + (begins + start_hours(spot) + left) * 3600
    if (
        begins <= 0
        or held.usd_per_hour is None
        or (held.end_utc is not None and held.end_utc < end_utc)
    ):
        return 0.0
    held_usd = float(held.usd_per_hour + spot.price.volume_usd_per_hour) * spot.nodes
    return (left - _save_hours(config)) * price - (left + start_hours(spot)) * held_usd


def guaranteed_hours(
    config: RunConfig, pools: Sequence[Candidate], chosen: Candidate, now_utc: float
) -> float:
    """Return the shortest deadline, in hours from now, that on-demand can guarantee within the
    budget.

    If the budget is too small for every on-demand pool, return the hours of the chosen pool. Return
    0 if that pool is not on-demand.
    """
    if config.cost.budget_usd is None:
        budget = math.inf
    else:
        budget = config.cost.budget_usd
    able = [resort for resort in last_resorts(pools) if finish_usd(config, resort) <= budget]
    able = able or [pool for pool in [chosen] if pool.market == "on_demand"]
    needed = [
        (finish_hours(config, pool) + DECIDE_HOURS, hours_until_end(pool, now_utc)) for pool in able
    ]
    return min((hours for hours, end in needed if hours <= end), default=0.0)


def refuse_unguaranteed(
    config: RunConfig,
    ranked: Sequence[Candidate],
    rejected: Sequence[Rejection],
    *,
    now_utc: float,
    hours_left: float,
    usd_left: float,
) -> MissingGuarantee | None:
    """Explain why on-demand capacity cannot keep a new job's deadline or budget; None if it can.

    A job without on-demand pools (`cluster.market: spot`, or only Spot queues) has no guarantee and
    is not refused.

    Args:
        hours_left: Hours until the deadline.
        usd_left: Dollars left of the budget; infinite without a budget.
    """
    pools = last_resorts(ranked)
    without = "; without this guarantee: cluster.market=spot and a lower cost.confidence"
    if not pools:
        late = [
            rejection
            for rejection in rejected
            if rejection.market == "on_demand" and rejection.kind in (MISSES_DEADLINE, OVER_BUDGET)
        ]
        if config.cluster.market != "auto" or not late:
            return None
        nearest = min(late, key=lambda rejection: rejection.excess)
        if nearest.kind == MISSES_DEADLINE:
            outcome = Outcome.DEADLINE
        else:
            outcome = Outcome.BUDGET
        if outcome is Outcome.DEADLINE:
            limit = "cost.deadline_hours"
        else:
            limit = "cost.budget_usd"
        message = (
            f"no on-demand pool can take over if Spot has no capacity; the nearest, {nearest}, "
            f"{nearest.reason}"
        )
        return {"outcome": outcome, "message": message, "hint": f"raise {limit}{without}"}

    def hours(pool: Candidate) -> float:
        return finish_hours(config, pool) + DECIDE_HOURS

    def usd(pool: Candidate) -> float:
        return finish_usd(config, pool)

    in_time = [
        pool for pool in pools if hours(pool) <= min(hours_left, hours_until_end(pool, now_utc))
    ]
    if not in_time:
        best = min(pools, key=hours)
        needed = hours(best)
        deadline = config.cost.deadline_hours or 0.0
        end = hours_until_end(best, now_utc)
        enough = deadline - hours_left + needed
        parts = (
            f"{busy_hours(best) - start_hours(best):.2f} h of work + {start_hours(best):.2f} h "
            f"to start + {delay_hours(config):.2f} h for on-demand capacity "
            f"(batch.runnable_minutes) + {_save_hours(config):.2f} h for a last save + "
            f"{DECIDE_HOURS:.2f} h to place it"
        )
        message = (
            f"the deadline cannot be guaranteed: {best} takes {parts} = {needed:.2f} h, of "
            f"{hours_left:.2f} h"
        )
        hint = (
            f"set cost.deadline_hours to {math.ceil(enough * 100) / 100:g} or more, or "
            "batch.runnable_minutes lower"
        )
        if needed <= hours_left:
            message = (
                f"the deadline cannot be guaranteed: {best} takes {parts} = {needed:.2f} h, and "
                f"ends in {end:.2f} h"
            )
            hint = "use a reservation that ends later, or a queue of on-demand machines"
        return {
            "outcome": Outcome.DEADLINE,
            "message": message,
            "hint": hint + without,
            "enough": enough,
        }
    cheapest = min(in_time, key=usd)
    if usd(cheapest) <= usd_left:
        return None
    needed = usd(cheapest)
    budget = config.cost.budget_usd or 0.0
    enough = budget - usd_left + needed
    message = (
        f"deadline and budget cannot be guaranteed together: finishing on {cheapest} takes "
        f"${needed:.4f}, of ${usd_left:.4f}"
    )
    hint = f"set cost.budget_usd to {math.ceil(enough * 100) / 100:.2f} or more{without}"
    return {"outcome": Outcome.BUDGET, "message": message, "hint": hint, "enough": enough}


def _start_rise(config: RunConfig, spot: Candidate) -> float:
    """Return the factor by which the price may rise while ranks start; 1 if it is not watched.

    No check of the budget stops the ranks during this time.
    """
    if spot.market == "spot" and PriceWatch.of(config).seconds:
        return PRICE_RISE
    return 1.0
