"""What a rank leaves behind: a data loader's process that is stuck in the user's own code does not hear of its end.

All that a rank starts stays below the keeper (`ebbflow.infra.keeper`). Where there is none, because the system has no
subreapers or the keeper was killed, what stayed in the rank's own session is found. (What a rank's main thread forks
the kernel ends with it: `ebbflow.infra.process.tie_forked_children`.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ebbflow.infra.keeper import Keeper, end_all
from ebbflow.infra.process import ProcessStat, all_processes, descendants, process_stat

_KILLED_SECONDS = 3.0


class Session:
    """Of one rank. To be made when it was just started. parents: who may have started it."""

    def __init__(self, pid: int, parents: Collection[int]) -> None:
        stat = process_stat(pid)
        # A rank that is gone already has left nothing; and a number that is not a rank's must not be ended.
        self._leader = stat if stat is not None and stat.parent in parents else None

    def left_behind(self, living: Sequence[ProcessStat]) -> list[ProcessStat]:
        """The processes of `living` that belong to this rank, the rank itself left out."""
        leader = self._leader
        if leader is None:
            return []
        # The kernel does not give a number anew while a session of that number has members: a process that has it now
        # and is not the rank has a session of its own.
        now = process_stat(leader.pid)
        if now is not None and now.started_ticks != leader.started_ticks:
            return []
        return [
            one
            for one in living
            if one.pid != leader.pid and one.session == leader.pid and one.started_ticks >= leader.started_ticks
        ]


def end_left_behind(
    sessions: Sequence[Session],
    keeper: Keeper | None,
    *,
    spare: Collection[int] = (),
    spare_trees: Collection[int] = (),
) -> list[int]:
    """Kill what is in these sessions, and all that is below the keeper but `spare` and `spare_trees` (with all below
    them). Returns what is left: killed, and in uninterruptible sleep (state D)."""
    spared = [stat for pid in {*spare, *spare_trees} if (stat := process_stat(pid)) is not None]

    def find() -> list[ProcessStat]:
        below = [] if keeper is None or keeper.lost else descendants(keeper.pid, spare, spare_trees)
        if below:
            return below
        living = list(all_processes())
        return [one for session in sessions for one in session.left_behind(living)]

    return end_all(find, _KILLED_SECONDS, spare_groups={stat.group for stat in spared})
