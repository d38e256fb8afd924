"""People's own launch on Slurm: `srun python train.py` with `ebbflow.attach`, on a real cluster."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.infra.slurm.environment import parse_node_list
from tests.support.attached_scripts import attached, commits, final_state, finish, output, start
from tests.support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.timeout(900)  # for a busy machine

PAUSE = "0.2"  # per step, so that a signal comes in mid-job
STEPS = 30
ROOT = Path(__file__).resolve().parents[2]


def launch(
    cluster: SlurmCluster, script: Path, *words: str, options: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a script on both nodes as users do, with its output in script.log."""
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    own |= {"EBBFLOW__CHECKPOINT__INTERVAL_STEPS": "5"}
    command = ["srun", "-N2", "--ntasks-per-node=1", "-J", script.stem, *options]
    with open(script.parent / "script.log", "ab") as log:
        return subprocess.Popen(
            [*command, sys.executable, script.name, *words],
            cwd=script.parent,
            env={**cluster.variables(), **own},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def await_commit(srun: subprocess.Popen[bytes], script: Path) -> None:
    """Wait until this launch has made a commit."""
    limit = time.monotonic() + 240
    before = max(commits(script), default=0)
    while max(commits(script), default=0) == before:
        assert srun.poll() is None, output(script)
        assert time.monotonic() < limit, output(script)
        time.sleep(0.01)


def end(srun: subprocess.Popen[bytes], script: Path, code: int) -> None:
    assert srun.wait(240) == code, output(script)


def test_a_script_under_srun_is_killed_and_warned_and_ends_bit_equal(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    whole = attached(tmp_path / "whole", "ddp")
    stopped = attached(tmp_path / "stopped", "ddp")
    undisturbed = start(whole, ranks=2)
    srun = launch(cluster, stopped, PAUSE, options=("--kill-on-bad-exit=1",))
    await_commit(srun, stopped)
    (job,) = cluster.jobs()
    cluster.ask("scancel", "--signal=KILL", job)
    assert srun.wait(240) != 0
    srun = launch(cluster, stopped, PAUSE)
    await_commit(srun, stopped)
    (job,) = cluster.jobs()
    cluster.ask("scancel", "--signal=USR1", job)
    end(srun, stopped, 75)
    end(launch(cluster, stopped), stopped, 0)
    finish(undisturbed, whole)
    assert final_state(stopped, STEPS) == final_state(whole, STEPS)


def test_node_lists_are_read_as_scontrol_reads_them(cluster: SlurmCluster) -> None:
    text = "gpu[008-011,013],n[1-3,7],login"
    assert parse_node_list(text) == cluster.ask("scontrol", "show", "hostnames", text).split()
