"""Plays one schedule: starts gangs, kills, freezes and races them, and lets the oracle judge what
they tell.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.soak.schedules import actors
from benchmarks.soak.schedules.cast import Actor, Cast
from benchmarks.soak.schedules.oracle import Oracle
from benchmarks.soak.schedules.plan import Act, Schedule
from benchmarks.soak.schedules.stage import Stage

_START_SECONDS = 40.0
_TRIES = 8
_NO_ROOM = ("QuotaExceeded", "InsufficientStorage")
# NoSuchUpload: an answer was lost, and the upload is completed or aborted once more.
_REFUSED_BY_RIGHT = {"injected", "NoSuchKey", "NoSuchUpload", *_NO_ROOM}


@dataclass
class Gang:
    """A start of the job: its record, its ranks, and the hold that its victim may fall into."""

    opened: dict[str, Any]
    act: Act
    ranks: list[Actor]
    began: float = field(default_factory=time.monotonic)
    ready: float | None = None

    @property
    def working_seconds(self) -> float:
        """Since all ranks had said that they were there; 0 until then."""
        if self.ready is None and all(rank.first("hello") for rank in self.ranks):
            self.ready = time.monotonic()
        if self.ready is None:
            return 0.0
        return time.monotonic() - self.ready

    @property
    def over(self) -> bool:
        return all(rank.over for rank in self.ranks)

    def uploaders(self) -> list[int]:
        """The newest uploader of each rank that lives."""
        told = [
            rank.all("saving") or rank.all("hello") for rank in self.ranks if rank.status is None
        ]
        return [reports[-1]["uploader"] for reports in told if reports and reports[-1]["uploader"]]


class Director:
    """One schedule on one stage."""

    def __init__(self, schedule: Schedule, stage: Stage) -> None:
        self._schedule = schedule
        self._stage = stage
        self._cast = Cast(stage.environment, stage.log)
        self._oracle = Oracle(
            schedule.keep_last,
            schedule.deadline_seconds,
            roomy="quota_bytes" not in schedule.conduct,
        )
        self._gangs: list[Gang] = []
        self._refusal: list[dict[str, Any]] = []
        self.tally: dict[str, int] = {}

    def play(self) -> list[str]:
        """What did not hold, one line each; empty when all of it did."""
        try:
            for number, act in enumerate(self._schedule.acts):
                last = number == len(self._schedule.acts) - 1
                if last:
                    self._stage.calm()
                self._act(number, act, last=last)
            self._take_reports()
            self._judge()
            self._add_up()
        finally:
            self._cast.end()
        return self._oracle.problems

    def _act(self, number: int, act: Act, *, last: bool) -> None:
        gang = self._start(number, act)
        if gang is None:
            if last:
                told = (
                    "the job could not be started again, though its store was well: "
                    f"{self._refusal}"
                )
                self._oracle.problems.append(told)
            return
        self._gangs.append(gang)
        budget = _START_SECONDS + 2 * len(act.saves) * (self._schedule.deadline_seconds + 4.0)
        if act.way in ("zombie", "frozen"):
            self._leave_behind(gang)
        else:
            self._stage.take_down(self._cast, gang, self._count)
            if not self._cast.until(lambda: gang.over or self._lame(gang), budget):
                self._oracle.problems.append(
                    f"the gang of act {number} was not over after {budget:.0f} s"
                )
            for rank in gang.ranks:
                rank.signal(signal.SIGKILL)
            self._cast.until(lambda: gang.over, 10.0)
        self._take_reports()
        if last:
            self._revive()
            self._expect_success(gang)

    def _start(self, number: int, act: Act) -> Gang | None:
        """Open a generation, as often as it takes, and start its ranks."""
        self._take_reports()
        # A start that is refused may already have fenced off what runs
        expected = self._oracle.opening()
        for attempt in range(_TRIES):
            if attempt < _TRIES // 2:
                rewind = act.rewind
            else:
                rewind = 0  # the commit to go back to may be spoilt
            if attempt == 0:
                count = act.launchers
            else:
                count = 1
            arguments = (self._stage.uri, 10 * number + attempt, rewind)
            launchers = [
                self._cast.start("launcher", actors.launch, *arguments) for _ in range(count)
            ]
            if not self._cast.until(
                lambda these=launchers: all(one.over for one in these), _START_SECONDS
            ):
                self._oracle.problems.append(
                    f"a launcher of act {number} did not end within {_START_SECONDS:.0f} s"
                )
                return None
            opened = [report for launcher in launchers if (report := launcher.first("opened"))]
            if count > 1:
                self._count("two launchers at once")
            for launcher in launchers:
                if launcher.status != 0:
                    self._oracle.problems.append(
                        f"a launcher ended with {launcher.status}: {launcher.told[-1:]}"
                    )
            if len(opened) > 1 and opened[0]["number"] == opened[1]["number"]:
                self._count("launchers that both went on")
                self._oracle.problems.append(
                    f"two launchers both opened generation {opened[0]['number']}"
                )
            if opened:
                return self._gather(max(opened, key=lambda one: one["number"]), act, expected)
            self._count("starts that were refused")
            self._refusal = launchers[-1].told[-1:]
            if any(launcher.first("two_launchers") for launcher in launchers) and count == 1:
                self._operate()
            time.sleep(0.2)
        return None

    def _operate(self) -> None:
        """A launcher finds the record of one that should have withdrawn: somebody has to take it
        away.
        """
        self._count("records given up by hand")
        names = [gang.opened["name"] for gang in self._gangs]
        operator = self._cast.start("operator", actors.give_up, self._stage.uri, names)
        self._cast.until(lambda: operator.over, _START_SECONDS)

    def _gather(self, opened: dict[str, Any], act: Act, expected: Any) -> Gang:
        self._take_rot()
        self._oracle.opened(opened, expected)
        plan = {
            "saves": act.saves,
            "pauses": act.pauses,
            "waits": act.waits,
            "deadline_seconds": self._schedule.deadline_seconds,
            "keep_last": self._schedule.keep_last,
            "large": self._schedule.large,
        }
        meeting = str(self._stage.folder / f"meeting-{opened['name']}")
        ranks = []
        for rank in range(act.world_size):
            place = {"rank": rank, "world_size": act.world_size, "meeting": meeting}
            ranks.append(
                self._cast.start(f"rank {rank}", actors.work, self._stage.uri, opened, place, plan)
            )
        self._count("gangs")
        if opened["back"]:
            self._count("rewinds")
        return Gang(opened, act, ranks)

    def _leave_behind(self, gang: Gang) -> None:
        """A zombie goes on while its successor runs; a frozen one comes back once the successor has
        committed.
        """
        self._cast.until(
            lambda: gang.over or gang.working_seconds > gang.act.overlap_seconds, _START_SECONDS
        )
        if gang.act.way == "frozen":
            for pid in [
                *gang.uploaders(),
                *(rank.pid for rank in gang.ranks if rank.status is None),
            ]:
                self._stage.signal(pid, signal.SIGSTOP)
        if not gang.over:
            self._count("frozen gangs" if gang.act.way == "frozen" else "zombies")

    def _revive(self) -> None:
        """Let the frozen ones act, and all that were left behind come to their end."""
        old = self._gangs[:-1]
        for gang in old:
            for pid in [
                *gang.uploaders(),
                *(rank.pid for rank in gang.ranks if rank.status is None),
            ]:
                self._stage.signal(pid, signal.SIGCONT)
        if not self._cast.until(lambda: all(gang.over or self._lame(gang) for gang in old), 60.0):
            self._oracle.problems.append("a gang that was left behind was not over after 60 s")
        for gang in old:
            for rank in gang.ranks:
                rank.signal(signal.SIGKILL)
        self._cast.until(lambda: all(gang.over for gang in old), 10.0)

    def _lame(self, gang: Gang) -> bool:
        """A rank has ended otherwise than well: an agent would end the others."""
        return any(rank.status not in (None, 0) for rank in gang.ranks)

    def _take_reports(self) -> None:
        self._cast.listen(0)
        self._take_rot()
        for gang in self._gangs:
            number = gang.opened["number"]
            for rank in gang.ranks:
                for report in rank.all("committed"):
                    self._oracle.committed(number, report["key"])
                for report in (*rank.all("settled"), *rank.all("failed")):
                    frozen = gang.act.way == "frozen"
                    if not frozen:
                        self._oracle.settled(f"generation {number}, {rank.name}", report)
            self._oracle.restored(
                gang.opened, [report for rank in gang.ranks for report in rank.all("restored")]
            )
            if self._oracle.hurt_readers and _nothing_verified(gang):
                self._oracle.rejected |= set(gang.opened["candidates"])
            self._oracle.afresh(gang.opened, sum(len(rank.all("afresh")) for rank in gang.ranks))

    def _take_rot(self) -> None:
        told = self._stage.told()
        self._oracle.rotten = set(told["rotten"])
        self._oracle.hurt_readers = bool(told["met"].get("flip"))

    def _expect_success(self, gang: Gang) -> None:
        errors = [report for rank in gang.ranks for report in rank.all("error")]
        if self._oracle.rotten and _nothing_verified(gang):
            # Said loudly, which is all that can be done
            self._count("ends with all commits spoilt")
            return
        for rank in gang.ranks:
            if rank.first("done") is None:
                told = rank.told[-1:]
                self._oracle.problems.append(
                    f"the last gang's {rank.name} ended with {rank.status}: {told} {errors}"
                )

    def _judge(self) -> None:
        sweeper = self._cast.start(
            "sweeper", actors.sweep, self._stage.uri, self._schedule.keep_last
        )
        if not self._cast.until(lambda: sweeper.over, _START_SECONDS) or sweeper.status != 0:
            self._oracle.problems.append(
                f"retention ended with {sweeper.status}: {sweeper.told[-1:]}"
            )
        readers = [self._cast.start("reader", actors.read, self._stage.uri) for _ in range(2)]
        if not self._cast.until(lambda: all(reader.over for reader in readers), _START_SECONDS):
            self._oracle.problems.append(f"the readers did not end within {_START_SECONDS:.0f} s")
            return
        for reader in readers:
            if reader.status != 0:
                self._oracle.problems.append(
                    f"a reader ended with {reader.status}: {reader.told[-1:]}"
                )
        well = (
            bool(self._gangs)
            and self._gangs[-1].over
            and all(r.first("done") for r in self._gangs[-1].ranks)
        )
        self._oracle.judge([reader.told for reader in readers], ended_well=well)

        self._judge_server(sweeper)

    def _judge_server(self, sweeper: Actor) -> None:
        """It is strict: what it refuses, but for what was injected, S3 would refuse too."""
        told = self._stage.told()
        for code in sorted(set(told["refused"]) - _REFUSED_BY_RIGHT):
            self._oracle.problems.append(
                f"the store refused {told['refused'][code]} requests: {code}"
            )
        if told["uploads"]:
            self._oracle.problems.append(
                f"the sweep has left unfinished uploads: {told['uploads']}"
            )
        swept = sweeper.first("swept")
        self._count(
            "unfinished uploads swept", len(swept["uploads"]) if swept and self._stage.remote else 0
        )
        self._count("multipart uploads", told["requests"].get("create", 0))
        self._count("puts without room", sum(told["refused"].get(code, 0) for code in _NO_ROOM))

    def _add_up(self) -> None:
        """What the gangs told, for those who want to see what the schedules went through."""
        for gang in self._gangs:
            for name, event in (("saves", "saving"), ("restores", "restored")):
                self._count(name, len(gang.ranks[0].all(event)))
            restored = gang.ranks[0].first("restored") or {"rejected": [], "resized": False}
            self._count("restores from an older commit", bool(restored["rejected"]))
            self._count("restores at another world size", bool(restored["resized"]))
            self._count(
                "gangs with a save that failed", any(rank.first("failed") for rank in gang.ranks)
            )
            self._count("gangs superseded", any(rank.first("superseded") for rank in gang.ranks))
            self._count(
                "commits",
                len({report["key"] for rank in gang.ranks for report in rank.all("committed")}),
            )

    def _count(self, what: str, times: int = 1) -> None:
        if times:
            self.tally[what] = self.tally.get(what, 0) + times


def _nothing_verified(gang: Gang) -> bool:
    """Whether a rank ended because it found every commit bad, and said so."""
    return any(
        "commits verifies" in report["message"]
        for rank in gang.ranks
        for report in rank.all("error")
    )
