"""The S3 server of the tests, started as a process, and its control address.

It comes with a checkout only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.errors import CheckpointError

_ANSWER_SECONDS = 30.0


class FailingS3:
    """One server process for many buckets. Ends with this process."""

    @classmethod
    def missing(cls) -> str:
        """Why there can be none here, "" where there can."""
        if (PROJECT_ROOT / "tests" / "support" / "s3").is_dir():
            return ""
        return (
            f"the S3 server of the tests is not in {PROJECT_ROOT / 'tests'}; fix: run this in a "
            "checkout"
        )

    def __init__(self) -> None:
        if reason := self.missing():
            raise CheckpointError(reason)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.s3", "--parent", str(os.getpid())],
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise CheckpointError(
                f"the S3 server of the tests ended with {self._process.wait()} before it served"
            )
        about = json.loads(line)
        self._endpoint = about["endpoint"]
        self.environment = {
            "AWS_ENDPOINT_URL": about["endpoint"],
            "AWS_ENDPOINT_URL_S3": about["endpoint"],
            "AWS_ACCESS_KEY_ID": about["access_key"],
            "AWS_SECRET_ACCESS_KEY": about["secret_key"],
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def behave(self, bucket: str, **settings: Any) -> None:
        """Change the conduct of a bucket, which is made when missing."""
        self._ask("POST", bucket, settings)

    def told(self, bucket: str) -> dict[str, Any]:
        """Faults that were met, requests by operation, refusals by code, rotten keys, unfinished
        uploads.
        """
        return self._ask("GET", bucket)

    def forget(self, bucket: str) -> None:
        self._ask("DELETE", bucket)

    def hold(self, bucket: str, **which: Any) -> int:
        """Hold the next request that fits; the number is for `held` and `release`."""
        return self._ask("POST", f"{bucket}/hold", which)["hold"]

    def held(self, bucket: str, hold: int) -> bool:
        return self._ask("GET", f"{bucket}/hold/{hold}")["held"]

    def release(self, bucket: str, hold: int) -> None:
        self._ask("DELETE", f"{bucket}/hold/{hold}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(
        self, method: str, path: str, document: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        if document is None:
            body = None
        else:
            body = json.dumps(document).encode()
        request = urllib.request.Request(
            f"{self._endpoint}/_control/{path}", data=body, method=method
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return json.loads(answer.read())
