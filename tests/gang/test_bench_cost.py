"""The simulated benchmarks at a tiny size: what they count, whom they meet, what they refuse."""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.money.calibration import JudgedForecast, calibrate, other_waits, score
from benchmarks.money.commands import main
from benchmarks.money.errors import SimulationError
from benchmarks.money.interface import Action, State, UsePool
from benchmarks.money.policies import POLICIES
from benchmarks.money.safety import random_cases
from benchmarks.money.simulator import ENACTABLE, RULES, SimulatedJob, simulate
from ebbflow.cost.report.optimum import Distances, World

GAP_SECONDS = 900
ZONES = ("us-east-1a", "us-east-1c", "us-east-2b", "us-west-2a")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """25 days of zones that come and go every few hours, and their constant prices."""
    ticks = 25 * 24 * 3600 // GAP_SECONDS
    names = [f"{zone}_v100_1" for zone in ZONES]
    for folder, nodes in (("availability", 1), ("gang", 4)):
        (tmp_path / folder).mkdir()
        for row, name in enumerate(names):
            up = np.random.default_rng(row).random(ticks // 12 + 1).repeat(12)[:ticks] < 0.6
            write(tmp_path / folder / f"{name}.json", (up * nodes).tolist())
    (tmp_path / "prices").mkdir()
    prices = json.dumps({name: [1.0] * ticks for name in names}).encode()
    (tmp_path / "prices" / "v100_spot_prices.json.gz").write_bytes(gzip.compress(prices))
    return tmp_path


def write(path: Path, counts: list[int]) -> None:
    metadata = {"gap_seconds": GAP_SECONDS, "values": "available_count"}
    path.write_text(json.dumps({"metadata": metadata, "data": counts}))


@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_every_policy_meets_every_set_of_rules(data: Path, count: int) -> None:
    names = tuple(POLICIES)[:count]
    met = {(case.policy, case.rules) for case in random_cases(data, names, 3 * count)}
    assert met == set(product(names, RULES))


def test_no_job_is_late_or_over_its_budget(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["safety", "--data", str(data), "--policies", "greedy,uniform_progress,adversary"]
    assert (
        main([*command, "--jobs", "180", "--beyond-jobs", "3", "--forecasts", "16", "--json"]) == 0
    )
    document = json.loads(capsys.readouterr().out)
    for row in document["within"]["policies"].values():
        assert row["jobs"] == 60 and row["late"] == row["over_budget"] == 0
        assert row["refused: deadline"] + row["refused: budget"] < 40, "most are feasible"
        assert row["most_ticks_over"] <= 1
    assert {row["policy"] for row in document["beyond"]} == {"greedy", "uniform_progress"}
    never = [
        row["late"]
        for row in document["beyond"]
        if (row["departs"], row["by"]) == ("delay", "never")
    ]
    assert sum(never) > 0, "on-demand that never comes is beyond the net"
    found = document["calibration"]
    assert sum(row[2] for row in found["bins"]) == 16
    assert {row[0] for row in found["parts"]} == {"availability", "gang"}
    for suite in ("availability", "gang"):
        counts = {row[1]: row[2] for row in found["parts"] if row[0] == suite}
        assert (
            counts["all"]
            == 16
            == counts["first half"] + counts["second half"]
            == sum(counts[zone] for zone in ZONES)
        )


SHAPES = {
    "all up": (300, [1] * 8000),
    "all down": (300, [0] * 8000),
    "hourly ticks": (3600, [1, 1, 0, 1, 0, 0] * 100),
    "ticks of three hours": (10800, [1, 1, 0, 1, 0, 0] * 30),
    "an outage of weeks": (1800, [1] * 40 + [0] * 900 + [1] * 300),
    "whole floats": (600, [1.0, 0.0, 1.0] * 800),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_foreign_traces_are_simulated_in_time(
    shape: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One zone of another continent, without gangs and prices."""
    (tmp_path / "availability").mkdir()
    gap, data = SHAPES[shape]
    path = tmp_path / "availability" / "eu-central-1b_a100_8.json"
    path.write_text(json.dumps({"metadata": {"gap_seconds": gap}, "data": data}))
    assert main(["--data", str(tmp_path), "--parts", "enactable,regions", "--starts", "2"]) == 0
    told = capsys.readouterr()
    assert (
        "| enactable rules: late | 0 | 0 | 6 |" in told.out
        and "availability: eu-central-1b; 2 starts" in told.out
    )
    assert "regions: left out, because no trace of us-east-1c" in told.err


@pytest.mark.parametrize(
    ("data", "values", "told"),
    [
        (
            [1, None, 0],
            None,
            "data[1] is null, a gap in the recording; cut the file there, or fill it",
        ),
        ([1, 0.5], None, "data[1] is 0.5; expected a whole number of machines"),
        ([1, 10**30], None, "expected a whole number of machines"),
        (
            [1, 0] * 20,
            "preempted",
            "the traces are 56.6 h shorter than the longest deadline of these jobs",
        ),
    ],
)
def test_a_trace_that_cannot_be_used_is_named(
    data: list, values: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "availability").mkdir()
    document = {
        "metadata": {"gap_seconds": 300, **({"values": values} if values else {})},
        "data": data,
    }
    (tmp_path / "availability" / "us-east-1a_v100_1.json").write_text(json.dumps(document))
    assert main(["--data", str(tmp_path), "--parts", "enactable", "--starts", "2"]) == 2
    assert told in capsys.readouterr().err


def test_a_zone_is_forecast_and_scored_by_the_others_only() -> None:
    def zone(down: int) -> World:
        up = np.tile(np.arange(down + 10) >= down, 20)[np.newaxis]
        return World(
            ("us-x-1a",),
            ("us-x-1",),
            up,
            np.ones(up.shape),
            3.0,
            np.ones(up.shape[1]),
            Distances(50.0),
        )

    worlds = {"a": zone(40), "b": zone(2), "c": zone(2)}
    assert set(other_waits(worlds, "a")) == {2.0} and max(other_waits(worlds, "b")) == 40.0
    judged = [JudgedForecast(zone=name, late=False, said=0.5, missed=name == "a") for name in "aab"]
    assert score(judged[:2], judged) == (2, 0.5, 1.0, 0.25, 1.0), (
        "the rate of the other zone is 0, and all missed"
    )


class Hops:
    """From the first region to the second, once."""

    def decide(self, state: State) -> Action:
        return UsePool(state.pools[state.now_hours > 0].id)


def test_transfer_beyond_the_budget_is_no_tick() -> None:
    prices = np.full((2, 20), 1.0)
    here = World(
        ("us-x-1a", "us-y-1a"),
        ("us-x-1", "us-y-1"),
        prices > 0,
        prices,
        3.0,
        np.full(20, 0.1),
        Distances(50.0),
    )
    outcome = simulate(here, SimulatedJob(0.5, 2.0, 0.0), ENACTABLE, Hops())
    assert outcome.egress_usd == pytest.approx(1.0)
    assert outcome.over_budget(outcome.usd - 0.31) and not outcome.over_budget(
        outcome.usd - 0.29
    ), "a tick is $0.30"


@pytest.mark.parametrize(
    ("counts", "days", "told"),
    [
        (0, 25, "zone us-east-1b: no capacity at any of 1000 moments"),
        (1, 5, "us-east-1b.*: shorter than 313 h"),
    ],
)
def test_nothing_is_forecast_without_capacity_or_a_long_enough_trace(
    data: Path, counts: int, days: int, told: str
) -> None:
    write(
        data / "availability" / "us-east-1b_v100_1.json",
        [counts] * (days * 24 * 3600 // GAP_SECONDS),
    )
    with pytest.raises(SimulationError, match=told):
        calibrate(data, 8)


@pytest.mark.parametrize("bench", [["speed"], ["safety", "--data", "nowhere"]])
def test_a_policy_that_there_is_not_is_named(
    bench: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*bench, "--policies", "greedy,nosuch"]) == 2
    assert "no policy nosuch; there are adaptive, " in capsys.readouterr().err


def test_placements_are_in_time_and_between_the_optimum_and_on_demand(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["placements", "--data", str(data), "--starts", "1", "--deadlines"]
    assert main([*command, "6,12", "--json"]) == 0
    jobs = json.loads(capsys.readouterr().out)["jobs"]
    assert len(jobs) == 2 * len(ZONES) and {job["zone"] for job in jobs} == set(ZONES)
    for job in jobs:
        assert not job["late"] and job["hours"] <= job["deadline_hours"]
        assert job["optimum_usd"] - 1e-6 <= job["usd"] < 1.5 * job["on_demand_usd"]
        assert job["regret_usd"] == pytest.approx(job["usd"] - job["optimum_usd"])
    tight, wide = (
        sum(job["usd"] for job in jobs if job["deadline_hours"] == hours) for hours in (6, 12)
    )
    assert wide < tight, "more slack, more Spot"
    assert main([*command, "12"]) == 0
    said = capsys.readouterr().out
    assert all(zone in said for zone in ZONES), "what it was made over"
    row = next(line for line in said.splitlines() if line.startswith("| 12 |")).split(" | ")
    assert row[1:3] == ["4", "0"] and row[8] == f"{wide / 4:.2f}", "the same seed, the same jobs"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--deadlines", "6,soon"], "--deadlines 6,soon: hours above 0"),
        (["--deadlines", "900"], "600.0 h long, and a job may take 900 h"),
        (["--deadlines", "1"], "fix: --deadlines, or --set"),
        (["--starts", "0"], "at least one job"),
        (["--set", "cost.budget_usd=0.01"], "the job cannot be placed"),
        (["--set", "training.max_step=3"], "the job of --set"),
    ],
)
def test_placements_that_cannot_be_made_say_why(
    data: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["placements", "--data", str(data), *words]) != 0
    assert told in capsys.readouterr().err
