"""The save controller: what each rank votes, and what all ranks do about saves at a step."""

from __future__ import annotations

import math
import resource
import time
from dataclasses import FrozenInstanceError, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import CheckpointConfig
from ebbflow.core.events import COMMIT_SKIPPED, INTERVAL
from ebbflow.core.reliability import GammaHazard
from ebbflow.core.terms import Terms
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.staging import StagingBuffer
from ebbflow.training.errors import NoRoom
from ebbflow.training.limits import Limits, Position, Stop
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.save_controller import SaveController, SaveSchedule
from ebbflow.training.step_sync import Row, StepSync
from tests.support.flushed_output import FlushedOutput, flushed

__all__ = ["flushed"]

DRAINED = float(Stop.INTERRUPTED)

BUSY = {"saving": 1.0}
DUE = {"save_due": 1.0}
RENEW = {"renew": 1.0}
LIMIT = {"least_seconds": 120.0}


class Saver:
    """A checkpointer that records its calls.

    A save is in flight until `busy_seconds` have passed.
    """

    def __init__(self, *, busy_seconds: float = 0.0) -> None:
        self.calls: list[Any] = []
        self.limit_seconds = 70.0
        self.failed_step: int | None = None
        self.expected_seconds: float | None = None
        self.last_durable: tuple[int, float] | None = None
        self.last_commit: CommitRef | None = None
        self._idle_at = time.monotonic() + busy_seconds

    @property
    def busy(self) -> bool:
        return time.monotonic() < self._idle_at

    def before_step(self) -> None:
        self.calls.append("before_step")

    def save(
        self, step: int, module: Any, optimizer: Any, extra: dict[str, Any], **limits: float
    ) -> float:
        self.calls.append(("save", step, module, optimizer, extra, limits))
        return 0.25

    def hurry(self) -> None:
        self.calls.append("hurry")

    def wait(self) -> None:
        self.calls.append("wait")


class Bench:
    """A save controller with recorded events, phases and calls."""

    def __init__(
        self,
        *,
        rank: int = 0,
        scheduled: bool = True,
        saver: Saver | None = None,
        **checkpoint: Any,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.phases: list[tuple[str, int]] = []
        self.resets: list[bool] = []
        self.saver = saver or Saver()
        config = CheckpointConfig(**checkpoint)
        terms = Terms(usd_per_rank_second=0.25, spent_usd=3.0)
        self.limits = Limits(terms, world_size=2, elapsed_seconds=lambda: 8.0)
        if scheduled:
            self.schedule = SaveSchedule(config, GammaHazard.from_prior(0.5), now=lambda: 100.0)
        else:
            self.schedule = None

        def emit(name: str, **data: Any) -> None:
            self.events.append((name, data))

        self.controller = SaveController(
            config=config,
            rank=rank,
            spread=SimpleNamespace(  # type: ignore[arg-type]
                module="module", reset_compression=lambda: self.resets.append(True)
            ),
            optimizer="optimizer",  # type: ignore[arg-type]
            saver=self.saver,  # type: ignore[arg-type]
            limits=self.limits,
            reporter=Reporter(
                Clock(emit), emit, beat=lambda step, phase: self.phases.append((phase, step))
            ),
            extra={"seed": 1},
            carried=lambda step: {"guards": step},
            save_schedule=self.schedule,
        )

    def saves(self) -> list[tuple[int, dict[str, float]]]:
        return [(call[1], call[5]) for call in self.saver.calls if call[0] == "save"]

    def events_of(self, name: str) -> list[dict[str, Any]]:
        return [data for event, data in self.events if event == name]


@dataclass
class Pauses:
    """A clock that only sleeping moves, by 1/64 s each time."""

    now: float = 1000.0
    seconds: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        self.now += 2**-6


def sync_of(*changes: dict[str, float]) -> StepSync:
    fields = Row._fields[:9]
    return StepSync([Row(**(dict.fromkeys(fields, 0.0) | change)) for change in changes])


def test_a_save_has_the_fields_of_its_commit_and_records_its_cost() -> None:
    bench = Bench()
    assert bench.schedule is not None
    bench.schedule.remember(50.0)
    bench.controller.save(Position(7, 56), least_seconds=120.0)
    extra = {
        "seed": 1,
        "guards": 7,
        "step": 7,
        "cursor": 56,
        "spent_usd": 3.0 + 0.25 * 2 * 8.0,
        "exposed_seconds": 50.0,
    }
    assert bench.saver.calls == [
        ("save", 7, "module", "optimizer", extra, {"least_seconds": 120.0})
    ]
    assert bench.phases == [("checkpoint", 7)] and bench.resets == [True]
    choice = bench.schedule.choice()
    assert choice.stall_seconds == 0.25
    (interval,) = bench.events_of(INTERVAL)
    names = (
        "seconds",
        "stall_seconds",
        "slow_down_seconds",
        "upload_seconds",
        "hazard_per_hour",
        "predicted_loss",
    )
    assert interval == {"step": 7} | {name: getattr(choice, name) for name in names}
    assert bench.controller.extra == {"seed": 1}


def test_a_rank_without_a_schedule_saves_without_its_fields() -> None:
    bench = Bench(scheduled=False)
    bench.controller.save(Position(7, 56))
    assert "exposed_seconds" not in bench.saver.calls[0][4] and bench.resets == [True]
    assert bench.events_of(INTERVAL) == []


@pytest.mark.parametrize(("step", "vote"), [(3, False), (4, True)])
def test_the_vote_for_a_save_follows_the_schedule_of_rank_0(step: int, vote: bool) -> None:
    assert Bench(interval_steps=4).controller.due(step) is vote
    assert not Bench(scheduled=False, interval_steps=4).controller.due(step)


def test_a_capped_upload_leaves_the_time_of_the_last_save_unknown() -> None:
    for cap, expected in ((None, 40.0), (0.5, 0.0)):
        bench = Bench(upload_mib_per_second=cap)
        bench.saver.expected_seconds = 40.0
        assert bench.controller.last_save_seconds == expected


@pytest.mark.parametrize(
    ("when_busy", "rows", "last", "expected"),
    [
        ("wait", ({}, {}), False, None),
        ("wait", (DUE, {}), False, LIMIT),
        ("wait", ({}, DUE), False, None),
        ("wait", ({}, {}), True, LIMIT),
        ("wait", ({}, RENEW), False, LIMIT),
        ("wait", (DUE, BUSY), False, LIMIT),
        ("skip", (DUE, {}), False, LIMIT),
        ("skip", (BUSY, BUSY), False, None),
        ("skip", (BUSY, BUSY), True, LIMIT),
        ("skip", (RENEW, BUSY), False, LIMIT),
        ("skip", (DUE | RENEW, BUSY), False, LIMIT),
        ("wait", (DUE, {"save_limit_seconds": 121.0}), False, {"least_seconds": 121.0}),
        ("wait", (DUE, {"save_limit_seconds": 119.0}), False, LIMIT),
    ],
)
def test_a_step_is_saved_if_it_is_due_last_or_before_a_renewal(
    when_busy: str,
    rows: tuple[dict[str, float], ...],
    last: bool,
    expected: dict[str, float] | None,
) -> None:
    bench = Bench(when_busy=when_busy, deadline_seconds=120.0)
    bench.controller.save_if_due(Position(5), sync_of(*rows), last=last)
    assert bench.saves() == ([] if expected is None else [(5, expected)])
    assert bench.events_of(COMMIT_SKIPPED) == [] and "hurry" not in bench.saver.calls


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_is_due_while_ranks_still_save_is_skipped(
    rank: int, flushed: FlushedOutput
) -> None:
    bench = Bench(rank=rank, when_busy="skip")
    bench.controller.save_if_due(Position(5), sync_of(DUE, *[BUSY] * 6), last=False)
    reason = "the previous save is still in flight on rank 1, 2, 3, 4, 5"
    assert bench.saves() == []
    assert bench.events_of(COMMIT_SKIPPED) == ([] if rank else [{"step": 5, "reason": reason}])
    assert flushed.text == ("" if rank else f"step 5: not saved: {reason}\n")


@pytest.mark.parametrize(
    ("needed", "left", "expected"),
    [
        (20.0, 20.0, {"deadline_seconds": 20.0}),
        (20.5, 20.0, None),
        (0.0, 200.0, {"deadline_seconds": 120.0}),
        (0.0, 0.25, {"deadline_seconds": 1.0}),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_a_drained_rank_saves_once_more_if_time_is_left(
    needed: float, left: float, expected: dict[str, float] | None, last: bool
) -> None:
    bench = Bench(deadline_seconds=120.0)
    sync = sync_of(
        {"stop": DRAINED, "save_seconds": needed}, {"stop_seconds": left, "save_due": 1.0}
    )
    bench.controller.save_if_due(Position(5), sync, last=last)
    assert bench.saves() == ([] if expected is None else [(5, expected)])
    assert bench.saver.calls[0] == "hurry"
    reason = f"a save takes {needed:.1f} s and {left:.1f} s are left; the last commit counts"
    assert bench.events_of(COMMIT_SKIPPED) == (
        [{"step": 5, "reason": reason}] if expected is None else []
    )


@pytest.mark.parametrize("stop", [Stop.BUDGET, Stop.DEADLINE])
def test_a_job_that_stops_for_another_reason_saves_without_haste(stop: Stop) -> None:
    bench = Bench(deadline_seconds=120.0)
    bench.controller.save_if_due(Position(5), sync_of({"stop": float(stop)}), last=True)
    assert bench.saves() == [(5, LIMIT)] and "hurry" not in bench.saver.calls


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    pauses = Pauses()
    monkeypatch.setattr(time, "monotonic", lambda: pauses.now)
    monkeypatch.setattr(time, "sleep", pauses.sleep)
    return pauses


def test_a_finished_job_waits_for_its_save_and_reports_the_store(pauses: Pauses) -> None:
    bench = Bench(saver=Saver(busy_seconds=0.0625))
    bench.controller.reporter.enter("checkpoint", 9)
    bench.controller.finish()
    assert bench.saver.calls == ["before_step", "wait"] and pauses.seconds == [0.02] * 4
    assert bench.phases == [("checkpoint", 9), ("store", 9), ("checkpoint", 9)]


def test_a_finished_job_hurries_its_save_after_a_drain_request(pauses: Pauses) -> None:
    bench = Bench(saver=Saver(busy_seconds=20.0))
    bench.limits.request_drain(30.0)
    bench.controller.finish()
    assert bench.saver.calls == ["before_step", "hurry", "wait"] and pauses.seconds == []


def test_a_finished_job_looks_at_its_save_until_the_deadline(pauses: Pauses) -> None:
    bench = Bench(saver=Saver(busy_seconds=20.0), deadline_seconds=0.125)
    bench.controller.finish()
    assert bench.saver.calls == ["before_step", "wait"] and len(pauses.seconds) == 8


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (None, "there is no commit to be resumed from"),
        (5, "saved, to be resumed"),
        (3, "step 5 is not saved, to be resumed from step 3"),
    ],
)
def test_a_resume_point_is_the_last_commit(saved: int | None, text: str) -> None:
    bench = Bench()
    if saved is None:
        bench.saver.last_commit = None
    else:
        bench.saver.last_commit = CommitRef("key", saved, 1, "")
    assert bench.controller.describe_resume_point(Position(5)) == text


def test_a_steps_duration_is_its_own_work_and_its_data() -> None:
    bench = Bench()
    assert bench.schedule is not None
    bench.schedule.saved(1, 0.0)
    bench.saver.last_durable = (1, 6.0)
    for _ in range(3):
        quiet = {"useful_step": 1.0, "data_wait": 0.5, "checkpoint_stall": 50.0}
        busy = {"useful_step": 2.0, "checkpoint_stall": 70.0}
        bench.controller.record_step_time(quiet, saving=False)
        fields = bench.controller.record_step_time(busy, saving=True)
    assert bench.schedule.choice().slow_down_seconds == (2.0 - 1.5) * 3
    assert bench.schedule.choice().upload_seconds == 6.0
    assert fields == {"at_risk_usd": 0.0}


def test_dollars_at_risk_are_those_since_the_last_commit() -> None:
    bench = Bench()
    now = 100.0
    schedule = SaveSchedule(bench.controller.config, GammaHazard.from_prior(0.5), now=lambda: now)
    controller = replace(bench.controller, save_schedule=schedule)
    now = 140.0
    assert controller.record_step_time({}, saving=False) == {"at_risk_usd": 40.0 * 0.25 * 2}
    assert (
        Bench(scheduled=False).controller.record_step_time({"useful_step": 1.0}, saving=False) == {}
    )


def test_a_user_may_ask_for_a_save_when_none_is_in_flight() -> None:
    asked = SimpleNamespace(saves=1, leave_at=math.inf)
    for busy_seconds, due in ((0.0, True), (60.0, False)):
        bench = Bench(saver=Saver(busy_seconds=busy_seconds), interval_steps=100)
        limits = Limits(None, world_size=1, elapsed_seconds=lambda: 0.0, control=asked)  # type: ignore[arg-type]
        controller = replace(bench.controller, limits=limits)
        assert controller.due(3) is due


def test_a_save_controller_is_given_by_name_and_cannot_be_changed() -> None:
    bench = Bench()
    assert bench.schedule is not None
    for value in (bench.controller, bench.schedule.choice()):
        with pytest.raises(TypeError):
            type(value)(*vars(value).values())
        with pytest.raises(FrozenInstanceError):
            value.seconds = 1.0  # type: ignore[misc,union-attr]


def test_a_limit_of_file_size_below_the_staging_buffer_is_named_with_the_fix() -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    buffer = StagingBuffer("staging")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(NoRoom, match=r"204,800 bytes .* may have 200,000 \(`ulimit -f`\); fix"):
            buffer.view(204_800)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert buffer.view(204_800).numel() == 204_800
    buffer.close()
