"""Running the real flow on the local Batch, with a bucket of its own as its store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.batch.fixture import LocalBatch, local_batch
from tests.support.flow import FlowRun, FlowRunner, wait_until
from tests.support.swift import Swift

LIGHT = "light-m5"
SPOT = "spot-g5"
ON_DEMAND = "on-demand-g5"
PREFIX = "jobs-of-a-test"
_PATIENCE_SECONDS = 900.0  # on a machine with other work
_TYPES = ["g5.xlarge"]
_QUEUES: dict[str, dict[str, Any]] = {
    LIGHT: {"instance_types": ["m5.large"]},
    SPOT: {"market": "spot", "instance_types": _TYPES},
    ON_DEMAND: {"instance_types": _TYPES},
}
# One node of one rank, whose kind of machine there is on both markets.
_SETTINGS = {
    "cluster__backend": "batch",
    "cluster__nodes": 1,
    # The types of the queues have GPUs, and the containers of a local Batch have none
    "cluster__device": "cpu",
    "cluster__instance_types": json.dumps(_TYPES),
    "batch__light_queue": LIGHT,
    "batch__queues": json.dumps(
        [
            {"name": SPOT, "market": "spot", "instance_types": _TYPES},
            {
                "name": ON_DEMAND,
                "market": "on_demand",
                "instance_types": _TYPES,
                "multi_node": True,
            },
        ]
    ),
    "cost__budget_usd": 5,
    "cost__deadline_hours": 2,
    "checkpoint__stop_seconds": 5,
    "survival__notice_margin_seconds": 1,
}


class BatchRunner(FlowRunner):
    """Runs flows whose training steps go to a local Batch; of one runner at a time, since it looks
    at all its jobs.
    """

    def __init__(self, folder: Path, swift: Swift, batch: LocalBatch) -> None:
        self.swift = swift
        self.batch = batch
        self.bucket = swift.new_bucket()
        environment = batch.environment(self.bucket, swift.environment())
        super().__init__(folder, store=f"s3://{self.bucket}/{PREFIX}", environment=environment)

    def options(self, **settings: object) -> list[str]:
        return super().options(**{**_SETTINGS, **settings})

    def keys(self, below: str) -> list[str]:
        """What lies in the bucket, seen with a client of another make than ours."""
        pages = (
            self.swift.client()
            .get_paginator("list_objects_v2")
            .paginate(Bucket=self.bucket, Prefix=below)
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def content(self, key: str) -> bytes:
        return self.swift.client().get_object(Bucket=self.bucket, Key=key)["Body"].read()

    def events(self) -> list[dict[str, Any]]:
        """All events of all jobs in the bucket now."""
        found = []
        for key in self.keys(f"{PREFIX}/jobs/"):
            if "/events/" in key:
                found += [
                    json.loads(line)
                    for line in self.content(key).splitlines()
                    if line.startswith(b'{"name"') and line.endswith(b"}")
                ]
        return sorted(found, key=lambda event: event["t_wall"])

    def training_jobs(self, *, before: int = 0) -> list[dict[str, Any]]:
        """Batch's jobs of the training steps, oldest first, without the first `before`."""
        return [job for job in self.batch.jobs()[before:] if "-train" in job["jobName"]]

    def await_commit(self) -> None:
        self.await_so(
            "a commit", lambda: [key for key in self.keys(f"{PREFIX}/jobs/") if "/commits/" in key]
        )

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        self._process = super().start(*words, cwd=cwd)
        return self._process

    def finish(self, process: subprocess.Popen[str], timeout: float = 200) -> FlowRun:
        """With the newest report that this machine got: no step need have run here."""
        run = super().finish(process, timeout)
        newest = max(
            self.runs.glob("*/report.json"), key=lambda path: path.stat().st_mtime, default=None
        )
        if newest is None:
            return run
        return replace(run, report=json.loads(newest.read_text()), folder=newest.parent.resolve())

    def await_so(self, what: str, happened: Callable[[], Any]) -> Any:
        """The first true answer.

        The flow that was started ends when it does not come, and need not live on for it.
        """

        def look() -> Any:
            return happened() or (self._process.poll() is not None and "ended")

        try:
            answer = wait_until(what, look, timeout=_PATIENCE_SECONDS, pause=1.0)
        except AssertionError as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            raise AssertionError(f"{error}:\n{self.log.read_text()}") from None
        assert answer != "ended", f"the flow ended before {what}:\n{self.log.read_text()}"
        return answer


@contextlib.contextmanager
def account(
    folder: Path, swift: Swift, *, image: Mapping[str, str] | None = None, **settings: Any
) -> Iterator[LocalBatch]:
    """A local Batch with a queue for light steps, one of Spot and one on demand; its containers
    reach the store.

    A notice comes 10 s before the instance goes. image: variables that every container finds set
    beside the usual ones.
    """
    role = {
        name: value
        for name, value in swift.environment().items()
        if name != "AWS_EC2_METADATA_DISABLED"
    }
    role |= image or {}
    usual = {"queues": _QUEUES, "role_environment": role, "time_scale": 12.0}
    with local_batch(folder, **{**usual, **settings}) as running:
        yield running
