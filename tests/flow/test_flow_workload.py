"""The example of one's own model, and one's own module, through the flow and by ranks alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.flow import FLOW, ROOT, FlowRun, FlowRunner, train_quietly

pytestmark = [pytest.mark.flow, pytest.mark.timeout(900)]  # several runs, on a busy machine

EXAMPLE = ROOT / "examples" / "shapes.yaml"
CHANCE = 1 / 4
HSDP = ("--set", "parallel.mode=hsdp", "--set", "parallel.shard_size=2")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return train_quietly(tmp_path_factory.mktemp("quiet"), config=str(EXAMPLE))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """The flow, in which a node is lost."""
    runner = FlowRunner(tmp_path_factory.mktemp("run"))
    words = [
        "run",
        "--verbose",
        "--config",
        str(EXAMPLE),
        "--set",
        f"store={runner.runs}",
        "--rehearse",
        "node-loss@60%",
    ]
    run = runner.run(*words)
    assert run.exit_code == 0, run.output
    return run


def test_the_example_workload_learns_and_the_report_counts_images(run: FlowRun) -> None:
    assert len((ROOT / "examples" / "shapes.py").read_text().splitlines()) < 100
    actual = run.report["actual"]
    assert actual["metrics"]["held_out_accuracy"] > 3 * CHANCE
    assert actual["weight_unit"] == run.report["plan"]["weight_unit"] == "images"
    assert actual["unigram_entropy_nats"] is None and actual["held_out_loss"] is None
    assert "held out accuracy" in run.output and "images/s" in run.output
    report = run.output[run.output.index("report of job") :]
    assert "token" not in report and "entropy" not in report
    assert run.report["plan"]["tokens"] == 120 * 64


def test_the_example_survives_the_loss_of_a_node_bit_for_bit(
    quiet: dict[str, Any], run: FlowRun
) -> None:
    assert quiet["interruptions"] == 0
    assert run.report["interruptions"] == 1 and run.report["redone_steps"] >= 1
    assert run.report["weights_sha256"] == quiet["weights_sha256"]
    assert run.report["loss_curve"] == quiet["loss_curve"]
    assert run.report["actual"]["metrics"] == quiet["actual"]["metrics"]


def test_ranks_train_the_same_model_under_hsdp(quiet: dict[str, Any], tmp_path: Path) -> None:
    report = train_quietly(tmp_path, *HSDP, config=str(EXAMPLE))
    losses, expected = ([loss for _, loss in result["loss_curve"]] for result in (report, quiet))
    assert losses == pytest.approx(expected, rel=1e-5)
    accuracy, expected = (
        result["actual"]["metrics"]["held_out_accuracy"] for result in (report, quiet)
    )
    assert accuracy == pytest.approx(expected, abs=0.01)


def test_a_module_of_ones_own_is_refused_in_one_line_before_anything_is_paid(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    example = (ROOT / "examples" / "shapes.py").read_text()
    (folder / "mine.py").write_text(example.replace('reduction="sum"', 'reduction="mean"'))
    runner = FlowRunner(tmp_path / "flow")
    done = subprocess.run(
        [
            *(sys.executable, str(FLOW), "run", "--config", str(EXAMPLE)),
            *("--set", "workload=mine:Shapes", "--set", f"store={runner.runs}"),
        ],
        cwd=tmp_path,
        env=dict(
            os.environ,
            PYTHONPATH=str(folder),
            EBBFLOW_RUNS=str(runner.runs),
            METAFLOW_DATASTORE_SYSROOT_LOCAL=str(tmp_path),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "mine:Shapes.loss must be a sum" in output and "FAIL  workload" in output
    assert "Traceback" not in output
    assert not list(runner.runs.glob("jobs/*/generations")), "no gang was started"
