"""`ebbflow bench gpu` on a CPU: that each of its lines measures what it says. No time is judged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu import main
from benchmarks.gpu.bench import EXPECTED, NO_RANGE, SIZES, Bench, judge
from benchmarks.gpu.device import published_peak
from benchmarks.gpu.loop_process import LoopProcess
from benchmarks.gpu.speed import busy_share, fitting_samples, mfu_range
from ebbflow.core.config.schema import RunConfig


def run_tiny(path: Path, *options: str) -> int:
    """Run the command on a CPU at its smallest size, with its figures in `path`."""
    return main(["--device", "cpu", "--tiny", "--json", str(path), *options])


@pytest.mark.long
def test_lines_of_the_command_hold_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two lines, each in a process of its own; soak_bench_gpu.py has all of them."""
    path = tmp_path / "figures.json"
    code = run_tiny(path, "--lines", "ratio,save", "--folder", str(tmp_path))
    assert code == 0, capsys.readouterr().err
    assert [left.name for left in tmp_path.iterdir()] == ["figures.json"]
    rows = json.loads(path.read_text())["rows"]
    assert {row["verdict"] for row in rows} <= {EXPECTED, NO_RANGE}
    figures = {row["line"]: row["figures"] for row in rows}
    losses = figures["ratio"]["losses"]
    assert losses["engine"] == pytest.approx(losses["bare"], rel=1e-4), "both take the same steps"
    assert figures["save"]["commits"] >= 6


def test_a_bare_loop_whose_process_ends_is_told(tmp_path: Path) -> None:
    """Its process finds no tokens."""
    config = RunConfig(store=str(tmp_path))
    loop = LoopProcess(config, torch.device("cpu"), "none", np.zeros(8, dtype=np.int64))
    assert loop.pid not in (None, os.getpid())
    with pytest.raises(RuntimeError, match="the bare loop's process ended with 1"):
        loop.run(1)
    loop.close()


def test_a_line_that_gives_nothing_does_not_end_the_others(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert run_tiny(path, "--lines", "matmul,copies", "--deadline", "0.01") == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(row["line"], row["verdict"], row["measured"]) for row in rows] == [
        (name, "ERROR", "no result within 0.01 s") for name in ("matmul", "copies")
    ]


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (1.0, None, None, NO_RANGE),
        (1.0, 2.0, None, "below"),
        (3.0, None, 2.0, "above"),
        (2.0, 2.0, 2.0, EXPECTED),
    ],
)
def test_a_verdict_follows_from_the_range(
    value: float, low: float, high: float, expected: str
) -> None:
    assert judge(value, low, high) == expected


def pretend(name: str, gib: int) -> Bench:
    device = {
        "type": "cuda",
        "name": name,
        "count": 1,
        "memory_bytes": gib * 2**30,
        "dtype": "bfloat16",
    }
    return Bench(size=SIZES["full"], folder=Path(), prepared={}, device=device)


def test_batches_and_ranges_follow_from_the_plan_and_the_tables() -> None:
    large = pretend("NVIDIA H100 80GB HBM3", 79)
    small = pretend("Tesla T4", 15)
    samples = {model: fitting_samples(large, model, {})[0] for model in ("124M", "1.3B")}
    assert samples["124M"] == 32 and 1 <= samples["1.3B"] < 32
    assert fitting_samples(large, "1.3B", {"recompute": "full"})[0] > samples["1.3B"]
    assert (
        fitting_samples(small, "1.3B", {})[0] == 0
        and "GiB" in fitting_samples(small, "1.3B", {})[1]
    )
    assert published_peak(large, "bfloat16")[0] == 989.5e12
    assert published_peak(pretend("NVIDIA H100 PCIe", 79), "bfloat16")[0] is None, "another edition"
    low, high, source = mfu_range(large, "1.3B", "compiled")
    assert low == 0.45 and low < high <= 1.0 and "target" in source
    assert mfu_range(large, "124M", "recomputed")[0] < mfu_range(large, "124M", "eager")[0] < high


def test_the_busy_share_counts_overlapping_spans_once() -> None:
    assert busy_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (8.0, 10.0)]) == pytest.approx(0.7)
    assert busy_share([]) == 0.0
