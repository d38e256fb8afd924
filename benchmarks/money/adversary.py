"""Admitted jobs on the virtual AWS Batch under an adversary that watches the job and strikes where it hurts most."""

from __future__ import annotations

import random
from dataclasses import dataclass

from benchmarks.money.virtual_batch import BEGAN_UTC, HOUR, Run, VirtualBatch, planned
from ebbflow.cost.plan.plan import make_plan
from ebbflow.infra.config.schema import RunConfig


@dataclass(frozen=True)
class Verdict:
    """Outcome of one job: how late in hours, and how far over its budget in dollars and in minutes of on-demand."""

    late_hours: float
    over_usd: float
    over_minutes: float
    strikes: int


class Watcher:
    """An adversary that sees the job: it strikes just before a commit, or at the first steps of a start."""

    def __init__(self, draw: random.Random, interval_hours: float) -> None:
        self._draw, self._interval_hours = draw, interval_hours
        self._patience_hours = draw.choice([0.0, 0.0, 0.3, 1.5])
        self._kind = draw.choice(["fail", "reclaim", "both"])
        self._before_commit = draw.random() < 0.7
        self.strikes = 0

    def __call__(self, run: Run) -> str:
        if (run.now - run.started) / HOUR < self._patience_hours or run.restarts > 40:
            return ""
        if self._before_commit and run.uncommitted_hours < 0.9 * self._interval_hours:
            return ""
        self.strikes += 1
        return self._draw.choice(["fail", "reclaim"]) if self._kind == "both" else self._kind


def adversarial_job(config: RunConfig, seed: int) -> Verdict | None:
    """Draw limits, capacity, a jump of the launcher's clock and an adversary, and run the job.

    The budget is 5–35 % above on-demand, the deadline 1.2–2.5 times the work. On-demand starts take all of the stated
    wait. Capacity comes and goes, or never ends. The clock of half of the jobs is set back by 30 min after an hour.

    Returns:
        None if the job is not admitted.
    """
    draw = random.Random(seed)
    usual = next(one for one in planned(config, BEGAN_UTC).ranked if one.market == "on_demand")
    limits = {
        "budget_usd": usual.expected_usd * draw.uniform(1.05, 1.35),
        "deadline_hours": usual.case.work_hours * draw.uniform(1.2, 2.5),
    }
    config = config.model_copy(update={"cost": config.cost.model_copy(update=limits)})
    if make_plan(config, now_utc=BEGAN_UTC).refusal is not None:
        return None
    length = draw.choice([1, 3, 20, 60])
    up = [up for _ in range(400) for up in [bool(draw.getrandbits(1))] * length]
    skew = draw.choice([0.0, -1800.0])
    watcher = Watcher(draw, usual.case.interval_hours)
    course = VirtualBatch(
        up if draw.random() < 0.5 else [True],
        seed=seed,
        adversary=watcher,
        slowest=True,
        clock=lambda second: second + (skew if second > HOUR else 0.0),
    ).run(config)
    end = float("inf") if course.finished is None else course.finished / HOUR
    over = max(0.0, course.usd - limits["budget_usd"])
    late = max(0.0, end - limits["deadline_hours"])
    return Verdict(late, over, 60 * over / usual.gang_usd_per_hour, watcher.strikes)
