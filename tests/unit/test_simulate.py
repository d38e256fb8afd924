"""The simulator: what it reads, what it bills, and that its optimum is one."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest

from benchmarks.money.commands import main
from benchmarks.money.errors import SimulationError, TraceError
from benchmarks.money.interface import Action, State, UsePool, Wait
from benchmarks.money.simulator import (
    ENACTABLE,
    PUBLISHED,
    SEES_ALL,
    Billing,
    Deviations,
    Rules,
    SimulatedJob,
    SimulationOutcome,
    Visibility,
    optimum_of,
    simulate,
)
from benchmarks.money.world import Trace, cut_world, read_trace, world_of, world_of_events
from ebbflow.cost.report.optimum import Distances, World

# Read here: tests run without variables of ours.
PER_SECOND = Rules("per second, sees all", Visibility.ALL, Billing.PER_SECOND, 0, None)


def world(
    *rows: str,
    zones: str = "abc",
    price: float = 1.0,
    tick: float = 1.0,
    regions: str | None = None,
) -> World:
    """Rows of `1` (capacity) and `0`, one per zone; zones of the same letter of `regions` lie
    together.
    """
    names = [f"us-{letter}-1" for letter in (regions or "x" * len(rows))]
    up = np.array([[cell == "1" for cell in row] for row in rows])
    return World(
        tuple(f"{name}{letter}" for name, letter in zip(names, zones, strict=False)),
        tuple(names),
        up,
        np.full(up.shape, price),
        3.0,
        np.full(up.shape[1], tick),
        Distances(50.0),
    )


class Script:
    """Answers in the order given; the last for ever."""

    def __init__(self, *answers: Action) -> None:
        self.answers = list(answers)
        self.states = []

    def decide(self, state: State) -> Action:
        self.states.append(state)
        if len(self.answers) > 1:
            return self.answers.pop(0)
        return self.answers[0]


@pytest.mark.parametrize("named", ["metadata", "option"])
def test_both_polarities_say_the_same_when_named(tmp_path: Path, named: str) -> None:
    for name, data in (("available_count", [0, 1, 1]), ("preempted", [1, 0, 0])):
        metadata = {"gap_seconds": 60} | ({"values": name} if named == "metadata" else {})
        path = tmp_path / "us-east-1a_v100_1.json"
        path.write_text(json.dumps({"metadata": metadata, "data": data}))
        trace = read_trace(path, values=None if named == "metadata" else name)
        assert (trace.available.tolist(), trace.zone, trace.region) == (
            [0, 1, 1],
            "us-east-1a",
            "us-east-1",
        )
        assert trace.polarity_named


@pytest.mark.parametrize(
    ("metadata", "data", "values", "told"),
    [
        (
            {"gap_seconds": 60, "values": "preempted"},
            [0, 3],
            None,
            r"data\[1\] is 3.*available_count",
        ),
        ({"gap_seconds": 60, "values": "up"}, [0, 1], None, "metadata.values.*'up'.*preempted"),
        ({"gap_seconds": 60, "values": "preempted"}, [0, 1], "available_count", "says 'preempted'"),
        ({"gap_seconds": 0}, [0, 1], None, "gap_seconds"),
        ({"gap_seconds": 60}, [0, 0.5], None, r"data\[1\] is 0.5"),
        ({"gap_seconds": 60}, [], None, "key data"),
    ],
)
def test_what_cannot_be_read_one_way_is_refused(
    tmp_path: Path, metadata: dict, data: list, values: str | None, told: str
) -> None:
    path = tmp_path / "us-east-1a.json"
    path.write_text(json.dumps({"metadata": metadata, "data": data}))
    with pytest.raises(TraceError, match=told) as error:
        read_trace(path, values=values)
    assert str(path) in str(error.value)


def test_a_whole_tick_is_billed_or_the_seconds_and_a_minute_at_least() -> None:
    here = world("1111", tick=0.5)
    run = Script(UsePool("us-x-1a/spot"))
    job = SimulatedJob(0.6, 2.0, 0.1)
    assert simulate(here, job, PUBLISHED, run).usd == pytest.approx(1.0)
    assert simulate(here, job, PER_SECOND, run).usd == pytest.approx(0.7)
    short = simulate(here, SimulatedJob(0.001, 2.0, 0.0), PER_SECOND, run)
    assert short.usd == pytest.approx(1 / 60)
    assert short.finished_hours == pytest.approx(0.001)


def test_a_preemption_redoes_what_was_not_committed_and_a_drain_commits() -> None:
    job = SimulatedJob(3.0, 12.0, 0.0, commit_interval_hours=2.0)
    lost = simulate(world("10111111"), job, PUBLISHED, Script(UsePool("us-x-1a/spot")))
    assert (lost.redone_hours, lost.finished_hours, lost.preemptions) == (1.0, 5.0, 1)
    left = simulate(
        world("11111111"),
        job,
        PUBLISHED,
        Script(UsePool("us-x-1a/spot"), Wait(), UsePool("us-x-1a/spot")),
    )
    assert (left.redone_hours, left.finished_hours) == (0.0, 4.0)


@pytest.mark.parametrize("tick", [0.01, 0.02, 0.05])
def test_a_drain_takes_its_time_however_short_the_ticks(tick: float) -> None:
    class Moves:
        def decide(self, state: State) -> Action:
            return UsePool(state.pools[0 if state.now_hours < 0.495 else 1].id)

    always = "1" * round(4 / tick)
    outcome = simulate(
        world(always, always, tick=tick), SimulatedJob(1.0, 4.0, 0.1), ENACTABLE, Moves()
    )
    assert (
        outcome.finished_hours
        == pytest.approx(1.0 + 2 * 0.1 + 2 / 60)
        == pytest.approx(outcome.spot_usd)
    )


def test_a_refused_start_costs_its_tick_and_nothing_else_and_what_is_named_next_is_tried() -> None:
    here = world("0111", "1111")
    first = Script(UsePool("us-x-1a/spot"))
    waited = simulate(here, SimulatedJob(1.0, 4.0, 0.0), PUBLISHED, first)
    assert (waited.usd, waited.finished_hours, waited.refused_starts) == (1.0, 2.0, 1)
    assert first.states[1].pool("us-x-1a/spot").available is True
    both = simulate(
        here,
        SimulatedJob(1.0, 4.0, 0.0),
        PUBLISHED,
        Script(UsePool("us-x-1a/spot", ("us-x-1b/spot",))),
    )
    assert (both.finished_hours, both.timeline) == (1.0, [(0.0, "us-x-1b/spot")])
    one = simulate(
        here,
        SimulatedJob(1.0, 4.0, 0.0),
        ENACTABLE,
        Script(UsePool("us-x-1a/spot", ("us-x-1b/spot",))),
    )
    assert one.finished_hours == 2.0


def test_only_what_the_rules_show_is_seen_and_probes_are_paid_once_in_their_interval() -> None:
    probing = Script(UsePool("us-x-1a/spot", (), ("us-x-1b/spot", "us-x-1c/spot")))
    done = simulate(
        world("1" * 6, "1" * 6, "0" * 6), SimulatedJob(4.0, 6.0, 0.0), PUBLISHED, probing
    )
    assert done.probe_usd == pytest.approx(2 / 60)
    seen = [state.pool("us-x-1b/spot").seen_at_hours for state in probing.states]
    assert seen == [None, 0.0, 0.0, 2.0]
    assert [state.pool("us-x-1c/spot").available for state in probing.states[:2]] == [None, False]
    everything = Script(UsePool("us-x-1a/spot"))
    simulate(world("11", "10"), SimulatedJob(2.0, 2.0, 0.0), SEES_ALL, everything)
    assert [state.pool("us-x-1b/spot").available for state in everything.states] == [True, False]


def test_a_move_pays_transfer_and_on_demand_may_take_its_delay() -> None:
    here = world("11111", "11111", regions="xy")
    moved = simulate(
        here,
        SimulatedJob(2.0, 5.0, 0.0),
        PER_SECOND,
        Script(UsePool("us-x-1a/spot"), UsePool("us-y-1b/spot")),
    )
    assert moved.egress_usd == pytest.approx(1.0)
    assert moved.finished_hours == pytest.approx(
        2.0 + here.distances.transfer_hours("us-x-1", "us-y-1")
    )
    slow = Deviations(on_demand_delays=(1.5,))
    delayed = simulate(
        here,
        SimulatedJob(2.0, 5.0, 0.25),
        ENACTABLE,
        Script(UsePool("us-x-1a/on-demand")),
        reality=slow,
    )
    assert (delayed.finished_hours, delayed.usd) == (pytest.approx(3.75), pytest.approx(2.25 * 3.0))


def test_the_event_variant_decides_where_capacity_changes() -> None:
    here = world_of_events(
        [(0.0, "us-x-1a", True), (1.3, "us-x-1a", False), (1.7, "us-x-1a", True)],
        regions={"us-x-1a": "us-x-1"},
        hours=6.0,
        decision_hours=1.0,
        spot_usd_per_hour=1.0,
        on_demand_usd_per_hour=3.0,
    )
    done = simulate(here, SimulatedJob(3.0, 6.0, 0.0), PER_SECOND, Script(UsePool("us-x-1a/spot")))
    assert (done.finished_hours, done.usd) == (pytest.approx(3.4), pytest.approx(3.0))


def test_the_optimum_is_the_least_of_all_courses() -> None:
    chance = random.Random(7)
    for _ in range(6):
        rows = ["".join(chance.choice("01") for _ in range(5)) for _ in range(2)]
        here = world(*rows, regions=chance.choice(["xx", "xy"]))
        prices = np.array([[chance.choice([0.5, 1.0, 2.0]) for _ in row] for row in rows])
        here = World(**{**vars(here), "usd_per_hour": prices})
        job = SimulatedJob(float(chance.choice([1, 2, 3])), 5.0, float(chance.choice([0, 1])))
        assert optimum_of(here, job) == pytest.approx(least_of_all(here, job))


def least_of_all(here: World, job: SimulatedJob) -> float:
    """Every course of a small job, tick by tick, by the simulator itself."""
    names = [f"{zone}/spot" for zone in here.zones]
    names += [
        f"{zone}/on-demand"
        for zone in dict(zip(reversed(here.regions), reversed(here.zones), strict=True)).values()
    ]
    free = Rules("free", Visibility.ALL, Billing.WHOLE_TICK, 0, None)
    if job.changeover_hours == 0:
        instant = World(**{**vars(here), "distances": _Instant(50.0)})
    else:
        instant = here
    best = math.inf
    stack: list[tuple[Action, ...]] = [()]
    while stack:
        course = stack.pop()
        if course:
            done: SimulationOutcome = simulate(instant, job, free, Script(*course, Wait()))
        else:
            done = SimulationOutcome()
        if done.finished_hours is not None:
            best = min(best, done.usd)
        elif len(course) < here.ticks and done.usd < best:
            stack += [(*course, answer) for answer in (Wait(), *(UsePool(name) for name in names))]
    return best


class _Instant(Distances):
    def transfer_hours(self, source: str, target: str) -> float:
        return 0.0


def test_the_command_says_what_it_assumed_and_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = {"metadata": {"gap_seconds": 3600}, "data": [1] * 12 + [0] * 12}
    (tmp_path / "us-east-1a_v100_1.json").write_text(json.dumps(trace))
    command = ["simulate", "--traces", str(tmp_path), "--policy", "greedy", "--work-hours", "3"]
    command += ["--deadline-hours", "8", "--changeover-hours", "0.5", "--starts", "3"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["values"] == "available_count (assumed: not named)"
    assert [row["missed"] for row in document["rows"]] == [False] * 3
    assert main([*command, "--values", "preempted", "--json"]) == 0
    turned = json.loads(capsys.readouterr().out)["rows"]
    assert turned[0]["on_demand_usd"] > 0 == document["rows"][0]["on_demand_usd"]
    assert main([*command[:4], "no_such", *command[5:]]) == 2
    assert "no policy 'no_such'; there are " in capsys.readouterr().err
    assert (
        document["prices"]
        == "spot constant (list price of a V100, 2023), on-demand list price of a V100, 2023"
    )
    assert main([*command, "--spot-usd-per-hour", "0", "--json"]) == 0, (
        "a price that is stated is not replaced"
    )
    assert json.loads(capsys.readouterr().out)["rows"][0]["usd"] == 0
    (tmp_path / "us-east-1a_v100_2.json").write_text(json.dumps(trace))
    for extra, told in (
        ([], "zone us-east-1a is there more than once"),
        (["--start-hours", "-5"], "--start-hours -5.0: expected"),
        (["--work-hours", "nan"], "--work-hours nan: expected"),
    ):
        assert main([*command, *extra]) == 2
        assert told in capsys.readouterr().err


def test_a_gang_needs_traces_that_count() -> None:
    trace = Trace(
        "us-east-1a", "us-east-1", "us-east-1a", 60.0, np.array([1, 1]), "preempted", True
    )
    for nodes, told in (
        (4, "needs counts of machines; us-east-1a: 'preempted'"),
        (0, "expected at least 1"),
    ):
        with pytest.raises(SimulationError, match=told):
            world_of([trace], nodes=nodes)


def test_a_world_that_ends_too_soon_is_refused() -> None:
    with pytest.raises(SimulationError, match="after the trace"):
        cut_world(world("1111"), 2.0, 3.0)
