"""Making a commit without collectives and without locks: whoever sees the indexes of all ranks writes the manifest.

Nothing depends on winning a race. The manifest is a pure function of the indexes and its key contains its hash, so
racing writers write the same bytes; and losing any rank after its index is durable cannot block the commit.

Rank 0's uploader watches until the commit is there. The others look now and then, more of them the longer it takes,
so that the requests grow with the ranks and not with their square: in a quiet save only ranks 1 to 3 ask at all.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ebbflow.infra.errors import ObjectNotFound, StoreError
from ebbflow.infra.layout import commit_key, commit_prefix, index_key, index_prefix
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.lineage import CommitRef
from ebbflow.training.checkpoint.manifest import CheckpointId, Manifest, RankIndex, merge_indexes
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.checkpoint.verified_io import Deadline, backoff_pauses, fetch_verified, put_verified, sha256_text
from ebbflow.training.errors import CheckpointError, CorruptCommit, RefusedCommit

_ASK_DIRECTLY = 8  # a listing may omit a fresh object for a while: ask for the last few by name
_READERS = 16  # indexes read at once
_FOREIGN_COMMIT_EVERY = 4  # looks at the indexes for one at whether somebody else has committed
_LONGEST_PAUSE_SECONDS = 0.5
# Looks of ranks above 0 come after 1, 3, 7, … units; at the k-th one ranks below 4^k look. 63 units reach rank 4,095.
_LONGEST_UNIT_SECONDS, _UNITS = 1.0, 64
_WIDENING = 4
_RANKS_PER_SECOND = 200  # whose indexes a slow machine reads and merges


@dataclass(frozen=True)
class CommitAttempt:
    """What one look at the store brought: the commit, or the ranks whose index is not there yet."""

    commit: CommitRef | None
    size: int  # bytes of data
    missing_ranks: list[int]
    cause: str = ""  # why a rank's index, which is there, does not count


class CommitWatch:
    """Looks at one save; remembers the indexes it has read, which never change."""

    def __init__(self, store: Store, save: CheckpointId) -> None:
        self._store = store
        self._save = save
        self._indexes: dict[int, tuple[RankIndex, bytes]] = {}

    def all_there(self) -> bool:
        """Whether every rank's index is there; none is read."""
        return not self._missing()

    def look(self) -> CommitAttempt:
        """Commit the save if all its indexes are there and sound. Raises StoreError, CheckpointError if they differ."""
        missing = self._missing()
        cause = self._read([rank for rank in range(self._save.world_size) if rank not in missing])
        missing = [rank for rank in range(self._save.world_size) if rank not in self._indexes]
        if missing:
            return CommitAttempt(None, 0, missing, cause)
        manifest = merge_indexes(self._save, [self._indexes[rank] for rank in range(self._save.world_size)])
        raw = manifest.to_bytes()
        key = commit_key(self._save.step, self._save.generation_number, sha256_text(raw))
        if (signs := signer()) is not None:
            signs.sign(self._store, key)  # first: a commit that readers see has its signature
        put_verified(self._store, key, raw)
        return CommitAttempt(CommitRef.from_key(key), manifest.size, [])

    def _missing(self) -> set[int]:
        unknown = [rank for rank in range(self._save.world_size) if rank not in self._indexes]
        if not unknown:
            return set()
        listed = {meta.key for meta in self._store.list(index_prefix(self._save.generation, self._save.step))}
        missing = [rank for rank in unknown if _index_key(self._save, rank) not in listed]
        if len(missing) <= _ASK_DIRECTLY:
            missing = [rank for rank in missing if self._store.head(_index_key(self._save, rank)) is None]
        return set(missing)

    def _read(self, ranks: list[int]) -> str:
        """Read what is new. Returns why an index cannot be used; it is read again at the next look."""
        new = [rank for rank in ranks if rank not in self._indexes]
        if not new:
            return ""
        causes = []
        with ThreadPoolExecutor(min(_READERS, len(new)), thread_name_prefix="index") as pool:
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
            if (signs := signer()) is not None:
                signs.check_index(self._store, key, index)  # else a writer of the store has the manifest signed
            return index, raw
        except CorruptCommit as error:
            return error


def try_commit(store: Store, save: CheckpointId) -> CommitAttempt:
    """Commit `save` if all its indexes are there. Raises StoreError, and CheckpointError when they do not fit."""
    return CommitWatch(store, save).look()


def find_commit(store: Store, save: CheckpointId) -> CommitAttempt | None:
    """The commit of `save` that somebody already made, if any."""
    for meta in store.list(commit_prefix(save.step, save.generation_number)):
        try:
            manifest = fetch_verified(store, meta.key, Manifest.from_bytes)
            if manifest.save == save and (signs := signer()) is not None:
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
    """Look until `save` is committed, committing it when that falls to us, and until it is listed.

    Starts find commits by listing them: one that is told of before it is listed could be missed by the next start.
    foreign_first: begin with whether somebody else has committed it. given_up: there is no use in waiting any longer.
    Raises CheckpointError at the deadline, naming the ranks whose index is missing and the last error of the store.
    """
    watch = CommitWatch(store, save)
    attempt, cause = CommitAttempt(None, 0, []), ""
    for number, pause in enumerate(backoff_pauses(longest_seconds=_LONGEST_PAUSE_SECONDS)):
        try:
            if attempt.commit is None:
                foreign = (number if foreign_first else number + 1) % _FOREIGN_COMMIT_EVERY == 0
                attempt = (find_commit(store, save) if foreign else None) or watch.look()
            if attempt.commit is not None and _is_committed(store, save):
                return attempt
            cause = f"; {attempt.cause}" if attempt.cause else ""
        except StoreError as error:
            cause = f"; last error: {error}"
        if deadline.remaining_seconds <= pause or (attempt.commit is None and given_up()):
            break
        time.sleep(pause)
    if attempt.commit is not None:
        raise CheckpointError(
            f"save of step {save.step} of {save.generation}: {attempt.commit.key} was put and is not listed within "
            f"{deadline.seconds:g} s{cause}; a start from now may miss it"
        )
    missing = attempt.missing_ranks
    ranks = ", ".join(map(str, missing[:20])) + (" …" if len(missing) > 20 else "")
    who = f"no index from rank {ranks}" if missing else "the store did not answer"
    raise CheckpointError(
        f"save of step {save.step} of {save.generation} was not committed within {deadline.seconds:g} s: {who} "
        f"({save.world_size - len(missing)} of {save.world_size} ranks are durable){cause}"
    )


def commit_as_backup(
    store: Store, save: CheckpointId, rank: int, deadline: Deadline, interrupted: Callable[[float], bool]
) -> None:
    """What a rank above 0 does once its index is durable: see to it that somebody commits, without haste.

    interrupted: waits that many seconds, and says whether there is something better to do. Errors of the store are
    left to the next look, and a save that never becomes whole to rank 0, which reports it.
    """
    unit = min(_LONGEST_UNIT_SECONDS, deadline.seconds / _UNITS)
    watch = CommitWatch(store, save)
    number, wait_seconds = 0, 0.0
    while deadline.remaining_seconds > 0:
        number += 1
        wait_seconds += unit * 2 ** (number - 1)
        if rank >= _WIDENING**number:
            continue
        if interrupted(min(wait_seconds, max(deadline.remaining_seconds, 0.0))):
            return
        wait_seconds = 0.0
        try:
            if _is_committed(store, save):
                return
            if watch.all_there():  # then whoever watches closer is most likely at it
                patience = unit * random.uniform(2.0, 4.0 + rank**0.5) + save.world_size / _RANKS_PER_SECOND
                if interrupted(patience) or _is_committed(store, save):
                    return
                watch.look()
        except (StoreError, CheckpointError):
            continue


def _is_committed(store: Store, save: CheckpointId) -> bool:
    return bool(store.list(commit_prefix(save.step, save.generation_number), limit=1))


def _index_key(save: CheckpointId, rank: int) -> str:
    return index_key(save.generation, save.step, rank)
