"""Money of a job on Slurm: partitions as candidates of the plan, refusals, and the ledger's bill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import SLURM_JOB, STEP, Event
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.plan.candidates import JobProgress, read_progress
from ebbflow.cost.plan.partitions import (
    PartitionEvidence,
    count_used_node_hours,
    explain_ignored_budget,
    make_partition_plan,
    make_partition_terms,
)
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.cost.report.slurm_jobs import format_slurm_rows, list_reasons, summarize_slurm_jobs
from tests.support.timelines import WALL, GangLog, event

SPOT = {"name": "spot", "preemptible": True, "usd_per_node_hour": 12.0}
SAFE = {"name": "safe", "usd_per_node_hour": 20.0}
EVIDENCE = {
    "spot": PartitionEvidence(nodes={"idle": 1, "mixed": 3}, start_utc=WALL + 7200),
    "safe": PartitionEvidence(problem="sbatch: error: invalid account"),
}
# One step per second, the first two of 3,601 on two nodes: an hour is left
STEPS = [event(STEP, 0.0, step=0, generation=1), event(STEP, 1.0, step=1, generation=1)]


def settings(*partitions: dict[str, Any], slurm: dict[str, Any] | None = None, **cost: Any):
    return RunConfig.model_validate(
        {
            "slurm": {"partitions": list(partitions), **(slurm or {})},
            "cluster": {"nodes": 2},
            "training": {"max_steps": 3601},
            "cost": cost,
        }
    )


def slurm_job(
    does: str,
    started: float,
    stopped: float,
    *,
    partition: dict[str, Any],
    job_id: str = "7",
    **order: Any,
) -> Event:
    made = event(
        SLURM_JOB,
        started if does == "submitted" else stopped,
        does=does,
        job_id=job_id,
        partition=partition["name"],
        nodes=2,
        processes_per_node=1,
        preemptible=partition.get("preemptible", False),
        usd_per_node_hour=partition.get("usd_per_node_hour"),
        **order,
    )
    if does == "submitted":
        return made
    times = {"started_utc": WALL + started, "stopped_utc": WALL + stopped}
    return replace(made, data={**made.data, "cause": "preempted"} | times)


def plan(config: RunConfig, events: Sequence[Event], spent_usd: float = 0.0) -> Plan:
    progress = JobProgress(spent_usd=spent_usd)
    return make_partition_plan(config, events, now_utc=WALL, progress=progress, evidence=EVIDENCE)


def test_partitions_are_listed_with_dollars_and_slurms_evidence_cheapest_first() -> None:
    made = plan(settings(SAFE, SPOT), STEPS)
    assert [offer.name for offer in made.partitions] == ["spot", "safe"]
    assert [offer.usd for offer in made.partitions] == [24.0, 40.0]
    text = render_plan(made)
    assert "spot (preemptible)" in text and "1 idle, 3 mixed" in text and "in 2 h" in text
    assert "safe: sbatch: error: invalid account" in text
    assert Plan.from_json(made.to_json()) == made


def test_without_prices_partitions_keep_their_order_and_node_hours_count() -> None:
    unpriced = settings({"name": "safe"}, SPOT, budget_usd=1.0)
    made = plan(unpriced, STEPS)
    assert [offer.node_hours for offer in made.partitions] == [2.0, 2.0]
    assert made.partitions[0].name == "safe" and made.refusal is None
    assert "slurm.partitions[0] (safe) without usd_per_node_hour" in explain_ignored_budget(
        unpriced
    )
    assert not plan(settings({"name": "safe"}), []).costs_money


@pytest.mark.parametrize(
    ("config", "events", "message", "hint"),
    [
        (
            settings(SPOT, SAFE, budget_usd=20.0),
            STEPS,
            "need 1 h × 2 nodes × $12.0000/h in spot",
            "cost.budget_usd=",
        ),
        (
            settings(SPOT, slurm={"budget_node_hours": 2.5}),
            [*STEPS, slurm_job("ended", 0, 1800, partition=SPOT)],
            "1 are used, and the remaining steps need 2 = 1 h × 2 nodes",
            "slurm.budget_node_hours=3.7",
        ),
    ],
)
def test_a_measured_rest_beyond_the_budget_is_refused(
    config: RunConfig, events: Sequence[Event], message: str, hint: str
) -> None:
    refusal = plan(config, events).refusal
    assert refusal is not None and refusal.outcome is Outcome.BUDGET
    assert message in refusal.message and hint in refusal.hint
    assert plan(config, []).refusal is None


@pytest.mark.parametrize("is_running", [True, False])
def test_the_ledger_bills_node_hours_of_slurm_at_the_partitions_price(is_running: bool) -> None:
    """60 s of two nodes at $12: the agents recorded 40 s of each."""
    log = GangLog(1, 10.0, [[0], [1]], machines=[{}, {}])
    log.phase("startup", 10.0)
    log.steps(1, 4, useful_step=5.0)
    log.heartbeat(0, 50.0)
    log.heartbeat(1, 50.0)
    jobs = [slurm_job("submitted", 0, 60, partition=SPOT)]
    if not is_running:
        jobs.append(slurm_job("ended", 0, 60, partition=SPOT))
    events = [*jobs, *log.events]
    ledger = fold(events)
    seconds = Decimal(ledger.paid_microseconds) / 1_000_000
    assert ledger.total_usd == (seconds * 12 / 3600).quantize(Decimal("0.000001"))
    assert is_running or seconds == 120
    assert count_used_node_hours(events) == pytest.approx(0 if is_running else 120 / 3600)


def test_a_node_in_an_unpriced_partition_costs_nothing_before_and_after_its_jobs_end() -> None:
    """The job before it ran in a priced partition for 60 s, on two nodes at $12."""
    unpriced = {"name": "safe"}
    log = GangLog(1, 110.0, [[0], [1]], machines=[{}, {}])
    log.phase("startup", 10.0)
    log.heartbeat(0, 150.0)
    log.heartbeat(1, 150.0)
    running = [
        slurm_job("submitted", 0, 60, partition=SPOT),
        slurm_job("ended", 0, 60, partition=SPOT),
        slurm_job("submitted", 100, 160, partition=unpriced, job_id="8"),
        *log.events,
    ]
    ended = [*running, slurm_job("ended", 100, 160, partition=unpriced, job_id="8")]
    assert fold(running).total_usd == fold(ended).total_usd == Decimal("0.4")


def test_rows_of_slurm_jobs_without_dollars_from_an_older_report_are_shown() -> None:
    (row,) = summarize_slurm_jobs([slurm_job("ended", 0, 60, partition=SPOT)])
    (with_dollars,) = format_slurm_rows([row])
    del row["usd"]
    (without,) = format_slurm_rows([row])
    assert with_dollars[4] == "$0.4000"
    assert without == (*with_dollars[:4], "unknown", *with_dollars[5:])


def test_the_report_has_the_order_of_each_slurm_job() -> None:
    order = {"why": "the only one within the budget", "most_minutes": 90}
    submitted = slurm_job("submitted", 0, 60, partition=SPOT, **order)
    ended = slurm_job("ended", 0, 60, partition=SPOT)
    for events in ([submitted], [submitted, ended]):
        (row,) = summarize_slurm_jobs(events)
        assert {name: row.get(name) for name in order} == order
        assert list_reasons([row]) == [
            (row["job_id"], "the only one within the budget, 90 min at most")
        ]
    assert list_reasons(summarize_slurm_jobs([ended])) == []


def test_the_terms_of_an_attempt_have_its_partitions_price_and_hazard() -> None:
    config = settings(SPOT, SAFE, budget_usd=100.0, deadline_hours=2.0)
    ends = [slurm_job("ended", 0, 3600, partition=SPOT)]
    spot, safe = (
        make_partition_terms(config, pool, ends, processes_per_node=8, started_utc=WALL)
        for pool in config.slurm.partitions
    )
    assert spot.usd_per_rank_second == pytest.approx(12 / 8 / 3600)
    assert (spot.budget_usd, spot.deadline_utc) == (100.0, WALL + 7200)
    assert spot.spent_usd == pytest.approx(24.0)
    assert spot.hazard_per_hour == pytest.approx(2 / 25) and safe.hazard_per_hour < 1 / 200
    default = make_partition_terms(config, None, [], processes_per_node=1, started_utc=WALL)
    assert not default.is_priced and default.budget_usd is None


def test_the_deadline_counts_from_the_plan_also_where_the_queue_is_long() -> None:
    made = plan(settings(SPOT), []).to_json()
    events = [replace(event("plan", 3.0), data={**made, "made_utc": WALL + 3.0})]
    assert read_progress(events, run="run-1").started_utc == WALL + 3.0
