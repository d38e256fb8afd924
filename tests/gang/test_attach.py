"""A user's own script, attached: killed, told to leave, resumed, and equal bit for bit to an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ebbflow.infra.events import Event, read_events
from ebbflow.infra.layout import parse_commit_key
from ebbflow.infra.store import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "support" / "scripts"


def start(folder: Path, script: str, *words: str, ranks: int = 0, **environment: str) -> subprocess.Popen[bytes]:
    """Start a script as a user does, under torchrun if `ranks` is given, with its output in script.log."""
    folder.mkdir(exist_ok=True)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    own = {"EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    with open(folder / "script.log", "ab") as log:
        command = [sys.executable, *launcher, str(SCRIPTS / f"{script}.py"), *words]
        return subprocess.Popen(command, cwd=folder, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)


def output(folder: Path) -> str:
    return (folder / "script.log").read_text()


def finish(process: subprocess.Popen[bytes], folder: Path, code: int = 0) -> None:
    assert process.wait(120) == code, output(folder)


def commits(folder: Path, job: str) -> list[int]:
    base = folder / "runs" / "jobs" / job
    return sorted(parse_commit_key(str(path.relative_to(base)))[0] for path in base.glob("commits/*/*/*.json"))


def end_after_commit(process: subprocess.Popen[bytes], folder: Path, job: str, step: int, number: int) -> None:
    """Send a signal to the script once there is a commit of `step` or later."""
    limit = time.monotonic() + 100
    while not any(found >= step for found in commits(folder, job)):
        assert process.poll() is None and time.monotonic() < limit, output(folder)
        time.sleep(0.01)
    process.send_signal(number)


def final_state(folder: Path, job: str, step: int) -> dict[tuple[str, str], bytes]:
    """Return the bytes of the last commit by rank's file and name: weights, optimizer, states and random states."""
    base, found = folder / "runs" / "jobs" / job, {}
    for path in base.glob(f"data/*/{step:012d}/*.bin"):
        content = path.read_bytes()
        index = json.loads((base / "index" / path.relative_to(base / "data")).with_suffix(".json").read_text())
        found |= {(path.stem, name): content[start : start + size] for name, *_, start, size in index["items"]}
    assert found, commits(folder, job)
    return {key: value for key, value in found.items() if not key[1].endswith(".numpy")}  # which no script seeds


def events_of(folder: Path, job: str) -> list[Event]:
    return read_events(Store.open(str(folder / "runs" / "jobs" / job)))


def test_a_script_that_is_killed_twice_ends_bit_equal(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, "single", "0"), whole)
    for step in (10, 35):  # in the middle of the first and of the third epoch
        process = start(killed, "single", "0.03")
        end_after_commit(process, killed, "single", step, signal.SIGKILL)
        finish(process, killed, -signal.SIGKILL)
    finish(start(killed, "single", "0"), killed)
    assert final_state(killed, "single", 64) == final_state(whole, "single", 64)
    events = events_of(killed, "single")
    assert [event.data["outcome"] for event in events if event.name == "outcome"] == ["completed"]
    assert len([event for event in events if event.name == "restore"]) == 2
    assert {event.step for event in events if event.name == "step"} == set(range(1, 65))
    assert output(killed).count("goes on from step") == 2
