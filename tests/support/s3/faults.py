"""Which request fails, and how: a pure function of the seed, the request and how often it was made
before.

So a schedule can be replayed although its processes race: the third put of an object meets the same
fault each time. Random parts of names are left out of that, since they differ from one replay to
the next.

error      500 InternalError          slow_down  503 SlowDown                conflict   409 on a write
time_out   400 RequestTimeout         slow       answered late               stall      no answer, nothing done
reset      connection reset in mid-body, of a write or of what is read       lost       done, then reset: no answer
stall_done done, then no answer       flip       one bit of what is read     rot        one bit of what is stored,
                                                                                        after it was
                                                                                        put or read
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

WRITES = frozenset({"put", "part", "complete", "create", "delete", "delete_many", "abort"})
_STORES = frozenset({"put", "complete"})
_READS = frozenset({"get"})
KINDS: dict[str, frozenset[str] | None] = {  # which operations each can meet; None: all
    "error": None,
    "slow_down": None,
    "conflict": WRITES,
    "time_out": None,
    "slow": None,
    "stall": None,
    "reset": frozenset({"put", "part", "get"}),
    "lost": WRITES,
    "stall_done": WRITES,
    "flip": _READS,
    "rot": _STORES | _READS,
}
_RANDOM_NAMES = re.compile(r"(?<=-)[0-9a-f]{8}(?![0-9a-f])|[0-9a-f]{64}")


@dataclass(frozen=True)
class Fault:
    """kind of `KINDS`; fraction: where in the body, 0 to 1."""

    kind: str
    fraction: float


@dataclass
class Hold:
    """A request that waits until it is let go. operation, match: expressions of operations
    (put|part) and of keys.

    point: before it is done, mid (in the middle of its body) or after. skip: how many such requests
    pass first. `taken`: one has fallen into it; `arrived`: and has come to the point.
    """

    operation: str
    match: str
    point: str
    skip: int = 0
    taken: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class Conduct:
    """How the server treats one bucket.

    rates: probability of each fault by "kind", or "kind:operation", which goes before it. rules:
    faults that only certain requests meet. A rule is {"kind", "operation", "match", "times"}: the
    next `times` requests that fit meet that fault. racy: create-only puts are checked before the
    body comes, as on Swift, so that several writers can win. stale: probability that a listing
    shows a put or a deletion late, by stale_up_to_seconds at most. rot_only: expression of the keys
    that may rot; most_rotten: how many at most.
    """

    seed: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    rules: list[dict[str, Any]] = field(default_factory=list)
    racy: bool = False
    stale: float = 0.0
    stale_up_to_seconds: float = 0.0
    slow_up_to_seconds: float = 0.3
    stall_seconds: float = 600.0
    minimum_part_bytes: int = 5 * 2**20
    rot_only: str = ""
    most_rotten: int = 1_000_000

    def __post_init__(self) -> None:
        _check_rates(self.rates)
        self._lock = threading.Lock()
        self._seen: Counter[tuple[str, str]] = Counter()
        self.rotten: list[str] = []
        self.met: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.holds: list[Hold] = []

    def change(self, **settings: Any) -> None:
        """Settings from now on; what was counted stays."""
        known = {field.name for field in fields(self)}
        if unknown := set(settings) - known:
            raise ValueError(f"no such settings: {sorted(unknown)}")
        _check_rates(settings.get("rates", {}))
        with self._lock:
            for name, value in settings.items():
                setattr(self, name, value)

    def draw(self, operation: str, key: str) -> Fault | None:
        """The fault that this request meets, if any."""
        with self._lock:
            self.requests[operation] += 1
            chance = self._chance(operation, key)
            kind = self._ruled(operation, key) or self._by_rate(operation, key, chance)
            if kind is None:
                return None
            if kind == "rot":
                self.rotten.append(key)
            self.met[kind] += 1
            return Fault(kind, chance.random())

    def count_refusal(self, code: str) -> None:
        with self._lock:
            self.refused[code] += 1

    def stale_seconds(self, key: str) -> float:
        """How long listings do not show what is done to `key` now."""
        if not self.stale:
            return 0.0
        with self._lock:
            chance = self._chance("stale", key)
        if chance.random() < self.stale:
            return chance.uniform(0, self.stale_up_to_seconds)
        return 0.0

    def slow_seconds(self, fault: Fault) -> float:
        return self.slow_up_to_seconds * fault.fraction

    def held(self, operation: str, key: str) -> Hold | None:
        """The hold that this request falls into, if any; each holds one request."""
        with self._lock:
            for hold in self.holds:
                if not hold.taken.is_set() and _fits(hold.operation, hold.match, operation, key):
                    if hold.skip == 0:
                        hold.taken.set()
                        return hold
                    hold.skip -= 1
        return None

    def told(self) -> dict[str, Any]:
        """What has happened so far."""
        with self._lock:
            counts = {
                "met": dict(self.met),
                "requests": dict(self.requests),
                "refused": dict(self.refused),
            }
            return {**counts, "rotten": sorted(set(self.rotten))}

    def _chance(self, operation: str, key: str) -> random.Random:
        name = (operation, _RANDOM_NAMES.sub("*", key))
        self._seen[name] += 1
        return random.Random(f"{self.seed}:{name}:{self._seen[name]}")

    def _ruled(self, operation: str, key: str) -> str | None:
        for rule in self.rules:
            if rule.get("times", 1) > 0 and _fits(
                rule["operation"], rule.get("match", ""), operation, key
            ):
                rule["times"] = rule.get("times", 1) - 1
                return rule["kind"]
        return None

    def _by_rate(self, operation: str, key: str, chance: random.Random) -> str | None:
        for kind, operations in KINDS.items():
            drawn = chance.random()
            rate = self.rates.get(f"{kind}:{operation}", self.rates.get(kind, 0.0))
            if drawn >= rate or (operations is not None and operation not in operations):
                continue
            if kind == "rot" and (
                len(set(self.rotten)) >= self.most_rotten or not re.search(self.rot_only, key)
            ):
                continue
            return kind
        return None


def _fits(operations: str, keys: str, operation: str, key: str) -> bool:
    return bool(re.fullmatch(operations, operation) and re.search(keys, key))


def _check_rates(rates: dict[str, float]) -> None:
    if unknown := {name.partition(":")[0] for name in rates} - set(KINDS):
        raise ValueError(f"no such faults: {sorted(unknown)}")
