"""Point clouds at length: the laptop job loses a node, learns, and ends with the bits of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import ROOT, FlowRunner, assert_ledger_adds_up, train_quietly

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

LAPTOP = ROOT / "configs" / "point-clouds.yaml"


def test_the_laptop_job_learns_and_loses_a_node_bit_for_bit(tmp_path: Path) -> None:
    quiet = train_quietly(tmp_path / "quiet", config=str(LAPTOP))
    runner = FlowRunner(tmp_path / "run")
    words = ["--config", str(LAPTOP), "--set", f"store={runner.runs}", "--rehearse", "node-loss@60%"]
    run = runner.run("run", "--verbose", *words)
    assert run.exit_code == 0, run.output
    report = run.report
    assert report["interruptions"] == 1 and report["redone_steps"] >= 1 and quiet["interruptions"] == 0
    assert report["weights_sha256"] == quiet["weights_sha256"]
    assert report["actual"]["metrics"] == quiet["actual"]["metrics"]
    assert report["actual"]["metrics"]["chamfer_ratio"] <= 0.5
    assert report["charts"]["evaluations"]["pictures"]["clouds"].startswith("<svg")
    assert_ledger_adds_up(report)
