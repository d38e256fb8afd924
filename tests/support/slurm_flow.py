"""Running the flow with `--with slurm` on a cluster of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebbflow.core.layout import job_prefix, parse_commit_key
from ebbflow.core.store import Store
from tests.support.flow import ROOT, FlowRunner, train_alone
from tests.support.slurm_cluster import SlurmCluster

PARTITIONS = [{"name": "spot", "preemptible": True}, {"name": "safe"}]
ENDLESS = 100_000  # steps
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class SlurmRunner(FlowRunner):
    """Runs the flow with `--with slurm` on a cluster."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        super().__init__(folder, environment={**cluster.environment, **_LOOPBACK})
        self.cluster = cluster
        self._started: list[subprocess.Popen[str]] = []

    def start(
        self, *words: str, cwd: Path | None = None, program: Iterable[str] = ()
    ) -> subprocess.Popen[str]:
        started = super().start(*words, cwd=cwd, program=program)
        self._started.append(started)
        return started

    def kill_all(self) -> None:
        """Kill the launchers that still run, as after a failed test."""
        for process in self._started:
            process.kill()
            process.wait()

    def train_alone(self, steps: int) -> str:
        """Train the small job without Slurm, an agent or an interruption; return its weights' hash."""
        report = train_alone(
            self,
            ranks=2,
            model__hidden_size=32,
            model__num_layers=1,
            model__sequence_length=32,
            training__max_steps=steps,
        )
        return report["weights_sha256"]

    def words(
        self,
        job: str,
        *words: str,
        partitions: list[dict[str, Any]] | None = None,
        steps: int,
        stop_seconds: int = 15,
    ) -> list[str]:
        """Return the command line of a small job."""
        named = json.dumps(PARTITIONS if partitions is None else partitions)
        own = self.settings(steps=steps, stop_seconds=stop_seconds)
        slurm = ["--set", f"slurm.partitions={named}"]
        return ["run", "--with", "slurm", "--job", job, *own, *slurm, *words]

    def settings(self, *, steps: int, stop_seconds: int = 15) -> list[str]:
        """Return the options of a small job on two nodes of one rank each."""
        return self.options(
            cluster__nodes=2,
            cluster__processes_per_node=1,
            model__hidden_size=32,
            model__num_layers=1,
            model__sequence_length=32,
            training__max_steps=steps,
            checkpoint__stop_seconds=stop_seconds,
            checkpoint__interval_steps=20,
        )

    def await_attempt(self, job: str, number: int) -> tuple[str, int]:
        """Wait until the attempt trains; return the id of its Slurm job and the step of a commit that
        it has made.
        """

        def find_job() -> str:
            ids = [event["job_id"] for event in self.slurm_events() if event["does"] == "submitted"]
            return ids[number - 1] if len(ids) >= number else ""

        job_id = self.cluster.wait_until(f"attempt {number}", find_job)
        self.cluster.wait_until(
            f"job {job_id} to run", lambda: self.cluster.state(job_id) == "RUNNING"
        )
        return job_id, self.await_commit(job, self._newest_commit(job))

    def await_commit(self, job: str, after: int = -1) -> int:
        """Wait until the job has a commit of a later step than `after`; return its step."""
        self.cluster.wait_until(
            f"a commit after step {after}", lambda: self._newest_commit(job) > after
        )
        return self._newest_commit(job)

    def ask_ebbflow(self, *words: str) -> str:
        """Return what the command `ebbflow` prints about this runner's jobs."""
        environment = {**os.environ, **self.environment, "EBBFLOW_RUNS": str(self.runs)}
        done = subprocess.run(
            [sys.executable, "-m", "ebbflow", *words],
            env={**environment, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def slurm_events(self) -> list[dict[str, Any]]:
        return [event["data"] for event in self.events() if event["name"] == "slurm_job"]

    def causes(self) -> list[str]:
        """Return why the Slurm jobs ended, in order."""
        return [event["cause"] for event in self.slurm_events() if event["does"] == "ended"]

    def _newest_commit(self, job: str) -> int:
        """Return the step of the job's newest commit, -1 without one."""
        store = Store.open(self.store).sub(job_prefix(job))
        steps = [parse_commit_key(meta.key)[0] for meta in store.list("commits")]
        return max(steps, default=-1)
