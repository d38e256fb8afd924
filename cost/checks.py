"""Money's part of the preflight: prices can be had, the planned capacity holds the job, the limits are feasible."""

from __future__ import annotations

import time

from ebbflow.cost.account_checks import CHECKS as ACCOUNT_CHECKS
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.plan.candidates import NO_SPOT_PRICE
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.ec2_prices import ask
from ebbflow.cost.prices.recorded import RecordedPrices
from ebbflow.cost.prices.source import NOT_ASKED, open_prices
from ebbflow.infra.batch import in_queues_region
from ebbflow.infra.errors import InfraError, StoreError
from ebbflow.infra.footprint import size_text
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.preflight import Check, Finding, PreflightContext
from ebbflow.infra.store import Store

# For the regions to answer a small question; the check itself is given a little longer.
_LIVE_SECONDS = 12.0
# For one small listing of the store.
_STORE_SECONDS = 4.0
_MEASURED_LATER = "the model is a workload's own: it is measured by the plan, which refuses what cannot be kept"


def check_planned_memory(context: PreflightContext) -> Finding:
    """The model fits the GPUs and main memory of some pool that the configuration allows; its batch divides there."""
    plan = _plan(context)
    if isinstance(plan, Finding):
        return plan
    if plan.chosen is not None:
        chosen, fit = plan.chosen, plan.chosen.fit
        return Finding.passed(
            f"{chosen}: {size_text(fit.total)} of {size_text(chosen.gpu_memory_bytes)} per GPU (estimated), "
            f"{chosen.micro_batch} samples per micro-batch on each of {chosen.ranks} ranks"
        )
    if plan.refusal is not None and plan.refusal.outcome is Outcome.NO_CAPACITY:
        return _waits_for_prices(context, plan) or Finding.failed(plan.refusal.message, plan.refusal.hint)
    return Finding.skipped("no pool meets the deadline; the check budget-deadline says more")


def check_budget_and_deadline(context: PreflightContext) -> Finding:
    """The cheapest plan keeps both limits, with the price of a last save in reserve."""
    plan = _plan(context)
    if isinstance(plan, Finding):
        return plan
    if plan.refusal is not None and plan.refusal.outcome is not Outcome.NO_CAPACITY:
        if _goes_on(context):
            return Finding.skipped("the job goes on: the plan decides, by the steps, dollars and hours that are left")
        return _waits_for_prices(context, plan) or Finding.failed(plan.refusal.message, plan.refusal.hint)
    chosen = plan.chosen
    if chosen is None:
        return Finding.skipped("there is no pool to price; the check planned-memory says more")
    cost, deadline = context.config.cost, context.config.cost.deadline_hours
    budget = "no budget" if cost.budget_usd is None else f"budget ${cost.budget_usd:.2f}"
    limit = "no deadline" if deadline is None else f"deadline {deadline:g} h"
    return Finding.passed(
        f"{chosen}: ${chosen.expected_usd:.4f} + ${plan.reserve_usd:.4f} reserve, {budget}; "
        f"{chosen.expected_hours:.3g} h, {limit} (estimated; price {chosen.price_kind})"
    )


def check_prices(context: PreflightContext) -> Finding:
    """The prices that the configuration names can be had without a network, and are of its regions."""
    cost, now = context.config.cost, time.time()
    if cost.prices == "live":
        return Finding.skipped(NOT_ASKED)
    try:
        prices = open_prices(context.config, now, project_root=context.project_root)
    except PriceError as error:
        return Finding.failed(str(error), "mend or record the file anew, or set cost.prices to static or live")
    if isinstance(prices, RecordedPrices) and not any(map(prices.zones, cost.regions)):
        known = ", ".join(sorted({region for _, region in prices.quotes})) or "none"
        reason = f"{cost.prices} has prices of none of cost.regions ({', '.join(cost.regions)}); it knows {known}"
        return Finding.failed(reason, f"set cost.regions to [{known}], or record those regions")
    said = prices.said(now_utc=now, regions=cost.regions, max_age_hours=cost.max_price_age_hours)
    return Finding.passed("\n".join(said))


def check_live_prices(context: PreflightContext) -> Finding:
    """Each region tells a spot price: credentials, rights and network are there."""
    config = context.config
    if config.cost.prices != "live":
        return Finding.skipped("cost.prices is not live")
    names = [kind.name for kind in load_catalogue().matching(config.cluster.instance_types)][:1]
    answers = ask(config.cost.regions, names, now_utc=time.time(), deadline_seconds=_LIVE_SECONDS)
    if answers.failed:
        return Finding.failed(
            f"the static table stands in, because {'; '.join(dict.fromkeys(answers.failed.values()))}",
            "give the credentials ec2:DescribeSpotPriceHistory and ec2:DescribeAvailabilityZones and a way to EC2, "
            "or set cost.prices to static or to a recorded file",
        )
    nameless = [f"{region}: {answer.names_only}" for region, answer in answers.answered.items() if answer.names_only]
    if nameless:
        fix = "give the credentials ec2:DescribeAvailabilityZones, so that zones have ids that every account shares"
        return Finding.failed("; ".join(nameless), fix)
    return Finding.passed(f"EC2 answers in {', '.join(config.cost.regions)}")


def _plan(context: PreflightContext) -> Plan | Finding:
    """What can be planned without a network, or why nothing can."""
    if context.config.workload is not None:
        return Finding.skipped(_MEASURED_LATER)
    now = time.time()
    try:
        config = in_queues_region(context.config) if context.target == "batch" else context.config
        prices = open_prices(config, now, project_root=context.project_root, network=False)
        return make_plan(config, now_utc=now, prices=prices)
    except StoreError as error:
        return Finding.skipped(f"the region of the queues is not known: {error}")
    except PriceError:
        return Finding.skipped("the prices cannot be read; the check prices says more")


def _goes_on(context: PreflightContext) -> bool:
    """Whether the job has been started before; a store that does not answer is another check's business."""
    if context.job is None:
        return False
    try:
        store = Store.open(context.config.store, request_timeout_seconds=_STORE_SECONDS)
        return bool(store.sub(job_prefix(context.job)).list("generations/", limit=1))
    except InfraError:
        return False


def _waits_for_prices(context: PreflightContext, plan: Plan) -> Finding | None:
    """A refusal by the static table is none when live prices may lift it: the plan itself decides then."""
    if context.config.cost.prices != "live" or plan.refusal is None:
        return None
    priceless = any(rejection.kind == NO_SPOT_PRICE for rejection in plan.rejected)
    if plan.refusal.outcome is Outcome.BUDGET or priceless:
        return Finding.skipped(f"{NOT_ASKED}; by the static table: {plan.refusal.message}")
    return None


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
    Check(
        id="prices",
        title="prices can be had",
        severity="error",
        tier="quick",
        deadline_seconds=10.0,
        symptoms=("I09",),
        run=check_prices,
    ),
    Check(
        id="live-prices",
        title="EC2 tells spot prices",
        severity="warning",
        tier="full",
        deadline_seconds=_LIVE_SECONDS + 3.0,
        symptoms=("I09",),
        run=check_live_prices,
    ),
    *ACCOUNT_CHECKS,
]
