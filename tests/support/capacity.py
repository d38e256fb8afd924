"""A job on AWS Batch without Batch: queues, a configuration, and a world that grants and takes capacity by a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cost.capacity import Placement, attempt_record, history_of, place
from cost.plan.plan import Plan, make_plan
from cost.plan.progress import Progress
from infra.batch.attempts import BatchAttempt, Cause
from infra.batch.queues import QueueState
from infra.config.load import load_config
from infra.config.schema import RunConfig
from infra.events import BATCH_ATTEMPT, PLACED, Event
from tests.support.timelines import WALL, event

ROOT = Path(__file__).resolve().parents[2]


def queue(name: str, market: str | None, types: Sequence[str] = (), **known) -> QueueState:
    """Usable, unless `known` says otherwise; on demand it takes several nodes."""
    fields = {"multi_node": market == "on_demand", "usable": True, "problem": "", "arn": f"arn:{name}"} | known
    return QueueState(name=name, market=market, instance_types=tuple(types), **fields)


def queues(*states: QueueState) -> dict[str, QueueState]:
    return {state.name: state for state in states}


BOTH = queues(queue("spot-g5", "spot", ["g5"]), queue("on-demand-g5", "on_demand", ["g5"]))


def batch_config(*overrides: str) -> RunConfig:
    """A job of some hours on one g5.xlarge, planned for Batch."""
    job = ["cluster.backend=batch", "cluster.nodes=1", "cluster.instance_types=[g5.xlarge]", "store=s3://b/p"]
    work = ["model.hidden_size=768", "model.num_heads=12", "model.num_layers=12", "training.max_steps=120000"]
    limits = ["cost.deadline_hours=20", "cost.budget_usd=100"]
    chosen = [*job, *work, *limits, *overrides]
    return load_config(str(ROOT / "configs" / "laptop.yaml"), chosen, project_root=ROOT, cwd=ROOT).config


def planned(config: RunConfig, now_utc: float, *, share_done: float = 0.0, spent_usd: float = 0.0) -> Plan:
    """Of what is left, the job having begun at `WALL`."""
    done = round(config.training.max_steps * share_done)
    return make_plan(config, now_utc=now_utc, progress=Progress(done_steps=done, spent_usd=spent_usd, started_utc=WALL))


@dataclass
class JobLog:
    """The events of a job as its launcher writes them: placements, and what Batch told."""

    events: list[Event] = field(default_factory=list)

    def placed(self, placement: Placement, at: float) -> None:
        self.events.append(event(PLACED, at, placement=placement.to_json(), attempt=0, round=1, why=placement.reason))

    def told(self, cause: Cause, placement: Placement, at: float, *, started: float | None, job_id: str = "") -> None:
        """What came of the newest placement at second `at`."""
        self.events.append(event(BATCH_ATTEMPT, at, **attempt_record(attempt(cause, at, started, job_id), placement)))


def attempt(cause: Cause, stopped: float, started: float | None, job_id: str = "", *, nodes: int = 1) -> BatchAttempt:
    """Times in seconds after `WALL`."""
    return BatchAttempt(
        job_id=job_id or f"job-at-{stopped}",
        job_name="train",
        queue="q",
        nodes=nodes,
        status="SUCCEEDED" if cause == "ended" else "FAILED",
        created_utc=WALL + (stopped if started is None else started) - 60,
        started_utc=None if started is None else WALL + started,
        stopped_utc=WALL + stopped,
        exit_code=None,
        reason="",
        cause=cause,
    )


def placed_now(
    config: RunConfig, log: JobLog, at: float, *, share_done: float = 0.0, spent_usd: float = 0.0, where=None
) -> Placement:
    """Second `at` of the job: place the next attempt and write it down."""
    plan = planned(config, WALL + at, share_done=share_done, spent_usd=spent_usd)
    history = history_of(log.events)
    placement = place(config, plan=plan, history=history, queues=where or BOTH, now_utc=WALL + at)
    log.placed(placement, at + 0.01)
    return placement
