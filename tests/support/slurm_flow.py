"""Running the flow with `--with slurm` on a cluster of this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ebbflow.core.layout import job_prefix, parse_commit_key
from ebbflow.core.store import Store
from tests.support.flow import FlowRunner, train_alone
from tests.support.slurm_cluster import SlurmCluster

PARTITIONS = [{"name": "spot", "preemptible": True}, {"name": "safe"}]
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
        own = self.options(
            model__hidden_size=32,
            model__num_layers=1,
            model__sequence_length=32,
            training__max_steps=steps,
            checkpoint__stop_seconds=stop_seconds,
            checkpoint__interval_steps=20,
        )
        slurm = ["--set", f"slurm.partitions={named}"]
        return ["run", "--with", "slurm", "--job", job, *own, *slurm, *words]

    def await_commit(self, job: str, after: int = -1) -> int:
        """Wait until the job has a commit of a later step than `after`; return its step."""
        store = Store.open(self.store).sub(job_prefix(job))

        def newest() -> int:
            steps = [parse_commit_key(meta.key)[0] for meta in store.list("commits")]
            return 1 + max(steps) if max(steps, default=-1) > after else 0

        return self.cluster.wait_until(f"a commit after step {after}", newest, 120) - 1

    def slurm_events(self) -> list[dict[str, Any]]:
        return [event["data"] for event in self.events() if event["name"] == "slurm_job"]

    def causes(self) -> list[str]:
        """Return why the Slurm jobs ended, in order."""
        return [event["cause"] for event in self.slurm_events() if event["does"] == "ended"]
