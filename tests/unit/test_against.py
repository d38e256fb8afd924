"""`ebbflow diagnose JOB --against SOUND`: what is slower, since when, on which rank, and which
lines are new.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ebbflow.core.event_log import EventLog
from ebbflow.core.events import COMMIT, CONFIGURED, STEP, Event, Origin
from ebbflow.core.layout import KnownJob, job_prefix, log_key
from ebbflow.core.rank_logs import LogLine
from ebbflow.core.store import Store
from ebbflow.diagnose.against import compare_jobs
from ebbflow.infra.__main__ import main
from tests.support.timelines import event


def job(
    *,
    slow_rank: int | None = None,
    slow_from: int = 999,
    slow_steps: int = 999,
    slow_every: int = 1,
    steps: int = 30,
    data_wait: float = 0.01,
    rate: float = 0.1,
) -> list[Event]:
    """Steps of two ranks on two nodes, with a commit every ten steps."""
    found = [
        event(
            CONFIGURED,
            0,
            settings=[{"key": "training.learning_rate", "value": rate, "source": "file"}],
        )
    ]
    for step in range(1, steps + 1):
        slow = slow_from <= step < slow_from + slow_steps and (step - slow_from) % slow_every == 0
        if slow:
            useful = 0.5
        else:
            useful = 0.2
        for rank in (0, 1):
            slowest = {
                "slowest_rank": slow_rank if slow else 0,
                "slowest_ratio": 2.5 if slow else 1.02,
            }
            if rank == 0:
                more = {**slowest, "slowest_seconds": 0.3 if slow else 0.001}
            else:
                more = {}
            seconds = {"useful_step": useful, "data_wait": data_wait if rank == 1 else 0.01}
            found.append(
                event(
                    STEP,
                    step,
                    node=rank,
                    rank=rank,
                    generation=1,
                    step=step,
                    seconds=seconds,
                    **more,
                )
            )
        if step % 10 == 0:
            found.append(event(COMMIT, step, rank=0, generation=1, step=step, seconds=0.3))
    return found


def line(text: str, rank: int = 0) -> LogLine:
    place = {"job": "a", "generation": 1, "node": rank, "rank": rank, "step": 4, "phase": None}
    return LogLine(t="2026-11-23T07:00:00.000Z", text=text, start=0, end=9, **place)


def test_equal_jobs_do_not_differ() -> None:
    found = compare_jobs(job(), [line("loss 2.31")], job(), [line("loss 2.29")])
    assert found.render() == "no difference in settings, times, events or lines"


def test_a_straggler_is_named_with_its_node_and_first_step() -> None:
    found = compare_jobs(job(slow_rank=1, slow_from=12), [], job(), []).render()
    assert (
        "node 1 rank 1 is 2.5 times as slow as the median rank since step 12, in 19 steps" in found
    )
    assert (
        "every rank: useful_step takes 0.5 s, in the sound job 0.2 s (2.5 times) since step 12"
        in found
    )


@pytest.mark.parametrize(
    ("slow_from", "slow_steps", "slow_every"),
    [(20, 6, 1), (41, 10, 1), (45, 6, 1), (42, 9, 1), (2, 99, 8), (2, 99, 3)],
)
def test_a_burst_of_load_is_no_straggler(slow_from: int, slow_steps: int, slow_every: int) -> None:
    slow = {"slow_from": slow_from, "slow_steps": slow_steps, "slow_every": slow_every}
    found = compare_jobs(job(slow_rank=1, steps=50, **slow), [], job(steps=50), [])
    assert found.render() == "no difference in settings, times, events or lines"


@pytest.mark.parametrize(("slow_from", "steps"), [(8, 50), (30, 50), (900, 1000), (5, 12)])
def test_a_lasting_slowdown_is_named_late_in_a_job_too(slow_from: int, steps: int) -> None:
    found = compare_jobs(
        job(slow_rank=1, slow_from=slow_from, steps=steps), [], job(steps=steps), []
    )
    assert found.straggler and (found.straggler.rank, found.straggler.since_step) == (1, slow_from)


def test_load_before_a_slowdown_is_no_part_of_it() -> None:
    jobs = job(steps=50), job(slow_rank=1, slow_from=1, steps=50)
    mixed = [
        (event.step or 0, event)
        for slow, events in enumerate(jobs)
        for event in events
        if slow
        == ((event.step or 0) > 20 or (event.step or 0) % 5 in (1, 2, 3))  # 3 of 5 steps, then all
    ]
    events = [event for _, event in sorted(mixed, key=lambda pair: pair[0])]
    found = compare_jobs(events, [], job(steps=50), [])
    assert found.straggler and found.straggler.since_step == 21
    assert [finding.since_step for finding in found.slower] == [21]


def test_a_rank_that_waits_for_data_is_named_alone() -> None:
    (slower,) = compare_jobs(job(data_wait=0.08), [], job(), []).slower
    assert (slower.part, slower.rank, slower.node, slower.since_step) == ("data_wait", 1, 1, 4)


def test_settings_new_lines_and_missing_events_are_shown() -> None:
    events = [event for event in job(rate=0.3) if event.name != COMMIT]
    lines = [line("loss 2.5"), line("NCCL WARN retry 3", 1), line("NCCL WARN retry 4", 1)]
    text = compare_jobs(events, lines, job(), [line("loss 2.31")]).render()
    assert (
        "setting training.learning_rate: 0.3, in the sound job 0.1" in text
        and "missing: commit" in text
    )
    assert (
        text.count("new line of node 1 rank 1, step 4: NCCL WARN retry 3") == 1
        and "retry 4" not in text
    )


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path))
    for name, events in (("sick", job(slow_rank=1, slow_from=12)), ("sound", job())):
        store = Store.open(str(tmp_path)).sub(job_prefix(name))
        for logged in events:
            with EventLog(
                store,
                Origin(job=name, generation=logged.generation, node=logged.node, rank=logged.rank),
            ) as log:
                log.emit(logged.name, step=logged.step, **logged.data)
        store.put(log_key(1, 0, 0, "000001-x"), line("step").to_json().encode() + b"\n")
        store.put("job.json", KnownJob(name, str(tmp_path)).note())
        (tmp_path / name).symlink_to(job_prefix(name))
    return tmp_path


def test_the_command_compares_two_jobs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "sick", "--against", "sound"]) == 0
    assert "compared with sound:\nnode 1 rank 1 is 2.5 times" in capsys.readouterr().out
    assert main(["diagnose", "sick", "--against", "sound", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["against"]["straggler"]["rank"] == 1
    assert main(["diagnose", "sick", "--against", "nobody"]) == 2
    assert "no job 'nobody' to be found" in capsys.readouterr().err
    assert main(["diagnose", str(runs), "--against", "sound"]) == 2
    assert "--against compares two jobs" in capsys.readouterr().err
