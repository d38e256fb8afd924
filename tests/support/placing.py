"""Made-up plans of round pools, attempts before them, placements and queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.capacity import AttemptHistory, PastAttempt, Placement, choose_placement
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.prices.reservations import Reservation
from ebbflow.infra.batch.queues import QueueState
from tests.support.capacity import queue, queues
from tests.support.pools import make_config, on_demand_pool, spot_pool, template_plan
from tests.support.timelines import WALL

HOUR = 3600.0
CATALOGUE = load_catalogue()
SPOT_QUEUE = queue("spot", "spot", multi_node=True)
ON_DEMAND_QUEUE = queue("on-demand", "on_demand")
BOTH = queues(SPOT_QUEUE, ON_DEMAND_QUEUE)
# Hours and dollars that a start on Spot needs, of the formulas' own test: 20 h and $100 less what
# they leave.
NEEDED_HOURS = 20 - 9.3125
IDLE_HOURS = 300 / 3600  # for which AWS Batch keeps machines
NEEDED_USD = 100 - 72.09375 + IDLE_HOURS * (4 + 3)


def make_plan(pools: Sequence[Candidate], **values: Any) -> Plan:
    known = {
        "deadline_hours": 20.0,
        "budget_usd": 100.0,
        "spent_usd": 0.0,
        "started_utc": WALL,
        "steps": 1000,
    }
    return replace(template_plan(), ranked=tuple(pools), refusal=None, **{**known, **values})


def place(
    pools: Sequence[Candidate] = (spot_pool(), on_demand_pool()),
    *,
    config: RunConfig | None = None,
    where: Mapping[str, QueueState] = BOTH,
    past: Sequence[PastAttempt] = (),
    now_utc: float = WALL,
    held: Sequence[Reservation] | None = None,
    **values: Any,
) -> Placement:
    return choose_placement(
        config or make_config(),
        plan=make_plan(pools, **values),
        history=AttemptHistory(attempts=tuple(past)),
        queues=where,
        now_utc=now_utc,
        catalogue=CATALOGUE,
        held=held,
    )


def attempt(
    cause: str, *, at: float = 0.0, started: bool = True, queue: str = "spot", **values: Any
) -> PastAttempt:
    """Make an attempt that ended at second `at` in a pool of two g5.xlarge, of which `values` are
    changed.
    """
    known = {
        "queue": queue,
        "market": "spot",
        "instance_type": "g5.xlarge",
        "region": "us-east-1",
        "zone": None,
        "nodes": 2,
        "processes_per_node": 1,
        "cpu": 4,
        "gpu": 1,
        "memory_mib": 1,
        "wall_seconds": 60,
        "runnable_seconds": 60,
        "usd_per_hour": 1.5,
        "price_kind": "recorded",
        "expected_hours": 1.0,
        "expected_usd": 1.0,
        "reason": "",
    }
    return PastAttempt(
        placement=Placement.from_json({**known, **values}),
        placed_utc=WALL + at - 100,
        cause=cause,
        started_utc=WALL + at - 50 if started else None,
        stopped_utc=WALL + at,
    )


def placement(**values: Any) -> Placement:
    known = {
        "queue": "arn:aws:batch:us-east-1:123456789012:job-queue/spot",
        "market": "spot",
        "instance_type": "g5.xlarge",
        "region": "us-east-1",
        "zone": "use1-az1",
        "nodes": 2,
        "processes_per_node": 1,
        "cpu": 4,
        "gpu": 1,
        "memory_mib": 15000,
        "wall_seconds": 60,
        "runnable_seconds": 60,
        "usd_per_hour": 1.5,
        "quoted_usd_per_hour": "1.50",
        "price_kind": "live",
        "expected_hours": 1.0,
        "expected_usd": 2.0,
        "reason": "it is cheap",
    }
    return Placement.from_json({**known, **values})


def in_region(
    region: str | None, name: str = "q", types: Sequence[str] = (), **values: Any
) -> QueueState:
    if region is None:
        arn = ""
    else:
        arn = f"arn:aws:batch:{region}:123456789012:job-queue/{name}"
    return queue(name, "spot", types, multi_node=True, arn=arn, **values)
