"""From a seed to a schedule: plain data, the same for the same seed on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

WAYS = ("quiet", "rank", "uploader", "all", "zombie", "frozen")  # what becomes of a gang
_RANKS = 3
_REQUESTS = ("data", "index", "commits")
# Probabilities per request. "stall" leaves out what is read: a restore has a minute for a request, a schedule has not.
_STORMS: dict[str, dict[str, float]] = {
    "calm": {},
    "errors": {"error": 0.08, "slow_down": 0.06, "time_out": 0.02, "conflict": 0.04},
    "lost answers": {"lost": 0.15, "reset": 0.06},
    "slow": {"slow": 0.25, "stall:put": 0.03, "stall_done:put": 0.03, "stall:list": 0.01},
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
    "rot": {"rot": 0.10},
}


@dataclass(frozen=True)
class Kill:
    """When the victim dies: so long after the gang's start, or once its put of `request` is at `point`."""

    victim: int
    after_seconds: float
    request: str | None
    point: str


@dataclass(frozen=True)
class Act:
    """One start of the gang. saves: steps; pauses: seconds before each; waits: whether each is awaited at once.

    way: of `WAYS`. rewind: places to go back in the reachable commits, 0: none. launchers: how many open it at once.
    kill: of `rank`, `uploader` and `all`. overlap_seconds: how long a zombie runs before its successor is opened.
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
    """A whole job. conduct: settings of the S3 server for as long as it lasts; store: "s3" or "folder"."""

    seed: int
    store: str
    storm: str
    conduct: dict[str, Any]
    keep_last: int
    deadline_seconds: float
    acts: tuple[Act, ...] = field(default=())


def draw(seed: int) -> Schedule:
    """The schedule of a seed. The last act is quiet, and its storm is over: what is left is then judged."""
    chance = random.Random(f"schedule {seed}")
    store = "folder" if chance.random() < 0.2 else "s3"
    storm = "calm" if store == "folder" else chance.choice(list(_STORMS))
    stale = store == "s3" and chance.random() < 0.3
    conduct = {
        "seed": seed,
        "rates": _STORMS[storm],
        "racy": chance.random() < 0.5,
        "stale": 0.3 if stale else 0.0,
        "stale_up_to_seconds": 0.5,
        "stall_seconds": 30.0,
        "minimum_part_bytes": 1,
        "rot_only": r"/(data|commits)/",
        "most_rotten": 2,
    }
    acts, step = [], 0
    for number in range(chance.randint(1, 3)):
        act, step = _act(chance, number, step)
        acts.append(act)
    last, _ = _act(chance, len(acts), step, quiet=True)
    return Schedule(
        seed=seed,
        store=store,
        storm=storm,
        conduct=conduct,
        keep_last=chance.randint(1, 3),
        deadline_seconds=chance.choice([3.0, 4.0, 6.0]),
        acts=(*acts, last),
    )


def _act(chance: random.Random, number: int, step: int, *, quiet: bool = False) -> tuple[Act, int]:
    """Steps go on from the ones before. A restored gang may have fewer behind it: it saves them a second time."""
    count = 1 if quiet else chance.randint(1, 4)
    first = max(0, step - chance.randint(0, 2)) if number else 0
    saves = tuple(first + place + 1 for place in range(count))
    way = "quiet" if quiet else chance.choice(WAYS)
    kill = Kill(
        victim=chance.randrange(_RANKS),
        after_seconds=chance.uniform(0.05, 1.0),
        request=chance.choice([*_REQUESTS, None]),
        point=chance.choice(["before", "mid", "after"]),
    )
    act = Act(
        world_size=chance.randint(1, _RANKS),
        saves=saves,
        pauses=tuple(round(chance.uniform(0, 0.1), 3) for _ in saves),
        waits=tuple(chance.random() < 0.5 for _ in saves),
        way=way,
        kill=kill,
        overlap_seconds=chance.uniform(0.1, 0.8),
        rewind=chance.randint(1, 2) if number and chance.random() < 0.2 else 0,
        launchers=2 if not quiet and chance.random() < 0.15 else 1,
    )
    return act, max(step, saves[-1])
