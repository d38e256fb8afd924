"""A job with four trackers in five attempts: each tracker shows one run with each step once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.core.events import STEP, read_events
from ebbflow.core.store import Store
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import ROOT, FlowRunner, processes_with, wait_until
from tests.support.tracker_files import (
    mlflow_run,
    read_jsonl,
    read_mlflow,
    read_tensorboard,
    sync_wandb,
)

pytestmark = [pytest.mark.flow, pytest.mark.timeout(1800)]

STEPS = 60
SECONDS_PER_STEP = 0.25
_WAIT_SECONDS = 400.0

_SCRIPT = """
import time, torch, ebbflow
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with ebbflow.attach(model, optimizer) as job:
    for step in job.steps(100):
        loss = model(torch.ones(2, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
        job.log(loss=loss.item())
"""


def test_five_attempts_of_a_job_are_one_run_in_every_tracker(tmp_path: Path) -> None:
    """A rehearsed kill of a rank, SIGKILL of the launcher, SIGTERM, and SIGKILL of a rank."""
    database = tmp_path / "mlflow.db"
    trackers = [{"type": "wandb"}, {"type": "mlflow", "url": f"sqlite:///{database}"}]
    trackers += [{"type": "tensorboard"}, {"type": "jsonl"}]
    own = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", **with_paced(tmp_path)}
    runner = FlowRunner(tmp_path / "flow", environment=own)
    options = runner.options(
        trackers=json.dumps(trackers), training__max_steps=STEPS, **paced_settings(SECONDS_PER_STEP)
    )

    launcher = runner.start("run", *options, "--rehearse", "rank-kill@step:12")
    runner.await_step(22, generation=2, timeout=_WAIT_SECONDS)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    wait_until(
        "the end of all its processes", lambda: not processes_with(str(runner.folder)), timeout=60
    )
    launcher = runner.start("resume")
    runner.await_step(32, generation=3, timeout=_WAIT_SECONDS)
    launcher.send_signal(signal.SIGTERM)
    assert runner.finish(launcher).exit_code == 75
    launcher = runner.start("resume")
    os.kill(runner.await_step(46, generation=4, rank=1, timeout=_WAIT_SECONDS), signal.SIGKILL)
    run = runner.finish(launcher)
    assert run.exit_code == 0, run.output
    assert "not everything is sent" not in run.output, run.output
    report = run.report
    folder = run.folder
    assert (
        report["outcome"] == "completed"
        and report["interruptions"] == 4
        and report["redone_steps"] > 0
    )
    assert len(report["events"]["generations"]) == 5

    synced = sync_wandb(folder / "wandb")
    (_, logged) = mlflow_run(database)
    assert logged.info.status == "FINISHED"
    summary = json.loads((folder / "run.json").read_text())
    readers = {
        "wandb": synced.series,
        "mlflow": lambda name: read_mlflow(database, name),
        "tensorboard": lambda name: read_tensorboard(folder, name),
        "jsonl": lambda name: read_jsonl(folder, name),
    }
    expected = {"ebbflow/usd": report["total_usd"], "ebbflow/goodput": report["actual"]["goodput"]}
    expected |= {"ebbflow/redone_steps": report["redone_steps"], "ebbflow/interruptions": 4}
    print({name: (value, summary[name], synced.summary[name]) for name, value in expected.items()})
    for kind, read in readers.items():
        losses = read("loss")
        assert [step for step, _ in losses] == list(range(1, STEPS + 1)), kind
        values = [value for _, value in losses]
        # Float32
        assert values == pytest.approx([loss for _, loss in report["loss_curve"]], rel=1e-6), kind
        for name in expected:
            totals = read(name)
            assert [step for step, _ in totals] == sorted({step for step, _ in totals}), (
                kind,
                name,
            )
            assert totals[-1][0] == STEPS, (kind, name)
            assert totals[-1][1] == pytest.approx(summary[name], rel=1e-6), (kind, name)
    for totals in (summary, synced.summary):
        for name, value in expected.items():
            assert totals[name] == pytest.approx(value, rel=0.01), name
        assert totals["ebbflow/outcome"] == "completed"


def test_trackers_and_webhooks_that_are_down_or_hang_delay_no_step_and_bound_the_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    found: dict[str, tuple[float, float]] = {}
    with socket.create_server(
        ("127.0.0.1", 0), backlog=64
    ) as silent:  # connects, and never answers
        hangs = f"http://127.0.0.1:{silent.getsockname()[1]}"
        trackers = [
            {"type": "jsonl"},
            {"type": "mlflow", "url": hangs},
            {"type": "mlflow", "url": "http://127.0.0.1:1"},
        ]
        trackers += [{"type": "wandb", "url": hangs}]
        down = [
            "--set",
            f"trackers={json.dumps(trackers)}",
            "--set",
            "notifications.webhook_env=HOOK",
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "EBBFLOW_RUNS": str(tmp_path / "runs"),
        }
        environment |= {"HOOK": f"{hangs}/hook", "WANDB_API_KEY": "a" * 40}
        for name, words in (("without", []), ("down", down)):
            command = [sys.executable, "-m", "ebbflow", "run", "train.py", "--job", name, *words]
            began = time.monotonic()
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
            )
            seconds = time.monotonic() - began
            assert done.returncode == 0 and "completed at step 100" in done.stdout, (
                done.stdout + done.stderr
            )
            events = read_events(Store.open(str(tmp_path / "runs")).sub(f"jobs/{name}"))
            steps = [event.t_wall for event in events if event.name == STEP]
            assert len(steps) == 100
            found[name] = seconds, steps[-1] - steps[0]
    print(f"seconds of the command and of 99 steps: {found}\n{done.stdout}")
    late = next(
        line for line in done.stdout.splitlines() if line.startswith("not everything is sent to ")
    )
    assert all(name in late for name in ("mlflow", "wandb", "webhook")) and "jsonl" not in late
    assert len(read_jsonl(tmp_path / "runs" / "down", "loss")) == 100
    assert found["down"][1] < 1.2 * found["without"][1]
    assert found["down"][0] < found["without"][0] + 20.0
