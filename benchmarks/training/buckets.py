"""Buckets to measure against: one that keeps nothing, a real one (Swift) where it is installed, or
the user's own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.program import PROJECT_ROOT
from ebbflow.training.errors import GangError

_START_SECONDS = 60.0
# Of the project's tests: a checkout has it, an installed package does not
_SWIFT = "tests.support.swift_server"


@dataclass(frozen=True)
class BucketPlace:
    """Where to write. environment: how clients find it and who they are."""

    name: str
    uri: str
    environment: dict[str, str]


@contextlib.contextmanager
def null_sink() -> Iterator[BucketPlace]:
    """Takes bytes and discards them: nothing is stored, so that the client alone is measured."""
    command = [sys.executable, "-m", "benchmarks.training.null_sink", str(os.getpid())]
    with _server(command, None) as line:
        yield BucketPlace(
            "null sink",
            "s3://null/bench",
            _environment(f"http://127.0.0.1:{line}", "key", "secret"),
        )


@contextlib.contextmanager
def strict_s3() -> Iterator[BucketPlace]:
    """Start the strict S3 server of the tests, which keeps objects in memory and checks signatures
    and checksums.
    """
    with _server(
        [sys.executable, "-m", "tests.support.s3", "--parent", str(os.getpid())], None
    ) as line:
        about = json.loads(line)
        environment = _environment(about["endpoint"], about["access_key"], about["secret_key"])
        _make_bucket(about["endpoint"], environment)
        yield BucketPlace("strict S3", "s3://bench/bench", environment)


@contextlib.contextmanager
def swift(folder: Path) -> Iterator[BucketPlace | str]:
    """OpenStack Swift, all of it in `folder`; why not, where it cannot be started."""
    if importlib.util.find_spec("swift") is None:
        yield "not measured: OpenStack Swift is not installed (requirements-dev.txt)"
        return
    if not (PROJECT_ROOT / "tests" / "support" / "swift_server.py").exists():
        yield "not measured: it is started by a part of the project's tests, which is not here"
        return
    root = folder / "swift"
    root.mkdir()
    command = [sys.executable, "-m", _SWIFT, str(root), str(os.getpid())]
    with _server(command, root / "server.log") as line:
        told = json.loads(line)
        endpoint = told["endpoint"]
        _await(f"{endpoint}/healthcheck")
        environment = _environment(endpoint, told["access_key"], told["secret_key"])
        _make_bucket(endpoint, environment)
        yield BucketPlace("Swift", "s3://bench/bench", environment)


def _environment(endpoint: str, key: str, secret: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def _server(command: list[str], log: Path | None) -> Iterator[str]:
    """Its first line. It is ended with the context, and by itself should this process die."""
    with open(log, "w") if log else contextlib.nullcontext() as errors:
        process = subprocess.Popen(
            command,
            cwd=PROJECT_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], _START_SECONDS)
        if ready:
            line = process.stdout.readline().strip()
        else:
            line = ""
        if not line:
            if log:
                said = f":\n{log.read_text()[-2000:]}"
            else:
                said = ""
            raise GangError(f"{command[2]} did not start within {_START_SECONDS:g} s{said}")
        yield line
    finally:
        process.kill()
        process.wait()


def _await(url: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.1)


def _make_bucket(endpoint: str, environment: dict[str, str]) -> None:
    from ebbflow.core.store.multipart.requests import S3Account, S3Client

    keys = environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
    account = S3Account(environment["AWS_REGION"], endpoint, *keys)
    S3Client("bench", lambda: account).send("PUT", "", seconds=30)
