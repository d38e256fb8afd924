"""Placing an attempt: what is asked, recorded and ordered, and when no further attempt is made."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import JobIsRunning, Outcome
from ebbflow.core.events import (
    BATCH_ATTEMPT,
    BATCH_SUBMITTED,
    COMMIT,
    PLACED,
    PLAN,
    Event,
    read_events,
)
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.launchers import RUN_CLAIM_VARIABLE, claim_job
from ebbflow.core.layout import TEAM_FILE_KEY
from ebbflow.core.store import Store
from ebbflow.core.team_reservations import is_reserved
from ebbflow.cost.capacity import AttemptHistory, PastAttempt, Placement
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.prices.reservations import CapacityEvidence
from ebbflow.flows.attempts import placement
from ebbflow.flows.attempts.order import AttemptName, AttemptOrder
from ebbflow.flows.attempts.placement import (
    DEADLINE_SECONDS,
    PLANNED_SECONDS,
    PlacementRequest,
    PlacementResult,
    describe_order,
    give_up_reason,
    make_fresh_plan,
    make_order,
    operator_stop_reason,
    place_attempt,
)
from ebbflow.flows.job import Job
from tests.support.batch_service import JobService, serve_jobs
from tests.support.capacity import JobLog, batch_config, placed_now, planned
from tests.support.records import is_frozen, takes_names_only
from tests.support.timelines import WALL, GangLog, event, plan_event

NAME = AttemptName(run="1733", step="train_node", task="5", attempt=2)


@pytest.fixture
def service(_service: JobService, monkeypatch: pytest.MonkeyPatch) -> JobService:
    _service.jobs = {}
    _service.owners = {}
    _service.requests = []
    _service.refused = False
    _service.away = False
    _service.slow_seconds = 0.0
    _service.queues = {"spot-g5": "spot", "od-g5": "on_demand"}
    for name, value in (
        ("ACCESS_KEY_ID", "local"),
        ("SECRET_ACCESS_KEY", "local"),
        ("DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", _service.endpoint)
    return _service


@pytest.fixture
def make_flow(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """What a step finds of the steps before it."""

    def flow(nodes: int = 1, **cost: Any) -> SimpleNamespace:
        spot = {"name": "spot-g5", "market": "spot"}
        on_demand = {"name": "od-g5", "market": "on_demand"}
        document = {
            "store": str(tmp_path / "store"),
            "cluster": {"nodes": 1, "instance_types": ["g5.xlarge"]},
            "batch": {"queues": [spot, on_demand]},
            "cost": cost,
        }
        config = RunConfig.model_validate_json(json.dumps(document))
        settings = {"config": config.model_dump(mode="json"), "sources": {}}
        plan = make_plan(config, now_utc=time.time()).brief().to_json()
        return SimpleNamespace(
            job="j", settings=settings, capacity=plan, examined=None, rounds=0, num_nodes=nodes
        )

    return flow


@pytest.fixture
def flow(make_flow: Callable[..., SimpleNamespace]) -> SimpleNamespace:
    return make_flow()


def ask(flow: SimpleNamespace, **known: Any) -> PlacementRequest:
    return PlacementRequest(
        **{"flow": flow, "name": NAME, "round": 3, "one_node": True, "last": False, **known}
    )


def events_of(flow: SimpleNamespace, name: str = "") -> list[Event]:
    return [
        event for event in read_events(Job.of(flow, NAME.run).store) if name in ("", event.name)
    ]


def emit(
    flow: SimpleNamespace, name: str, *, generation: int = 0, attempt: int = 0, **data: Any
) -> None:
    with Job.of(flow, NAME.run).events("test") as log:
        log.origin = replace(log.origin, generation=generation, attempt=attempt)
        log.emit(name, **data)


def as_stored(order: AttemptOrder) -> AttemptOrder:
    return AttemptOrder.model_validate_json(order.model_dump_json())


def placed_in(order: AttemptOrder) -> Placement:
    assert order.placement is not None
    return order.placement


def stored_order(flow: SimpleNamespace) -> AttemptOrder | None:
    return AttemptOrder.get(Job.of(flow, NAME.run).store, NAME)


def test_a_fresh_placement_is_recorded_and_ordered(
    service: JobService, flow: SimpleNamespace
) -> None:
    answer = place_attempt(ask(flow))
    assert answer.trouble == "" and answer.order is not None and answer.order.placement is not None
    assert (answer.order.does, answer.order.nodes, answer.order.placement.queue) == (
        "train",
        1,
        "spot-g5",
    )
    [planned_event, placed] = events_of(flow)
    assert (planned_event.name, planned_event.run, planned_event.attempt) == (PLAN, "1733", 2)
    assert answer.order.plan is not None
    assert json.loads(json.dumps(answer.order.plan.to_json())) == planned_event.data
    assert (placed.name, placed.run, placed.attempt) == (PLACED, "1733", 2)
    assert placed.data == {
        "placement": json.loads(json.dumps(answer.order.placement.to_json())),
        "why": answer.order.placement.reason,
        "attempt": 2,
        "round": 3,
        "task": "5",
        "after_generation": 0,
    }
    assert placed.step == "train_node"
    [segment] = Job.of(flow, NAME.run).store.list("events")
    assert "placing-train_node-5-2" in segment.key
    order = stored_order(flow)
    assert order is not None and order.placement is not None
    assert order.placement.to_json() == placed.data["placement"]


def test_a_placement_records_the_newest_generation(
    service: JobService, flow: SimpleNamespace
) -> None:
    for generation in (2, 7, 4):
        emit(flow, "note", generation=generation)
    place_attempt(ask(flow))
    assert events_of(flow, PLACED)[0].data["after_generation"] == 7


def past(flow: SimpleNamespace, service: JobService, count: int, **about: Any) -> None:
    """Attempts of this run on Spot, whose ends Batch tells only now."""
    _, spot = chosen()
    for number in range(count):
        task = {"step": "train_node", "task": "5"}
        emit(
            flow, PLACED, attempt=60 + number, placement=spot.to_json(), after_generation=0, **task
        )
        emit(flow, BATCH_SUBMITTED, attempt=60 + number, job_id=f"x-{number}", **task)
        service.jobs[f"x-{number}"] = [{"status": "FAILED", "createdAt": 1000, **about}]


def test_attempts_that_have_ended_meanwhile_count(
    service: JobService, flow: SimpleNamespace
) -> None:
    past(
        flow,
        service,
        5,
        startedAt=1000,
        stoppedAt=2000,
        statusReason="Essential container in task exited",
    )
    order = place_attempt(ask(flow)).order
    assert order is not None and (order.does, order.outcome) == ("stop", "failed")
    assert order.message.startswith(
        "5 attempts in a row failed (1 × g5.xlarge spot in queue spot-g5: user code)"
    )
    assert stored_order(flow) == order and len(events_of(flow, BATCH_ATTEMPT)) == 5


@pytest.mark.parametrize(("cost", "does"), [({}, "stop"), ({"deadline_hours": 900.0}, "train")])
def test_missing_spot_ends_a_job_unless_its_deadline_brings_on_demand(
    service: JobService, make_flow: Callable[..., SimpleNamespace], cost: dict[str, Any], does: str
) -> None:
    flow = make_flow(**cost)
    past(flow, service, 5, statusReason="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")
    order = place_attempt(ask(flow)).order
    assert order is not None and order.does == does
    assert order.outcome == ("no_capacity" if does == "stop" else "")


def test_a_job_over_its_budget_is_ordered_to_stop(
    service: JobService, make_flow: Callable[..., SimpleNamespace]
) -> None:
    flow = make_flow()
    flow.settings["config"]["cost"]["budget_usd"] = 0.0000001
    order = place_attempt(ask(flow)).order
    assert (
        order is not None
        and (order.does, order.outcome) == ("stop", "budget")
        and "budget" in order.message
    )
    assert stored_order(flow) == order and events_of(flow, PLACED) == []


@pytest.mark.parametrize("batch_answers", [True, False])
def test_a_job_whose_reservation_was_lost_reserves_again_or_stops_before_it_pays(
    service: JobService, make_flow: Callable[..., SimpleNamespace], batch_answers: bool
) -> None:
    service.away = not batch_answers
    flow = make_flow(team_file="store", project="vision", budget_usd=5.0, deadline_hours=900.0)
    root = Store.open(flow.settings["config"]["store"])
    root.put(TEAM_FILE_KEY, b"budgets: [{project: vision, month: every, usd: 4}]")
    order = place_attempt(ask(flow), deadline_seconds=0.5).order
    assert order is not None and (order.does, order.outcome) == ("stop", "budget")
    assert order.message.startswith("team budget: may spend $5.00. project 'vision' in ")
    assert events_of(flow, PLACED) == [] and not is_reserved(root, "j")

    root.put(TEAM_FILE_KEY, b"budgets: [{project: vision, month: every, usd: 6}]")
    again = place_attempt(ask(flow), deadline_seconds=0.5).order
    assert again is not None and again.does == "train" and is_reserved(root, "j")


def test_a_job_that_another_launcher_holds_is_not_placed(
    service: JobService, flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit(flow, BATCH_SUBMITTED, job_id="x", step="train_node", task="5")
    claim = claim_job(Job.of(flow, NAME.run).store, "j", "run")
    monkeypatch.setenv(RUN_CLAIM_VARIABLE, "another")
    with pytest.raises(JobIsRunning):
        place_attempt(ask(flow))
    assert stored_order(flow) is None
    claim.release()


def test_the_plan_of_the_run_decides_if_batch_does_not_answer(
    service: JobService, flow: SimpleNamespace
) -> None:
    emit(flow, "note", generation=7)
    service.away = True
    request = ask(flow)
    answer = place_attempt(request, deadline_seconds=0.5)
    assert answer.trouble.startswith("CloudUnavailable: ")
    assert answer.order is not None and placed_in(answer.order).queue == "spot-g5"
    [placed] = events_of(flow, PLACED)
    assert placed.data["after_generation"] == 0 and request.abandoned.is_set()


def test_an_attempt_without_a_plan_of_the_run_is_not_placed(
    service: JobService, flow: SimpleNamespace
) -> None:
    service.away = True
    flow.capacity = {}
    answer = place_attempt(ask(flow), deadline_seconds=0.3)
    assert answer.order is None and stored_order(flow) is None
    fresh, _, planned_trouble = answer.trouble.partition("; nor by the plan of the run: ")
    assert fresh.startswith("CloudUnavailable: ") and planned_trouble.startswith("PlanError: ")


def placing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "placing"]


def test_a_placement_that_comes_too_late_orders_nothing(
    service: JobService, flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.slow_seconds = 0.3
    answer = place_attempt(ask(flow), deadline_seconds=0.1)
    assert "0.1 s" in answer.trouble and answer.order is not None
    for thread in placing_threads():
        thread.join(30)
    assert len(events_of(flow, PLACED)) == 1 and as_stored(answer.order) == stored_order(flow)


def test_a_late_placement_by_the_plan_of_the_run_orders_nothing_either(
    service: JobService, flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_BATCH", "no address")  # refused at once
    synced = os.fsync

    def sync_slowly(descriptor: int) -> None:
        threading.Event().wait(0.2)
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", sync_slowly)
    monkeypatch.setattr(placement, "PLANNED_SECONDS", 0.1)
    answer = place_attempt(ask(flow))
    assert (
        answer.order is None
        and "nor by the plan of the run: CloudUnavailable: placing: timed" in answer.trouble
    )
    for thread in placing_threads():
        thread.join(30)
    assert stored_order(flow) is None and events_of(flow, PLACED) == []


@pytest.mark.parametrize("budget_usd", [None, 0.0000001], ids=["placed", "stopped"])
def test_an_abandoned_request_orders_nothing(
    service: JobService, flow: SimpleNamespace, budget_usd: float | None
) -> None:
    """Neither a placement nor the end of the job; the plan of the run is asked with a request of
    its own.
    """
    flow.settings["config"]["cost"]["budget_usd"] = budget_usd
    request = ask(flow)
    request.abandoned.set()
    answer = place_attempt(request)
    assert answer.trouble.startswith("TimeoutError: the deadline for this placement has passed")
    assert answer.order is not None and answer.order.does == "train"
    assert len(events_of(flow, PLACED)) == 1 and stored_order(flow) == as_stored(answer.order)


def test_placing_may_hold_up_the_scheduler_for_a_minute_and_a_half() -> None:
    assert (DEADLINE_SECONDS, PLANNED_SECONDS) == (60.0, 30.0)


@pytest.mark.parametrize(
    ("off", "words"),
    [
        (
            -600.0,
            "the launcher's clock is 10.0 min behind the store's or AWS Batch's, and times are "
            "corrected; ",
        ),
        (
            600.0,
            "the launcher's clock is 10.0 min ahead of the store's or AWS Batch's, and times are "
            "corrected; ",
        ),
        (0.0, ""),
    ],
)
def test_a_wrong_launcher_clock_is_reported_and_corrected(
    service: JobService,
    make_flow: Callable[..., SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    off: float,
    words: str,
) -> None:
    """A start is due by the launcher's clock, which counts from the store's time."""
    flow = make_flow(deadline_hours=900.0)
    right = place_attempt(ask(flow, name=replace(NAME, attempt=9))).order
    assert right is not None and right.placement is not None
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + off)
    order = place_attempt(ask(flow)).order
    assert order is not None and order.placement is not None
    assert order.placement.reason.startswith(words) and ("clock" in order.placement.reason) is bool(
        words
    )
    assert abs(order.placement.start_by_utc - right.placement.start_by_utc - off) < 100


@pytest.mark.parametrize(("later", "told"), [(60.0, False), (61.0, True)])
def test_batchs_clock_counts_as_the_stores(
    service: JobService,
    flow: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    later: float,
    told: bool,
) -> None:
    now = float(int(time.time()))
    monkeypatch.setattr(time, "time", lambda: now)
    past(
        flow,
        service,
        1,
        startedAt=1000,
        stoppedAt=(now + later) * 1000,
        statusReason="Host EC2 (x) terminated.",
    )
    order = place_attempt(ask(flow)).order
    assert order is not None and order.placement is not None
    assert order.placement.reason.startswith("the launcher's clock is 1.0 min behind ") is told


def test_the_clock_that_is_furthest_off_counts(
    service: JobService, flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store's clock is ten minutes behind the launcher's, and Batch's is 30 s ahead of it."""
    now = time.time() + 600.0
    monkeypatch.setattr(time, "time", lambda: now)
    past(
        flow,
        service,
        1,
        startedAt=1000,
        stoppedAt=(now + 30) * 1000,
        statusReason="Host EC2 (x) terminated.",
    )
    order = place_attempt(ask(flow)).order
    assert order is not None and order.placement is not None
    assert order.placement.reason.startswith(
        "the launcher's clock is 10.0 min ahead of the store's "
    )


def test_an_attempt_without_a_configured_region_is_placed_in_the_default_one(
    service: JobService, make_flow: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    order = place_attempt(ask(make_flow(regions=["us-west-2"]))).order
    assert (
        order is not None and order.placement is not None and order.placement.region == "us-east-1"
    )


def test_placing_waits_twenty_seconds_for_the_store(
    service: JobService, flow: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: set[float] = set()
    opened = Store.open

    def open_store(uri: str, *, request_timeout_seconds: float) -> Store:
        waits.add(request_timeout_seconds)
        return opened(uri, request_timeout_seconds=request_timeout_seconds)

    monkeypatch.setattr(Store, "open", open_store)
    assert place_attempt(ask(flow)).trouble == ""
    assert waits == {20.0}


def test_a_fresh_plan_is_one_of_the_remaining_work(flow: SimpleNamespace) -> None:
    job = Job.of(flow, NAME.run)
    evidence = CapacityEvidence()
    first = replace(plan_event(3.6, t=50.0), run="another")
    mine = replace(plan_event(3.6, t=100.0), run=NAME.run)
    fresh = make_fresh_plan(job, [first, mine], None, WALL + 200, evidence)
    assert (fresh.made_utc, fresh.started_utc, fresh.done_steps) == (WALL + 200, WALL + 100, 0)
    gang = GangLog(1, 100.0, [[0]])
    gang.steps(1, 120, useful_step=1.0)
    gang.commit(120)
    gang.ended("node_lost", 120.0)
    later = make_fresh_plan(job, [mine, *gang.events], None, WALL + 400, evidence)
    assert (later.done_steps, later.spent_usd) == (120, pytest.approx(0.12))
    small = causal_lm_shape(job.config.model)
    large = replace(small, flops_per_sample=100 * small.flops_per_sample)
    shaped = [
        make_fresh_plan(job, [], {"shape": json.loads(json.dumps(vars(shape)))}, WALL, evidence)
        for shape in (small, large)
    ]
    plain = make_fresh_plan(job, [], None, WALL, evidence)
    assert (
        plain.ranked[0].expected_hours
        == shaped[0].ranked[0].expected_hours
        < shaped[1].ranked[0].expected_hours
    )


def test_pods_are_placed_on_the_nodes_of_the_run(
    service: JobService,
    make_flow: Callable[..., SimpleNamespace],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kubernetes = pytest.importorskip("kubernetes")
    cluster = {"name": "c", "cluster": {"server": service.endpoint}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    user = {"name": "u", "user": {"token": "t"}}
    known = {"clusters": [cluster], "contexts": [context], "users": [user]}
    path = tmp_path / "kubeconfig.json"
    path.write_text(
        json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c", **known})
    )
    # Read at import
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    flow = make_flow(nodes=2)
    answer = place_attempt(ask(flow, backend="kubernetes", one_node=False))
    assert answer.trouble == "" and answer.order is not None
    assert (answer.order.nodes, placed_in(answer.order).queue) == (2, "on-demand")
    assert service.requests == [], "AWS Batch is not asked"
    monkeypatch.setattr(kubernetes.config.kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", "/missing")
    by_plan = place_attempt(ask(flow, backend="kubernetes", one_node=False))
    assert "kubeconfig" in by_plan.trouble and by_plan.order is not None
    assert placed_in(by_plan.order).queue == "spot"


# Orders


def chosen() -> tuple[Plan, Placement]:
    config = batch_config()
    return planned(config, 1_800_000_000.0), placed_now(config, JobLog(), 0.0)


def test_an_order_trains_in_the_placed_pool() -> None:
    plan, placed = chosen()
    order = make_order(ask(SimpleNamespace()), plan, placed)
    assert (order.does, order.nodes, order.processes_per_node) == ("train", 1, 1)
    assert order.placement == placed
    assert order.plan is not None and order.plan.chosen is not None
    assert order.plan.chosen.instance_type == placed.instance_type


@pytest.mark.parametrize(
    ("one_node", "last", "nodes", "does"),
    [
        (True, False, 1, "train"),
        (True, False, 2, "next"),
        (True, True, 1, "next"),
        (True, True, 2, "next"),
        (False, True, 1, "train"),
    ],
)
def test_a_step_of_one_node_hands_gangs_and_last_attempts_on(
    one_node: bool, last: bool, nodes: int, does: str
) -> None:
    plan, placed = chosen()
    request = ask(SimpleNamespace(), one_node=one_node, last=last)
    if does == "train":
        assert make_order(request, plan, placed).does == "train"
    else:
        many = replace(placed, nodes=nodes, processes_per_node=3)
        order = make_order(request, plan, many)
        assert (order.does, order.nodes, order.processes_per_node) == (does, nodes, 3)
        words = f"a gang of {nodes} nodes" if nodes > 1 else "another round"
        assert words in str(order.brief()["reason"])


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (
            AttemptOrder.stop(Outcome.BUDGET, "spent"),
            "no further attempt: budget: spent",
        ),
        (AttemptOrder(does="next", nodes=3, message="a gang of 3 nodes"), "a gang of 3 nodes"),
        (
            AttemptOrder(
                placement=replace(
                    chosen()[1],
                    nodes=2,
                    instance_type="g5.xlarge",
                    market="on_demand",
                    queue="arn:aws:batch:us-east-1:1:job-queue/q",
                    reason="cheapest",
                )
            ),
            "2 × g5.xlarge on-demand in queue q: cheapest",
        ),
    ],
)
def test_an_order_is_described_in_one_line(order: AttemptOrder, text: str) -> None:
    assert describe_order(order) == text


def test_an_order_is_read_back_by_its_attempts_name(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    assert AttemptOrder.get(store, NAME) is None
    plan, placed = chosen()
    order = AttemptOrder(
        does="next",
        nodes=2,
        processes_per_node=3,
        placement=placed,
        plan=plan.brief(),
        message="m",
    )
    order.put(store, NAME)
    assert AttemptOrder.get(store, NAME) == order
    for other in ({"run": "9"}, {"step": "train"}, {"task": "6"}, {"attempt": 3}):
        assert AttemptOrder.get(store, replace(NAME, **other)) is None
    document = json.loads(store.get(NAME.key))
    written = {"placement": placed.to_json(), "plan": plan.brief().to_json()}
    assert document == json.loads(json.dumps({**vars(order), **written}))
    store.put(NAME.key, json.dumps({"does": "next", "later": 1}).encode())
    assert AttemptOrder.get(store, NAME) == AttemptOrder(does="next")
    bare = AttemptOrder()
    assert (bare.does, bare.nodes, bare.processes_per_node, bare.placement, bare.plan) == (
        "train",
        1,
        1,
        None,
        None,
    )
    with pytest.raises(ValueError, match="Out of range"):
        AttemptOrder(placement=replace(placed, wall_seconds=math.inf)).put(store, NAME)


def test_the_brief_order_has_pool_nodes_limits_and_reason_and_not_the_plan() -> None:
    _, placed = chosen()
    brief = AttemptOrder(nodes=placed.nodes, placement=placed).brief()
    assert json.loads(json.dumps(brief)) == brief and "plan" not in brief
    assert brief["pool"] == str(placed) and brief["reason"] == placed.reason
    assert brief["limits"] == {
        "wall_seconds": placed.wall_seconds,
        "runnable_seconds": placed.runnable_seconds,
        "start_by_utc": placed.start_by_utc,
    }
    stop = AttemptOrder.stop(Outcome.BUDGET, "spent").brief()
    assert stop == {"does": "stop", "nodes": 1, "reason": "spent"}


def test_records_of_placing_take_names_only_and_are_frozen(flow: SimpleNamespace) -> None:
    for record in (AttemptName, PlacementRequest, PlacementResult):
        assert takes_names_only(record) and is_frozen(record)
    assert takes_names_only(AttemptOrder) and AttemptOrder.model_config.get("frozen")
    assert PlacementResult() == PlacementResult(order=None, trouble="")
    one = ask(flow)
    other = ask(flow)
    assert one == other and "abandoned" not in repr(one) and one.backend == "batch"
    assert one.abandoned is not other.abandoned and not one.abandoned.is_set()


# When no further attempt is made


def attempts(*causes: str, **known: Any) -> list[PastAttempt]:
    _, placed = chosen()
    shared = {"placement": placed, "placed_utc": 1.0, "started_utc": 2.0, "run": "r"}
    return [PastAttempt(**{**shared, "cause": cause, **known}) for cause in causes]


def reason(
    past_attempts: list[PastAttempt], *events: Event, **known: Any
) -> tuple[Outcome, str] | None:
    return give_up_reason(AttemptHistory(attempts=tuple(past_attempts)), events, run="r", **known)


@pytest.mark.parametrize("cause", ["user_code", "unknown"])
def test_five_failed_attempts_in_a_row_end_the_job(cause: str) -> None:
    assert reason(attempts(*[cause] * 4)) is None
    found = reason(attempts(*[cause] * 5))
    assert found is not None and found[0] is Outcome.FAILED
    assert reason(attempts(*[cause] * 4, "reclaimed", cause)) is None
    assert reason(attempts(*[cause] * 5, "ended")) is None
    assert reason(attempts("reclaimed", *[cause] * 5)) is not None


@pytest.mark.parametrize("cause", ["reclaimed", "ended", "terminated"])
def test_a_machine_that_was_lost_or_ended_is_no_failure(cause: str) -> None:
    assert reason(attempts(*[cause] * 9)) is None


@pytest.mark.parametrize(
    ("authors", "stops"),
    [
        (["operator"], True),
        (["ebbflow", "operator"], True),
        (["operator", "ebbflow"], False),
        (["unknown"] * 2, False),
        (["unknown"] * 3, True),
        (["unknown"] * 2 + ["limit", "unknown"], False),
        (["ebbflow"] * 9, False),
        (["limit"] * 9, False),
        ([None] * 9, False),
    ],
)
def test_a_run_ends_when_an_operator_ends_its_attempt(
    authors: list[str | None], stops: bool
) -> None:
    past = [
        replace(attempt, terminated_by=author, job_id="j-1", reason="by Ann")
        for author in authors
        for attempt in attempts("terminated")
    ]
    history = AttemptHistory(attempts=tuple(past))
    found = operator_stop_reason(history, run="r")
    assert bool(found) is stops
    assert not stops or ("j-1" in found and "(by Ann)" in found)
    assert operator_stop_reason(history, run="the next run") == ""


@pytest.mark.parametrize("cause", ["never_started", "terminated"])
def test_attempts_without_a_machine_end_the_job_with_no_capacity(cause: str) -> None:
    never = attempts(*[cause] * 5, started_utc=None)
    assert reason(never[1:]) is None
    found = reason(never)
    assert found is not None and found[0] is Outcome.NO_CAPACITY
    mixed = reason([*never[1:], *attempts("user_code")])
    assert mixed is not None and mixed[0] is Outcome.FAILED


@pytest.mark.parametrize("cause", ["user_code", "not_made"])
def test_two_containers_that_were_never_made_end_the_job(cause: str) -> None:
    never = attempts(cause, cause, started_utc=None)
    assert reason(never[1:]) is None
    found = reason(never)
    assert found is not None and found[0] is Outcome.FAILED
    assert reason([never[0], *attempts(cause)]) is None, "one of them was made"
    assert reason([never[0], *attempts("unknown", started_utc=None)]) is None
    assert reason([never[0], *attempts("never_started", started_utc=None)]) is None


def test_attempts_of_another_run_or_before_a_commit_do_not_count() -> None:
    commit = event(COMMIT, 5.0, generation=3)
    assert reason(attempts(*["unknown"] * 5, run="other")) is None
    assert reason(attempts(*["unknown"] * 5, after_generation=2), commit) is None
    assert reason(attempts(*["unknown"] * 5, after_generation=3), commit) is not None
    assert (
        reason(attempts(*["unknown"] * 5, after_generation=2), event("note", 5.0, generation=3))
        is not None
    )
    commits = [event(COMMIT, 5.0, generation=number) for number in (1, 3, 2)]
    assert reason(attempts(*["unknown"] * 5, after_generation=2), *commits) is None


@pytest.mark.parametrize(
    ("market", "reservation", "counted"),
    [("spot", None, False), ("on_demand", "cr-1", False), ("on_demand", None, True)],
)
def test_refused_spot_does_not_count_if_on_demand_comes(
    market: str, reservation: str | None, counted: bool
) -> None:
    _, placed = chosen()
    there = replace(placed, market=market, reservation=reservation)
    refused = attempts(*["never_started"] * 5, placement=there, started_utc=None)
    assert (reason(refused, on_demand_comes=True) is not None) is counted
    assert reason(refused) is not None
    failed = attempts(*["user_code"] * 5, placement=there)
    assert reason(failed, on_demand_comes=True) is not None


def test_the_message_has_the_causes_and_batchs_last_reason() -> None:
    first, second = attempts("never_started", "user_code", started_utc=None)
    spot = "1 × g5.xlarge spot in queue spot-g5"
    found = reason([first] * 4 + [replace(second, reason="no image")])
    assert found is not None and found[1] == (
        f"5 attempts in a row failed ({spot}: never started, {spot}: user code), and another "
        "would too; the last one: no image"
    )
    found = reason([replace(second, reason="no image")] * 4 + [second])
    assert (
        found is not None
        and found[1] == f"5 attempts in a row failed ({spot}: user code), and another would too"
    )


@pytest.fixture(scope="module")
def _service() -> Iterator[JobService]:
    with serve_jobs() as running:
        yield running
