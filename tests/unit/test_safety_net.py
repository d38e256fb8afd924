"""The net: under any policy, in any world, what was promised is kept, and what cannot be kept is
refused.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.money.interface import Action, State, UsePool, Wait
from benchmarks.money.policies import POLICIES
from benchmarks.money.safety_net import SafetyNet
from benchmarks.money.simulator import (
    RULES,
    Deviations,
    SimulatedJob,
    first_state,
    run_job,
    simulate,
)
from ebbflow.cost.report.optimum import Distances, World

RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 25)), min_size=3, max_size=12)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """One to three zones whose capacity comes and goes in runs of any length, at prices that jump,
    even above on-demand's; ticks of six minutes to half an hour, or uneven ones from half a minute
    on."""
    zones = draw(st.integers(1, 3))
    ticks = 400
    lasting = np.resize(draw(st.sampled_from([(0.1,), (0.25,), (0.5,), (0.3, 0.008, 0.05)])), ticks)
    rows = []
    prices = []
    for _ in range(zones):
        runs = draw(RUNS)
        row = [up for up, length in runs for _ in range(length)]
        rows.append((row * (ticks // len(row) + 1))[:ticks])
        jumps = draw(st.lists(st.floats(0.1, 5.0), min_size=1, max_size=4))
        prices.append([jumps[index * len(jumps) // ticks] for index in range(ticks)])
    regions = tuple(draw(st.sampled_from(["us-east-1", "eu-west-1"])) for _ in range(zones))
    names = tuple(f"{region}{letter}" for region, letter in zip(regions, "abc", strict=False))
    return World(names, regions, np.array(rows), np.array(prices), 3.0, lasting, Distances(50.0))


JOBS = st.builds(
    lambda work, ratio, changeover, budget, commit, seed: SimulatedJob(
        work,
        work * ratio,
        changeover,
        math.inf if budget is None else (work + changeover) * 3.0 * budget,
        commit,
        seed,
    ),
    st.floats(0.5, 12.0),
    st.floats(1.02, 3.0),
    st.floats(0.02, 0.6),
    st.none() | st.floats(0.8, 1.6),
    st.sampled_from([0.0, 0.3]),
    st.integers(0, 9),
)


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    world=worlds(),
    job=JOBS,
    named=st.sampled_from(sorted(RULES)),
    delay=st.none() | st.sampled_from([0.0, 0.1, 0.5]),
)
def test_what_is_feasible_is_accepted_and_finished_in_time_and_budget(
    name: str, world: World, job: SimulatedJob, named: str, delay: float | None
) -> None:
    if delay is None:
        rules = RULES[named]
    else:
        rules = replace(RULES[named], on_demand_delay_hours=delay)
    tick = float(world.tick_hours.max())
    busy = job.work_hours + job.changeover_hours + tick
    late = busy + rules.on_demand_delay_hours > job.deadline_hours + 1e-9
    dear = busy * 3.0 > job.budget_usd + 1e-9
    result = run_job(world, job, rules, POLICIES[name])
    if late or dear:
        assert result.refusal is not None
        assert result.refusal.binding == ("deadline" if late else "budget")
        return
    assert result.outcome is not None
    assert not result.outcome.missed
    # One tick of compute on demand; nothing for transfer, probes or minima.
    assert result.outcome.usd <= job.budget_usd + tick * 3.0 + 1e-9


class Hopeful:
    """Spot and nothing else."""

    def decide(self, state: State) -> Action:
        return UsePool(state.pools[0].id)


def steady(up: bool, ticks: int = 40) -> World:
    row = np.full((1, ticks), up)
    return World(
        ("us-x-1a",),
        ("us-x-1",),
        row,
        np.full((1, ticks), 1.0),
        3.0,
        np.full(ticks, 0.5),
        Distances(),
    )


def test_without_the_net_the_same_policy_is_late() -> None:
    job = SimulatedJob(4.0, 6.0, 0.25)
    assert simulate(steady(False), job, RULES["published"], Hopeful()).missed
    assert not simulate(steady(False), job, RULES["published"], SafetyNet(Hopeful())).missed


def test_on_demand_starts_at_the_last_safe_moment_and_not_before() -> None:
    net = SafetyNet(Hopeful())
    outcome = simulate(steady(False), SimulatedJob(4.0, 8.0, 0.25), RULES["published"], net)
    # At 3.5 there are 4.5 h for the 4.25 that on-demand takes; half an hour later there would be
    # 4.0.
    assert outcome.timeline == [(3.5, "us-x-1a/on-demand")]
    assert net.overruled > 0


def test_spot_is_not_started_without_room_for_two_changeovers() -> None:
    job = SimulatedJob(4.0, 4.0 + 2 * 0.25 + 0.5 - 0.01, 0.25)
    assert simulate(steady(True), job, RULES["published"], SafetyNet(Hopeful())).spot_usd == 0
    roomy = SimulatedJob(4.0, 4.0 + 2 * 0.25 + 0.5, 0.25)
    assert (
        simulate(steady(True), roomy, RULES["published"], SafetyNet(Hopeful())).on_demand_usd == 0
    )


def test_work_that_is_not_committed_is_kept_in_reserve() -> None:
    world = steady(True)
    row = np.array([[True] * 9 + [False] * 31])
    taken = World(**{**vars(world), "available": row})
    job = SimulatedJob(6.0, 8.0, 0.25, commit_interval_hours=5.0)
    assert not simulate(taken, job, RULES["published"], SafetyNet(Hopeful())).missed
    kept = SafetyNet(Hopeful())
    simulate(world, job, RULES["published"], kept)
    assert kept.overruled > 0, (
        "with 1.75 h of slack, 5 h between commits cannot all be at risk on spot"
    )


class Broken:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def decide(self, state: State) -> Action:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    "answer",
    [RuntimeError("a bug"), UsePool("nowhere"), None, UsePool("us-x-1a/spot", ("nowhere",))],
)
def test_a_policy_that_answers_nothing_sensible_does_not_lose_the_job(answer: object) -> None:
    net = SafetyNet(Broken(answer))
    outcome = simulate(steady(True), SimulatedJob(4.0, 8.0, 0.25), RULES["published"], net)
    assert not outcome.missed
    assert net.broken == outcome.decisions


def test_beyond_the_stated_delay_nothing_is_promised() -> None:
    slow = Deviations(on_demand_delays=(6.0,))
    outcome = simulate(
        steady(False),
        SimulatedJob(4.0, 8.0, 0.25),
        RULES["enactable"],
        SafetyNet(Broken(Wait())),
        reality=slow,
    )
    assert outcome.missed


def test_a_refusal_shows_its_arithmetic() -> None:
    result = run_job(steady(True), SimulatedJob(4.0, 4.1, 0.25), RULES["published"], Hopeful)
    assert result.outcome is None
    assert result.refusal is not None
    assert "4.00 h of work + 0.25 h changeover" in result.refusal.message


class Starts:
    """Asks for the first spot pool, whatever is seen."""

    def decide(self, state: State) -> Action:
        return UsePool(state.pools[0].id)


@pytest.mark.parametrize(("reserve", "lets"), [(1.0, True), (0.99, False)])
def test_a_start_that_may_be_refused_leaves_the_price_of_finishing_on_demand(
    reserve: float, lets: bool
) -> None:
    """A changeover below the tick and cheap spot: a start that succeeds is the cheap course, a
    refused one not.
    """
    here = World(
        ("us-x-1a",),
        ("us-x-1",),
        np.zeros((1, 40), bool),
        np.full((1, 40), 0.1),
        3.0,
        np.full(40, 0.5),
    )
    state = first_state(here, SimulatedJob(4.0, 15.0, 0.1), RULES["sees-all"])
    left = replace(state, budget_usd=(4.0 + 0.1 + 0.5) * 3.0 * reserve)
    answer = SafetyNet(Starts()).decide(left)
    assert isinstance(answer, UsePool) and (answer.pool == state.pools[0].id) is lets


class Prober:
    """Stays where it is told to start, and looks at the other pool at each decision."""

    def decide(self, state: State) -> Action:
        return UsePool(state.pools[0].id, (), (state.pools[1].id,))


@pytest.mark.parametrize(("spare_usd", "lets"), [(0.06, True), (0.04, False)])
def test_a_probe_is_paid_beside_the_action_and_leaves_its_price(
    spare_usd: float, lets: bool
) -> None:
    """The start alone and the probe alone both fit: together they need what both cost."""
    up = np.ones((2, 40), bool)
    prices = np.array([[1.0] * 40, [3.0] * 40])
    here = World(("us-x-1a", "us-x-1b"), ("us-x-1",) * 2, up, prices, 3.0, np.full(40, 0.5))
    state = first_state(here, SimulatedJob(4.0, 15.0, 0.5), RULES["published"])
    # A first tick of nothing but changeover, a minute for leaving, then all of the work on demand.
    start_usd = (0.5 + 1 / 60) * 1.0 + (4.0 + 0.5 + 0.5) * 3.0
    answer = SafetyNet(Prober()).decide(replace(state, budget_usd=start_usd + spare_usd))
    assert isinstance(answer, UsePool)
    assert answer.pool == state.pools[0].id
    assert bool(answer.probes) is lets, "a minute of the other pool is $0.05"
