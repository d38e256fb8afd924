"""The local Batch as a test sees it: a process of its own, boto3's client, and the door that
changes it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.local_service import ask_service, run_service

_KEYS = {"AWS_ACCESS_KEY_ID": "local", "AWS_SECRET_ACCESS_KEY": "local"}


@dataclass(frozen=True)
class LocalBatch:
    """A running local Batch. folder: where its containers are."""

    endpoint: str
    folder: Path
    region: str = "us-east-1"

    def environment(
        self, bucket: str, store: Mapping[str, str], *, prefix: str = "metaflow"
    ) -> dict[str, str]:
        """What whoever starts a flow sets. store: the variables of the store's client, as
        `Swift.environment` gives.
        """
        return {
            **store,
            "AWS_ENDPOINT_URL_BATCH": self.endpoint,
            "METAFLOW_DEFAULT_DATASTORE": "s3",
            "METAFLOW_DATASTORE_SYSROOT_S3": f"s3://{bucket}/{prefix}",
            "METAFLOW_S3_ENDPOINT_URL": store["AWS_ENDPOINT_URL_S3"],
            "METAFLOW_S3_WORKER_COUNT": "4",  # of 64 processes for each handful of objects
            "METAFLOW_BATCH_CONTAINER_IMAGE": "ebbflow:local",
            "METAFLOW_ECS_S3_ACCESS_IAM_ROLE": "arn:aws:iam::000000000000:role/job",
            "METAFLOW_USER": "tester",
        }

    def client(self, **changes: Any) -> Any:
        import boto3

        keys = {name.lower(): value for name, value in _KEYS.items()}
        return boto3.client(
            "batch", endpoint_url=self.endpoint, region_name=self.region, **{**keys, **changes}
        )

    def change(self, **settings: Any) -> None:
        """Settings from now on, as `Settings` names them; queues by name."""
        self._ask("settings", settings)

    def begin_traces(self) -> None:
        self._ask("trace", {})

    def reclaim(self, job: str, *, node: int = 0, notice: bool = True) -> None:
        """job: its id or its name."""
        self._ask("reclaim", {"job": job, "node": node, "notice": notice})

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs in the order of their submission, as DescribeJobs tells them, with `request` as
        it came.
        """
        return self._ask("jobs", {})["jobs"]

    def told(self) -> dict[str, dict[str, int]]:
        """Requests and faults so far."""
        return self._ask("told", {})

    def output(self, job: str, *, attempt: int = 1, node: int = 0) -> str:
        """What a container wrote, as CloudWatch would keep it."""
        return (self.folder / job / f"{attempt}-{node}" / "output.log").read_text(errors="replace")

    def _ask(self, path: str, document: dict[str, Any]) -> dict[str, Any]:
        return ask_service(self.endpoint, path, document)


@contextlib.contextmanager
def local_batch(folder: Path, **settings: Any) -> Iterator[LocalBatch]:
    """Run one until the end of the block; its containers end with it."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "server.log"
    with run_service("tests.support.batch", folder, log, settings) as endpoint:
        yield LocalBatch(endpoint, folder)


def job_when(
    batch: LocalBatch, name: str, status: str, *, deadline_seconds: float = 200
) -> dict[str, Any]:
    """The newest job whose name contains `name`, once it has the status or has ended."""
    limit = time.monotonic() + deadline_seconds
    while time.monotonic() < limit:
        found = [job for job in batch.jobs() if name in job["jobName"]]
        if found and found[-1]["status"] in (status, "SUCCEEDED", "FAILED"):
            return found[-1]
        time.sleep(0.1)
    raise AssertionError(
        f"no job {name} was {status} within {deadline_seconds:g} s: {batch.jobs()}"
    )
