"""Which commits go when a new one has come: all but the newest K of the lineage that look whole.

A tombstone stands before the first key goes and falls after the last has gone, so that a deletion cut short is taken
up again and a listing that still shows the commit misleads nobody. Never deleted: the newest commit that looks whole,
quarantined commits, and those outside the lineage (a zombie's, a rewind's) with their data; they are left to a sweep.
"""

from __future__ import annotations

import time

from infra.errors import ObjectNotFound
from infra.layout import data_prefix, index_prefix, tombstone_key
from infra.store import Store
from training.checkpoint.checksum import seal, unseal
from training.checkpoint.lineage import CommitRef, newest_number, reachable_commits
from training.checkpoint.manifest import VERSION, Manifest, Save
from training.errors import CorruptCommit, GenerationSuperseded

_PATIENCE_SECONDS = 30.0  # what is left over waits for the next commit; the next save must not wait for this


class Retention:
    """Keeps the last `keep_last` whole commits; remembers the manifests it has read."""

    def __init__(self, keep_last: int) -> None:
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1: {keep_last}")
        self._keep_last = keep_last
        self._manifests: dict[str, Manifest] = {}

    def run(self, store: Store, save: Save) -> list[CommitRef]:
        """Delete what need not be kept after `save` was committed; returns what was deleted.

        Raises GenerationSuperseded, and deletes nothing, when a newer generation than `save`'s is on record: the
        lineage is then another gang's.
        """
        if (newest := newest_number(store)) > save.generation_number:
            raise GenerationSuperseded(
                f"{store.uri}: generation {newest} was opened while {save.generation} was running; "
                "what this gang commits from now on would never be restored"
            )
        end = time.monotonic() + _PATIENCE_SECONDS
        self._finish_deletions(store, end)
        deleted = []
        kept = 0
        for ref in reachable_commits(store):
            if kept < self._keep_last:
                kept += self._is_whole(store, ref)
            elif time.monotonic() < end:
                self._delete(store, ref)
                deleted.append(ref)
        return deleted

    def _is_whole(self, store: Store, ref: CommitRef) -> bool:
        """The manifest reads well and all data objects have their size. Bytes are verified at restore."""
        try:
            manifest = self._manifest(store, ref)
        except (CorruptCommit, ObjectNotFound):
            return False
        sizes = {meta.key: meta.size for meta in store.list(data_prefix(manifest.save.generation, ref.step))}
        return all(sizes.get(data.key) == data.size for data in manifest.data)

    def _manifest(self, store: Store, ref: CommitRef) -> Manifest:
        if ref.sha256 not in self._manifests:
            self._manifests[ref.sha256] = Manifest.from_bytes(store.get(ref.key), ref.key)
        return self._manifests[ref.sha256]

    def _delete(self, store: Store, ref: CommitRef) -> None:
        try:
            generation = self._manifest(store, ref).save.generation
        except (CorruptCommit, ObjectNotFound):
            return  # whose data it has is not known for certain
        tombstone = {"version": VERSION, "key": ref.key, "generation": generation, "step": ref.step}
        store.put(tombstone_key(ref.sha256), seal(tombstone))
        self._manifests.pop(ref.sha256, None)
        _delete_objects(store, tombstone)

    def _finish_deletions(self, store: Store, end: float) -> None:
        """Take up what an earlier run left. Tombstones fall one run later, when no listing shows the commit."""
        for meta in store.list("tombstones"):
            if time.monotonic() >= end:
                return
            tombstone = unseal(store.get(meta.key), f"{store.uri}/{meta.key}")
            _delete_objects(store, tombstone)
            store.delete(meta.key)


def _delete_objects(store: Store, tombstone: dict) -> None:
    store.delete(tombstone["key"])
    for prefix in (index_prefix, data_prefix):
        for meta in store.list(prefix(tombstone["generation"], tombstone["step"])):
            store.delete(meta.key)
