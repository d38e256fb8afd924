"""The failing server as a fixture, with the same face as the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class FailingServer:
    """A running server and what a client needs to know of it."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    def client(self, **changes: Any) -> S3Client:
        import boto3
        from botocore.config import Config

        settings = {
            "endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "region_name": self.region,
            "config": Config(
                retries={"total_max_attempts": 1},
                read_timeout=5,
                response_checksum_validation="when_required",
            ),
        }
        return boto3.client("s3", **{**settings, **changes})

    @property
    def environment(self) -> dict[str, str]:
        """The variables that make it the S3 of a process."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make it the S3 of this process and its children, by environment variables."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)

    def new_bucket(self, **conduct: Any) -> str:
        """The name of a new, empty bucket that behaves so."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.behave(name, **conduct)
        return name

    def behave(self, bucket: str, **conduct: Any) -> None:
        self._ask("POST", bucket, conduct)

    def told(self, bucket: str) -> dict[str, Any]:
        return self._ask("GET", bucket)

    def forget(self, bucket: str) -> None:
        self._ask("DELETE", bucket)

    def hold(self, bucket: str, **which: Any) -> int:
        """Hold the next request that fits, and return the number of the hold."""
        return self._ask("POST", f"{bucket}/hold", which)["hold"]

    def held(self, bucket: str, hold: int) -> bool:
        return self._ask("GET", f"{bucket}/hold/{hold}")["held"]

    def release(self, bucket: str, hold: int) -> None:
        self._ask("DELETE", f"{bucket}/hold/{hold}")

    def _ask(
        self, method: str, path: str, document: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if document is None:
            body = None
        else:
            body = json.dumps(document).encode()
        request = urllib.request.Request(
            f"{self.endpoint}/_control/{path}", data=body, method=method
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def run_failing_s3() -> Iterator[FailingServer]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3", "--parent", str(os.getpid())],
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield FailingServer(**json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def failing_s3() -> Iterator[FailingServer]:
    """Started once; each test has buckets of its own, and so faults of its own."""
    with run_failing_s3() as server:
        yield server
