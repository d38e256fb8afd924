"""Where an attempt runs on AWS Batch: by market, by what ended the one before, by queue, and within
which walls.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ebbflow.core.config.schema import QueueConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import GENERATION_ENDED, NODE_STARTED, NOTICE
from ebbflow.cost.capacity import Placement, choose_placement, read_attempts, with_placement
from ebbflow.cost.capacity.placement import find_offers
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.errors import PlacementError
from ebbflow.infra.batch import ComputeEnvironment, limit_to_queue_region
from ebbflow.infra.batch.jobs import Cause
from ebbflow.infra.batch.queues import declaration_conflict
from tests.support.capacity import BOTH, JobLog, batch_config, placed_now, planned, queue, queues
from tests.support.pools import changed_pool
from tests.support.timelines import WALL, event

HOUR = 3600.0


def test_spot_comes_first_and_fills_its_machine() -> None:
    config = batch_config()
    found = placed_now(config, JobLog(), 0.0)
    assert (found.queue, found.market, found.nodes, found.instance_type) == (
        "spot-g5",
        "spot",
        1,
        "g5.xlarge",
    )
    kind = load_catalogue()["g5.xlarge"]
    assert (found.cpu, found.gpu) == (kind.vcpu, 1)
    assert 0.9 * kind.ram_gib * 1024 < found.memory_mib < 0.95 * kind.ram_gib * 1024
    assert found.runnable_seconds == config.batch.runnable_minutes * 60, "waiting for Spot is free"
    assert Placement.from_json(json.loads(json.dumps(found.to_json(), allow_nan=False))) == found


def test_without_slack_it_is_on_demand_from_the_start() -> None:
    plan = planned(batch_config(), WALL)
    tight = batch_config(
        f"cost.deadline_hours={plan.ranked[0].case.work_hours + 0.7:.3f}", "cluster.market=auto"
    )
    found = placed_now(tight, JobLog(), 0.0)
    assert found.market == "on_demand" and found.queue == "on-demand-g5"
    assert "slack" in found.reason and found.start_by_utc is None


def test_a_reclaimed_job_follows_the_policy_until_the_last_safe_moment() -> None:
    config = batch_config()
    log = JobLog()
    first = placed_now(config, log, 0.0)
    log.told("reclaimed", first, HOUR, started=120.0)
    again = placed_now(config, log, HOUR, share_done=0.05)
    assert again.market == "spot" and "was reclaimed" in again.reason
    log.told("reclaimed", again, 2 * HOUR, started=HOUR + 120)
    work = planned(config, WALL).ranked[0].case.work_hours
    late = (20 - 0.95 * work - 0.7) * HOUR
    last = placed_now(config, log, late, share_done=0.05)
    assert last.market == "on_demand" and "last safe moment" in last.reason


def test_a_bug_stays_where_it_is_even_when_slack_runs_out() -> None:
    config = batch_config()
    log = JobLog()
    first = placed_now(config, log, 0.0)
    log.told("user_code", first, HOUR, started=120.0)
    work = planned(config, WALL).ranked[0].case.work_hours
    for at in (HOUR, (20 - work - 0.7) * HOUR):
        again = placed_now(config, log, at)
        assert again.pool == first.pool and "the user's program" in again.reason
        log.told("user_code", again, at + 60, started=at + 30)


def test_a_bug_whose_queue_is_gone_gets_nothing_dearer() -> None:
    config = batch_config()
    log = JobLog()
    first = placed_now(config, log, 0.0)
    log.told("user_code", first, HOUR, started=120.0)
    closed = queues(
        queue("spot-g5", "spot", ["g5"], usable=False, problem="DISABLED"), BOTH["on-demand-g5"]
    )
    with pytest.raises(PlacementError, match="fix the failure first") as refused:
        placed_now(config, log, HOUR, where=closed)
    assert refused.value.outcome is Outcome.NO_CAPACITY
    other = queues(queue("spot-other", "spot"), *closed.values())
    assert placed_now(config, log, HOUR, where=other).queue == "spot-other"


def test_a_drain_after_a_reclaims_notice_is_no_bug() -> None:
    """Its container left with a code; the agents' events know better."""
    config = batch_config()
    log = JobLog()
    first = placed_now(config, log, 0.0)
    log.events.append(event(NODE_STARTED, 130.0, generation=1, ranks=[0], batch_job_id="job-1"))
    log.events.append(
        event(NOTICE, HOUR - 60, generation=1, source="imds", action="terminate", does="leave")
    )
    log.told("user_code", first, HOUR, started=120.0, job_id="job-1")
    assert read_attempts(log.events).attempts[0].cause == "reclaimed"
    assert "was reclaimed" in placed_now(config, log, HOUR).reason


@pytest.mark.parametrize("told", ["user_code", "unknown"])
@pytest.mark.parametrize(("user_code", "cause"), [(True, "user_code"), (False, "unknown")])
def test_the_agents_know_whether_it_was_the_program(
    user_code: bool, cause: str, told: Cause
) -> None:
    """To Batch a store that is away looks like a bug: a container that left with a code."""
    log = JobLog()
    first = placed_now(batch_config(), log, 0.0)
    log.events.append(event(NODE_STARTED, 130.0, generation=1, ranks=[0], batch_job_id="job-1"))
    log.events.append(
        event(GENERATION_ENDED, 900.0, generation=1, reason="rank_failed", user_code=user_code)
    )
    log.told(told, first, HOUR, started=120.0, job_id="job-1")
    assert read_attempts(log.events).attempts[0].cause == cause
    log.events.append(event(NODE_STARTED, 950.0, generation=2, ranks=[0], batch_job_id="job-1"))
    assert read_attempts(log.events).attempts[0].cause == told, (
        "of what ended the last generation nobody told"
    )


def test_a_pool_that_never_starts_is_left_for_the_next_best() -> None:
    config = batch_config("cluster.instance_types=[g5.xlarge,g6.xlarge]")
    log = JobLog()
    where = queues(queue("spot", "spot"), queue("on-demand", "on_demand"))
    tried = []
    for number in range(4):
        found = placed_now(config, log, number * 0.5 * HOUR, where=where)
        assert found.market == "spot"
        tried.append(found.instance_type)
        log.told("never_started", found, (number + 1) * 0.5 * HOUR, started=None)
    assert tried[0] != tried[1] and tried[:2] == tried[2:], (
        "in turn, the one refused longest ago first"
    )


def test_on_demand_that_never_starts_is_left_for_another_queue() -> None:
    config = batch_config("cluster.market=on_demand")
    log = JobLog()
    where = queues(queue("one", "on_demand"), queue("two", "on_demand"))
    first = placed_now(config, log, 0.0, where=where)
    log.told("never_started", first, 0.5 * HOUR, started=None)
    second = placed_now(config, log, 0.5 * HOUR, where=where)
    assert {first.queue, second.queue} == {"one", "two"}


def test_several_nodes_are_on_demand_and_need_a_queue_that_takes_them() -> None:
    config = batch_config(
        "cluster.nodes=2", "cluster.plan_for=kubernetes", "training.max_steps=20000"
    )
    plan = planned(config, WALL)
    assert any(candidate.market == "spot" for candidate in plan.ranked), (
        "what Kubernetes can run, Batch cannot"
    )
    found = placed_now(config, JobLog(), 0.0)
    assert (found.market, found.nodes) == ("on_demand", 2)
    single = queues(BOTH["spot-g5"], queue("one-node", "on_demand", multi_node=False))
    with pytest.raises(PlacementError) as refused:
        placed_now(config, JobLog(), 0.0, where=single)
    assert refused.value.outcome is Outcome.NO_CAPACITY
    assert "no job of several nodes on Spot" in str(
        refused.value
    ) and "one-node: takes no job" in str(refused.value)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            queue("off", "spot", usable=False, problem="queue off is DISABLED"),
            "off: queue off is DISABLED",
        ),
        (queue("big", "spot", ["p5"]), "big: has p5"),
        (queue("tiny", "spot", fargate=True), "tiny: Fargate"),
        (queue("mixed", None), "mixed: None"),
    ],
)
def test_a_placement_without_a_queue_lists_what_each_queue_lacks(state, words: str) -> None:
    with pytest.raises(PlacementError) as refused:
        placed_now(batch_config(), JobLog(), 0.0, where=queues(state))
    assert refused.value.outcome is Outcome.NO_CAPACITY and words in str(refused.value)


@pytest.mark.parametrize("choice", ["optimal", "default_x86_64", "default_arm64"])
def test_a_queue_with_optimal_instance_types_has_no_gpus(choice: str) -> None:
    """A GPU job would wait there for nothing, also where the configuration claims otherwise."""
    ranked = planned(batch_config(), WALL).ranked
    chosen = queue("any", "spot", [choice])
    named = queue("g5", "spot", ["g5"])
    assert {offer.queue for offer in find_offers(ranked, queues(chosen, named))} == {"g5"}
    both = queue("both", "spot", [choice, "g5"])
    assert {offer.queue for offer in find_offers(ranked, queues(both))} == {"both"}
    with pytest.raises(
        PlacementError, match=f"any: has {choice}: what AWS Batch chooses itself has no GPUs"
    ) as refused:
        placed_now(batch_config(), JobLog(), 0.0, where=queues(chosen))
    assert refused.value.outcome is Outcome.NO_CAPACITY
    assert "is declared to have g5, but has" in declaration_conflict(chosen, declared(["g5"]))
    assert (
        declaration_conflict(chosen, declared(["m6i"]))
        == declaration_conflict(both, declared(["g5"]))
        == ""
    )


def declared(types: list[str]) -> QueueConfig:
    return QueueConfig(name="any", market="spot", instance_types=types)


def test_a_family_is_no_prefix_of_another() -> None:
    with pytest.raises(PlacementError):
        placed_now(batch_config(), JobLog(), 0.0, where=queues(queue("arm", "spot", ["g5g"])))
    config = batch_config("cluster.instance_types=[g5g.xlarge]")
    with pytest.raises(PlacementError):
        placed_now(config, JobLog(), 0.0, where=queues(queue("x86", "spot", ["g5"])))


def test_the_price_is_of_the_region_where_the_queues_are() -> None:
    """Also where only their ARNs tell it: the plan's cheapest pool may be one of elsewhere."""
    config = batch_config()
    plan = planned(config, WALL)
    cheaper = tuple(
        changed_pool(candidate, region="us-west-2", usd_per_hour=candidate.price.usd_per_hour / 2)
        for candidate in plan.ranked
    )
    wide = replace(plan, ranked=(*cheaper, *plan.ranked))
    for region in ("us-east-1", "us-west-2"):
        where = queues(
            queue(
                "spot-g5",
                "spot",
                ["g5"],
                arn=f"arn:aws:batch:{region}:123456789012:job-queue/spot-g5",
            )
        )
        found = choose_placement(
            config, plan=wide, history=read_attempts([]), queues=where, now_utc=WALL
        )
        assert (found.queue, found.region) == ("spot-g5", region)


def test_queues_of_a_region_that_the_plan_does_not_price_get_no_other_regions_price() -> None:
    config = batch_config()
    where = queues(
        queue(
            "spot-g5", "spot", ["g5"], arn="arn:aws:batch:eu-west-1:123456789012:job-queue/spot-g5"
        )
    )
    with pytest.raises(
        PlacementError, match="no pool in eu-west-1, where the queues are"
    ) as refused:
        choose_placement(
            config,
            plan=planned(config, WALL),
            history=read_attempts([]),
            queues=where,
            now_utc=WALL,
        )
    assert refused.value.outcome is Outcome.NO_CAPACITY


@pytest.mark.parametrize(
    ("variables", "region"),
    [
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_REGION": "us-west-2"}, "us-west-2"),
        ({}, None),
    ],
)
def test_the_queues_region_is_the_only_one_that_is_priced(
    variables: dict[str, str], region: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = batch_config("cost.regions=[us-east-1, us-west-2]")
    there = limit_to_queue_region(config)
    assert there.cost.regions == ([region] if region else ["us-east-1", "us-west-2"])
    assert limit_to_queue_region(config, only_if_set=False).batch.region == (region or "us-east-1")
    named = limit_to_queue_region(batch_config("batch.region=ap-south-1"))
    assert (named.cost.regions, named.batch.region) == (["ap-south-1"], "ap-south-1")


def environment(kind: str, most: int | None) -> ComputeEnvironment:
    known = {"managed": True, "usable": True, "problem": ""}
    return ComputeEnvironment(
        name=f"of-{kind}", kind="SPOT", instance_types=(kind,), max_vcpus=most, **known
    )


def test_a_pool_beyond_every_environments_vcpus_would_wait_for_ever() -> None:
    """One environment runs the job, so another's vCPUs, of other machines, are none of its own."""
    small = queue("small", "spot", ["g5"], max_vcpus=2)
    large = queue(
        "small",
        "spot",
        ["g5", "p5"],
        compute_environments=(environment("g5", 2), environment("p5", 192)),
    )
    for state in (small, large):
        with pytest.raises(
            PlacementError, match=r"small: may have 2 vCPUs .* and 1 × g5\.xlarge .* has 4"
        ) as refused:
            placed_now(batch_config(), JobLog(), 0.0, where=queues(state))
        assert refused.value.outcome is Outcome.NO_CAPACITY
        other = queue(
            "other",
            "spot",
            ["g5"],
            compute_environments=(environment("g5", 2), environment("g5", 4)),
        )
        assert (
            placed_now(batch_config(), JobLog(), 0.0, where=queues(state, other)).queue == "other"
        )


def test_a_refused_plan_ends_with_its_own_outcome() -> None:
    config = batch_config("cost.budget_usd=0.01")
    with pytest.raises(PlacementError, match="budget_usd") as refused:
        choose_placement(
            config, plan=planned(config, WALL), history=read_attempts([]), queues=BOTH, now_utc=WALL
        )
    assert refused.value.outcome is Outcome.BUDGET
    late = batch_config("cost.deadline_hours=20")
    with pytest.raises(PlacementError) as refused:
        placed_now(late, JobLog(), 19.9 * HOUR)
    assert refused.value.outcome is Outcome.DEADLINE


def test_the_time_limit_is_what_budget_and_deadline_still_allow() -> None:
    config = batch_config("cost.budget_usd=10", "checkpoint.deadline_seconds=100")
    found = placed_now(config, JobLog(), 0.0, share_done=0.9, spent_usd=9.0)
    assert found.wall_seconds == int(1.0 / found.price.node_usd_float * HOUR)
    by_time = placed_now(batch_config("cost.budget_usd=90"), JobLog(), 15 * HOUR, share_done=0.9)
    assert by_time.wall_seconds == 5 * HOUR + batch_config().checkpoint.deadline_seconds
    without = batch_config("cost.budget_usd=null", "cost.deadline_hours=null")
    assert placed_now(without, JobLog(), 0.0).wall_seconds >= 5 * 24 * HOUR


def test_a_budget_for_on_demand_allows_spot_before_it() -> None:
    usual = next(
        candidate
        for candidate in planned(batch_config(), WALL).ranked
        if candidate.market == "on_demand"
    )
    just = batch_config(f"cost.budget_usd={usual.expected_usd * 1.1:.4f}")
    log = JobLog()
    first = placed_now(just, log, 0.0)
    assert first.market == "spot"
    log.told("reclaimed", first, 4 * HOUR, started=60.0)
    spent = usual.expected_usd * 0.2
    last = placed_now(just, log, 4 * HOUR, share_done=0.09, spent_usd=spent)
    assert last.market == "spot" and "no on-demand pool" in last.reason, (
        "only Spot is cheap enough by now"
    )


def test_without_a_deadline_it_waits_for_spot() -> None:
    config = batch_config("cost.deadline_hours=null")
    log = JobLog()
    for number in range(3):
        found = placed_now(config, log, number * 24 * HOUR)
        assert found.market == "spot"
        log.told("reclaimed", found, (number + 0.5) * 24 * HOUR, started=number * 24 * HOUR + 60)


def test_the_plan_follows_the_placement() -> None:
    config = batch_config("cluster.market=auto")
    plan = planned(config, WALL)
    where = queues(BOTH["on-demand-g5"])
    found = choose_placement(
        config, plan=plan, history=read_attempts([]), queues=where, now_utc=WALL
    )
    followed = with_placement(plan, found)
    assert plan.chosen.market == "spot" and followed.chosen.market == "on_demand"
    assert followed.terms().usd_per_rank_second == pytest.approx(found.price.node_usd_float / 3600)
    assert set(followed.ranked) == set(plan.ranked)
    seconds = config.checkpoint.deadline_seconds
    assert followed.reserve_usd == pytest.approx(
        found.gang_usd_per_hour * (seconds + 300.0) / HOUR
    ), "the save's, where it is, and that of idle machines"
