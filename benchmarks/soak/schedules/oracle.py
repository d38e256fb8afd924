"""What must hold, from what was told: no store is asked here, only the reports of those who did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ebbflow.training.checkpoint.lineage import CommitRef

# Of the checkpointer: an uploader that says nothing for so long is replaced
_ANSWER_MARGIN_SECONDS = 2.0
_MACHINE_SECONDS = 4.0  # for a machine that is busy with other schedules


@dataclass
class Oracle:
    """Follows the lineage as the reports tell it. problems: what did not hold, each in one line.

    rotten: keys of data and manifests that the store itself has spoilt. hurt_readers: whether reads
    met flipped bits. roomy: the store never was full. rewound: whether any gang was started from an
    older commit than the newest.
    """

    keep_last: int
    deadline_seconds: float
    roomy: bool = True
    rewound: bool = False
    rotten: set[str] = field(default_factory=set)
    hurt_readers: bool = False
    problems: list[str] = field(default_factory=list)
    reported: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    rejected: set[str] = field(default_factory=set)
    # Generation, the commit that it started from
    line: list[tuple[int, str | None]] = field(default_factory=list)

    def opening(self) -> CommitRef | None:
        """The newest commit that a new start may not miss: to be asked before it is made."""
        if not self.line:
            return None
        # Whoever came before may go on, as a zombie: what it commits then does not count
        number, start = self.line[-1]
        refs = [
            CommitRef.from_key(key) for key in self.reported[number] if key not in self.rejected
        ]
        if refs:
            return max(refs, key=lambda ref: ref.step)
        if start is not None and start not in self.rejected:
            return CommitRef.from_key(start)
        return None

    def opened(self, opened: dict[str, Any], expected: CommitRef | None) -> None:
        """Compare the parent with what was known before; excused are rewinds, and commits that the
        store has spoilt.
        """
        parent = opened["parent"] and CommitRef.from_key(opened["parent"])
        number = opened["number"]
        if opened["rewound"]:
            self.rewound = True
            self._trim(parent)
        elif expected is not None and not self._spoilt(expected):
            lost = parent is None or (parent.generation, parent.step) < (
                expected.generation,
                expected.step,
            )
            if lost:
                self._problem(
                    f"generation {number} starts from {opened['parent']}, {expected.key} was "
                    "reported committed"
                )
        if parent is not None and parent.generation not in {number for number, _ in self.line}:
            self._problem(
                f"generation {number} starts from {parent.key}, which is of no generation of the "
                "lineage"
            )
        if number in {number for number, _ in self.line}:
            self._problem(f"generation {number} was opened twice")
        self.line.append((number, opened["parent"]))

    def restored(self, opened: dict[str, Any], reports: list[dict[str, Any]]) -> None:
        """All ranks have the same commit, bit for bit; it is the parent unless that was refused,
        with reason.
        """
        for report in reports:
            for name in report["wrong"]:
                self._problem(
                    f"generation {opened['number']}: {name} is not what {report['key']} was made of"
                )
            for key, reason in report["rejected"]:
                self.rejected.add(key)
                if not self._spoilt(CommitRef.from_key(key)) and not self.hurt_readers:
                    self._problem(f"{key} was refused, and nothing had happened to it: {reason}")
        keys = {report["key"] for report in reports}
        if len(keys) > 1:
            self._problem(
                f"generation {opened['number']}: ranks restored different commits: {sorted(keys)}"
            )
        if keys and opened["parent"] not in keys | self.rejected:
            self._problem(
                f"generation {opened['number']}: restored {min(keys)}, its parent is "
                f"{opened['parent']}"
            )
        # It went back: that is where it really starts from
        if len(keys) == 1 and keys != {opened["parent"]}:
            self.line = [
                (number, min(keys) if number == opened["number"] else start)
                for number, start in self.line
            ]

    def afresh(self, opened: dict[str, Any], ranks: int) -> None:
        """ranks: how many have begun from nothing."""
        if ranks and opened["parent"] is not None:
            self._problem(
                f"generation {opened['number']} began from nothing, its parent is "
                f"{opened['parent']}"
            )

    def committed(self, generation: int, key: str) -> None:
        if CommitRef.from_key(key).generation == generation:  # else it is the one that was restored
            self.reported[generation].add(key)

    def settled(self, who: str, report: dict[str, Any]) -> None:
        limit = self.deadline_seconds + _ANSWER_MARGIN_SECONDS + _MACHINE_SECONDS
        if report["seconds"] > limit:
            self._problem(
                f"{who}: step {report['step']} took {report['seconds']:.1f} s, allowed are "
                f"{limit:.1f} s"
            )

    def judge(self, readers: list[list[dict[str, Any]]], *, ended_well: bool) -> None:
        """readers: of each, its reports. All must say the same."""
        views = [
            [{k: v for k, v in report.items() if k != "at"} for report in reports]
            for reports in readers
        ]
        if any(view != views[0] for view in views[1:]):
            self._problem("two readers do not agree on what is there")
        commits = [report for report in views[0] if report["event"] == "commit"]
        manifests: dict[tuple[int, int], list[str]] = defaultdict(list)
        for commit in commits:
            manifests[(commit["step"], commit["generation"])].append(commit["key"])
        for (step, generation), keys in manifests.items():
            if len(keys) > 1:
                self._problem(
                    f"step {step} of generation {generation} has {len(keys)} manifests: {keys}"
                )
        self._judge_orphans(views[0], set(manifests))
        counting = [commit for commit in commits if commit["unreachable"] is None]
        whole = [commit for commit in counting if not commit["problems"]]
        for commit in counting:
            if commit["problems"] and not self._spoilt(CommitRef.from_key(commit["key"])):
                self._problem(
                    f"{commit['key']} counts and does not verify: {commit['problems'][0]}"
                )
        if ended_well and not whole:
            self._problem("the last gang committed, and no commit verifies")
        if ended_well and not self.rotten:
            self._judge_kept(len(whole))
        expected = self.opening()
        if counting:
            newest = counting[0]
        else:
            newest = None
        if expected is None or self._spoilt(expected):
            return
        if newest is None or (newest["generation"], newest["step"]) < (
            expected.generation,
            expected.step,
        ):
            self._problem(
                f"{expected.key} was reported committed; the newest is {newest and newest['key']}"
            )

    def _judge_kept(self, kept: int) -> None:
        """Nothing was spoilt: exactly so many as the policy says, where there were so many and
        always room for them.
        """
        if kept > self.keep_last:
            self._problem(f"{kept} commits are kept, to keep were {self.keep_last}")
        known = len(self._counting())
        if (
            kept < min(known, self.keep_last)
            and self.roomy
            and not self.rewound
            and not self.hurt_readers
        ):
            self._problem(
                f"{kept} commits are kept, to keep were {self.keep_last} of at least {known}"
            )

    def _counting(self) -> list[str]:
        """Of what was reported committed, what is in the history of the last gang."""
        found: list[str] = []
        limit = None
        for number, start in reversed(self.line):
            if limit is not None and number != limit.generation:
                continue  # it came to nothing that its successor would have started from
            found += [
                key
                for key in self.reported[number]
                if limit is None or CommitRef.from_key(key).step <= limit.step
            ]
            if start is None:
                break
            limit = CommitRef.from_key(start)
        return found

    def _judge_orphans(self, view: list[dict[str, Any]], committed: set[tuple[int, int]]) -> None:
        """After the sweep every object is of a commit that is there. committed: (step, generation)."""
        for report in view:
            if report["event"] == "objects" and report["folder"] in ("data", "index"):
                for key in report["keys"]:
                    _, generation, step, _ = key.split("/")
                    if (int(step), int(generation.split("-")[0])) not in committed:
                        self._problem(f"{key} is of no commit, and retention has left it")

    def _trim(self, parent: CommitRef | None) -> None:
        """After a rewind, what came after the parent is given up."""
        for number, _ in self.line:
            kept = {
                key
                for key in self.reported[number]
                if parent and CommitRef.from_key(key).step <= parent.step
            }
            if parent and number <= parent.generation:
                self.reported[number] = kept
            else:
                self.reported[number] = set()
        if parent is not None:
            self.line = [
                (number, start) for number, start in self.line if number <= parent.generation
            ]

    def _spoilt(self, ref: CommitRef) -> bool:
        """Whether the store has spoilt the manifest, or data of that step and generation."""
        place = f"/{ref.step:012d}/"
        return any(
            key.endswith(ref.key) or (f"/{ref.generation:06d}-" in key and place in key)
            for key in self.rotten
        )

    def _problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)
