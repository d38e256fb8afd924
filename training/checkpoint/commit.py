"""Making a commit without collectives and without locks: whoever sees the indexes of all ranks writes the manifest.

Nothing depends on winning a race. The manifest is a pure function of the indexes and its key contains its hash, so
racing writers write the same bytes; and losing any rank after its index is durable cannot block the commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from infra.errors import ObjectNotFound, StoreError
from infra.layout import commit_key, commit_prefix, index_key, index_prefix
from infra.store import Store
from training.checkpoint.checksum import sha256_text
from training.checkpoint.deadline import Deadline, pauses
from training.checkpoint.lineage import CommitRef
from training.checkpoint.manifest import Manifest, RankIndex, Save, merge
from training.errors import CheckpointError, CorruptCommit

_ASK_DIRECTLY = 8  # a listing may omit a fresh object for a while: ask for the last few by name


@dataclass(frozen=True)
class Attempt:
    """What one look at the store brought: the commit, or the ranks whose index is not there yet."""

    commit: CommitRef | None
    size: int  # bytes of data
    missing_ranks: list[int]


def try_commit(store: Store, save: Save) -> Attempt:
    """Commit `save` if all its indexes are there. Raises StoreError, and CheckpointError when they do not fit."""
    listed = {meta.key for meta in store.list(index_prefix(save.generation, save.step))}
    missing = [rank for rank in range(save.world_size) if _index_key(save, rank) not in listed]
    if len(missing) <= _ASK_DIRECTLY:
        missing = [rank for rank in missing if store.head(_index_key(save, rank)) is None]
    if missing:
        return Attempt(None, 0, missing)
    manifest = merge(save, [_read_index(store, save, rank) for rank in range(save.world_size)])
    raw = manifest.to_bytes()
    key = commit_key(save.step, save.generation_number, sha256_text(raw))
    store.put(key, raw)
    return Attempt(CommitRef.from_key(key), manifest.size, [])


def find_commit(store: Store, save: Save) -> Attempt | None:
    """The commit of `save` that somebody already made, if any."""
    for meta in store.list(commit_prefix(save.step, save.generation_number)):
        try:
            manifest = Manifest.from_bytes(store.get(meta.key), meta.key)
        except (ObjectNotFound, CorruptCommit):
            continue
        if manifest.save == save:
            return Attempt(CommitRef.from_key(meta.key), manifest.size, [])
    return None


def await_commit(store: Store, save: Save, deadline: Deadline) -> Attempt:
    """Look until `save` is committed, committing it when that falls to us.

    Raises CheckpointError at the deadline, naming the ranks whose index is missing and the last error of the store.
    """
    missing: list[int] = []
    cause = ""
    for pause in pauses(longest_seconds=0.5):
        try:
            attempt = find_commit(store, save) or try_commit(store, save)
            if attempt.commit is not None:
                return attempt
            missing, cause = attempt.missing_ranks, ""
        except StoreError as error:
            cause = f"; last error: {error}"
        if deadline.remaining_seconds <= pause:
            break
        time.sleep(pause)
    ranks = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
    who = f"no index from rank {ranks}" if missing else "the store did not answer"
    raise CheckpointError(
        f"save of step {save.step} of {save.generation} was not committed within {deadline.seconds:g} s: {who} "
        f"({save.world_size - len(missing)} of {save.world_size} ranks are durable){cause}"
    )


def _index_key(save: Save, rank: int) -> str:
    return index_key(save.generation, save.step, rank)


def _read_index(store: Store, save: Save, rank: int) -> tuple[RankIndex, bytes]:
    key = _index_key(save, rank)
    raw = store.get(key)
    return RankIndex.from_bytes(raw, f"{store.uri}/{key}"), raw
