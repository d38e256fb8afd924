"""Enforces a policy on a job's commits: after each commit, when the store has no room, and by hand.

Never deleted: the newest commit that looks whole, pinned ones, and anything at all while no commit looks whole. What is
quarantined or outside the lineage (a zombie's, a rewind's) is kept for a while, for a look, and then goes too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ebbflow.infra.errors import ObjectNotFound
from ebbflow.infra.layout import data_prefix
from ebbflow.infra.store import ObjectMeta, Store
from ebbflow.infra.store.clock import StoreClock
from ebbflow.training.checkpoint.generations import newest_number
from ebbflow.training.checkpoint.lineage import CommitRef, Traced, trace_lineage
from ebbflow.training.checkpoint.manifest import Manifest, Save
from ebbflow.training.checkpoint.retention.deletion import delete_commit, finish_deletions, superseded
from ebbflow.training.checkpoint.retention.orphans import find_orphans, sweep_orphans
from ebbflow.training.checkpoint.retention.policy import Kept, RetentionPolicy, choose, metric_of, with_room
from ebbflow.training.checkpoint.settled import fetched
from ebbflow.training.errors import CorruptCommit

_PATIENCE_SECONDS = 30.0  # what is left over waits for the next commit; the next save must not wait for this
_SHORTEST_ORPHAN_SECONDS = 600.0
_SWEEPS_PER_LIMIT = 4  # an orphan is gone at the latest at 1¼ of its limit, while the job runs


@dataclass(frozen=True)
class Choice:
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

    def run(self, store: Store, save: Save, interrupted: Callable[[], bool] = lambda: False) -> list[CommitRef]:
        """Delete what need not be kept after `save` was committed; returns what was deleted.

        interrupted: whether there is something better to do. Then one commit goes, as one has come, and the rest waits.
        Raises GenerationSuperseded, and deletes nothing, when a newer generation than `save`'s is on record.
        """
        end = time.monotonic() + _PATIENCE_SECONDS
        return self._enforce(store, save.generation_number, lambda: interrupted() or time.monotonic() >= end)

    def make_room(self, store: Store, save: Save, *, deadline_seconds: float) -> list[CommitRef]:
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
        return self._enforce(store, newest_number(store), lambda: False)

    def choose(self, store: Store) -> Choice:
        """What the policy says of the commits that are there; nothing is changed."""
        return self._choose(store, self._policy)

    def orphans(self, store: Store) -> list[ObjectMeta]:
        """What no commit names and is older than the limit; nothing is deleted."""
        return find_orphans(store, self._clock, older_than_seconds=self._policy.orphan_seconds)

    def _enforce(
        self, store: Store, number: int, interrupted: Callable[[], bool], *, full: bool = False
    ) -> list[CommitRef]:
        if (newest := newest_number(store, near=number)) > number:
            raise superseded(store, newest, number)
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

    def _choose(self, store: Store, policy: RetentionPolicy, *, full: bool = False) -> Choice:
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
            return Choice({}, {})
        reasons = choose(whole, with_room(whole, policy) if full else policy)
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
        return Choice(keep, dict(sorted(delete.items(), key=lambda item: (item[0].step, item[0].generation))))

    def _save(self, ref: CommitRef) -> tuple[str, int] | None:
        """Generation and step, which the keys of the data are made of; None where the manifest cannot be read."""
        manifest = self._manifests.get(ref.sha256)
        return None if manifest is None else (manifest.save.generation, manifest.save.step)

    def _kept(self, store: Store, ref: CommitRef, policy: RetentionPolicy, pinned: set[str]) -> Kept | None:
        """None for a commit that is torn: its manifest does not read well, or a data object is not of its size. Bytes
        were verified when they were stored, and are again at restore."""
        manifest = self._manifest(store, ref)
        if manifest is None:
            return None
        sizes = {meta.key: meta.size for meta in store.list(data_prefix(manifest.save.generation, ref.step))}
        if any(sizes.get(data.key) != data.size for data in manifest.data):
            return None
        metric = metric_of(manifest.common.get("extra") or {}, ref.step, policy.best_metric)
        return Kept(sha256=ref.sha256, step=ref.step, size=manifest.size, metric=metric, pinned=ref.sha256 in pinned)

    def _stale(self, store: Store, traced: list[Traced], limit_seconds: float) -> list[CommitRef]:
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
                self._manifests[ref.sha256] = fetched(store, ref.key, Manifest.from_bytes)
            except (CorruptCommit, ObjectNotFound):
                return None
        return self._manifests[ref.sha256]
