"""Where a schedule is played: a bucket on the failing server, or a folder; and how victims die
there.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.soak.schedules.plan import Schedule
from benchmarks.soak.server import FailingS3

if TYPE_CHECKING:
    from benchmarks.soak.schedules.cast import Cast
    from benchmarks.soak.schedules.director import Gang

_HELD_SECONDS = 5.0  # a victim whose request never comes dies all the same


class Stage:
    """uri: the job's folder in the store. environment: for the actors. log: what they print."""

    def __init__(self, schedule: Schedule, folder: Path, server: FailingS3 | None) -> None:
        self._schedule = schedule
        if schedule.store == "s3":
            self._server = server
        else:
            self._server = None
        self._bucket = f"seed-{schedule.seed}"
        self.folder = folder
        self.log = folder / "output.log"
        if self._server:
            self.environment = self._server.environment
        else:
            self.environment = {}
        if self._server:
            self._server.forget(self._bucket)
            self._server.behave(self._bucket, **schedule.conduct)
            self.uri = f"s3://{self._bucket}/jobs/soak"
        else:
            self.uri = str(folder / "store" / "jobs" / "soak")

    @property
    def remote(self) -> bool:
        return self._server is not None

    def told(self) -> dict[str, Any]:
        nothing = {"rotten": [], "met": {}, "requests": {}, "refused": {}, "uploads": []}
        if self._server:
            return self._server.told(self._bucket)
        return nothing

    def calm(self) -> None:
        """The storm is over, there is room, and listings show what is there."""
        if self._server:
            time.sleep(
                self._schedule.conduct["stale_up_to_seconds"]
                if self._schedule.conduct["stale"]
                else 0
            )
            self._server.behave(self._bucket, rates={}, stale=0.0)

    def close(self) -> None:
        if self._server:
            self._server.forget(self._bucket)

    def take_down(self, cast: Cast, gang: Gang, count: Callable[[str], None]) -> None:
        """Kill the act's victim at its moment; nothing for a quiet act.

        The others follow, as an agent sees to it.
        """
        way = gang.act.way
        kill = gang.act.kill
        if way == "quiet":
            return
        number = kill.victim % len(gang.ranks)
        hold = self._hold(kill, number)
        came = cast.until(lambda: gang.over or self._moment(gang, hold), _HELD_SECONDS)
        if not came and hold is None:
            return
        if not gang.over:
            pids = self._victims(gang, number)
            for pid in pids:
                self.signal(pid, signal.SIGKILL)
            if pids:
                at_put = hold is not None and came
                count(
                    f"kill of {way} "
                    f"{f'{kill.point} a put of {kill.request}' if at_put else 'by the clock'}"
                )
        if hold is not None and self._server is not None:
            self._server.release(self._bucket, hold)
        if way == "rank":  # the others live on until the agent has noticed
            chance = random.Random(self._schedule.seed)
            cast.until(lambda: gang.over, chance.uniform(0, 0.3))

    def signal(self, pid: int, number: int) -> None:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return

    def _hold(self, kill: Any, number: int) -> int | None:
        if self._server is None or kill.request is None:
            return None
        if kill.request == "commits":
            match = "/commits/"
        else:
            match = rf"/{kill.request}/.*/{number:05d}\."
        return self._server.hold(
            self._bucket, operation=kill.operation, match=match, point=kill.point
        )

    def _moment(self, gang: Gang, hold: int | None) -> bool:
        if hold is None or self._server is None:
            kill = gang.act.kill
            return (
                time.monotonic() - gang.began if kill.early else gang.working_seconds
            ) > kill.after_seconds
        return self._server.held(self._bucket, hold)

    def _victims(self, gang: Gang, number: int) -> list[int]:
        living = [rank.pid for rank in gang.ranks if rank.status is None]
        if gang.act.way == "all":
            return living
        if gang.act.way == "rank":
            if gang.ranks[number].status is None:
                return [gang.ranks[number].pid]
            return []
        uploaders = gang.uploaders()
        return uploaders[number : number + 1] or uploaders[:1]
