"""The supervisor's loop: what it starts, records and prints after each run, without starting a
flow.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.errors import JobIsRunning, Outcome, StoreUnavailable
from ebbflow.core.events import (
    BATCH_ATTEMPT,
    BATCH_SUBMITTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NOTICE,
    OUTCOME,
    PLACED,
    PLAN,
    SUPERVISED,
    Event,
    read_events,
)
from ebbflow.core.launchers import CLAIM_VARIABLE, Launcher, claim_job
from ebbflow.core.layout import launcher_key
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import GuardedStream
from ebbflow.flows import job as job_module
from ebbflow.flows.job import Job
from ebbflow.flows.supervising import supervisor
from ebbflow.flows.supervising.options import SupervisorOptions, read_options
from ebbflow.flows.supervising.record import FINAL
from ebbflow.flows.supervising.supervisor import Supervisor, main
from tests.support.commits import put_commit, put_generation
from tests.support.placing import placement
from tests.support.programs import Programs
from tests.support.timelines import plan_event

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "ebbflow/configs" / "laptop.yaml")
UNKNOWN = "its cost is unknown: nothing was recorded"
FREE = "it has cost $0.0000"


@dataclass
class Desk:
    """A supervisor whose programs, pauses and clock a test sets.

    Attributes:
        said: The lines that it printed.
        pauses: Seconds of each pause.
        at_pause: Called at each pause.
        now: Unix time; each pause takes its time.
    """

    folder: Path
    programs: Programs
    said: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    at_pause: Callable[[], object] = lambda: None
    now: float = 1_800_000_000.0

    def options(self, *words: str) -> SupervisorOptions:
        chosen = ["--job", "j", "--set", f"store={self.folder / 'store'}", *words]
        return read_options([CONFIG, *chosen], project_root=ROOT)

    def job(self, *words: str, run: str = "run-1") -> Job:
        return Job(name="j", run=run, config=self.options(*words).config)

    def supervise(
        self, *words: str, codes: list[int], effects: list[Callable[[], object]] | None = None
    ) -> int:
        """Runs of a second end with these codes; at the start of each, its effect is called."""
        left = list(effects or [])

        def start() -> None:
            self.now += 1.0
            if left:
                left.pop(0)()

        self.programs.codes = list(codes)
        self.programs.at_start = start
        flow = self.folder / "flow.py"
        return Supervisor(self.options(*words), self.said.append, flow=flow).supervise()

    def emit(self, *events: tuple[str, dict[str, Any]], generation: int | None = None) -> None:
        with self.job().events("test") as log:
            if generation is not None:
                log.origin = type(log.origin)(
                    job="j", run="run-1", generation=generation, process="agent"
                )
            for name, data in events:
                log.emit(name, **data)

    def gang(self, number: int, reason: str | None = None, **data: Any) -> Callable[[], None]:
        """A run of the flow in which one gang starts, and ends for a reason."""

        def run() -> None:
            started = {"parent": None, "parent_step": 0, "nodes": 1, "processes_per_node": 1}
            ended = {"reason": reason, "culprit": "rank 0", "user_code": False, **data}
            events = [(GENERATION_STARTED, started)]
            self.emit(*events, *([(GENERATION_ENDED, ended)] if reason else []), generation=number)

        return run

    def events(self, name: str) -> list[Event]:
        return [event for event in read_events(self.job().store) if event.name == name]


class Output(io.StringIO):
    """An output that records what has been flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    found = Desk(tmp_path, Programs())
    wait = threading.Event.wait

    def pause(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None or threading.current_thread() is not threading.main_thread():
            return wait(event, timeout)
        found.pauses.append(timeout)
        found.now += timeout
        found.at_pause()
        return event.is_set()

    monkeypatch.setattr(subprocess, "Popen", found.programs)
    monkeypatch.setattr(os, "kill", found.programs.kill)
    monkeypatch.setattr(threading.Event, "wait", pause)
    monkeypatch.setattr(time, "time", lambda: found.now)
    monkeypatch.setattr(time, "monotonic", lambda: found.now - 1_799_000_000.0)
    monkeypatch.setattr(job_module, "RUNS", tmp_path / "runs")
    return found


def ask_to_leave() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_a_job_begins_runs_and_completes(desk: Desk) -> None:
    desk.programs.during = [lambda: setattr(desk, "now", desk.now + 24.0)]
    runs = [desk.gang(1, "completed")]
    assert desk.supervise("--set", "training.seed=3", codes=[0], effects=runs) == 0
    store = desk.folder / "store"
    assert desk.said == [
        f"job j in {store} begins",
        f"completed after 1 run, 0 interruptions, 0 failures, 0 redone steps; {FREE}",
    ]
    [started] = desk.programs.started
    words = [
        "--config",
        CONFIG,
        "--job",
        "j",
        "--set",
        f"store={store}",
        "--set",
        "training.seed=3",
    ]
    assert started.command[3:] == [sys.executable, str(desk.folder / "flow.py"), "run", *words]
    claim = json.loads(desk.job().store.get(launcher_key(1)))
    assert started.options["env"][CLAIM_VARIABLE] == claim["id"]
    assert (claim["command"], claim["released"]) == ("supervise", True)
    [recorded] = desk.events(SUPERVISED)
    assert recorded.run == "run-1"
    assert recorded.data == {
        "verdict": "completed",
        "commit": None,
        "failures": 0,
        "exit_code": 0,
        "seconds": 25.0,
    }


def test_a_supervisor_continues_a_job_from_its_record(desk: Desk) -> None:
    desk.gang(1, "node_lost")()
    assert desk.supervise(codes=[0]) == 0
    assert desk.said[0] == f"job j in {desk.folder / 'store'} goes on; {FREE}"
    desk.gang(2, "node_lost")()
    assert desk.supervise(codes=[0]) == 0
    assert desk.said[2] == f"job j in {desk.folder / 'store'} goes on, 1 run so far; {FREE}"
    desk.supervise(codes=[0])
    assert desk.said[4] == f"job j in {desk.folder / 'store'} goes on, 2 runs so far; {FREE}"
    assert desk.said[5].startswith("completed after 3 runs, 2 interruptions, ")


def complete(desk: Desk) -> None:
    desk.gang(1, "completed")()
    desk.emit(
        (OUTCOME, {"outcome": "completed", "weights_sha256": None, "message": ""}), generation=1
    )
    config = {"config": desk.options().config.model_dump(mode="json")}
    desk.job().store.put("config.json", json.dumps(config).encode())


def test_a_complete_job_is_left_as_it_is(desk: Desk) -> None:
    complete(desk)
    assert desk.supervise("--from-scratch", codes=[]) == 0
    assert desk.said[1:] == [
        f"job j is complete already, and {FREE}; use another --job to start anew"
    ]
    assert desk.programs.started == [] and desk.job().store.list("launchers") == []
    assert desk.job().store.list("permits") == []


def test_a_complete_job_with_a_batch_job_left_behind_is_claimed_and_settled(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[str, str]] = []
    monkeypatch.setattr(
        supervisor, "end_leftovers", lambda job, say: ended.append((job.name, job.run))
    )
    complete(desk)
    desk.emit((BATCH_SUBMITTED, {"job_id": "x-1", "step": "train", "task": "5"}))
    assert desk.supervise(codes=[]) == 0
    assert ended == [("j", "run-1")] and desk.programs.started == []
    assert len(desk.job().store.list("launchers")) == 1


def test_permits_are_given_after_the_claim(desk: Desk) -> None:
    desk.supervise("--from-scratch", "--accept-rollback", codes=[0])
    assert len(desk.job().store.list("permits")) == 2
    other = claim_job(desk.job().store, "j", "run")
    with pytest.raises(JobIsRunning):
        desk.supervise("--from-scratch", codes=[])
    assert len(desk.job().store.list("permits")) == 2
    other.release()


def test_a_running_job_may_be_taken_over(desk: Desk) -> None:
    other = claim_job(desk.job().store, "j", "run")

    class Said(list[str]):
        """The other launcher, which is this process, leaves when it is told to."""

        def append(self, line: str) -> None:
            super().append(line)
            if line.startswith("job j: taking over from `run` of "):
                other.release()

    desk.said = Said()
    assert desk.supervise("--take-over", codes=[0]) == 0
    assert [line.partition(" from ")[0] for line in desk.said[1:2]] == ["job j: taking over"]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome.CONFIG, 2),
        (Outcome.PREFLIGHT, 3),
        (Outcome.BUDGET, 4),
        (Outcome.DEADLINE, 8),
        (Outcome.ROLLED_BACK, 10),
    ],
)
def test_a_final_outcome_ends_the_job_with_its_code(
    desk: Desk, outcome: Outcome, code: int
) -> None:
    assert desk.supervise(codes=[code]) == code
    assert desk.said[1:] == [
        f"stopped, {outcome.value} (exit code {code}): see the run's output above",
        f"after 1 run; {UNKNOWN}",
    ]


def test_a_final_outcome_is_explained_by_the_jobs_own_message(desk: Desk) -> None:
    def run() -> None:
        desk.gang(1, "budget")()
        desk.emit((OUTCOME, {"outcome": "budget", "message": "spent  $3\nof $2"}), generation=1)

    assert desk.supervise(codes=[4], effects=[run]) == 4
    assert desk.said[1] == "stopped, budget (exit code 4): spent $3 of $2"
    assert desk.supervise(codes=[8]) == 8
    assert desk.said[-2] == "stopped, deadline (exit code 8): see the run's output above", (
        "it is of another outcome"
    )


def end_for_good(desk: Desk, outcome: Outcome) -> None:
    desk.gang(1, outcome.value)()
    desk.emit((OUTCOME, {"outcome": outcome.value, "message": "why  it\nended"}), generation=1)
    config = {"config": desk.options().config.model_dump(mode="json")}
    desk.job().store.put("config.json", json.dumps(config).encode())


@pytest.mark.parametrize(
    "outcome", [outcome for outcome in Outcome if outcome in FINAL - {Outcome.PREFLIGHT}]
)
def test_a_job_that_has_ended_for_good_starts_no_gang_when_its_supervisor_starts_again(
    desk: Desk, outcome: Outcome
) -> None:
    end_for_good(desk, outcome)
    assert desk.supervise(codes=[]) == outcome.exit_code
    assert desk.programs.started == []
    assert desk.said[-1] == (
        f"job j has ended already, {outcome.value} (exit code {outcome.exit_code}): why it ended; "
        f"{FREE}; nothing was started; after a fix outside its settings: --again"
    )


@pytest.mark.parametrize(
    "words", [("--again",), ("--from-scratch",), ("--set", "training.max_steps=7")]
)
def test_a_job_that_has_ended_for_good_is_started_by_a_person_who_asks_for_it(
    desk: Desk, words: tuple[str, ...]
) -> None:
    end_for_good(desk, Outcome.CRASH_LOOP)
    assert desk.supervise(*words, codes=[0]) == 0
    assert len(desk.programs.started) == 1


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.INTERRUPTED, Outcome.NO_CAPACITY])
def test_a_job_that_may_go_on_is_started_again(desk: Desk, outcome: Outcome) -> None:
    end_for_good(desk, outcome)
    started = outcome is not Outcome.COMPLETED
    assert desk.supervise(codes=[0]) == 0
    assert len(desk.programs.started) == started


def test_a_program_that_takes_its_node_with_it_each_time_ends_as_a_crash_loop(desk: Desk) -> None:
    """Neither a notice nor the scheduler proves that the machine was taken away."""
    runs: list[Callable[[], object]] = [desk.gang(number) for number in (1, 2, 3)]
    assert desk.supervise("--pause-seconds", "0", codes=[75, 1, -9], effects=runs) == 6
    message = "crash loop: 3 starts, 3 of which ended without a known reason, with no new commit"
    assert desk.said[-2].startswith(f"stopped, {message}")
    [ended] = desk.events(OUTCOME)
    assert ended.data["outcome"] == "crash_loop"
    assert desk.supervise(codes=[0]) == 0, "whoever starts it again counts anew"


def test_a_supervisor_that_dies_with_each_start_counts_them_too(desk: Desk) -> None:
    for number in (1, 2, 3):
        desk.gang(number)()
    assert desk.supervise(codes=[]) == 6
    assert desk.programs.started == []


def test_starts_that_a_notice_ended_are_bounded_by_time_alone(desk: Desk) -> None:
    def run(number: int) -> Callable[[], None]:
        def effect() -> None:
            desk.gang(number)()
            desk.now += 9 * 3600.0
            notice = {"source": "metadata", "action": "terminate", "does": "leave"}
            desk.emit((NOTICE, notice), generation=number)

        return effect

    runs: list[Callable[[], object]] = [run(number) for number in (1, 2, 3)]
    assert desk.supervise("--pause-seconds", "0", codes=[75, 75, 75], effects=runs) == 6
    assert "3 starts without a new commit took 27.0 h, more than" in desk.said[-2]


def test_failures_without_a_commit_end_the_job_as_a_crash_loop(desk: Desk) -> None:
    code = desk.supervise("--max-failures", "3", "--pause-seconds", "5", codes=[1, -9, 1])
    assert code == Outcome.CRASH_LOOP.exit_code
    output = "see the run's output above"
    assert desk.said[1:] == [
        f"failure 1 of 3 without a new commit (exit code 1): {output}; {UNKNOWN}; again in 5 s",
        f"failure 2 of 3 without a new commit (exit code -9): {output}; {UNKNOWN}; again in 10 s",
        "stopped, crash loop: 3 failures with no new commit in between, the last run with exit "
        f"code 1: {output}",
        f"after 3 runs; {UNKNOWN}; fix it, then start the supervisor again with --again",
    ]
    assert desk.pauses == [5.0, 10.0]
    assert desk.job().store.list("events") == [], "the job has not begun"


def test_a_crash_loop_is_recorded_and_reported(desk: Desk) -> None:
    culprits = ("rank 2 of 4", "rank 3  of\n4")
    runs = [
        desk.gang(number, "rank_failed", user_code=True, culprit=culprit)
        for number, culprit in enumerate(culprits, start=1)
    ]
    assert (
        desk.supervise("--max-failures", "2", "--pause-seconds", "0", codes=[1, 1], effects=runs)
        == 6
    )
    message = (
        "crash loop: 2 failures with no new commit in between, the last run with exit code 1: "
        "rank 3 of 4"
    )
    tally = "2 runs, 2 interruptions, 2 failures, 0 redone steps"
    assert desk.said[1:4] == [
        f"failure 1 of 2 without a new commit (exit code 1): rank 2 of 4; {FREE}; going on",
        f"stopped, {message}",
        f"after {tally}; {FREE}; fix it, then start the supervisor again with --again",
    ]
    [ended] = desk.events(OUTCOME)
    assert (ended.run, ended.data) == ("run-1", {"outcome": "crash_loop", "message": message})
    assert [event.data["failures"] for event in desk.events(SUPERVISED)] == [1, 1]
    [report] = desk.folder.glob("runs/**/report.json")
    assert json.loads(report.read_text())["outcome"] == "crash_loop"
    report.unlink()
    assert (
        desk.supervise(
            "--max-failures", "3", codes=[1], effects=[desk.gang(3, "rank_failed", user_code=True)]
        )
        == 6
    )
    assert report.exists(), "also in a folder that exists"


def test_a_report_that_cannot_be_rewritten_does_not_hide_a_crash_loop(desk: Desk) -> None:
    (desk.folder / "runs").write_text("a file where the folder belongs")
    assert (
        desk.supervise(
            "--max-failures", "1", codes=[1], effects=[desk.gang(1, "rank_failed", user_code=True)]
        )
        == 6
    )
    assert desk.said[-1].startswith("the report could not be rewritten: ")


def test_a_run_that_a_commit_followed_starts_the_count_anew(desk: Desk) -> None:
    def commit() -> None:
        desk.gang(2, "rank_failed", user_code=True)()
        put_commit(desk.job().store, put_generation(desk.job().store, 2), 10)

    runs = [
        desk.gang(1, "rank_failed", user_code=True),
        commit,
        desk.gang(3, "rank_failed", user_code=True),
    ]
    assert (
        desk.supervise("--max-failures", "2", "--pause-seconds", "1", codes=[1, 1, 1], effects=runs)
        == 6
    )
    assert [line.partition(" without")[0] for line in desk.said[1:3]] == [
        "failure 1 of 2",
        "failure 1 of 2",
    ]
    assert [bool(event.data["commit"]) for event in desk.events(SUPERVISED)] == [False, True, True]


def test_an_interrupted_run_restarts_at_once_and_then_after_a_pause(desk: Desk) -> None:
    runs = [desk.gang(number, "agent_stopped") for number in (1, 2, 3)]
    assert desk.supervise("--pause-seconds", "10", codes=[75, 1, -9, 0], effects=runs) == 0
    counts = "0 failures, 0 redone steps"
    assert desk.said[1:4] == [
        f"interrupted (exit code 75), 1 run, 1 interruption, {counts}; {FREE}; going on",
        f"interrupted (exit code 1), 2 runs, 2 interruptions, {counts}; {FREE}; again in 10 s",
        f"interrupted (exit code -9), 3 runs, 3 interruptions, {counts}; {FREE}; again in 20 s",
    ]
    assert desk.pauses == [0.0, 10.0, 20.0]


def test_a_job_that_an_operator_terminates_is_not_started_again(desk: Desk) -> None:
    placed = {"step": "train_node", "task": "1", "placement": placement().to_json()}

    def run() -> None:
        desk.gang(1, "agent_stopped")()
        desk.emit(
            (PLACED, placed),
            (BATCH_SUBMITTED, {"step": "train_node", "task": "1", "job_id": "j-1"}),
            (
                BATCH_ATTEMPT,
                {
                    "job_id": "j-1",
                    "cause": "terminated",
                    "terminated_by": "operator",
                    "reason": "stop, Ann",
                },
            ),
        )

    assert desk.supervise(codes=[75], effects=[run]) == 75
    assert desk.said[-1] == (
        f"stopped, interrupted: j-1 was terminated by an operator (stop, Ann); {FREE}; the same "
        "command continues it"
    )
    assert desk.supervise(codes=[0]) == 0, "the stop was of that run alone"


def test_missing_capacity_is_asked_for_again_after_its_own_pause(desk: Desk) -> None:
    words = ("--pause-seconds", "7", "--capacity-pause-seconds", "40")
    assert desk.supervise(*words, codes=[5, 5, 0]) == 0
    assert desk.said[1:3] == [f"no capacity; {UNKNOWN}; again in 40 s"] * 2
    assert desk.said[3] == f"completed after 3 runs; {UNKNOWN}"
    assert desk.pauses == [40.0, 40.0]


@pytest.mark.parametrize(("pause", "pauses"), [("1799", 2), ("1799.5", 1)])
def test_the_wait_for_capacity_has_a_limit(desk: Desk, pause: str, pauses: int) -> None:
    """A run takes a second, so half an hour passes with the first pause, or half a second more."""
    words = ("--capacity-pause-seconds", pause, "--wait-hours", "0.5")
    assert desk.supervise(*words, codes=[5] * 9) == Outcome.NO_CAPACITY.exit_code
    assert len(desk.pauses) == pauses
    assert (
        desk.said[-1]
        == f"stopped, no_capacity: none for {pauses / 2:.1f} h (--wait-hours); {UNKNOWN}"
    )


def test_a_wait_with_longer_pauses_than_usual_is_one_wait(desk: Desk) -> None:
    """With pauses of two hours, two hours pass between runs without a gap in the supervision."""
    words = ("--capacity-pause-seconds", "7200", "--wait-hours", "3.9")
    assert desk.supervise(*words, codes=[5] * 9) == Outcome.NO_CAPACITY.exit_code
    assert "none for 4.0 h" in desk.said[-1]


def test_a_run_that_lasts_long_is_no_gap_in_the_wait(desk: Desk) -> None:
    def last_long() -> None:
        desk.now += 5000.0

    words = ("--capacity-pause-seconds", "40", "--wait-hours", "1")
    assert (
        desk.supervise(*words, codes=[5, 5], effects=[lambda: None, last_long])
        == Outcome.NO_CAPACITY.exit_code
    )


def test_a_wait_continues_with_a_supervisor_started_within_an_hour(desk: Desk) -> None:
    """The longest pause of ten minutes counts beside that hour, whatever the pause for capacity is."""
    desk.gang(1, "node_lost")()
    desk.emit(
        (SUPERVISED, {"verdict": "no_capacity", "exit_code": 5, "seconds": 1.0, "commit": None})
    )
    desk.now += 4100.0
    words = ("--capacity-pause-seconds", "40", "--wait-hours", "1")
    assert desk.supervise(*words, codes=[5]) == Outcome.NO_CAPACITY.exit_code


def passed(desk: Desk, **plan: Any) -> None:
    desk.emit((PLAN, {**plan_event().data, **plan}))
    desk.gang(1, "node_lost")()
    if plan:
        config = desk.options("--set", "cost.deadline_hours=1").config
    else:
        config = desk.options().config
    desk.job().store.put(
        "config.json", json.dumps({"config": config.model_dump(mode="json")}).encode()
    )


def test_a_refusal_after_a_pass_is_counted_and_waited_for(desk: Desk) -> None:
    passed(desk)
    assert desk.supervise("--pause-seconds", "1", "--wait-hours", "0.001", codes=[3] * 9) == 3
    assert [line.partition(";")[0] for line in desk.said[1:-1]] == [
        "preflight refused 1 time in a row what it passed before",
        "preflight refused 2 times in a row what it passed before",
    ]
    assert desk.said[-1].startswith(
        "stopped, preflight: refused by preflight for 0.0 h (--wait-hours); "
    )
    assert desk.pauses == [1.0, 2.0]


@pytest.mark.parametrize(
    ("late", "runs", "hours"),
    [(0.0, 2, "0.2"), (0.5, 1, "0.0"), (179.97, 1, "0.0"), (180.0, 1, "0.1")],
)
def test_a_refusal_after_the_deadline_ends_the_job(
    desk: Desk, late: float, runs: int, hours: str
) -> None:
    """The first run ends after a second, and the second one more than ten minutes later."""
    passed(desk, started_utc=desk.now + 1 - 3600 - late)
    words = ("--set", "cost.deadline_hours=1", "--pause-seconds", "7200")
    assert desk.supervise(*words, codes=[3] * runs) == Outcome.DEADLINE.exit_code
    assert desk.said[-1].startswith(
        f"stopped, deadline: it passed {hours} h ago, while preflight refused to go on; "
    )


def test_missing_capacity_after_the_deadline_does_not_end_the_job(desk: Desk) -> None:
    passed(desk, started_utc=desk.now - 7200)
    assert desk.supervise("--set", "cost.deadline_hours=1", codes=[5, 0]) == 0


def test_a_supervisor_that_is_asked_to_leave_ends_with_its_run(desk: Desk) -> None:
    desk.programs.during = [ask_to_leave]
    assert desk.supervise(codes=[75], effects=[desk.gang(1, "node_lost")]) == 75
    assert desk.said[1:] == [f"asked to leave; {FREE}; the same command continues it"]
    assert len(desk.events(SUPERVISED)) == 1


def test_a_supervisor_that_is_asked_to_leave_while_it_pauses_starts_no_run(desk: Desk) -> None:
    desk.at_pause = ask_to_leave
    assert desk.supervise(codes=[5]) == 75
    assert desk.said[-1] == f"asked to leave; {UNKNOWN}; the same command continues it"
    assert len(desk.programs.started) == 1


def test_a_supervisor_that_is_asked_to_leave_reports_a_final_outcome_first(desk: Desk) -> None:
    desk.programs.during = [ask_to_leave]
    assert desk.supervise(codes=[4]) == 4
    assert desk.supervise(codes=[0]) == 0, "and a completed one"


def test_a_job_that_is_taken_over_asks_its_supervisor_to_leave(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced = threading.Semaphore(0)

    def kill(pid: int, number: int) -> None:
        desk.programs.kill(pid, number)
        fenced.release()

    def take_over() -> None:
        successor = Launcher(
            number=2, id="b", command="supervise", host="node-7", user="ann", pid=1, since_utc=0.0
        )
        desk.job().store.put(launcher_key(2), successor.to_json())
        assert fenced.acquire(timeout=20.0), "the claim is looked at twice a second"

    monkeypatch.setattr(os, "kill", kill)
    assert desk.supervise(codes=[4], effects=[take_over]) == 75
    assert desk.said[-1] == (
        "job taken over by `supervise` of ann on host node-7 (pid 1), since 1970-01-01 00:00:00 "
        "UTC; " + UNKNOWN
    )
    assert desk.programs.kills == [(os.getpid(), signal.SIGTERM)]


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the store answers, one value for each read of the record; then it answers."""
    answers: list[bool] = []
    read = supervisor.read_record

    def read_record(store: Store, config: Any) -> Any:
        assert store.request_seconds == 30.0
        if answers and not answers.pop(0):
            raise StoreUnavailable("no answer")
        return read(store, config)

    monkeypatch.setattr(supervisor, "read_record", read_record)
    return answers


def test_a_store_that_does_not_answer_is_asked_again(desk: Desk, lost: list[bool]) -> None:
    lost += [False, False, True, False, True, False]
    assert desk.supervise(codes=[0]) == 0
    away = "the store does not answer, again in 30 s: no answer"
    assert desk.said == [
        away,
        away,
        f"job j in {desk.folder / 'store'} begins",
        away,
        away,
        desk.said[-1],
    ]
    assert desk.pauses == [30.0] * 4 and desk.said[-1].startswith("completed after 1 run; ")


@pytest.mark.parametrize(("hours", "tries"), [("0.4999", 60), ("0.5", 61)])
def test_a_store_that_does_not_answer_for_too_long_ends_the_supervisor(
    desk: Desk, lost: list[bool], hours: str, tries: int
) -> None:
    """After 60 pauses of 30 s, half an hour has passed."""
    lost += [False] * 99
    with pytest.raises(StoreUnavailable):
        desk.supervise("--wait-hours", hours, codes=[])
    assert len(desk.pauses) == tries


@pytest.mark.parametrize(
    "answered", [[], [True], [True, True]], ids=["first", "after the claim", "after a run"]
)
def test_a_supervisor_may_be_asked_to_leave_while_the_store_does_not_answer(
    desk: Desk, lost: list[bool], answered: list[bool]
) -> None:
    lost += [*answered, False, False]
    desk.at_pause = ask_to_leave
    assert desk.supervise(codes=[1]) == 75
    assert (
        desk.said[-1]
        == "asked to leave while the store did not answer; the same command continues the job"
    )
    assert len(desk.programs.started) == (1 if len(answered) == 2 else 0)


def test_a_job_that_cannot_be_claimed_runs_unprotected(desk: Desk) -> None:
    folder = desk.folder / "store" / "jobs" / "j"
    folder.mkdir(parents=True)
    (folder / "launchers").write_text("a file where the folder belongs")
    assert desk.supervise(codes=[5, 0]) == 0
    assert desk.said[1].startswith("job j is not protected from a second launcher: ")
    assert CLAIM_VARIABLE not in desk.programs.started[0].options["env"]
    desk.programs.during = [ask_to_leave]
    assert desk.supervise(codes=[75]) == 75
    assert desk.said[-1] == f"asked to leave; {UNKNOWN}; the same command continues it"


def test_batch_jobs_left_behind_are_ended_before_a_run_is_judged(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their end is what the run is judged by."""
    runs: list[str] = []

    def end(job: Job, say: Callable[[str], None]) -> None:
        assert (job.name, job.config, job.request_seconds) == ("j", desk.options().config, 30.0)
        runs.append(job.run)
        desk.emit((BATCH_ATTEMPT, {"job_id": "x-1", "cause": "reclaimed"}))

    monkeypatch.setattr(supervisor, "end_leftovers", end)
    submit = {"job_id": "x-1", "step": "train", "task": "5"}
    assert desk.supervise(codes=[1, 0], effects=[lambda: desk.emit((BATCH_SUBMITTED, submit))]) == 0
    assert runs == ["run-1"]
    assert desk.said[1].startswith("interrupted (exit code 1), 1 run, ")


def test_batch_jobs_left_behind_are_ended_without_a_claim_too(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(supervisor, "end_leftovers", lambda job, say: ended.append(job.run))
    desk.emit((BATCH_SUBMITTED, {"job_id": "x-1", "step": "train", "task": "5"}))
    (desk.folder / "store" / "jobs" / "j" / "launchers").write_text(
        "a file where the folder belongs"
    )
    assert desk.supervise(codes=[0]) == 0
    assert ended == ["run-1", "run-1"], "before the first run and after it"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line replaces its process's streams, which here are pytest's."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)


@pytest.mark.usefixtures("streams")
def test_the_command_line_runs_the_flow_and_prints_at_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    seen: list[str] = []
    desk.programs.codes = [0]
    desk.programs.at_start = lambda: seen.append(output.flushed)
    assert main([CONFIG, "--job", "j", "--set", f"store={desk.folder / 'store'}"]) == 0
    assert seen == [f"supervise: job j in {desk.folder / 'store'} begins\n"]
    [started] = desk.programs.started
    assert started.command[3:6] == [
        sys.executable,
        str(ROOT / "ebbflow/flows" / "train_flow.py"),
        "run",
    ]
    assert isinstance(sys.stdout, GuardedStream), (
        "what others wrote into the store may hold control characters"
    )


@pytest.mark.usefixtures("streams")
def test_the_command_line_continues_without_a_reader(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(desk)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main([CONFIG, "--job", "j", "--set", f"store={desk.folder / 'store'}"]) == 0
    os.close(writer)


@pytest.mark.usefixtures("streams")
def test_the_command_line_prints_the_job_that_it_supervises(
    desk: Desk, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(desk)
    store = desk.folder / "store"
    assert main([CONFIG, "--job", "j", "--set", f"store={store}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"supervise: job j in {store} goes on; {FREE}",
        f"supervise: job j is complete already, and {FREE}; use another --job to start anew",
    ]
    assert main([CONFIG, "--job", "no/name"]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """The supervisor handles its process's signals, which here is pytest's."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
