"""The rule of placement (`cost.capacity.decision`) at each of its edges, with pools of round
figures.
"""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from decimal import Decimal
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.cost.capacity import AttemptHistory, choose_placement
from ebbflow.cost.capacity.decision import LEAST_WALL_SECONDS, RULE, wall_seconds
from ebbflow.cost.capacity.placement import QueueOffer, memory_mib
from ebbflow.cost.errors import PlacementError
from ebbflow.cost.plan.guarantee import DECIDE_HOURS, make_fallback
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.plan.refusal import PlanRefusal
from ebbflow.cost.prices.quote import PoolPrice
from tests.support.capacity import queue, queues
from tests.support.placing import (
    BOTH,
    CATALOGUE,
    HOUR,
    NEEDED_HOURS,
    NEEDED_USD,
    ON_DEMAND_QUEUE,
    SPOT_QUEUE,
    attempt,
    make_plan,
    place,
)
from tests.support.pools import make_config, on_demand_pool, spot_pool
from tests.support.timelines import WALL

FAST = on_demand_pool(
    instance_type="g6.xlarge", work_hours=1.0, paid_hours=1.0, fixed_lost_hours=0.25
)
QUICK_SPOT = spot_pool(work_hours=1.0)

THREE = queues(*(queue(name, "spot", multi_node=True) for name in ("a", "b", "c")), ON_DEMAND_QUEUE)

TWO = queues(SPOT_QUEUE, queue("one", "on_demand"), queue("two", "on_demand"))


def test_a_start_on_spot_is_safe_up_to_the_last_hour_that_on_demand_needs() -> None:
    """It must also leave the time of a wait that is worth it: 5 min, or all of `runnable_minutes`
    if that is less.
    """
    for minutes, wait in ((30.0, DECIDE_HOURS), (3.75, 0.0625)):
        config = make_config(runnable_minutes=minutes)
        needed = NEEDED_HOURS - 0.5 + minutes / 60 + wait
        assert place(config=config, deadline_hours=needed + 1e-6).market == "spot"
        late = place(config=config, deadline_hours=needed - 1e-6)
        assert late.market == "on_demand"
    assert place(config=config, deadline_hours=needed).market == "spot", "just enough"
    assert place(config=config, deadline_hours=needed + 2, now_utc=WALL + 2 * HOUR).market == "spot"
    assert (
        place(config=config, deadline_hours=needed + 2, now_utc=WALL + 2 * HOUR + 1).market
        == "on_demand"
    )
    assert (
        late.reason == "on-demand at the last safe moment: a start of Spot needs 0.02 h more slack"
    )
    assert (late.runnable_seconds, late.start_by_utc, late.fallback, late.policy) == (
        225,
        None,
        None,
        RULE,
    )


def test_a_start_on_spot_is_safe_up_to_the_last_dollar_that_on_demand_needs() -> None:
    assert place(budget_usd=NEEDED_USD).market == "spot"
    dear = place(budget_usd=NEEDED_USD - 1 / 64)
    assert dear.market == "on_demand"
    assert dear.reason == "on-demand: a start of Spot needs $0.0156 more than the budget has left"
    assert place(budget_usd=NEEDED_USD + 2, spent_usd=2.0).market == "spot"
    assert place(budget_usd=NEEDED_USD + 2, spent_usd=2.0 + 1 / 64).market == "on_demand"
    assert place(budget_usd=None, spent_usd=1e6).market == "spot"


def test_an_attempt_on_spot_waits_and_starts_as_late_as_is_safe() -> None:
    found = place(deadline_hours=NEEDED_HOURS + 0.25)
    assert found.runnable_seconds == 900
    assert found.start_by_utc == WALL + (0.25 + 0.25) * HOUR
    assert found.reason == "Spot while a start is safe (0.25 h more than the reserve)"
    assert found.policy == RULE
    assert found.fallback == asdict(
        make_fallback(make_config(), spot_pool(), on_demand_pool(), steps=1000)
    )
    ample = place(deadline_hours=NEEDED_HOURS + 3.0)
    assert (ample.runnable_seconds, ample.start_by_utc) == (1800, WALL + 3.25 * HOUR)


def test_a_wait_is_rounded_up_to_seconds() -> None:
    assert place(deadline_hours=NEEDED_HOURS + 0.25 + 1 / 8192).runnable_seconds == 901


def test_the_reason_names_the_spot_pool_with_the_most_slack() -> None:
    slow = spot_pool(instance_type="g6.xlarge", start_hours=1.0)
    found = place(
        [slow, spot_pool(), on_demand_pool()], deadline_hours=NEEDED_HOURS - 0.5 + DECIDE_HOURS
    )
    assert found.reason.endswith("needs 0.50 h more slack")


def test_without_a_deadline_or_an_on_demand_pool_spot_is_taken_unguarded() -> None:
    free = place(deadline_hours=None, budget_usd=1.0)
    alone = place([spot_pool()], deadline_hours=0.5)
    assert free.reason == "no deadline: Spot"
    assert alone.reason == "no on-demand pool within queues, deadline and budget: Spot only"
    for placement in (free, alone):
        assert (placement.market, placement.policy, placement.fallback, placement.start_by_utc) == (
            "spot",
            RULE,
            None,
            None,
        )
        assert placement.runnable_seconds == 1800


def test_without_a_spot_pool_it_is_on_demand_also_without_a_deadline() -> None:
    for deadline in (None, 20.0):
        found = place([on_demand_pool()], deadline_hours=deadline)
        assert found.market == "on_demand"
        assert found.reason == "on-demand: no usable queue runs a Spot pool of the plan"


def test_a_faster_last_resort_may_cost_a_quarter_more_if_only_it_makes_spot_safe() -> None:
    pools = [QUICK_SPOT, on_demand_pool(), FAST]
    # With the fast one; with the usual one, 3.25 h more
    needed = 0.5 + 1.25 + 0.125 + 2 * 0.25 + 1.0625
    for expected, market in ((50.0, "spot"), (50.1, "on_demand")):
        dear = replace(FAST, expected_usd=expected)
        found = place([QUICK_SPOT, on_demand_pool(), dear], deadline_hours=needed + 1)
        assert found.market == market
    ample = place(pools, deadline_hours=20.0)
    usual = make_fallback(make_config(), QUICK_SPOT, on_demand_pool(), steps=1000)
    assert ample.fallback == asdict(usual), "the plan's first one, if that suffices"
    guarded = place(
        [QUICK_SPOT, on_demand_pool(), replace(FAST, expected_usd=50.0)], deadline_hours=needed + 1
    )
    assert guarded.fallback == asdict(make_fallback(make_config(), QUICK_SPOT, FAST, steps=1000))
    slow = spot_pool(instance_type="g6.xlarge", work_hours=12.0)
    one_of_two = place([slow, QUICK_SPOT, on_demand_pool(), FAST], deadline_hours=needed + 1)
    assert (one_of_two.market, one_of_two.instance_type) == ("spot", "g5.xlarge"), (
        "it need not be safe for all"
    )
    dearest = place([spot_pool(), on_demand_pool(), FAST], deadline_hours=1.0)
    assert (dearest.market, dearest.instance_type) == ("on_demand", "g5.xlarge")


def test_one_safe_spot_pool_suffices_and_an_unsafe_one_before_it_is_passed_over() -> None:
    slow = spot_pool(instance_type="g6.xlarge", work_hours=12.0)
    found = place([slow, spot_pool(), on_demand_pool()], deadline_hours=NEEDED_HOURS + 1)
    assert (found.market, found.instance_type) == ("spot", "g5.xlarge")
    assert (
        place([slow, spot_pool(), on_demand_pool()], deadline_hours=NEEDED_HOURS + 9).instance_type
        == "g6.xlarge"
    )


@pytest.mark.parametrize(
    ("past", "chosen"),
    [
        ([], "a"),
        ([("reclaimed", "a")], "b"),
        ([("never_started", "a")], "b"),
        ([("terminated", "a")], "b"),
        ([("ended", "a")], "a"),
        ([("unknown", "a")], "a"),
        ([("reclaimed", "a"), ("reclaimed", "b")], "c"),
        ([("reclaimed", "a"), ("never_started", "b"), ("reclaimed", "c")], "a"),
        ([("reclaimed", "b"), ("never_started", "c"), ("reclaimed", "a")], "b"),
        ([("reclaimed", "a"), ("reclaimed", "b"), ("reclaimed", "c"), ("unknown", "b")], "b"),
        ([("reclaimed", "a"), ("reclaimed", "b"), ("reclaimed", "c"), ("reclaimed", "a")], "b"),
    ],
)
def test_spot_pools_that_lacked_capacity_or_were_reclaimed_come_last_the_oldest_first(
    past: list[tuple[str, str]], chosen: str
) -> None:
    attempts = [
        attempt(
            cause,
            at=60.0 * number,
            queue=name,
            started=cause not in ("never_started", "terminated"),
        )
        for number, (cause, name) in enumerate(past)
    ]
    assert place(where=THREE, past=attempts, now_utc=WALL + HOUR).queue == chosen


@pytest.mark.parametrize(
    ("past", "chosen"),
    [
        ([], "one"),
        ([("never_started", "one")], "two"),
        ([("never_started", "two")], "one"),
        ([("never_started", "one"), ("never_started", "two")], "one"),
        ([("never_started", "one"), ("never_started", "spot")], "two"),
        ([("never_started", "one"), ("reclaimed", "spot")], "one"),
        ([("reclaimed", "one")], "one"),
    ],
)
def test_an_on_demand_pool_without_capacity_in_the_latest_attempts_is_left_out_while_there_is_another(
    past: list[tuple[str, str]], chosen: str
) -> None:
    attempts = [
        attempt(cause, at=60.0 * number, queue=name, started=cause != "never_started")
        for number, (cause, name) in enumerate(past)
    ]
    assert place(where=TWO, past=attempts, deadline_hours=6.0, now_utc=WALL + 600).queue == chosen


def test_the_reason_begins_with_the_end_of_the_last_attempt() -> None:
    ends = {
        "reclaimed": "was reclaimed",
        "never_started": "had no capacity",
        "not_made": "had capacity, and no container in time",
        "terminated": "was terminated",
        "ended": "ended",
        "unknown": "ended for an unknown reason",
    }
    name = "2 × g5.xlarge spot in queue spot"
    for cause, text in ends.items():
        past = [attempt("reclaimed"), attempt(cause, at=60.0)]
        for values in ({}, {"deadline_hours": None}, {"deadline_hours": 5.0}):
            assert place(past=past, now_utc=WALL + 60, **values).reason.startswith(
                f"{name} {text}; "
            )


def test_a_decision_takes_the_latest_time_that_batch_reported_if_the_clock_was_set_back() -> None:
    past = [attempt("reclaimed", at=2 * HOUR)]
    deadline = NEEDED_HOURS + 2.25
    found = place(past=past, deadline_hours=deadline, now_utc=WALL)
    assert (found.runnable_seconds, found.start_by_utc) == (900, WALL + 2.5 * HOUR)


def test_a_refused_plan_is_not_placed() -> None:
    refusal = PlanRefusal(outcome=Outcome.BUDGET, message="too dear", hint="raise it")
    plan = replace(make_plan([spot_pool(), on_demand_pool()]), refusal=refusal)
    with pytest.raises(PlacementError, match=r"^too dear \(raise it\)$") as refused:
        choose_placement(
            make_config(), plan=plan, history=AttemptHistory(), queues=BOTH, now_utc=WALL
        )
    assert refused.value.outcome is Outcome.BUDGET


def test_without_an_offer_the_message_counts_queues_and_pools_and_explains_each_queue() -> None:
    where = queues(queue("off", "spot", usable=False, problem="is DISABLED"))
    with pytest.raises(PlacementError) as refused:
        place(where=where)
    assert refused.value.outcome is Outcome.NO_CAPACITY
    assert str(refused.value) == (
        "none of 1 queues can run any of the plan's 2 pools: off: is DISABLED; fix: "
        "batch.queues, or cluster.instance_types, cluster.nodes and cluster.market"
    )


def test_the_catalogue_and_the_region_of_the_call_decide_which_queues_can_run_a_pool() -> None:
    config = make_config().changed("batch", region="eu-west-1")
    plan = make_plan([spot_pool()])
    known = {"plan": plan, "history": AttemptHistory(), "queues": BOTH, "now_utc": WALL}
    with pytest.raises(PlacementError, match="no pool in eu-west-1, where the queues are"):
        choose_placement(config, **known)
    shipped = choose_placement(make_config(), **known)
    kind = replace(CATALOGUE["g5.xlarge"], vcpu=99, ram_gib=64.0)
    changed = replace(CATALOGUE, types=(kind,))
    other = choose_placement(make_config(), catalogue=changed, **known)
    assert (shipped.cpu, other.cpu) == (4, 99)
    assert (shipped.memory_mib, other.memory_mib) == (
        memory_mib(CATALOGUE["g5.xlarge"]),
        memory_mib(kind),
    )
    small = queues(queue("spot", "spot", multi_node=True, max_vcpus=100))
    with pytest.raises(PlacementError, match=r"may have 100 vCPUs .* has 198"):
        choose_placement(make_config(), catalogue=changed, **{**known, "queues": small})


def test_a_placement_has_the_pool_its_machines_and_its_forecast() -> None:
    pool = spot_pool(
        processes_per_node=1,
        price=PoolPrice(usd_per_hour=Decimal("1.50"), kind="live"),
        expected_hours=9.5,
        zone="use1-az1",
        expected_usd=30.5,
    )
    found = place([pool, on_demand_pool()])
    kind = CATALOGUE["g5.xlarge"]
    assert found.to_json() == {
        "queue": "spot",
        "market": "spot",
        "instance_type": "g5.xlarge",
        "region": "us-east-1",
        "node_selector": None,
        "zone": "use1-az1",
        "nodes": 2,
        "processes_per_node": 1,
        "cpu": kind.vcpu,
        "gpu": 1,
        "memory_mib": memory_mib(kind),
        "wall_seconds": math.floor(20 * HOUR + 450),
        "runnable_seconds": 1800,
        "usd_per_hour": 1.5,
        "quoted_usd_per_hour": "1.50",
        "volume_usd_per_hour": "0",
        "price_kind": "live",
        "expected_hours": 9.5,
        "expected_usd": 30.5,
        "reason": "Spot while a start is safe (9.31 h more than the reserve)",
        "policy": "spot_first",
        "start_by_utc": WALL + (9.3125 + 0.25) * HOUR,
        "reservation": None,
        "fallback": asdict(make_fallback(make_config(), pool, on_demand_pool(), steps=1000)),
    }


@pytest.mark.parametrize(
    ("kind", "ranks", "gpus"),
    [("g5.xlarge", 4, 1), ("g5.12xlarge", 4, 4), ("g5.12xlarge", 2, 2)],
)
def test_a_placement_asks_for_a_gpu_per_rank_but_for_no_more_than_there_are(
    kind: str, ranks: int, gpus: int
) -> None:
    pool = spot_pool(instance_type=kind, processes_per_node=ranks)
    assert place([pool]).gpu == gpus


def wall(
    pool: Candidate, *, config: RunConfig | None = None, now_utc: float = WALL, **values: Any
) -> int:
    plan = make_plan([pool], **values)
    return wall_seconds(
        config or make_config(), plan, QueueOffer(candidate=pool, queue="q"), now_utc
    )


@pytest.mark.parametrize(
    ("pool", "values", "seconds"),
    [
        # 6 of $10 at $3 per hour, and 1 h to the deadline with 450 s for a last save: the lesser
        # one.
        ({}, {"budget_usd": 10.0, "spent_usd": 4.0, "deadline_hours": None}, 7200),
        ({}, {"budget_usd": 10.0, "spent_usd": 7.0, "deadline_hours": None}, 3600),
        (
            {"usd_per_hour": 3.0},
            {"budget_usd": 10.0, "spent_usd": 4.0, "deadline_hours": None},
            3600,
        ),
        ({}, {"budget_usd": None, "deadline_hours": 3.0, "now_utc": WALL + 7200}, 3600 + 450),
        (
            {},
            {"budget_usd": None, "deadline_hours": 3.0, "started_utc": WALL + 60},
            3 * 3600 + 60 + 450,
        ),
        ({}, {"budget_usd": 10.0, "spent_usd": 4.0, "deadline_hours": 1.0}, 3600 + 450),
        ({}, {"budget_usd": 3.0, "deadline_hours": 5.0}, 3600),
        (
            {"ends_utc": WALL + 5000},
            {"budget_usd": None, "deadline_hours": 5.0, "now_utc": WALL + 1000},
            4000,
        ),
        ({"ends_utc": WALL + 5000}, {"budget_usd": None, "deadline_hours": None}, 5000),
        # A free reservation has no limit by the budget; the least and the most, and whole seconds.
        ({"usd_per_hour": 0.0}, {"budget_usd": 1.0, "deadline_hours": 1.0}, 3600 + 450),
        ({"usd_per_hour": 0.25}, {"budget_usd": 1.0, "deadline_hours": None}, 7200),
        ({}, {"budget_usd": 0.001, "deadline_hours": None}, 60),
        ({}, {"budget_usd": 1e9, "deadline_hours": None}, 2**31 - 1),
        ({"ends_utc": WALL + 99.75}, {"budget_usd": None, "deadline_hours": None}, 99),
        # Without any limit: 4 times the expected hours, and 5 days at least.
        ({"expected_hours": 31.0}, {"budget_usd": None, "deadline_hours": None}, 124 * 3600),
        ({"expected_hours": 2.0}, {"budget_usd": None, "deadline_hours": None}, 120 * 3600),
    ],
)
def test_the_time_limit_of_an_attempt_is_the_least_of_budget_deadline_and_reservation(
    pool: dict[str, float], values: dict[str, Any], seconds: int
) -> None:
    assert wall(spot_pool(**pool), **values) == seconds
    assert LEAST_WALL_SECONDS == 60


def test_after_a_bug_the_job_stays_in_its_pool() -> None:
    pools = [spot_pool(), on_demand_pool()]
    for started, how in (
        (True, "was ended by the user's program"),
        (False, "got no container: is its image missing?"),
    ):
        past = [attempt("user_code", queue="on-demand", market="on_demand", started=started)]
        found = place(pools, past=past)
        assert (found.queue, found.policy, found.fallback) == ("on-demand", "", None)
        assert found.reason == (
            f"stays on 2 × g5.xlarge on-demand in queue on-demand: the previous attempt {how}; "
            "other capacity would not help"
        )
        assert (found.runnable_seconds, found.start_by_utc) == (1800, None)
    assert (
        place(pools, past=[attempt("user_code", queue="on-demand"), attempt("reclaimed")]).policy
        == RULE
    )


def test_after_a_bug_a_lost_pool_is_followed_by_none_that_costs_more() -> None:
    # The lost pool cost $3 per hour; the pools of the plan cost $3 on Spot and $4 on demand.
    past = [attempt("user_code", queue="closed", usd_per_hour=1.5)]
    found = place([on_demand_pool(), spot_pool()], past=past)
    assert found.queue == "spot"
    assert found.reason == (
        "2 × g5.xlarge spot in queue closed is no longer available; spot/2xg5.xlarge costs no "
        "more, as required after a failure of the program"
    )
    with pytest.raises(PlacementError) as refused:
        place(past=[attempt("user_code", queue="closed", usd_per_hour=1.25, started=False)])
    assert refused.value.outcome is Outcome.NO_CAPACITY
    assert str(refused.value) == (
        "the previous attempt, on 2 × g5.xlarge spot in queue closed, got no container: is its "
        "image missing?; this pool is no longer available, and all other pools cost more than "
        "its $2.5000/h: fix the failure first"
    )
