"""The store of one schedule: a bucket on the failing server, or a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.support.s3.fixture import FailingServer
from tests.support.schedules.plan import Kill, Schedule


class ScheduleStore:
    """A store for one job.

    Attributes:
        uri: The job's folder in the store.
        environment: Environment variables for the processes that use the store.
    """

    def __init__(self, schedule: Schedule, folder: Path, server: FailingServer) -> None:
        self._schedule = schedule
        self._bucket = f"seed-{schedule.seed}"
        self._server: FailingServer | None = None
        self.uri = str(folder / "store" / "jobs" / "soak")
        self.environment: dict[str, str] = {}
        if schedule.store == "s3":
            server.forget(self._bucket)
            server.behave(self._bucket, **schedule.conduct)
            self._server = server
            self.uri = f"s3://{self._bucket}/jobs/soak"
            self.environment = server.environment

    @property
    def is_remote(self) -> bool:
        return self._server is not None

    def told(self) -> dict[str, Any]:
        """Return what the server has recorded about the bucket, as in `tests.support.s3.control`."""
        if self._server is None:
            return {"rotten": [], "met": {}, "requests": {}, "refused": {}, "uploads": []}
        return self._server.told(self._bucket)

    def calm(self) -> None:
        """End all faults except a full store, and wait until listings are complete."""
        if self._server is None:
            return
        if self._schedule.conduct["stale"]:
            time.sleep(self._schedule.conduct["stale_up_to_seconds"])
        self._server.behave(self._bucket, rates={}, stale=0.0)

    def close(self) -> None:
        if self._server is not None:
            self._server.forget(self._bucket)

    def hold(self, kill: Kill, rank: int) -> int | None:
        """Hold the request during which a victim is to die.

        Returns:
            The number of the hold, or None if the victim dies by the clock.
        """
        if self._server is None or kill.request is None:
            return None
        if kill.request == "commits":
            match = "/commits/"
        else:
            match = rf"/{kill.request}/.*/{rank:05d}\."
        return self._server.hold(
            self._bucket, operation=kill.operation, match=match, point=kill.point
        )

    def is_held(self, hold: int) -> bool:
        assert self._server is not None
        return self._server.held(self._bucket, hold)

    def release(self, hold: int) -> None:
        assert self._server is not None
        self._server.release(self._bucket, hold)
