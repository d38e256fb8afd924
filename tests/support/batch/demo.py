"""`make batch-demo`: a whole run "in the cloud" on this machine, a Spot machine taken away in the
middle of it.

Starts an S3 server and a local AWS Batch, runs the flow with every step in a container of its own,
gives notice of a reclaim after the first commit, and ends everything. Nothing of it is AWS: it
shows how the flow behaves there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tests.support.batch.fixture import LocalBatch
from tests.support.batch.flow import BatchRunner, account
from tests.support.batch.prepared import paced_settings, with_paced
from tests.support.flow import ROOT
from tests.support.swift import Swift

_RUNS = ROOT / "runs" / "batch-demo"
_DEADLINE_SECONDS = 900.0
_LOOK_SECONDS = 0.5
_STEP_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="make batch-demo", description="A run on a local AWS Batch."
    )
    parser.add_argument(
        "--with", default="batch", dest="backend", help="batch: every step; cloud: training only"
    )
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="ebbflow-batch-demo-"))
    try:
        image = with_paced(folder)
        with (
            _store() as store,
            account(folder / "batch", store, image=image, time_scale=6.0) as batch,
        ):
            runner = BatchRunner(folder / "launcher", store, batch)
            runner.environment |= {**image, "EBBFLOW_RUNS": str(_RUNS)}
            _say(
                f"S3 at {store.endpoint}, AWS Batch at {batch.endpoint}; Spot notices come 20 s "
                "before the end"
            )
            _say(
                f"each training step sleeps {_STEP_SECONDS:g} s, so that there is time to take "
                "its machine away"
            )
            settings = {
                **paced_settings(_STEP_SECONDS),
                "training__max_steps": 120,
                "checkpoint__interval_steps": 20,
            }
            options = runner.options(**settings)
            process = runner.start("run", "--with", given.backend, *options)
            try:
                code = _follow(runner, process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            _tell(batch)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _follow(runner: BatchRunner, process: subprocess.Popen[str]) -> int:
    """Print what the run prints, and take its machine away once there is a commit.

    The exit code.
    """
    limit = time.monotonic() + _DEADLINE_SECONDS
    taken = False
    with open(runner.log) as output:
        while process.poll() is None and time.monotonic() < limit:
            _print_new(output)
            if not taken and any("/commits/" in key for key in runner.keys("")):
                taken = _take_machine(runner)
            time.sleep(_LOOK_SECONDS)
        _print_new(output)
    if not taken:
        _say("no machine was taken away: there was no commit while one trained")
    if process.poll() is None:
        _say(f"not done within {_DEADLINE_SECONDS:g} s: ended")
        return 1
    return process.returncode


def _take_machine(runner: BatchRunner) -> bool:
    """Whether there was one that trains."""
    running = [job for job in runner.training_jobs() if job["status"] == "RUNNING"]
    for job in running[-1:]:
        _say(f"EC2 wants the Spot instance of {job['jobName']} back: notice given")
        runner.batch.reclaim(job["jobId"])
    return bool(running)


def _print_new(output: TextIO) -> None:
    for line in output:
        sys.stdout.write(line)
    sys.stdout.flush()


def _tell(batch: LocalBatch) -> None:
    _say("what AWS Batch has run:")
    for job in batch.jobs():
        queue = job["jobQueue"].rpartition("/")[2]
        stopped = job.get("stoppedAt", 1000 * time.time())
        seconds = (stopped - job.get("startedAt", stopped)) / 1000
        name = job["jobName"].split("-", 3)[-1]
        print(
            f"    {name:<16} {queue:<14} {job['status']:<10} {seconds:6.1f} s  "
            f"{job.get('statusReason', '')}"
        )


@contextlib.contextmanager
def _store() -> Iterator[Swift]:
    """The small S3 server of the tests, which needs nothing installed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3", "--parent", str(os.getpid())],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield Swift(**json.loads(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()


def _say(text: str) -> None:
    print(f"── {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
