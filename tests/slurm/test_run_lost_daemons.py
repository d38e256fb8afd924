"""A job of `ebbflow run --with slurm` survives the loss of slurmctld, slurmstepd and slurmd."""

from __future__ import annotations

import signal
import time

from tests.support.slurm_flow import SlurmRunner

ENDLESS = 100_000  # steps


def test_lost_daemons_and_nodes_lead_to_another_attempt(runner: SlurmRunner) -> None:
    cluster = runner.cluster
    started = runner.start(*runner.words("sent", steps=ENDLESS))
    before = runner.await_commit("sent")
    cluster.kill("slurmctld")
    time.sleep(2)
    cluster.start_controller()
    before = runner.await_commit("sent", before)  # training goes on meanwhile
    cluster.kill_step("n2")
    cluster.wait_until("an end", lambda: len(runner.causes()) == 1, 120)
    before = runner.await_commit("sent", before)
    cluster.kill("n2")
    cluster.wait_until("a failed node", lambda: runner.causes()[1:] == ["node failed"], 180)
    cluster.start_node("n2")
    runner.await_commit("sent", before)
    started.send_signal(signal.SIGINT)
    run = runner.finish(started, 180)
    assert run.exit_code == 75, run.output
    assert "NODE_FAIL" in run.output
