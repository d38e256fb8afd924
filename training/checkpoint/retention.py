"""Choose which commits a job keeps, and delete the others.

The tombstone is also half of an agreement with two others who write first and look afterwards, as this does: who opens
a generation with the commit as its parent, and who pins it. Whichever comes second sees the first and gives way.

Never deleted: the newest commit that looks whole, pinned ones, and anything at all while no commit looks whole. What is
quarantined or outside the lineage (a zombie's, a rewind's) is kept for a while, for a look, and then goes too.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreForbidden
from ebbflow.infra.layout import (
    TOMBSTONE_TAGS,
    data_prefix,
    index_prefix,
    parse_commit_key,
    pin_key,
    quarantine_key,
    signature_key,
    tombstone_key,
    verified_key,
)
from ebbflow.infra.store import ObjectMeta, Store
from ebbflow.infra.store.objects import StoreClock
from ebbflow.training.checkpoint.lineage import CommitRef, TracedCommit, newest_generation_number, trace_lineage
from ebbflow.training.checkpoint.manifest import VERSION, CheckpointId, Manifest
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.checkpoint.verified_io import fetch_verified, seal, unseal
from ebbflow.training.errors import CorruptCommit, GenerationSuperseded


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
class WholeCommit:
    """What the choice looks at. size: bytes of data. metric: None without one, or where it is not finite."""

    sha256: str
    step: int
    size: int
    metric: float | None = None
    pinned: bool = False


def choose_commits(commits: Sequence[WholeCommit], policy: RetentionPolicy) -> dict[str, str]:
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


def policy_with_room(commits: Sequence[WholeCommit], policy: RetentionPolicy) -> RetentionPolicy:
    """For a store that is full: what makes room for two more like the newest of the whole commits."""
    kept = choose_commits(commits, policy)
    total = sum(commit.size for commit in commits if commit.sha256 in kept)
    return replace(policy, max_total_bytes=max(total - 2 * commits[0].size, 0))


def metric_at_step(extra: Mapping[str, Any], step: int, name: str) -> float | None:
    """The metric that was measured of this very step's weights, from what the commit carries."""
    metrics = extra.get("metrics")
    if not isinstance(metrics, Mapping) or metrics.get("step") != step:
        return None
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _first_of_each_window(commits: Sequence[WholeCommit], steps: int | None) -> list[WholeCommit]:
    """Oldest first. A later commit never takes the place of one that was chosen before."""
    firsts: dict[int, WholeCommit] = {}
    for commit in commits if steps else ():
        window = commit.step // steps
        if window and (window not in firsts or commit.step < firsts[window].step):
            firsts[window] = commit
    return [firsts[window] for window in sorted(firsts)]


def _beyond_cap(
    commits: Sequence[WholeCommit],
    kept: Mapping[str, Any],
    policy: RetentionPolicy,
    *,
    expendable: Sequence[WholeCommit],
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


_PARALLEL = 8


def delete_commit(store: Store, ref: CommitRef, generation: str | None, *, newest: int, full: bool = False) -> bool:
    """False when it was pinned meanwhile. generation: the name of its generation; None, where nobody can read it,
    leaves its data to the orphans. newest: the generation on whose behalf. full: there may be no room for a tombstone
    either; then the manifest goes first all the same, and a deletion that is cut short leaves orphans.

    Raises GenerationSuperseded, and deletes nothing, when a newer one is on record: the lineage is then another gang's.
    """
    tombstone = {"version": VERSION, "key": ref.key, "generation": generation, "step": ref.step}
    if signer() is not None:
        tombstone["signed"] = True
    try:
        _put_tombstone(store, ref.sha256, seal(tombstone))
    except StoreError:
        if not full:
            raise
    if (number := newest_generation_number(store, near=newest)) > newest:
        store.delete(tombstone_key(ref.sha256))
        raise superseded_error(store, number, newest)
    if store.head(pin_key(ref.sha256)) is not None:
        store.delete(tombstone_key(ref.sha256))
        return False
    _delete_objects(store, tombstone)
    return True


def finish_deletions(store: Store, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Take up what an earlier run left, and drop the tombstones of what is gone.

    interrupted: asked after each, so that every run gets on, however short it must be.
    """
    for meta in store.list("tombstones"):
        try:
            tombstone = fetch_verified(store, meta.key, unseal, f"{store.uri}/{meta.key}")
        except (ObjectNotFound, CorruptCommit):
            continue  # another process was faster, or nobody can say what it was about
        sha256 = CommitRef.from_key(tombstone["key"]).sha256
        if store.head(pin_key(sha256)) is not None and store.head(tombstone["key"]) is not None:
            store.delete(meta.key)  # pinned before anything was deleted: that run ended before it looked
            continue
        _delete_objects(store, tombstone)
        for key in (quarantine_key(sha256), verified_key(sha256), meta.key):
            store.delete(key)
        if interrupted():
            return


def delete_all(store: Store, keys: Iterable[str], interrupted: Callable[[], bool] = lambda: False) -> None:
    """In no order. interrupted: asked before each; what is left then stays."""

    def delete(key: str) -> None:
        if not interrupted():
            store.delete(key)

    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="delete") as pool:
        list(pool.map(delete, keys))


def superseded_error(store: Store, number: int, ours: int) -> GenerationSuperseded:
    return GenerationSuperseded(
        f"{store.uri}: generation {number} was opened while generation {ours} was running; "
        "what this gang commits from now on would never be restored"
    )


def _put_tombstone(store: Store, sha256: str, data: bytes) -> None:
    """Tagged where that is allowed: a role may have the right to put and none to tag."""
    try:
        store.put(tombstone_key(sha256), data, tags=TOMBSTONE_TAGS)
    except StoreForbidden:
        store.put(tombstone_key(sha256), data)


def _delete_objects(store: Store, tombstone: dict[str, Any]) -> None:
    store.delete(tombstone["key"])
    if tombstone.get("signed"):
        store.delete(signature_key(CommitRef.from_key(tombstone["key"]).sha256))
    if tombstone["generation"] is None:
        return
    for prefix in (index_prefix, data_prefix):
        delete_all(store, [meta.key for meta in store.list(prefix(tombstone["generation"], tombstone["step"]))])


def find_orphans(store: Store, clock: StoreClock, *, older_than_seconds: float) -> list[ObjectMeta]:
    """By the store's own clock.

    A folder of a save goes as a whole: while any object of it is young, its save may be under way. Data are listed
    before commits, so that a save that is committed meanwhile is seen as such.
    """
    saves: dict[tuple[str, str], list[ObjectMeta]] = defaultdict(list)
    listed = [meta for prefix in ("data", "index") for meta in store.list(prefix)]
    for meta in listed:
        parts = meta.key.split("/")
        if len(parts) == 4 and parts[1].split("-")[0].isdigit() and parts[2].isdigit():
            saves[parts[1], parts[2]].append(meta)
    commits = store.list("commits")
    committed = set()
    for meta in commits:
        try:
            step, generation, _ = parse_commit_key(meta.key)
            committed.add((generation, step))
        except ValueError:
            continue  # not a key of ours
    uncommitted = [
        found
        for (generation, step), found in saves.items()
        if (int(generation.split("-")[0]), int(step)) not in committed
    ]
    if not uncommitted:
        return []
    now = clock.now(store, max(meta.modified for meta in [*listed, *commits]))
    old = [found for found in uncommitted if all(now - meta.modified > older_than_seconds for meta in found)]
    return [meta for found in old for meta in found]


def sweep_orphans(
    store: Store, clock: StoreClock, *, older_than_seconds: float, interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Delete them, as far as it goes until `interrupted`."""
    orphans = find_orphans(store, clock, older_than_seconds=older_than_seconds)
    delete_all(store, [meta.key for meta in orphans], interrupted)


_PATIENCE_SECONDS = 30.0  # what is left over waits for the next commit; the next save must not wait for this
_SHORTEST_ORPHAN_SECONDS = 600.0
_SWEEPS_PER_LIMIT = 4  # an orphan is gone at the latest at 1¼ of its limit, while the job runs


@dataclass(frozen=True)
class RetentionChoice:
    """keep: reason by commit. delete: with the name of its generation, None where its manifest cannot be read."""

    keep: dict[CommitRef, str]
    delete: dict[CommitRef, str | None]


class Retention:
    """Remembers the manifests that it has read."""

    def __init__(self, policy: RetentionPolicy) -> None:
        self._policy = policy
        self._manifests: dict[str, Manifest] = {}
        self._swept = float("-inf")
        self._clock = StoreClock()

    def run(self, store: Store, save: CheckpointId, interrupted: Callable[[], bool] = lambda: False) -> list[CommitRef]:
        """Delete what need not be kept after `save` was committed; returns what was deleted.

        interrupted: whether there is something better to do. Then one commit goes, as one has come, and the rest waits.
        Raises GenerationSuperseded, and deletes nothing, when a newer generation than `save`'s is on record.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        return self._enforce(store, save.generation_number, lambda: interrupted() or time.monotonic() >= end)

    def make_room(self, store: Store, save: CheckpointId, *, deadline_seconds: float) -> list[CommitRef]:
        """For a store that is full: the least valued commits go, until there is room for two, and orphans of saves
        that are past their deadline. Raises as `run`."""
        limit = min(self._policy.orphan_seconds, max(2 * deadline_seconds, _SHORTEST_ORPHAN_SECONDS))
        end = time.monotonic() + _PATIENCE_SECONDS
        deleted = self._enforce(store, save.generation_number, lambda: time.monotonic() >= end, full=True)
        finish_deletions(store)
        sweep_orphans(store, self._clock, older_than_seconds=limit)
        return deleted

    def prune(self, store: Store) -> list[CommitRef]:
        """By hand: until all is done, for whichever generation is the newest."""
        self._swept = float("-inf")
        return self._enforce(store, newest_generation_number(store), lambda: False)

    def choose_commits(self, store: Store) -> RetentionChoice:
        """What the policy says of the commits that are there; nothing is changed."""
        return self._choose(store, self._policy)

    def orphans(self, store: Store) -> list[ObjectMeta]:
        """What no commit names and is older than the limit; nothing is deleted."""
        return find_orphans(store, self._clock, older_than_seconds=self._policy.orphan_seconds)

    def _enforce(
        self, store: Store, number: int, interrupted: Callable[[], bool], *, full: bool = False
    ) -> list[CommitRef]:
        if (newest := newest_generation_number(store, near=number)) > number:
            raise superseded_error(store, newest, number)
        if newest < number:
            return []  # our own generation is not listed yet: what is, is not the whole truth
        finish_deletions(store, interrupted)
        deleted = []
        for ref, generation in self._choose(store, self._policy, full=full).delete.items():
            if delete_commit(store, ref, generation, newest=number, full=full):
                deleted.append(ref)
            self._manifests.pop(ref.sha256, None)
            if interrupted():
                return deleted
        limit = self._policy.orphan_seconds
        if time.monotonic() - self._swept > limit / _SWEEPS_PER_LIMIT and not interrupted():
            sweep_orphans(store, self._clock, older_than_seconds=limit, interrupted=interrupted)
            self._swept = time.monotonic()
        return deleted

    def _choose(self, store: Store, policy: RetentionPolicy, *, full: bool = False) -> RetentionChoice:
        traced = trace_lineage(store)
        pinned = {meta.key.rsplit("/", 1)[-1].removesuffix(".json") for meta in store.list("pins")}
        reachable = [found.ref for found in traced if found.unreachable_because is None]
        for ref in reachable:
            self._manifest(store, ref)
        saves = {self._save(ref) for ref in reachable if ref.sha256 in pinned} - {None}
        pinned |= {ref.sha256 for ref in reachable if self._save(ref) in saves}
        first: dict[tuple[str, int], str] = {}  # of two records of one save the first stands for both: one data
        whole = []
        for ref in reachable:
            kept = self._kept(store, ref, policy, pinned)
            if kept is not None and first.setdefault(self._save(ref), ref.sha256) == ref.sha256:
                whole.append(kept)
        if not whole:
            return RetentionChoice({}, {})
        reasons = choose_commits(whole, policy_with_room(whole, policy) if full else policy)
        needed = {save for save, sha256 in first.items() if sha256 in reasons}
        keep = {ref: reasons[first[self._save(ref)]] for ref in reachable if self._save(ref) in needed}
        oldest_needed = len(whole[: policy.keep_last])
        delete: dict[CommitRef, str | None] = {}
        counted, sound = 0, {kept.sha256 for kept in whole}
        for ref in reachable:
            if ref in keep or self._save(ref) in first:
                counted += ref.sha256 in sound
                if ref not in keep:
                    delete[ref] = self._generation(store, ref)
            elif counted >= oldest_needed and ref.sha256 not in pinned:  # torn, and enough whole ones are newer
                delete[ref] = self._generation(store, ref)
        for ref in self._stale(store, traced, policy.orphan_seconds):
            if ref.sha256 not in pinned:
                delete[ref] = self._generation(store, ref)
                if self._save(ref) in needed:  # only the record goes: its data is that of a commit that is kept
                    delete[ref] = None
        # The oldest first: when time runs out, what is left is still one unbroken newest part.
        return RetentionChoice(keep, dict(sorted(delete.items(), key=lambda item: (item[0].step, item[0].generation))))

    def _save(self, ref: CommitRef) -> tuple[str, int] | None:
        """Generation and step, which the keys of the data are made of; None where the manifest cannot be read."""
        manifest = self._manifests.get(ref.sha256)
        return None if manifest is None else (manifest.save.generation, manifest.save.step)

    def _kept(self, store: Store, ref: CommitRef, policy: RetentionPolicy, pinned: set[str]) -> WholeCommit | None:
        """None for a commit that is torn: its manifest does not read well, or a data object is not of its size. Bytes
        were verified when they were stored, and are again at restore."""
        manifest = self._manifest(store, ref)
        if manifest is None:
            return None
        sizes = {meta.key: meta.size for meta in store.list(data_prefix(manifest.save.generation, ref.step))}
        if any(sizes.get(data.key) != data.size for data in manifest.data):
            return None
        metric = metric_at_step(manifest.common.get("extra") or {}, ref.step, policy.best_metric)
        return WholeCommit(
            sha256=ref.sha256, step=ref.step, size=manifest.size, metric=metric, pinned=ref.sha256 in pinned
        )

    def _stale(self, store: Store, traced: list[TracedCommit], limit_seconds: float) -> list[CommitRef]:
        """What does not count and is older than the limit, by the store's clock."""
        out = [found for found in traced if found.unreachable_because is not None and not found.refused]
        if not out:
            return []
        now = self._clock.now(store, max(found.modified for found in traced))
        return [found.ref for found in out if now - found.modified > limit_seconds]

    def _generation(self, store: Store, ref: CommitRef) -> str | None:
        manifest = self._manifest(store, ref)
        return manifest and manifest.save.generation

    def _manifest(self, store: Store, ref: CommitRef) -> Manifest | None:
        if ref.sha256 not in self._manifests:
            try:
                self._manifests[ref.sha256] = fetch_verified(store, ref.key, Manifest.from_bytes)
            except (CorruptCommit, ObjectNotFound):
                return None
        return self._manifests[ref.sha256]
