"""Every way to start a script shows the same: a first line, progress with dollars, a live page, a report
and a closing verdict, all with the figures of one ledger.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ebbflow.core.store import Store
from ebbflow.cost.jobs import load_report
from ebbflow.cost.report.verdict import render_verdict
from ebbflow.training.checkpoint import reachable_commits
from tests.support.surfaces import find_false_words, read_surfaces

SCRIPT = """
import sys
import textwrap
import time

import torch

import ebbflow

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 8)
job = ebbflow.attach(model, optimizer)
for (batch,) in job.batches([(rows,) for rows in data.split(8)], epochs=8):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    job.log(loss=loss)
    time.sleep(0.1)
    if "crash" in sys.argv and job.step == 30:
        raise KeyError("boom")
"""
FORKS = """
    if job.step in (10, 20, 30):
        if (pid := os.fork()) == 0:
            print("in a fork")
            if job.step == 30:
                raise KeyError("of a fork")
            sys.exit(0 if job.step == 10 else 3)
        status = os.waitpid(pid, 0)[1]
        print("fork of step", job.step, "exited with", os.waitstatus_to_exitcode(status))
        for path in pathlib.Path("store/jobs/train/launchers").iterdir():
            print("claim", path.read_text())
    job.log"""
STARTS = {
    "ebbflow run": [sys.executable, "-m", "ebbflow", "run", "train.py"],
    "python": [sys.executable, "train.py"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "train.py"],
}
PROGRESS = re.compile(r"step (\d+)/64 · \d+% · loss \d\.\d{4} · .*\$(\d\.\d{4}) spent · ")


def environment(folder: Path) -> dict[str, str]:
    settings = {
        "EBBFLOW__STORE": str(folder / "store"),
        "EBBFLOW__COST__USD_PER_NODE_HOUR": "36",
        "EBBFLOW__CHECKPOINT__INTERVAL_SECONDS": "1",
        "EBBFLOW__CHECKPOINT__INTERVAL": "seconds",
        "EBBFLOW_LIVE_PAGE": "1",
    }
    return os.environ | settings


def run_in(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("start", STARTS)
def test_each_way_to_start_a_script_shows_one_face(tmp_path: Path, start: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    done = subprocess.run(
        STARTS[start],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("ebbflow: job train, script train.py")
    assert first.endswith(f"store {tmp_path}/store, live page runs/train/live.html")
    steps = [(int(step), float(usd)) for step, usd in PROGRESS.findall(done.stdout)]
    assert steps and steps == sorted(steps), done.stdout
    page = (tmp_path / "runs/train/live.html").read_text()
    report = load_report(str(tmp_path / "runs/train/report.json"))
    assert (tmp_path / "runs/train/report.html").read_text() == page
    verdict = render_verdict(report)
    assert f"✓ {verdict}" in done.stdout and verdict in page
    surfaces = read_surfaces(tmp_path / "runs/train", done.stdout)
    assert find_false_words(surfaces, was_killed=False) == []
    assert steps[-1][1] <= float(report.total_usd)
    assert report.actual["price_kind"] == "stated in cost.usd_per_node_hour"
    fresh = load_report(str(tmp_path / "store/jobs/train"), fresh=True)
    assert fresh.total_usd == report.total_usd


def test_a_crash_of_a_script_without_an_agent_is_a_failure_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)

    done = subprocess.run(
        [*STARTS["python"], "crash"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 1
    assert "✗ Failed after" in done.stdout and "failed (KeyError: 'boom')" in done.stdout
    assert "killed or lost" not in done.stdout
    assert done.stderr.count("Traceback") == 1
    assert json.loads((tmp_path / "runs/train/report.json").read_text())["outcome"] == "failed"


def test_a_script_that_is_asked_to_leave_says_so_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        STARTS["python"],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        for line in started.stdout:
            if PROGRESS.match(line):
                break
        started.send_signal(signal.SIGTERM)
        rest = started.stdout.read()

    assert started.returncode == 75
    assert "✗ Interrupted after" in rest and "generation 1: interrupted" in rest
    done = subprocess.run(
        STARTS["python"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "goes on from step" in done.stdout and "✓ Completed" in done.stdout
    again = subprocess.run(
        STARTS["python"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "job train is complete at step 64, so its loop takes no step" in again.stdout


def test_names_given_to_attach_under_the_command_are_said_to_be_unused(tmp_path: Path) -> None:
    named = SCRIPT.replace("attach(model, optimizer)", "attach(model, optimizer, name='other')")
    (tmp_path / "train.py").write_text(named)

    done = subprocess.run(
        STARTS["ebbflow run"],
        cwd=tmp_path,
        env=environment(tmp_path) | {"EBBFLOW_LIVE_PAGE": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert "attach(name=…) is not used, since ebbflow run started this rank for job train" in (
        done.stdout
    )


def test_a_start_that_fails_after_a_completed_run_does_not_say_completed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [*STARTS["ebbflow run"], "--job", "twice"]
    first = run_in(tmp_path, command)
    assert first.returncode == 0, first.stderr
    for record in (tmp_path / "store" / "jobs" / "twice" / "generations").iterdir():
        record.write_bytes(b"")
    second = run_in(tmp_path, command)
    assert second.returncode == 1
    assert "not a sealed JSON document" in second.stdout + second.stderr
    assert "Completed" not in second.stdout
    assert json.loads((tmp_path / "runs/twice/report.json").read_text())["outcome"] == "failed"


@pytest.mark.parametrize("where", ["in the loop", "before attach"])
def test_a_fork_that_goes_on_with_the_script_neither_saves_nor_ends_the_job(
    tmp_path: Path, where: str
) -> None:
    """A fork overwrote the rank's index of a commit, and its end could count as the rank's."""
    if where == "in the loop":
        script = SCRIPT.replace(
            "    job.log", "    if job.step == 20:\n        os.fork()\n    job.log"
        )
    else:
        script = SCRIPT.replace("job = ", "if os.fork() == 0:\n    sys.exit(0)\njob = ", 1)
    (tmp_path / "train.py").write_text(f"import os\n{script}")
    done = run_in(tmp_path, STARTS["ebbflow run"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed at step 64" in done.stdout
    log = "".join(path.read_text() for path in (tmp_path / "runs/train/logs").rglob("rank-0.log"))
    assert log.count("went on with the loop") == (where == "in the loop")
    job = Store.open(str(tmp_path / "store/jobs/train"))
    assert [ref.step for ref in reachable_commits(job)].count(64) == 1


@pytest.mark.parametrize("start", ["ebbflow run", "python"])
def test_a_fork_that_exits_in_the_loop_or_the_block_does_nothing_for_the_rank(
    tmp_path: Path, start: str
) -> None:
    """It released the rank's claim, and exited with 1 and false words."""
    script = SCRIPT.replace("\n    job.log", FORKS).replace("sleep(0.1)", "sleep(0.02)")
    if start == "python":
        before, attach, loop = script.partition("job = ebbflow.attach(model, optimizer)\n")
        block = attach.replace("job = ", "with ").replace(")\n", ") as job:\n")
        script = before + block + textwrap.indent(loop, "    ")
    (tmp_path / "train.py").write_text(f"import os, pathlib\n{script}")
    done = run_in(tmp_path, STARTS[start])
    logs = [path.read_text() for path in (tmp_path / "runs/train/logs").rglob("rank-0.log")]
    text = "".join([done.stdout, done.stderr, *logs])
    assert done.returncode == 0, text
    codes = dict(re.findall(r"fork of step (\d+) exited with (-?\d+)", text))
    assert codes == {"10": "0", "20": "3", "30": "1"}, text
    assert text.count("KeyError: 'of a fork'") == 1
    assert "in a fork" in text
    assert "claim" in text
    assert '"released": true' not in text
    assert '"released":true' not in text
    assert "went on with the loop" not in text
    assert "lost" not in text
    report = json.loads((tmp_path / "runs/train/report.json").read_text())
    assert report["outcome"] == "completed"
