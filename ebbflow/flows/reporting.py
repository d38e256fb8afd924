"""Write a job's report.

The step `report` calls this or, if the run died before that step, the launcher.
"""

import time
from collections.abc import Sequence

from ebbflow.core.errors import InfraError
from ebbflow.core.event_payloads import NodeStartedPayload
from ebbflow.core.events import (
    PRICES,
    Event,
    read_events,
    select_events,
)
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.cost.errors import PriceError
from ebbflow.cost.job_history import save_job_record
from ebbflow.cost.ledger.pricing import read_plan, select_plans
from ebbflow.cost.plan_json import PlanJson
from ebbflow.cost.prices.source import PriceChanges, read_price_changes
from ebbflow.cost.report.report import RunReport
from ebbflow.flows.job import Job
from ebbflow.observe.job_report import write_report_files


def record_prices(job: Job) -> None:
    """Record in the job's events how prices have changed since the plan.

    If they are unknown, the plan's prices apply.
    """
    pools: list[PriceChanges] = []
    for kind, plan in _paid_types(read_events(job.store)).items():
        try:
            pools += read_price_changes(
                job.config.cost, plan, [kind], now_utc=time.time(), project_root=PROJECT_ROOT
            )
        except PriceError as error:
            print(
                f"no prices of {kind} since the plan, so the plan's are used: {error}", flush=True
            )
    if pools:
        with job.events("prices") as events:
            events.emit(PRICES, pools=pools)


def write_report(job: Job) -> tuple[RunReport, list[Event]]:
    """Build the job's report, and write it and the metrics to runs/<job>/ and the store.

    Return report and events.

    The job's record in the job history is written last. If writing that record fails, only a message
    is printed.

    Raises:
        StoreError: the store rejected the report or did not answer.
    """
    from ebbflow.flows.attempts.settlement import (
        settle_for_report,  # not at module level, since every card's process imports this
    )

    settle_for_report(job)
    record_prices(job)
    report, events = write_report_files(job.name, job.store, job.folder)
    try:
        save_job_record(job.root_store, events)
    except InfraError as error:  # the job has ended; only later plans lack its history
        print(f"the job's history for later plans was not stored: {error}", flush=True)
    return report, events


def _paid_types(events: Sequence[Event]) -> dict[str, PlanJson]:
    """Return {instance type: plan data} for each instance type that the job may have paid for.

    A type's plan is the first plan that chose the type. If nodes used a type that no plan chose,
    the type's plan is the first plan that is not simulated. The caller needs the price changes of a
    type since the type's plan was made.
    """
    plans = [read_plan(event) for event in select_plans(events)]
    first = {plan["chosen"]["instance_type"]: plan for plan in reversed(plans)}
    real = next((plan for plan in plans if not plan.get("simulated")), None)
    if real:
        used_types = {
            event.payload.instance_type for event in select_events(events, NodeStartedPayload)
        }
    else:
        used_types = set()
    return {**{str(kind): real for kind in sorted(filter(None, used_types)) if real}, **first}
