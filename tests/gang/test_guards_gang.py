"""Guards of two ranks under an agent: they act alike, and the gang goes on within the attempt."""

from __future__ import annotations

from pathlib import Path

from ebbflow.core.events import FAULT_DETECTED, GENERATION_ENDED, GUARD, RESTORE
from tests.support.guard_jobs import Job


def test_a_weight_that_changed_on_one_rank_is_seen_and_taken_back(tmp_path: Path) -> None:
    """Rank 1 changes one weight by a millionth in step 4; the commit of step 4 holds it and is not
    used. Rank 0 alone meets a loss that is not finite in step 7: both leave the step out."""
    bad = {"bad_first": 48, "bad_end": 52, "bad_factor": "nan"}
    jobs = {}
    for name, rank, sample, interval in (
        ("quiet", 1, -1, 2),
        ("strange", 1, 28, 2),
        ("late", 0, 88, 100),
    ):
        once = tmp_path / f"once-{name}"
        options = {**bad, "strange_rank": rank, "strange_sample": sample, "strange_once": str(once)}
        guards = {"non_finite": "skip", "hash_interval_steps": interval}
        jobs[name] = Job.make(
            tmp_path / name, options=options, guards=guards, checkpoint={"interval_steps": 2}
        )
    quiet, outcome, late = (job.run() for job in jobs.values())
    assert once.exists()
    assert (outcome.outcome, outcome.step, outcome.generation) == ("completed", 12, 2)
    assert outcome.weights_sha256 == quiet.weights_sha256

    job = jobs["strange"]
    diverged, skipped = job.events(GUARD)
    assert (diverged.data["action"], diverged.data["ranks"], diverged.step) == (
        "diverged",
        [0, 1],
        5,
    )
    assert "equal after step 2" in diverged.data["reason"]
    assert (skipped.data["action"], skipped.generation, skipped.step) == ("skip", 2, 7)
    assert skipped.data["reason"] == "loss is not finite on rank 0"
    assert [event.step for event in job.events(RESTORE)] == [2]
    first, _ = job.events(GENERATION_ENDED)
    assert "DivergenceError" in first.data["culprit"] and len(job.events(FAULT_DETECTED)) == 1

    # In the last step, which no step follows: the last commit holds it, and the job does not end
    # with such weights. Each commit before was compared, so that little is lost however long the
    # interval.
    assert (late.outcome, late.generation, late.weights_sha256) == (
        "completed",
        2,
        quiet.weights_sha256,
    )
    *_, seen = jobs["late"].events(GUARD)
    assert (seen.data["action"], seen.data["ranks"], seen.step) == ("diverged", [0, 1], 12)
    assert [event.step for event in jobs["late"].events(RESTORE)] == [10]
