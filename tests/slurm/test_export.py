"""`ebbflow export slurm`: the batch script that people submit by hand, run by a real cluster."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ebbflow.core.events import read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.flows.skypilot import main
from tests.support.slurm_flow import SlurmRunner

pytestmark = pytest.mark.timeout(900)  # for a busy machine

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "ebbflow/configs/laptop.yaml")


def exported(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    store = f"store={folder / 'store'}"
    assert main(["export", "slurm", CONFIG, "--set", store, *words]) == 0
    return capsys.readouterr().out


def test_a_partition_becomes_options_of_sbatch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    partition = {"name": "spot", "gres": "gpu:8", "account": "lab", "max_hours": 1.5}
    settings = [f"slurm.partitions={json.dumps([partition])}", "slurm.activate=source /v/activate"]
    settings += ['slurm.options=["--mail-type=END"]', "checkpoint.stop_seconds=90"]
    words = [word for setting in settings for word in ("--set", setting)]
    lines = exported(tmp_path, capsys, *words, "--job", "mine").splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    wanted = {"--partition=spot", "--gres=gpu:8", "--account=lab", "--time=90", "--nodes=2"}
    assert wanted | {"--signal=USR1@120", "--mail-type=END", "--job-name=mine"} <= set(options)
    assert lines.index("source /v/activate") < min(
        position for position, line in enumerate(lines) if line.startswith("srun ")
    )


def test_a_script_gets_its_settings_by_variables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "my train.py"
    script.write_text("import ebbflow\n")
    words = ["--set", f"script={script}", "--set", "checkpoint.keep_last=7"]
    text = exported(tmp_path, capsys, *words, "--job", "mine")
    assert f"srun --kill-on-bad-exit=0 python '{script}'\n" in text
    assert f"export EBBFLOW__STORE={tmp_path / 'store'}\n" in text
    assert "export EBBFLOW__CHECKPOINT__KEEP_LAST=7\n" in text and "EBBFLOW_JOB=mine" in text


def test_sizes_that_are_not_known_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", f"store={tmp_path}", "--set", "cluster.nodes=auto"]
    assert main(["export", "slurm", CONFIG, *words]) == 2
    assert "fix: --set cluster.nodes=N" in capsys.readouterr().err


def test_an_exported_job_is_preempted_and_requeued_and_ends_bit_equal(
    runner: SlurmRunner, weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = runner.cluster
    words = runner.settings(steps=200)
    script = tmp_path / "job.sh"
    script.write_text(exported(tmp_path, capsys, *words, "--job", "sent"))
    environment = {**cluster.variables(), "PYTHONPATH": str(ROOT), "EBBFLOW_RUNS": str(runner.runs)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = ["sbatch", "--parsable", "-p", "spot", str(script)]
    sent = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    job_id = sent.stdout.strip()
    store = Store.open(runner.store).sub(job_prefix("sent"))
    log = tmp_path / f"sent-{job_id}.log"

    cluster.wait_until("a commit", lambda: store.list("commits"))
    cluster.preempt()
    # While it is COMPLETING, Slurm has yet to set the start of what it has requeued: in two minutes
    cluster.wait_until(
        "a requeue",
        lambda: (cluster.field(job_id, "Restarts"), cluster.state(job_id)) == ("1", "PENDING"),
    )
    cluster.ask("scontrol", "update", f"JobId={job_id}", "StartTime=now")
    cluster.wait_until("the end", lambda: cluster.state(job_id) == "COMPLETED")
    outcomes = [event for event in read_events(store) if event.name == "outcome"]
    assert outcomes[-1].data["weights_sha256"] == weights, log.read_text()
