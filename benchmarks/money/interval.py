"""`ebbflow bench money interval`: simulated stalls and lost work of the interval rule against the
best fixed interval.

The rule is that of `checkpoint.interval: auto`: Daly's interval at the estimated hazard, which
starts at the plan's estimate and is updated by the job's own interruptions (`infra.reliability`). A
grid search over fixed intervals on the same interruptions gives the best fixed one. The same rule
with the true hazard of each moment shows the price of not knowing it. A job writes one checkpoint
at its end. The hazard is constant or changes over the job's life.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ebbflow.core.reliability import PlannedHazard, daly_interval_seconds

if TYPE_CHECKING:
    import numpy

# Simulated hours per scenario, in jobs of equal length.
TOTAL_HOURS = 16_000.0
_GRID_STEP = 1.03
_GRID_SPAN = 10.0
# Of the rule in use (training/save_controller.py).
_LONGEST_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Jobs of equal length. hazard: interruptions per hour at an hour of the job; planned: the
    plan's estimate.
    """

    name: str
    hours: float
    save_seconds: float
    planned_per_hour: float
    hazard: Callable[[float], float]
    highest_per_hour: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Shares of the time lost to stalls and redone work.

    Attributes:
        excess: Loss of the rule relative to that of the best fixed interval, minus 1.
        known_excess: The same for the rule with the true hazard.
    """

    scenario: str
    save_seconds: float
    interruptions: int
    rule_loss: float
    best_fixed_loss: float
    best_fixed_seconds: float
    excess: float
    known_excess: float


def scenarios(hours: float) -> list[Scenario]:
    """Return constant hazards (with a plan that is right, or ten times too low or high) and
    changing hazards.
    """
    constant = []
    for rate in (0.2, 1.0):
        for wrong in (1.0, 0.1, 10.0):
            constant.append(
                (
                    f"constant {rate:g}/h, planned {rate * wrong:g}/h",
                    rate * wrong,
                    lambda _, rate=rate: rate,
                    rate,
                )
            )
    shifting = [
        ("0.1/h, then 1/h", 0.1, lambda hour: 0.1 if hour < hours / 2 else 1.0, 1.0),
        ("1/h, then 0.1/h", 1.0, lambda hour: 1.0 if hour < hours / 2 else 0.1, 1.0),
        ("0.2/h by night, 1/h by day", 0.2, lambda hour: 1.0 if hour % 24 > 12 else 0.2, 1.0),
        (
            "0.1/h, bursts of 2 h at 3/h each week",
            0.1,
            lambda hour: 3.0 if hour % 168 < 2 else 0.1,
            3.0,
        ),
        ("slowly from 0.1/h to 1/h", 0.1, lambda hour: 0.1 * 10 ** (hour / hours), 1.0),
    ]
    return [
        Scenario(
            name=name,
            hours=hours,
            save_seconds=save,
            planned_per_hour=planned,
            hazard=hazard,
            highest_per_hour=highest,
        )
        for save in (1.0, 10.0)
        for name, planned, hazard, highest in (*constant, *shifting)
    ]


def compare(scenario: Scenario, *, seed: int, total_hours: float = TOTAL_HOURS) -> Result:
    """Compare the rule with the best fixed interval on the same interruptions, over `total_hours`
    of jobs.
    """
    jobs = max(1, round(total_hours / scenario.hours))
    lives = [_lives(scenario, seed * 1_000_000 + job) for job in range(jobs)]
    paid = sum(float(life.sum()) for life in lives)
    rule, known = (
        1.0 - sum(_useful_by_rule(scenario, life, told=told) for life in lives) / paid
        for told in (False, True)
    )
    losses = {
        tau: 1.0 - sum(_useful_fixed(tau, scenario, life) for life in lives) / paid
        for tau in _grid(scenario)
    }
    best = min(losses, key=losses.__getitem__)
    return Result(
        scenario=scenario.name,
        save_seconds=scenario.save_seconds,
        interruptions=sum(len(life) - 1 for life in lives),
        rule_loss=rule,
        best_fixed_loss=losses[best],
        best_fixed_seconds=best,
        excess=rule / losses[best] - 1.0,
        known_excess=known / losses[best] - 1.0,
    )


def _lives(scenario: Scenario, seed: int) -> numpy.ndarray:
    """Draw the seconds from each start to its interruption, by thinning a process at the highest
    hazard.
    """
    import numpy

    chance = numpy.random.default_rng(seed)
    hour = 0.0
    last = 0.0
    lives = []
    while True:
        hour += chance.exponential(1.0 / scenario.highest_per_hour)
        if hour >= scenario.hours:
            return numpy.array([*lives, (scenario.hours - last) * 3600.0])
        if chance.random() < scenario.hazard(hour) / scenario.highest_per_hour:
            lives.append((hour - last) * 3600.0)
            last = hour


def _useful_fixed(interval: float, scenario: Scenario, lives: numpy.ndarray) -> float:
    """Return the seconds of work kept with a fixed interval: work after the last checkpoint of each
    life is lost.

    The last life ends with a checkpoint.
    """
    import numpy

    each = interval + scenario.save_seconds
    saves = numpy.floor(lives / each)
    at_end = lives[-1] - saves[-1] * each - scenario.save_seconds
    return float((saves * interval).sum() + max(0.0, at_end))


def _useful_by_rule(scenario: Scenario, lives: numpy.ndarray, *, told: bool) -> float:
    """Return the seconds of work kept if the interval follows the estimated hazard, or the true one
    with `told`.
    """
    belief = PlannedHazard(scenario.planned_per_hour)
    save = scenario.save_seconds
    useful = 0.0
    hour = 0.0
    at = 0.0
    for number, life in enumerate(lives):
        at = 0.0
        while True:
            if told:
                hazard = scenario.hazard(hour + at / 3600.0)
            else:
                hazard = belief.seen(0, at / 3600.0).per_hour
            interval = min(daly_interval_seconds(save, hazard), _LONGEST_SECONDS)
            if at + interval + save > life:
                break
            at += interval + save
            useful += interval
        hour += life / 3600.0
        belief = belief.seen(int(number < len(lives) - 1), float(life) / 3600.0)
    return useful + max(0.0, float(lives[-1]) - at - save)


def _grid(scenario: Scenario) -> Iterator[float]:
    middle = daly_interval_seconds(scenario.save_seconds, scenario.highest_per_hour)
    steps = round(math.log(_GRID_SPAN) / math.log(_GRID_STEP))
    return (middle * _GRID_STEP**step for step in range(-steps // 4, steps + 1))


def add_command(benches: argparse._SubParsersAction) -> None:
    """Add `interval` to the subparsers of `bench`."""
    command = benches.add_parser(
        "interval", help="the interval rule against the best fixed interval, simulated"
    )
    command.add_argument(
        "--hours", type=float, default=4000.0, help="length of each job; default: 4000"
    )
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--json", action="store_true", help="print the results for a program")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    results = [compare(scenario, seed=arguments.seed) for scenario in scenarios(arguments.hours)]
    if arguments.json:
        print(json.dumps([asdict(result) for result in results], indent=1))
        return 0
    jobs = max(1, round(TOTAL_HOURS / arguments.hours))
    print(
        f"simulated: {jobs} jobs of {arguments.hours:g} h; share of the time lost to stalls and "
        "redone work"
    )
    print(
        f"{'hazard':<40} {'save':>5} {'rule':>8} {'best fixed':>10} {'at':>8} {'excess':>8} "
        f"{'if told':>8}"
    )
    for one in results:
        fixed = f"{one.best_fixed_loss:>10.3%} {one.best_fixed_seconds:>6.0f} s"
        excess = f"{one.excess:>+8.2%} {one.known_excess:>+8.2%}"
        print(
            f"{one.scenario:<40} {one.save_seconds:>3.0f} s {one.rule_loss:>8.3%} {fixed} {excess}"
        )
    print(f"worst excess {max(one.excess for one in results):+.2%}")
    return 0
