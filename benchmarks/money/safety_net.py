"""The safety net around any policy: it keeps a job within its deadline and budget.

A policy's answer passes if the job could still finish on demand, in time and within budget, after
the worst that can happen until the next decision. Otherwise the net replaces it by a safe action.
This assumes that on-demand machines start within `on_demand_delay_hours` and are not taken away,
that the speed is as stated, and that the next decision is at most `tick_hours` away.

In the conditions, t is the present time, w the remaining work, Δ the tick, d the changeover
(including a transfer to the on-demand pool), D the on-demand delay, u the work that a preemption
would undo after this tick, and x the drain:

    wait                t + Δ + D + d + w ≤ deadline
    stay on spot        t + min(s, Δ) + D + d + max(u, x) + w ≤ deadline        s: rest of the start-up
    start on spot       slack ≥ x + d + D + (d + Δ): d for the fallback, d + Δ for a start without any result
    on-demand           always allowed

A spot start with slack for only one changeover would have to give way to on-demand during its own
start-up: it would cost money without any work. Hence the rule of two changeovers plus a tick (Can't
Be Late, NSDI'24). A running spot machine uses no slack as long as there is time to redo u. The
budget is checked in the same way, with the cost of finishing on demand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.money.interface import (
    MINIMUM_HOURS,
    Action,
    Market,
    Policy,
    PoolView,
    State,
    UsePool,
    Wait,
)

_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class AdmissionRefusal:
    """The reason why the deadline or the budget of a job cannot be guaranteed.

    Attributes:
        message: The required and the available amount, and the amount that is missing.
    """

    binding: str
    """The limit that cannot be guaranteed: "deadline" or "budget"."""
    message: str


def admission(first: State) -> AdmissionRefusal | None:
    """Check that a job can finish on demand alone, within deadline and budget, with one tick to
    spare.

    Args:
        first: State of the job before its first decision.

    Returns:
        None if it can; otherwise the refusal.
    """
    on_demand = first.on_demand
    changeover = first.changeover_hours + on_demand.transfer_hours
    busy = first.work_left_hours + changeover + max(first.tick_hours, MINIMUM_HOURS)
    hours = first.work_left_hours + changeover + first.tick_hours + first.on_demand_delay_hours
    left = first.deadline_hours - first.now_hours
    if hours > left + _TOLERANCE:
        return AdmissionRefusal(
            "deadline",
            f"{first.work_left_hours:.2f} h of work + {changeover:.2f} h changeover + "
            f"{first.on_demand_delay_hours:.2f} h on-demand delay + {first.tick_hours:.2f} h to "
            f"decide = {hours:.2f} h, the deadline is in {left:.2f} h: give {hours - left:.2f} h "
            "more, or make it faster",
        )
    usd = busy * on_demand.usd_per_hour + on_demand.egress_usd
    budget = first.budget_usd - first.spent_usd
    if usd > budget + _TOLERANCE:
        return AdmissionRefusal(
            "budget",
            f"finishing on demand alone takes {busy:.2f} h × ${on_demand.usd_per_hour:.4f}/h + "
            f"${on_demand.egress_usd:.2f} transfer = ${usd:.2f}, the budget has ${budget:.2f} "
            f"left: give ${usd - budget:.2f} more",
        )
    return None


class SafetyNet:
    """Policy that wraps another policy and replaces its unsafe answers.

    `overruled` counts the replaced answers.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.overruled = 0
        self.broken = 0
        """Number of invalid answers of the wrapped policy: exceptions, and pools that do not exist."""

    def decide(self, state: State) -> Action:
        wanted = self._ask(state)
        safe = _safe(state, wanted)
        if safe != wanted:
            self.overruled += 1
        return safe

    def _ask(self, state: State) -> Action:
        try:
            wanted = self.policy.decide(state)
        except Exception:
            # An error in a policy must not end the job.
            self.broken += 1
            return _hold(state)
        if isinstance(wanted, Wait):
            return wanted
        known = {pool.id for pool in state.pools}
        if isinstance(wanted, UsePool) and {wanted.pool, *wanted.fallbacks} <= known:
            return wanted
        self.broken += 1
        return _hold(state)


def _safe(state: State, wanted: Action) -> Action:
    action = _safe_move(state, wanted)
    if _can_probe(state, wanted.probes, action):
        return replace(action, probes=wanted.probes)
    return action


def _safe_move(state: State, wanted: Action) -> Action:
    """Return the safe part of the wanted action, or a safe default if no part of it is safe.

    Probes are left out.
    """
    if isinstance(wanted, Wait):
        if _can_wait(state):
            return Wait()
        return _hold(state)
    current = state.current_pool
    names = [
        name
        for name in (wanted.pool, *wanted.fallbacks)
        if _can_run(state, state.pool(name), current)
    ]
    if names:
        return UsePool(names[0], tuple(names[1:]))
    return _hold(state)


def _hold(state: State) -> Action:
    """Return the default action: keep the current machines if there are any and that is safe, else
    run on demand.
    """
    current = state.current_pool
    if current is not None and _can_run(state, current, current):
        return UsePool(current.id)
    return UsePool(state.on_demand.id)


def _can_run(state: State, pool: PoolView, current: PoolView | None) -> bool:
    if current is not None and pool.id == current.id:
        return current.market is Market.ON_DEMAND or _can_stay(state, current)
    if pool.market is Market.ON_DEMAND:
        return pool.id == state.on_demand.id or _can_move_on_demand(state, pool)
    return _can_start(state, pool)


def _can_wait(state: State) -> bool:
    if state.current is not None and not state.may_switch:
        return False
    left = _leaving_hours(state)
    transfer, finish_usd = _fallback(state, state.work_left_hours, None)
    hours = (
        left + state.tick_hours + state.on_demand_delay_hours + state.changeover_hours + transfer
    )
    return _in_time(state, hours + state.work_left_hours) and _in_budget(
        state, _leaving_usd(state) + finish_usd
    )


def _can_stay(state: State, current: PoolView) -> bool:
    starting = min(state.startup_left_hours, state.tick_hours)
    useful = max(0.0, state.tick_hours - state.startup_left_hours)
    if state.startup_left_hours <= 0 and state.work_left_hours <= useful:
        useful = state.work_left_hours
    redone = min(state.uncommitted_hours + useful, state.commit_interval_hours)
    transfer, finish_usd = _fallback(state, state.work_left_hours - useful + redone, current)
    reserve = (
        state.on_demand_delay_hours
        + state.changeover_hours
        + transfer
        + max(redone, state.drain_hours)
    )
    usd = (state.tick_hours + _parting_hours(state)) * current.usd_per_hour + finish_usd
    return _in_time(state, starting + reserve + state.work_left_hours) and _in_budget(state, usd)


def _can_start(state: State, pool: PoolView) -> bool:
    if state.current is not None and not state.may_switch:
        return False
    useful = max(0.0, state.tick_hours - state.changeover_hours - pool.transfer_hours)
    redone = min(useful, state.commit_interval_hours)
    transfer, finish_usd = _fallback(state, state.work_left_hours - useful + redone, pool)
    lost = _leaving_hours(state) + state.changeover_hours + pool.transfer_hours + state.tick_hours
    reserve = (
        state.on_demand_delay_hours
        + state.changeover_hours
        + transfer
        + max(redone, state.drain_hours)
    )
    held = state.tick_hours + _parting_hours(state)
    started_usd = pool.egress_usd + held * pool.usd_per_hour + finish_usd
    # A refused start pays nothing and does no work, which may cost more than cheap work in the
    # first tick.
    refused_usd = _fallback(state, state.work_left_hours, None)[1]
    usd = _leaving_usd(state) + max(started_usd, refused_usd)
    return _in_time(state, lost + reserve + state.work_left_hours) and _in_budget(state, usd)


def _can_move_on_demand(state: State, pool: PoolView) -> bool:
    """Return whether a start is safe in an on-demand pool that is not the fallback.

    It may cost more or start later.
    """
    if state.current is not None and not state.may_switch:
        return False
    start = state.on_demand_delay_hours + state.changeover_hours + pool.transfer_hours
    paid = (
        state.changeover_hours
        + pool.transfer_hours
        + state.work_left_hours
        + max(state.tick_hours, MINIMUM_HOURS)
    )
    usd = _leaving_usd(state) + pool.egress_usd + paid * pool.usd_per_hour
    return _in_time(state, _leaving_hours(state) + start + state.work_left_hours) and _in_budget(
        state, usd
    )


def _can_probe(state: State, probes: tuple[str, ...], action: Action) -> bool:
    """Return whether the budget covers the probes, then `action`, and then finishing on demand."""
    if state.probe_hours is None or not probes:
        return False
    known = {pool.id: pool for pool in state.pools}
    if any(name not in known or known[name].market is Market.ON_DEMAND for name in probes):
        return False
    usd = state.probe_hours * sum(known[name].usd_per_hour for name in probes)
    poorer = replace(state, spent_usd=state.spent_usd + usd)
    on_demand_usd = _leaving_usd(state) + _fallback(state, state.work_left_hours, None)[1]
    return _in_budget(poorer, on_demand_usd) and _safe_move(poorer, action) == action


def _leaving_hours(state: State) -> float:
    if state.current is None:
        return state.startup_left_hours
    return state.drain_hours


def _leaving_usd(state: State) -> float:
    current = state.current_pool
    if current is None:
        return 0.0
    return _parting_hours(state) * current.usd_per_hour


def _parting_hours(state: State) -> float:
    """Return the longest time for which lost or left machines are still paid: the drain, or the
    one-minute minimum.
    """
    return max(state.drain_hours, MINIMUM_HOURS)


def _fallback(state: State, work_hours: float, target: PoolView | None) -> tuple[float, float]:
    """Return the transfer hours and dollars for finishing `work_hours` of work on demand, in the
    worse of two cases.

    In one case the checkpoint stays in its region, in the other it has moved to the region of
    `target`. If that region has no on-demand pool, the most expensive known transfer is assumed.

    One tick is added, as at admission: if whole ticks are billed, the first and the last on-demand
    tick may be used only in part.
    """
    here = state.on_demand
    choices = [(here.transfer_hours, here.egress_usd, here.usd_per_hour)]
    if target is not None and target.region != state.checkpoint_region:
        pools = [pool for pool in state.pools if pool.market is Market.ON_DEMAND]
        there = [pool.usd_per_hour for pool in pools if pool.region == target.region]
        if there:
            choices.append((0.0, 0.0, min(there)))
        else:
            choices.append(
                (
                    max(pool.transfer_hours for pool in state.pools),
                    max(pool.egress_usd for pool in state.pools),
                    max(pool.usd_per_hour for pool in pools),
                )
            )
    paid = max(0.0, work_hours)
    spare = max(state.tick_hours, MINIMUM_HOURS)
    usd = max(
        egress + price * (paid + state.changeover_hours + transfer + spare if paid > 0 else 0.0)
        for transfer, egress, price in choices
    )
    return max(transfer for transfer, _, _ in choices), usd


def _in_time(state: State, hours: float) -> bool:
    return state.now_hours + hours <= state.deadline_hours + _TOLERANCE


def _in_budget(state: State, usd: float) -> bool:
    return state.spent_usd + usd <= state.budget_usd + _TOLERANCE
