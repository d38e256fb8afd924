"""`ebbflow bench input`: the time that a job waits for data if a batch takes as long to read as a
step takes.

A job of its own process trains a small model. Its step waits for a device (a sleep), and its
dataset waits for storage or, with --decode, computes. Without workers such a job would wait half of
its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.training.tables import machine_line, table
from ebbflow.core.events import STEP, Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.workloads.readers.datasets import DatasetWorkload

_BATCH = 8
# Steps that are not counted: the rank reads the first itself, and workers start with the second
_WARM_UP = 5
_JOB = "input"


class BalancedJob(DatasetWorkload):
    """A model whose step and whose batch both take `workload_options.step_milliseconds`."""

    def dataset(self, train: bool) -> Any:
        options = self.context.options
        milliseconds = float(options["step_milliseconds"]) / _BATCH
        if train:
            return _Samples(milliseconds, decode=bool(options["decode"]))
        return None

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))

    def loss_sum(self, model: nn.Module, samples: Tensor) -> Tensor:
        if samples.device.type != "meta":
            time.sleep(float(self.context.options["step_milliseconds"]) / 1e3)
        return model(samples.mean(dim=(2, 3))).square().sum()


def main(arguments: list[str]) -> int:
    """Returns 1 if a job ended badly, or waited for more than --at-most of its time with workers."""
    parser = argparse.ArgumentParser(
        prog="ebbflow bench input", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--steps", type=int, default=300, help="steps that are counted (300)")
    parser.add_argument(
        "--step-milliseconds", type=float, default=100.0, help="of a step, and of a batch (100)"
    )
    parser.add_argument(
        "--workers", default="0,1,2", metavar="LIST", help="numbers of worker processes (0,1,2)"
    )
    parser.add_argument(
        "--decode", action="store_true", help="reading computes; else it waits, as for storage"
    )
    parser.add_argument(
        "--at-most",
        type=float,
        metavar="SHARE",
        help="fail above this share of the time, such as 0.01",
    )
    given = parser.parse_args(arguments)
    print(machine_line(describe_machine()), flush=True)
    rows = []
    worst = 0.0
    for workers in map(int, given.workers.split(",")):
        with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder:
            found = _measure(Path(folder), workers, given)
        worst = max(worst, found["share"] if workers >= 2 else 0.0)
        rows.append(
            [
                f"{workers}",
                f"{found['share']:.2%}",
                *(f"{found[name]:.1f}" for name in ("median", "most", "step")),
            ]
        )
    heads = ["workers", "data wait", "median ms", "longest ms", "ms/step"]
    kind = "processor time" if given.decode else "a wait"
    print(
        f"{given.steps} steps of {given.step_milliseconds:g} ms, and as much for reading a batch "
        f"({kind})\n"
    )
    print(table(heads, rows, text_columns=1))
    return int(given.at_most is not None and worst > given.at_most)


class _Samples:
    """Samples that each take `milliseconds` to read."""

    def __init__(self, milliseconds: float, *, decode: bool) -> None:
        self._seconds = milliseconds / 1e3
        self._decode = decode

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        if not self._decode:
            time.sleep(self._seconds)
            return torch.rand(3, 64, 64)
        # Processor time, so that other work does not shorten it
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            torch.rand(3, 64, 64)
        return torch.rand(3, 64, 64)


def _measure(folder: Path, workers: int, given: argparse.Namespace) -> dict[str, float]:
    """Return the share of the time that the job waited for data, and milliseconds of a step and of
    the longest wait.
    """
    steps = _WARM_UP + given.steps
    options = {
        "workers": workers,
        "step_milliseconds": given.step_milliseconds,
        "decode": given.decode,
    }
    config = {
        "workload": f"{__name__}:BalancedJob",
        "workload_options": options,
        "store": str(folder / "store"),
        "training": {"batch_size": _BATCH, "max_steps": steps, "evaluation_interval_steps": steps},
        "checkpoint": {"interval_steps": steps},
    }
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is a part of YAML
    command = [sys.executable, "-m", "ebbflow.training", str(folder / "config.yaml"), "--job", _JOB]
    subprocess.run(command, cwd=PROJECT_ROOT, check=True, stdout=subprocess.DEVNULL)
    events = read_events(Store.open(str(folder / "store")).sub(job_prefix(_JOB)))
    taken = [
        _seconds(event) for event in events if event.name == STEP and (event.step or 0) > _WARM_UP
    ]
    waits = [wait for wait, _ in taken]
    wholes = [whole for _, whole in taken]
    return {
        "share": sum(waits) / sum(wholes),
        "median": 1e3 * statistics.median(waits),
        "step": 1e3 * statistics.fmean(wholes),
        "most": 1e3 * max(waits),
    }


def _seconds(event: Event) -> tuple[float, float]:
    """Return the seconds of a step that it waited for data, and all of its seconds."""
    seconds = event.data["seconds"]
    return seconds.get("data_wait", 0.0), sum(seconds.values())
