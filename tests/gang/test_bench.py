"""The benchmarks of engine and checkpoints at a tiny size: they compare like with like."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import main

TINY = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.sequence_length=32",
)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        lines = (f"{number * line} is {number} times {line}.\n" for line in range(60))
        (folder / f"{number}.py").write_text("".join(lines))
    return folder


def run_bench(folder: Path, *arguments: str) -> dict[str, Any]:
    """The figures that the command writes."""
    path = folder / "figures.json"
    assert main([*arguments, "--json", str(path), "--folder", str(folder)]) == 0
    assert [left.name for left in folder.iterdir() if left.name.startswith("ebbflow-bench-")] == []
    return json.loads(path.read_text())


def assert_measured(figures: dict[str, Any], rounds: int) -> int:
    """How many spreads there are in `figures`; each must be of `rounds` positive, finite, ordered
    numbers.
    """
    if "median" in figures:
        assert figures["rounds"] == rounds
        assert 0.0 < figures["low"] <= figures["median"] <= figures["high"] < math.inf
        return 1
    return sum(
        assert_measured(value, rounds) for value in figures.values() if isinstance(value, dict)
    )


@pytest.mark.long
def test_the_engine_and_bare_loops_take_the_same_steps_to_the_same_loss(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = []
    for setting in (*TINY, f"data.path={texts}", "training.batch_size=4"):
        settings.extend(("--set", setting))
    figures = run_bench(tmp_path, "engine", "--rounds", "2", "--steps", "3", *settings)
    modes = figures["engine"]["modes"]
    assert {mode: sorted(found) for mode, found in modes.items()} == {
        "ddp": ["bare", "bare_tuned", "engine"],
        "fsdp2": ["bare", "bare_tuned", "engine"],
        "single": ["bare", "engine"],
    }
    loops = [loop for found in modes.values() for loop in found.values()]
    assert {loop["steps"] for loop in loops} == {9}, (
        "two rounds of three steps, after one that warms up"
    )
    for loop in loops:
        assert loop["last_loss"] == pytest.approx(modes["single"]["engine"]["last_loss"], rel=1e-3)
    assert 0.0 < modes["single"]["engine"]["last_loss"] < math.log(256), (
        "it has learned something in nine steps"
    )
    assert modes["ddp"]["engine"]["engine_over_this"]["median"] == 1.0
    assert assert_measured(figures["engine"], rounds=2) == 5 * len(loops)
    assert_says_where_it_was_measured(figures, capsys.readouterr().out)


def assert_says_where_it_was_measured(figures: dict[str, Any], output: str) -> None:
    """Every figure says what it is and where it was found."""
    assert figures["kind"] == "measured"
    assert {"cpu", "cores", "torch", "load_average", "measured_at"} <= set(figures["machine"])
    assert f"{figures['machine']['cores']} cores, torch {figures['machine']['torch']}" in output
    assert max(map(len, output.splitlines())) <= 100


@pytest.mark.long
def test_every_saver_saves_and_restores_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run_bench(tmp_path, "checkpoint", "--rounds", "2", "--megabytes", "2")
    checkpoint = figures["checkpoint"]
    savers = checkpoint["contestants"]
    assert sorted(savers) == ["dcp_async_save", "dcp_save", "engine"]
    assert 1e6 < checkpoint["bytes"] < 4e6
    for saver in savers.values():
        assert saver["saves"] == 4, "two rounds, after two that warm up"
        assert saver["first_blocked_seconds"] > 0.0
    for name in ("engine", "dcp_save"):
        assert savers[name]["restored_equal"] is True
    assert assert_measured(checkpoint, rounds=2) == 1 + 4 * len(savers) + 2 * 2
    assert_says_where_it_was_measured(figures, capsys.readouterr().out)


def test_a_rank_that_fails_is_named_with_its_reason(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", f"data.path={texts}", "--set", "model.sequence_length=1000000"]
    assert (
        main(["engine", "--rounds", "1", "--steps", "1", "--folder", str(tmp_path), *settings]) == 1
    )
    message = capsys.readouterr().err
    assert re.search(r"engine-2: rank [01] ended with exit code 1", message)
    assert "fewer than the 1000001 of one sample" in message
