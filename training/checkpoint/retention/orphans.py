"""Data and indexes that no commit names: of saves that never came to a commit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from ebbflow.infra.layout import parse_commit_key
from ebbflow.infra.store import ObjectMeta, Store
from ebbflow.infra.store.clock import StoreClock
from ebbflow.training.checkpoint.retention.deletion import delete_all


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
