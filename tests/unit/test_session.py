"""The job session: what a rank does between two steps, alike for the engine and for scripts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome, StoreError
from ebbflow.core.events import FAULT_INJECTED, NOTICE, OUTCOME, RESTORE
from ebbflow.core.layout import commit_key
from ebbflow.core.reliability import GammaHazard
from ebbflow.training.checkpoint import RejectedCommit, RestoreResult
from ebbflow.training.checkpoint.restore import RestoreSeconds
from ebbflow.training.engine.guards.guards import Action, Guards
from ebbflow.training.errors import (
    CheckpointError,
    DataError,
    GenerationSuperseded,
    Rewind,
    TrainingError,
)
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Limits, LoopResult, Position
from ebbflow.training.rehearse import Fault
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.save_controller import SaveController, SaveSchedule
from ebbflow.training.session import JobSession, Rehearsal
from ebbflow.training.step_sync import Row, StepSync

STEP = Row(
    step=5.0,
    cursor=32.0,
    loss_sum=6.0,
    weight=3.0,
    square_sum=9.0,
    flops=1.0,
    compute_seconds=0.5,
    data_seconds=0.25,
    stop=0.0,
)


class Saver:
    """A checkpointer that records its calls."""

    busy = True
    limit_seconds = 70.0
    expected_seconds = 9.0
    last_commit = None
    last_durable = None

    def __init__(self) -> None:
        self.failed_step: int | None = 3
        self.calls: list[Any] = []
        self.restored: RestoreResult | None = None
        self.error: Exception | None = None

    def abandon(self, step: int) -> None:
        self.calls.append(("abandon", step))

    def before_step(self) -> None:
        self.busy = False

    def wait(self) -> None:
        self.calls.append("wait")
        if self.error is not None:
            raise self.error

    def save(self, step: int, *_: Any, **limits: float) -> float:
        self.calls.append(("save", step, limits))
        return 0.25

    def restore(self, candidates: list[str], *_: Any, **options: Any) -> RestoreResult | None:
        self.calls.append(("restore", candidates, options["place"]))
        return self.restored


class Bench:
    """A session with recorded events and phases."""

    def __init__(self, *, rank: int = 0, rehearsal: Rehearsal | None = None, **config: Any) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.phases: list[tuple[str, int]] = []
        self.saver = Saver()
        self.lost_record = False
        settings = RunConfig.model_validate(config)
        gang = Gang(rank=rank)
        reporter = Reporter(
            Clock(self._emit), self._emit, lambda step, phase: self.phases.append((phase, step))
        )
        limits = Limits(None, world_size=1, elapsed_seconds=lambda: 0.0)
        saver: Any = self.saver
        spread: Any = SimpleNamespace(module="module", reset_compression=lambda: None)
        self.schedule = None
        if rank == 0:
            self.schedule = SaveSchedule(settings.checkpoint, GammaHazard.from_prior(0.5))
        saves = SaveController(
            config=settings.checkpoint,
            rank=rank,
            spread=spread,
            optimizer=None,
            saver=saver,
            limits=limits,
            reporter=reporter,
            extra={},
            save_schedule=self.schedule,
        )
        self.session = JobSession(
            config=settings,
            gang=gang,
            reporter=reporter,
            limits=limits,
            saver=saver,
            saves=saves,
            guards=Guards(config=settings, gang=gang, copies=1, emit=self._emit),
            rehearsal=rehearsal,
        )

    def _emit(self, name: str, **data: Any) -> None:
        if self.lost_record and name == FAULT_INJECTED:
            raise StoreError("the disk is full")
        self.events.append((name, data))

    def events_of(self, name: str) -> list[dict[str, Any]]:
        return [data for event, data in self.events if event == name]


def restored_of(**changes: Any) -> RestoreResult:
    values: dict[str, Any] = {
        "step": 4,
        "extra": {"cursor": 32, "exposed_seconds": 60.0, "spent_usd": 1.0},
        "key": "commits/4",
        "rng": "restored",
        "world_size": 1,
        "bytes_read": 8,
        "seconds": 0.5,
        "split": RestoreSeconds(list=0.1, download=0.1, verify=0.1, load=0.1, agree=0.1),
    }
    return RestoreResult(**(values | changes))


def test_a_sync_abandons_the_save_that_failed_on_any_rank() -> None:
    bench = Bench()
    assert bench.session.sync(STEP).rows == [STEP]
    assert bench.saver.calls == []
    bench.session.sync(STEP._replace(failed_save=3.0))
    assert bench.saver.calls == [("abandon", 3)]


@pytest.mark.parametrize(("interval", "owed", "due"), [(5, False, 1), (4, False, 0), (4, True, 1)])
def test_a_save_request_has_the_vote_and_the_last_saves_of_its_rank(
    interval: int, owed: bool, due: int
) -> None:
    bench = Bench(checkpoint={"interval": "steps", "interval_steps": interval})
    bench.session.limits.request_drain(100.0)
    row = bench.session.with_save_request(STEP, save_owed=owed)
    assert row.save_due == due
    assert (row.saving, row.save_seconds, row.save_limit_seconds) == (True, 9.0, 70.0)
    assert row.failed_save == 3
    assert 90.0 < row.stop_seconds <= 100.0
    assert row[:9] == STEP[:9]


def test_only_the_schedule_of_rank_0_votes_for_a_save() -> None:
    bench = Bench(rank=1, checkpoint={"interval": "steps", "interval_steps": 5})
    assert bench.session.with_save_request(STEP).save_due == 0


def test_a_session_judges_finite_losses_as_steps_to_take() -> None:
    bench = Bench()
    assert bench.session.judge(Position(4, 32), StepSync([STEP])).action is Action.STEP
    assert bench.saver.calls == [] and bench.phases == []


def test_a_session_waits_for_the_save_in_flight_before_it_goes_back() -> None:
    bench = Bench(guards={"non_finite": "rewind"})
    bad = StepSync([STEP._replace(loss_sum=math.nan)])
    with pytest.raises((Rewind, TrainingError)):
        bench.session.judge(Position(4, 32), bad)
    assert bench.saver.calls[0] == "wait"
    assert bench.phases[0] == ("checkpoint", 4)


def test_a_session_saves_what_the_ranks_agreed_on() -> None:
    bench = Bench()
    at = Position(5, 40)
    bench.session.save_if_due(at, StepSync([STEP]), last=False)
    assert bench.saver.calls == []
    bench.session.save_if_due(at, StepSync([STEP._replace(save_due=1.0)]), last=False)
    bench.session.save_if_due(at, StepSync([STEP]), last=True)
    assert [call[:2] for call in bench.saver.calls] == [("save", 5), ("save", 5)]


def test_a_restore_without_candidates_reports_nothing() -> None:
    bench = Bench()
    assert bench.session.restore([]) is None
    assert bench.events == [] and bench.phases == []


def test_a_restore_reports_the_commit_and_remembers_the_time_before_it() -> None:
    bench = Bench()
    bench.saver.restored = restored_of()
    assert bench.session.restore(["commits/4"]) is bench.saver.restored
    (event,) = bench.events_of(RESTORE)
    assert (event["step"], event["key"], event["rejected"]) == (4, "commits/4", [])
    assert bench.phases == [("restore", 0)]
    assert bench.schedule is not None and bench.schedule.exposed_seconds >= 60.0


def test_a_restore_after_a_damaged_commit_tells_what_was_lost(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench = Bench()
    key = commit_key(6, 1, "0" * 64)
    damaged = RejectedCommit(key=key, reason="CRC", extra={"spent_usd": 1.5})
    bench.saver.restored = restored_of(rejected=[damaged])
    bench.session.restore([key, "commits/4"])
    (event,) = bench.events_of(RESTORE)
    assert event["rejected"] == [
        {
            "key": key,
            "reason": "CRC",
            "lost_steps": 2,
            "lost_usd": 0.5,
            "lost": "2 steps, $0.50 paid for them",
        }
    ]
    assert "restored step 4 instead of a damaged commit; lost: 2 steps" in capsys.readouterr().out


def test_a_commit_of_another_job_is_not_reported_as_restored() -> None:
    def refuse(restored: RestoreResult) -> None:
        raise DataError(f"{restored.key} has other data")

    bench = Bench()
    bench.saver.restored = restored_of()
    with pytest.raises(DataError, match="commits/4 has other data"):
        bench.session.restore(["commits/4"], check=refuse)
    assert bench.events_of(RESTORE) == []


def test_a_failed_last_save_is_part_of_the_message_unless_it_is_fatal() -> None:
    bench = Bench()
    assert bench.session.finish_saves("left", fatal=TrainingError) == "left"
    bench.saver.error = CheckpointError("no index from rank 1")
    assert bench.session.finish_saves("left", fatal=GenerationSuperseded) == (
        "left; the last save did not become a commit: no index from rank 1"
    )
    with pytest.raises(CheckpointError):
        bench.session.finish_saves("left", fatal=TrainingError)
    bench.saver.error = GenerationSuperseded("generation 3 has begun")
    with pytest.raises(GenerationSuperseded):
        bench.session.finish_saves("left", fatal=GenerationSuperseded)
    assert "generation 3 has begun" in bench.session.finish_saves("left", fatal=None)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_end_of_a_session_is_recorded_by_rank_0_alone(rank: int) -> None:
    bench = Bench(rank=rank)
    ending = bench.session.end(Position(7, 56), Outcome.BUDGET, "spent", "abc")
    assert ending == LoopResult(Outcome.BUDGET, 7, "spent", "abc")
    expected = {
        "step": 7,
        "flush": True,
        "outcome": "budget",
        "weights_sha256": "abc",
        "message": "spent",
    }
    assert bench.events_of(OUTCOME) == [expected] * (rank == 0)


def test_a_rehearsed_fault_spoils_one_loss() -> None:
    fault = Fault.parse("non-finite@step:2")
    bench = Bench(rehearsal=Rehearsal(fault=fault, node=0, nodes=1, agent_pid=None))
    bench.session.rehearse_fault(1, max_steps=4)
    assert not bench.session.take_spoiled_loss()
    bench.session.rehearse_fault(2, max_steps=4)
    assert [bench.session.take_spoiled_loss() for _ in range(2)] == [True, False]
    assert len(bench.events_of(FAULT_INJECTED)) == 1


def test_a_fault_whose_record_fails_is_skipped() -> None:
    fault = Fault.parse("non-finite@step:2")
    bench = Bench(rehearsal=Rehearsal(fault=fault, node=0, nodes=1, agent_pid=None))
    bench.lost_record = True
    bench.session.rehearse_fault(2, max_steps=4)
    assert not bench.session.take_spoiled_loss()
    assert "was skipped at step 2" in bench.events_of(NOTICE)[0]["message"]


def test_a_session_without_a_rehearsal_injects_nothing() -> None:
    bench = Bench()
    bench.session.rehearse_fault(2, max_steps=4)
    assert not bench.session.take_spoiled_loss() and bench.events == []
