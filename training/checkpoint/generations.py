"""The starts of a gang, as their records tell them: which there were, and what each of them inherits. Torch-free.

A record names the commit that its generation started from. Walked from the newest generation back they make a chain:
of an ancestor only the commits up to the step that its child started from count.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass

from ebbflow.infra.errors import StoreAway
from ebbflow.infra.layout import generation_key, generation_name, parse_commit_key
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.checksum import seal, unseal
from ebbflow.training.checkpoint.deadline import pauses
from ebbflow.training.checkpoint.settled import fetched, put_settled
from ebbflow.training.errors import CorruptCommit, DamagedLineage, TwoLaunchers

LISTING_SECONDS = 10.0
_BEFORE = 500  # numbers before the one asked for that are listed along with it: a page holds 1,000


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


def read_generation(job_store: Store, number: int, generation_id: str) -> Generation:
    """A generation as it is on record, with its parent. Raises DamagedLineage, and ObjectNotFound without a record."""
    key = generation_key(number, generation_id)
    try:
        record = fetched(job_store, key, unseal, f"{job_store.uri}/{key}")
    except CorruptCommit as error:
        raise DamagedLineage(str(error)) from error
    if (record["generation"], record["id"]) != (number, generation_id):
        raise DamagedLineage(f"{job_store.uri}/{key}: is the record of {record['generation']}-{record['id']}")
    return Generation(number, generation_id, record["parent"], record["parent_step"])


def went_back_to(job_store: Store, opened: Generation, actual: Generation) -> None:
    """Amend the record of a generation: the parent it was opened with cannot be restored, `actual` names an older one.

    Until then the steps of its ancestors between the two would count, though this generation has left them. To be
    called by one process, before the generation's first save. Raises StoreError, CorruptCommit.
    """
    key = generation_key(opened.number, opened.id)
    record = fetched(job_store, key, unseal, f"{job_store.uri}/{key}")
    start = {"parent": actual.parent, "parent_step": actual.parent_step, "refused": opened.parent}
    put_settled(job_store, key, seal({**record, **start}))


def newest_number(job_store: Store, *, near: int = 0) -> int:
    """The highest generation number on record, 0 when there is none. near: see `Records`."""
    return Records(job_store, near=near).newest


def listed_ids(job_store: Store, generation: Generation) -> list[str]:
    """Ids on record under the number of `generation`, as soon as its own is listed.

    A listing may lag behind the puts. Who waits to see itself also sees the rivals that saw themselves before; and a
    generation that goes on has been listed, so that the next launcher does not give its number again. Raises StoreAway.
    """
    limit = time.monotonic() + LISTING_SECONDS
    for pause in pauses(longest_seconds=0.5):
        ids = Records(job_store, near=generation.number).ids(generation.number)
        if generation.id in ids:
            return ids
        if time.monotonic() >= limit:
            break
        time.sleep(pause)
    raise StoreAway(
        f"list {job_store.uri}/generations: {generation.name}.json was put and is not listed within "
        f"{LISTING_SECONDS:g} s; fix: the listings of this store lag too far behind; ask who runs it"
    )


class Records:
    """Ids by generation number, from the names of the records alone, a page around the numbers that are asked for.

    near: a number not above the newest, as far as is known. The listing begins a little before it, and takes one
    request for each 1,000 records from there on; where nothing is listed from there on, all of it is.
    """

    def __init__(self, job_store: Store, *, near: int = 0) -> None:
        self._store = job_store
        self._ids: dict[int, list[str]] = {}
        first = max(0, near - _BEFORE)
        self._list(first, None)
        if first and max(self._ids, default=0) < near:
            self._list(0, None)
        self.newest = max(self._ids, default=0)

    def ids(self, number: int) -> list[str]:
        """Ids on record under `number`: one, or none, or two where two launchers worked at once."""
        if number not in self._ids:
            self._list(max(0, number - _BEFORE), number)
        return self._ids.get(number, [])

    def _list(self, first: int, last: int | None) -> None:
        """Take the records of the numbers `first` to `last`, or to the end."""
        found: dict[int, list[str]] = defaultdict(list)
        for page in self._store.pages("generations", after=f"generations/{first:06d}"):
            for meta in page:
                number, _, generation_id = meta.key.rsplit("/", 1)[-1].removesuffix(".json").partition("-")
                if number.isdigit() and generation_id:
                    found[int(number)].append(generation_id)
            if last is not None and max(found, default=0) > last:
                break
        self._ids |= {number: ids for number, ids in found.items() if last is None or number <= last}


class Chain:
    """What the newest generation inherits. Reads the records one by one, back to the one that a question is about.

    Raises DamagedLineage for a record that is missing or wrong, TwoLaunchers for a number with two of them.
    """

    def __init__(self, job_store: Store, *, near: int = 0) -> None:
        self._store = job_store
        self._records = Records(job_store, near=near)
        self.newest = self._records.newest
        if self.newest < near:  # a commit was seen of it: to go on without it would be to start anew, silently
            raise DamagedLineage(
                f"{self._store.uri}: there are commits of generation {near}, its record is missing from generations/ "
                f"and the newest there is {self.newest}; fix: put the record back, or export a commit into a new job"
            )
        self.limits: dict[int, float] = {}  # by number, the last step that counts
        self._ahead: tuple[int, float] | None = None  # the next of them
        if self.newest:
            self._follow(self.newest, float("inf"))

    def counts(self, number: int, step: int) -> bool:
        """Whether a commit of generation `number` at `step` is part of the newest generation's history.

        Limits never grow on the way back, so that a step above the next limit settles the question without the rest.
        """
        while self._ahead is not None and number <= self._ahead[0] and step <= self._ahead[1]:
            self._follow(*self._ahead)
        return number in self.limits and step <= self.limits[number]

    def back_to(self, oldest: int) -> dict[int, float]:
        """The last step that counts, by number, of all ancestors from the newest back to `oldest`."""
        while self._ahead is not None and self._ahead[0] >= oldest:
            self._follow(*self._ahead)
        return self.limits

    def _follow(self, number: int, limit: float) -> None:
        ids = self._records.ids(number)
        if not ids:
            raise DamagedLineage(f"{self._store.uri}: the record of generation {number} is missing from generations/")
        if len(ids) > 1:
            keys = " and ".join(generation_key(number, i) for i in ids)
            raise TwoLaunchers(
                f"{self._store.uri}: generation {number} has two records: {keys}; "
                "hint: stop one of the two launchers and delete the record of the one to give up"
            )
        self.limits[number] = limit
        self._ahead = None
        generation = read_generation(self._store, number, ids[0])
        if generation.parent is not None:
            _, parent_number, _ = parse_commit_key(generation.parent)
            if parent_number >= number:
                raise DamagedLineage(
                    f"{self._store.uri}: generation {number} names a parent of generation {parent_number}"
                )
            self._ahead = parent_number, min(limit, generation.parent_step)
