"""Schedules with a bug planted in the checkpoints: what the oracle of the schedules has to find.

The bugs go into the process that everybody but the uploaders is forked from, which is why this runs
in one of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.soak.schedules.commands import play, preload
from benchmarks.soak.schedules.plan import Act, Kill, Schedule
from benchmarks.soak.server import FailingS3
from ebbflow.training.checkpoint.lineage import LineageChain
from ebbflow.training.checkpoint.reader import VerifiedReader

_KILL = Kill(victim=0, after_seconds=0.0, early=True, request=None, operation="put", point="before")
_STAYS = Act(
    world_size=1,
    saves=(1,),
    pauses=(0.0,),
    waits=(True,),
    way="quiet",
    kill=_KILL,
    overlap_seconds=0.0,
)
_THREE = replace(_STAYS, saves=(1, 2, 6), pauses=(0.0,) * 3, waits=(True,) * 3)
_ROTS = {
    "seed": 1,
    "rates": {"rot:put": 1.0},
    "rot_only": "/data/.*/000000000006/",
    "most_rotten": 1,
    "stale": 0.0,
}


def played(folder: str) -> dict[str, tuple[list[str], list[str]]]:
    """By bug: the oracle's problems with the bug planted, and of the same schedule without it."""
    preload()
    calm = Schedule(
        0, "folder", "calm", large=False, conduct={}, keep_last=3, deadline_seconds=10.0
    )
    schedules = {
        "sums are not looked at": (
            mock.patch.object(
                VerifiedReader,
                "_read_chunk",
                lambda self, chunk: self._fetch(self._data[chunk.object], chunk) and None,
            ),
            replace(calm, store="s3", conduct=_ROTS, acts=(_THREE, _STAYS)),
        ),
        "the highest step is the newest": (
            mock.patch.object(LineageChain, "is_in_history", lambda *_: True),
            replace(calm, acts=(_THREE, replace(_STAYS, rewind=1), _STAYS)),
        ),
        "retention keeps the oldest": (
            mock.patch("ebbflow.training.checkpoint.retention.choose_commits", _keeps_the_oldest),
            replace(calm, acts=(_THREE, _STAYS)),
        ),
    }
    server = FailingS3()
    found = {}
    try:
        for name, (bug, schedule) in schedules.items():
            sound = play(schedule, Path(folder), server).problems
            with bug:
                found[name] = (play(schedule, Path(folder), server).problems, sound)
    finally:
        server.close()
    return found


def _keeps_the_oldest(commits: list[Any], _: Any) -> dict[str, str]:
    return {commits[-1].sha256: "last"}
