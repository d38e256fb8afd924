"""Run one schedule: start gangs, kill, freeze and race them, and judge what they report."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.schedules import programs
from tests.support.schedules.oracle import Oracle
from tests.support.schedules.plan import Act, Schedule
from tests.support.schedules.processes import Process, Processes
from tests.support.schedules.store import ScheduleStore

_START_SECONDS = 40.0
_HELD_SECONDS = 5.0  # a victim whose request never comes is killed after this time
_LEFT_BEHIND_SECONDS = 60.0
# The last gang has a sound store and must commit, however busy the machine is
_LAST_DEADLINE_SECONDS = 30.0
_TRIES = 8
_NO_ROOM = {"QuotaExceeded", "InsufficientStorage"}
# NoSuchUpload: an answer was lost, and the upload is completed or aborted once more
_EXPECTED_REFUSALS = {"injected", "NoSuchKey", "NoSuchUpload"} | _NO_ROOM


@dataclass
class Gang:
    """A started gang: its launcher's report and its ranks."""

    opened: dict[str, Any]
    act: Act
    deadline_seconds: float
    ranks: list[Process]
    began: float = field(default_factory=time.monotonic)
    ready: float | None = None

    @property
    def working_seconds(self) -> float:
        """The time since all ranks have said that they are there; 0 until then."""
        if self.ready is None and all(rank.first("hello") for rank in self.ranks):
            self.ready = time.monotonic()
        if self.ready is None:
            return 0.0
        return time.monotonic() - self.ready

    @property
    def is_over(self) -> bool:
        return all(rank.is_over for rank in self.ranks)

    @property
    def has_failed_rank(self) -> bool:
        """Whether a rank ended without success, upon which an agent would end the others."""
        return any(rank.status not in (None, 0) for rank in self.ranks)

    @property
    def found_all_damaged(self) -> bool:
        """Whether a rank found that no commit verifies."""
        return any(rank.first("none_verified") for rank in self.ranks)

    def living(self) -> list[Process]:
        return [rank for rank in self.ranks if rank.status is None]

    def uploaders(self) -> list[int]:
        """List the pids of the newest uploader of each rank that lives."""
        pids = []
        for rank in self.living():
            reports = rank.all("saving") or rank.all("hello")
            if reports and reports[-1]["uploader"]:
                pids.append(reports[-1]["uploader"])
        return pids

    def all(self, event: str) -> list[dict[str, Any]]:
        """List the reports of one kind of all ranks."""
        reports = []
        for rank in self.ranks:
            reports += rank.all(event)
        return reports

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that live, and to their uploaders."""
        for pid in self.uploaders():
            _signal(pid, number)
        for rank in self.living():
            rank.signal(number)

    def victims(self, rank: int) -> list[int]:
        """List the pids of the processes that the act kills."""
        match self.act.way:
            case "all":
                return [process.pid for process in self.living()]
            case "rank":
                victim = self.ranks[rank]
                return [victim.pid] if victim.status is None else []
            case _:
                uploaders = self.uploaders()
                return uploaders[rank : rank + 1] or uploaders[:1]


class ScheduleRunner:
    """A runner of one schedule.

    Attributes:
        tally: How often things happened, by name.
    """

    def __init__(self, schedule: Schedule, folder: Path, store: ScheduleStore) -> None:
        self._schedule = schedule
        self._folder = folder
        self._store = store
        self._processes = Processes(store.environment, folder / "output.log")
        self._oracle = Oracle(
            schedule.keep_last,
            roomy="quota_bytes" not in schedule.conduct,
        )
        self._gangs: list[Gang] = []
        self._refusal: list[dict[str, Any]] = []
        self.tally: Counter[str] = Counter()

    def run(self) -> list[str]:
        """Return what did not hold, one line each."""
        *acts, last_act = self._schedule.acts
        try:
            for number, act in enumerate(acts):
                self._run_act(number, act, self._schedule.deadline_seconds)
            self._store.calm()
            last_gang = self._run_act(len(acts), last_act, _LAST_DEADLINE_SECONDS)
            if last_gang is None:
                self._oracle.problems.append(
                    "the job could not be started again, though its store was well: "
                    f"{self._refusal}"
                )
            else:
                self._end_left_behind()
                self._judge_last_gang(last_gang)
            self._take_reports()
            self._judge_store()
            self._add_up()
        finally:
            self._processes.end()
        return self._oracle.problems

    def _run_act(self, number: int, act: Act, deadline_seconds: float) -> Gang | None:
        """Start a gang and let it end as the act says. Return None if every start is refused."""
        gang = self._start_gang(number, act, deadline_seconds)
        if gang is None:
            return None
        self._gangs.append(gang)
        if act.way in ("zombie", "frozen"):
            self._leave_behind(gang)
        else:
            if act.way != "quiet":
                self._kill(gang)
            seconds = _START_SECONDS + 2 * len(act.saves) * (deadline_seconds + 4.0)
            if not self._processes.wait_until(lambda: _is_ending(gang), seconds):
                self._oracle.problems.append(
                    f"the gang of act {number} was not over after {seconds:.0f} s"
                )
            for rank in gang.ranks:
                rank.signal(signal.SIGKILL)
            self._processes.wait_for(gang.ranks, 10.0)
        self._take_reports()
        return gang

    def _start_gang(self, number: int, act: Act, deadline_seconds: float) -> Gang | None:
        """Open a generation, in several tries if necessary, and start its ranks."""
        self._take_reports()
        # A refused start may already have superseded the running generation
        expected = self._oracle.expected_parent()
        for attempt in range(_TRIES):
            rewind = act.rewind
            if attempt >= _TRIES // 2:
                rewind = 0  # the commit to go back to may be damaged
            count = 1
            if attempt == 0:
                count = act.launchers
            launchers = []
            for _ in range(count):
                launchers.append(
                    self._processes.start(
                        "launcher",
                        programs.launch,
                        self._store.uri,
                        10 * number + attempt,
                        rewind,
                    )
                )
            if not self._processes.wait_for(launchers, _START_SECONDS):
                self._oracle.problems.append(
                    f"a launcher of act {number} did not end within {_START_SECONDS:.0f} s"
                )
                return None
            opened = self._judge_launchers(launchers)
            if opened is not None:
                self._take_damage()
                self._oracle.judge_opened(opened, expected)
                return self._start_ranks(opened, act, deadline_seconds)
            self.tally["starts that were refused"] += 1
            self._refusal = launchers[-1].reports[-1:]
            if count == 1 and launchers[0].first("two_launchers"):
                self._delete_rival_records()
            time.sleep(0.2)
        return None

    def _judge_launchers(self, launchers: list[Process]) -> dict[str, Any] | None:
        """Return the report of the launcher that opened the newest generation, if one did."""
        opened = []
        for launcher in launchers:
            opened += launcher.all("opened")
            if launcher.status != 0:
                self._oracle.problems.append(
                    f"a launcher ended with {launcher.status}: {launcher.reports[-1:]}"
                )
        if len(launchers) > 1:
            self.tally["two launchers at once"] += 1
        if len(opened) > 1 and opened[0]["number"] == opened[1]["number"]:
            self._oracle.problems.append(
                f"two launchers both opened generation {opened[0]['number']}"
            )
        return max(opened, key=lambda report: report["number"], default=None)

    def _delete_rival_records(self) -> None:
        """Act as the operator to whom a launcher reports another launcher's record."""
        self.tally["records deleted by hand"] += 1
        started = [gang.opened["name"] for gang in self._gangs]
        operator = self._processes.start(
            "operator", programs.delete_rival_records, self._store.uri, started
        )
        self._processes.wait_for([operator], _START_SECONDS)

    def _start_ranks(self, opened: dict[str, Any], act: Act, deadline_seconds: float) -> Gang:
        meeting = str(self._folder / f"meeting-{opened['name']}")
        ranks = []
        for rank in range(act.world_size):
            place = programs.Place(rank=rank, world_size=act.world_size, meeting=meeting)
            ranks.append(
                self._processes.start(
                    f"rank {rank}",
                    programs.work,
                    self._store.uri,
                    opened,
                    place,
                    act,
                    replace(self._schedule, deadline_seconds=deadline_seconds),
                )
            )
        self.tally["gangs"] += 1
        if opened["back"]:
            self.tally["rewinds"] += 1
        return Gang(opened, act, deadline_seconds, ranks)

    def _kill(self, gang: Gang) -> None:
        """Kill the act's victim at its moment."""
        kill = gang.act.kill
        rank = kill.victim % len(gang.ranks)
        hold = self._store.hold(kill, rank)
        came = self._processes.wait_until(
            lambda: gang.is_over or self._is_moment(gang, hold), _HELD_SECONDS
        )
        if not came and hold is None:
            return
        if not gang.is_over:
            pids = gang.victims(rank)
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            if pids and hold is not None and came:
                moment = f"{kill.point} a put of {kill.request}"
                self.tally[f"kill of {gang.act.way} {moment}"] += 1
            elif pids:
                self.tally[f"kill of {gang.act.way} by the clock"] += 1
        if hold is not None:
            self._store.release(hold)
        if gang.act.way == "rank":  # the others live until the agent has noticed
            chance = random.Random(self._schedule.seed)
            self._processes.wait_until(lambda: gang.is_over, chance.uniform(0, 0.3))

    def _is_moment(self, gang: Gang, hold: int | None) -> bool:
        if hold is not None:
            return self._store.is_held(hold)
        kill = gang.act.kill
        if kill.early:
            return time.monotonic() - gang.began > kill.after_seconds
        return gang.working_seconds > kill.after_seconds

    def _leave_behind(self, gang: Gang) -> None:
        """Let a gang work for a while, and go on while its successor works.

        A frozen gang is stopped until the last gang has committed.
        """
        seconds = gang.act.overlap_seconds
        self._processes.wait_until(
            lambda: gang.is_over or gang.working_seconds > seconds, _START_SECONDS
        )
        if gang.act.way == "frozen":
            gang.signal(signal.SIGSTOP)
            name = "frozen gangs"
        else:
            name = "zombies"
        if not gang.is_over:
            self.tally[name] += 1

    def _end_left_behind(self) -> None:
        """Let frozen gangs go on, and wait for the end of all gangs that were left behind."""
        old = self._gangs[:-1]
        for gang in old:
            gang.signal(signal.SIGCONT)
        if not self._processes.wait_until(
            lambda: all(_is_ending(gang) for gang in old), _LEFT_BEHIND_SECONDS
        ):
            self._oracle.problems.append(
                f"a gang that was left behind was not over after {_LEFT_BEHIND_SECONDS:.0f} s"
            )
        for gang in old:
            for rank in gang.ranks:
                rank.signal(signal.SIGKILL)
        self._processes.wait_until(lambda: all(gang.is_over for gang in old), 10.0)

    def _take_reports(self) -> None:
        """Give the oracle all reports of the ranks so far."""
        self._processes.listen(0)
        self._take_damage()
        for gang in self._gangs:
            number = gang.opened["number"]
            for report in gang.all("committed"):
                self._oracle.add_commit(number, report["key"])
            if gang.act.way != "frozen":
                for rank in gang.ranks:
                    for report in (*rank.all("settled"), *rank.all("failed")):
                        name = f"generation {number}, {rank.name}"
                        self._oracle.judge_seconds(name, report, gang.deadline_seconds)
            self._oracle.judge_restores(gang.opened, gang.all("restored"))
            if self._oracle.hurt_readers and gang.found_all_damaged:
                self._oracle.rejected |= set(gang.opened["candidates"])
            self._oracle.judge_afresh(gang.opened, len(gang.all("afresh")))

    def _take_damage(self) -> None:
        told = self._store.told()
        self._oracle.rotten = set(told["rotten"])
        self._oracle.hurt_readers = bool(told["met"].get("flip"))

    def _judge_last_gang(self, gang: Gang) -> None:
        if self._oracle.rotten and gang.found_all_damaged:
            # A clear error is all that can be expected
            self.tally["ends with all commits damaged"] += 1
            return
        errors = gang.all("error")
        for rank in gang.ranks:
            if rank.first("done") is None:
                self._oracle.problems.append(
                    f"the last gang's {rank.name} ended with {rank.status}: {rank.reports[-1:]} "
                    f"{errors}"
                )

    def _judge_store(self) -> None:
        sweeper = self._processes.start(
            "sweeper", programs.sweep, self._store.uri, self._schedule.keep_last
        )
        if not self._processes.wait_for([sweeper], _START_SECONDS) or sweeper.status != 0:
            self._oracle.problems.append(
                f"retention ended with {sweeper.status}: {sweeper.reports[-1:]}"
            )
        readers = []
        for _ in range(2):
            readers.append(self._processes.start("reader", programs.read, self._store.uri))
        if not self._processes.wait_for(readers, _START_SECONDS):
            self._oracle.problems.append(f"the readers did not end within {_START_SECONDS:.0f} s")
            return
        for reader in readers:
            if reader.status != 0:
                self._oracle.problems.append(
                    f"a reader ended with {reader.status}: {reader.reports[-1:]}"
                )
        ended_well = False
        if self._gangs:
            last = self._gangs[-1]
            ended_well = last.is_over and all(rank.first("done") for rank in last.ranks)
        self._oracle.judge_store([reader.reports for reader in readers], ended_well=ended_well)
        self._judge_server(sweeper)

    def _judge_server(self, sweeper: Process) -> None:
        """Check that the server refused nothing else than it was to refuse.

        It is strict: S3 would refuse the same requests.
        """
        told = self._store.told()
        refused = told["refused"]
        for code in sorted(set(refused) - _EXPECTED_REFUSALS):
            self._oracle.problems.append(f"the store refused {refused[code]} requests: {code}")
        if told["uploads"]:
            self._oracle.problems.append(
                f"the sweep has left unfinished uploads: {told['uploads']}"
            )
        swept = sweeper.first("swept")
        if swept is not None and self._store.is_remote:
            self.tally["unfinished uploads swept"] += len(swept["uploads"])
        self.tally["multipart uploads"] += told["requests"].get("create", 0)
        self.tally["puts without room"] += sum(refused.get(code, 0) for code in _NO_ROOM)

    def _add_up(self) -> None:
        """Count what the gangs went through."""
        for gang in self._gangs:
            first_rank = gang.ranks[0]
            self.tally["saves"] += len(first_rank.all("saving"))
            self.tally["commits"] += len({report["key"] for report in gang.all("committed")})
            restored = first_rank.first("restored")
            if restored is not None:
                self.tally["restores"] += 1
                self.tally["restores from an older commit"] += bool(restored["rejected"])
                self.tally["restores at another world size"] += restored["resized"]
            self.tally["gangs with a save that failed"] += bool(gang.all("failed"))
            self.tally["gangs superseded"] += bool(gang.all("superseded"))


def _is_ending(gang: Gang) -> bool:
    return gang.is_over or gang.has_failed_rank


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
