"""A gang of real ranks in trouble: the right one is named, with its place, and stacks were kept
before.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ebbflow.training.launch.blame import Culprit
from tests.support.watched_gang import WatchedGang

RANK = "tests/support/watched_rank.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def verdict(folder: Path, trouble: str, *, guilty: int) -> Culprit:
    gang = WatchedGang(folder, trouble, guilty=guilty)
    try:
        gang.run_until_step(15)
        if trouble.startswith("SIG"):
            gang.signal(guilty, signal.Signals[trouble])
        culprit = gang.culprit()
        assert culprit.rank == culprit.node == guilty, f"{culprit}\n{gang.logs()}"
        return culprit
    finally:
        gang.close()


@pytest.mark.parametrize(
    ("trouble", "guilty", "tracing"), [("hold_the_gil", 1, False), ("starve_the_loader", 0, True)]
)
def test_of_two_silent_ranks_the_one_outside_of_a_collective_is_named(
    folder: Path, trouble: str, guilty: int, tracing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody may trace, faulthandler answers, even while the GIL is held."""
    if not tracing:
        monkeypatch.setattr("ebbflow.training.launch.evidence.shutil.which", lambda *_, **__: None)
    culprit = verdict(folder, trouble, guilty=guilty)
    assert (culprit.kind, culprit.certainty, culprit.step, culprit.phase) == (
        "hang",
        "slow",
        20,
        "data",
    )
    assert culprit.where.startswith(f"{RANK}:") and culprit.where.endswith(f" in {trouble}")
    assert culprit.cascades == [1 - guilty]
    assert trouble in Path(culprit.dump).read_text()
    assert list(Path(culprit.dump).parent.glob("*.recorder.json"))


def test_a_stopped_rank_is_proven_long_before_the_floor(folder: Path) -> None:
    culprit = verdict(folder, "SIGSTOP", guilty=0)
    assert (culprit.kind, culprit.certainty) == ("stopped", "proven")
    assert "stopped by a signal" in culprit.message and culprit.where.startswith(RANK)


def test_a_collective_that_only_one_rank_calls_is_its_fault(folder: Path) -> None:
    culprit = verdict(folder, "call_another_collective", guilty=0)
    assert culprit.kind == "different collectives" and culprit.where.endswith(
        " in call_another_collective"
    )


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        ("raise_error", "ValueError"),
        ("SIGKILL", "killed by SIGKILL"),
        ("SIGSEGV", "killed by SIGSEGV"),
    ],
)
def test_the_rank_that_ended_first_is_named_as_the_culprit(
    folder: Path, trouble: str, kind: str
) -> None:
    culprit = verdict(folder, trouble, guilty=1)
    assert (culprit.kind, culprit.cascades) == (kind, [0])
    assert culprit.fingerprint == (f"{kind} at {culprit.where}" if culprit.where else kind)
    assert bool(culprit.where) == (trouble != "SIGKILL")


def test_a_rank_that_takes_fewer_steps_is_named(folder: Path) -> None:
    culprit = verdict(folder, "leave", guilty=1)
    assert culprit.kind == "left early" and culprit.message == "left after step 19: completed"
