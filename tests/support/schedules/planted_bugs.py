"""Schedules with a bug planted in the checkpoints, which the oracle must find.

A bug is planted into the process that all processes except the uploaders are forked from, so this
runs in a process of its own.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from ebbflow.training.checkpoint import retention
from ebbflow.training.checkpoint.lineage import LineageChain
from ebbflow.training.checkpoint.reader import VerifiedReader
from tests.support.s3.fixture import run_failing_s3
from tests.support.schedules.plan import Act, Kill, Schedule
from tests.support.schedules.play import play, preload

_NO_KILL = Kill(
    victim=0, after_seconds=0.0, early=True, request=None, operation="put", point="before"
)
_ONE_SAVE = Act(
    world_size=1,
    saves=(1,),
    pauses=(0.0,),
    waits=(True,),
    way="quiet",
    kill=_NO_KILL,
    overlap_seconds=0.0,
)
_THREE_SAVES = replace(_ONE_SAVE, saves=(1, 2, 6), pauses=(0.0,) * 3, waits=(True,) * 3)
_CALM = Schedule(
    seed=0, store="folder", storm="calm", large=False, conduct={}, keep_last=3, deadline_seconds=10
)
_ROT = {
    "seed": 1,
    "rates": {"rot:put": 1.0},
    "rot_only": "/data/.*/000000000006/",
    "most_rotten": 1,
    "stale": 0.0,
}


@dataclass(frozen=True)
class PlantedBug:
    """A bug and a schedule that shows it.

    Attributes:
        patch: Plants the bug while its context lasts.
        expected: A part of the problem that the oracle reports.
    """

    patch: AbstractContextManager[Any]
    schedule: Schedule
    expected: str


@dataclass(frozen=True)
class Verdict:
    """What the oracle reports.

    Attributes:
        expected: A part of a problem that must be among `problems`.
        problems: The problems with the bug.
        problems_without: The problems of the same schedule without the bug.
    """

    expected: str
    problems: list[str]
    problems_without: list[str]


def judge_planted_bugs(folder: Path) -> dict[str, Verdict]:
    """Play the schedule of each bug with it and without it. Return the verdicts by bug."""
    preload()
    verdicts = {}
    with run_failing_s3() as server:
        for name, bug in _make_bugs().items():
            problems_without = play(bug.schedule, folder, server).problems
            with bug.patch:
                problems = play(bug.schedule, folder, server).problems
            verdicts[name] = Verdict(bug.expected, problems, problems_without)
    return verdicts


def _make_bugs() -> dict[str, PlantedBug]:
    return {
        "checksums are not compared": PlantedBug(
            mock.patch.object(VerifiedReader, "_read_chunk", _read_unverified),
            replace(_CALM, store="s3", conduct=_ROT, acts=(_THREE_SAVES, _ONE_SAVE)),
            "is not what",
        ),
        "the highest step is the newest": PlantedBug(
            mock.patch.object(LineageChain, "is_in_history", lambda *_: True),
            replace(_CALM, acts=(_THREE_SAVES, replace(_ONE_SAVE, rewind=1), _ONE_SAVE)),
            "its parent is",
        ),
        "retention keeps the oldest": PlantedBug(
            mock.patch.object(retention, "choose_commits", _keep_oldest),
            replace(_CALM, acts=(_THREE_SAVES, _ONE_SAVE)),
            "was reported committed",
        ),
    }


def _read_unverified(reader: Any, chunk: Any) -> None:
    reader._fetch(reader._data[chunk.object], chunk)


def _keep_oldest(commits: list[Any], _: Any) -> dict[str, str]:
    return {commits[-1].sha256: "last"}
