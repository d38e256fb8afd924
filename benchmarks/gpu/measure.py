"""The process that measures lines: `python -m benchmarks.gpu.measure TASK.json`. It appends each result to a file."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.bench import SIZES, Bench, Row
from ebbflow.infra.process import die_with_parent


def _device(name: str) -> Callable[[Bench], list[Row]]:
    def measure(bench: Bench) -> list[Row]:
        from benchmarks.gpu import device  # imports torch

        return getattr(device, name)(bench)

    return measure


def _jobs(name: str, *arguments: object) -> Callable[[Bench], list[Row]]:
    def measure(bench: Bench) -> list[Row]:
        from benchmarks.gpu import jobs

        return getattr(jobs, name)(bench, *arguments)

    return measure


# Lines by name, in the order of the table. Each is measured even if others fail.
DEVICE_LINES = {"matmul": _device("measure_matmul"), "copies": _device("measure_copies")}
JOB_LINES = {"resume": _jobs("measure_resume", "auto")}
LINES = DEVICE_LINES | JOB_LINES


def main(path: str) -> None:
    task = json.loads(Path(path).read_text())
    die_with_parent(task["parent_pid"])
    if task["lines"] == ["describe"]:
        from benchmarks.gpu.device import describe_device

        _record(task["out"], {"device": describe_device(task["kind"])})
        return
    bench = Bench(
        size=SIZES[task["size"]], folder=Path(task["folder"]), prepared=task["prepared"], device=task["device"]
    )
    for name in task["lines"]:
        try:
            rows = [row.to_json() for row in LINES[name](bench)]
            _record(task["out"], {"line": name, "rows": rows})
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            _record(task["out"], {"line": name, "error": f"{type(error).__name__}: {text}"})


def _record(path: str, found: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
