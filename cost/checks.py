"""Money's part of the preflight: does the planned capacity hold the job, and are budget and deadline feasible?"""

from __future__ import annotations

import time

from cost.plan import Plan, make_plan
from infra.footprint import size_text
from infra.outcome import Outcome
from infra.preflight import Check, Finding, PreflightContext


def check_planned_memory(context: PreflightContext) -> Finding:
    """The model fits a GPU of some pool that the configuration allows, and its batch divides there."""
    plan = _plan(context)
    if plan.chosen is not None:
        chosen, fit = plan.chosen, plan.chosen.fit
        return Finding.passed(
            f"{chosen}: {size_text(fit.total)} of {size_text(chosen.gpu_memory_bytes)} per GPU (estimated), "
            f"{chosen.micro_batch} samples per micro-batch on each of {chosen.ranks} ranks"
        )
    if plan.refusal is not None and plan.refusal.outcome is Outcome.NO_CAPACITY:
        return Finding.failed(plan.refusal.message, plan.refusal.hint)
    return Finding.skipped("no pool meets the deadline; the check budget-deadline says more")


def check_budget_and_deadline(context: PreflightContext) -> Finding:
    """The cheapest plan keeps both limits, with the price of a last save in reserve."""
    plan = _plan(context)
    if plan.refusal is not None and plan.refusal.outcome is not Outcome.NO_CAPACITY:
        return Finding.failed(plan.refusal.message, plan.refusal.hint)
    chosen = plan.chosen
    if chosen is None:
        return Finding.skipped("there is no pool to price; the check planned-memory says more")
    cost, deadline = context.config.cost, context.config.cost.deadline_hours
    budget = "no budget" if cost.budget_usd is None else f"budget ${cost.budget_usd:.2f}"
    limit = "no deadline" if deadline is None else f"deadline {deadline:g} h"
    return Finding.passed(
        f"{chosen}: ${chosen.expected_usd:.4f} + ${plan.reserve_usd:.4f} reserve, {budget}; "
        f"{chosen.expected_hours:.3g} h, {limit} (estimated, recorded prices)"
    )


def _plan(context: PreflightContext) -> Plan:
    return make_plan(context.config, now_utc=time.time())


CHECKS: list[Check] = [
    Check(
        id="planned-memory",
        title="model fits the planned GPUs",
        severity="error",
        tier="quick",
        deadline_seconds=10.0,
        symptoms=("A06", "C01"),
        run=check_planned_memory,
    ),
    Check(
        id="budget-deadline",
        title="budget and deadline are feasible",
        severity="error",
        tier="quick",
        deadline_seconds=10.0,
        symptoms=("I04", "I05"),
        run=check_budget_and_deadline,
    ),
]
