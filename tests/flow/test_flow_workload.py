"""The example of one's own model, and one's own module, through the flow and through torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.infra.events import read_events
from ebbflow.infra.store import Store
from tests.support.flow import FLOW, ROOT, FlowRun, FlowRunner

pytestmark = pytest.mark.flow

EXAMPLE = ROOT / "examples" / "shapes.yaml"
CHANCE = 1 / 4


def run_example(folder: Path, *words: str) -> FlowRun:
    runner = FlowRunner(folder)
    return runner.run("run", "--config", str(EXAMPLE), "--set", f"store={runner.runs}", *words)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    run = run_example(tmp_path_factory.mktemp("quiet"))
    assert run.exit_code == 0, run.output
    return run


def test_the_example_learns_and_the_report_speaks_of_images(quiet: FlowRun) -> None:
    assert len((ROOT / "examples" / "shapes.py").read_text().splitlines()) <= 60
    actual = quiet.report["actual"]
    assert actual["metrics"]["held_out_accuracy"] > 3 * CHANCE
    assert actual["weight_unit"] == quiet.report["plan"]["weight_unit"] == "images"
    assert actual["unigram_entropy_nats"] is None and actual["held_out_loss"] is None
    assert "held out accuracy" in quiet.output and "images/s" in quiet.output
    report = quiet.output[quiet.output.index("report of job") :]
    assert "token" not in report and "entropy" not in report
    assert quiet.report["plan"]["tokens"] == 120 * 64


def test_the_example_survives_the_loss_of_a_node_bit_for_bit(quiet: FlowRun, tmp_path: Path) -> None:
    run = run_example(tmp_path, "--rehearse", "node-loss@60%")
    assert run.exit_code == 0, run.output
    assert run.report["interruptions"] == 1 and run.report["redone_steps"] >= 1
    assert run.report["weights_sha256"] == quiet.report["weights_sha256"]
    assert run.report["loss_curve"] == quiet.report["loss_curve"]
    assert run.report["actual"]["metrics"] == quiet.report["actual"]["metrics"]


def test_torchrun_trains_the_same_model_under_hsdp(quiet: FlowRun, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = ["--set", f"store={tmp_path}", "--set", "parallel.mode=hsdp", "--set", "parallel.shard_size=2"]
    done = subprocess.run(
        [*command, "-m", "training", str(EXAMPLE), "--job", "example", *settings],
        cwd=ROOT,
        env=dict(os.environ, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(Store.open(str(tmp_path / "jobs" / "example")))
    losses = {event.step: event.data["loss"] for event in events if event.name == "step"}
    assert [losses[step] for step, _ in quiet.report["loss_curve"]] == pytest.approx(
        [loss for _, loss in quiet.report["loss_curve"]], rel=1e-5
    )
    accuracy = [event.data["metrics"]["held_out_accuracy"] for event in events if event.name == "evaluation"]
    assert accuracy[-1] == pytest.approx(quiet.report["actual"]["metrics"]["held_out_accuracy"], abs=0.01)


def test_a_module_of_ones_own_is_refused_in_one_line_before_anything_is_paid(tmp_path: Path) -> None:
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
