"""`ebbflow bench gpu` on a CPU: that each of its lines measures what it says. No time is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import main
from benchmarks.gpu.bench import EXPECTED, NO_RANGE, SIZES, Bench, judge
from benchmarks.gpu.device import published_peak
from benchmarks.gpu.measure import lines_of
from benchmarks.gpu.speed import busy_share, fitting_samples, mfu_range


def test_every_line_of_the_command_holds_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    code = main(["--device", "cpu", "--tiny", "--json", str(path), "--folder", str(tmp_path)])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    assert [left.name for left in tmp_path.iterdir()] == ["figures.json"]
    found = json.loads(path.read_text())
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in lines_of(SIZES["tiny"])}
    for row in found["rows"]:
        lines[row["line"]].append(row)
        assert row["measured"] in shown.out
    assert all(lines.values()) and {row["verdict"] for row in found["rows"]} <= {EXPECTED, NO_RANGE}

    figures = {name: [row["figures"] for row in rows] for name, rows in lines.items()}
    for name, key in (("matmul", "flops_per_second"), ("copies", "down_bytes_per_second"), ("ratio", "ratio")):
        assert 0.0 < figures[name][0][key] < math.inf
    for variant in ("eager", "compiled", "recomputed"):
        speed, memory = figures[f"tiny-{variant}"]
        assert speed["tokens_per_second"] > 0 and speed["loss"] == figures["tiny-eager"][0]["loss"]
        assert memory["tensor_bytes"] == pytest.approx(memory["estimated_tensor_bytes"], rel=0.15)
    recomputed, eager = figures["tiny-recomputed"][1], figures["tiny-eager"][1]
    assert recomputed["tensor_bytes"] < eager["tensor_bytes"]
    losses = figures["ratio"][0]["losses"]
    assert losses["engine"] == pytest.approx(losses["bare"], rel=1e-4), "both take the same steps"
    assert figures["waits"][0]["reads_per_step"] > 0
    assert figures["save"][0]["commits"] >= 6 and figures["save"][0]["bytes"] > 12 * 33_952
    for name in ("resume", "strict"):
        assert figures[name][0]["equal"] and figures[name][0]["interrupted"]
    for recovery, cause in ((figures["resume"][1], "SIGKILL"), (figures["hang"][0], "no progress")):
        assert recovery["rank"] == 1 and f"rank 1: {cause}" in recovery["culprit"].replace("killed by ", "")
    assert [row["splits"] for row in figures["memory"]] == [[2, 4]] * 2
    assert all(row["right"] and row["bus_bytes_per_second"] > 0 for row in figures["collectives"])


def test_a_line_that_gives_nothing_does_not_end_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    options = ["--lines", "matmul,copies", "--deadline", "0.01", "--device", "cpu", "--tiny", "--json", str(path)]
    assert main(options) == 1
    rows = json.loads(path.read_text())["rows"]
    assert [(row["line"], row["verdict"], row["measured"]) for row in rows] == [
        (name, "ERROR", "no result within 0.01 s") for name in ("matmul", "copies")
    ]


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [(1.0, None, None, NO_RANGE), (1.0, 2.0, None, "below"), (3.0, None, 2.0, "above"), (2.0, 2.0, 2.0, EXPECTED)],
)
def test_a_verdict_follows_from_the_range(value: float, low: float, high: float, expected: str) -> None:
    assert judge(value, low, high) == expected


def pretend(name: str, gib: int) -> Bench:
    device = {"type": "cuda", "name": name, "count": 1, "memory_bytes": gib * 2**30, "dtype": "bfloat16"}
    return Bench(size=SIZES["full"], folder=Path(), prepared={}, device=device)


def test_batches_and_ranges_follow_from_the_plan_and_the_tables() -> None:
    large, small = pretend("NVIDIA H100 80GB HBM3", 79), pretend("Tesla T4", 15)
    samples = {one: fitting_samples(large, one, {})[0] for one in ("124M", "1.3B")}
    assert samples["124M"] == 32 and 1 <= samples["1.3B"] < 32
    assert fitting_samples(large, "1.3B", {"recompute": "full"})[0] > samples["1.3B"]
    assert fitting_samples(small, "1.3B", {})[0] == 0 and "GiB" in fitting_samples(small, "1.3B", {})[1]
    assert published_peak(large, "bfloat16")[0] == 989.5e12
    assert published_peak(pretend("NVIDIA H100 PCIe", 79), "bfloat16")[0] is None, "another edition"
    low, high, source = mfu_range(large, "1.3B", "compiled")
    assert low == 0.45 and low < high <= 1.0 and "target" in source
    assert mfu_range(large, "124M", "recomputed")[0] < mfu_range(large, "124M", "eager")[0] < high


def test_the_busy_share_counts_overlapping_spans_once() -> None:
    assert busy_share([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (8.0, 10.0)]) == pytest.approx(0.7)
    assert busy_share([]) == 0.0
