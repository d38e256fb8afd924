"""A job of `ebbflow run --with slurm` survives the loss of slurmctld, slurmstepd and slurmd."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.slurm_flow import ENDLESS, SlurmRunner

pytestmark = pytest.mark.timeout(900)  # for a busy machine


def test_lost_daemons_and_nodes_lead_to_another_attempt(runner: SlurmRunner) -> None:
    cluster = runner.cluster
    started = runner.start(*runner.words("sent", steps=ENDLESS))
    (_, before) = runner.await_attempt("sent", 1)
    cluster.kill("slurmctld")
    time.sleep(2)
    cluster.start_controller()
    runner.await_commit("sent", before)  # training goes on meanwhile
    cluster.kill_step("n2")
    cluster.wait_until("an end", lambda: len(runner.causes()) == 1)
    runner.await_attempt("sent", 2)
    cluster.kill("n2")
    cluster.wait_until("a failed node", lambda: runner.causes()[1:] == ["node failed"])
    cluster.start_node("n2")
    (_, before) = runner.await_attempt("sent", 3)
    started.send_signal(signal.SIGINT)
    run = runner.finish(started)
    assert run.exit_code == 75, run.output
    assert "NODE_FAIL" in run.output
    assert cluster.jobs() == []
    assert runner.await_commit("sent", before) > before, "the last step was not saved"
