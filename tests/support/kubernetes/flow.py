"""Running the real flow on the local cluster, with a bucket of its own as its store."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.batch.flow import PREFIX, BatchRunner
from tests.support.flow import FlowRunner
from tests.support.kubernetes.fixture import LocalCluster, local_cluster
from tests.support.swift import Swift

IMAGE = "ebbflow:local"
_TYPES = ["g5.xlarge"]
# Two nodes of one rank, whose kind of machine there is on both markets.
_SETTINGS = {
    "cluster__plan_for": "kubernetes",
    "cluster__nodes": 2,
    "cluster__processes_per_node": 1,
    "cluster__device": "cpu",  # the nodes have no GPUs, whatever the labels say
    "cluster__instance_types": json.dumps(_TYPES),
    "batch__image": IMAGE,
    "cost__budget_usd": 5,
    "cost__deadline_hours": 2,
    "checkpoint__stop_seconds": 10,
    "survival__notice_margin_seconds": 1,
}


class KubernetesRunner(BatchRunner):
    """Runs flows whose steps go to a local cluster."""

    def __init__(self, folder: Path, swift: Swift, cluster: LocalCluster) -> None:
        self.swift = swift
        self.cluster = cluster
        self.bucket = swift.new_bucket()
        store = swift.environment()
        environment = {
            **store,
            "KUBECONFIG": str(cluster.kubeconfig()),
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{self.bucket}/metaflow",
            "METAFLOW_S3_ENDPOINT_URL": store["AWS_ENDPOINT_URL_S3"],
            "METAFLOW_S3_WORKER_COUNT": "4",
            "METAFLOW_KUBERNETES_NAMESPACE": "ebbflow",
            "METAFLOW_KUBERNETES_SERVICE_ACCOUNT": "ebbflow-job",
            "METAFLOW_KUBERNETES_CONTAINER_IMAGE": IMAGE,
            "METAFLOW_USER": "tester",
        }
        FlowRunner.__init__(
            self, folder, store=f"s3://{self.bucket}/{PREFIX}", environment=environment
        )

    def options(self, **settings: object) -> list[str]:
        return FlowRunner.options(self, **{**_SETTINGS, **settings})


@contextlib.contextmanager
def cluster(
    folder: Path, swift: Swift, *, image: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[LocalCluster]:
    """A cluster whose pods reach the store. image: variables that every container finds set beside
    the usual ones.
    """
    role = {
        name: value
        for name, value in swift.environment().items()
        if name != "AWS_EC2_METADATA_DISABLED"
    }
    with local_cluster(folder, **{"environment": {**role, **(image or {})}, **settings}) as running:
        yield running
