"""A virtual AWS Batch for `place`: Spot capacity comes and goes by a trace, on a clock that no test waits for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cost.capacity import Placement
from infra.config.schema import RunConfig
from infra.events import Event
from tests.support.capacity import JobLog, placed_now, planned
from tests.support.timelines import WALL

HOUR = 3600.0


@dataclass
class Course:
    """How a job went. Seconds from its beginning; decisions: (second, placement, work hours left)."""

    finished: float | None = None
    usd: float = 0.0
    decisions: list[tuple[float, Placement, float]] = field(default_factory=list)
    spent_before: list[float] = field(default_factory=list)
    log: JobLog = field(default_factory=JobLog)

    @property
    def markets(self) -> list[str]:
        return [placement.market for _, placement, _ in self.decisions]


@dataclass
class World:
    """up: whether the Spot queue has capacity, for `gap_seconds` each, and after its end as at its end.

    A start on demand waits for a random time, at most as long as was stated; a loss redoes half a commit interval.
    """

    up: Sequence[bool]
    gap_seconds: float = 195.0
    seed: int = 0

    def has(self, second: float) -> bool:
        return self.up[min(len(self.up) - 1, int(second // self.gap_seconds))]

    def next_change(self, second: float, wanted: bool) -> float:
        """The first moment from `second` on at which capacity is `wanted`; infinite: never again."""
        if self.has(second) is wanted:
            return second
        for index in range(int(second // self.gap_seconds) + 1, len(self.up)):
            if self.up[index] is wanted:
                return index * self.gap_seconds
        return float("inf")

    def run(self, config: RunConfig) -> Course:
        """Place, run, lose and place again until the job is done or ten times its deadline has passed."""
        course, draw, now, done = Course(), random.Random(self.seed), 0.0, 0.0
        whole = planned(config, WALL).ranked[0].case.work_hours
        limit = 10 * (config.cost.deadline_hours or 1000.0) * HOUR
        while now < limit:
            # A process of its own decides each time: all it knows went through the store.
            course.log.events = [Event.from_json(one.to_json()) for one in course.log.events]
            placement = placed_now(config, course.log, now, share_done=done / whole, spent_usd=course.usd)
            course.spent_before.append(course.usd)
            course.decisions.append((now, placement, whole - done))
            now, done, finished = self._attempt(placement, course, draw, now, done, whole)
            if finished:
                course.finished = now
                return course
        return course

    def _attempt(
        self, placement: Placement, course: Course, draw: random.Random, now: float, done: float, whole: float
    ) -> tuple[float, float, bool]:
        waits = placement.runnable_seconds
        spot = placement.market == "spot"
        start = self.next_change(now, True) if spot else now + draw.uniform(0, waits)
        if start > now + waits:
            course.log.told("never_started", placement, now + waits, started=None, job_id=f"job-{now}")
            return now + waits, done, False
        case = planned_case(placement)
        end = start + (case["changeover_hours"] + whole - done) * HOUR
        lost = self.next_change(start, False) if spot else float("inf")
        course.usd += (min(end, lost) - start) / HOUR * placement.gang_usd_per_hour
        if end <= lost:
            course.log.told("ended", placement, end, started=start, job_id=f"job-{now}")
            return end, whole, True
        trained = (lost - start) / HOUR - case["changeover_hours"] - case["commit_interval_hours"] / 2
        course.log.told("reclaimed", placement, lost, started=start, job_id=f"job-{now}")
        return lost, done + max(0.0, trained), False


def planned_case(placement: Placement) -> dict:
    """Changeover and commit interval as the decision reckoned with them."""
    assert placement.state is not None
    return placement.state
