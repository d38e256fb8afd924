"""A job in a bucket whose processes are all killed at once, and `resume`: test_flow_s3.py has its
other ends.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.flow.test_flow_s3 import Bucket, assert_same_result, quiet
from tests.support.flow import assert_killed_run_is_billed, processes_with, wait_until
from tests.support.swift import Swift

__all__ = ["quiet"]


def test_everything_killed_then_resumed(
    quiet: dict[str, Any], tmp_path: Path, swift: Swift
) -> None:
    runner = Bucket(tmp_path, swift)
    process = runner.start("run", *runner.options())
    runner.await_commit()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_until(
        "the end of all its processes", lambda: not processes_with(str(tmp_path)), timeout=10
    )
    run = runner.run("resume")
    assert run.exit_code == 0, run.output
    assert_same_result(run, quiet)
    assert_killed_run_is_billed(run.report)
