"""A real S3 store for the tests:

OpenStack Swift, started once per session in a folder of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.swift_server import ACCESS_KEY, SECRET_KEY

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 60.0  # measured: half a second on an idle machine


@dataclass(frozen=True)
class Swift:
    """A running server and what a client needs to know of it."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = "us-east-1"

    def environment(
        self, *, secret_key: str | None = None, access_key: str | None = None
    ) -> dict[str, str]:
        """The variables through which everything, ours and others', finds this store."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": access_key or self.access_key,
            "AWS_SECRET_ACCESS_KEY": secret_key or self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @functools.cache  # noqa: B019 - one server for all tests
    def client(self) -> Any:
        """boto3's client: what it sees is not seen through our own code.

        To make one takes a tenth of a second.
        """
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
        )

    def new_bucket(self) -> str:
        """The name of a new, empty bucket."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def limit(self, bucket: str, quota_bytes: int) -> None:
        """Let the store refuse what would make `bucket` larger, through Swift's own interface."""
        login = {"X-Storage-User": self.access_key, "X-Storage-Pass": self.secret_key}
        answer = self._ask("GET", f"{self.endpoint}/auth/v1.0", login)
        headers = {
            "X-Auth-Token": answer["X-Auth-Token"],
            "X-Container-Meta-Quota-Bytes": str(quota_bytes),
        }
        self._ask("POST", f"{answer['X-Storage-Url']}/{bucket}", headers)

    def _ask(self, method: str, url: str, headers: dict[str, str]) -> Any:
        request = urllib.request.Request(url, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.headers


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    """Skips where Swift is not installed or its folder cannot keep extended attributes."""
    if importlib.util.find_spec("swift") is None:
        pytest.skip("OpenStack Swift is not installed: pip install -r requirements-dev.txt")
    folder = tmp_path_factory.mktemp("swift")
    if not _keeps_attributes(folder):
        pytest.skip(
            f"the file system of {folder} keeps no user extended attributes, which Swift needs"
        )
    with open(folder / "server.log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.swift_server", str(folder), str(os.getpid())],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        yield Swift(_endpoint(process, folder / "server.log"))
    finally:
        process.kill()
        process.wait()


def _endpoint(process: subprocess.Popen[str], log: Path) -> str:
    """Where the server listens, once it answers."""
    limit = time.monotonic() + _START_SECONDS
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
    if ready:
        line = process.stdout.readline()
    else:
        line = ""
    if not line:
        raise RuntimeError(
            f"Swift did not start within {_START_SECONDS:g} s (exit "
            f"{process.poll()}):\n{log.read_text()}"
        )
    endpoint = json.loads(line)["endpoint"]
    while process.poll() is None and time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"{endpoint}/healthcheck", timeout=5):
                return endpoint
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(
        f"Swift does not answer on {endpoint} (exit {process.poll()}):\n{log.read_text()}"
    )


def _keeps_attributes(folder: Path) -> bool:
    probe = folder / "attribute"
    probe.touch()
    try:
        os.setxattr(probe, "user.ebbflow", b"1")
    except OSError:
        return False
    return True
