"""From a seed to a schedule: plain data, the same for the same seed on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

WAYS = ("quiet", "rank", "uploader", "all", "zombie", "frozen")  # what becomes of a gang
_RANKS = 3
# About one save of two ranks, of the small and of the large model
_SMALL_BYTES = 50_000
_LARGE_BYTES = 19_000_000
_REQUESTS = ("data", "index", "commits")
# Probabilities per request.
_STORMS: dict[str, dict[str, float]] = {
    "calm": {},
    "errors": {"error": 0.08, "slow_down": 0.06, "time_out": 0.02, "conflict": 0.04},
    "lost answers": {"lost": 0.15, "reset": 0.06},
    "slow": {
        "slow": 0.25,
        "stall:put": 0.03,
        "stall_done:put": 0.03,
        "stall:list": 0.01,
        "stall:part": 0.03,
    },
    "stalled reads": {"stall:get": 0.03, "stall:head": 0.02, "slow": 0.1},
    "flips": {"flip": 0.06},
    "all": {
        "error": 0.04,
        "slow_down": 0.03,
        "conflict": 0.02,
        "lost": 0.05,
        "reset": 0.03,
        "slow": 0.05,
        "flip": 0.02,
    },
    "rot": {"rot:put": 0.2, "rot:complete": 0.2},
    "late rot": {"rot:get": 0.15},  # what was read once, and found sound, is not for ever
    "full": {"slow": 0.05},
}


@dataclass(frozen=True)
class Kill:
    """When the victim dies: once its `operation` on `request` is at `point`, or by the clock.

    after_seconds: counted from when all ranks have begun, or, early, from the start of the gang.
    """

    victim: int
    after_seconds: float
    early: bool
    request: str | None
    operation: str
    point: str


@dataclass(frozen=True)
class Act:
    """One start of the gang.

    saves: steps after the one that it goes on from; pauses: seconds before each; waits: whether
    each is awaited at once. way: of `WAYS`. rewind: places to go back in the reachable commits, 0:
    none. launchers: how many open it at once. kill: of `rank`, `uploader` and `all`.
    overlap_seconds: how long a zombie works before another is opened.
    """

    world_size: int
    saves: tuple[int, ...]
    pauses: tuple[float, ...]
    waits: tuple[bool, ...]
    way: str
    kill: Kill
    overlap_seconds: float
    rewind: int = 0
    launchers: int = 1


@dataclass(frozen=True)
class Schedule:
    """A whole job. conduct: settings of the S3 server for as long as it lasts; store: "s3" or
    "folder".

    large: a state that each rank uploads in several parts.
    """

    seed: int
    store: str
    storm: str
    large: bool
    conduct: dict[str, Any]
    keep_last: int
    deadline_seconds: float
    acts: tuple[Act, ...] = field(default=())


def draw(seed: int) -> Schedule:
    """The schedule of a seed.

    The last act is quiet, and its storm is over: what is left is then judged.
    """
    chance = random.Random(f"schedule {seed}")
    if chance.random() < 0.2:
        store = "folder"
    else:
        store = "s3"
    if store == "folder":
        storm = "calm"
    else:
        storm = chance.choice(list(_STORMS))
    stale = store == "s3" and chance.random() < 0.3
    large = chance.random() < 0.12
    conduct = {
        "seed": seed,
        "rates": _STORMS[storm],
        "racy": chance.random() < 0.5,
        "stale": 0.3 if stale else 0.0,
        "stale_up_to_seconds": 0.5,
        "stall_seconds": 30.0,
        "rot_only": r"/(data|commits|index)/",
        "most_rotten": 3,
    }
    if storm == "full":
        quota = chance.randint(1, 5) * (_LARGE_BYTES if large else _SMALL_BYTES)
        conduct |= {
            "quota_bytes": quota,
            "quota_code": chance.choice(["QuotaExceeded", "InsufficientStorage"]),
        }
    acts = [_act(chance, number) for number in range(chance.randint(1, 3))]
    return Schedule(
        seed=seed,
        store=store,
        storm=storm,
        large=large,
        conduct=conduct,
        keep_last=chance.randint(2 if "rot" in storm else 1, 3),  # something to go back to
        deadline_seconds=chance.choice([3.0, 4.0, 6.0]),
        acts=(*acts, _act(chance, len(acts), quiet=True)),
    )


def _act(chance: random.Random, number: int, *, quiet: bool = False) -> Act:
    saves = tuple(
        accumulate(chance.randint(1, 2) for _ in range(1 if quiet else chance.randint(1, 4)))
    )
    if quiet:
        way = "quiet"
    else:
        way = chance.choice(WAYS)
    kill = Kill(
        victim=chance.randrange(_RANKS),
        after_seconds=chance.uniform(0.05, 1.0),
        early=chance.random() < 0.2,
        request=chance.choice([*_REQUESTS, None]),
        operation=chance.choice(["put|part", "put|complete"]),
        point=chance.choice(["before", "mid", "after"]),
    )
    return Act(
        world_size=chance.randint(1, _RANKS),
        saves=saves,
        pauses=tuple(round(chance.uniform(0, 0.1), 3) for _ in saves),
        waits=tuple(chance.random() < 0.5 for _ in saves),
        way=way,
        kill=kill,
        overlap_seconds=chance.uniform(0.1, 0.8),
        rewind=chance.randint(1, 2) if number and chance.random() < 0.3 else 0,
        launchers=2 if not quiet and chance.random() < 0.15 else 1,
    )
