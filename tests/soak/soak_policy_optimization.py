"""Policy optimization at length: the laptop job loses a node, learns, and ends with an uninterrupted run's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import ROOT, FlowRunner, assert_ledger_adds_up, train_quietly

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

LAPTOP = ROOT / "configs" / "policy-optimization.yaml"
EXACT = ("held_out_reward", "reward", "kl", "entropy", "length", "kl_coefficient", "rollouts")  # the others are speeds


def test_the_laptop_job_learns_and_loses_a_node_bit_for_bit(tmp_path: Path) -> None:
    quiet = train_quietly(tmp_path / "quiet", config=str(LAPTOP))
    runner = FlowRunner(tmp_path / "run")
    words = ["--config", str(LAPTOP), "--set", f"store={runner.runs}", "--rehearse", "node-loss@60%"]
    run = runner.run("run", "--verbose", *words)
    assert run.exit_code == 0, run.output
    report = run.report
    assert report["interruptions"] == 1 and report["redone_steps"] >= 1 and quiet["interruptions"] == 0
    assert report["weights_sha256"] == quiet["weights_sha256"]
    metrics, expected = report["actual"]["metrics"], quiet["actual"]["metrics"]
    assert {name: metrics[name] for name in EXACT} == {name: expected[name] for name in EXACT}
    assert metrics["held_out_reward"] >= 0.9
    assert report["charts"]["evaluations"]["pictures"]["completions"].startswith("<svg")
    assert_ledger_adds_up(report)
