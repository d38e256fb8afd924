"""A job of `ebbflow run --with slurm` at its time limit, which is what its budget leaves."""

from __future__ import annotations

import pytest

from ebbflow.core.errors import Outcome
from tests.support.slurm_flow import ENDLESS, SlurmRunner

pytestmark = pytest.mark.timeout(900)  # for a busy machine


def test_a_budget_of_node_hours_is_a_time_limit_before_which_the_job_saves(
    runner: SlurmRunner,
) -> None:
    """Two minutes of two nodes: Slurm warns 45 to 105 s before their end, and the rest is too short."""
    budget = ["--set", "slurm.budget_node_hours=0.0667"]
    run = runner.run(*runner.words("sent", *budget, steps=ENDLESS))
    assert "2 nodes, 2 min at most" in run.output
    assert "(time limit); another attempt follows" in run.output
    assert runner.causes() == ["time limit"]
    assert run.exit_code == Outcome.BUDGET.exit_code, run.output
    assert "of 0.0667 node-hours are used" in run.output
