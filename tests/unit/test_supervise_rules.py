"""How the supervisor judges the end of a run, and when it has had enough: without running a flow."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    BATCH_ATTEMPT,
    GENERATION_ENDED,
    GENERATION_STARTED,
    OUTCOME,
    SUPERVISED,
    Origin,
)
from ebbflow.core.store import Store
from ebbflow.flows.finish import _completed_since
from ebbflow.flows.job import Job
from ebbflow.flows.supervising.options import read_options
from ebbflow.flows.supervising.record import (
    JobRecord,
    RunVerdict,
    SupervisedRun,
    count_failures,
    count_in_a_row,
    judge_run,
    pause_seconds,
    read_record,
    waited_seconds,
)

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "ebbflow/configs" / "laptop.yaml")


def runs(*verdicts: str, commit: str | None = "a") -> tuple[SupervisedRun, ...]:
    return tuple(
        SupervisedRun(verdict=verdict, commit=commit, ended_utc=float(at))
        for at, verdict in enumerate(verdicts)
    )


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_is_judged_and_final_ones_keep_their_code(outcome: Outcome) -> None:
    verdict = judge_run(outcome.exit_code, JobRecord(), JobRecord())
    expected = {
        Outcome.COMPLETED: RunVerdict.COMPLETED,
        Outcome.NO_CAPACITY: RunVerdict.NO_CAPACITY,
        Outcome.FAILED: RunVerdict.FAILURE,
        Outcome.INTERRUPTED: RunVerdict.FAILURE,  # nothing was interrupted: the run came to nothing
    }
    assert verdict is expected.get(outcome, RunVerdict.FINAL)


@pytest.mark.parametrize("code", [1, 75, -9])
def test_the_supervisors_record_distinguishes_interruptions_from_failures(code: int) -> None:
    before = JobRecord(
        interruptions=frozenset({1}), failures=frozenset({2}), attempts={"old": "user_code"}
    )

    def after(*, interrupted: int = 1, failed: int = 2, **attempts: str) -> JobRecord:
        return JobRecord(
            interruptions=frozenset({1, interrupted}),
            failures=frozenset({2, failed}),
            attempts={**before.attempts, **attempts},
        )

    assert judge_run(code, before, after()) is RunVerdict.FAILURE
    assert judge_run(code, before, after(interrupted=3)) is RunVerdict.INTERRUPTION
    assert judge_run(code, before, after(interrupted=3, failed=4)) is RunVerdict.FAILURE
    assert judge_run(code, before, after(new="reclaimed")) is RunVerdict.INTERRUPTION
    assert judge_run(code, before, after(new="terminated")) is RunVerdict.INTERRUPTION
    assert judge_run(code, before, after(new="never_started")) is RunVerdict.NO_CAPACITY
    assert judge_run(code, before, after(new="unknown")) is RunVerdict.FAILURE
    assert judge_run(code, before, after(new="user_code", other="reclaimed")) is RunVerdict.FAILURE
    assert (
        judge_run(code, before, after(interrupted=3, new="user_code")) is RunVerdict.INTERRUPTION
    ), "a drain leaves by code"


def test_preflight_is_final_until_the_settings_have_passed_it_once() -> None:
    """A Batch or a store that does not answer when a job is started again will answer some time."""
    code = Outcome.PREFLIGHT.exit_code
    assert judge_run(code, JobRecord(), JobRecord(run="1")) is RunVerdict.FINAL
    assert (
        judge_run(code, JobRecord(run="1", passed=True), JobRecord(run="2", passed=True))
        is RunVerdict.NOT_READY
    )
    for other in (Outcome.CONFIG, Outcome.BUDGET, Outcome.DEADLINE):
        assert (
            judge_run(other.exit_code, JobRecord(passed=True), JobRecord(passed=True))
            is RunVerdict.FINAL
        )


def test_failures_count_in_a_row_back_to_the_newest_commit_and_interruptions_apart() -> None:
    row = JobRecord(commit="a", runs=runs("failure", "interruption", "failure", "no_capacity"))
    assert (
        count_in_a_row(row, RunVerdict.FAILURE) == 2
        and count_in_a_row(row, RunVerdict.INTERRUPTION) == 1
    )
    assert count_in_a_row(JobRecord(commit="b", runs=row.runs), RunVerdict.FAILURE) == 0, (
        "it has come further since"
    )
    never = JobRecord(commit=None, runs=runs("failure", "failure", commit=None))
    assert count_in_a_row(never, RunVerdict.FAILURE) == 2


def test_a_run_counts_for_each_batch_job_that_the_program_ended_unless_it_came_further() -> None:
    jobs = {"1": "user_code", "2": "reclaimed", "3": "user_code", "4": "user_code"}
    assert count_failures(JobRecord(commit="a"), JobRecord(commit="a", attempts=jobs)) == 3
    assert (
        count_failures(
            JobRecord(commit="a", attempts={"1": "user_code"}), JobRecord(commit="a", attempts=jobs)
        )
        == 2
    )
    assert count_failures(JobRecord(commit="a"), JobRecord(commit="b", attempts=jobs)) == 1
    assert count_failures(JobRecord(), JobRecord()) == 1
    crashed = JobRecord(
        runs=(SupervisedRun(verdict="failure", commit=None, ended_utc=1.0, failures=3),)
    )
    assert count_in_a_row(crashed, RunVerdict.FAILURE) == 3


def test_only_a_run_that_gained_nothing_is_followed_by_a_pause_which_grows_to_ten_minutes() -> None:
    def after(verdict: RunVerdict, times: int) -> float:
        return pause_seconds(
            JobRecord(commit="a", runs=runs(*[verdict.value] * times)), verdict, 10.0
        )

    assert [after(RunVerdict.INTERRUPTION, times) for times in (1, 2, 3, 4)] == [0, 10, 20, 40]
    assert [after(RunVerdict.FAILURE, times) for times in (1, 2, 3)] == [10, 20, 40]
    assert after(RunVerdict.INTERRUPTION, 50) == 600


def test_the_wait_for_capacity_is_counted_since_the_last_other_end() -> None:
    record = JobRecord(runs=runs("no_capacity", "interruption", "no_capacity", "no_capacity"))
    assert waited_seconds(record, RunVerdict.NO_CAPACITY, 10.0) == 8.0
    assert waited_seconds(record, RunVerdict.NOT_READY, 10.0) == 0.0
    assert (
        waited_seconds(JobRecord(runs=runs("no_capacity", "failure")), RunVerdict.NO_CAPACITY, 10.0)
        == 0.0
    )


def test_a_supervisor_that_is_started_anew_waits_anew() -> None:
    """What one waited in vain yesterday is not part of today's wait; its restart within the hour
    is.
    """
    hour = 3600.0

    def row(verdict: RunVerdict, *began_hours: float) -> JobRecord:
        told = {"verdict": verdict.value, "commit": "a", "seconds": hour}
        return JobRecord(
            commit="a",
            runs=tuple(SupervisedRun(**told, ended_utc=(at + 1) * hour) for at in began_hours),
        )

    again = row(RunVerdict.NO_CAPACITY, 0.0, 1.1, 2.2, 40.0, 41.1)
    assert waited_seconds(again, RunVerdict.NO_CAPACITY, 43 * hour) == pytest.approx(2 * hour)
    assert (
        waited_seconds(again, RunVerdict.NO_CAPACITY, 43 * hour, usual_pause_seconds=48 * hour)
        == 42 * hour
    )
    restarted = row(RunVerdict.NO_CAPACITY, 0.0, 1.1, 2.9)
    assert waited_seconds(restarted, RunVerdict.NO_CAPACITY, 4 * hour) == pytest.approx(3 * hour)
    assert (
        pause_seconds(row(RunVerdict.NOT_READY, 0.0, 1.1, 40.0), RunVerdict.NOT_READY, 10.0) == 10.0
    )
    assert count_in_a_row(row(RunVerdict.FAILURE, 0.0, 40.0), RunVerdict.FAILURE) == 2, (
        "a crash is not cured by waiting"
    )


def test_the_record_is_read_from_the_store_alone(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    config = RunConfig()
    assert not read_record(store, config).begun
    with EventLog(store, Origin(job="j", run="7", process="test")) as log:
        log.emit(BATCH_ATTEMPT, job_id="x-1", cause="reclaimed")
        log.emit(SUPERVISED, verdict="failure", exit_code=1, seconds=1.0, commit=None)
    for generation, reason, by_code in (
        (1, "node_lost", False),
        (2, "rank_failed", True),
        (3, "interrupted", False),
    ):
        with EventLog(
            store, Origin(job="j", run="7", generation=generation, process="agent")
        ) as log:
            log.emit(GENERATION_STARTED, parent=None, parent_step=0, nodes=1, processes_per_node=1)
            log.emit(GENERATION_ENDED, reason=reason, culprit="rank 0", user_code=by_code)
    record = read_record(store, config)
    assert record.begun and record.run == "7" and not record.finished
    assert (record.interruptions, record.failures) == (frozenset({1, 3}), frozenset({2}))
    assert record.attempts == {"x-1": "reclaimed"} and not record.passed
    store.put("config.json", json.dumps({"config": config.model_dump(mode="json")}).encode())
    assert read_record(store, config).passed
    assert not read_record(store, RunConfig(store="elsewhere")).passed, (
        "other settings have not passed preflight"
    )
    assert count_in_a_row(record, RunVerdict.FAILURE) == 1 and record.runs[0].seconds == 1.0
    assert record.report is not None and record.report.failures == 1


def test_options_of_the_flow_are_handed_on_and_the_job_is_named_after_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--set",
        "training.max_steps=300",
        "--with",
        "batch",
        "--max-failures",
        "5",
        "--rehearse",
        "notice@50%",
    ]
    options = read_options([CONFIG, *words], project_root=ROOT)
    assert options.job == "laptop" and options.max_failures == 5
    assert options.config.training.max_steps == 300
    assert " ".join(options.words) == (
        f"--config {CONFIG} --job laptop --set training.max_steps=300 --with batch --rehearse "
        "notice@50%"
    )
    (tmp_path / "my run (2).yaml").write_text(
        (ROOT / "ebbflow/configs" / "laptop.yaml").read_text()
    )
    assert read_options(["my run (2).yaml"], project_root=ROOT).job == "my-run-2"
    assert read_options([CONFIG, "--job", "other"], project_root=ROOT).job == "other"


@pytest.mark.parametrize(
    "words",
    [["--with", "batch"], [CONFIG, "--max-failures", "0"], [CONFIG, "--wait-hours", "nan"], []],
)
def test_words_that_make_no_sense_are_refused_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        read_options(words, project_root=ROOT)
    assert refused.value.code == 2 and "supervise.py: error:" in capsys.readouterr().err


def test_a_run_asked_to_leave_after_its_last_step_has_completed(tmp_path: Path) -> None:
    job = Job(name="j", run="7", config=RunConfig(store=str(tmp_path)))
    before = time.time()
    assert not _completed_since(job, before)
    with EventLog(job.store, Origin(job="j", run="7", process="test")) as log:
        log.emit(OUTCOME, outcome="completed", step=10, message="")
    assert _completed_since(job, before)
    assert not _completed_since(job, time.time() + 1), "an earlier run's end is not this run's"
