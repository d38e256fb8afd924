"""Nothing that was changed after it was stored is loaded unnoticed; torch's DCP, asked the same,
does load it.
"""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from benchmarks.training import main as bench
from benchmarks.training.mutations.asking import Asked, store


class _Deadly:
    """What unpickling a damaged `.metadata` can do to who reads it: this one for certain."""

    def __init__(self, call: tuple) -> None:
        self._call = call

    def __reduce__(self) -> tuple:
        return self._call


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the checkpoints are kept."""
    return tmp_path_factory.mktemp("mutations") / "made"


def test_every_single_change_is_found(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    figures = tmp_path / "figures.json"
    words = [
        "--count",
        "28",
        "--seed",
        "7",
        "--processes",
        "1",
        "--folder",
        str(made),
        "--json",
        str(figures),
    ]
    assert bench(["mutations", *words]) == 0
    contestants = json.loads(figures.read_text())["contestants"]
    ours = contestants["commits"]["by_kind"]
    dcp = contestants["dcp"]["by_kind"]
    assert len(ours) == 28 and all(row["changes"] == row["named"] == 1 for row in ours.values())
    # What decides the weights is not loaded, and the start says so, without a verifying read.
    for kind in (
        "bit flipped in data",
        "bit flipped in manifest",
        "truncated data",
        "data of another step",
    ):
        assert ours[kind]["fell back"] == 1
    assert ours["missing record"]["refused"] == 1, (
        "a start from nothing, though there are commits, is no way out"
    )
    assert dcp["data of another step"]["wrong"] == dcp["data of another step"]["changes"], (
        "the rival is really asked"
    )
    assert "wrong" in capsys.readouterr().out


def test_one_change_can_be_repeated_alone(made: Path, capsys: pytest.CaptureFixture) -> None:
    said = []
    for _ in range(2):
        assert (
            bench(["mutations", "--only", "10", "--folder", str(made), "--contestants", "commits"])
            == 0
        )
        said.append([line for line in capsys.readouterr().out.splitlines() if "ERROR" not in line])
    assert said[0] == said[1]
    assert said[0][0].startswith("commits, seed 0, number 10: bit flipped in manifest: commits/")
    assert said[0][1] == "fell back, named by verify"


def test_a_reader_that_dies_is_counted_and_replaced(tmp_path: Path) -> None:
    """With its memory limited, one that asks for 8 GiB gets an error, which is not the end of who
    counts.
    """
    store("dcp", tmp_path / "dcp")
    metadata = tmp_path / "dcp" / "step-2" / ".metadata"
    sound = metadata.read_bytes()
    calls = {"crashed": (os.abort, ()), "refused": (bytearray, (2**33,))}
    with Asked("dcp", tmp_path / "dcp") as asked:
        for outcome, call in calls.items():
            asked.warm()
            metadata.write_bytes(pickle.dumps(_Deadly(call)))
            answer = asked.ask()
            assert answer["outcome"] == outcome, answer["told"]
            assert outcome == "refused" or answer["told"].startswith("killed by SIGABRT")
            metadata.write_bytes(sound)
        assert asked.ask()["outcome"] == "same bits" and asked.starts == 2
