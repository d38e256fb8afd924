"""An attempt that is submitted to the local cluster by a process of its own (`submitted`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.flow import ROOT, wait_until
from tests.support.kubernetes.fixture import LocalCluster

PLACEMENT = {
    "queue": "spot",
    "market": "spot",
    "instance_type": "g5.xlarge",
    "region": "us-east-1",
    "zone": "us-east-1a",
    "nodes": 2,
    "processes_per_node": 1,
    "cpu": 4,
    "gpu": 1,
    "memory_mib": 15000,
    "wall_seconds": 7200,
    "runnable_seconds": 60,
    "usd_per_hour": 0.4,
    "quoted_usd_per_hour": "0.4",
    "price_kind": "estimated",
    "expected_hours": 1.0,
    "expected_usd": 1.0,
    "reason": "",
}


class Submitted:
    def __init__(
        self, cluster: LocalCluster, folder: Path, nodes: int, command: str, **asked: Any
    ) -> None:
        self.cluster = cluster
        self.store = folder / "store"
        asked = {
            "job": "job",
            "run": "1",
            "step": "train",
            "task": "5",
            "attempt": 0,
            "store": str(self.store),
            "placement": PLACEMENT,
            **asked,
        }
        environment = {
            **os.environ,
            "KUBECONFIG": str(cluster.kubeconfig()),
            "METAFLOW_USER": "tester",
            "METAFLOW_KUBERNETES_JOB_TERMINATE_MODE": "delete",
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": "s3://bucket/metaflow",
        }
        words = ["-m", "tests.support.kubernetes.submitted", json.dumps(asked), str(nodes), command]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pods(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many pods of this attempt run, and return them, node 0's first."""

        def running() -> list[dict[str, Any]]:
            names = [f"{event['job_name']}-" for event in self.events("batch_submitted")]
            found = self.cluster.training_pods()
            return [
                pod
                for pod in found
                if any(pod["metadata"]["name"].startswith(name) for name in names)
            ]

        return wait_until("the pods", lambda: len(found := running()) == count and found, 180)

    def finish(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=90)
        assert self.cluster.told()["problems"] == []
        return self.process.returncode, output

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = []
        for path in sorted(self.store.rglob("*.jsonl")):
            for line in path.read_text().splitlines():
                if line.startswith('{"name"'):
                    lines.append(json.loads(line))
        return [entry["data"] for entry in lines if entry["name"] == name]
