"""Runs replayed on paper: how well that predicts them, and what another price or interval would
have done.
"""

from __future__ import annotations

import random
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.events import NODE_STARTED, Event
from ebbflow.core.layout import event_key
from ebbflow.core.store import Store
from ebbflow.cost.__main__ import main
from ebbflow.cost.errors import ReplayError
from ebbflow.cost.finance.replay import render, replay
from ebbflow.cost.ledger.ledger import fold
from tests.support.timelines import GangLog, plan_event, prices_event

KILLS = [200.0, 333.0, 150.0]


class Trained:
    """A run by its own small simulation: steps of a wavering length, saves each `interval`, kills
    at given seconds.
    """

    def __init__(
        self,
        *,
        interval: int,
        kills: list[float],
        steps: int = 600,
        seed: int = 3,
        first_slower: float = 1.0,
    ) -> None:
        draw = random.Random(seed)
        self.events: list[Event] = [plan_event()]
        done = 0
        parent = None
        t = 0.0
        for number, kill in enumerate([*kills, None], start=1):
            gang = GangLog(number, t, [[0], [1]], parent)
            gang.phase("startup", draw.uniform(18.0, 22.0))
            if parent:
                gang.phase("restore", 2.0)
            durable: list[tuple[int, float]] = []
            for step in range(done + 1, steps + 1):
                saves = step % interval == 0 or step == steps
                slower = first_slower if number == 1 else 1.0
                seconds = {"useful_step": slower * draw.uniform(0.9, 1.1), "data_wait": 0.1}
                if saves:
                    stall = {"checkpoint_stall": 2.0}
                else:
                    stall = {}
                if (
                    kill is not None
                    and gang.now - t + sum(seconds.values()) + sum(stall.values()) > kill
                ):
                    break
                gang.steps(step, step, **seconds, **stall)
                if saves:
                    durable.append((step, gang.now))
            else:
                kill = None
            for step, _ in durable:
                gang.commit(step)
            if kill is None:
                gang.outcome("completed")
                gang.phase("shutdown", 3.0)
                gang.ended("completed", gang.now - t)
                self.events += gang.events
                break
            gang.ended("node_lost", kill + 4.0)
            self.events += gang.events
            if durable:
                done = durable[-1][0]
                parent = (durable[-1][0], number)
            t += kill + 4.0 + 15.0

    @property
    def usd(self) -> float:
        return float(fold(self.events).total_usd)


@pytest.mark.parametrize("kills", [[], KILLS, [100.0] * 5])
@pytest.mark.parametrize("interval", [10, 50])
def test_a_run_predicts_itself(kills: list[float], interval: int) -> None:
    trained = Trained(interval=interval, kills=kills)
    found = replay(trained.events)
    assert found["measured"]["usd"] == pytest.approx(trained.usd)
    assert found["measured"]["interval_steps"] == interval
    assert abs(found["predicted"]["error_share"]) < 0.02
    assert found["what_if"]["usd"] == found["predicted"]["usd"]


def test_a_slow_first_machine_is_replayed_at_its_own_speed() -> None:
    """At the mean speed of all generations, the prediction would be 12 % too low."""
    found = replay(Trained(interval=100, kills=[800.0], first_slower=4.0).events)
    assert abs(found["predicted"]["error_share"]) < 0.02


def test_a_job_that_stopped_as_meant_and_went_on_predicts_itself() -> None:
    first = GangLog(1, 0.0, [[0], [1]])
    second = GangLog(2, 5000.0, [[0], [1]], (300, 1))
    for gang, start, steps, outcome in (
        (first, 20.0, (1, 300), "budget"),
        (second, 220.0, (301, 350), "completed"),
    ):
        began = gang.now
        gang.phase("startup", start)
        gang.steps(*steps, useful_step=1.0)
        gang.commit(steps[1])
        gang.outcome(outcome)
        gang.phase("shutdown", 3.0)
        gang.ended(outcome, gang.now - began)
    found = replay([plan_event(), *first.events, *second.events])
    assert abs(found["predicted"]["error_share"]) < 0.02
    assert (found["predicted"]["interruptions"], found["predicted"]["redone_steps"]) == (0, 0)


@pytest.mark.parametrize(("ran", "asked"), [(50, 10), (10, 50), (100, 20), (20, 60)])
def test_a_run_predicts_another_interval_with_the_same_kills(ran: int, asked: int) -> None:
    """The run that was asked about is made too, with other step times, and costs what the replay
    said.

    None of these intervals has a save beside a kill: that would be lost or not by chance.
    """
    found = replay(Trained(interval=ran, kills=KILLS).events, interval_steps=asked)
    real = Trained(interval=asked, kills=KILLS, seed=11)
    assert found["what_if"]["usd"] == pytest.approx(real.usd, rel=0.03)
    assert found["what_if"]["redone_steps"] == pytest.approx(fold(real.events).redone_steps, abs=10)


def test_a_replayed_save_beside_a_kill_widens_the_range() -> None:
    kills = [106.0, 300.0]
    what_if = replay(Trained(interval=10, kills=kills).events, interval_steps=75)["what_if"]
    low, high = what_if["usd_range"]
    reals = [Trained(interval=75, kills=kills, seed=seed).usd for seed in (11, 15)]
    assert reals[1] > 1.08 * reals[0], "saved just before the kill, and just not"
    assert low * 0.99 <= reals[0] < what_if["usd"] < reals[1] <= high * 1.01
    same = replay(Trained(interval=10, kills=kills).events)["what_if"]
    assert same["usd_range"] == [same["usd"], same["usd"]], "what was recorded needs no chance"


def test_each_generation_is_priced_by_its_own_pool() -> None:
    """From Spot at $3.60 to on-demand at $7.20 after a kill at two thirds."""
    spot = Trained(interval=50, kills=[500.0]).events
    moved = [
        replace(event, data={**event.data, "market": "on_demand"})
        if event.name == NODE_STARTED and event.generation == 2
        else event
        for event in spot
    ]
    found = replay(moved)
    assert found["measured"]["pool"] == "g5.xlarge spot → g5.xlarge on-demand"
    assert found["measured"]["usd"] > 1.1 * replay(spot)["measured"]["usd"]
    assert abs(found["predicted"]["error_share"]) < 0.02
    assert "spot → g5.xlarge on-demand" in render(found)


def test_a_boot_is_replayed_with_its_generation() -> None:
    booted = [
        replace(
            event,
            data={
                **event.data,
                "instance_id": f"i-{event.generation}-{event.node}",
                "uptime_seconds": 200.0,
            },
        )
        if event.name == NODE_STARTED
        else event
        for event in Trained(interval=50, kills=[300.0]).events
    ]
    found = replay(booted)
    assert found["measured"]["usd"] == pytest.approx(
        Trained(interval=50, kills=[300.0]).usd + 4 * 200.0 * 0.001
    )
    assert abs(found["predicted"]["error_share"]) < 0.02


def test_without_interruptions_it_costs_the_work_and_one_start() -> None:
    found = replay(Trained(interval=50, kills=KILLS).events, interruptions=False)
    assert found["what_if"]["usd"] == pytest.approx(Trained(interval=50, kills=[]).usd, rel=0.02)
    assert found["what_if"]["redone_steps"] == 0


def test_another_pool_has_its_own_price_at_each_moment() -> None:
    events = Trained(interval=50, kills=[]).events
    half = prices_event([(0.0, 3.6), (300.0, 0.0)], zone="use1-az4")
    found = replay([*events, half], pool="g5.xlarge spot use1-az4")
    assert found["what_if"]["pool"] == "g5.xlarge spot in use1-az4"
    assert found["what_if"]["usd"] == pytest.approx(2 * 300.0 * 0.001)
    stated = replay(events, usd_per_hour=Decimal("36"))
    assert stated["what_if"]["usd"] == pytest.approx(10 * stated["predicted"]["usd"])
    assert "error" in render(stated) and "simulated" in render(stated)


def test_a_job_that_cannot_be_replayed_is_refused_with_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = Trained(interval=50, kills=[]).events
    with pytest.raises(
        ReplayError,
        match=r"no recorded pool is 'p5'; name one of\n  g5\.xlarge on-demand\n  g5\.xlarge spot",
    ):
        replay(events, pool="p5")
    with pytest.raises(ReplayError, match="--interval 0"):
        replay(events, interval_steps=0)
    for price in ("-1", "NaN", "Infinity"):
        with pytest.raises(ReplayError, match=f"--usd-per-hour {price}: must be"):
            replay(events, usd_per_hour=Decimal(price))
    stored = Store.open(str(tmp_path))
    stored.put(
        event_key(1, 0, "test", "000000.a"), "\n".join(event.to_json() for event in events).encode()
    )
    assert main(["replay", str(tmp_path), "--usd-per-hour", "abc"]) == ReplayError.outcome.exit_code
    assert "--usd-per-hour: 'abc' is not a number" in capsys.readouterr().err
    with pytest.raises(ReplayError, match="took no step"):
        replay([event for event in events if event.name != "step"])
