"""Judge a schedule by the reports of its processes alone, without the store."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ebbflow.training.checkpoint.lineage import CommitRef

# Of the checkpointer, which replaces an uploader that does not answer for so long
_ANSWER_MARGIN_SECONDS = 2.0
_MACHINE_SECONDS = 4.0  # for a machine that is busy with other schedules


@dataclass
class Oracle:
    """The lineage as the reports tell it, and what does not hold.

    Attributes:
        roomy: Whether the store was never full.
        rewound: Whether any gang was started from an older commit than the newest.
        rotten: Keys of objects that the store itself has damaged.
        hurt_readers: Whether reads met flipped bits.
        problems: What did not hold, one line each.
        reported: The keys of the commits that a generation has reported.
        rejected: Keys of commits that a restore has refused.
        line: Each generation with the commit that it started from.
    """

    keep_last: int
    roomy: bool = True
    rewound: bool = False
    rotten: set[str] = field(default_factory=set)
    hurt_readers: bool = False
    problems: list[str] = field(default_factory=list)
    reported: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    rejected: set[str] = field(default_factory=set)
    line: list[tuple[int, str | None]] = field(default_factory=list)

    def expected_parent(self) -> CommitRef | None:
        """The newest commit that a start may not miss. To be asked before the start."""
        if not self.line:
            return None
        # An earlier generation may go on as a zombie: what it commits then does not count
        number, start = self.line[-1]
        refs = []
        for key in self.reported[number]:
            if key not in self.rejected:
                refs.append(CommitRef.from_key(key))
        if refs:
            return max(refs, key=lambda ref: ref.step)
        if start is not None and start not in self.rejected:
            return CommitRef.from_key(start)
        return None

    def judge_opened(self, opened: dict[str, Any], expected: CommitRef | None) -> None:
        """Compare the parent of a new generation with the expected one.

        Rewinds and commits that the store has damaged are no problem.
        """
        number = opened["number"]
        parent = None
        if opened["parent"] is not None:
            parent = CommitRef.from_key(opened["parent"])
        if opened["rewound"]:
            self.rewound = True
            self._give_up_later_commits(parent)
        elif expected is not None and not self._is_rotten(expected) and _is_older(parent, expected):
            self._add_problem(
                f"generation {number} starts from {opened['parent']}, {expected.key} was "
                "reported committed"
            )
        numbers = {opened_before for opened_before, _ in self.line}
        if parent is not None and parent.generation not in numbers:
            self._add_problem(
                f"generation {number} starts from {parent.key}, which is of no generation of the "
                "lineage"
            )
        if number in numbers:
            self._add_problem(f"generation {number} was opened twice")
        self.line.append((number, opened["parent"]))

    def judge_restores(self, opened: dict[str, Any], reports: list[dict[str, Any]]) -> None:
        """Check that all ranks restored the same commit, bit for bit.

        It must be the generation's parent, unless the parent was refused with reason.
        """
        number = opened["number"]
        parent = opened["parent"]
        for report in reports:
            for name in report["wrong"]:
                self._add_problem(
                    f"generation {number}: {name} is not what {report['key']} was made of"
                )
            for key, reason in report["rejected"]:
                self.rejected.add(key)
                if not self._is_rotten(CommitRef.from_key(key)) and not self.hurt_readers:
                    self._add_problem(
                        f"{key} was refused, and nothing had happened to it: {reason}"
                    )
        keys = {report["key"] for report in reports}
        if len(keys) > 1:
            self._add_problem(
                f"generation {number}: ranks restored different commits: {sorted(keys)}"
            )
        if keys and parent not in keys | self.rejected:
            self._add_problem(f"generation {number}: restored {min(keys)}, its parent is {parent}")
        if len(keys) == 1 and keys != {parent}:
            self._change_start(number, min(keys))

    def judge_afresh(self, opened: dict[str, Any], ranks: int) -> None:
        """Check that the `ranks` which began from nothing had nothing to restore."""
        if ranks and opened["parent"] is not None:
            self._add_problem(
                f"generation {opened['number']} began from nothing, its parent is "
                f"{opened['parent']}"
            )

    def add_commit(self, generation: int, key: str) -> None:
        is_restored_one = CommitRef.from_key(key).generation != generation
        if not is_restored_one:
            self.reported[generation].add(key)

    def judge_seconds(self, name: str, report: dict[str, Any], deadline_seconds: float) -> None:
        """Check that a save ended, with success or without, by its deadline."""
        limit = deadline_seconds + _ANSWER_MARGIN_SECONDS + _MACHINE_SECONDS
        if report["seconds"] > limit:
            self._add_problem(
                f"{name}: step {report['step']} took {report['seconds']:.1f} s, allowed are "
                f"{limit:.1f} s"
            )

    def judge_store(self, readers: list[list[dict[str, Any]]], *, ended_well: bool) -> None:
        """Judge what is in the store at the end.

        Args:
            readers: The reports of each reader, which must be the same.
            ended_well: Whether the last gang did all that it had to do.
        """
        views = [_without_times(reports) for reports in readers]
        view = views[0]
        if any(other != view for other in views[1:]):
            self._add_problem("two readers do not agree on what is there")
        commits = [report for report in view if report["event"] == "commit"]
        self._judge_manifests(commits)
        self._judge_orphans(view, {(commit["step"], commit["generation"]) for commit in commits})
        counting = [commit for commit in commits if commit["unreachable"] is None]
        whole = [commit for commit in counting if not commit["problems"]]
        for commit in counting:
            if commit["problems"] and not self._is_rotten(CommitRef.from_key(commit["key"])):
                self._add_problem(
                    f"{commit['key']} counts and does not verify: {commit['problems'][0]}"
                )
        if ended_well and not whole:
            self._add_problem("the last gang committed, and no commit verifies")
        if ended_well and not self.rotten:
            self._judge_kept(len(whole))
        newest = None
        if counting:
            newest = CommitRef.from_key(counting[0]["key"])
        expected = self.expected_parent()
        if expected is None or self._is_rotten(expected):
            return
        if _is_older(newest, expected):
            self._add_problem(
                f"{expected.key} was reported committed; the newest is {newest and newest.key}"
            )

    def _judge_manifests(self, commits: list[dict[str, Any]]) -> None:
        keys_of: dict[tuple[int, int], list[str]] = defaultdict(list)
        for commit in commits:
            keys_of[commit["step"], commit["generation"]].append(commit["key"])
        for (step, generation), keys in keys_of.items():
            if len(keys) > 1:
                self._add_problem(
                    f"step {step} of generation {generation} has {len(keys)} manifests: {keys}"
                )

    def _judge_kept(self, kept: int) -> None:
        """Compare the count of commits with the policy, if the store has damaged nothing.

        Fewer may be left if there never were as many, or if the store had no room for them.
        """
        if kept > self.keep_last:
            self._add_problem(f"{kept} commits are kept, to keep were {self.keep_last}")
        if not self.roomy or self.rewound or self.hurt_readers:
            return
        known = self._count_commits_in_history()
        if kept < min(known, self.keep_last):
            self._add_problem(
                f"{kept} commits are kept, to keep were {self.keep_last} of at least {known}"
            )

    def _count_commits_in_history(self) -> int:
        """Count the reported commits that are in the history of the last gang."""
        count = 0
        limit = None
        for number, start in reversed(self.line):
            if limit is not None and number != limit.generation:
                continue  # no later generation started from its commits
            for key in self.reported[number]:
                if limit is None or CommitRef.from_key(key).step <= limit.step:
                    count += 1
            if start is None:
                break
            limit = CommitRef.from_key(start)
        return count

    def _judge_orphans(self, view: list[dict[str, Any]], committed: set[tuple[int, int]]) -> None:
        """Check that after the sweep every object is of a commit.

        Args:
            committed: Step and generation of all commits.
        """
        for report in view:
            if report["event"] != "objects" or report["folder"] not in ("data", "index"):
                continue
            for key in report["keys"]:
                _, generation, step, _ = key.split("/")
                if (int(step), int(generation.split("-")[0])) not in committed:
                    self._add_problem(f"{key} is of no commit, and retention has left it")

    def _change_start(self, number: int, key: str) -> None:
        """Note that a generation restored another commit than its parent."""
        for place, (generation, _) in enumerate(self.line):
            if generation == number:
                self.line[place] = (number, key)

    def _give_up_later_commits(self, parent: CommitRef | None) -> None:
        """Forget the commits after the parent, because of a rewind."""
        for number, _ in self.line:
            kept = set()
            if parent is not None and number <= parent.generation:
                for key in self.reported[number]:
                    if CommitRef.from_key(key).step <= parent.step:
                        kept.add(key)
            self.reported[number] = kept
        if parent is not None:
            self.line = [opened for opened in self.line if opened[0] <= parent.generation]

    def _is_rotten(self, ref: CommitRef) -> bool:
        """Whether the store has damaged the manifest, or data of that step and generation."""
        generation = f"/{ref.generation:06d}-"
        step = f"/{ref.step:012d}/"
        return any(
            key.endswith(ref.key) or (generation in key and step in key) for key in self.rotten
        )

    def _add_problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)


def _is_older(ref: CommitRef | None, other: CommitRef) -> bool:
    if ref is None:
        return True
    return (ref.generation, ref.step) < (other.generation, other.step)


def _without_times(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    view = []
    for report in reports:
        view.append({key: value for key, value in report.items() if key != "at"})
    return view
