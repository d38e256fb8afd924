"""A rank whose process closes its descriptors is replaced; one that may write no files trains on
and says so.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.guard_jobs import Job


def hostile_job(folder: Path, deed: str) -> Job:
    options = {"deed": deed, "once": str(folder / "once")}
    return Job.make(
        folder / "job", steps=16, workload="tests.support.hostile_rank:Hostile", options=options
    )


def test_a_rank_that_closes_its_descriptors_is_replaced(tmp_path: Path) -> None:
    job = hostile_job(tmp_path, "close")
    outcome = job.run()
    assert (outcome.outcome, outcome.step, outcome.generation) == ("completed", 16, 2)
    [fault] = job.events("fault_detected")
    assert fault.data["culprit"].startswith("rank 1: "), fault.data


def test_a_rank_that_may_write_no_files_trains_on_with_one_warning(tmp_path: Path) -> None:
    outcome = hostile_job(tmp_path, "limit").run()
    assert (outcome.outcome, outcome.step, outcome.generation) == ("completed", 16, 1)
    [log] = (tmp_path / "job" / "logs").glob("*/rank-1.log")
    assert "File too large" in log.read_text() and "Traceback" not in log.read_text()
