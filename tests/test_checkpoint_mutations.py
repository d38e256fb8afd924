"""Nothing that was changed after it was stored is loaded unnoticed; torch's DCP, asked the same, does load it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.bench import main as bench


def test_every_single_change_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    figures = tmp_path / "figures.json"
    assert bench(["mutations", "--count", "450", "--seed", "7", "--folder", str(tmp_path), "--json", str(figures)]) == 0
    contestants = json.loads(figures.read_text())["contestants"]
    ours, dcp = contestants["commits"], contestants["dcp"]
    assert len(ours) == 15 and sum(row["changes"] for row in ours.values()) == 450
    assert all(row["reported"] == row["changes"] for row in ours.values())
    # What decides the weights is refused by the load itself, without a verifying read.
    for kind in ("bit flipped in data", "bit flipped in manifest", "truncated data", "shard of another step"):
        assert ours[kind]["refused"] == ours[kind]["changes"]
    assert dcp["shard of another step"]["wrong"] == dcp["shard of another step"]["changes"], "the rival is really asked"
    assert "loaded wrong" in capsys.readouterr().out
