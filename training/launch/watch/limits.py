"""How long a rank may stay in a phase, learned from the run itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ebbflow.infra.config.schema import RunConfig
from ebbflow.training.launch.watch.heartbeat import Beat

MINIMUM_SECONDS = 3.0
FACTOR = 10.0  # of the p99 of a phase
_START_MARGIN_SECONDS = 10.0
_STORE_MARGIN_SECONDS = 10.0  # a rank gives its own uploader up some seconds after the save's deadline
_START_PHASES = frozenset({"init", "restore"})
STORE_PHASE = "store"
_STEP_PHASES = frozenset({"data", "forward", "backward", "optimizer"})
_BASE = 2**0.25
_SHORTEST_SECONDS = 1e-3
_ENOUGH = 20
_BUCKETS = 96  # up to 1.4e4 s


class Durations:
    """Streaming quantiles in 96 counters: bucket k holds durations up to 1 ms × 2^(k/4), so that they are at most 19 %
    too high, and never too low."""

    def __init__(self) -> None:
        self._counts = [0] * _BUCKETS
        self._total = 0

    def add(self, seconds: float) -> None:
        bucket = math.ceil(math.log(max(seconds, _SHORTEST_SECONDS) / _SHORTEST_SECONDS, _BASE))
        self._counts[min(max(bucket, 0), _BUCKETS - 1)] += 1
        self._total += 1

    def quantile(self, share: float) -> float:
        """Upper end of the bucket that holds it, in seconds; 0 while nothing was seen.

        Of 20 and more the longest one is always left out: a single stall of a young run is no habit.
        """
        wanted, seen = share * self._total, 0
        if self._total >= _ENOUGH:
            wanted = min(wanted, self._total - 1)
        for bucket, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return _SHORTEST_SECONDS * _BASE**bucket
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """floor_seconds: what is only slow is left alone for so long. start_seconds: for init and restore. store_seconds:
    for a save to be durable, where a rank waits for that.

    longest_seconds: no phase is given more, and one that was never seen to end is given this.
    """

    floor_seconds: float
    start_seconds: float
    store_seconds: float
    longest_seconds: float

    @classmethod
    def of(cls, config: RunConfig) -> Deadlines:
        """The ranks have the start's deadline to find each other, and name the missing; an agent speaks after them."""
        cluster = config.cluster
        return cls(
            floor_seconds=config.survival.hang_floor_seconds,
            start_seconds=cluster.start_deadline_seconds + _START_MARGIN_SECONDS,
            store_seconds=config.checkpoint.deadline_seconds + _STORE_MARGIN_SECONDS,
            longest_seconds=cluster.step_deadline_seconds,
        )


class PhaseLimits:
    """Learns from the beats of one rank, as its agent sees them every few hundredths of a second.

    A phase that ends between two looks was shorter than their distance, and only the heartbeat's own count tells that
    it ever was; what is seen of the others is their length to within that distance. So p99 is of the phases that were
    seen, longer ones first: too high rather than too low.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._seen: dict[str, Durations] = {}
        self._beat: Beat | None = None
        self._looked = 0.0
        self._first_step: int | None = None

    def observe(self, beat: Beat, now: float) -> None:
        """now: time.monotonic() of this look."""
        last, looked = self._beat, self._looked
        self._beat, self._looked = beat, now
        if beat.phase in _STEP_PHASES and self._first_step is None:
            self._first_step = beat.step
        if last is None or last.t_mono == beat.t_mono:
            return
        if self._is_first(last) and last.phase != "evaluation":  # what it compiles is a phase of its own: all are alike
            return
        # After a look that came late, several phases may have ended: what was certain before counts.
        seconds = min(beat.t_mono - last.t_mono, looked - last.t_mono + 0.1)
        self._seen.setdefault(last.phase, Durations()).add(seconds)

    def ordinary(self, beat: Beat) -> float:
        """Longer than this in its phase is remarkable: 10 × p99, at least 3 s. What was never seen to end has time."""
        if (own := self._own_deadline(beat)) is not None:
            return own
        if self._is_first(beat):
            return self._deadlines.longest_seconds
        seen = self._seen.get(beat.phase)
        return min(max(FACTOR * seen.quantile(0.99) if seen else 0.0, MINIMUM_SECONDS), self._deadlines.longest_seconds)

    def limit(self, beat: Beat) -> float:
        """When a rank without progress is given up: the same, and never below the floor."""
        if (own := self._own_deadline(beat)) is not None:
            return own
        return min(max(self.ordinary(beat), self._deadlines.floor_seconds), self._deadlines.longest_seconds)

    def _own_deadline(self, beat: Beat) -> float | None:
        """Of phases whose length says nothing of the rank, but of the others or of the store."""
        if beat.phase in _START_PHASES:
            return self._deadlines.start_seconds
        return self._deadlines.store_seconds if beat.phase == STORE_PHASE else None

    def _is_first(self, beat: Beat) -> bool:
        """The first step compiles, allocates and connects; so do the first save and the first evaluation."""
        if beat.phase in _STEP_PHASES:
            return self._first_step is None or beat.step <= self._first_step
        return beat.entered <= 1 or beat.phase in ("compile", "done")
