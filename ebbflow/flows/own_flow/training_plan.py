"""The plan of a training in a user's flow: its price, its limits, and its data."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from ebbflow.core.config.load import values_with_sources
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import CONFIGURED, OUTCOME, PLAN, PREPARED, Event, read_events
from ebbflow.core.footprint import ModelShape
from ebbflow.core.layout import PLAN_KEY
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.terms import Terms
from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.ledger.ledger import last_notified_threshold
from ebbflow.cost.plan.candidates import NO_PROGRESS, JobProgress
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.quote import PriceSource, Quote
from ebbflow.cost.prices.reservations import open_evidence
from ebbflow.cost.prices.source import open_prices
from ebbflow.flows.job import (
    ClockReading,
    Job,
    read_job_history,
    read_job_progress,
    spent_or_zero_usd,
)
from ebbflow.flows.own_flow.shared_budget import SharedBudget
from ebbflow.flows.own_flow.step_checks import BudgetReached, FinalError
from ebbflow.flows.own_flow.step_options import StepOptions
from ebbflow.flows.own_flow.training_settings import TrainingSettings
from ebbflow.flows.remote import in_container
from ebbflow.flows.slurm.placement import plan_on_slurm
from ebbflow.training.attach.unattached import never_attaches
from ebbflow.tryout.examine import examine, examine_script, script_shape

PROCESS = "own-step"  # writer of a step's events, beside the steps of `TrainFlow`
_GIVEN = "usd_per_node_hour of @ebbflow"
# A trial first holds this much more than the plan expects it to cost
_FIRST_MARGIN = 1.25
# A trial that has used up its part of a shared budget gets at least, and at most, this multiple
_LEAST_GROWTH = 1.1
_MOST_GROWTH = 2.0

Prepared = dict[str, Any]  # description of the data, from the workload's `prepare`


@dataclass(frozen=True)
class GivenPrice:
    """Price source that gives every instance type the price that the user stated."""

    usd_per_hour: Decimal  # US dollars per node and hour
    now_utc: float  # Unix time of the plan

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:  # noqa: ARG002
        return ()

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        return Quote(
            instance_type=kind.name,
            region=region,
            zone=None,
            zone_name=None,
            usd_per_hour=self.usd_per_hour,
            at=None,
            observed=self.now_utc,
            kind="recorded",
            source=_GIVEN,
            has_volume=False,
        )

    def zones(self, region: str) -> Sequence[str]:  # noqa: ARG002
        return ()

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:  # noqa: ARG002
        return f": the price is {_GIVEN}"

    def describe(
        self,
        *,
        now_utc: float,  # noqa: ARG002
        regions: Sequence[str],  # noqa: ARG002
        max_age_hours: float,  # noqa: ARG002
    ) -> tuple[str, ...]:
        return (f"${self.usd_per_hour} per node and hour: {_GIVEN}",)


def prepare_training(
    job: Job,
    settings: TrainingSettings,
    options: StepOptions,
    shared: SharedBudget | None = None,
) -> tuple[Prepared, Terms | None]:
    """Prepare a training's data and plan, and record them with its configuration.

    Returns the description of the data, and the cost terms (None if nothing can be priced).

    A later attempt in the same Metaflow run has the plan and the data of the first.

    Args:
        shared: The budget that the training shares with the other trials of its step.

    Raises:
        BudgetReached: the training cannot finish within its budget.
        FinalError: the deadline does not allow the training, or it has no price for its budget.
        TrainingError: the workload cannot be trained.
    """
    config = settings.config
    former = [event for event in read_events(job.store) if event.run == job.run]
    plan = _find_plan(former)
    prepared = _find_prepared(former)
    is_new = plan is None or prepared is None
    if plan is None or prepared is None:
        shape, prepared = _look_at_workload(job, settings)
        plan = _make_plan(job, config, options, shape)
        plan = plan.with_sources(settings.document["sources"])
        job.store.put(PLAN_KEY, json.dumps(plan.to_json(), allow_nan=False).encode())
        plan = plan.brief()
    problem = ""
    if shared is not None:
        plan = _let_continue(job, plan, shared)
    if shared is not None and plan.refusal is None:
        granted = _hold_share(job, plan, shared)
        if granted is None:
            problem = _describe_lack(job, plan, shared)
        else:
            is_new = is_new or granted != plan.budget_usd
            plan = replace(plan, budget_usd=granted)
            settings = settings.with_budget(granted)
    document = settings.document
    job.store.put("config.json", json.dumps(document, indent=1, sort_keys=True).encode())
    with job.events(PROCESS) as events:
        events.emit(
            CONFIGURED, settings=values_with_sources(document["config"], document["sources"])
        )
        events.emit(PREPARED, **prepared)
        if is_new:
            events.emit(PLAN, **plan.to_json())
    _check_refusal(job, plan)
    if problem:
        _record_refusal(job, Outcome.BUDGET, problem)
        raise BudgetReached(f"{Outcome.BUDGET}: {problem}")
    return prepared, _make_terms(job, plan)


def extend_terms(job: Job, terms: Terms, shared: SharedBudget) -> Terms | None:
    """Return the terms with more dollars of a shared budget, or None if it has none left for the
    job.
    """
    events = read_events(job.store)
    spent = spent_or_zero_usd(events)
    granted = _extend_hold(job, spent + terms.reserve_usd, shared)
    if granted is None:
        return None
    threshold = last_notified_threshold(events, granted)
    return replace(terms, budget_usd=granted, spent_usd=spent, last_notified_threshold=threshold)


def plan_on_pools(
    job: Job,
    options: StepOptions,
    shape: ModelShape | None,
    *,
    now_utc: float,
    is_simulated: bool,
    progress: JobProgress = NO_PROGRESS,
) -> Plan:
    """Return the plan of a training on this machine, in AWS Batch or on Kubernetes."""
    config = job.config
    return make_plan(
        # Without a launcher nothing watches prices while the step runs
        config.changed("cost", price_seconds=0.0),
        now_utc=now_utc,
        simulated=is_simulated,
        shape=shape,
        prices=_open_prices(config, options, now_utc),
        history=read_job_history(job),
        progress=progress,
        evidence=open_evidence(config),
        compare_keys=True,
    )


def describe_script(config: RunConfig) -> Prepared:
    """Return the data description of a script: without a fingerprint, because the script reads its
    data itself.
    """
    return {
        "fingerprint": "",
        "weight_unit": "samples",
        "script": config.script,
        "words": config.script_args,
    }


def _find_plan(events: Sequence[Event]) -> Plan | None:
    for event in reversed(events):
        if event.name == PLAN:
            return Plan.from_json(event.data)
    return None


def _find_prepared(events: Sequence[Event]) -> Prepared | None:
    for event in reversed(events):
        if event.name == PREPARED:
            return dict(event.data)
    return None


def _look_at_workload(job: Job, settings: TrainingSettings) -> tuple[ModelShape | None, Prepared]:
    """Return the model's shape and the description of the data, after preparing the data if needed.

    A script is measured only if there is a limit to compare with, since this takes seconds.
    """
    config = settings.config
    if settings.is_own_loop and config.script is None:
        return script_shape({}, config), {"fingerprint": "", "weight_unit": "samples"}
    if config.script is not None:
        script = Path(config.script)
        cost = config.cost
        has_limit = cost.budget_usd is not None or cost.deadline_hours is not None
        shape = script_shape({}, config)
        if has_limit and not never_attaches(script):
            found = examine_script(config)
            print(found.text, flush=True)
            shape = found.shape or shape
        return shape, describe_script(config)
    if config.workload is not None:
        found = examine(config, prepare=True)
        print(found.text, flush=True)
        return found.shape, found.prepared or {}
    from ebbflow.training.data import prepare_tokens

    tokens = prepare_tokens(config.data, job.root_store, project_root=PROJECT_ROOT)
    return None, tokens.to_json()


def _make_plan(job: Job, config: RunConfig, options: StepOptions, shape: ModelShape | None) -> Plan:
    if config.cluster.plan_for == "slurm":
        return plan_on_slurm(job, shape)
    is_here = not in_container()
    now = time.time() if is_here else ClockReading.of(job.store).utc
    return plan_on_pools(
        job,
        options,
        shape,
        now_utc=now,
        is_simulated=is_here and options.usd_per_node_hour is None,
        progress=read_job_progress(job),
    )


def _open_prices(config: RunConfig, options: StepOptions, now_utc: float) -> PriceSource:
    if options.usd_per_node_hour is None:
        return open_prices(config, now_utc, project_root=PROJECT_ROOT)
    return GivenPrice(Decimal(repr(options.usd_per_node_hour)), now_utc)


def _check_refusal(job: Job, plan: Plan) -> None:
    """Raise FinalError if the plan refuses the training.

    Without a budget, a plan that finds no pool is not a refusal: the training runs where it is, and
    only has no price.
    """
    refusal = plan.refusal
    if refusal is None:
        return
    is_unpriced = refusal.outcome is Outcome.NO_CAPACITY
    if is_unpriced and job.config.cost.budget_usd is None:
        print(f"no price: {refusal.message}; fix: usd_per_node_hour=", flush=True)
        return
    _record_refusal(job, refusal.outcome, refusal.message)
    text = f"{refusal.outcome}: {refusal.message} ({refusal.hint})"
    if refusal.outcome is Outcome.BUDGET:
        raise BudgetReached(text)
    raise FinalError(text)


def _record_refusal(job: Job, outcome: Outcome, message: str) -> None:
    with job.events(PROCESS) as events:
        events.emit(OUTCOME, outcome=outcome.value, message=message)


def _let_continue(job: Job, plan: Plan, shared: SharedBudget) -> Plan:
    """Drop a budget refusal from the plan if the job was interrupted and holds unspent dollars.

    The other trials cannot use these dollars, and those that the job has spent would be lost.
    """
    refusal = plan.refusal
    if refusal is None or refusal.outcome is not Outcome.BUDGET:
        return plan
    held = shared.find_hold(job.name)
    if held is None or held.has_ended:
        return plan
    spent = spent_or_zero_usd(read_events(job.store))
    if held.usd <= spent + plan.reserve_usd:
        return plan
    return replace(plan, refusal=None)


def _hold_share(job: Job, plan: Plan, shared: SharedBudget) -> float | None:
    """Reserve dollars of a shared budget for the job. Return them, or None if too few are left."""
    assert plan.chosen is not None
    spent = spent_or_zero_usd(read_events(job.store))
    held = shared.find_hold(job.name)
    if held is not None and not held.has_ended:
        if held.usd > spent + plan.reserve_usd:
            return held.usd
        return _extend_hold(job, spent + plan.reserve_usd, shared)
    return shared.hold(
        job.name,
        needed_usd=_find_need(plan, spent),
        wanted_usd=_limit_to_own(job, _find_need(plan, spent, margin=_FIRST_MARGIN)),
    )


def _extend_hold(job: Job, used_usd: float, shared: SharedBudget) -> float | None:
    held = shared.find_hold(job.name)
    before = used_usd if held is None else max(used_usd, held.usd)
    needed = before * _LEAST_GROWTH
    if needed > _limit_to_own(job, needed):
        return None
    return shared.hold(
        job.name, needed_usd=needed, wanted_usd=_limit_to_own(job, before * _MOST_GROWTH)
    )


def _find_need(plan: Plan, spent: float, *, margin: float = 1.0) -> float:
    """Return the dollars that the job needs to finish, including those that it has spent."""
    assert plan.chosen is not None
    return spent + plan.chosen.expected_usd * margin + plan.reserve_usd


def _limit_to_own(job: Job, usd: float) -> float:
    own = job.config.cost.budget_usd
    return usd if own is None else min(usd, own)


def _describe_lack(job: Job, plan: Plan, shared: SharedBudget) -> str:
    needed = _find_need(plan, spent_or_zero_usd(read_events(job.store)))
    return (
        f"the trial needs ${needed:.4f}, and {shared.describe(job.name)}, so it does not start; "
        "fix: a larger budget_of_all, then resume this step"
    )


def _make_terms(job: Job, plan: Plan) -> Terms | None:
    if plan.chosen is None:
        return None
    events = read_events(job.store)
    threshold = last_notified_threshold(events, plan.budget_usd)
    return plan.terms(spent_usd=spent_or_zero_usd(events), last_notified_threshold=threshold)
