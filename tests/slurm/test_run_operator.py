"""A job of `ebbflow run --with slurm` survives what operators and users do to it: requeue, drain of a
node, scancel.
"""

from __future__ import annotations

import pytest

from tests.support.slurm_flow import ENDLESS, SlurmRunner

pytestmark = pytest.mark.timeout(900)  # for a busy machine


def test_requeue_and_drain_lead_to_another_attempt_and_scancel_ends_the_run(
    runner: SlurmRunner,
) -> None:
    cluster = runner.cluster
    started = runner.start(*runner.words("sent", steps=ENDLESS))
    (job_id, _) = runner.await_attempt("sent", 1)
    cluster.ask("scontrol", "update", f"JobId={job_id}", "Requeue=1")
    cluster.ask("scontrol", "requeue", job_id)
    cluster.wait_until("an end", lambda: runner.causes() == ["requeued"])

    runner.await_attempt("sent", 2)
    cluster.ask("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=new fan")
    cluster.wait_until("a drain", lambda: runner.causes()[1:] == ["node drained"])
    assert runner.slurm_events()[-1]["reason"].endswith("n1 drained (new fan)")
    cluster.ask("scontrol", "update", "NodeName=n1", "State=RESUME")

    (job_id, before) = runner.await_attempt("sent", 3)
    assert f"sent: Slurm job {job_id}" in runner.ask_ebbflow("jobs")
    assert "rank" in runner.ask_ebbflow("logs", job_id)
    cluster.ask("scancel", job_id)
    run = runner.finish(started)
    assert run.exit_code == 75, run.output
    assert f"Slurm job {job_id} ended: CANCELLED" in run.output
    assert "run --with slurm --job sent" in run.output
    assert runner.await_commit("sent", before) > before, "the last step was not saved"
