"""`ebbflow run --with slurm` on a real cluster: the flow's training steps as Slurm jobs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.errors import Outcome
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_flow import SlurmRunner

STEPS = 200
ENDLESS = 100_000


@pytest.fixture(scope="module")
def weights(session_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of the job, trained without Slurm, an agent or an interruption."""
    return SlurmRunner(tmp_path_factory.mktemp("alone"), session_cluster).train_alone(STEPS)


def test_a_killed_launchers_job_is_adopted_and_preempted_and_ends_bit_equal(
    runner: SlurmRunner, weights: str
) -> None:
    cluster = runner.cluster
    words = runner.words("sent", steps=STEPS)
    other = cluster.preempt(600)  # so that the job waits
    first = runner.start(*words)
    cluster.wait_until("a waiting job", lambda: len(cluster.jobs()) == 2, 120)
    first.kill()
    first.wait()
    second = runner.start(*words)
    cluster.wait_until("adoption", lambda: "pending: adopted" in runner.log.read_text(), 120)
    (adopted,) = set(cluster.jobs()) - {other}
    cluster.ask("scancel", other)
    runner.await_commit("sent")
    cluster.preempt()
    run = runner.finish(second)
    assert run.exit_code == 0, run.output
    assert run.report["weights_sha256"] == weights, run.output
    assert runner.causes() == ["preempted", "completed"], run.output
    assert runner.slurm_events()[0]["job_id"] == adopted
    first_row = run.report["money"]["slurm_jobs"][0]
    assert (first_row["cause"], first_row["reason"]) == ("preempted", "FAILED, preempted")
    assert first_row["node_hours"] > 0


def test_scancel_lets_the_job_save_and_ends_the_run_as_interrupted(runner: SlurmRunner) -> None:
    started = runner.start(*runner.words("sent", steps=ENDLESS))
    before = runner.await_commit("sent")
    (job_id,) = runner.cluster.jobs()
    runner.cluster.ask("scancel", job_id)
    run = runner.finish(started, 180)
    assert run.exit_code == 75, run.output
    assert f"Slurm job {job_id} ended: CANCELLED" in run.output
    assert "run --with slurm --job sent" in run.output
    assert runner.await_commit("sent") > before, "the last step was not saved"


def test_ctrl_c_in_the_launcher_ends_the_slurm_job_after_its_save(runner: SlurmRunner) -> None:
    started = runner.start(*runner.words("sent", steps=ENDLESS))
    before = runner.await_commit("sent")
    started.send_signal(signal.SIGINT)
    run = runner.finish(started, 180)
    assert run.exit_code == 75, run.output
    assert runner.cluster.jobs() == []
    assert runner.await_commit("sent") > before, "the last step was not saved"


def test_a_requeued_job_leaves_and_another_one_continues(runner: SlurmRunner) -> None:
    cluster = runner.cluster
    started = runner.start(*runner.words("sent", steps=ENDLESS))
    before = runner.await_commit("sent")
    (job_id,) = cluster.jobs()
    cluster.ask("scontrol", "update", f"JobId={job_id}", "Requeue=1")
    cluster.ask("scontrol", "requeue", job_id)
    cluster.wait_until("an end", lambda: runner.causes() == ["requeued"], 120)
    cluster.wait_until("the next Slurm job", lambda: set(cluster.jobs()) - {job_id})
    runner.await_commit("sent", before)
    started.send_signal(signal.SIGINT)
    run = runner.finish(started, 180)
    assert run.exit_code == 75, run.output


def test_an_agent_of_a_requeued_job_starts_no_rank(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    command = [
        sys.executable,
        "-m",
        "ebbflow.training.launch.slurm_node",
        str(tmp_path),
        "no-order",
    ]
    done = subprocess.run(["srun", "-N2", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert done.stdout.count("left to its launcher") == 2


def test_a_queue_that_never_grants_ends_the_run(runner: SlurmRunner) -> None:
    blocker = runner.cluster.preempt(600)
    words = runner.words("sent", "--set", "slurm.queue_minutes=0.05", steps=STEPS)
    run = runner.run(*words)
    assert run.exit_code == Outcome.NO_CAPACITY.exit_code, run.output
    assert "spot and safe did not grant 2 nodes within 0.05 min; fix: " in run.output
    assert runner.causes() == ["no nodes in time"] * 2
    assert runner.cluster.jobs() == [blocker]
