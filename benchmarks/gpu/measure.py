"""The process that measures lines: `python -m benchmarks.gpu.measure TASK.json`.

It appends each result to a file.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.bench import SIZES, Bench, Row, Size
from ebbflow.core.process import die_with_parent

Line = Callable[[Bench], list[Row]]


def _line(module: str, name: str, *arguments: object) -> Line:
    """Return a function of a module that is imported when the line is measured: some import torch."""
    return lambda bench: getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)(
        bench, *arguments
    )


def lines_of(size: Size) -> dict[str, Line]:
    """Return the lines by name, in the order of the table."""
    found = {
        "matmul": _line("device", "measure_matmul"),
        "copies": _line("device", "measure_copies"),
    }
    for model in size.models:
        for variant in ("eager", "compiled", "recomputed"):
            found[f"{model}-{variant}"] = _line("speed", "measure_speed", model, variant)
    others = {
        "ratio": _line("speed", "measure_ratio"),
        "waits": _line("speed", "measure_waits"),
        "save": _line("speed", "measure_save"),
        "resume": _line("jobs", "measure_resume", "auto"),
        "strict": _line("jobs", "measure_resume", "strict"),
        "hang": _line("jobs", "measure_hang"),
        "memory": _line("jobs", "measure_out_of_memory"),
        "collectives": _line("jobs", "measure_collectives"),
    }
    return found | others


# They start processes of their own
JOB_LINES = ("resume", "strict", "hang", "memory", "collectives")


def main(path: str, out: str = "") -> None:
    task = json.loads(Path(path).read_text())
    out = out or task["out"]
    die_with_parent(task["parent_pid"])
    if task["lines"] == ["describe"]:
        from benchmarks.gpu.device import describe_device

        _record(out, {"device": describe_device()})
        return
    bench = Bench(
        size=SIZES[task["size"]],
        folder=Path(task["folder"]),
        prepared=task["prepared"],
        device=task["device"],
    )
    lines = lines_of(bench.size) | {"collective-rank": _line("device", "measure_collective_rank")}
    for name in task["lines"]:
        began = time.monotonic()
        try:
            rows = [row.to_json() for row in lines[name](bench)]
            _record(out, {"line": name, "rows": rows, "seconds": time.monotonic() - began})
        except Exception as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            _record(out, {"line": name, "error": f"{type(error).__name__}: {text}"})


def _record(path: str, found: dict) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
