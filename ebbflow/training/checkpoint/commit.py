"""Make a commit without collectives or locks: any rank that sees the indexes of all ranks writes
the manifest.

A rank's index describes the data that the rank uploaded. The manifest depends only on the indexes,
and its key contains its hash. So ranks that write the manifest at the same time write the same
bytes to the same key. The loss of a rank after its index is durable cannot block the commit.

Rank 0's uploader polls the store until the commit exists. The other ranks are a backup: they poll
rarely, and ranks with higher numbers start later. Usually only ranks 1 to 3 poll at all, so the
number of requests grows with the number of ranks and not with its square.
"""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ebbflow.core.errors import ObjectNotFound, StoreError, StoreFull, WrongStore
from ebbflow.core.layout import commit_key, commit_prefix, index_key, index_prefix
from ebbflow.core.retry import backoff_pauses
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import CheckpointId, Manifest, RankIndex, merge_indexes
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.checkpoint.verified_io import (
    Deadline,
    fetch_verified,
    put_verified,
    sha256_text,
)
from ebbflow.training.errors import CheckpointError, CorruptCommit, RefusedCommit

_ASK_DIRECTLY = 8  # listings may lag: the last few missing indexes are looked up by name
_READERS = 16  # indexes read at once
_FOREIGN_COMMIT_EVERY = 4  # every fourth look asks whether another rank has committed
_LONGEST_PAUSE_SECONDS = 0.5
# Ranks above 0 look after 1, 3, 7, … time units; the k-th look is by ranks below 4^k, so 63 units
# suffice for 4,096.
_LONGEST_UNIT_SECONDS = 1.0
_UNITS = 64
_WIDENING = 4
_RANKS_PER_SECOND = 200  # indexes that a slow machine reads and merges per second


@dataclass(frozen=True)
class CommitAttempt:
    """The result of an attempt to commit: the commit, or the ranks whose indexes are missing."""

    commit: CommitRef | None
    size: int  # bytes of data
    missing_ranks: list[int]
    cause: str = ""  # why an existing index is unusable


class CommitWatch:
    """Watcher of the indexes of a save.

    It reads each rank's index once, and commits the save once all exist.
    """

    def __init__(self, store: Store, save: CheckpointId) -> None:
        self._store = store
        self._save = save
        self._indexes: dict[int, tuple[RankIndex, bytes]] = {}

    def all_there(self) -> bool:
        """Return whether the index of every rank exists, without reading the indexes."""
        return not self._missing()

    def look(self) -> CommitAttempt:
        """Commit the save if the indexes of all ranks exist and are valid.

        Return the commit or the missing ranks.

        Raises StoreError (the store failed), CheckpointError (the indexes contradict each other).
        """
        missing = self._missing()
        cause = self._read([rank for rank in range(self._save.world_size) if rank not in missing])
        missing = [rank for rank in range(self._save.world_size) if rank not in self._indexes]
        if missing:
            return CommitAttempt(None, 0, missing, cause)
        manifest = merge_indexes(
            self._save, [self._indexes[rank] for rank in range(self._save.world_size)]
        )
        raw = manifest.to_bytes()
        key = commit_key(self._save.step, self._save.generation_number, sha256_text(raw))
        signs = signer()
        if signs is not None:
            signs.sign(self._store, key)  # first, so that every visible commit has its signature
        put_verified(self._store, key, raw)
        return CommitAttempt(CommitRef.from_key(key), manifest.size, [])

    def _missing(self) -> set[int]:
        unknown = [rank for rank in range(self._save.world_size) if rank not in self._indexes]
        if not unknown:
            return set()
        listed = {
            meta.key
            for meta in self._store.list(index_prefix(self._save.generation, self._save.step))
        }
        missing = [rank for rank in unknown if _index_key(self._save, rank) not in listed]
        if len(missing) <= _ASK_DIRECTLY:
            missing = [
                rank for rank in missing if self._store.head(_index_key(self._save, rank)) is None
            ]
        return set(missing)

    def _read(self, ranks: list[int]) -> str:
        """Read the indexes that have not been read yet.

        Return why an index is unusable, or "" if all are usable.
        """
        new = [rank for rank in ranks if rank not in self._indexes]
        causes = []
        with ThreadPoolExecutor(_READERS, thread_name_prefix="index") as pool:
            # `map` cancels the reads that wait once one has failed: a store that is away must not
            # hold up the save for one time limit after the other.
            for rank, found in zip(new, pool.map(self._read_one, new), strict=True):
                if isinstance(found, CorruptCommit):
                    causes.append(str(found))
                else:
                    self._indexes[rank] = found
        return "; ".join(causes[:3])

    def _read_one(self, rank: int) -> tuple[RankIndex, bytes] | CorruptCommit:
        key = _index_key(self._save, rank)
        try:
            raw = self._store.get(key)
            index = RankIndex.from_bytes(raw, f"{self._store.uri}/{key}")
            signs = signer()
            if signs is not None:
                # Else any writer of the store could get a manifest signed
                signs.check_index(self._store, key, index)
            return index, raw
        except CorruptCommit as error:
            return error


def find_commit(store: Store, save: CheckpointId) -> CommitAttempt | None:
    """Return the commit of `save` if any rank has already made it, else None."""
    for meta in store.list(commit_prefix(save.step, save.generation_number)):
        try:
            manifest = fetch_verified(store, meta.key, Manifest.from_bytes)
            signs = signer()
            if signs is not None:
                signs.check(store, meta.key)
        except (ObjectNotFound, CorruptCommit, RefusedCommit):
            continue
        if manifest.save == save:
            return CommitAttempt(CommitRef.from_key(meta.key), manifest.size, [])
    return None


def await_commit(
    store: Store,
    save: CheckpointId,
    deadline: Deadline,
    *,
    foreign_first: bool = False,
    given_up: Callable[[], bool] = lambda: False,
) -> CommitAttempt:
    """Wait until `save` is committed and the store lists the commit.

    Make the commit as soon as all indexes exist.

    The wait includes the listing because a start of the job finds commits by listing them. Raises
    CheckpointError at the deadline; its message names the ranks without an index and the store's
    last error.

    Args:
        foreign_first: look for a commit by another rank before the first attempt to commit.
        given_up: called repeatedly; if it returns True, the wait ends as at the deadline.
    """
    watch = CommitWatch(store, save)
    attempt = CommitAttempt(None, 0, [])
    cause = ""
    for number, pause in enumerate(backoff_pauses(longest_seconds=_LONGEST_PAUSE_SECONDS)):
        try:
            if attempt.commit is None:
                foreign = (number if foreign_first else number + 1) % _FOREIGN_COMMIT_EVERY == 0
                attempt = (find_commit(store, save) if foreign else None) or watch.look()
            if attempt.commit is not None and _is_committed(store, save):
                return attempt
            if attempt.cause:
                cause = f"; {attempt.cause}"
            else:
                cause = ""
        except WrongStore:
            raise  # waiting would hold up the save for its whole deadline
        except StoreFull as error:  # also without inodes; the caller can make room
            raise CheckpointError(
                f"save of step {save.step} of {save.generation} was not committed: {error}"
            ) from error
        except StoreError as error:
            cause = f"; last error: {error}"
        if deadline.remaining_seconds <= pause or (attempt.commit is None and given_up()):
            break
        time.sleep(pause)
    if attempt.commit is not None:
        raise CheckpointError(
            f"save of step {save.step} of {save.generation}: {attempt.commit.key} was put and is "
            f"not listed within {deadline.seconds:g} s{cause}; a start from now may miss it"
        )
    missing = attempt.missing_ranks
    ranks = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
    if missing:
        who = f"no index from rank {ranks}"
    else:
        who = "the store did not answer"
    raise CheckpointError(
        f"save of step {save.step} of {save.generation} was not committed within "
        f"{deadline.seconds:g} s: {who} ({save.world_size - len(missing)} of {save.world_size} "
        f"ranks are durable){cause}"
    )


def commit_as_backup(
    store: Store,
    save: CheckpointId,
    rank: int,
    deadline: Deadline,
    interrupted: Callable[[float], bool],
) -> None:
    """Commit the save in place of rank 0 if rank 0 does not, for example because it died.

    A rank above 0 calls this once its own index is durable. At growing intervals it checks whether
    the commit exists, and makes the commit if all indexes exist and no other rank has made it.
    Store errors are ignored until the next check. At the deadline the function returns without a
    commit, since rank 0 reports the failure.

    Args:
        interrupted: waits up to the given number of seconds. It returns True as soon as other work
            arrives, and this function then returns.
    """
    unit = min(_LONGEST_UNIT_SECONDS, deadline.seconds / _UNITS)
    watch = CommitWatch(store, save)
    number = 0
    wait_seconds = 0.0
    while deadline.remaining_seconds > 0:
        number += 1
        wait_seconds += unit * 2 ** (number - 1)
        if rank >= _WIDENING**number:
            continue
        if interrupted(min(wait_seconds, deadline.remaining_seconds)):
            return
        wait_seconds = 0.0
        try:
            if _is_committed(store, save):
                return
            if watch.all_there():  # then a lower rank is most likely committing it
                wait_for_others = (
                    unit * random.uniform(2.0, 4.0 + rank**0.5)
                    + save.world_size / _RANKS_PER_SECOND
                )
                if interrupted(wait_for_others) or _is_committed(store, save):
                    return
                watch.look()
        except (StoreError, CheckpointError):
            continue


def _is_committed(store: Store, save: CheckpointId) -> bool:
    return bool(store.list(commit_prefix(save.step, save.generation_number), limit=1))


def _index_key(save: CheckpointId, rank: int) -> str:
    return index_key(save.generation, save.step, rank)
