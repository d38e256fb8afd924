"""Sizes beyond those of the daily tests: logs of gigabytes, folders of ten thousand logs, a hundred
thousand objects, a million steps.

Each part is a process of its own, whose processor time and peak memory are measured. Limits are twice
what was measured on two busy cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = """
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.report import build_report
from tests.support.timelines import GangLog, plan_event
log = GangLog(1, 10.0, [[0]])
log.phase("startup", 5.0)
log.steps(1, 1_000_000, loss=6.0, useful_step=1.5, data_wait=0.5)
log.ended("completed", 14.0)
print(len(render(build_report([plan_event(t=2.0), *log.events]))))
"""
LIST = """
import sys
from ebbflow.core.store import Store
print(sum(1 for _ in Store.open(sys.argv[1]).list("jobs")))
"""
FULL = "[rank3]: OSError: [Errno 28] No space left on device: '/scratch/model.pt'\n"
MIB = 1024.0  # KiB, in which Linux counts peak memory


def write_log(path: Path, size: int) -> None:
    """Write a log of about `size` bytes whose last line tells of a full disk."""
    step = 0
    with path.open("w") as log:
        while log.tell() < size:
            lines = []
            for _ in range(20_000):
                step += 1
                loss = 2 + step * 7919 % 1000 / 1000
                lines.append(
                    f"[rank{step % 8}] step {step} loss {loss:.4f} tokens/s {9000 + step % 999}"
                )
            log.write("\n".join(lines) + "\n")
        log.write(FULL)


def measure(*words: str) -> tuple[str, float, float]:
    """Run python, and return its output, its processor seconds and its peak memory in MiB."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return output, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / MIB


def diagnose(path: Path) -> tuple[str, float, float]:
    return measure("-m", "ebbflow", "diagnose", str(path))


@pytest.mark.parametrize(("size", "seconds"), [(10**8, 12), (5 * 10**9, 500)])
def test_a_large_log_is_diagnosed_in_bounded_memory(
    tmp_path: Path, size: int, seconds: float
) -> None:
    write_log(tmp_path / "train.log", size)
    output, used, peak = diagnose(tmp_path / "train.log")
    print(f"{size:,} bytes: {used:.1f} s, {peak:.0f} MiB")
    assert "H10" in output.splitlines()[0]
    assert used < seconds and peak < 200


def test_ten_thousand_logs_are_diagnosed_in_bounded_memory(tmp_path: Path) -> None:
    for rank in range(10_000):
        lines = [f"[rank{rank}] step {step} loss {2 - step / 100:.3f}\n" for step in range(60)]
        (tmp_path / f"rank_{rank}.log").write_text("".join(lines) + (FULL if rank == 777 else ""))
    output, used, peak = diagnose(tmp_path)
    print(f"10,000 files: {used:.1f} s, {peak:.0f} MiB")
    assert "H10" in output.splitlines()[0] and "rank_777" in output
    assert used < 70 and peak < 200


def test_a_hundred_thousand_objects_are_listed(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    for number in range(100_000):
        (tmp_path / "jobs" / str(number)).touch()
    output, used, peak = measure("-c", LIST, str(tmp_path))
    print(f"100,000 objects: {used:.1f} s, {peak:.0f} MiB")
    assert output.split() == ["100000"]
    assert used < 10 and peak < 200


def test_a_million_steps_have_a_page() -> None:
    output, used, peak = measure("-c", REPORT)
    print(f"1,000,000 steps: {used:.1f} s, {peak:.0f} MiB")
    assert int(output) < 200_000
    assert used < 150 and peak < 4000
