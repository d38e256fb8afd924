"""A job of `ebbflow run --with slurm` that reaches its time limit goes on in the next Slurm job."""

from __future__ import annotations

import signal

from tests.support.slurm_flow import SlurmRunner

ENDLESS = 100_000  # steps


def test_a_job_that_nears_its_time_limit_chains_into_the_next(runner: SlurmRunner) -> None:
    """The limit of two minutes leaves one: Slurm warns 60 s before it."""
    short = [{"name": "short"}]
    started = runner.start(*runner.words("sent", partitions=short, steps=ENDLESS, stop_seconds=30))
    runner.cluster.wait_until("a time limit", lambda: runner.causes() == ["time limit"], 180)
    before = runner.await_commit("sent")
    assert runner.await_commit("sent", before) > before, "the next Slurm job continues"
    started.send_signal(signal.SIGINT)
    run = runner.finish(started, 180)
    assert run.exit_code == 75, run.output
    assert "(time limit); another attempt follows" in run.output
