"""The newest commit is found without reading the whole history, and it is the one that the whole
history says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore

from ebbflow.core.layout import commit_key, generation_key, quarantine_key, tombstone_key
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.training.checkpoint import (
    newest_commits,
    open_generation,
    reachable_commits,
    trace_lineage,
)
from ebbflow.training.checkpoint.lineage import newest_generation_number
from ebbflow.training.checkpoint.manifest import VERSION, CheckpointId, Manifest
from ebbflow.training.checkpoint.verified_io import seal, sha256_text
from ebbflow.training.errors import CheckpointError, DamagedLineage, TwoLaunchers

COMMITS = 5000
GENERATIONS = 3000

EVENTS = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 3)),  # from the newest commit, or back by so many
    st.tuples(st.just("commit"), st.integers(1, 3)),
    st.tuples(st.just("zombie"), st.integers(0, 40)),
    st.tuples(st.just("quarantine"), st.integers(0, 9)),
    st.tuples(st.just("tombstone"), st.integers(0, 9)),
)


class CountingStore(Store):
    """In memory. pages: how many of each folder were read; longest: the most of one listing; gets:
    objects read.
    """

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory://test", None)
        self.forget()

    def forget(self) -> None:
        self.listed = Counter[str]()
        self.longest = 0
        self.gets = 0

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        for number, page in enumerate(super().pages(prefix, after=after), start=1):
            self.listed[prefix] += 1
            self.longest = max(self.longest, number)
            yield page

    def get(self, key: str) -> bytes:
        self.gets += 1
        return super().get(key)


def put_generation(job: Store, number: int, parent: str | None, parent_step: int) -> None:
    generation_id = f"{number:08x}"
    about = {
        "generation": number,
        "id": generation_id,
        "parent": parent,
        "parent_step": parent_step,
    }
    job.put(generation_key(number, generation_id), seal({"version": VERSION, **about}))


def put_commit(job: Store, generation: str, step: int) -> str:
    """A commit without data: lineage looks at manifests only."""
    save = CheckpointId(job="test", generation=generation, step=step, world_size=0)
    raw = Manifest(save=save, data=(), indexes=(), tensors={}).to_bytes()
    key = commit_key(step, save.generation_number, sha256_text(raw))
    job.put(key, raw)
    return key


@pytest.fixture(scope="module")
def history() -> tuple[CountingStore, list[str]]:
    """A job that was started 3,000 times and has committed 5,000 times; its commits, oldest first."""
    job = CountingStore()
    commits: list[str] = []
    for number in range(1, GENERATIONS + 1):
        put_generation(job, number, commits[-1] if commits else None, len(commits))
        for _ in range(2 if number <= COMMITS - GENERATIONS else 1):
            commits.append(put_commit(job, f"{number:06d}-{number:08x}", len(commits) + 1))
    assert len(commits) == COMMITS
    return job, commits


def test_the_newest_commit_takes_one_page_of_each_listing(
    history: tuple[CountingStore, list[str]],
) -> None:
    job, commits = history
    job.forget()
    assert next(newest_commits(job)).key == commits[-1]
    assert job.listed == {"commits": 1, "generations": 1, "quarantine": 1, "tombstones": 1}
    assert job.gets == 1, "the record of the newest generation, and no other"
    job.forget()
    assert [ref.key for ref in reachable_commits(job, limit=16)] == commits[:-17:-1]
    assert job.listed["commits"] == job.listed["generations"] == job.longest == 1
    assert trace_lineage(job)[0].ref.key == commits[-1] and job.longest > 1, (
        "the whole of it has many pages"
    )


def test_starts_rewinds_and_zombies_read_one_page_at_a_time(
    history: tuple[CountingStore, list[str]],
) -> None:
    job, commits = history
    zombie = put_commit(job, f"{7:06d}-{7:08x}", 10**9)
    job.forget()
    assert next(newest_commits(job)).key == commits[-1]
    assert (job.longest, job.gets) == (1, 1), (
        "a step above the limit needs no walk back to generation 7"
    )
    opened = open_generation(job, run="r", attempt=0)
    assert (opened.number, opened.parent) == (GENERATIONS + 1, commits[-1])
    assert job.longest == 1
    back = open_generation(job, run="r", attempt=1, parent=commits[-900])
    job.forget()
    assert next(newest_commits(job)).key == commits[-900]
    assert (job.longest, job.listed["commits"], job.gets) == (1, 1, 2)
    for key in (zombie, *(f"generations/{generation.name}.json" for generation in (opened, back))):
        job.delete(key)


def test_the_search_reports_faults_of_the_newest_generations(
    history: tuple[CountingStore, list[str]],
) -> None:
    job, commits = history
    twin = generation_key(GENERATIONS, "deadbeef")
    job.put(twin, b"")
    with pytest.raises(TwoLaunchers, match=f"generation {GENERATIONS} has two records"):
        next(newest_commits(job))
    job.delete(twin)
    before = generation_key(GENERATIONS - 1, f"{GENERATIONS - 1:08x}")
    record = job.get(before)
    job.delete(before)
    found = newest_commits(job)
    assert next(found).key == commits[-1]
    with pytest.raises(DamagedLineage, match=f"record of generation {GENERATIONS - 1} is missing"):
        next(found)
    job.put(before, record)


def test_records_below_the_number_that_was_asked_about_are_found_too() -> None:
    job = CountingStore()
    put_generation(job, 1, None, 0)
    put_commit(job, "000001-00000001", 10)
    assert newest_generation_number(job, near=900) == 1
    put_commit(job, "000900-00000900", 20)
    # To go on without the record would be to start anew, silently
    for look in (reachable_commits, trace_lineage):
        with pytest.raises(
            DamagedLineage, match="commits of generation 900, its record is missing"
        ):
            look(job)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, min_size=1, max_size=25), st.randoms(use_true_random=False))
def test_the_newest_commit_search_agrees_with_the_whole_history(
    events: list[tuple[str, int]], chance: object
) -> None:
    job = CountingStore()
    opened = [open_generation(job, run="r", attempt=0)]
    step = 0
    keys = []
    for kind, amount in events:
        if kind == "start":
            counting = reachable_commits(job)
            if counting and amount:
                back = counting[min(amount, len(counting) - 1)]
            else:
                back = None
            try:
                opened.append(open_generation(job, run="r", attempt=0, parent=back and back.key))
            except CheckpointError:  # what it would start from is being deleted
                continue
            step = opened[-1].parent_step
        elif kind == "commit":
            step += amount
            keys.append(put_commit(job, opened[-1].name, step))
        elif kind == "zombie":
            keys.append(put_commit(job, chance.choice(opened).name, amount))
        elif keys:
            name = keys[amount % len(keys)].rsplit("/", 1)[-1].removesuffix(".json")
            job.put((quarantine_key if kind == "quarantine" else tombstone_key)(name), b"")
        whole = [traced.ref for traced in trace_lineage(job) if traced.unreachable_because is None]
        assert list(newest_commits(job)) == whole
