"""Preflight checks of cost: prices, memory, budget and deadline, and the queues and quotas of AWS
Batch.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ebbflow.core.errors import CloudError, InfraError, Outcome, StoreError
from ebbflow.core.footprint import size_text
from ebbflow.core.layout import job_prefix
from ebbflow.core.preflight import Check, CheckFinding, PreflightContext
from ebbflow.core.store import Store
from ebbflow.core.store.objects import StoreClock
from ebbflow.cost.capacity.placement import QueueOffer, explain_no_offer, find_offers
from ebbflow.cost.catalogue import Catalogue, load_catalogue
from ebbflow.cost.errors import PriceError, TeamError
from ebbflow.cost.finance.team_store import judge_job, load_team, read_state
from ebbflow.cost.job_history import JobHistory, load_job_history, load_or_use_priors
from ebbflow.cost.job_list import config_money
from ebbflow.cost.plan.candidates import NO_SPOT_PRICE
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.ec2_prices import query_spot_prices
from ebbflow.cost.prices.recorded import RecordedPrices
from ebbflow.cost.prices.source import NOT_ASKED, open_prices
from ebbflow.infra.aws.account import Quota, quota_code, sibling_client, vcpu_quota
from ebbflow.infra.aws.calls import RequestDeadline, within
from ebbflow.infra.batch import (
    QueueState,
    batch_client,
    declared_queues,
    limit_to_queue_region,
    training_queues,
)
from ebbflow.infra.checks.batch import ANSWER_SECONDS, skip_reason

# Deadline for the answers of all regions. The check itself has a little longer.
_LIVE_SECONDS = 12.0
# Deadline for one small listing of the store.
_STORE_SECONDS = 4.0
_MEASURED_LATER = (
    "the workload defines its own model, which is measured and checked when the run is planned"
)


def check_capacity(context: PreflightContext) -> CheckFinding:
    """Check that a queue has machines and vCPUs for a pool of the plan, and that a plan of such
    pools is accepted.
    """
    asked = _ask(context)
    if isinstance(asked, CheckFinding):
        return asked
    if not asked.offered:
        fix = (
            "name a queue of such machines in batch.queues, widen cluster.instance_types or "
            "cost.regions, or raise maxvCpus of a compute environment: aws batch "
            "update-compute-environment"
        )
        lacks = explain_no_offer(
            asked.plan.ranked, asked.queues, region=asked.region, catalogue=asked.catalogue
        )
        return CheckFinding.failed(lacks, fix)
    cheapest: dict[str, QueueOffer] = {}
    for offer in asked.offered:
        cheapest.setdefault(offer.queue, offer)
    plan = asked.admitted
    if plan.refusal is not None and not _goes_on(context):
        message = f"with the queues that AWS Batch lists: {plan.refusal.message}"
        return _waits_for_prices(context, plan) or CheckFinding.failed(message, plan.refusal.hint)
    return CheckFinding.passed(
        "\n".join(f"{queue}: {offer.candidate}" for queue, offer in cheapest.items())
    )


# One return per answer: the finding depends on the first question without an answer.
def check_quota(context: PreflightContext) -> CheckFinding:  # noqa: PLR0911
    """Check that at least one pool that a queue can run fits the account's vCPU quota for its
    market and region.
    """
    asked = _ask(context)
    if isinstance(asked, CheckFinding):
        return asked
    if not asked.offered:
        return CheckFinding.skipped("no queue can run the plan; see the check aws-capacity")
    # A reservation has its quota already.
    pools = [
        (offer, quota_code(offer.candidate.instance_type, offer.candidate.market))
        for offer in asked.offered
    ]
    counted = [
        (offer, offer.candidate.region or asked.region, code)
        for offer, code in pools
        if code is not None
    ]
    counted = [offer for offer in counted if offer[0].candidate.reservation is None]
    if not counted:
        return CheckFinding.skipped("no quota of these instance families is known")
    deadline = RequestDeadline.after(ANSWER_SECONDS)
    keys = dict.fromkeys((region, code) for _, region, code in counted)
    quotas, unknown = _read_quotas(keys, deadline)
    if not quotas:
        return CheckFinding.skipped("; ".join(unknown.values()))
    lines: dict[tuple[str, str], str] = {}
    allowed = False
    for offer, region, code in counted:  # `lines` keeps the cheapest offer of each quota
        if (region, code) not in quotas:
            continue
        quota = quotas[region, code]
        needed = asked.vcpus(offer)
        allowed = allowed or needed <= quota.vcpus
        if needed <= quota.vcpus:
            verdict = "enough"
        else:
            verdict = "too few"
        have = f"{quota.name} ({quota.code}): {quota.vcpus:g} vCPUs in {region}"
        lines.setdefault(
            (region, code), f"{have}, {verdict} for {offer.candidate}, which has {needed}"
        )
    said = "\n".join([*lines.values(), *unknown.values()])
    if allowed:
        return CheckFinding.passed(said)
    if unknown:
        return CheckFinding.skipped(said)
    codes = ", ".join(f"{code} in {region}" for region, code in lines)
    fix = (
        "aws service-quotas request-service-quota-increase --service-code ec2 --quota-code CODE "
        f"({codes})"
    )
    return CheckFinding.failed(said, fix)


def check_planned_memory(context: PreflightContext) -> CheckFinding:
    """Check that an allowed pool has enough GPU and main memory, and that its ranks divide the
    batch evenly.
    """
    plan = _plan(context)
    if isinstance(plan, CheckFinding):
        return plan
    if plan.chosen is not None:
        chosen = plan.chosen
        fit = plan.chosen.fit
        return CheckFinding.passed(
            f"{chosen}: {size_text(fit.total)} of {size_text(chosen.gpu_memory_bytes)} per GPU "
            f"(estimated), {chosen.micro_batch} samples per micro-batch on each of "
            f"{chosen.ranks} ranks"
        )
    if plan.refusal is not None and plan.refusal.outcome is Outcome.NO_CAPACITY:
        return _waits_for_prices(context, plan) or CheckFinding.failed(
            plan.refusal.message, plan.refusal.hint
        )
    return CheckFinding.skipped("no pool meets the deadline; see the check budget-deadline")


def check_limits(context: PreflightContext) -> CheckFinding:
    """Check that the cheapest plan meets budget and deadline, including the cost reserved for the
    last checkpoint.
    """
    plan = _plan(context)
    if isinstance(plan, CheckFinding):
        return plan
    if plan.refusal is not None and plan.refusal.outcome is not Outcome.NO_CAPACITY:
        if _goes_on(context):
            return CheckFinding.skipped(
                "the job continues: the plan decides by the remaining steps, dollars and hours"
            )
        return _waits_for_prices(context, plan) or CheckFinding.failed(
            plan.refusal.message, plan.refusal.hint
        )
    chosen = plan.chosen
    if chosen is None:
        return CheckFinding.skipped("there is no pool to price; see the check planned-memory")
    cost = context.config.cost
    deadline = context.config.cost.deadline_hours
    if cost.budget_usd is None:
        budget = "no budget"
    else:
        budget = f"budget ${cost.budget_usd:.2f}"
    if deadline is None:
        limit = "no deadline"
    else:
        limit = f"deadline {deadline:g} h"
    return CheckFinding.passed(
        f"{chosen}: ${chosen.expected_usd:.4f} + ${plan.reserve_usd:.4f} reserve, {budget}; "
        f"{chosen.expected_hours:.3g} h, {limit} (estimated; price {chosen.price.kind})"
    )


def check_team_budget(context: PreflightContext) -> CheckFinding:
    """Check that the project's budget of each month in which the job can run has room for
    `cost.budget_usd`.
    """
    cost = context.config.cost
    if cost.team_file is None:
        return CheckFinding.skipped("cost.team_file is not set")
    try:
        root = Store.open(context.config.store, request_timeout_seconds=_STORE_SECONDS)
        team = load_team(cost.team_file, root, context.project_root)
        now = StoreClock().now(root, time.time())
        mine = config_money(context.job or "", context.config, now)
        verdict = judge_job(read_state(root, team), team, mine, now)
    except TeamError as error:
        return CheckFinding.failed(str(error), "repair cost.team_file")
    except StoreError as error:
        return CheckFinding.failed(
            str(error), "repair the store, which has the team's reservations"
        )
    if verdict.verdict == "start":
        return CheckFinding.passed(verdict.words)
    fix = (
        "lower cost.budget_usd, wait for a running job to end, or raise the budget in "
        "cost.team_file (`ebbflow jobs`)"
    )
    return CheckFinding.failed(verdict.words, fix)


def check_prices(context: PreflightContext) -> CheckFinding:
    """Check that the configured prices are available without a network, and cover the configured
    regions.
    """
    cost = context.config.cost
    now = time.time()
    if cost.prices == "live":
        return CheckFinding.skipped(NOT_ASKED)
    try:
        prices = open_prices(context.config, now, project_root=context.project_root)
    except PriceError as error:
        return CheckFinding.failed(
            str(error), "repair or re-record the file, or set cost.prices to static or live"
        )
    if isinstance(prices, RecordedPrices) and not any(map(prices.zones, cost.regions)):
        known = ", ".join(sorted({region for _, region in prices.quotes})) or "none"
        reason = (
            f"{cost.prices} has prices for none of cost.regions ({', '.join(cost.regions)}); it "
            f"has {known}"
        )
        return CheckFinding.failed(
            reason, f"set cost.regions to [{known}], or record those regions"
        )
    said = prices.describe(
        now_utc=now, regions=cost.regions, max_age_hours=cost.max_price_age_hours
    )
    return CheckFinding.passed("\n".join(said))


def check_live_prices(context: PreflightContext) -> CheckFinding:
    """Check that EC2 returns a spot price for each region, which needs credentials, permissions and
    a network.
    """
    config = context.config
    if config.cost.prices != "live":
        return CheckFinding.skipped("cost.prices is not live")
    names = [kind.name for kind in load_catalogue().matching(config.cluster.instance_types)][:1]
    answers = query_spot_prices(
        config.cost.regions, names, now_utc=time.time(), deadline_seconds=_LIVE_SECONDS
    )
    if answers.failed:
        return CheckFinding.failed(
            "the static table is used instead, because "
            f"{'; '.join(dict.fromkeys(answers.failed.values()))}",
            "allow ec2:DescribeSpotPriceHistory and ec2:DescribeAvailabilityZones and network "
            "access to EC2, or set cost.prices to static or to a recorded file",
        )
    nameless = [
        f"{region}: {answer.names_only}"
        for region, answer in answers.answered.items()
        if answer.names_only
    ]
    if nameless:
        fix = (
            "allow ec2:DescribeAvailabilityZones, so that zones have ids that are the same in "
            "every account"
        )
        return CheckFinding.failed("; ".join(nameless), fix)
    return CheckFinding.passed(f"EC2 answers in {', '.join(config.cost.regions)}")


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """Data for the checks of queues and quotas: the plan, and the queues that can run one of its
    pools.

    `plan` ranks all pools. `admitted` ranks only pools that a queue can run, as the plan of the run
    does.
    """

    plan: Plan
    admitted: Plan
    region: str
    queues: Mapping[str, QueueState]
    offered: tuple[QueueOffer, ...]
    catalogue: Catalogue

    def vcpus(self, offer: QueueOffer) -> int:
        return offer.candidate.nodes * self.catalogue[offer.candidate.instance_type].vcpu


def _read_quotas(
    keys: Iterable[tuple[str, str]], deadline: RequestDeadline
) -> tuple[dict[tuple[str, str], Quota], dict[str, str]]:
    """Read the account's quotas by (region, code).

    Returns:
        The quotas, and the reason for each region that did not answer.
    """
    quotas: dict[tuple[str, str], Quota] = {}
    unknown: dict[str, str] = {}
    for region, code in keys:
        if region in unknown:
            continue
        try:
            client = sibling_client("service-quotas", batch_client(region))
            quotas[region, code] = vcpu_quota(code, client, deadline)
        except (CloudError, StoreError) as error:
            unknown[region] = str(error)
    return quotas, unknown


# One return per reason for which there is no plan.
def _ask(context: PreflightContext) -> _Asked | CheckFinding:  # noqa: PLR0911
    """Make the plan, and find the AWS Batch queues that can run it.

    If this fails, return a finding with the reason.
    """
    reason = skip_reason(context)
    if reason:
        return CheckFinding.skipped(reason)
    now = time.time()
    if context.config.user_code is not None:
        return CheckFinding.skipped(
            "the workload defines its own model, which is measured when the run is planned"
        )
    try:
        config = limit_to_queue_region(context.config, only_if_set=False)
    except StoreError as error:
        return CheckFinding.skipped(str(error))
    try:
        prices = open_prices(config, now, project_root=context.project_root, network=False)
        known = {"now_utc": now, "prices": prices, "history": _job_history(context)}
        plan = make_plan(config, **known)
    except PriceError:
        return CheckFinding.skipped("the prices cannot be read; see the check prices")
    if (
        not plan.ranked
        and config.cost.regions != context.config.cost.regions
        and plan.refusal is not None
    ):
        named = ", ".join(context.config.cost.regions)
        detail = (
            f"the queues are in {config.batch.region}, cost.regions has {named}: "
            f"{plan.refusal.message}"
        )
        return CheckFinding.failed(detail, plan.refusal.hint)
    if not plan.ranked:
        return CheckFinding.skipped(
            "there is no plan; see the checks planned-memory and budget-deadline"
        )
    try:
        client = batch_client(config.batch.region)
        queues = training_queues(config.batch, client, deadline_seconds=ANSWER_SECONDS)
    except (CloudError, StoreError) as error:
        return CheckFinding.skipped(str(error))
    region = client.meta.region_name
    catalogue = load_catalogue()
    offered = find_offers(plan.ranked, queues, region=region, catalogue=catalogue)
    admitted = make_plan(config, **known, queues=queues)
    return _Asked(
        plan=plan,
        admitted=admitted,
        region=region,
        queues=queues,
        offered=offered,
        catalogue=catalogue,
    )


def _job_history(context: PreflightContext) -> JobHistory:
    """Load the job history of the store; empty if there is no store yet, or if it does not answer."""

    def load() -> JobHistory:
        store = Store.open(
            context.config.store, request_timeout_seconds=_STORE_SECONDS, create=False
        )
        return load_job_history(store)

    return load_or_use_priors(lambda: within(_STORE_SECONDS, load, "reading the job history"))


def _plan(context: PreflightContext) -> Plan | CheckFinding:
    """Make the plan without network requests, except those to the store.

    If that is impossible, return a finding with the reason.
    """
    if context.config.user_code is not None:
        return CheckFinding.skipped(_MEASURED_LATER)
    now = time.time()
    try:
        on_batch = context.target == "batch"
        if on_batch:
            config = limit_to_queue_region(context.config)
        else:
            config = context.config
        if on_batch:
            queues = declared_queues(config.batch)
        else:
            queues = None
        prices = open_prices(config, now, project_root=context.project_root, network=False)
        local = context.target == "local"
        known = {"simulated": local, "queues": queues or None, "history": _job_history(context)}
        return make_plan(config, now_utc=now, prices=prices, **known)
    except StoreError as error:
        return CheckFinding.skipped(f"the region of the queues is unknown: {error}")
    except PriceError:
        return CheckFinding.skipped("the prices cannot be read; see the check prices")


def _goes_on(context: PreflightContext) -> bool:
    """Return whether the job has started before.

    If the store does not answer, return False. Another check reports an unavailable store.
    """
    if context.job is None:
        return False
    try:
        store = Store.open(
            context.config.store, request_timeout_seconds=_STORE_SECONDS, create=False
        )
        return bool(store.sub(job_prefix(context.job)).list("generations/", limit=1))
    except InfraError:
        return False


def _waits_for_prices(context: PreflightContext, plan: Plan) -> CheckFinding | None:
    """Return a skipped finding if live prices may lift a refusal of the plan at static prices.

    Else return None.

    The run makes a new plan at live prices, and that plan decides.
    """
    if context.config.cost.prices != "live" or plan.refusal is None:
        return None
    priceless = any(rejection.kind == NO_SPOT_PRICE for rejection in plan.rejected)
    if plan.refusal.outcome is Outcome.BUDGET or priceless:
        return CheckFinding.skipped(f"{NOT_ASKED}; by the static table: {plan.refusal.message}")
    return None


CHECKS: list[Check] = [
    Check(
        "planned-memory",
        "model fits the planned GPUs",
        "error",
        "quick",
        10.0,
        ("A06", "C01"),
        check_planned_memory,
    ),
    Check(
        "budget-deadline",
        "budget and deadline are feasible",
        "error",
        "quick",
        10.0,
        ("I04", "I05"),
        check_limits,
    ),
    Check(
        "team-budget",
        "the team's budget has room",
        "error",
        "full",
        60.0,
        ("I04",),
        check_team_budget,
    ),
    Check("prices", "prices are available", "error", "quick", 10.0, ("I09",), check_prices),
    Check(
        "live-prices",
        "EC2 returns spot prices",
        "warning",
        "full",
        _LIVE_SECONDS + 3.0,
        ("I09",),
        check_live_prices,
    ),
    # Both are warnings: they test a plan made from the price table, and current prices may allow
    # more pools. The final decision is made when an attempt is placed.
    Check(
        "aws-capacity",
        "queues can run the plan",
        "warning",
        "full",
        ANSWER_SECONDS + 6.0,
        ("I04",),
        check_capacity,
    ),
    Check(
        "aws-quota",
        "quotas allow the machines",
        "warning",
        "full",
        2 * ANSWER_SECONDS + 6.0,
        ("I04",),
        check_quota,
    ),
]
