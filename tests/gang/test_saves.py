"""What saves cost, in the report; and what all ranks decide alike about them, from the step sync."""

from __future__ import annotations

import html
import json
import math
import threading
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import COMMIT, COMMIT_FAILED, COMMIT_SKIPPED, INTERVAL, LedgerClass
from ebbflow.core.reliability import GammaHazard
from ebbflow.cost.ledger.ledger import Ledger, LedgerLine
from ebbflow.cost.report.figure_text import format_key_figures
from ebbflow.cost.report.figures import compute_save_figures
from ebbflow.cost.report.render_html import render as render_html
from ebbflow.cost.report.render_text import render as render_text
from ebbflow.cost.report.report import build_report
from ebbflow.training.engine.guards.guards import Guards
from ebbflow.training.engine.trainer import Trainer
from ebbflow.training.errors import CheckpointError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import CAUSES, OrderRecord, RankOrder
from ebbflow.training.limits import Limits, Position, Stop
from ebbflow.training.rehearse import Fault
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.save_controller import SaveSchedule
from ebbflow.training.session import Rehearsal
from ebbflow.training.step_sync import Row, StepSync
from tests.support.assembled_trainer import assemble_trainer
from tests.support.flow import wait_until
from tests.support.timelines import GangLog, event, plan_event


class Saver:
    """Notes what it was asked; `fails`: what waiting for the last save comes to."""

    last_commit = last_durable = expected_seconds = failed_step = None
    limit_seconds = 0.0
    busy = False

    def __init__(self, fails: str = "") -> None:
        self.asked: list[Any] = []
        self._fails = fails

    def before_step(self) -> None:
        self.asked.append("before_step")

    def save(self, step: int, *_: Any, **limits: float) -> float:
        self.asked.append((step, *limits.values()))
        return 0.25

    def hurry(self) -> None:
        self.asked.append("hurry")

    def wait(self) -> None:
        if self._fails:
            raise CheckpointError(self._fails)


def test_the_report_shows_predicted_beside_actual_lost_work() -> None:
    seconds = {
        LedgerClass.USEFUL_STEP: 90,
        LedgerClass.CHECKPOINT_STALL: 2,
        LedgerClass.REDONE_STEP: 8,
    }
    lines = [
        LedgerLine(
            ledger_class=name, rank_microseconds=1_000_000 * value, usd=Decimal(1), kind="measured"
        )
        for name, value in seconds.items()
    ]
    ledger = Ledger(
        lines=tuple(lines),
        paid_microseconds=100_000_000,
        total_usd=Decimal(11),
        price_kind="simulated",
        useful_on_demand_usd=None,
        redone_steps=4,
    )
    events = [
        event(INTERVAL, 1.0, seconds=20.0, predicted_loss=0.06),
        event(COMMIT, 2.0, step=2, key="a", seconds=0.5, stall_seconds=0.02),
        event(INTERVAL, 3.0, seconds=30.0, predicted_loss=0.08),
        event(COMMIT, 4.0, step=4, key="b", seconds=0.7, stall_seconds=0.04),
        event(COMMIT_SKIPPED, 5.0, step=6, reason="busy"),
        *(event(COMMIT_FAILED, 6.0, step=8, rank=rank, message="away") for rank in (0, 1)),
    ]
    found = compute_save_figures(events, ledger)
    assert found == {
        "skipped": 1,
        "failed": 1,
        "stall_seconds": pytest.approx(0.03),
        "durable_seconds": pytest.approx(0.6),
        "interval_seconds": 25.0,
        "predicted_loss": pytest.approx(0.07),
        "actual_loss": pytest.approx(0.1),
    }
    empty = compute_save_figures([], replace(ledger, lines=(), paid_microseconds=0))
    assert {name for name, value in empty.items() if value is not None} == {"skipped", "failed"}


def test_every_rendering_shows_the_predicted_loss_beside_the_actual_one() -> None:
    """One rank, 20 s paid: nine steps of 2 s that count, and one that is taken again."""
    first = GangLog(1, 10.0, [[0]])
    first.steps(1, 5, useful_step=2.0)
    first.commit(4)
    first.ended("rank_killed", 10.0, culprit="rank 0: killed")
    second = GangLog(2, 20.0, [[0]], parent=(4, 1))
    second.steps(5, 9, useful_step=2.0)
    second.outcome(Outcome.COMPLETED)
    second.ended("completed", 10.0)
    told = event(INTERVAL, 15.0, generation=1, rank=0, step=4, seconds=20.0, predicted_loss=0.06)
    report = build_report([plan_event(), *first.events, told, *second.events])
    assert report.actual["saves"]["predicted_loss"] == 0.06
    assert report.actual["saves"]["actual_loss"] == pytest.approx(0.1)
    wanted = "stalls and redone steps 10.0 % of paid time, predicted 6.0 %"
    assert json.loads(json.dumps(report.to_json()))["actual"]["saves"] == report.actual["saves"]
    for rendered in (
        render_text(report),
        html.unescape(render_html(report)),
        str(format_key_figures(report)),
    ):
        assert wanted in " ".join(rendered.split())


def trainer_of(
    saver: Saver,
    events: list,
    *,
    limits: Limits | None = None,
    rehearsal: Rehearsal | None = None,
    **checkpoint: Any,
) -> Trainer:
    config = RunConfig.model_validate({"checkpoint": checkpoint})

    def emit(name: str, **data: Any) -> None:
        events.append((name, data))

    gang = Gang(rank=0, world_size=2)
    return assemble_trainer(
        config,
        gang,
        workload=None,
        spread=SimpleNamespace(
            module=None, reset_compression=lambda: None, square_sum=lambda gradients: 1.0
        ),
        optimizer=None,
        saver=saver,
        limits=limits or Limits(None, world_size=2, elapsed_seconds=lambda: 0.0),
        reporter=Reporter(Clock(emit, started=0.0), emit),
        guards=Guards(config=config, gang=gang, copies=1, emit=emit),
        save_schedule=SaveSchedule(config.checkpoint, GammaHazard.from_prior(0.1)),
        rehearsal=rehearsal,
    )


def sync_of(*rows: dict[str, float]) -> StepSync:
    values = dict.fromkeys(
        ("step", "cursor", "loss_sum", "square_sum", "flops", "compute_seconds", "data_seconds"),
        1.0,
    )
    return StepSync([Row(**{**values, "weight": 1.0, "stop": 0.0, **row}) for row in rows])


@pytest.mark.parametrize(("when_busy", "saved"), [("wait", [(7, 300.0)]), ("skip", [])])
def test_a_rank_that_is_still_saving_makes_all_wait_or_all_skip(
    when_busy: str, saved: list
) -> None:
    saver = Saver()
    events = []
    trainer = trainer_of(saver, events, when_busy=when_busy)
    trainer.session.save_if_due(
        Position(7),
        sync_of({"save_due": 1.0}, {"saving": 1.0, "save_limit_seconds": 300.0}),
        last=False,
    )
    assert saver.asked == saved, "the rank with the most bytes sets the limit of all"
    skipped = [data for name, data in events if name == COMMIT_SKIPPED]
    assert bool(skipped) is not bool(saved)
    assert not skipped or (skipped[0]["step"] == 7 and "rank 1" in skipped[0]["reason"])
    trainer.session.save_if_due(
        Position(8), sync_of({"saving": 1.0}, {"save_due": 1.0}), last=False
    )
    assert saver.asked == saved, "rank 0 alone decides what is due"
    trainer.session.save_if_due(Position(9), sync_of({}, {"saving": 1.0}), last=True)
    assert saver.asked[-1] == (9, 120.0), "the last step is saved in any case"


def test_a_save_that_is_asked_for_waits_for_the_one_under_way(tmp_path: Path) -> None:
    saver = Saver()
    control = OrderRecord.create(tmp_path / "record")
    limits = Limits(None, world_size=2, elapsed_seconds=lambda: 0.0, control=control)
    saves = trainer_of(saver, [], limits=limits, interval="steps", interval_steps=100).session.saves
    control.write(RankOrder(seconds=math.inf, cause=CAUSES[5], node=0))
    saver.busy = True
    assert not saves.due(7)
    saver.busy = False
    assert [saves.due(8), saves.due(9), saves.due(100)] == [True, False, True]


def test_a_rehearsed_notice_arrives_at_its_step(tmp_path: Path) -> None:
    """However short the steps are: a job that is over before its agent has looked would prove
    nothing.
    """
    control = OrderRecord.create(tmp_path / "record")
    notice = tmp_path / "notice.json"

    def agent() -> None:
        wait_until("the notice", notice.exists, timeout=60)
        control.write(RankOrder(seconds=60.0, cause=CAUSES[4], node=0))

    thread = threading.Thread(target=agent)
    thread.start()
    aim = Rehearsal(
        fault=Fault.parse("notice@step:5:node=0"),
        node=0,
        nodes=2,
        agent_pid=None,
        notice_path=str(notice),
    )
    limits = Limits(None, world_size=2, elapsed_seconds=lambda: 0.0, control=control)
    trainer = trainer_of(Saver(), [], limits=limits, rehearsal=aim)
    trainer.rehearse_fault(4)
    assert not notice.exists()
    trainer.rehearse_fault(5)
    assert limits.stop() is Stop.INTERRUPTED
    thread.join()


def test_a_notice_hurries_the_last_save_of_a_job_that_is_done(tmp_path: Path) -> None:
    saver = Saver()
    control = OrderRecord.create(tmp_path / "record")
    limits = Limits(None, world_size=2, elapsed_seconds=lambda: 0.0, control=control)
    session = trainer_of(saver, [], limits=limits).session
    phases = []
    reporter = replace(session.reporter, beat=lambda step, phase: phases.append(phase))
    saves = replace(session.saves, reporter=reporter)
    reporter.enter("checkpoint", 9)
    saves.finish()
    assert saver.asked == ["before_step"]
    saver.busy = True
    notice = threading.Timer(
        0.2, lambda: control.write(RankOrder(seconds=60.0, cause=CAUSES[2], node=0))
    )
    notice.start()
    saves.finish()
    notice.join()
    assert saver.asked == ["before_step", "before_step", "hurry"]
    assert phases == ["checkpoint", *["store", "checkpoint"] * 2], (
        "it is the store that is waited for"
    )


def test_a_notice_leads_to_a_save_in_time_or_to_none() -> None:
    saver = Saver()
    events = []
    trainer = trainer_of(saver, events, deadline_seconds=60)
    leaving = {"stop": float(Stop.INTERRUPTED)}
    fits = sync_of({**leaving, "save_seconds": 5.0, "stop_seconds": 28.0}, {"save_seconds": 9.0})
    trainer.session.save_if_due(Position(3), fits, last=True)
    assert saver.asked == ["hurry", (3, 28.0)]
    uneven = sync_of(
        {**leaving, "stop_seconds": 280.0}, {"save_limit_seconds": 90.0, "stop_seconds": 300.0}
    )
    trainer.session.save_if_due(Position(3), uneven, last=True)
    assert saver.asked[2:] == ["hurry", (3, 90.0)], (
        "more than deadline_seconds, and the same on both ranks"
    )
    del saver.asked[2:]
    late = sync_of({**leaving, "save_seconds": 5.0, "stop_seconds": 28.0}, {"save_seconds": 31.0})
    trainer.session.save_if_due(Position(4), late, last=True)
    assert saver.asked == ["hurry", (3, 28.0), "hurry"]
    (skipped,) = [data for name, data in events if name == COMMIT_SKIPPED]
    assert skipped["reason"] == "a save takes 31.0 s and 28.0 s are left; the last commit counts"


def test_a_drain_ends_without_the_last_save_but_a_finished_job_waits_for_it() -> None:
    events: list = []
    trainer = trainer_of(Saver(fails="no index from rank 1"), events)
    ending = trainer.end(Position(5), Outcome.INTERRUPTED, "asked to leave")
    assert ending.outcome is Outcome.INTERRUPTED and "no index from rank 1" in ending.message
    assert ending.message.endswith("there is no commit to be resumed from")
    with pytest.raises(CheckpointError, match="no index from rank 1"):
        trainer.end(Position(5), Outcome.COMPLETED)


def test_a_bandwidth_cap_does_not_apply_to_an_urgent_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[Row] = []
    monkeypatch.setattr(
        "ebbflow.training.session.exchange", lambda gang, row: rows.append(row) or StepSync([row])
    )
    for cap in (None, 0.5):
        saver = Saver()
        saver.expected_seconds = 40.0
        trainer = trainer_of(saver, [], upload_mib_per_second=cap)
        trainer = replace(trainer, workload=SimpleNamespace(flops=lambda batch: 1.0))
        trainer.sync_step(Position(3), None, SimpleNamespace(sum=1.0, weight=1.0), [])
    assert [row.save_seconds for row in rows] == [40.0, 0.0]


def test_of_several_times_to_leave_the_shortest_counts() -> None:
    limits = Limits(None, world_size=1, elapsed_seconds=lambda: 0.0, stop_seconds=30.0)
    assert limits.stop() is Stop.NONE and limits.stop_seconds == math.inf
    limits.request_drain(110.0)
    assert limits.stop() is Stop.INTERRUPTED and 100 < limits.stop_seconds <= 110
    limits.request_drain(28.0)
    limits.request_drain(90.0)
    assert 20 < limits.stop_seconds <= 28
    limits.request_drain(-5.0)
    assert limits.stop_seconds == 0.0
