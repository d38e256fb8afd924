"""Which commits to keep, as a pure function of what is there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """A commit is kept when any rule keeps it; only whole commits count.

    keep_last: the newest so many. keep_every_steps: also the first commit at or after each multiple of it. keep_best:
    also so many with the lowest `best_metric`, as the commit itself carries it. max_total_bytes: of the data of all
    kept commits; while there is more, the least valued goes: first those by step, the oldest first, then the best, the
    worst first, then the last, the oldest first. The newest commit and pinned ones stay whatever the cap says.
    orphan_seconds: what no reachable commit names is deleted when it is older than this.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    best_metric: str = "held_out_loss"
    max_total_bytes: int | None = None
    orphan_seconds: float = 24 * 3600.0

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1: {self.keep_last}")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RetentionPolicy:
        return cls(**document)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What the choice looks at. size: bytes of data. metric: None without one, or where it is not finite."""

    sha256: str
    step: int
    size: int
    metric: float | None = None
    pinned: bool = False


def choose(commits: Sequence[Kept], policy: RetentionPolicy) -> dict[str, str]:
    """Reason by SHA-256 of each of the whole commits, newest of the lineage first, that is to be kept."""
    last = list(commits[: policy.keep_last])
    every = _first_of_each_window(commits, policy.keep_every_steps)
    scored = [(commit.metric, commit) for commit in commits if commit.metric is not None]
    best = [commit for _, commit in sorted(scored, key=lambda pair: (pair[0], -pair[1].step))[: policy.keep_best]]
    reasons: dict[str, list[str]] = {}
    rules = (("pinned", [commit for commit in commits if commit.pinned]), ("last", last))
    for reason, chosen in (*rules, ("best", best), (f"every {policy.keep_every_steps} steps", every)):
        for commit in chosen:
            reasons.setdefault(commit.sha256, []).append(reason)
    dropped = _beyond_cap(commits, reasons, policy, expendable=[*every, *reversed(best), *reversed(last)])
    return {sha256: ", ".join(found) for sha256, found in reasons.items() if sha256 not in dropped}


def with_room(commits: Sequence[Kept], policy: RetentionPolicy) -> RetentionPolicy:
    """For a store that is full: what makes room for two more like the newest of the whole commits."""
    kept = choose(commits, policy)
    total = sum(commit.size for commit in commits if commit.sha256 in kept)
    return replace(policy, max_total_bytes=max(total - 2 * commits[0].size, 0))


def metric_of(extra: Mapping[str, Any], step: int, name: str) -> float | None:
    """The metric that was measured of this very step's weights, from what the commit carries."""
    metrics = extra.get("metrics")
    if not isinstance(metrics, Mapping) or metrics.get("step") != step:
        return None
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _first_of_each_window(commits: Sequence[Kept], steps: int | None) -> list[Kept]:
    """Oldest first. A later commit never takes the place of one that was chosen before."""
    firsts: dict[int, Kept] = {}
    for commit in commits if steps else ():
        window = commit.step // steps
        if window and (window not in firsts or commit.step < firsts[window].step):
            firsts[window] = commit
    return [firsts[window] for window in sorted(firsts)]


def _beyond_cap(
    commits: Sequence[Kept], kept: Mapping[str, Any], policy: RetentionPolicy, *, expendable: Sequence[Kept]
) -> set[str]:
    """A commit that several rules keep goes only with the last of them."""
    if policy.max_total_bytes is None:
        return set()
    total = sum(commit.size for commit in commits if commit.sha256 in kept)
    places = {commit.sha256: number for number, commit in enumerate(expendable)}
    dropped: set[str] = set()
    for number, commit in enumerate(expendable):
        if total <= policy.max_total_bytes:
            break
        if commit.pinned or commit is commits[0] or places[commit.sha256] != number:
            continue
        dropped.add(commit.sha256)
        total -= commit.size
    return dropped
