"""Other places to buy: capacity reservations, Capacity Blocks, several regions, and Spot placement
scores.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from botocore.session import Session
from botocore.stub import Stubber

from ebbflow.core.config.problems import ConfigError
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store.s3 import aws_settings
from ebbflow.core.terms import Fallback, Terms
from ebbflow.cost.capacity import choose_placement, read_attempts, with_placement
from ebbflow.cost.plan.candidates import JobProgress
from ebbflow.cost.plan.guarantee import DECIDE_HOURS, finish_hours
from ebbflow.cost.plan.plan import Plan, make_plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.cost.prices.quote import Quote, StaticPrices
from ebbflow.cost.prices.reservations import CapacityEvidence, Reservation, open_evidence
from ebbflow.flows.decorators import set_region
from ebbflow.infra.batch import limit_to_queue_region
from tests.support.capacity import BOTH, JobLog, batch_config, queue, queues
from tests.support.virtual_batch import BEGAN_UTC, HOUR, VirtualBatch

NOW = datetime.fromtimestamp(BEGAN_UTC, UTC)
HELD = (
    "{id: cr-1, instance_type: g5.xlarge, instances: 2, region: us-east-1, zone: use1-az4, "
    "usd_per_hour: 0}"
)
QUEUES = (
    "batch.queues=[{name: spot-g5, market: spot}, {name: on-demand-g5, market: on_demand}, "
    "{name: held, market: on_demand, reservation: cr-1}]"
)
WHERE = queues(*BOTH.values(), queue("held", "on_demand", ["g5"], reservation="cr-1"))

SPOT_AND_HELD = queues(BOTH["spot-g5"], WHERE["held"])

LIVE = ("cost.prices=live", "cluster.market=on_demand")

TWO_REGIONS = (
    "batch.queues=[{name: spot-g5, market: spot}, {name: on-demand-g5, market: on_demand}, "
    "{name: far-spot, market: spot, region: us-west-2}]"
)


class TwoRegions(StaticPrices):
    """The table of us-east-1 for both regions, at half the Spot price in us-west-2."""

    def _there(self, quote: Quote | None, region: str, factor: Decimal) -> Quote | None:
        return quote and replace(quote, region=region, usd_per_hour=quote.usd_per_hour * factor)

    def spot(self, kind: Any, region: str) -> Any:
        if region == "us-west-2":
            half = Decimal("0.5")
        else:
            half = Decimal(1)
        return tuple(
            filter(
                None,
                (
                    self._there(spot_price, region, half)
                    for spot_price in super().spot(kind, "us-east-1")
                ),
            )
        )

    def on_demand(self, kind: Any, region: str) -> Any:
        return self._there(super().on_demand(kind, "us-east-1"), region, Decimal(1))


def utc(hours: float) -> str:
    return (NOW + timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%SZ")


def held_config(*more: str, reservation: str = HELD) -> RunConfig:
    return batch_config(
        QUEUES, f"cost.reservations=[{reservation}]", "batch.runnable_minutes=20", *more
    )


def place(config: RunConfig, plan: Plan, log: JobLog | None = None, at: float = 0.0) -> Any:
    history = read_attempts((log or JobLog()).events)
    return choose_placement(
        config, plan=plan, history=history, queues=WHERE, now_utc=BEGAN_UTC + at
    )


def test_a_paid_reservation_comes_first_and_a_refused_one_gives_way_to_spot() -> None:
    config = held_config()
    log = JobLog()
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=WHERE)
    assert str(plan.chosen).endswith("on-demand in use1-az4 (reservation cr-1)")
    volume_usd = float(plan.chosen.price.volume_usd_per_hour)
    # Its volume is paid for while the machine runs
    assert plan.chosen.price.usd_per_hour == 0 < volume_usd
    assert plan.chosen.compute_usd == pytest.approx(volume_usd * plan.chosen.paid_hours, rel=0.1)
    other_usd = plan.chosen.storage_usd + plan.chosen.transfer_usd
    assert plan.chosen.expected_usd == pytest.approx(plan.chosen.compute_usd + other_usd)
    assert (
        plan.live is not None
        and plan.live.on_demand_share == 1.0
        and plan.live.mean_usd == pytest.approx(plan.chosen.expected_usd)
    )
    found = place(config, plan)
    assert (found.queue, found.reservation, found.fallback) == ("held", "cr-1", None)
    assert with_placement(plan, found).chosen == plan.chosen
    assert type(found).from_json(found.to_json()) == found
    assert Plan.from_json(plan.to_json()).chosen == plan.chosen
    log.placed(found, 0.0)
    log.told("never_started", found, 1200.0, started=None)
    assert place(config, plan, log, 1201.0).market == "spot"


def test_a_dear_reservation_is_no_reason_to_leave_spot_and_none_runs_without_its_queue() -> None:
    dear = held_config(reservation=HELD.replace("usd_per_hour: 0", "usd_per_hour: 9"))
    assert place(dear, make_plan(dear, now_utc=BEGAN_UTC, queues=WHERE)).market == "spot"
    plan = make_plan(held_config(), now_utc=BEGAN_UTC, queues=BOTH)
    assert all(candidate.reservation is None for candidate in plan.ranked)
    assert any(
        "is not of cr-1" in rejection.reason for rejection in plan.rejected if rejection.reservation
    )


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (f", end: {utc(2)!r}", "reservation cr-1 ends in 2 h"),
        (f", end: {utc(-1)!r}", "reservation cr-1 ended"),
    ],
)
def test_a_reservation_that_ends_too_early_is_rejected(given: str, why: str) -> None:
    config = held_config(reservation=HELD.replace("}", f"{given}}}"))
    rejected = [
        rejection
        for rejection in make_plan(config, now_utc=BEGAN_UTC, queues=WHERE).rejected
        if rejection.reservation
    ]
    assert len(rejected) == 1 and why in rejected[0].reason


def test_a_stored_plan_without_the_seconds_of_its_reserve_keeps_the_reserve() -> None:
    config = batch_config(
        "cluster.plan_for=kubernetes"
    )  # no plan of that time reserved idle machines
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=queues(*BOTH.values()))
    stored = {key: value for key, value in plan.to_json().items() if key != "reserve_seconds"}
    assert Plan.from_json(json.loads(json.dumps(stored))).reserve_seconds == pytest.approx(
        plan.reserve_seconds
    )
    assert plan.reserve_seconds > 0


def test_a_reservation_must_leave_time_to_finish_and_save_before_its_end() -> None:
    alone = "batch.queues=[{name: held, market: on_demand, reservation: cr-1}]"
    hours = (
        make_plan(held_config(alone), now_utc=BEGAN_UTC, queues=queues(WHERE["held"]))
        .ranked[0]
        .expected_hours
    )
    found = {}
    for spare in (0.005, 0.1, 1.0):
        held = HELD.replace("}", f", end: {utc(hours + spare)!r}}}")
        config = held_config(alone, "cost.deadline_hours=20", reservation=held)
        found[spare] = make_plan(config, now_utc=BEGAN_UTC, queues=queues(WHERE["held"])).refusal
    assert found[0.005] is not None and found[0.1] is not None and found[1.0] is None
    assert f"ends in {hours + 0.1:.2f} h" in found[0.1].message and "ends later" in found[0.1].hint
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=queues(WHERE["held"]))
    here = make_plan(config, now_utc=BEGAN_UTC, queues=queues(WHERE["held"]), simulated=True)
    assert plan.terms().end_utc is not None and here.terms().end_utc is None, (
        "this machine is in no reservation"
    )
    # With on-demand queues, the wait for a reservation ends while it still has time for the work.
    for spare in (0.1, 0.2, 0.6):
        config = held_config(reservation=HELD.replace("}", f", end: {utc(hours + spare)!r}}}"))
        placed = place(config, make_plan(config, now_utc=BEGAN_UTC, queues=WHERE))
        assert (placed.reservation is None) == (spare < 0.15), placed
        if placed.reservation is not None:
            assert placed.runnable_seconds / 3600 <= spare


def test_a_block_that_begins_later_is_waited_for_if_the_deadline_allows() -> None:
    later = HELD.replace("}", f", start: {utc(6)!r}, end: {utc(30)!r}}}")
    config = held_config(reservation=later)
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=WHERE)
    found = place(config, plan)
    assert found.queue == "held" and found.runnable_seconds == pytest.approx(6 * HOUR + 1200, abs=2)
    assert found.wall_seconds <= 30 * HOUR
    assert (
        plan.chosen.expected_hours > 6
        and plan.chosen.outlook.p50_hours > 6 + plan.chosen.paid_hours * 0.6
    )
    soon = held_config("cost.deadline_hours=9", reservation=later)
    assert place(soon, make_plan(soon, now_utc=BEGAN_UTC, queues=WHERE)).market == "spot"


def test_an_attempt_on_spot_moves_when_a_paid_block_begins_that_was_too_far_to_wait_for() -> None:
    block = HELD.replace("}", f", start: {utc(1.5)!r}, end: {utc(30)!r}}}")
    config = held_config("cost.deadline_hours=5.2", reservation=block)
    course = VirtualBatch([True], queues=WHERE).run(config)
    assert [decision.reservation for _, decision, _ in course.decisions] == [None, "cr-1"]
    first = course.decisions[0][1]
    assert (
        first.market == "spot"
        and first.fallback["move_to"] == "cr-1"
        and "saves about $" in first.reason
    )
    assert course.finished is not None and course.finished <= 5.2 * HOUR
    stayed = VirtualBatch([True], queues=BOTH).run(
        batch_config("cost.deadline_hours=5.2", "batch.runnable_minutes=20")
    )
    assert course.usd < 0.7 * stayed.usd, "half of the work is done in the block, which is paid"
    for other in ("usd_per_hour: 9", "start"):
        if other != "start":
            changed = block.replace("usd_per_hour: 0", other)
        else:
            changed = block.replace(utc(1.5), utc(4.5))
        config = held_config("cost.deadline_hours=5.2", reservation=changed)
        found = place(config, make_plan(config, now_utc=BEGAN_UTC, queues=WHERE))
        assert found.market == "spot" and found.fallback["move_utc"] is None, (
            "dearer, or after the end of the job"
        )


def held_only(*more: str, reservation: str = HELD) -> tuple[RunConfig, Plan]:
    """A job that has Spot and a reservation, and no on-demand queue."""
    names = (
        "batch.queues=[{name: spot-g5, market: spot}, {name: held, market: on_demand, "
        "reservation: cr-1}]"
    )
    config = held_config(names, *more, reservation=reservation)
    return config, make_plan(
        config, now_utc=BEGAN_UTC, queues=SPOT_AND_HELD, progress=JobProgress(started_utc=BEGAN_UTC)
    )


def test_without_on_demand_queues_the_reservation_guards_the_deadline() -> None:
    dear = HELD.replace("usd_per_hour: 0", "usd_per_hour: 0.9")
    config, plan = held_only("cost.deadline_hours=8", reservation=dear)
    log = JobLog()
    known = {"plan": plan, "queues": SPOT_AND_HELD}
    first = choose_placement(config, history=read_attempts([]), now_utc=BEGAN_UTC, **known)
    assert first.market == "spot" and first.fallback["guards"] and first.fallback["seconds"] > 1200
    course = VirtualBatch([True] + [False] * 4, queues=SPOT_AND_HELD, slowest=True).run(config)
    assert course.decisions[-1][1].reservation == "cr-1" and course.finished <= 8 * HOUR
    assert plan.live.deadline_probability > 0.95, "kept, as the plan said"
    late = {"now_utc": BEGAN_UTC + 4 * HOUR, **known}
    full = choose_placement(config, history=read_attempts([]), **late)
    assert full.reservation == "cr-1"
    log.placed(full, 4.0 * HOUR)
    log.told("never_started", full, 4.1 * HOUR, started=None)
    other = choose_placement(config, history=read_attempts(log.events), **late)
    assert other.market == "spot" and other.fallback is None, (
        "it was full, and there is nothing else"
    )
    log.placed(other, 4.1 * HOUR)
    log.told("never_started", other, 4.2 * HOUR, started=None)
    assert (
        choose_placement(config, history=read_attempts(log.events), **late).reservation == "cr-1"
    ), "in turn"


def test_spot_and_a_block_without_on_demand_queues_wait_or_move() -> None:
    block = HELD.replace("}", f", start: {utc(3)!r}, end: {utc(30)!r}}}")
    config, plan = held_only("cost.deadline_hours=8", reservation=block)
    found = choose_placement(
        config, plan=plan, history=read_attempts([]), queues=SPOT_AND_HELD, now_utc=BEGAN_UTC
    )
    assert found.reservation == "cr-1" and found.runnable_seconds == pytest.approx(
        3 * HOUR + 1200, abs=2
    )
    soon = HELD.replace("}", f", start: {utc(1.5)!r}, end: {utc(30)!r}}}")
    for limit, block in (
        (5, soon),
        (None, HELD.replace("}", f", start: {utc(1)!r}, end: {utc(4.4)!r}}}")),
    ):
        config, plan = held_only(f"cost.deadline_hours={limit or 'null'}", reservation=block)
        found = choose_placement(
            config, plan=plan, history=read_attempts([]), queues=SPOT_AND_HELD, now_utc=BEGAN_UTC
        )
        assert found.market == "spot" and "moves to reservation cr-1" in found.reason, (
            "too late, or too short, for all"
        )
        assert not found.fallback["guards"] and found.fallback["move_end_utc"]
        course = VirtualBatch([True], queues=SPOT_AND_HELD).run(config)
        assert [decision.reservation for _, decision, _ in course.decisions] == [None, "cr-1"]


def test_a_move_needs_the_block_as_ec2_knows_it_and_time_until_its_end() -> None:
    block = HELD.replace("}", f", start: {utc(1.5)!r}, end: {utc(30)!r}}}")
    config = held_config("cost.deadline_hours=5.2", reservation=block)
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=WHERE)
    known = Reservation.of(config.cost.reservations[0])
    for held, moves in (
        (known, True),
        (replace(known, problem="is expired"), False),
        (replace(known, start_utc=BEGAN_UTC + 5 * HOUR), False),
        (replace(known, end_utc=BEGAN_UTC + 3 * HOUR), False),
    ):
        asked = {"history": read_attempts([]), "queues": WHERE, "now_utc": BEGAN_UTC}
        found = choose_placement(config, plan=plan, held=[held], **asked)
        assert (found.fallback["move_utc"] is not None) is moves, held
    reserve = Fallback(
        seconds=1800,
        restart_seconds=0,
        restart_usd=0,
        step_seconds=1,
        usd=0,
        step_usd=0,
        guards=False,
    )
    terms = Terms(
        usd_per_rank_second=0,
        deadline_utc=BEGAN_UTC,
        fallback=replace(reserve, move_utc=0, move_to="cr-1"),
    )
    assert terms.why_leave(0, spent_usd=0, now_utc=BEGAN_UTC) == "", (
        "without a guarantee it goes on"
    )
    assert "reservation cr-1" in terms.why_leave(
        100, spent_usd=0, now_utc=BEGAN_UTC - 1800 - 100 - 900
    )
    assert terms.why_leave(100, spent_usd=0, now_utc=BEGAN_UTC - 1800 - 100 - 899) == ""
    ends = replace(terms, fallback=replace(terms.fallback, move_end_utc=BEGAN_UTC - HOUR))
    assert ends.why_leave(100, spent_usd=0, now_utc=BEGAN_UTC - HOUR - 2000) == "", (
        "the block ends too soon"
    )
    later = Fallback(
        **{
            **asdict(reserve),
            "guards": True,
            "begin_utc": BEGAN_UTC - HOUR,
            "end_utc": BEGAN_UTC - 1500,
        }
    )
    guarded = replace(terms, fallback=later)
    assert "0.69 h" in guarded.why_leave(400, spent_usd=0, now_utc=BEGAN_UTC - HOUR - 300), (
        "2200 of 2100 s"
    )
    assert guarded.why_leave(0, spent_usd=0, now_utc=BEGAN_UTC - HOUR - 5000) == ""


def test_a_free_reservation_in_the_plan_leaves_an_attempt_on_spot_its_reserve() -> None:
    block = HELD.replace("}", f", start: {utc(3)!r}}}")
    config = held_config("cost.deadline_hours=9", "cost.volume_gib_per_node=0", reservation=block)
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=WHERE)
    assert plan.chosen.reservation and plan.reserve_usd == 0
    spot = choose_placement(
        config, plan=plan, history=read_attempts([]), queues=BOTH, now_utc=BEGAN_UTC
    )
    terms = with_placement(plan, spot).terms()
    seconds = config.checkpoint.deadline_seconds
    assert spot.market == "spot" and terms.reserve_usd == pytest.approx(
        spot.gang_usd_per_hour * (seconds + 300.0) / HOUR
    )
    assert plan.terms().reserve_seconds == terms.reserve_seconds == seconds
    assert Plan.from_json(plan.to_json()).reserve_seconds == seconds
    found = choose_placement(
        config, plan=plan, history=read_attempts([]), queues=WHERE, now_utc=BEGAN_UTC
    )
    last = next(
        candidate
        for candidate in plan.ranked
        if candidate.market == "on_demand" and not candidate.reservation
    )
    left = 9 - finish_hours(config, last) - found.runnable_seconds / HOUR
    assert found.reservation and left >= DECIDE_HOURS - 1 / HOUR, (
        "time to place again after a wait in vain"
    )


def test_the_guarantee_counts_on_plain_on_demand_not_on_a_reservation_that_may_be_full() -> None:
    work = make_plan(held_config(), now_utc=BEGAN_UTC, queues=WHERE).ranked[-1].case.work_hours
    tight = held_config(f"cost.deadline_hours={work + 0.3:.3f}", "batch.runnable_minutes=60")
    refused = make_plan(tight, now_utc=BEGAN_UTC, queues=WHERE).refusal
    assert refused is not None and "(reservation" not in refused.message


def ec2(*answers: tuple[str, dict[str, Any]], error: str = "") -> Any:
    client = Session().create_client(
        "ec2", region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    stub = Stubber(client)
    for operation, answer in answers:
        stub.add_response(operation, answer)
    if error:
        stub.add_client_error("get_spot_placement_scores", error, http_status_code=403)
    stub.activate()
    return client


def test_ec2_corrects_the_configured_reservation() -> None:
    block = {
        "InstanceType": "g5.xlarge",
        "TotalInstanceCount": 4,
        "AvailableInstanceCount": 0,
        "State": "scheduled",
    }
    block |= {"AvailabilityZoneId": "use1-az2", "StartDate": NOW + timedelta(hours=3)}
    block |= {"EndDate": NOW + timedelta(hours=27), "ReservationType": "capacity-block"}
    config = held_config(*LIVE)
    answer = ("describe_capacity_reservations", {"CapacityReservations": [block]})
    [held] = open_evidence(config, client=lambda _: ec2(answer)).held
    assert (held.instances, held.zone, held.problem, held.kind) == (4, "use1-az2", "", "live")
    assert held.start_utc == BEGAN_UTC + 3 * HOUR and held.end_utc == BEGAN_UTC + 26.5 * HOUR
    gone = {**block, "State": "expired"}
    found = open_evidence(
        config, client=lambda _: ec2((answer[0], {"CapacityReservations": [gone]}))
    )
    plan = make_plan(config, now_utc=BEGAN_UTC, queues=WHERE, evidence=found)
    assert any("reservation cr-1 is expired" in rejection.reason for rejection in plan.rejected)


def test_the_plan_lists_capacity_blocks_for_sale_at_the_price_of_the_whole_block() -> None:
    sale = {"CapacityBlockOfferingId": "cbo-1", "InstanceType": "p5.48xlarge", "InstanceCount": 1}
    sale |= {"AvailabilityZone": "us-east-1a", "StartDate": NOW + timedelta(hours=10)}
    sale |= {
        "EndDate": NOW + timedelta(hours=34),
        "CapacityBlockDurationHours": 24,
        "UpfrontFee": "755.00",
    }
    answer = (
        "describe_capacity_block_offerings",
        {"CapacityBlockOfferings": [{**sale, "CurrencyCode": "USD"}]},
    )
    config = batch_config(
        "cluster.instance_types=[p5.48xlarge]",
        "cluster.processes_per_node=auto",
        "training.batch_size=64",
        "cost.capacity_block_days=1",
        "cost.budget_usd=null",
        *LIVE,
    )
    evidence = open_evidence(config, client=lambda _: ec2(answer))
    assert evidence.notes == ()
    plan = make_plan(config, now_utc=BEGAN_UTC, evidence=evidence)
    [one] = plan.blocks
    volume_usd = float(one.price.volume_usd_per_hour) * one.paid_hours
    assert volume_usd > 0 and one.compute_usd == pytest.approx(755.0 + volume_usd)
    assert one.expected_hours > 10
    assert all(other.reservation is None for other in plan.ranked), (
        "what is not bought cannot be chosen"
    )
    text = " ".join(render_plan(plan).replace("│", " ").split())
    assert "purchase-capacity-block" in text and "--capacity-block-offering-id cbo-1" in text
    assert Plan.from_json(plan.to_json()) == plan


def test_a_low_placement_score_delays_the_first_start_and_a_denied_one_is_reported() -> None:
    config = batch_config("cost.prices=live", "cluster.instance_types=[g5]")
    scores = {
        "SpotPlacementScores": [
            {"Region": "us-east-1", "AvailabilityZoneId": "use1-az1", "Score": 2}
        ]
    }
    found = open_evidence(config, client=lambda _: ec2(("get_spot_placement_scores", scores)))
    assert found.scores == {("us-east-1", "use1-az1"): 2}
    low, none = (
        next(
            candidate
            for candidate in make_plan(config, now_utc=BEGAN_UTC, evidence=known).ranked
            if candidate.market == "spot"
        )
        for known in (found, CapacityEvidence())
    )
    assert low.expected_hours > none.expected_hours + 1
    assert low.outlook.deadline_probability <= none.outlook.deadline_probability
    assert "Spot placement score 2 of 10" in low.hazard_kind
    denied = open_evidence(config, client=lambda _: ec2(error="UnauthorizedOperation"))
    assert denied.scores == {} and "allow ec2:GetSpotPlacementScores" in denied.notes[0]
    few = batch_config("cost.prices=live", "cluster.instance_types=[g5.xlarge]")
    assert open_evidence(few, client=lambda _: ec2()).scores == {}, (
        "always low for fewer than 3 types"
    )


def two_regions(*more: str) -> RunConfig:
    return limit_to_queue_region(
        batch_config(TWO_REGIONS, "batch.region=us-east-1", "cost.store_region=us-east-1", *more)
    )


def arn(region: str, name: str) -> str:
    return f"arn:aws:batch:{region}:123456789012:job-queue/{name}"


FAR = queues(
    *(replace(queue, arn=arn("us-east-1", queue.name)) for queue in BOTH.values()),
    queue("far-spot", "spot", ["g5"], arn=arn("us-west-2", "far-spot")),
)


def test_an_attempt_is_placed_in_the_cheapest_region_including_transfer() -> None:
    config = two_regions()
    assert config.cost.regions == ["us-east-1", "us-west-2"]
    plan = make_plan(config, now_utc=BEGAN_UTC, prices=TwoRegions(), queues=FAR)
    found = choose_placement(
        config, plan=plan, history=read_attempts([]), queues=FAR, now_utc=BEGAN_UTC
    )
    far = next(
        candidate
        for candidate in plan.ranked
        if candidate.region == "us-west-2" and candidate.market == "spot"
    )
    near = next(
        candidate
        for candidate in plan.ranked
        if candidate.region == "us-east-1" and candidate.market == "spot"
    )
    assert near.transfer_usd == 0 < far.transfer_usd
    if far.expected_usd < near.expected_usd:
        cheaper = far
    else:
        cheaper = near
    assert found.region == cheaper.region
    often = two_regions("checkpoint.interval=seconds", "checkpoint.interval_seconds=5")
    dear = make_plan(often, now_utc=BEGAN_UTC, prices=TwoRegions(), queues=FAR)
    stays = choose_placement(
        often, plan=dear, history=read_attempts([]), queues=FAR, now_utc=BEGAN_UTC
    )
    assert stays.region == "us-east-1", "commits every 5 s cost more to send than Spot saves there"
    text = " ".join(render_plan(plan).replace("│", " ").split())
    assert "region us-west-2: " in text and "of which transfer $" in text
    no_on_demand_there = [
        rejection
        for rejection in plan.rejected
        if rejection.region == "us-west-2" and rejection.market == "on_demand"
    ]
    assert no_on_demand_there and "is in us-east-1" in no_on_demand_there[0].reason


def test_the_submitting_process_reaches_the_queue_there_and_the_store_at_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = two_regions()
    env = {}
    assert set_region(env, "us-east-1", config) == "us-east-1" and env == {}
    assert set_region(env, "us-west-2", config) == "us-west-2"
    assert env == {"AWS_DEFAULT_REGION": "us-west-2", "EBBFLOW_STORE_REGION": "us-east-1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert aws_settings().region == "us-east-1", "the container's process finds the bucket"
    assert set_region({}, "us-west-2", batch_config()) is None, "the SDK's region alone"


def test_a_region_that_refuses_an_attempt_is_followed_by_the_other() -> None:
    config = two_regions("batch.runnable_minutes=20")
    log = JobLog()
    plan = make_plan(config, now_utc=BEGAN_UTC, prices=TwoRegions(), queues=FAR)
    regions = []
    for number in range(2):
        now = BEGAN_UTC + number * 1200
        found = choose_placement(
            config, plan=plan, history=read_attempts(log.events), queues=FAR, now_utc=now
        )
        log.placed(found, number * 1200.0)
        log.told(
            "never_started", found, number * 1200.0 + 1199, started=None, job_id=f"job-{number}"
        )
        regions.append(found.region)
    assert sorted(regions) == ["us-east-1", "us-west-2"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((TWO_REGIONS,), "other regions (us-west-2), and no batch.region is set"),
        ((TWO_REGIONS, "batch.region=us-east-1"), "and no cost.store_region is set"),
        ((QUEUES,), "reservation cr-1 is not in cost.reservations"),
        (
            (f"cost.reservations=[{HELD.replace('}', ', end: 2026-02-31T00:00:00Z}')}]",),
            "is no time in UTC",
        ),
        ((f"cost.reservations=[{HELD}, {HELD}]",), "cost.reservations"),
        ((f"cost.reservations=[{HELD.replace('g5.xlarge', 'g5')}]",), "'g5' is no instance type"),
    ],
)
def test_a_configuration_that_cannot_be_meant_is_refused(
    settings: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(").replace(")", r"\)")):
        batch_config(*settings)


def test_zones_elsewhere_and_numbers_without_sense_are_refused() -> None:
    for zone in ("nowhere", "us-east-1a", "use2-az1"):
        with pytest.raises(ConfigError, match=f"zone '{zone}' is no zone id of us-east-1"):
            held_config(reservation=HELD.replace("use1-az4", zone))
    for setting in ("cost.budget_usd=1e308", "checkpoint.deadline_seconds=2e30"):
        with pytest.raises(ConfigError, match="is too large: more than 1e"):
            batch_config(setting)


def test_a_configured_reservation_needs_no_network() -> None:
    config = held_config("cost.prices=live")
    assert open_evidence(config, network=False).held[0] == Reservation.of(
        config.cost.reservations[0]
    )
