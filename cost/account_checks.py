"""Money's part of the preflight of an AWS account: its queues can run the plan, and its quotas allow the machines."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from ebbflow.cost.capacity.placement import Offer, lacking, offers
from ebbflow.cost.catalogue import Catalogue, load_catalogue
from ebbflow.cost.errors import PriceError
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.source import open_prices
from ebbflow.infra.aws.account import companion, quota_code, vcpu_quota
from ebbflow.infra.aws.calls import Patience
from ebbflow.infra.batch import QueueState, batch_client, in_queues_region, training_queues
from ebbflow.infra.checks.batch.queues import ANSWER_SECONDS, why_not_asked
from ebbflow.infra.errors import CloudError, StoreError
from ebbflow.infra.preflight import Check, Finding, PreflightContext


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The plan held against the queues. offered: what they can run, cheapest first. region: the queues'."""

    plan: Plan
    region: str
    queues: Mapping[str, QueueState]
    offered: tuple[Offer, ...]
    catalogue: Catalogue

    def vcpus(self, offer: Offer) -> int:
        return offer.candidate.nodes * self.catalogue[offer.candidate.instance_type].vcpu


def check_capacity(context: PreflightContext) -> Finding:
    """Some queue has the machines that some pool of the plan needs, and may start as many of their vCPUs."""
    asked = _ask(context)
    if isinstance(asked, Finding):
        return asked
    if not asked.offered:
        fix = (
            "name a queue of such machines in batch.queues, widen cluster.instance_types or cost.regions, or raise "
            "maxvCpus of a compute environment: aws batch update-compute-environment"
        )
        lacks = lacking(asked.plan.ranked, asked.queues, region=asked.region, catalogue=asked.catalogue)
        return Finding.failed(lacks, fix)
    cheapest: dict[str, Offer] = {}
    for offer in asked.offered:
        cheapest.setdefault(offer.queue, offer)
    return Finding.passed("\n".join(f"{queue}: {offer.candidate}" for queue, offer in cheapest.items()))


def check_quota(context: PreflightContext) -> Finding:
    """The account's quotas of running vCPUs, Spot and on-demand apart, allow a pool that a queue could run."""
    asked = _ask(context)
    if isinstance(asked, Finding):
        return asked
    if not asked.offered:
        return Finding.skipped("no queue can run the plan; the check aws-capacity says more")
    codes = {offer.id: quota_code(offer.candidate.instance_type, offer.candidate.market) for offer in asked.offered}
    counted = [offer for offer in asked.offered if codes[offer.id] is not None]
    if not counted:
        return Finding.skipped("no quota of these instance families is known")
    try:
        client, patience = companion("service-quotas", batch_client(asked.region)), Patience.of(ANSWER_SECONDS)
        quotas = {code: vcpu_quota(code, client, patience) for code in dict.fromkeys(codes.values()) if code}
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    lines: dict[str, str] = {}
    allowed = False
    for offer in counted:  # the cheapest of a quota stands for it
        quota, needed = quotas[codes[offer.id]], asked.vcpus(offer)
        allowed = allowed or needed <= quota.vcpus
        verdict = "enough" if needed <= quota.vcpus else "too few"
        have = f"{quota.name} ({quota.code}): {quota.vcpus:g} vCPUs in {asked.region}"
        lines.setdefault(quota.code, f"{have}, {verdict} for {offer.candidate}, which has {needed}")
    if allowed:
        return Finding.passed("\n".join(lines.values()))
    fix = f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code CODE ({', '.join(lines)})"
    return Finding.failed("\n".join(lines.values()), fix)


def _ask(context: PreflightContext) -> _Asked | Finding:
    """The plan and the queues, or why they are not known."""
    if reason := why_not_asked(context):
        return Finding.skipped(reason)
    now = time.time()
    if context.config.workload is not None:
        return Finding.skipped("the model is a workload's own: it is measured by the plan")
    try:
        config = in_queues_region(context.config, told=False)
    except StoreError as error:
        return Finding.skipped(str(error))
    try:
        prices = open_prices(config, now, project_root=context.project_root, network=False)
        plan = make_plan(config, now_utc=now, prices=prices)
    except PriceError:
        return Finding.skipped("the prices cannot be read; the check prices says more")
    if not plan.ranked and config.cost.regions != context.config.cost.regions and plan.refusal is not None:
        named = ", ".join(context.config.cost.regions)
        detail = f"the queues are in {config.batch.region}, cost.regions has {named}: {plan.refusal.message}"
        return Finding.failed(detail, plan.refusal.hint)
    if not plan.ranked:
        return Finding.skipped("there is no plan; the checks planned-memory and budget-deadline say more")
    try:
        client = batch_client(config.batch.region)
        queues = training_queues(config.batch, client, deadline_seconds=ANSWER_SECONDS)
    except (CloudError, StoreError) as error:
        return Finding.skipped(str(error))
    region = client.meta.region_name
    catalogue = load_catalogue()
    offered = offers(plan.ranked, queues, region=region, catalogue=catalogue)
    return _Asked(plan=plan, region=region, queues=queues, offered=offered, catalogue=catalogue)


# Warnings: they hold the plan of the price table against the account, and prices of the moment may allow more. Where an
# attempt really goes is decided when it is placed.
CHECKS: list[Check] = [
    Check(
        id="aws-capacity",
        title="queues can run the plan",
        severity="warning",
        tier="full",
        deadline_seconds=ANSWER_SECONDS + 6.0,
        symptoms=("I04",),
        run=check_capacity,
    ),
    Check(
        id="aws-quota",
        title="quotas allow the machines",
        severity="warning",
        tier="full",
        deadline_seconds=2 * ANSWER_SECONDS + 6.0,
        symptoms=("I04",),
        run=check_quota,
    ),
]
