"""Choose which commits a job keeps, and delete all other commits.

A deletion may be interrupted at any point. So it first writes a tombstone, a record of the
deletion; a later run finishes the deletion and removes the tombstone. Two operations can conflict
with a deletion: starting a generation from the commit, and pinning it. Each of them writes its own
record first and then looks for a tombstone, while a deletion writes its tombstone first and then
looks for these records. So of two concurrent writers at least one sees the other and gives way.

A commit is whole if all its data objects are present. The newest whole commit and pinned commits
are never deleted, and nothing is deleted while no commit is whole. Quarantined and unreachable
commits (see `checkpoint.lineage`) are kept for `orphan_seconds`, so that a person can inspect them.
"""

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.core import layout
from ebbflow.core.errors import ObjectNotFound, StoreError, StoreForbidden
from ebbflow.core.grouping import group_by_key
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.core.store.objects import StoreClock
from ebbflow.training.checkpoint.lineage import (
    CommitRef,
    TracedCommit,
    newest_generation_number,
    trace_lineage,
)
from ebbflow.training.checkpoint.manifest import VERSION, CheckpointId, Manifest
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.checkpoint.verified_io import fetch_verified, put_verified, seal, unseal
from ebbflow.training.errors import CorruptCommit, DamagedLineage, GenerationSuperseded

_PARALLEL = 8
# The next upload must not wait for retention; the rest waits for the next commit
_RUN_SECONDS = 30.0
_SHORTEST_ORPHAN_SECONDS = 600.0
# While the job runs, an orphan is deleted at 1.25 times its limit at the latest
_SWEEPS_PER_LIMIT = 4


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Rules that select the commits to keep.

    One rule suffices to keep a commit. Incomplete commits are ignored.
    """

    keep_last: int = 3  # number of newest commits to keep
    # Also keep the first commit at or after each multiple of this step count
    keep_every_steps: int | None = None
    # Also keep this many commits with the best `best_metric`, as recorded in the commit
    keep_best: int = 0
    best_metric: str = "held_out_loss"
    best_mode: str = "min"  # min or max: which value is the best
    # cap on the data of all kept commits. Above it commits are dropped in this order: those kept by
    # step (oldest first), the best (worst first), the last (oldest first). The newest and pinned
    # commits stay
    max_total_bytes: int | None = None
    # Age in seconds at which objects that no reachable commit names are deleted
    orphan_seconds: float = 24 * 3600.0

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ValueError(f"keep_last must be at least 1: {self.keep_last}")


@dataclass(frozen=True, kw_only=True)
class WholeCommit:
    """A commit whose data objects are all present."""

    sha256: str  # SHA-256 of its manifest
    step: int
    size: int  # bytes of its data
    metric: float | None = None  # value of the policy's `best_metric`; None if absent or non-finite
    pinned: bool = False


@dataclass(frozen=True)
class RetentionChoice:
    """The decision of a retention policy: which commits to keep and which to delete."""

    keep: dict[CommitRef, str]  # the commits to keep, each with the reason
    # the commits to delete, each with the name of the generation that saved it; None if its
    # manifest is unreadable
    delete: dict[CommitRef, str | None]


class Retention:
    """Enforcer of a retention policy on a job's commits.

    It warns if it had to restore a deleted generation record.
    """

    def __init__(
        self, policy: RetentionPolicy, warn: Callable[[str], object] = lambda _: None
    ) -> None:
        self._policy = policy
        self._warn = warn
        self._manifests: dict[str, Manifest] = {}  # read once, by SHA-256
        self._swept = float("-inf")
        self._clock = StoreClock()
        self._record: bytes | None = None  # this generation's record

    def run(
        self, store: Store, save: CheckpointId, interrupted: Callable[[], bool] = lambda: False
    ) -> list[CommitRef]:
        """After `save` was committed, delete the commits that the policy does not keep.

        Return the deleted commits.

        If `interrupted` returns True because other work is waiting, the next run continues. Raises
        GenerationSuperseded, and deletes nothing, if a newer generation than that of `save` is on
        record.
        """
        end = time.monotonic() + _RUN_SECONDS
        return self._run(store, save, lambda: interrupted() or time.monotonic() >= end)

    def make_room(
        self, store: Store, save: CheckpointId, *, deadline_seconds: float
    ) -> list[CommitRef]:
        """Free space in a full store, and return the deleted commits. Raises the errors of `run`.

        Commits are deleted, least valuable first, until there is room for two more. Orphans are
        deleted once they are too old to belong to a running save; this age follows from
        `deadline_seconds`, the deadline of a save.
        """
        limit = min(
            self._policy.orphan_seconds, max(2 * deadline_seconds, _SHORTEST_ORPHAN_SECONDS)
        )
        end = time.monotonic() + _RUN_SECONDS
        deleted = self._run(store, save, lambda: time.monotonic() >= end, full=True)
        finish_deletions(store)
        _sweep_orphans(store, self._clock, older_than_seconds=limit)
        return deleted

    def prune(self, store: Store) -> list[CommitRef]:
        """Delete everything that the policy does not keep, and return the deleted commits."""
        self._swept = float("-inf")
        return self._enforce(store, newest_generation_number(store), lambda: False)

    def orphans(self, store: Store) -> list[ObjectMeta]:
        return find_orphans(store, self._clock, older_than_seconds=self._policy.orphan_seconds)

    def _run(
        self,
        store: Store,
        save: CheckpointId,
        interrupted: Callable[[], bool],
        *,
        full: bool = False,
    ) -> list[CommitRef]:
        number = save.generation_number
        newest = newest_generation_number(store, near=number)
        if newest > number:
            raise _superseded_error(store, newest, number)
        if not self._record_is_listed(store, save, newest):
            return []  # the listing is incomplete, so the lineage may be too
        return self._enforce(store, number, interrupted, full=full)

    def _record_is_listed(self, store: Store, save: CheckpointId, newest: int) -> bool:
        """Return whether the store lists this generation's record.

        Write it again if it is missing.

        Raises DamagedLineage if the record is missing and its content is unknown.
        """
        key = layout.generation_key(save.generation_number, save.generation.partition("-")[2])
        if newest == save.generation_number:
            if self._record is None:
                with contextlib.suppress(ObjectNotFound):
                    self._record = store.get(key)
            return True
        # A listing may lag, but the record was listed once, so a read by name finds it
        if store.head(key) is not None:
            return False
        if self._record is None:
            raise DamagedLineage(
                f"{store.uri}/{key} was deleted while the job is running, and no commit is "
                "deleted without it; fix: put generations/ back, or start the job again"
            )
        put_verified(store, key, self._record)
        self._warn(
            f"{store.uri}/{key} was deleted while the job is running and has been put back; "
            "records of older generations in generations/ may be missing too; fix: find out what "
            "deletes them"
        )
        return True

    def _enforce(
        self, store: Store, number: int, interrupted: Callable[[], bool], *, full: bool = False
    ) -> list[CommitRef]:
        finish_deletions(store, interrupted)
        deleted = []
        for ref, generation in self.choose_commits(store, full=full).delete.items():
            if delete_commit(store, ref, generation, newest=number, full=full):
                deleted.append(ref)
            self._manifests.pop(ref.sha256, None)
            if interrupted():
                return deleted
        limit = self._policy.orphan_seconds
        if time.monotonic() - self._swept > limit / _SWEEPS_PER_LIMIT and not interrupted():
            _sweep_orphans(store, self._clock, older_than_seconds=limit, interrupted=interrupted)
            self._swept = time.monotonic()
        return deleted

    def choose_commits(self, store: Store, *, full: bool = False) -> RetentionChoice:
        """Return which commits the policy keeps and which it deletes, without deleting any.

        With `full`, choose so that there is room for two more commits.
        """
        policy = self._policy
        traced = trace_lineage(store)
        pinned = {meta.key.rpartition("/")[2].removesuffix(".json") for meta in store.list("pins")}
        reachable = [found.ref for found in traced if found.unreachable_because is None]
        # Generation name and step identify a commit's data; None if its manifest is unreadable.
        save = {ref: self._save(store, ref) for ref in reachable}
        saves = {save[ref] for ref in reachable if ref.sha256 in pinned}
        pinned |= {ref.sha256 for ref in reachable if save[ref] in saves - {None}}
        # Two records of one checkpoint share its data: only the first is counted.
        first: dict[tuple[str, int] | None, str] = {}
        whole = []
        for ref in reachable:
            kept = self._whole_commit(store, ref, pinned)
            if kept is not None and first.setdefault(save[ref], ref.sha256) == ref.sha256:
                whole.append(kept)
        if not whole:
            return RetentionChoice({}, {})
        reasons = choose_commits(whole, policy)
        if full:  # a stricter size cap leaves room for two commits like the newest
            total = sum(commit.size for commit in whole if commit.sha256 in reasons)
            policy = replace(policy, max_total_bytes=total - 2 * whole[0].size)
            reasons = choose_commits(whole, policy)
        needed = {found: reasons[sha256] for found, sha256 in first.items() if sha256 in reasons}
        keep = {ref: needed[save[ref]] for ref in reachable if save[ref] in needed}
        oldest_needed = len(whole[: policy.keep_last])
        delete: dict[CommitRef, str | None] = {}
        counted = 0
        sound = {kept.sha256 for kept in whole}
        for ref in reachable:
            is_whole = save[ref] in first
            counted += ref.sha256 in sound
            # And enough are newer
            torn = not is_whole and counted >= oldest_needed and ref.sha256 not in pinned
            if (is_whole and ref not in keep) or torn:
                found = save[ref]
                delete[ref] = found and found[0]
        for ref in self._stale(store, traced):
            # Data that a kept commit shares stays: only the manifest is deleted
            if ref.sha256 not in pinned:
                found = self._save(store, ref)
                if found is None or found in needed:
                    delete[ref] = None
                else:
                    delete[ref] = found[0]
        # Oldest first: if time runs out, the rest is still an unbroken sequence up to the newest
        # commit.
        return RetentionChoice(
            keep, dict(sorted(delete.items(), key=lambda item: (item[0].step, item[0].generation)))
        )

    def _save(self, store: Store, ref: CommitRef) -> tuple[str, int] | None:
        manifest = self._manifest(store, ref)
        if manifest is None:
            return None
        return (manifest.save.generation, manifest.save.step)

    def _whole_commit(self, store: Store, ref: CommitRef, pinned: set[str]) -> WholeCommit | None:
        """Return the properties of a commit that the policy uses, or None if the commit is torn.

        A commit is torn if its manifest is unreadable, or if a data object is missing or has
        another size. The data itself is not read: it was verified when it was stored, and is
        verified again on restore.
        """
        manifest = self._manifest(store, ref)
        if manifest is None:
            return None
        sizes = {
            meta.key: meta.size
            for meta in store.list(layout.data_prefix(manifest.save.generation, ref.step))
        }
        if any(sizes.get(data.key) != data.size for data in manifest.data):
            return None
        metric = metric_at_step(
            manifest.common.get("extra") or {}, ref.step, self._policy.best_metric
        )
        return WholeCommit(
            sha256=ref.sha256,
            step=ref.step,
            size=manifest.size,
            metric=metric,
            pinned=ref.sha256 in pinned,
        )

    def _stale(self, store: Store, traced: list[TracedCommit]) -> list[CommitRef]:
        """List the unreachable commits that are older than `orphan_seconds`, according to the
        store's clock.

        Commits whose signature is refused are not included, since they may be sound.
        """
        out = [
            found for found in traced if found.unreachable_because is not None and not found.refused
        ]
        if not out:
            return []
        now = self._clock.now(store, max(found.modified for found in traced))
        return [found.ref for found in out if now - found.modified > self._policy.orphan_seconds]

    def _manifest(self, store: Store, ref: CommitRef) -> Manifest | None:
        if ref.sha256 not in self._manifests:
            try:
                self._manifests[ref.sha256] = fetch_verified(store, ref.key, Manifest.from_bytes)
            except (CorruptCommit, ObjectNotFound):
                return None
        return self._manifests[ref.sha256]


def choose_commits(commits: Sequence[WholeCommit], policy: RetentionPolicy) -> dict[str, str]:
    """Return {SHA-256 of the manifest: reason} for each commit that the policy keeps.

    `commits` are all whole commits, newest first.
    """
    last = list(commits[: policy.keep_last])
    every = _first_of_each_window(commits, policy.keep_every_steps)
    scored = [(commit.metric, commit) for commit in commits if commit.metric is not None]
    # Of equal ones, the newer stays first
    scored.sort(key=lambda pair: pair[0], reverse=policy.best_mode == "max")
    best = [commit for _, commit in scored[: policy.keep_best]]
    pinned = [commit for commit in commits if commit.pinned]
    rules = {
        "pinned": pinned,
        "last": last,
        "best": best,
        f"every {policy.keep_every_steps} steps": every,
    }
    chosen_by: list[tuple[str, str]] = []
    for reason, chosen in rules.items():
        chosen_by += [(commit.sha256, reason) for commit in chosen]
    reasons = group_by_key(chosen_by)
    dropped = _beyond_cap(
        commits, reasons, policy, expendable=[*every, *reversed(best), *reversed(last)]
    )
    return {sha256: ", ".join(found) for sha256, found in reasons.items() if sha256 not in dropped}


def metric_at_step(extra: Mapping[str, object], step: int, name: str) -> float | None:
    """Return the metric `name` from a commit's `extra`; None if it was not measured at exactly this
    step.
    """
    return metrics_at_step(extra, step).get(name)


def metrics_at_step(extra: Mapping[str, object], step: int) -> dict[str, float]:
    """Return the finite metrics in a commit's `extra`; {} if they were not measured at exactly this
    step.
    """
    metrics = extra.get("metrics")
    if not isinstance(metrics, Mapping) or metrics.get("step") != step:
        return {}
    return {
        name: float(value)
        for name, value in metrics.items()
        if name != "step" and isinstance(value, int | float) and math.isfinite(value)
    }


def delete_commit(
    store: Store, ref: CommitRef, generation: str | None, *, newest: int, full: bool = False
) -> bool:
    """Delete a commit and its data. Return False if the commit has been pinned in the meantime.

    Args:
        generation: name of the generation that saved the commit; None if the manifest is
            unreadable. Without it only the manifest is deleted now, and the data is deleted later
            as orphans.
        newest: number of the generation that deletes the commit.
        full: whether the store is full, so that a failure to write the tombstone is ignored. If the
            deletion is then interrupted, the remaining objects become orphans.

    Raises GenerationSuperseded, and deletes nothing, if a newer generation is on record: another
    gang owns the job.
    """
    tombstone = {"version": VERSION, "key": ref.key, "generation": generation, "step": ref.step}
    if signer() is not None:
        tombstone["signed"] = True
    content = seal(tombstone)
    own_key = layout.tombstone_key(ref.sha256)
    try:
        try:
            store.put(own_key, content, tags=layout.TOMBSTONE_TAGS)
        except StoreForbidden:  # a role may be allowed to put and not to tag
            store.put(own_key, content)
    except StoreError:
        if not full:
            raise
    number = newest_generation_number(store, near=newest)
    if number > newest:
        store.delete(own_key)
        raise _superseded_error(store, number, newest)
    if store.head(layout.pin_key(ref.sha256)) is not None:
        store.delete(own_key)
        return False
    _delete_objects(store, tombstone)
    return True


def finish_deletions(store: Store, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Finish the deletions that earlier runs left incomplete, and remove their tombstones.

    `interrupted` is called after each deletion; if it returns True, this function returns. So every
    call finishes at least one deletion.
    """
    for meta in store.list("tombstones"):
        try:
            tombstone = fetch_verified(store, meta.key, unseal, f"{store.uri}/{meta.key}")
        except (ObjectNotFound, CorruptCommit):
            continue  # another process was faster, or the tombstone is unreadable
        sha256 = CommitRef.from_key(tombstone["key"]).sha256
        if (
            store.head(layout.pin_key(sha256)) is not None
            and store.head(tombstone["key"]) is not None
        ):
            store.delete(meta.key)  # the deletion was cut short before it looked for the pin
            continue
        _delete_objects(store, tombstone)
        for key in (layout.quarantine_key(sha256), layout.verified_key(sha256), meta.key):
            store.delete(key)
        if interrupted():
            return


def find_orphans(store: Store, clock: StoreClock, *, older_than_seconds: float) -> list[ObjectMeta]:
    """List objects that no commit needs and that are older than the given age, according to the
    store's clock.

    These are data and indexes of checkpoints without a commit, signatures without a commit, and
    secrets that agents shared for earlier starts. The objects of a checkpoint are listed together
    or not at all, because a single young object means that the upload may still be running.
    """
    # Listed before the commits: whatever is committed meanwhile is then seen as committed.
    listed = {prefix: store.list(prefix) for prefix in ("data", "index", "signatures", "secrets")}
    commits = store.list("commits")
    committed: set[tuple[int, int] | str] = set()
    for meta in commits:
        try:
            ref = CommitRef.from_key(meta.key)
        except ValueError:
            continue  # not a commit key
        committed |= {(ref.generation, ref.step), ref.sha256}
    groups: dict[tuple[str, ...], list[ObjectMeta]] = defaultdict(list)
    for meta in (*listed["data"], *listed["index"]):
        parts = meta.key.split("/")
        number = parts[1].partition("-")[0]
        named = len(parts) == 4 and number.isdigit() and parts[2].isdigit()
        if named and (int(number), int(parts[2])) not in committed:
            groups[parts[1], parts[2]].append(meta)
    for meta in listed["signatures"]:
        if meta.key.rpartition("/")[2].removesuffix(".json") not in committed:
            groups[(meta.key,)].append(meta)
    for meta in listed["secrets"]:
        groups[(meta.key,)].append(meta)
    if not groups:
        return []
    listings = itertools.chain(*listed.values(), commits)
    now = clock.now(store, max(meta.modified for meta in listings))
    old: list[ObjectMeta] = []
    for group in groups.values():
        newest = max(meta.modified for meta in group)
        if now - newest > older_than_seconds:
            old += group
    return old


def _first_of_each_window(commits: Sequence[WholeCommit], steps: int | None) -> list[WholeCommit]:
    """Return the first commit at or after each multiple of `steps`, oldest first."""
    firsts: dict[int, WholeCommit] = {}
    if not steps:
        return []
    for commit in commits:
        window = commit.step // steps
        if window and (window not in firsts or commit.step < firsts[window].step):
            firsts[window] = commit
    return [firsts[window] for window in sorted(firsts)]


def _beyond_cap(
    commits: Sequence[WholeCommit],
    kept: Collection[str],
    policy: RetentionPolicy,
    *,
    expendable: Sequence[WholeCommit],
) -> set[str]:
    """Return the commits to drop, by manifest SHA-256, so that the remaining ones meet the size
    cap.

    `kept` has the kept commits by manifest SHA-256. `expendable` lists commits in the order in
    which to drop them; a commit that occurs twice is dropped at its last position.
    """
    if policy.max_total_bytes is None:
        return set()
    total = sum(commit.size for commit in commits if commit.sha256 in kept)
    places = {commit.sha256: number for number, commit in enumerate(expendable)}
    dropped: set[str] = set()
    for number, commit in enumerate(expendable):
        may_go = not commit.pinned and commit is not commits[0] and places[commit.sha256] == number
        if may_go and total > policy.max_total_bytes:
            dropped.add(commit.sha256)
            total -= commit.size
    return dropped


def _delete_all(
    store: Store, keys: Iterable[str], interrupted: Callable[[], bool] = lambda: False
) -> None:
    """Delete keys in parallel, until `interrupted` returns True."""

    def delete(key: str) -> None:
        if not interrupted():
            store.delete(key)

    with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="delete") as pool:
        list(pool.map(delete, keys))


def _superseded_error(store: Store, number: int, ours: int) -> GenerationSuperseded:
    return GenerationSuperseded(
        f"{store.uri}: generation {number} was opened while generation {ours} was running; "
        "what this gang commits from now on would never be restored"
    )


def _delete_objects(store: Store, tombstone: dict[str, Any]) -> None:
    store.delete(tombstone["key"])
    if tombstone.get("signed"):
        store.delete(layout.signature_key(CommitRef.from_key(tombstone["key"]).sha256))
    if tombstone["generation"] is None:
        return
    for prefix in (layout.index_prefix, layout.data_prefix):
        _delete_all(
            store,
            [meta.key for meta in store.list(prefix(tombstone["generation"], tombstone["step"]))],
        )


def _sweep_orphans(
    store: Store,
    clock: StoreClock,
    *,
    older_than_seconds: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> None:
    orphans = find_orphans(store, clock, older_than_seconds=older_than_seconds)
    _delete_all(store, [meta.key for meta in orphans], interrupted)
