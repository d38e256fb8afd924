"""Laptop jobs of the workloads at length: each loses a node, learns, and ends with an uninterrupted run's bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flow import ROOT, FlowRunner, assert_ledger_adds_up, train_quietly

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("name", "metric", "least", "most", "picture"),
    [
        ("point-clouds", "chamfer_ratio", 0.0, 0.5, "clouds"),
        ("policy-optimization", "held_out_reward", 0.9, 1.0, "completions"),
        ("images", "accuracy", 0.95, 1.0, "confusion"),
    ],
)
def test_a_laptop_job_learns_and_loses_a_node_bit_for_bit(
    name: str, metric: str, least: float, most: float, picture: str, tmp_path: Path
) -> None:
    config = str(ROOT / "configs" / f"{name}.yaml")
    quiet = train_quietly(tmp_path / "quiet", config=config)
    runner = FlowRunner(tmp_path / "run")
    words = ["--config", config, "--set", f"store={runner.runs}", "--rehearse", "node-loss@60%"]
    run = runner.run("run", "--verbose", *words)
    assert run.exit_code == 0, run.output
    report = run.report
    assert report["interruptions"] == 1 and report["redone_steps"] >= 1 and quiet["interruptions"] == 0
    assert report["weights_sha256"] == quiet["weights_sha256"]
    # Speeds differ, and the share of clipped tokens is that of the steps since the restart.
    speeds = {one for one in quiet["actual"]["metrics"] if one.endswith(("_per_second", "_share"))}
    metrics, expected = report["actual"]["metrics"], quiet["actual"]["metrics"]
    assert {one: metrics[one] for one in metrics if one not in speeds} == {
        one: expected[one] for one in expected if one not in speeds
    }
    assert least <= metrics[metric] <= most
    assert report["charts"]["evaluations"]["pictures"][picture].startswith("<svg")
    assert_ledger_adds_up(report)
