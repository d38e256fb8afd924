"""Every line of `ebbflow bench gpu` on a CPU, with those that start jobs, kill and hang them.

No time is judged.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import main
from benchmarks.gpu.bench import EXPECTED, NO_RANGE, SIZES, lines_of


def test_every_line_of_the_command_holds_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    code = main(["--device", "cpu", "--tiny", "--json", str(path), "--folder", str(tmp_path)])
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    assert [left.name for left in tmp_path.iterdir()] == ["figures.json"]
    rows = json.loads(path.read_text())["rows"]
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in lines_of(SIZES["tiny"])}
    for row in rows:
        lines[row["line"]].append(row)
        assert row["measured"] in shown.out
    assert all(lines.values()) and {row["verdict"] for row in rows} <= {EXPECTED, NO_RANGE}

    figures = {name: [row["figures"] for row in rows] for name, rows in lines.items()}
    for name, key in (
        ("matmul", "flops_per_second"),
        ("copies", "down_bytes_per_second"),
        ("ratio", "ratio"),
    ):
        assert 0.0 < figures[name][0][key] < math.inf
    for variant in ("eager", "compiled", "recomputed"):
        (speed,) = figures[f"tiny-{variant}"]
        assert speed["tokens_per_second"] > 0 and speed["loss"] == figures["tiny-eager"][0]["loss"]
    losses = figures["ratio"][0]["losses"]
    assert losses["engine"] == pytest.approx(losses["bare"], rel=1e-4), "both take the same steps"
    assert figures["waits"][0]["reads_per_step"] > 0
    assert figures["save"][0]["commits"] >= 6 and figures["save"][0]["bytes"] > 12 * 33_952
    for name in ("resume", "strict"):
        assert figures[name][0]["equal"] and figures[name][0]["interrupted"]
    for recovery, cause in ((figures["resume"][1], "SIGKILL"), (figures["hang"][0], "no progress")):
        assert recovery["rank"] == 1 and f"rank 1: {cause}" in recovery["culprit"].replace(
            "killed by ", ""
        )
    assert [row["splits"] for row in figures["memory"]] == [[2, 4]] * 2
    assert all(row["right"] and row["bus_bytes_per_second"] > 0 for row in figures["collectives"])
