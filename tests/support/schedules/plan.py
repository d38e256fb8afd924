"""Draw a schedule from a seed: plain data, the same for the same seed on every machine."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

WAYS = ("quiet", "rank", "uploader", "all", "zombie", "frozen")
_RANKS = 3
# About one save of two ranks, of the small and of the large model
_SMALL_BYTES = 50_000
_LARGE_BYTES = 19_000_000
_REQUESTS = ("data", "index", "commits")
# Probabilities per request
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
    "late rot": {"rot:get": 0.15},  # an object that was read and found sound may decay later
    "full": {"slow": 0.05},
}


@dataclass(frozen=True)
class Kill:
    """The moment of a kill.

    Attributes:
        victim: The rank, modulo the world size.
        after_seconds: The moment by the clock, counted from when all ranks have begun.
        early: Count `after_seconds` from the start of the gang instead.
        request: The kind of object whose put the victim dies in; None: it dies by the clock.
        operation: The operations of the store that count as this put.
        point: Where in the put the victim dies: "before", "mid" or "after".
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

    Attributes:
        saves: The steps to save, counted from the step that the gang starts from.
        pauses: Seconds before each save.
        waits: Whether the gang waits for each commit at once.
        way: How the gang ends, one of `WAYS`: by itself, by a kill of one of its processes or of
            all, or while it still runs (a zombie) or is stopped (frozen).
        overlap_seconds: How long a zombie works before its successor is opened.
        rewind: How many reachable commits to go back; 0: none.
        launchers: How many launchers open this start at once.
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
    """A whole job.

    Attributes:
        store: "s3" or "folder".
        storm: The name of the faults that the store has.
        large: Save a state that each rank uploads in several parts.
        conduct: Settings of the S3 server until the last act.
    """

    seed: int
    store: str
    storm: str
    large: bool
    conduct: dict[str, Any]
    keep_last: int
    deadline_seconds: float
    acts: tuple[Act, ...] = ()


def draw(seed: int) -> Schedule:
    """Draw the schedule of a seed.

    The last act is quiet, and its store has no faults: what is in the store then is judged.
    """
    chance = random.Random(f"schedule {seed}")
    store = "folder" if chance.random() < 0.2 else "s3"
    storm = "calm"
    if store == "s3":
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
        save_bytes = _LARGE_BYTES if large else _SMALL_BYTES
        conduct["quota_bytes"] = chance.randint(1, 5) * save_bytes
        conduct["quota_code"] = chance.choice(["QuotaExceeded", "InsufficientStorage"])
    acts = [_draw_act(chance, is_first=number == 0) for number in range(chance.randint(1, 3))]
    least_kept = 2 if "rot" in storm else 1  # a restore needs a second commit if the first decays
    return Schedule(
        seed=seed,
        store=store,
        storm=storm,
        large=large,
        conduct=conduct,
        keep_last=chance.randint(least_kept, 3),
        deadline_seconds=chance.choice([3.0, 4.0, 6.0]),
        acts=(*acts, _draw_act(chance, is_quiet=True)),
    )


def _draw_act(chance: random.Random, *, is_first: bool = False, is_quiet: bool = False) -> Act:
    count = 1
    if not is_quiet:
        count = chance.randint(1, 4)
    saves = tuple(accumulate(chance.randint(1, 2) for _ in range(count)))
    way = "quiet"
    if not is_quiet:
        way = chance.choice(WAYS)
    kill = Kill(
        victim=chance.randrange(_RANKS),
        after_seconds=chance.uniform(0.05, 1.0),
        early=chance.random() < 0.2,
        request=chance.choice([*_REQUESTS, None]),
        operation=chance.choice(["put|part", "put|complete"]),
        point=chance.choice(["before", "mid", "after"]),
    )
    world_size = chance.randint(1, _RANKS)
    pauses = tuple(round(chance.uniform(0, 0.1), 3) for _ in saves)
    waits = tuple(chance.random() < 0.5 for _ in saves)
    overlap_seconds = chance.uniform(0.1, 0.8)
    rewind = 0
    if not is_first and chance.random() < 0.3:
        rewind = chance.randint(1, 2)
    launchers = 1
    if not is_quiet and chance.random() < 0.15:
        launchers = 2
    return Act(
        world_size=world_size,
        saves=saves,
        pauses=pauses,
        waits=waits,
        way=way,
        kill=kill,
        overlap_seconds=overlap_seconds,
        rewind=rewind,
        launchers=launchers,
    )
