"""Running the flow with `--with slurm` on a cluster of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebbflow.core.layout import job_prefix
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

    def await_commits(self, job: str, more_than: int = 0) -> int:
        """Wait until the job has more commits than that; return their number."""
        store = Store.open(self.store).sub(job_prefix(job))

        def count() -> int:
            commits = len(store.list("commits"))
            return commits if commits > more_than else 0

        return self.cluster.wait_until(f"{more_than + 1} commits", count, 120)

    def slurm_events(self) -> list[dict[str, Any]]:
        return [event["data"] for event in self.events() if event["name"] == "slurm_job"]

    def causes(self) -> list[str]:
        """Return why the Slurm jobs ended, in order."""
        return [event["cause"] for event in self.slurm_events() if event["does"] == "ended"]
