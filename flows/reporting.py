"""One report per job, written by the `report` step, or by the launcher when a run died before it got there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from ebbflow.cost.errors import CostError, PriceError
from ebbflow.cost.job_history import save_job_record
from ebbflow.cost.jobs import list_known_jobs, load_report
from ebbflow.cost.prices.source import read_price_changes
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows.job import RUNS, Job, write_atomically
from ebbflow.infra.errors import InfraError
from ebbflow.infra.events import NODE_STARTED, PLAN, PRICES, Event, read_events, read_log
from ebbflow.infra.metrics import render_job_metrics
from ebbflow.infra.program import PROJECT_ROOT

_COMPARED_JOBS = 8


def record_prices(job: Job) -> None:
    """How prices went while the job ran, into its events; what cannot be had is said, and the plan's price stands."""
    pools: list[dict[str, Any]] = []
    for kind, plan in _paid_types(read_events(job.store)).items():
        try:
            pools += read_price_changes(job.config.cost, plan, kind, now_utc=time.time(), project_root=PROJECT_ROOT)
        except PriceError as error:
            print(f"prices of {kind} since the plan are not known, so its own stand: {error}", flush=True)
    if pools:
        with job.events("prices") as events:
            events.emit(PRICES, pools=pools)


def _paid_types(events: Sequence[Event]) -> dict[str, dict[str, Any]]:
    """Instance types with the plan since which their prices matter: of each the first plan that chose it, since a job
    that went on may have been planned on another one, and for machines that are of no planned type the first of all.
    """
    plans = [event.data for event in events if event.name == PLAN and event.data.get("chosen")]
    first = {plan["chosen"]["instance_type"]: plan for plan in reversed(plans)}
    real = next((plan for plan in plans if not plan.get("simulated")), None)
    told = {event.data.get("instance_type") for event in events if event.name == NODE_STARTED} if real else set()
    return {**{str(kind): real for kind in sorted(filter(None, told)) if real}, **first}


def write_report(job: Job) -> RunReport:
    """Fold the job's events; write report and metrics into runs/<job>/ and then into the store, and what the job has
    shown of pools and speeds for the plans of others.

    Here first: a store that is full or takes no more writes still has events to tell from. Raises StoreError where it
    does not take the report.
    """
    from ebbflow.flows.attempts.settlement import (
        settle_for_report,  # not for each card's process, which imports this as well
    )

    settle_for_report(job)
    record_prices(job)
    content = read_log(job.store)
    events = content.events
    report = build_report(events, damage=content.damage)
    files = {
        "report.json": json.dumps(report.to_json(), indent=1, allow_nan=False).encode(),
        "report.html": render_html(report).encode(errors="backslashreplace"),
        "metrics.prom": render_job_metrics(report.to_json(), events),
    }
    for name, content in files.items():
        in_store, here = job.store.local_path(name), job.folder / name
        if in_store is None or in_store.resolve() != here.resolve():
            write_atomically(here, content)
    for name, content in files.items():
        job.store.put(name, content)
    try:
        save_job_record(job.root_store, events)
    except InfraError as error:  # the job has ended, however it ended: only later plans know less
        print(f"what the job has shown of pools and speeds is not kept: {error}", flush=True)
    return report


def earlier_reports(job: str) -> list[dict]:
    """Reports of the other jobs that this machine finished last, for comparison; of what cannot be read, none."""
    found = []
    for name in [name for name in list_known_jobs(RUNS) if name != job][-_COMPARED_JOBS:]:
        try:
            found.append(load_report(str(RUNS / name / "report.json")).to_json())
        except (CostError, OSError):
            continue
    return found
