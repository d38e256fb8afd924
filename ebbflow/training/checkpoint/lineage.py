"""Decide which commits a new generation may start from. Torch-free.

A generation is one start of the gang. Its record names its parent, the commit from which it
started, so the records form a chain from the newest generation back to the first. A commit is
reachable if its generation is in this chain and its step is not above the step from which the next
generation in the chain started. Only reachable commits may be restored; messages say that such a
commit "counts".

So a higher step alone does not make a commit the newest one: late commits of a superseded gang, and
commits of steps that a rewind abandoned, are unreachable. Each generation saves only steps after
its start, so the reachable commit with the highest step is the newest. Commits are listed highest
step first, so the newest is usually on the first page of a listing.
"""

from __future__ import annotations

import itertools
import secrets
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from ebbflow.core import layout
from ebbflow.core.errors import ObjectNotFound, StoreUnavailable
from ebbflow.core.retry import backoff_pauses
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.manifest import VERSION, Manifest
from ebbflow.training.checkpoint.reader import find_problem_in_new_process
from ebbflow.training.checkpoint.signing import Signer, signer
from ebbflow.training.checkpoint.verified_io import fetch_verified, put_verified, seal, unseal
from ebbflow.training.errors import (
    CheckpointError,
    CorruptCommit,
    DamagedLineage,
    NothingToRestore,
    RefusedCommit,
    TwoLaunchers,
    UnreliableReader,
)

LISTING_SECONDS = 10.0
_BEFORE = 500  # listings begin this many numbers before the wanted one; a page holds 1,000
# Commits that a start may restore. If none verifies, all are quarantined and the next start gets
# older ones.
CANDIDATES = 16
FROM_SCRATCH = "from-scratch"  # a permit: see ebbflow.training.checkpoint.rollback
NO_PARENT = ""  # instead of a parent: start from scratch although there are commits


@dataclass(frozen=True)
class Generation:
    """One start of the gang, with the commit from which it started."""

    number: int
    id: str  # random text that distinguishes two launchers which open the same number
    # Key of the commit from which it starts; None if it starts from scratch
    parent: str | None = None
    parent_step: int = 0  # step of that commit; 0 without one

    @property
    def name(self) -> str:
        return layout.generation_name(self.number, self.id)


class GenerationRecords:
    """The numbers and ids of the recorded generations, read by listing the store.

    `near` is a number that the newest generation has probably reached. The listing starts 500
    numbers below it, with one request per 1,000 records. If it finds no number of at least `near`,
    all records are listed.
    """

    def __init__(self, job_store: Store, *, near: int) -> None:
        self._store = job_store
        self._ids: dict[int, list[str]] = {}
        first = max(0, near - _BEFORE)
        self._list(first, None)
        if first and self.newest < near:
            self._list(0, None)

    @property
    def newest(self) -> int:
        """The highest number; 0 if there is none."""
        return max(self._ids, default=0)

    def ids(self, number: int) -> list[str]:
        """Return the ids that are recorded under a generation number.

        Usually there is one id or none. There are two if two launchers opened the generation.
        """
        if number not in self._ids:
            self._list(max(0, number - _BEFORE), number)
        return self._ids.get(number, [])

    def _list(self, first: int, last: int | None) -> None:
        """List the records with numbers from `first` to `last`, or from `first` on if `last` is
        None.
        """
        found: dict[int, list[str]] = defaultdict(list)
        for page in self._store.pages("generations", after=f"generations/{first:06d}"):
            for meta in page:
                number, _, generation_id = (
                    meta.key.rpartition("/")[2].removesuffix(".json").partition("-")
                )
                if not number.isdigit() or not generation_id:
                    continue
                # A copy under an unpadded number is the same record
                if generation_id not in found[int(number)]:
                    found[int(number)].append(generation_id)
            if last is not None and any(number > last for number in found):
                break
        self._ids |= {
            number: ids for number, ids in found.items() if last is None or number <= last
        }


class LineageChain:
    """The newest generation and its ancestors.

    It reads records one by one, only as far back as a call needs.

    For `near` see `GenerationRecords`. Raises DamagedLineage if a record is missing or wrong, and
    TwoLaunchers if a number has two records.
    """

    def __init__(self, job_store: Store, *, near: int = 0) -> None:
        self._store = job_store
        self._records = GenerationRecords(job_store, near=near)
        self.newest = self._records.newest
        if self.newest < near:  # going on without it would silently start from scratch
            raise DamagedLineage(
                f"{self._store.uri}: there are commits of generation {near}, its record is "
                f"missing from generations/ and the newest there is {self.newest}; fix: put the "
                "record back, or export a commit into a new job"
            )
        self.limits: dict[int, float] = {}  # by number, the last reachable step
        # Number and limit of the next ancestor to read
        self._ahead: tuple[int, float] | None = None
        if self.newest:
            self._follow(self.newest, float("inf"))

    def is_in_history(self, number: int, step: int) -> bool:
        """Return whether the commit of generation `number` at `step` is part of the newest
        generation's history.

        There are two conditions. The commit's generation must be the newest one or one of its
        ancestors. And `step` must not exceed the limit of the commit's generation: the step from
        which the next generation in the chain started. An older generation never has a higher limit
        than a newer one, so the search stops at the first limit below `step`.
        """
        while self._ahead is not None and number <= self._ahead[0] and step <= self._ahead[1]:
            self._follow(*self._ahead)
        return number in self.limits and step <= self.limits[number]

    def back_to(self, oldest: int) -> dict[int, float]:
        """Return the last step that the job's history includes, for each generation back to number
        `oldest`.
        """
        while self._ahead is not None and self._ahead[0] >= oldest:
            self._follow(*self._ahead)
        return self.limits

    def _follow(self, number: int, limit: float) -> None:
        ids = self._records.ids(number)
        if not ids:
            raise DamagedLineage(
                f"{self._store.uri}: the record of generation {number} is missing from generations/"
            )
        if len(ids) > 1:
            keys = " and ".join(layout.generation_key(number, i) for i in ids)
            raise TwoLaunchers(
                f"{self._store.uri}: generation {number} has two records: {keys}; "
                "hint: stop one of the two launchers and delete the record of the one to give up"
            )
        self.limits[number] = limit
        self._ahead = None
        generation = read_generation(self._store, number, ids[0])
        if generation.parent is not None:
            _, parent_number, _ = layout.parse_commit_key(generation.parent)
            if parent_number >= number:
                raise DamagedLineage(
                    f"{self._store.uri}: generation {number} names a parent of generation "
                    f"{parent_number}"
                )
            self._ahead = parent_number, min(limit, generation.parent_step)


@dataclass(frozen=True)
class CommitRef:
    """The key of a commit, and what the key contains: step, generation number and SHA-256 of the
    manifest.
    """

    key: str
    step: int
    generation: int
    sha256: str

    @classmethod
    def from_key(cls, key: str) -> CommitRef:
        """Parse a commit key. Raises ValueError if `key` is not a commit key."""
        return cls(key, *layout.parse_commit_key(key))


@dataclass(frozen=True)
class TracedCommit:
    """A commit, and whether it is reachable, which means that it may be restored."""

    ref: CommitRef
    unreachable_because: str | None  # None if it is reachable
    modified: float  # Unix time at which its manifest was written
    # only its signature is missing or wrong. The commit may be sound, so retention does not delete
    # it
    refused: bool = False


@dataclass
class GenerationOpening:
    """A launcher's attempts to open one generation. Each attempt takes a new number.

    A put that timed out may still reach the store later. If a later attempt reused the number and
    id, that late record could overwrite the newer record. With separate numbers, the late record is
    a generation without descendants. It conflicts only with another launcher's record of the same
    number.
    """

    id: str = field(default_factory=lambda: secrets.token_hex(4))  # the same for all tries
    number: int = 0  # the highest number that a try has used; 0 before the first


def read_generation(job_store: Store, number: int, generation_id: str) -> Generation:
    """Read a generation's record.

    Raises ObjectNotFound if there is no record, and DamagedLineage if the record is damaged or
    belongs to another generation.
    """
    key = layout.generation_key(number, generation_id)
    try:
        record = fetch_verified(job_store, key, unseal, f"{job_store.uri}/{key}")
    except CorruptCommit as error:
        raise DamagedLineage(str(error)) from error
    if (record["generation"], record["id"]) != (number, generation_id):
        raise DamagedLineage(
            f"{job_store.uri}/{key}: is the record of {record['generation']}-{record['id']}"
        )
    return Generation(number, generation_id, record["parent"], record["parent_step"])


def amend_parent(job_store: Store, opened: Generation, actual: Generation) -> None:
    """Replace the parent in the record of the generation `opened` by `actual.parent`, an older
    commit.

    Call this if the recorded parent could not be restored. Otherwise the abandoned commits between
    the two parents would stay reachable. One process calls it, before the generation's first save.
    Raises StoreError or CorruptCommit.
    """
    key = layout.generation_key(opened.number, opened.id)
    record = fetch_verified(job_store, key, unseal, f"{job_store.uri}/{key}")
    start = {"parent": actual.parent, "parent_step": actual.parent_step, "refused": opened.parent}
    put_verified(job_store, key, seal({**record, **start}))


def newest_generation_number(job_store: Store, *, near: int = 0) -> int:
    """Return the highest recorded generation number, or 0 if there is none.

    For `near` see `GenerationRecords`.
    """
    return GenerationRecords(job_store, near=near).newest


def await_listed_ids(job_store: Store, generation: Generation) -> list[str]:
    """Wait until the store lists the record of `generation`, and return all ids recorded under its
    number.

    More than one id means that several launchers opened it simultaneously. A store may list a new
    object only after a delay. A launcher that waits until its own record is listed also sees every
    record that was listed earlier, and the next launcher sees this number and takes a higher
    number. Raises StoreUnavailable if the record is not listed within 10 s.
    """
    limit = time.monotonic() + LISTING_SECONDS
    for pause in backoff_pauses(longest_seconds=0.5):
        ids = GenerationRecords(job_store, near=generation.number).ids(generation.number)
        if generation.id in ids:
            return ids
        if time.monotonic() >= limit:
            break
        time.sleep(pause)
    raise StoreUnavailable(
        f"list {job_store.uri}/generations: {generation.name}.json was put and is not listed "
        f"within {LISTING_SECONDS:g} s; fix: the store's listings lag too far behind; ask its "
        "operator"
    )


def open_generation(
    job_store: Store,
    *,
    run: str,
    attempt: int,
    parent: str | None = None,
    opening: GenerationOpening | None = None,
) -> Generation:
    """Record the next generation and return it. One process per start calls this.

    By default the generation starts from the newest readable commit that is reachable. `parent` is
    the key of another commit to start from (a rewind, which makes later commits unreachable), or
    `NO_PARENT`. Pass the same `opening` to every attempt of one start, so that no attempt reuses a
    number.

    Raises:
        NothingToRestore: the job has commits, none of them can be restored, and no permit (a
            person's consent, see `checkpoint.rollback`) allows a start from scratch.
        UnreliableReader: this process finds a manifest damaged that another process reads
            correctly.
        TwoLaunchers: another launcher opened the same number; this record has been withdrawn.
        CheckpointError: the parent is being deleted.
    """
    job_store.check_marker()
    opening = opening or GenerationOpening()
    seen = max((ref.generation for ref, _ in next(_commit_pages(job_store), [])), default=0)
    number = max(newest_generation_number(job_store, near=seen), opening.number) + 1
    chosen = choose_parent(job_store, parent)
    generation = Generation(number, opening.id, chosen and chosen.key, chosen.step if chosen else 0)
    record = {
        "version": VERSION,
        "generation": generation.number,
        "id": generation.id,
        "parent": generation.parent,
        "parent_step": generation.parent_step,
        "run": run,
        "attempt": attempt,
        "t_wall": time.time(),
    }
    key = layout.generation_key(number, generation.id)
    opening.number = number
    job_store.put(key, seal(record))
    others = [i for i in await_listed_ids(job_store, generation) if i != generation.id]
    if others:  # every launcher that sees a rival withdraws, so at most one goes on
        job_store.delete(key)
        rivals = ", ".join(layout.generation_key(number, i) for i in others)
        raise TwoLaunchers(
            f"{job_store.uri}: generation {number} was opened twice at once: {key} (this one, "
            f"withdrawn) and {rivals}; hint: two launchers work on one job; stop one of them, "
            "then start again"
        )
    # A deletion puts the commit's tombstone, checks for generations, and deletes the manifest: one
    # of the two stops.
    if chosen and (
        job_store.head(layout.tombstone_key(chosen.sha256)) or job_store.head(chosen.key) is None
    ):
        job_store.delete(key)
        raise CheckpointError(
            f"{job_store.uri}/{chosen.key}: is being deleted, or was; hint: start again, from "
            "another commit"
        )
    return generation


def choose_parent(job_store: Store, parent: str | None) -> CommitRef | None:
    """Return the commit from which a start continues; None for a start from scratch.

    `parent` and the errors are those of `open_generation`.
    """
    if parent == NO_PARENT:
        return None
    sound = (ref for ref in newest_commits(job_store) if is_readable_commit(job_store, ref))
    if parent is None:
        chosen = next(sound, None)
    else:
        chosen = _given_parent(job_store, parent)
    refused = _report_refused(job_store, chosen)
    lost = _commits_of_lineage(job_store) if chosen is None else []
    if lost:
        cause = (
            f"none of its {len(lost)} commits can be restored, the newest of step {lost[0].step}"
        )
        if refused:
            cause += f": {refused}"
        if max(ref.generation for ref in lost) > permitted_generation(job_store, FROM_SCRATCH):
            raise nothing_to_restore_error(job_store, cause)
        _warn(f"{job_store.uri}: {cause}; begin anew, as permitted")
    return chosen


def nothing_to_restore_error(job_store: Store, cause: str) -> NothingToRestore:
    """Return the error for a start that would lose every commit of the job."""
    return NothingToRestore(
        f"{job_store.uri}: {cause}; nothing was started; hint: where `ebbflow checkpoints verify "
        f"{job_store.uri}` on another machine finds a commit sound, delete its record in "
        "quarantine/ and start again; to give up all steps and begin anew, start again with "
        "--from-scratch"
    )


def permitted_generation(job_store: Store, what: str) -> int:
    """Return the newest generation that a permit of the user covers; 0 without a permit.

    `what` is the kind of permit, such as "from-scratch". See `checkpoint.rollback`.
    """
    names = (
        meta.key.rpartition("/")[2].removesuffix(".json")
        for meta in job_store.list(layout.permit_prefix(what))
    )
    return max((int(name) for name in names if name.isascii() and name.isdigit()), default=0)


def newest_commits(job_store: Store) -> Iterator[CommitRef]:
    """Yield the commits that may be restored, newest first, listing only as many pages as needed.

    If this process checks signatures, commits without a valid signature are left out. Raises
    DamagedLineage or TwoLaunchers.
    """
    return (ref for ref, refused in _newest_with_refusals(job_store) if not refused)


def reachable_commits(job_store: Store, *, limit: int | None = None) -> list[CommitRef]:
    """Return the newest `limit` (default: all) commits that may be restored.

    Raises the errors of `newest_commits`.
    """
    return list(islice(newest_commits(job_store), limit))


def trace_lineage(job_store: Store) -> list[TracedCommit]:
    """List all commits: first the reachable ones, newest first, then the others with the reason for
    each.
    """
    found = list(itertools.chain.from_iterable(_commit_pages(job_store)))
    if not found:
        return []
    quarantined = _names_below(job_store, "quarantine")
    tombstones = _names_below(job_store, "tombstones")
    chain = LineageChain(job_store, near=max(ref.generation for ref, _ in found))
    limits = chain.back_to(min(ref.generation for ref, _ in found))
    newest = chain.newest
    signs = signer()
    traced = []
    for ref, modified in found:
        reason = None
        if ref.sha256 in tombstones:
            reason = "it is being deleted"
        elif ref.sha256 in quarantined:
            reason = f"it is quarantined, see {layout.quarantine_key(ref.sha256)}"
        elif ref.generation not in limits:
            reason = f"generation {ref.generation} is no ancestor of generation {newest}"
        elif ref.step > limits[ref.generation]:
            reason = f"generation {ref.generation} was left at step {int(limits[ref.generation])}"
        if reason is None:
            refused = _refusal_reason(signs, job_store, ref)
        else:
            refused = ""
        traced.append(TracedCommit(ref, refused or reason, modified, refused=bool(refused)))
    # As listed: newest first
    return sorted(traced, key=lambda commit: commit.unreachable_because is not None)


def is_readable_commit(job_store: Store, ref: CommitRef) -> bool:
    """Return whether a commit's manifest is readable, so that a generation can start from it.

    If not, print a warning.

    If the manifest looks damaged, a new process reads it again. Raises UnreliableReader if that
    process finds the manifest intact, because then this process misreads data.
    """
    try:
        fetch_verified(job_store, ref.key, Manifest.from_bytes)
    except (CorruptCommit, ObjectNotFound) as error:
        if isinstance(error, CorruptCommit) and not find_problem_in_new_process(
            job_store.uri, ref.key
        ):
            raise UnreliableReader(
                f"this machine ({socket.gethostname()}) reads wrongly: {error}; a new process "
                "finds it as it was saved, so the commit is sound; fix: check that machine's "
                "memory, disk and network"
            ) from error
        _warn(f"passed over as a parent: {error}")
        return False
    return True


def _newest_with_refusals(job_store: Store) -> Iterator[tuple[CommitRef, str]]:
    """Yield each reachable commit, newest first, with the reason why its signature is refused.

    The reason is "" if the signature is not refused.
    """
    chain = None
    out = set()
    signs = signer()
    for page in _commit_pages(job_store):
        if chain is None:
            chain = LineageChain(job_store, near=max(ref.generation for ref, _ in page))
            out = _names_below(job_store, "quarantine") | _names_below(job_store, "tombstones")
        for ref, _ in page:
            if ref.sha256 not in out and chain.is_in_history(ref.generation, ref.step):
                yield ref, _refusal_reason(signs, job_store, ref)


def _refusal_reason(signs: Signer | None, job_store: Store, ref: CommitRef) -> str:
    try:
        if signs is not None:
            signs.check(job_store, ref.key)
    except RefusedCommit as error:
        return str(error)
    return ""


def _report_refused(job_store: Store, chosen: CommitRef | None) -> str:
    """Warn about each commit newer than `chosen` whose signature is refused.

    Return the first reason, or "".
    """
    first = ""
    for ref, refused in _newest_with_refusals(job_store) if signer() is not None else ():
        if ref == chosen:
            break
        if refused:
            first = first or refused
            _warn(f"passed over as a parent: {refused}")
    return first


def _commit_pages(job_store: Store) -> Iterator[list[tuple[CommitRef, float]]]:
    """Yield non-empty pages of commits, highest step first, each commit with the Unix time of its
    manifest.
    """
    for page in job_store.pages("commits"):
        found = []
        for meta in page:
            try:
                found.append((CommitRef.from_key(meta.key), meta.modified))
            except ValueError:
                continue  # not a commit key
        if found:
            yield found


def _warn(text: str) -> None:
    print(f"checkpoint: WARNING: {text}", file=sys.stderr)


def _names_below(job_store: Store, prefix: str) -> set[str]:
    return {meta.key.rpartition("/")[2].removesuffix(".json") for meta in job_store.list(prefix)}


def _commits_of_lineage(job_store: Store) -> list[CommitRef]:
    """List the commits that would be reachable if all were readable.

    This includes quarantined commits, but not those that are being deleted.
    """
    commits = itertools.chain.from_iterable(_commit_pages(job_store))
    found = [ref for ref, _ in commits]
    if not found:
        return []
    chain = LineageChain(job_store, near=max(ref.generation for ref in found))
    gone = _names_below(job_store, "tombstones")
    return [
        ref
        for ref in found
        if ref.sha256 not in gone and chain.is_in_history(ref.generation, ref.step)
    ]


def _given_parent(job_store: Store, key: str) -> CommitRef:
    ref = CommitRef.from_key(key)
    fetch_verified(job_store, key, Manifest.from_bytes)
    signs = signer()
    if signs is not None:
        signs.check(job_store, key)
    for name in (layout.quarantine_key(ref.sha256), layout.tombstone_key(ref.sha256)):
        if job_store.head(name) is not None:
            raise CheckpointError(f"{job_store.uri}/{key}: cannot be a parent: there is {name}")
    return ref
