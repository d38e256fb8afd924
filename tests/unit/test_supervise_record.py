"""The supervisor's record of a job: each field is read from the store, and each limit of its counts
at the edge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import BATCH_ATTEMPT, BATCH_SUBMITTED, PHASE, PLAN, SUPERVISED, Event
from ebbflow.core.layout import event_key
from ebbflow.core.store import Store
from ebbflow.flows.supervising.options import SupervisorOptions, read_options
from ebbflow.flows.supervising.record import (
    FINAL,
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
from tests.support.commits import put_commit, put_generation
from tests.support.records import is_frozen, takes_names_only
from tests.support.timelines import WALL, GangLog, event, plan_event

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "ebbflow/configs" / "laptop.yaml")
HOUR = 3600.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path))


def put_events(store: Store, events: Sequence[Event]) -> None:
    store.put(
        event_key(1, 0, "test", "000000.a"), "\n".join(event.to_json() for event in events).encode()
    )


def put_config(store: Store, config: RunConfig) -> None:
    store.put("config.json", json.dumps({"config": config.model_dump(mode="json")}).encode())


def generation(
    number: int, reason: str, *, seconds: float = 100.0, user_code: bool = False
) -> list[Event]:
    """A tenth of a cent per second."""
    gang = GangLog(number, number * 10_000.0, [[0]])
    gang.steps(1, 1, useful_step=seconds)
    if reason == "completed":
        gang.outcome("completed")
    gang.ended(reason, seconds, user_code=user_code)
    return gang.events


def run(
    verdict: str = "failure", *, ended: float = 0.0, commit: str | None = "a", **known
) -> SupervisedRun:
    return SupervisedRun(verdict=verdict, commit=commit, ended_utc=ended, **known)


def test_a_job_without_events_has_an_empty_record(store: Store) -> None:
    record = read_record(store, RunConfig())
    assert record == JobRecord() and not record.begun
    assert (record.unsettled, record.finished, record.passed, record.commit, record.report) == (
        False,
    ) * 3 + (None,) * 2
    assert (record.interruptions, record.failures, record.attempts, record.runs) == (
        frozenset(),
        frozenset(),
        {},
        (),
    )
    assert record.cost() == "its cost is unknown: nothing was recorded"
    first = put_generation(store, 1)
    assert read_record(store, RunConfig()).commit is None
    newest = put_commit(store, first, 20)
    assert read_record(store, RunConfig()).commit == newest.key


def test_a_record_has_the_newest_commit_that_a_start_may_restore(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_events(store, generation(1, "node_lost"))
    first = put_generation(store, 1)
    put_commit(store, first, 10)
    newest = put_commit(store, first, 20)
    assert read_record(store, RunConfig()).commit == newest.key
    monkeypatch.delenv("EBBFLOW_TEST_KEY", raising=False)
    signed = RunConfig.model_validate_json(
        '{"checkpoint": {"signing_key_env": "EBBFLOW_TEST_KEY"}}'
    )
    assert read_record(store, signed).commit is None, "without the key, no signature is valid"
    assert read_record(store, RunConfig()).commit == newest.key


def test_a_record_has_each_field_from_its_events(store: Store) -> None:
    jobs = [
        event(BATCH_SUBMITTED, 1.0, job_id="open", step="train", task="1"),
        event(BATCH_SUBMITTED, 2.0, job_id="done", step="train", task="1"),
        event(BATCH_ATTEMPT, 3.0, job_id="done", cause="terminated"),
        event(BATCH_ATTEMPT, 4.0, job_id="done", cause="reclaimed"),
    ]
    supervised = [
        event(
            SUPERVISED, 50.0, verdict="failure", exit_code=1, seconds=7.5, commit="c", failures=3
        ),
        event(SUPERVISED, 60.0, verdict="interruption", exit_code=75, commit=None, failures=0),
    ]
    ends = [
        ("node_lost", False),
        ("rank_failed", True),
        ("rank_failed", True),
        ("completed", False),
    ]
    gangs: list[Event] = []
    for number, (reason, user_code) in enumerate(ends, start=1):
        gangs += generation(number, reason, user_code=user_code)
    last = replace(event("note", 95_000.0), run="run-9")
    put_events(store, [plan_event(3.6), *jobs, *supervised, *gangs, last])
    record = read_record(store, RunConfig())
    assert (record.interruptions, record.failures) == (frozenset({1}), frozenset({2, 3}))
    assert record.attempts == {"done": "reclaimed"} and record.unsettled
    assert record.runs == (
        SupervisedRun(verdict="failure", commit="c", ended_utc=WALL + 50, failures=3, seconds=7.5),
        SupervisedRun(
            verdict="interruption", commit=None, ended_utc=WALL + 60, failures=1, seconds=0.0
        ),
    )
    assert (record.run, record.begun) == ("run-9", True)
    assert record.report is not None and record.why == ""


def test_a_record_is_unsettled_while_a_batch_jobs_end_is_unknown(store: Store) -> None:
    put_events(
        store,
        [
            event(BATCH_SUBMITTED, 1.0, job_id="j"),
            event(BATCH_ATTEMPT, 2.0, job_id="j", cause="ended"),
        ],
    )
    assert not read_record(store, RunConfig()).unsettled


@pytest.mark.parametrize(
    ("end", "written", "finished", "passed"),
    [
        ("completed", "same", True, True),
        ("completed", "other", False, False),
        ("completed", "none", False, False),
        ("node_lost", "same", False, True),
    ],
)
def test_a_job_is_finished_if_its_configuration_completed(
    store: Store, end: str, written: str, finished: bool, passed: bool
) -> None:
    put_events(store, [plan_event(3.6), *generation(1, end)])
    if written != "none":
        put_config(store, RunConfig(store="elsewhere") if written == "other" else RunConfig())
    record = read_record(store, RunConfig())
    assert (record.finished, record.passed) == (finished, passed)


def test_a_job_whose_gang_never_started_has_not_passed_preflight(store: Store) -> None:
    put_events(store, [plan_event(3.6)])
    put_config(store, RunConfig())
    record = read_record(store, RunConfig())
    assert record.begun and not record.passed and not record.finished


def test_a_job_whose_events_contradict_each_other_has_no_report(store: Store) -> None:
    gang = GangLog(1, 100.0, [[0]])
    gang.phase("startup", 2.0)
    gang.add(PHASE, 104.0, rank=0, **{"class": "data_wait", "seconds": 9.0})
    gang.outcome("completed")
    gang.ended("completed", 4.0)
    events = [plan_event(3.6), *gang.events]
    put_events(store, events)
    put_config(store, RunConfig())
    record = read_record(store, RunConfig())
    assert record.report is None
    assert "rank 0" in record.why and record.cost() == f"its cost is unknown: {record.why}"
    assert not record.finished and record.passed


@pytest.mark.parametrize(
    ("hours", "plans", "deadline"),
    [
        (None, [5.0], None),
        (2.0, [5.0], 5.0 + 2 * HOUR),
        (2.0, [5.0, 9.0], 9.0 + 2 * HOUR),
        (2.0, [None], None),
        (2.0, [], None),
    ],
)
def test_the_deadline_is_hours_after_the_newest_plans_start(
    store: Store, hours: float | None, plans: list[float | None], deadline: float | None
) -> None:
    made = [event(PLAN, at, chosen=None, started_utc=started) for at, started in enumerate(plans)]
    put_events(store, [*made, event("note", 50.0, started_utc=77.0)])
    config = RunConfig.model_validate({"cost": {"deadline_hours": hours}})
    assert read_record(store, config).deadline_utc == deadline


@pytest.mark.parametrize(
    ("seconds", "simulated", "text"),
    [
        (999.9, False, "it has cost $0.9999"),
        (1000.0, False, "it has cost $1.00"),
        (12_344.0, False, "it has cost $12.34"),
        (1000.0, True, "it has cost $1.00 at a simulated price"),
    ],
)
def test_the_cost_of_a_job_has_cents_from_a_dollar_on(
    store: Store, seconds: float, simulated: bool, text: str
) -> None:
    put_events(
        store, [plan_event(3.6, simulated=simulated), *generation(1, "node_lost", seconds=seconds)]
    )
    assert read_record(store, RunConfig()).cost() == text


def test_the_cost_of_a_job_without_a_plan_is_not_simulated(store: Store) -> None:
    put_events(store, generation(1, "node_lost"))
    assert read_record(store, RunConfig()).cost() == "it has cost $0.0000"


def test_further_runs_are_sorted_by_their_end() -> None:
    record = JobRecord(runs=(run(ended=1.0), run(ended=5.0)))
    assert [past.ended_utc for past in record.with_runs(run(ended=3.0), run(ended=0.0)).runs] == [
        0.0,
        1.0,
        3.0,
        5.0,
    ]
    assert record.with_runs() == record


def test_records_of_the_supervisor_take_names_only_and_are_frozen() -> None:
    for record in (SupervisedRun, JobRecord, SupervisorOptions):
        assert takes_names_only(record) and is_frozen(record)
    assert (run().failures, run().seconds) == (1, 0.0)


def test_the_final_outcomes_are_those_that_another_run_would_repeat() -> None:
    going_on = {Outcome.COMPLETED, Outcome.FAILED, Outcome.NO_CAPACITY, Outcome.INTERRUPTED}
    assert set(Outcome) - FINAL == going_on


@pytest.mark.parametrize(
    ("code", "before", "after", "verdict"),
    [
        (0, JobRecord(), JobRecord(failures=frozenset({1})), RunVerdict.COMPLETED),
        (3, JobRecord(), JobRecord(passed=True), RunVerdict.NOT_READY),
        (3, JobRecord(passed=True), JobRecord(), RunVerdict.FINAL),
        (4, JobRecord(), JobRecord(passed=True), RunVerdict.FINAL),
        (5, JobRecord(), JobRecord(failures=frozenset({1})), RunVerdict.NO_CAPACITY),
        (1, JobRecord(passed=True), JobRecord(passed=True), RunVerdict.FAILURE),
        (
            1,
            JobRecord(failures=frozenset({1})),
            JobRecord(interruptions=frozenset({2})),
            RunVerdict.INTERRUPTION,
        ),
        (
            1,
            JobRecord(interruptions=frozenset({1})),
            JobRecord(interruptions=frozenset({1})),
            RunVerdict.FAILURE,
        ),
        (-9, JobRecord(), JobRecord(interruptions=frozenset({1})), RunVerdict.INTERRUPTION),
        (
            75,
            JobRecord(attempts={"a": "reclaimed"}),
            JobRecord(attempts={"a": "reclaimed"}),
            RunVerdict.FAILURE,
        ),
    ],
)
def test_a_run_is_judged_by_what_it_added_to_the_record(
    code: int, before: JobRecord, after: JobRecord, verdict: RunVerdict
) -> None:
    assert judge_run(code, before, after) is verdict


def test_failures_are_counted_by_run_and_by_batch_job() -> None:
    known = {"old": "user_code"}
    assert (
        count_failures(JobRecord(attempts=known), JobRecord(attempts={**known, "new": "ended"}))
        == 1
    )
    three = {str(number): "user_code" for number in range(3)}
    assert count_failures(JobRecord(attempts=known), JobRecord(attempts={**known, **three})) == 3
    assert count_failures(JobRecord(), JobRecord(commit="a", attempts=three)) == 1
    assert count_failures(JobRecord(commit="a"), JobRecord(commit="a", attempts=three)) == 3


def test_only_failures_count_several_times_in_a_row() -> None:
    runs = (
        run("failure", failures=3),
        run("no_capacity", failures=3),
        run("failure", failures=2, commit="b"),
    )
    record = JobRecord(commit="a", runs=runs)
    assert count_in_a_row(record, RunVerdict.FAILURE) == 3
    assert count_in_a_row(record, RunVerdict.NO_CAPACITY) == 1
    assert count_in_a_row(record, RunVerdict.NOT_READY) == 0


@pytest.mark.parametrize(
    ("verdict", "pauses"),
    [
        ("interruption", [0, 0, 10, 20, 40, 80, 160, 320, 600, 600]),
        ("failure", [0, 10, 20, 40, 80, 160, 320, 600, 600]),
        ("not_ready", [0, 10, 20, 40, 80, 160, 320, 600, 600]),
    ],
)
def test_the_pause_doubles_with_each_run_without_progress(
    verdict: str, pauses: list[float]
) -> None:
    for times, pause in enumerate(pauses):
        record = JobRecord(commit="a", runs=tuple(run(verdict) for _ in range(times)))
        assert pause_seconds(record, RunVerdict(verdict), 10.0) == pause


# A gap of 600 s, the longest pause, and an hour more: longer, no supervisor was running.
@pytest.mark.parametrize(("gap", "counted"), [(4200.0, 2), (4200.5, 1)])
def test_runs_before_a_gap_without_a_supervisor_do_not_count(gap: float, counted: int) -> None:
    first = run("not_ready", ended=100.0)
    second = run("not_ready", ended=100.0 + gap + 50.0, seconds=50.0)
    record = JobRecord(commit="a", runs=(first, second))
    assert count_in_a_row(record, RunVerdict.NOT_READY) == counted
    waited = waited_seconds(record, RunVerdict.NOT_READY, second.ended_utc + 7)
    assert waited == (gap + 57 if counted == 2 else 7)
    failed = JobRecord(
        commit="a", runs=tuple(replace(run, verdict="failure") for run in record.runs)
    )
    assert count_in_a_row(failed, RunVerdict.FAILURE) == 2


def test_only_runs_after_the_last_of_several_gaps_count() -> None:
    ends = (0.0, 20_000.0, 20_100.0, 25_000.0, 25_100.0, 25_200.0)
    record = JobRecord(commit="a", runs=tuple(run("no_capacity", ended=end) for end in ends))
    assert count_in_a_row(record, RunVerdict.NO_CAPACITY) == 3
    for usual_pause, waited in ((600.0, 300.0), (5000.0, 5300.0), (20_000.0, 25_300.0)):
        assert (
            waited_seconds(
                record, RunVerdict.NO_CAPACITY, 25_300.0, usual_pause_seconds=usual_pause
            )
            == waited
        ), usual_pause
    assert waited_seconds(record, RunVerdict.NO_CAPACITY, 25_300.0) == 300
    assert waited_seconds(JobRecord(), RunVerdict.NO_CAPACITY, 5.0) == 0


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    return lambda *words: read_options([CONFIG, *words], project_root=ROOT)


def test_options_have_defaults(options) -> None:
    known = options()
    assert (known.job, known.words) == ("laptop", ("--config", CONFIG, "--job", "laptop"))
    assert (known.max_failures, known.pause_seconds) == (3, 10.0)
    assert (known.capacity_pause_seconds, known.wait_hours) == (300.0, 24.0)
    assert (known.take_over, known.permits) == (False, ())
    bare = SupervisorOptions(job="j", config=RunConfig(), words=())
    assert replace(known, job="j", config=RunConfig(), words=()) == bare


def test_each_option_is_read_into_its_field(options) -> None:
    limits = [
        "--max-failures",
        "1",
        "--pause-seconds",
        "2.5",
        "--capacity-pause-seconds",
        "3.5",
        "--wait-hours",
        "4.5",
    ]
    known = options(*limits, "--take-over", "--accept-rollback", "--from-scratch", "--name", "x")
    assert (known.max_failures, known.pause_seconds) == (1, 2.5)
    assert (known.capacity_pause_seconds, known.wait_hours) == (3.5, 4.5)
    assert known.take_over and known.permits == ("from-scratch", "rollback")
    assert known.words == ("--config", CONFIG, "--job", "laptop", "--name", "x")
    several = options(
        "--set", "training.max_steps=300", "--set", "training.seed=3", "--job", "named"
    )
    assert (several.config.training.max_steps, several.config.training.seed, several.job) == (
        300,
        3,
        "named",
    )
    assert several.words[4:] == ("--set", "training.max_steps=300", "--set", "training.seed=3")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--max-failures", "0"], "--max-failures 0: must be a number of at least 1"),
        (["--max-failures", "1.5"], "invalid int value"),
        (["--pause-seconds", "-1"], "--pause-seconds -1: must be a number of at least 0"),
        (
            ["--capacity-pause-seconds", "inf"],
            "--capacity-pause-seconds inf: must be a number of at least 0",
        ),
        (["--wait-hours", "-0.5"], "--wait-hours -0.5: must be a number of at least 0"),
        (["--wait-hours", "nan"], "--wait-hours nan: must be a number of at least 0"),
    ],
)
def test_limits_out_of_range_are_refused(
    options, capsys: pytest.CaptureFixture[str], words: list[str], problem: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        options(*words)
    assert refused.value.code == 2 and problem in capsys.readouterr().err


def test_limits_of_zero_are_allowed_and_options_are_not_abbreviated(options) -> None:
    known = options(
        "--pause-seconds",
        "0",
        "--capacity-pause-seconds",
        "0",
        "--wait-hours",
        "0",
        "--take",
        "--wait",
        "1",
    )
    assert (known.pause_seconds, known.capacity_pause_seconds, known.wait_hours) == (0, 0, 0)
    assert not known.take_over and known.words[4:] == ("--take", "--wait", "1")


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_help_names_every_option_and_its_default(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options([word], project_root=ROOT)
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "usage: python flows/supervise.py" in text
        and "CONFIG YAML file of the job; the first argument" in text
    )
    for sentence in (
        "Run a job and continue it after interruptions",
        "runs in a row that may fail without a new commit (3); interruptions do not count",
        "after a run without progress (10.0), then twice as long each time, at most 600",
        "before the next request for missing capacity (300.0)",
        "longest wait for capacity, or for a store that does not answer (24.0)",
        "--job JOB name of the job (default: the file's name without its suffix)",
        "--set OVERRIDES KEY=VALUE, as for run",
        "--take-over end the launcher that runs the job now, and continue from its last commit",
    ):
        assert sentence in text


@pytest.mark.parametrize("words", [[], ["--help-me"], ["--wait-hours", "1", CONFIG]])
def test_the_configuration_comes_first(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        read_options(words, project_root=ROOT)
    assert refused.value.code == 2
    assert (
        "the first argument must be the configuration, such as configs/laptop.yaml"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("stem", "job"),
    [
        ("my run (2)", "my-run-2"),
        ("--a.b_c-D9--", "a.b_c-D9"),
        (".x.", "x"),
        ("y" * 120, "y" * 100),
    ],
)
def test_a_job_is_named_after_its_file(options, tmp_path: Path, stem: str, job: str) -> None:
    path = tmp_path / f"{stem}.yaml"
    path.write_text(Path(CONFIG).read_text())
    assert read_options([str(path)], project_root=ROOT).job == job


def test_dollars_without_progress_are_those_of_each_node_at_its_price(store: Store) -> None:
    """The plan's price is that of one node: it was divided by the ranks of all nodes."""
    plan = plan_event(3.6)
    plan.data["chosen"] |= {"nodes": 4, "processes_per_node": 2}
    gangs: list[Event] = []
    for number in (1, 2, 3):
        gang = GangLog(number, number * 10_000.0, [[0, 1], [2, 3], [4, 5], [6, 7]])
        gang.steps(1, 1, useful_step=100.0)
        gang.ended("node_lost", 100.0)
        gangs += gang.events
    put_events(store, [plan, *gangs])
    config = RunConfig.model_validate({"survival": {"no_progress_usd": 1.1}})

    exceeded = read_record(store, config).exceeded_bound

    # 3 starts of 100 s on 4 nodes at a tenth of a cent
    assert "took $1.20, more than survival.no_progress_usd (1.1)" in exceeded


def test_a_configuration_that_an_older_release_wrote_is_the_same_with_todays_defaults(
    store: Store,
) -> None:
    written = RunConfig().model_dump(mode="json")
    del written["survival"]["no_progress_hours"]
    store.put("config.json", json.dumps({"config": written}).encode())
    put_events(store, [plan_event(3.6), *generation(1, "completed")])

    assert read_record(store, RunConfig()).finished
