"""Whole jobs whose numbers, weights or memory go wrong: what is done, and that nothing else changes
by it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.errors import Outcome
from ebbflow.core.events import GENERATION_ENDED, GUARD, RESTORE, STEP, read_events
from ebbflow.cost.ledger.ledger import fold
from ebbflow.cost.report.report import list_notable_events
from ebbflow.training.errors import (
    GangError,
    MemoryGrowth,
    MicroBatchTooLarge,
    Rewind,
    TooManyRewinds,
)
from tests.support.guard_jobs import Job

STEPS = 12
_FINDS_UNUSED = {"find_unused_parameters": True}
BAD = {"bad_first": 48, "bad_end": 56, "bad_factor": "nan"}  # step 7, with eight samples a step


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a job that nothing goes wrong in."""
    job = Job.make(tmp_path_factory.mktemp("quiet") / "job", steps=STEPS)
    assert job.run_alone().outcome is Outcome.COMPLETED
    return job.losses()


def guarded(
    folder: Path, options: dict[str, Any] | None = None, name: str = "job", **sections: Any
) -> Job:
    return Job.make(folder / name, steps=STEPS, options=options, **sections)


def test_going_back_is_leaving_out_where_every_step_is_a_commit(
    tmp_path: Path, quiet: dict[int, float]
) -> None:
    """The same weights meet the same samples: at step 8 where step 7 was left out, at step 7 after
    a rewind.
    """
    skipping = guarded(tmp_path, BAD, guards={"non_finite": "skip"})
    assert skipping.run_alone().outcome is Outcome.COMPLETED
    (tmp_path / "other").mkdir()
    going_back = guarded(
        tmp_path / "other",
        BAD,
        guards={"non_finite": "rewind"},
        checkpoint={"interval_steps": 1, "keep_last": 99},
    )
    with pytest.raises(
        Rewind, match=r"step 7: loss is not finite.*up to step 6, and on from sample 56"
    ):
        going_back.run_alone()
    assert going_back.run_alone().outcome is Outcome.COMPLETED
    skipped = skipping.losses()
    gone = going_back.losses()
    assert [skipped[step] for step in (*range(1, 7), *range(8, 13))] == [
        gone[step] for step in range(1, 12)
    ]
    assert skipped[7] is None and [skipped[step] for step in range(1, 7)] == [
        quiet[step] for step in range(1, 7)
    ]

    (event,) = skipping.events(GUARD)
    assert (event.step, event.data["action"], event.data["samples"]) == (7, "skip", [48, 56])
    seconds = {
        str(line.ledger_class): line.rank_seconds
        for line in fold(read_events(skipping.store)).lines
    }
    (left_out,) = [event for event in skipping.events(STEP) if event.data.get("skipped")]
    taken = left_out.data["seconds"]
    assert seconds["skipped_step"] == pytest.approx(
        taken["useful_step"] + taken["data_wait"], abs=1e-5
    )
    assert [
        line["step"]
        for line in list_notable_events(read_events(skipping.store))
        if line["name"] == GUARD
    ] == [7]
    (event,) = going_back.events(GUARD)
    assert (event.data["action"], event.data["limit"], event.data["first_sample"]) == (
        "rewind",
        6,
        56,
    )
    assert going_back.events(RESTORE)[0].step == 6


def test_a_resumed_job_makes_the_same_jump_and_sees_the_same_spike(tmp_path: Path) -> None:
    """A spike at step 4 leads back to step 2 and past the samples; another at step 11 can only be
    seen by one who remembers the losses from before the interruption at step 9."""
    policy = {
        "non_finite": "rewind",
        "spike": "skip",
        "spike_window_steps": 10,
        "skips_in_a_row": 1,
    }
    options = {"bad_first": 24, "bad_end": 32, "bad_factor": "nan"}
    late = {"late_first": 96, "late_end": 104, "late_factor": "40"}
    weights = []
    for name, starts in (("straight", (STEPS, STEPS)), ("interrupted", (2, 9, 9, STEPS))):
        (tmp_path / name).mkdir()
        job = guarded(
            tmp_path / name, {**options, **late}, guards=policy, checkpoint={"interval_steps": 2}
        )
        for number, stop in enumerate(starts):
            if number == len(starts) // 3:  # the first that comes to step 4
                with pytest.raises(Rewind):
                    job.run_alone(max_steps=stop)
            else:
                ending = job.run_alone(max_steps=stop)
        weights.append(ending.weights_sha256)
        found = [(event.step, event.data["action"]) for event in job.events(GUARD)]
        assert found == [(4, "rewind"), (11, "skip")]
    assert weights[0] == weights[1]


def test_a_job_that_fails_on_every_machine_ends(tmp_path: Path) -> None:
    options = {"bad_first": 16, "bad_end": 10**6}
    job = guarded(
        tmp_path,
        {**options, "bad_factor": "nan"},
        guards={"non_finite": "rewind", "max_rewinds": 1},
    )
    with pytest.raises(Rewind):
        job.run_alone()
    ending = job.run_alone()
    assert ending.outcome is Outcome.NON_FINITE and "1 rewinds, the limit" in ending.message
    spikes = {"spike": "rewind", "spike_window_steps": 10, "max_rewinds": 0}
    (tmp_path / "spikes").mkdir()
    job = guarded(
        tmp_path / "spikes", {**options, "bad_first": 72, "bad_factor": "60"}, guards=spikes
    )
    with pytest.raises(TooManyRewinds, match="step 10: loss"):
        job.run_alone()


def test_a_batch_that_does_not_fit_is_split_with_the_same_gradient(tmp_path: Path) -> None:
    """At run time the next start is told to; before the first step a dry run finds out. Losses are
    those of a job whose steps were never split, and so are the samples that they are of."""
    jobs = {}
    for name, options, training in (
        ("whole", {}, {}),
        ("at run time", {"largest": 16}, {}),
        ("dry run", {"largest": 9}, {"micro_batch": "auto"}),
    ):
        (tmp_path / name).mkdir()
        jobs[name] = guarded(tmp_path / name, options, training={"batch_size": 64, **training})
    for accumulation in (2, 4):
        with pytest.raises(
            MicroBatchTooLarge, match=f"from the last commit on with {accumulation}: planted"
        ):
            jobs["at run time"].run_alone()
    assert jobs["dry run"].run_alone(max_steps=5).outcome is Outcome.COMPLETED
    for job in jobs.values():
        assert job.run_alone().outcome is Outcome.COMPLETED
        assert job.losses() == pytest.approx(jobs["whole"].losses(), rel=1e-6)
    told = {}
    for name, job in jobs.items():
        told[name] = [(event.step, event.data["accumulation"]) for event in job.events(GUARD)]
    # What the dry run has found holds for the later start too.
    assert told == {"whole": [], "at run time": [(1, 2), (1, 4)], "dry run": [(None, 8)]}


def test_memory_that_grows_is_given_back_at_a_commit(
    tmp_path: Path, quiet: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_SAMPLE_SECONDS", 0.0), ("_SAMPLES", 4), ("_SAMPLES_PER_LOOK", 1)):
        monkeypatch.setattr(f"ebbflow.training.engine.guards.memory.{name}", value)
    monkeypatch.setattr("ebbflow.training.engine.guards.guards.host_bytes_left", lambda: 2.0**20)
    job = guarded(tmp_path, {"leak_mib": 32})
    with pytest.raises(MemoryGrowth, match="rank 0 would have run out; saved at step"):
        job.run_alone()
    (event,) = job.events(GUARD)
    assert event.data["action"] == "renew" and "memory grows by" in event.data["reason"]
    monkeypatch.setattr("ebbflow.training.engine.guards.guards.host_bytes_left", lambda: 2.0**50)
    assert job.run_alone().outcome is Outcome.COMPLETED
    assert job.losses() == quiet
    taken = [event.step for event in job.events(STEP)]
    assert taken == list(range(1, STEPS + 1)), "no step was lost"


@pytest.mark.parametrize("unused_from", [pytest.param(0, marks=pytest.mark.long), 44])
def test_a_parameter_that_one_rank_does_not_use_ends_the_job_at_once(
    tmp_path: Path, unused_from: int
) -> None:
    """In the first step, and in step 6, which both ranks reach with used parameters."""
    job = guarded(tmp_path, {"unused_from": unused_from}, workload="OneSided")
    begun = time.monotonic()
    place = r"branch \(Linear\), used at tests/support/guard_jobs\.py:\d+ in Branching\.forward"
    with pytest.raises(
        GangError, match=rf"rank 1: branch\.weight, branch\.bias of 4 param.* {place}"
    ) as error:
        job.run()
    assert time.monotonic() - begun < 60, "the step deadline of 300 s was awaited"
    assert not error.value.curable and error.value.outcome == "config"
    (end,) = job.events(GENERATION_ENDED)
    assert end.data["culprit"].count("set ddp.find_unused_parameters to true") == 1
    if unused_from:  # as the message advises
        job = guarded(
            tmp_path,
            job.config["workload_options"],
            "again",
            workload="OneSided",
            ddp=_FINDS_UNUSED,
        )
        assert job.run().outcome == Outcome.COMPLETED
