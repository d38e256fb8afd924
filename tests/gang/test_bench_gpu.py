"""`ebbflow bench gpu` on a CPU: that each of its lines measures what it says. No time is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import main
from benchmarks.gpu.bench import EXPECTED, NO_RANGE, judge
from benchmarks.gpu.measure import LINES


def test_every_line_of_the_command_holds_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    code = main(["--device", "cpu", "--tiny", "--json", str(path), "--folder", str(tmp_path)])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    assert [left.name for left in tmp_path.iterdir()] == ["figures.json"]
    found = json.loads(path.read_text())
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in LINES}
    for row in found["rows"]:
        lines[row["line"]].append(row)
        assert row["measured"] in shown.out
    assert all(lines.values()) and {row["verdict"] for row in found["rows"]} <= {EXPECTED, NO_RANGE}

    [matmul] = lines["matmul"]
    assert 0.0 < matmul["figures"]["flops_per_second"] < math.inf
    resume, recovery = lines["resume"]
    assert resume["figures"]["equal"] and resume["figures"]["interrupted"]
    assert recovery["figures"]["rank"] == 1 and "rank 1" in recovery["figures"]["culprit"]


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
