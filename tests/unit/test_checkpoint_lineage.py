"""Generation records and the chain that they form: each limit at its edge, and records that form no
chain.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.errors import StoreError, StoreUnavailable
from ebbflow.core.layout import (
    commit_key,
    generation_key,
    permit_key,
    quarantine_key,
    tombstone_key,
)
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.training.checkpoint.lineage import (
    CANDIDATES,
    FROM_SCRATCH,
    NO_PARENT,
    CommitRef,
    Generation,
    GenerationOpening,
    GenerationRecords,
    LineageChain,
    amend_parent,
    await_listed_ids,
    choose_parent,
    is_readable_commit,
    newest_commits,
    newest_generation_number,
    open_generation,
    permitted_generation,
    reachable_commits,
    read_generation,
    trace_lineage,
)
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.checkpoint.verified_io import seal, sha256_text
from ebbflow.training.errors import (
    CheckpointError,
    CorruptCommit,
    DamagedLineage,
    NothingToRestore,
    RefusedCommit,
    TwoLaunchers,
)
from tests.support.commits import RecordingStore, put_commit, put_generation, read_record


class Clock:
    """Time that passes only in `sleep`, by the same seconds at each call."""

    def __init__(self, seconds_per_sleep: float) -> None:
        self.seconds = 5000.0
        self.slept: list[float] = []
        self._step = seconds_per_sleep

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += self._step


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore()


@pytest.fixture
def signing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "EBBFLOW_TEST_KEY")
    monkeypatch.setenv("EBBFLOW_TEST_KEY", "a key of these tests, which no object may hold")


def open_anew(store: Store, **options: object) -> Generation:
    return open_generation(store, run="run", attempt=2, **options)


# Records


def test_a_record_belongs_to_the_number_and_the_id_in_its_key(store: RecordingStore) -> None:
    put_generation(store, 3, generation_id="aaaa")
    assert read_generation(store, 3, "aaaa") == Generation(3, "aaaa", None, 0)
    put_generation(store, 4, generation_id="aaaa", generation=5)
    with pytest.raises(DamagedLineage, match=r"000004-aaaa\.json: is the record of 5-aaaa"):
        read_generation(store, 4, "aaaa")
    put_generation(store, 5, generation_id="aaaa", id="bbbb")
    with pytest.raises(DamagedLineage, match=r"000005-aaaa\.json: is the record of 5-bbbb"):
        read_generation(store, 5, "aaaa")
    store.put(generation_key(6, "aaaa"), b"{}")
    with pytest.raises(DamagedLineage, match=r"000006-aaaa\.json: not a sealed JSON document"):
        read_generation(store, 6, "aaaa")


def test_an_amended_record_names_the_restored_parent_and_the_refused_one(
    store: RecordingStore,
) -> None:
    first = put_generation(store, 1)
    older = put_commit(store, first, 10)
    newer = put_commit(store, first, 20)
    opened = open_anew(store)
    before = read_record(store, opened)
    assert before["parent"] == newer.key
    amend_parent(store, opened, replace(opened, parent=older.key, parent_step=10))
    changed = {"parent": older.key, "parent_step": 10, "refused": newer.key}
    assert read_record(store, opened) == {**before, **changed}


def test_a_new_record_has_exactly_these_fields(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    first = open_anew(store)
    fields = {"version": 1, "run": "run", "attempt": 2, "t_wall": 1234.5}
    assert read_record(store, first) == {
        **fields,
        "generation": 1,
        "id": first.id,
        "parent": None,
        "parent_step": 0,
    }
    commit = put_commit(store, first, 10)
    second = open_anew(store)
    parent = {"parent": commit.key, "parent_step": 10}
    assert read_record(store, second) == {**fields, "generation": 2, "id": second.id, **parent}


def test_each_opening_has_a_random_id_of_eight_digits() -> None:
    ids = {GenerationOpening().id for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch("[0-9a-f]{8}", generation_id) for generation_id in ids)
    assert GenerationOpening().number == 0


# Listings


def record_listings(store: RecordingStore) -> list[str]:
    return [after for prefix, after in store.listings if prefix == "generations"]


@pytest.mark.parametrize(
    ("newest", "near", "listings"),
    [
        (900, 0, ["generations/000000"]),
        (900, 900, ["generations/000400"]),
        (901, 900, ["generations/000400"]),
        # It is behind: all records are listed
        (899, 900, ["generations/000400", "generations/000000"]),
        (1, 900, ["generations/000400", "generations/000000"]),
        (1, 501, ["generations/000001", "generations/000000"]),
        (1, 500, ["generations/000000"]),  # one listing has shown all records
        (1, 100, ["generations/000000"]),
    ],
)
def test_records_are_listed_from_500_numbers_below_the_expected_one(
    store: RecordingStore, newest: int, near: int, listings: list[str]
) -> None:
    put_generation(store, newest)
    store.forget()
    assert newest_generation_number(store, near=near) == newest
    assert record_listings(store) == listings


def test_a_store_without_records_has_the_newest_number_0(store: RecordingStore) -> None:
    assert newest_generation_number(store) == 0
    assert newest_generation_number(store, near=900) == 0


def test_ids_of_an_older_number_are_listed_from_500_below_it_and_only_once(
    store: RecordingStore,
) -> None:
    for number in (100, 700, 1300):
        put_generation(store, number, generation_id=f"id{number}")
    records = GenerationRecords(store, near=1300)
    store.forget()
    assert records.ids(1300) == ["id1300"]
    assert record_listings(store) == []
    assert records.ids(700) == records.ids(700) == ["id700"]
    assert records.ids(100) == ["id100"]
    assert records.ids(99) == []
    assert record_listings(store) == [
        "generations/000200",
        "generations/000000",
        "generations/000000",
    ]


def test_a_listing_for_one_number_ends_behind_that_number_and_keeps_no_half_of_the_next() -> None:
    store = RecordingStore(page_size=1)
    for number, generation_id in ((3, "a"), (3, "b"), (4, "a"), (4, "b"), (5, "a"), (600, "a")):
        put_generation(store, number, generation_id=generation_id)
    records = GenerationRecords(store, near=600)
    assert records.newest == 600
    store.forget()
    assert records.ids(3) == ["a", "b"], "its second record is on the next page"
    assert store.pages_read["generations"] == 3
    assert records.ids(4) == ["a", "b"], "only one of them was seen before"


def test_names_that_are_no_records_are_passed_over(store: RecordingStore) -> None:
    put_generation(store, 2)
    for name in ("000003.json", "000003-.json", "notes-a.json", "-a.json"):
        store.put(f"generations/{name}", b"")
    assert newest_generation_number(store) == 2


def unlisted_store(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, listed_after: float
) -> RecordingStore:
    """A store that lists generations only from the moment `listed_after` on."""
    store = RecordingStore()
    pages = store.pages

    def lag(prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        for page in pages(prefix, after=after):
            yield page if clock.seconds >= listed_after else []

    monkeypatch.setattr(store, "pages", lag)
    monkeypatch.setattr(time, "monotonic", lambda: clock.seconds)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return store


def test_a_record_is_awaited_for_10_seconds_with_short_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(0.25)
    generation = Generation(7, "aaaa")
    store = unlisted_store(monkeypatch, clock, listed_after=5010.0)
    put_generation(store, 7, generation_id="aaaa")
    put_generation(store, 7, generation_id="bbbb")
    assert await_listed_ids(store, generation) == ["aaaa", "bbbb"], "the last look is at 10 s"
    assert (clock.seconds, len(clock.slept)) == (5010.0, 40)
    assert 0.25 < max(clock.slept) <= 0.5


def test_a_record_that_is_not_listed_within_10_seconds_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(0.25)
    store = unlisted_store(monkeypatch, clock, listed_after=5010.1)
    put_generation(store, 7, generation_id="aaaa")
    with pytest.raises(
        StoreUnavailable, match=r"000007-aaaa\.json was put and is not listed within 10 s"
    ):
        await_listed_ids(store, Generation(7, "aaaa"))
    assert (clock.seconds, len(clock.slept)) == (5010.0, 40)


def test_a_record_is_awaited_in_the_listing_from_its_own_number(store: RecordingStore) -> None:
    put_generation(store, 900)
    store.forget()
    assert await_listed_ids(store, Generation(900, "aaaa")) == ["aaaa"]
    assert record_listings(store) == ["generations/000400"]


# The chain


def three_generations(store: RecordingStore) -> dict[int, Generation]:
    """Generation 1 saves at 10 and 20, generation 3 starts from 10 and saves at 30, generation 5
    starts from 30.
    """
    first = put_generation(store, 1)
    at_10 = put_commit(store, first, 10)
    put_commit(store, first, 20)
    third = put_generation(store, 3, at_10)
    at_30 = put_commit(store, third, 30)
    fifth = put_generation(store, 5, at_30)
    return {1: first, 3: third, 5: fifth}


@pytest.mark.parametrize(
    ("number", "step", "is_reachable"),
    [
        (5, 10**9, True),
        (3, 30, True),
        (3, 31, False),
        (1, 10, True),
        (1, 11, False),
        (1, 0, True),
        (2, 10, False),
        (4, 10, False),
        (6, 10, False),
        (0, 1, False),
    ],
)
def test_a_commit_counts_up_to_the_step_where_the_next_generation_started(
    store: RecordingStore, number: int, step: int, is_reachable: bool
) -> None:
    three_generations(store)
    chain = LineageChain(store)
    assert chain.is_in_history(number, step) is is_reachable
    chain.back_to(1)
    assert chain.is_in_history(number, step) is is_reachable, (
        "what has been read already changes no answer"
    )


def test_the_chain_reads_only_the_records_that_an_answer_needs(store: RecordingStore) -> None:
    three_generations(store)
    store.forget()
    chain = LineageChain(store)
    assert chain.newest == 5
    assert chain.is_in_history(5, 3)
    assert not chain.is_in_history(1, 31)
    assert store.got == [generation_key(5, "aaaa")]
    assert chain.is_in_history(3, 1)
    assert not chain.is_in_history(2, 11)
    assert store.got == [generation_key(5, "aaaa"), generation_key(3, "aaaa")]


def test_the_limits_go_back_to_the_asked_generation_and_not_beyond(store: RecordingStore) -> None:
    three_generations(store)
    chain = LineageChain(store)
    assert chain.back_to(4) == {5: float("inf")}
    assert chain.back_to(3) == {5: float("inf"), 3: 30}
    assert chain.back_to(2) == {5: float("inf"), 3: 30}
    assert chain.back_to(1) == {5: float("inf"), 3: 30, 1: 10}


def test_a_limit_never_grows_towards_older_generations(store: RecordingStore) -> None:
    """Generation 2 was rewound to a step below its own start, as records that were edited by hand
    may say.
    """
    first = put_generation(store, 1)
    second = put_generation(store, 2, put_commit(store, first, 20))
    put_generation(store, 3, put_commit(store, second, 5))
    assert LineageChain(store).back_to(1) == {3: float("inf"), 2: 5, 1: 5}


def test_a_store_without_records_has_no_history(store: RecordingStore) -> None:
    chain = LineageChain(store)
    assert (chain.newest, chain.back_to(0)) == (0, {})
    assert not chain.is_in_history(0, 0)


@pytest.mark.parametrize(("near", "is_damaged"), [(4, False), (5, False), (6, True)])
def test_a_commit_of_a_newer_generation_than_any_record_is_damage(
    store: RecordingStore, near: int, is_damaged: bool
) -> None:
    three_generations(store)
    if not is_damaged:
        assert LineageChain(store, near=near).newest == 5
        return
    words = r"commits of generation 6, its record is missing .* the newest there is 5"
    with pytest.raises(DamagedLineage, match=words):
        LineageChain(store, near=near)


def test_the_chain_lists_records_from_500_below_the_expected_number(store: RecordingStore) -> None:
    put_generation(store, 900)
    store.forget()
    LineageChain(store, near=900)
    assert record_listings(store) == ["generations/000400"]


@pytest.mark.parametrize("look", [reachable_commits, trace_lineage, open_anew])
def test_no_commit_is_used_while_the_newest_commits_generation_has_no_record(
    store: RecordingStore, look: Callable[[Store], object]
) -> None:
    first = put_generation(store, 1)
    put_commit(store, Generation(2, "aaaa"), 10)
    put_commit(store, first, 20)
    with pytest.raises(DamagedLineage, match="commits of generation 2, its record is missing"):
        look(store)


def test_a_missing_ancestor_is_damage_as_soon_as_it_is_needed(store: RecordingStore) -> None:
    generations = three_generations(store)
    store.delete(generation_key(3, generations[3].id))
    chain = LineageChain(store)
    assert chain.is_in_history(5, 40)
    with pytest.raises(
        DamagedLineage, match="the record of generation 3 is missing from generations/"
    ):
        chain.is_in_history(3, 30)


def test_an_ancestor_with_two_records_is_a_job_of_two_launchers(store: RecordingStore) -> None:
    three_generations(store)
    put_generation(store, 3, generation_id="bbbb")
    with pytest.raises(
        TwoLaunchers, match=r"generation 3 has two records: \S+-aaaa\.json and \S+-bbbb\.json"
    ):
        LineageChain(store).is_in_history(3, 30)


def _follow_to_the_first(store: Store) -> object:
    return LineageChain(store).is_in_history(1, 1)


def _follow_back(store: Store) -> object:
    return LineageChain(store).back_to(1)


ROUTES = [_follow_to_the_first, _follow_back, reachable_commits, trace_lineage]


@pytest.mark.parametrize("walk", [*ROUTES, open_anew])
@pytest.mark.parametrize("parent_generation", [5, 6])
def test_a_generation_that_starts_from_itself_or_a_later_one_is_an_error(
    store: RecordingStore, walk: Callable[[Store], object], parent_generation: int
) -> None:
    first = put_generation(store, 1)
    put_commit(store, first, 10)
    put_generation(store, 5, put_commit(store, Generation(parent_generation, "aaaa"), 40))
    put_generation(store, 7, put_commit(store, Generation(5, "aaaa"), 50))
    with pytest.raises(
        DamagedLineage, match=f"generation 5 names a parent of generation {parent_generation}"
    ):
        walk(store)


@pytest.mark.parametrize("walk", ROUTES)
def test_a_cycle_of_generations_is_an_error(
    store: RecordingStore, walk: Callable[[Store], object]
) -> None:
    """Generation 3 starts from 2, 2 starts from 3, and 1 has a commit behind them."""
    first = put_generation(store, 1)
    put_commit(store, first, 10)
    of_second = put_commit(store, Generation(2, "aaaa"), 20)
    of_third = put_commit(store, Generation(3, "aaaa"), 30)
    put_generation(store, 2, of_third)
    put_generation(store, 3, of_second)
    with pytest.raises(DamagedLineage, match="generation 2 names a parent of generation 3"):
        walk(store)


def test_the_parent_of_the_generation_just_before_is_followed(store: RecordingStore) -> None:
    first = put_generation(store, 1)
    commit = put_commit(store, first, 10)
    put_generation(store, 2, commit)
    assert reachable_commits(store) == [commit]


# Commits


def test_a_commit_key_is_parsed_into_its_parts(store: RecordingStore) -> None:
    commit = put_commit(store, Generation(12, "aaaa"), 345)
    assert commit == CommitRef(
        commit.key, 345, 12, commit.key.rsplit("/", 1)[-1].removesuffix(".json")
    )


def test_objects_that_are_no_commits_are_passed_over(store: RecordingStore) -> None:
    store.put("commits/notes.txt", b"")
    assert reachable_commits(store) == []
    assert trace_lineage(store) == []
    assert open_anew(store).parent is None
    store.forget()
    commit = put_commit(store, open_anew(store), 10)
    store.put(f"{commit.key}.old", b"")
    assert reachable_commits(store) == [commit]


def test_commits_behind_an_object_that_is_none_are_found(store: RecordingStore) -> None:
    store.put("commits/000", b"")
    commit = put_commit(store, put_generation(store, 1), 10)
    assert reachable_commits(store) == [commit]
    assert [traced.ref for traced in trace_lineage(store)] == [commit]


def test_a_page_without_commits_does_not_hide_the_next() -> None:
    store = RecordingStore(page_size=1)
    store.put("commits/000", b"")
    commit = put_commit(store, put_generation(store, 1), 10)
    store.put("commits/zzz", b"")
    assert list(newest_commits(store)) == [commit]


def test_the_newest_commits_are_as_many_as_asked_for(store: RecordingStore) -> None:
    first = put_generation(store, 1)
    commits = [put_commit(store, first, step) for step in range(20, 0, -1)]
    assert reachable_commits(store) == commits
    assert reachable_commits(store, limit=3) == commits[:3]
    assert len(reachable_commits(store, limit=CANDIDATES)) == 16


def test_each_unreachable_commit_has_its_reason(store: RecordingStore) -> None:
    generations = three_generations(store)
    deleted = put_commit(store, generations[5], 50)
    store.put(tombstone_key(deleted.sha256), b"")
    store.put(quarantine_key(deleted.sha256), b"")
    quarantined = put_commit(store, generations[5], 60)
    store.put(quarantine_key(quarantined.sha256), b"")
    foreign = put_commit(store, Generation(4, "aaaa"), 1)
    newest = put_commit(store, generations[5], 70)
    traced = trace_lineage(store)
    assert [
        (commit.ref.generation, commit.ref.step)
        for commit in traced
        if commit.unreachable_because is None
    ] == [
        (5, 70),
        (3, 30),
        (1, 10),
    ]
    assert traced[0].ref == newest
    reasons = [(commit.ref.step, commit.unreachable_because) for commit in traced[3:]]
    assert reasons == [
        (60, f"it is quarantined, see {quarantine_key(quarantined.sha256)}"),
        (50, "it is being deleted"),
        (20, "generation 1 was left at step 10"),
        (foreign.step, "generation 4 is no ancestor of generation 5"),
    ]
    assert [commit.ref for commit in traced[:3]] == reachable_commits(store)
    assert not any(commit.refused for commit in traced)


def test_traced_commits_have_the_date_of_their_manifest(store: RecordingStore) -> None:
    put_commit(store, put_generation(store, 1), 10)
    (meta,) = store.list("commits")
    assert [commit.modified for commit in trace_lineage(store)] == [meta.modified]


# Opening


def test_a_generation_starts_from_the_newest_commit_under_the_next_number(
    store: RecordingStore,
) -> None:
    assert open_anew(store).number == 1
    first = put_generation(store, 8)
    commits = [put_commit(store, first, step) for step in (10, 20)]
    opened = open_anew(store)
    assert (opened.number, opened.parent, opened.parent_step) == (9, commits[1].key, 20)


def test_a_start_lists_records_from_500_below_the_newest_commits_generation(
    store: RecordingStore,
) -> None:
    put_generation(store, 100)
    newest = put_generation(store, 900)
    put_commit(store, Generation(100, "aaaa"), 10)
    put_commit(store, newest, 20)
    store.forget()
    assert open_anew(store).number == 901
    assert set(record_listings(store)) == {"generations/000400", "generations/000401"}
    assert store.pages_read["commits"] == 2, (
        "one for the newest generation, and one for the newest commit"
    )


def test_a_start_without_a_parent_ignores_the_commits(store: RecordingStore) -> None:
    put_commit(store, put_generation(store, 1), 10)
    opened = open_anew(store, parent=NO_PARENT)
    assert (opened.number, opened.parent, opened.parent_step) == (2, None, 0)


def test_each_try_of_one_opening_takes_a_new_number_with_the_same_id(store: RecordingStore) -> None:
    opening = GenerationOpening()

    def refuse(key: str) -> None:
        raise StoreError(f"put {key}: no answer in time")

    store.before_put = refuse
    with pytest.raises(StoreError, match="no answer in time"):
        open_anew(store, opening=opening)
    store.before_put = lambda key: None
    opened = open_anew(store, opening=opening)
    assert (opened.number, opened.id) == (2, opening.id)
    put_generation(store, 7)
    assert open_anew(store, opening=opening).number == 8


def test_a_launcher_that_sees_a_rival_withdraws_its_own_record(store: RecordingStore) -> None:
    def open_as_well(key: str) -> None:
        store.before_put = lambda key: None
        put_generation(store, 1, generation_id="bbbb")

    store.before_put = open_as_well
    with pytest.raises(
        TwoLaunchers, match=r"generation 1 was opened twice at once: .*000001-bbbb\.json"
    ):
        open_anew(store)
    assert [meta.key for meta in store.list("generations")] == [generation_key(1, "bbbb")]


@pytest.mark.parametrize("has_tombstone", [True, False])
def test_a_start_from_a_commit_deleted_meanwhile_withdraws_its_record(
    store: RecordingStore, has_tombstone: bool
) -> None:
    first = put_generation(store, 1)
    commit = put_commit(store, first, 10)

    def bury(key: str) -> None:
        store.before_put = lambda key: None
        if has_tombstone:
            store.put(tombstone_key(commit.sha256), b"")
        else:
            store.delete(commit.key)

    store.before_put = bury
    with pytest.raises(CheckpointError, match="is being deleted, or was; hint: start again"):
        open_anew(store)
    assert [meta.key for meta in store.list("generations")] == [generation_key(1, first.id)]


@pytest.mark.parametrize("key_of", [quarantine_key, tombstone_key])
def test_a_quarantined_or_dying_commit_is_no_parent(
    store: RecordingStore, key_of: Callable[[str], str]
) -> None:
    first = put_generation(store, 1)
    commit = put_commit(store, first, 10)
    assert open_anew(store, parent=commit.key).parent == commit.key
    store.put(key_of(commit.sha256), b"")
    with pytest.raises(
        CheckpointError, match=f"cannot be a parent: there is {key_of(commit.sha256)}"
    ):
        open_anew(store, parent=commit.key)


def test_a_given_parent_is_read_first(store: RecordingStore) -> None:
    commit = put_commit(store, put_generation(store, 1), 10)
    store.put(commit.key, b"{}")
    with pytest.raises(CorruptCommit, match="the manifest's SHA-256 is"):
        open_anew(store, parent=commit.key)
    assert len(store.list("generations")) == 1


@pytest.mark.parametrize(
    ("names", "generation"),
    [([], 0), (["000004"], 4), (["000004", "000011", "000009"], 11), (["²", "x", ""], 0)],
)
def test_the_newest_permit_counts(store: RecordingStore, names: list[str], generation: int) -> None:
    for name in names:
        store.put(f"permits/{FROM_SCRATCH}/{name}.json", b"")
    store.put("permits/rollback/000099.json", b"")
    assert permitted_generation(store, FROM_SCRATCH) == generation


@pytest.mark.parametrize(
    ("permitted", "starts"), [(None, False), (1, False), (2, False), (3, True), (4, True)]
)
def test_a_start_from_scratch_needs_a_permit_for_the_newest_lost_commit(
    store: RecordingStore, permitted: int | None, starts: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    first = put_generation(store, 1)
    oldest = put_commit(store, first, 10)
    third = put_generation(store, 3, oldest)
    newest = put_commit(store, third, 20)
    for commit in (oldest, newest):
        store.put(quarantine_key(commit.sha256), b"")
    if permitted is not None:
        store.put(permit_key(FROM_SCRATCH, permitted), b"")
    cause = "none of its 2 commits can be restored, the newest of step 20"
    if starts:
        assert open_anew(store).parent is None
        assert (
            capsys.readouterr().err
            == f"checkpoint: WARNING: {store.uri}: {cause}; begin anew, as permitted\n"
        )
        return
    with pytest.raises(
        NothingToRestore, match=f"{cause}; nothing was started; hint: .* --from-scratch"
    ):
        open_anew(store)
    assert len(store.list("generations")) == 2


def test_only_commits_of_the_history_are_lost(store: RecordingStore) -> None:
    first = put_generation(store, 1)
    oldest = put_commit(store, first, 10)
    put_commit(store, first, 30)
    newest = put_commit(store, put_generation(store, 2, oldest), 20)
    for commit in (oldest, newest):
        store.put(quarantine_key(commit.sha256), b"")
    with pytest.raises(
        NothingToRestore, match="none of its 2 commits can be restored, the newest of step 20"
    ):
        open_anew(store)


def test_a_lost_commit_of_a_generation_without_a_record_is_damage() -> None:
    """It is on a later page than the newest commit, and the newest commit is quarantined."""
    store = RecordingStore(page_size=1)
    lost = put_commit(store, put_generation(store, 1), 50)
    store.put(quarantine_key(lost.sha256), b"")
    put_commit(store, Generation(2, "aaaa"), 10)
    with pytest.raises(DamagedLineage, match="commits of generation 2, its record is missing"):
        open_anew(store)


def test_commits_that_are_being_deleted_are_no_loss(store: RecordingStore) -> None:
    commit = put_commit(store, put_generation(store, 1), 10)
    store.put(tombstone_key(commit.sha256), b"")
    assert open_anew(store).parent is None


def test_a_manifest_that_is_gone_is_passed_over_without_another_process(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("a process was started"))
    commit = put_commit(store, put_generation(store, 1), 10)
    assert is_readable_commit(store, commit)
    store.delete(commit.key)
    assert not is_readable_commit(store, commit)
    assert capsys.readouterr().err.startswith(
        f"checkpoint: WARNING: passed over as a parent: get {store.uri}/commits/"
    )


def test_a_damaged_manifest_is_passed_over_once_another_process_agrees(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path))
    commit = put_commit(store, put_generation(store, 1), 10)
    store.put(commit.key, b"{}")
    assert not is_readable_commit(store, commit)


# Signatures


def sign(store: Store, *commits: CommitRef) -> None:
    signs = signer()
    assert signs is not None
    for commit in commits:
        signs.sign(store, commit.key)


def test_unsigned_commits_are_passed_over_and_named_newest_first(
    store: RecordingStore, signing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    first = put_generation(store, 1)
    oldest, signed, unsigned, newest = (put_commit(store, first, step) for step in (1, 2, 3, 4))
    sign(store, signed)
    assert reachable_commits(store) == [signed]
    refused = [commit for commit in trace_lineage(store) if commit.refused]
    assert [commit.ref for commit in refused] == [newest, unsigned, oldest]
    assert all(
        "is refused, because it is not signed" in commit.unreachable_because for commit in refused
    )
    assert open_anew(store).parent == signed.key
    lines = capsys.readouterr().err.splitlines()
    words = "checkpoint: WARNING: passed over as a parent: "
    assert [
        line.startswith(f"{words}{store.uri}/{ref.key}: is refused")
        for line, ref in zip(lines, (newest, unsigned), strict=True)
    ] == [True, True]


def test_a_job_without_a_signed_commit_names_the_newest_refusal(
    store: RecordingStore, signing: None
) -> None:
    first = put_generation(store, 1)
    put_commit(store, first, 1)
    newest = put_commit(store, first, 2)
    with pytest.raises(
        NothingToRestore, match=f"none of its 2 commits .* of step 2: .*{newest.key}: is refused"
    ):
        open_anew(store)


def test_a_given_parent_needs_a_signature_where_commits_are_signed(
    store: RecordingStore, signing: None
) -> None:
    first = put_generation(store, 1)
    signed = put_commit(store, first, 1)
    unsigned = put_commit(store, first, 2)
    sign(store, signed)
    with pytest.raises(RefusedCommit, match="is refused, because it is not signed"):
        open_anew(store, parent=unsigned.key)
    assert open_anew(store, parent=signed.key).parent == signed.key


def test_a_quarantined_commit_is_called_quarantined_and_not_refused(
    store: RecordingStore, signing: None
) -> None:
    commit = put_commit(store, put_generation(store, 1), 1)
    store.put(quarantine_key(commit.sha256), seal({}))
    (traced,) = trace_lineage(store)
    assert (traced.refused, traced.unreachable_because) == (
        False,
        f"it is quarantined, see {quarantine_key(commit.sha256)}",
    )


def test_a_copy_of_a_record_under_an_unpadded_number_counts_once(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path))
    generation = put_generation(job, 1)
    job.put(f"generations/1-{generation.id}.json", job.get(generation_key(1, generation.id)))
    assert GenerationRecords(job, near=0).ids(1) == [generation.id]
    assert LineageChain(job).newest == 1


@pytest.mark.parametrize("content", [b"{}", b"[]", b'{"version": "2"}', b'{"version": null}'])
def test_a_record_that_no_program_wrote_is_passed_over_like_garbage(
    tmp_path: Path, content: bytes
) -> None:
    job = Store.open(str(tmp_path))
    generation = put_generation(job, 1)
    sound = put_commit(job, generation, 1)
    job.put(commit_key(2, 1, sha256_text(content)), content)
    assert choose_parent(job, None) == sound


def test_a_record_of_a_newer_program_is_no_garbage(tmp_path: Path) -> None:
    job = Store.open(str(tmp_path))
    put_generation(job, 1)
    content = b'{"version": 2}'
    job.put(commit_key(2, 1, sha256_text(content)), content)
    with pytest.raises(CheckpointError, match="version 2; this program reads version 1"):
        choose_parent(job, None)
