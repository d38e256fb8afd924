"""Deletes one commit so that it may be cut short anywhere: a tombstone stands before the first key goes and falls a run
after the last has gone. So a deletion is taken up again, and a listing that still shows the commit misleads nobody.

The tombstone is also half of an agreement with two others who write first and look afterwards, as this does: who opens
a generation with the commit as its parent, and who pins it. Whichever comes second sees the first and gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ebbflow.infra.errors import ObjectNotFound, StoreError, StoreForbidden
from ebbflow.infra.layout import (
    TOMBSTONE_TAGS,
    data_prefix,
    index_prefix,
    pin_key,
    quarantine_key,
    signature_key,
    tombstone_key,
    verified_key,
)
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.checksum import seal, unseal
from ebbflow.training.checkpoint.generations import newest_number
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import VERSION
from ebbflow.training.checkpoint.settled import fetched
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.errors import CorruptCommit, GenerationSuperseded

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
    if (number := newest_number(store, near=newest)) > newest:
        store.delete(tombstone_key(ref.sha256))
        raise superseded(store, number, newest)
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
            tombstone = fetched(store, meta.key, unseal, f"{store.uri}/{meta.key}")
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


def superseded(store: Store, number: int, ours: int) -> GenerationSuperseded:
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
