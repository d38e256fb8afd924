"""The process that measures one line: `python -m benchmarks.gpu.measure TASK.json LINE OUT.json`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu import device, jobs, speed
from benchmarks.gpu.bench import SIZES, Bench, Row
from ebbflow.core.process import die_with_parent


def main(task_path: str, line: str, out: str) -> None:
    """Measure a line and write its rows; "describe" writes the facts of the devices."""
    task = json.loads(Path(task_path).read_text())
    die_with_parent(task["parent_pid"])
    if line == "describe":
        Path(out).write_text(json.dumps(device.describe_device()))
        return
    bench = Bench(
        size=SIZES[task["size"]],
        folder=Path(task["folder"]),
        prepared=task["prepared"],
        device=task["device"],
    )
    rows = _measure(bench, line)
    Path(out).write_text(json.dumps([row.to_json() for row in rows]))


def _measure(bench: Bench, line: str) -> list[Row]:
    measures: dict[str, Callable[[Bench], list[Row]]] = {
        "matmul": device.measure_matmul,
        "copies": device.measure_copies,
        "ratio": speed.measure_ratio,
        "waits": speed.measure_waits,
        "save": speed.measure_save,
        "hang": jobs.measure_hang,
        "memory": jobs.measure_out_of_memory,
        "collectives": jobs.measure_collectives,
        "collective-rank": device.measure_collective_rank,
    }
    if line in measures:
        return measures[line](bench)
    if line == "resume":
        return jobs.measure_resume(bench, "auto")
    if line == "strict":
        return jobs.measure_resume(bench, "strict")
    model, variant = line.rsplit("-", 1)
    return speed.measure_speed(bench, model, variant)


if __name__ == "__main__":
    main(*sys.argv[1:])
