"""Lineage, not step, decides which commit is the newest. Torch-free: launchers and commands use it.

Each start of the gang is a generation with a record that names the commit it started from. Walking those records from
the newest generation back gives a chain; of an ancestor only the commits up to the step that its child started from
count. So a zombie's late commit and the steps abandoned by a rewind are never restored, although their step is higher.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from infra.errors import ObjectNotFound, StoreAway
from infra.layout import generation_key, generation_name, parse_commit_key, quarantine_key, tombstone_key
from infra.store import Store
from training.checkpoint.checksum import seal, unseal
from training.checkpoint.deadline import pauses
from training.checkpoint.fetch import fetched
from training.checkpoint.manifest import VERSION, Manifest
from training.errors import CheckpointError, CorruptCommit, DamagedLineage, TwoLaunchers

LISTING_SECONDS = 10.0


@dataclass(frozen=True)
class Generation:
    """One start of the gang. parent: the commit key it starts from, None: afresh; parent_step: that commit's step."""

    number: int
    id: str
    parent: str | None = None
    parent_step: int = 0

    @property
    def name(self) -> str:
        return generation_name(self.number, self.id)


@dataclass(frozen=True)
class CommitRef:
    """A commit by its key: step, number of its generation, SHA-256 of its manifest."""

    key: str
    step: int
    generation: int
    sha256: str

    @classmethod
    def from_key(cls, key: str) -> CommitRef:
        """Raises ValueError for what is not a commit key."""
        return cls(key, *parse_commit_key(key))


@dataclass(frozen=True)
class Traced:
    """A commit and its standing. unreachable_because: None when it counts. modified: Unix time of its manifest."""

    ref: CommitRef
    unreachable_because: str | None
    modified: float


def open_generation(job_store: Store, *, run: str, attempt: int, parent: str | None = None) -> Generation:
    """Number, name and record the next start of the gang; its parent is the newest reachable commit that reads well.

    parent: start from this commit instead (a rewind: what came after it no longer counts). To be called by one
    process per start. Raises TwoLaunchers when another opened the same number meanwhile, after withdrawing its own.
    """
    number = newest_number(job_store) + 1
    chosen = _sound_parent(job_store) if parent is None else _given_parent(job_store, parent)
    generation = Generation(number, secrets.token_hex(4), chosen and chosen.key, chosen.step if chosen else 0)
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
    key = generation_key(number, generation.id)
    job_store.put(key, seal(record))
    others = [i for i in _listed_ids(job_store, generation) if i != generation.id]
    if others:  # whoever sees the other withdraws: then at most one goes on, whatever the order
        job_store.delete(key)
        rivals = ", ".join(generation_key(number, i) for i in others)
        raise TwoLaunchers(
            f"{job_store.uri}: generation {number} was opened twice at once: {key} (this one, withdrawn) and {rivals}; "
            "hint: two launchers work on one job; stop one of them, then start again"
        )
    if chosen is not None and job_store.head(tombstone_key(chosen.sha256)) is not None:
        job_store.delete(key)  # who deletes it looks for newer generations after its tombstone: one of both gives way
        raise CheckpointError(f"{job_store.uri}/{chosen.key}: is being deleted; hint: start again, from another commit")
    return generation


def reachable_commits(job_store: Store) -> list[CommitRef]:
    """The commits that may be restored, newest of the lineage first. Raises DamagedLineage, TwoLaunchers."""
    return [traced.ref for traced in trace_lineage(job_store) if traced.unreachable_because is None]


def trace_lineage(job_store: Store) -> list[Traced]:
    """All commits: the reachable ones first, newest of the lineage first; then the others, each with its reason."""
    found = list(_commits(job_store))
    if not found:
        return []
    quarantined = _names(job_store, "quarantine")
    tombstones = _names(job_store, "tombstones")
    oldest = min(ref.generation for ref, _ in found)
    limits = {number: limit for number, _, limit in _chain(job_store, oldest)}
    newest = max(limits, default=0)
    traced = []
    for ref, modified in found:
        reason = None
        if ref.sha256 in tombstones:
            reason = "it is being deleted"
        elif ref.sha256 in quarantined:
            reason = f"it is quarantined, see {quarantine_key(ref.sha256)}"
        elif ref.generation not in limits:
            reason = f"generation {ref.generation} is no ancestor of generation {newest}"
        elif ref.step > (limit := limits[ref.generation]):
            reason = f"generation {ref.generation} was left at step {int(limit)}"
        traced.append(Traced(ref, reason, modified))
    return sorted(traced, key=lambda t: (t.unreachable_because is not None, -t.ref.generation, -t.ref.step, t.ref.key))


def read_generation(job_store: Store, number: int, generation_id: str) -> Generation:
    """A generation as it was opened, with its parent. Raises DamagedLineage, and ObjectNotFound without a record."""
    key = generation_key(number, generation_id)
    try:
        record = fetched(job_store, key, unseal, f"{job_store.uri}/{key}")
    except CorruptCommit as error:
        raise DamagedLineage(str(error)) from error
    if (record["generation"], record["id"]) != (number, generation_id):
        raise DamagedLineage(f"{job_store.uri}/{key}: is the record of {record['generation']}-{record['id']}")
    return Generation(number, generation_id, record["parent"], record["parent_step"])


def newest_number(job_store: Store) -> int:
    """The highest generation number on record, 0 when there is none."""
    return max(_records(job_store), default=0)


def _chain(job_store: Store, oldest: int) -> Iterator[tuple[int, str, float]]:
    """(number, id, last step that counts) from the newest generation back, as far as generation `oldest`."""
    records = _records(job_store)
    number, limit = max(records, default=0), float("inf")
    while number >= oldest and records:
        if number not in records:
            raise DamagedLineage(f"{job_store.uri}: the record of generation {number} is missing from generations/")
        if len(ids := records[number]) > 1:
            keys = " and ".join(generation_key(number, i) for i in ids)
            raise TwoLaunchers(
                f"{job_store.uri}: generation {number} has two records: {keys}; "
                "hint: stop one of the two launchers and delete the record of the one to give up"
            )
        yield number, ids[0], limit
        generation = read_generation(job_store, number, ids[0])
        if generation.parent is None:
            return
        _, parent_number, _ = parse_commit_key(generation.parent)
        if parent_number >= number:
            raise DamagedLineage(f"{job_store.uri}: generation {number} names a parent of generation {parent_number}")
        number, limit = parent_number, generation.parent_step


def _records(job_store: Store) -> dict[int, list[str]]:
    """Ids by generation number, from the names of the records alone."""
    found: dict[int, list[str]] = defaultdict(list)
    for meta in job_store.list("generations"):
        number, _, generation_id = meta.key.rsplit("/", 1)[-1].removesuffix(".json").partition("-")
        if number.isdigit() and generation_id:
            found[int(number)].append(generation_id)
    return found


def _listed_ids(job_store: Store, generation: Generation) -> list[str]:
    """Ids on record under the number of `generation`, as soon as its own is listed.

    A listing may lag behind the puts. Who waits to see itself also sees the rivals that saw themselves before; and a
    generation that goes on has been listed, so that the next launcher does not give its number again.
    """
    limit = time.monotonic() + LISTING_SECONDS
    for pause in pauses(longest_seconds=0.5):
        if generation.id in (ids := _records(job_store).get(generation.number, [])):
            return ids
        if time.monotonic() >= limit:
            break
        time.sleep(pause)
    raise StoreAway(
        f"list {job_store.uri}/generations: {generation.name}.json was put and is not listed within "
        f"{LISTING_SECONDS:g} s; fix: the listings of this store lag too far behind; ask who runs it"
    )


def _commits(job_store: Store) -> Iterator[tuple[CommitRef, float]]:
    for meta in job_store.list("commits"):
        try:
            yield CommitRef.from_key(meta.key), meta.modified
        except ValueError:
            continue  # not a key of ours


def _names(job_store: Store, prefix: str) -> set[str]:
    return {meta.key.rsplit("/", 1)[-1].removesuffix(".json") for meta in job_store.list(prefix)}


def _sound_parent(job_store: Store) -> CommitRef | None:
    for ref in reachable_commits(job_store):
        try:
            fetched(job_store, ref.key, Manifest.from_bytes)
            return ref
        except (CorruptCommit, ObjectNotFound) as error:
            print(f"checkpoint: WARNING: passed over as a parent: {error}", file=sys.stderr, flush=True)
    return None


def _given_parent(job_store: Store, key: str) -> CommitRef:
    ref = CommitRef.from_key(key)
    fetched(job_store, key, Manifest.from_bytes)
    for name in (quarantine_key(ref.sha256), tombstone_key(ref.sha256)):
        if job_store.head(name) is not None:
            raise CheckpointError(f"{job_store.uri}/{key}: cannot be a parent: there is {name}")
    return ref
