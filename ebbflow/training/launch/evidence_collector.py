"""Collect the evidence of all nodes about a generation's failure, on node 0."""

from ebbflow.training.launch.blame import (
    Culprit,
    detect_mismatch,
    detect_stall,
    settle_seconds,
)
from ebbflow.training.launch.evidence import WorkerFailure

_POSITION_SECONDS = 10.0  # older positions of ranks say nothing about the failure


class EvidenceCollector:
    """Collector of failures of ranks, and of the positions of ranks that have not failed.

    The first failure, or positions that prove one, begin a short time in which the reports of other
    nodes can still arrive. Methods take the time as `now`, in seconds of `time.monotonic()`.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._failures: list[WorkerFailure] = []
        # rank: (time of the report, its position)
        self._positions: dict[int, tuple[float, WorkerFailure]] = {}
        self._failed_at: float | None = None

    @property
    def shows_failure(self) -> bool:
        return self._failed_at is not None

    def add(self, report: WorkerFailure, now: float) -> None:
        """Add a failure, or the position of a rank that has not failed."""
        if report.witness:
            self._positions[report.rank] = (now, report)
            failed = detect_mismatch(self.evidence(now)) is not None
        else:
            self._failures.append(report)
            failed = True
        if failed and self._failed_at is None:
            self._failed_at = now

    def evidence(self, now: float) -> list[WorkerFailure]:
        oldest = now - _POSITION_SECONDS
        recent = [position for at, position in self._positions.values() if at >= oldest]
        return self._failures + recent

    def find_stall(self, now: float) -> Culprit | None:
        """Return the idle rank for which all other ranks wait; None if there is none, or if the
        generation has failed.
        """
        if self.shows_failure or not self._is_complete(now):
            return None
        return detect_stall(self.evidence(now))

    def is_settled(self, now: float) -> bool:
        """Return whether the generation has failed and no better evidence can be expected."""
        if self._failed_at is None:
            return False
        wait_seconds = settle_seconds(self._failures, all_heard=self._is_complete(now))
        return now >= self._failed_at + wait_seconds

    def _is_complete(self, now: float) -> bool:
        """Return whether each rank has failed or reported its position."""
        return len({report.rank for report in self.evidence(now)}) == self._world_size
