"""What a policy keeps, drops and deletes: each rule alone, each limit at its edge, each record of
another process.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.config.schema import CheckpointConfig
from ebbflow.core.errors import StoreError, StoreForbidden, StoreFull
from ebbflow.core.layout import (
    TOMBSTONE_TAGS,
    data_key,
    data_prefix,
    generation_key,
    index_key,
    pin_key,
    quarantine_key,
    secret_key,
    signature_key,
    tombstone_key,
    verified_key,
)
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.training.checkpoint.lineage import (
    CommitRef,
    Generation,
    reachable_commits,
    trace_lineage,
)
from ebbflow.training.checkpoint.manifest import CheckpointId, Manifest
from ebbflow.training.checkpoint.retention import (
    Retention,
    RetentionPolicy,
    WholeCommit,
    choose_commits,
    delete_commit,
    find_orphans,
    finish_deletions,
    metric_at_step,
)
from ebbflow.training.checkpoint.signing import signer
from ebbflow.training.checkpoint.verified_io import seal, unseal
from ebbflow.training.errors import DamagedLineage, GenerationSuperseded
from ebbflow.training.session import retention_policy
from tests.support.commits import RecordingStore, put_generation, put_manifest, put_whole_commit

DAY = 86_400.0

DEFAULT_POLICY = RetentionPolicy(keep_last=3, orphan_seconds=DAY)

METRICS = {60: 3.0, 50: 2.0, 40: None, 30: 1.0, 20: 5.0, 10: 4.0}


# Orphans


class FixedClock:
    """A clock of the store that stands at `seconds`.

    It records the dates that it is given as a replacement.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.newest: list[float] = []

    def now(self, store: Store, newest: float) -> float:
        self.newest.append(newest)
        return self.seconds


# The record of the running generation


class Hidden(RecordingStore):
    """A store that does not list generation records while `hides` is True."""

    hides = False

    def pages(self, prefix: str = "", *, after: str = "") -> Iterator[list[ObjectMeta]]:
        for page in super().pages(prefix, after=after):
            yield [
                meta for meta in page if not (self.hides and meta.key.startswith("generations/"))
            ]


# Choosing


def whole(step: int, *, size: int = 10, **more: Any) -> WholeCommit:
    return WholeCommit(sha256=str(step), step=step, size=size, **more)


# Kept without a cap: 80, 75, 70 (last), 5, 30, 20, 10 (best, in this order), 25, 50, 75 (every 25),
# 5 (pinned).
CAPPED = [
    whole(80),
    whole(75),
    whole(70),
    whole(50, metric=9.0),
    whole(30, metric=1.0),
    whole(25, size=20),
    whole(20, metric=2.0),
    whole(10, metric=3.0),
    whole(5, pinned=True, metric=0.5),
]


def kept_steps(commits: list[WholeCommit], **policy: Any) -> list[int]:
    return sorted(int(sha256) for sha256 in choose_commits(commits, RetentionPolicy(**policy)))


@pytest.mark.parametrize("keep_last", [0, -1])
def test_a_policy_keeps_at_least_the_last_commit(keep_last: int) -> None:
    with pytest.raises(ValueError, match=f"keep_last must be at least 1: {keep_last}"):
        RetentionPolicy(keep_last=keep_last)
    assert RetentionPolicy(keep_last=1).keep_last == 1


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({"keep_last": 5}, {"keep_last": 5}),
        ({"keep_every_steps": 100}, {"keep_every_steps": 100}),
        ({"keep_best": 2}, {"keep_best": 2}),
        ({"keep_best": {"metric": "accuracy"}}, {"keep_best": 1, "best_metric": "accuracy"}),
        ({"keep_best": {"mode": "max"}}, {"keep_best": 1, "best_mode": "max"}),
        ({"max_total_gib": 1.5}, {"max_total_bytes": 1_610_612_736}),
        ({"orphan_hours": 2.0}, {"orphan_seconds": 7200.0}),
        ({"orphan_hours": 2.0, "deadline_seconds": 3600.0}, {"orphan_seconds": 7200.0}),
        ({"orphan_hours": 2.0, "deadline_seconds": 3601.0}, {"orphan_seconds": 7202.0}),
    ],
)
def test_each_setting_of_a_job_is_its_own_rule_of_the_policy(
    settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    policy = retention_policy(CheckpointConfig.model_validate(settings))
    assert policy == replace(DEFAULT_POLICY, **changes)


@pytest.mark.parametrize(
    ("mode", "keep_best", "kept"),
    [
        ("min", 0, [60]),
        ("min", 1, [30, 60]),
        ("min", 2, [30, 50, 60]),
        ("max", 1, [20, 60]),
        ("max", 2, [10, 20, 60]),
        ("max", 9, [10, 20, 30, 50, 60]),  # a commit without the metric is never the best
    ],
)
def test_the_best_commits_by_the_metric_are_kept_in_both_modes(
    mode: str, keep_best: int, kept: list[int]
) -> None:
    commits = [whole(step, metric=metric) for step, metric in METRICS.items()]
    assert kept_steps(commits, keep_last=1, keep_best=keep_best, best_mode=mode) == kept


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equally_good_commits_the_newer_one_is_kept(mode: str) -> None:
    commits = [whole(step, metric=1.0) for step in (4, 3, 2, 1)]
    assert kept_steps(commits, keep_last=1, keep_best=2, best_mode=mode) == [3, 4]


@given(st.lists(st.floats(-5, 5) | st.none(), min_size=1, max_size=8), st.integers(0, 9))
def test_the_highest_values_are_the_lowest_of_the_negated_ones(
    metrics: list[float | None], keep_best: int
) -> None:
    commits = [whole(len(metrics) - number, metric=metric) for number, metric in enumerate(metrics)]
    negated = [
        replace(commit, metric=None if commit.metric is None else -commit.metric)
        for commit in commits
    ]
    policy = {"keep_last": 1, "keep_best": keep_best}
    assert kept_steps(commits, **policy, best_mode="max") == kept_steps(
        negated, **policy, best_mode="min"
    )


@pytest.mark.parametrize(
    ("steps", "every", "kept"),
    [
        ([70, 60, 50, 49, 30, 26, 25, 24, 10], 25, [25, 50, 70]),
        ([70, 60, 51, 49, 30, 26, 24, 10], 25, [26, 51, 70]),
        ([9, 8, 7], 10, [9]),
        ([10, 9, 8], 10, [10]),
        ([4, 3, 2, 1], 1, [1, 2, 3, 4]),
        ([4, 3, 2, 1], None, [4]),
        ([4, 3, 2, 1], 0, [4]),
    ],
)
def test_the_first_commit_at_or_after_each_multiple_is_kept(
    steps: list[int], every: int, kept: list[int]
) -> None:
    assert kept_steps([whole(step) for step in steps], keep_last=1, keep_every_steps=every) == kept


def test_of_two_commits_of_one_step_the_newer_generations_is_kept() -> None:
    newer, older = (WholeCommit(sha256=name, step=30, size=1) for name in ("newer", "older"))
    assert set(
        choose_commits([whole(40), newer, older], RetentionPolicy(keep_last=1, keep_every_steps=30))
    ) == {
        "40",
        "newer",
    }


def test_a_kept_commit_has_each_of_its_reasons() -> None:
    commits = [
        whole(40, metric=4.0),
        whole(30, metric=1.0),
        whole(20, pinned=True, metric=2.0),
        whole(10),
    ]
    policy = RetentionPolicy(keep_last=2, keep_every_steps=20, keep_best=1)
    assert choose_commits(commits, policy) == {
        "20": "pinned, every 20 steps",
        "40": "last, every 20 steps",
        "30": "last, best",
    }


@pytest.mark.parametrize(
    ("cap", "dropped"),
    [
        (100, []),
        (99, [25]),
        (80, [25]),
        (79, [25, 50]),
        (70, [25, 50]),
        (69, [10, 25, 50]),  # 75 is one of the last, too: it goes with these
        (59, [10, 20, 25, 50]),
        (49, [10, 20, 25, 30, 50]),
        (39, [10, 20, 25, 30, 50, 70]),
        (30, [10, 20, 25, 30, 50, 70]),
        (29, [10, 20, 25, 30, 50, 70, 75]),
        (19, [10, 20, 25, 30, 50, 70, 75]),  # the newest and the pinned stay
        (0, [10, 20, 25, 30, 50, 70, 75]),
    ],
)
def test_a_cap_drops_the_least_valuable_first_and_no_more_than_needed(
    cap: int, dropped: list[int]
) -> None:
    policy = {"keep_last": 3, "keep_every_steps": 25, "keep_best": 4, "max_total_bytes": cap}
    kept = kept_steps(CAPPED, **policy)
    assert sorted({commit.step for commit in CAPPED} - set(kept)) == dropped


def test_a_cap_counts_only_commits_that_are_kept() -> None:
    commits = [whole(4), whole(3), whole(2, size=1000), whole(1, size=1000)]
    assert kept_steps(commits, keep_last=2, max_total_bytes=20) == [3, 4]


@pytest.mark.parametrize(
    ("extra", "value"),
    [
        ({"metrics": {"step": 7, "loss": 1.5}}, 1.5),
        ({"metrics": {"step": 7, "loss": 2}}, 2.0),
        ({"metrics": {"step": 7, "loss": 0}}, 0.0),
        ({"metrics": {"step": 6, "loss": 1.5}}, None),
        ({"metrics": {"loss": 1.5}}, None),
        ({"metrics": {"step": 7}}, None),
        ({"metrics": {"step": 7, "loss": "1.5"}}, None),
        ({"metrics": {"step": 7, "loss": None}}, None),
        ({"metrics": {"step": 7, "loss": float("nan")}}, None),
        ({"metrics": {"step": 7, "loss": float("inf")}}, None),
        ({"metrics": [7, 1.5]}, None),
        ({}, None),
    ],
)
def test_a_metric_counts_if_it_is_a_finite_number_of_the_same_step(
    extra: dict[str, Any], value: float | None
) -> None:
    found = metric_at_step(extra, 7, "loss")
    assert found == value
    assert found is None or type(found) is float


# Deleting


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore()


@pytest.fixture
def signing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "EBBFLOW_TEST_KEY")
    monkeypatch.setenv("EBBFLOW_TEST_KEY", "a key of these tests, which no object may hold")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock's time, in a list of one."""
    seconds = [5000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def keys(store: Store, *prefixes: str) -> set[str]:
    return {meta.key for prefix in prefixes for meta in store.list(prefix)}


def steps(store: Store) -> list[int]:
    return [ref.step for ref in reachable_commits(store)]


def save_of(generation: Generation) -> CheckpointId:
    return CheckpointId(job="test", generation=generation.name, step=0, world_size=1)


def run(retention: Retention, store: Store, generation: Generation, **options: Any) -> list[int]:
    return [ref.step for ref in retention.run(store, save_of(generation), **options)]


def objects_of(generation: Generation, step: int) -> set[str]:
    return {data_key(generation.name, step, 0), index_key(generation.name, step, 0)}


def test_a_deletion_takes_the_manifest_first_and_then_everything_of_the_commit(
    store: RecordingStore,
) -> None:
    generation = put_generation(store, 1)
    gone = put_whole_commit(store, generation, 1)
    kept = put_whole_commit(store, generation, 2)
    store.put(signature_key(gone.sha256), b"")
    store.forget()
    assert delete_commit(store, gone, generation.name, newest=1) is True
    assert store.deleted[0] == gone.key
    assert set(store.deleted) == {gone.key} | objects_of(generation, 1)
    assert keys(store, "commits", "data", "index") == {kept.key} | objects_of(generation, 2)
    key = tombstone_key(gone.sha256)
    assert unseal(store.get(key), key) == {
        "version": 1,
        "key": gone.key,
        "generation": generation.name,
        "step": 1,
    }
    assert store.tags[key] == TOMBSTONE_TAGS
    assert keys(store, "signatures") == {signature_key(gone.sha256)}, "this process does not sign"


def test_a_deletion_takes_the_signature_where_commits_are_signed(
    store: RecordingStore, signing: None
) -> None:
    generation = put_generation(store, 1)
    gone = put_whole_commit(store, generation, 1)
    store.put(signature_key(gone.sha256), b"")
    assert delete_commit(store, gone, generation.name, newest=1)
    key = tombstone_key(gone.sha256)
    assert unseal(store.get(key), key)["signed"] is True
    assert keys(store, "signatures") == set()


def test_an_unreadable_commit_loses_only_its_manifest(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commit = put_whole_commit(store, generation, 1)
    assert delete_commit(store, commit, None, newest=1)
    assert keys(store, "commits") == set()
    assert keys(store, "data", "index") == objects_of(generation, 1)


def test_a_pinned_commit_is_not_deleted(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commit = put_whole_commit(store, generation, 1)
    store.put(pin_key(commit.sha256), b"")
    assert delete_commit(store, commit, generation.name, newest=1) is False
    assert keys(store, "commits") == {commit.key}
    assert keys(store, "tombstones") == set()


@pytest.mark.parametrize(("newest", "is_superseded"), [(899, True), (900, False), (901, False)])
def test_only_the_newest_generation_deletes(
    store: RecordingStore, newest: int, is_superseded: bool
) -> None:
    generation = put_generation(store, 900)
    commit = put_whole_commit(store, generation, 1)
    store.forget()
    if is_superseded:
        with pytest.raises(
            GenerationSuperseded, match="generation 900 was opened while generation 899 was running"
        ):
            delete_commit(store, commit, generation.name, newest=newest)
        assert keys(store, "commits") == {commit.key}
        assert keys(store, "tombstones") == set()
        return
    assert delete_commit(store, commit, generation.name, newest=newest)
    assert ("generations", f"generations/{newest - 500:06d}") == store.listings[0]


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("error", [StoreFull, StoreError])
def test_a_tombstone_that_cannot_be_written_stops_a_deletion_unless_the_store_is_full(
    store: RecordingStore, full: bool, error: type[StoreError]
) -> None:
    generation = put_generation(store, 1)
    commit = put_whole_commit(store, generation, 1)

    def refuse(key: str) -> None:
        raise error(f"put {key}: refused")

    store.before_put = refuse
    if full:
        assert delete_commit(store, commit, generation.name, newest=1, full=True)
        assert keys(store, "commits", "data", "index") == set()
        return
    with pytest.raises(error, match="refused"):
        delete_commit(store, commit, generation.name, newest=1)
    assert keys(store, "commits") == {commit.key}


def test_a_tombstone_is_written_without_tags_where_tags_are_forbidden(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = put_generation(store, 1)
    commit = put_whole_commit(store, generation, 1)
    put = store.put

    def refuse_tags(key: str, data: bytes, **options: Any) -> None:
        if options.get("tags"):
            raise StoreForbidden(f"put {key}: s3:PutObjectTagging is missing")
        put(key, data, **options)

    monkeypatch.setattr(store, "put", refuse_tags)
    assert delete_commit(store, commit, generation.name, newest=1)
    assert store.tags[tombstone_key(commit.sha256)] is None


def put_tombstone(store: Store, ref: CommitRef, generation: Generation) -> str:
    key = tombstone_key(ref.sha256)
    store.put(
        key, seal({"version": 1, "key": ref.key, "generation": generation.name, "step": ref.step})
    )
    return key


def three_tombstones(store: Store) -> tuple[Generation, list[CommitRef]]:
    """Three commits that are being deleted, in the order in which their tombstones are listed."""
    generation = put_generation(store, 1)
    commits = [put_whole_commit(store, generation, step) for step in (1, 2, 3)]
    for commit in commits:
        put_tombstone(store, commit, generation)
    return generation, sorted(commits, key=lambda commit: commit.sha256)


def test_every_interrupted_deletion_is_finished_with_all_that_belongs_to_it(
    store: RecordingStore,
) -> None:
    _, commits = three_tombstones(store)
    for commit in commits:
        store.put(quarantine_key(commit.sha256), b"")
        store.put(verified_key(commit.sha256), b"")
    finish_deletions(store)
    assert {key.split("/")[0] for key in keys(store, "")} == {"generations"}


def test_deletions_are_finished_one_by_one_while_other_work_waits(store: RecordingStore) -> None:
    _, commits = three_tombstones(store)
    finish_deletions(store, lambda: True)
    assert keys(store, "commits") == {commit.key for commit in commits[1:]}
    assert keys(store, "tombstones") == {tombstone_key(commit.sha256) for commit in commits[1:]}


def test_an_unreadable_tombstone_does_not_hold_up_the_others(store: RecordingStore) -> None:
    _, commits = three_tombstones(store)
    unreadable = tombstone_key(commits[0].sha256)
    store.put(unreadable, b"")
    finish_deletions(store)
    assert keys(store, "tombstones") == {unreadable}
    assert keys(store, "commits") == {commits[0].key}


def test_a_tombstone_that_another_process_removes_does_not_hold_up_the_others(
    store: RecordingStore,
) -> None:
    _, commits = three_tombstones(store)

    def remove_first(key: str) -> None:
        Store.delete(store, tombstone_key(commits[0].sha256))

    store.before_get = remove_first
    finish_deletions(store)
    assert keys(store, "tombstones") == set()
    assert keys(store, "commits") == {commits[0].key}


def test_a_pin_stops_an_interrupted_deletion_while_the_manifest_is_there(
    store: RecordingStore,
) -> None:
    generation, commits = three_tombstones(store)
    pinned, halfway, _ = commits
    store.put(pin_key(pinned.sha256), b"")
    store.put(pin_key(halfway.sha256), b"")
    store.delete(halfway.key)
    finish_deletions(store)
    assert keys(store, "tombstones") == set()
    assert keys(store, "commits") == {pinned.key}
    assert keys(store, "data", "index") == objects_of(generation, pinned.step)


def orphans(store: Store, *, now: float = 2000.0, older_than_seconds: float = 100.0) -> set[str]:
    found = find_orphans(store, FixedClock(now), older_than_seconds=older_than_seconds)
    return {meta.key for meta in found}


def test_every_kind_of_object_without_a_commit_is_an_orphan_and_nothing_else(
    store: RecordingStore,
) -> None:
    generation = put_generation(store, 1)
    commit = put_whole_commit(store, generation, 1)
    store.put(signature_key(commit.sha256), b"")
    expected = {
        data_key(generation.name, 2, 0),
        data_key(generation.name, 2, 1),
        index_key(generation.name, 3, 0),
        data_key("000002-aaaa", 1, 0),  # the same step of another generation
        signature_key("0" * 64),
        secret_key("run", 0),
    }
    others = {
        "data/notes.txt",
        "data/000001-aaaa/000000000009/00000/part.bin",
        "data/notes/000000000009/00000.bin",
        "data/000001-aaaa/notes/00000.bin",
        "index/000001-aaaa/notes.json",
        "commits/000",
        "events/000001/0-0-0.jsonl",
    }
    for key in expected | others:
        store.put(key, b"")
    assert orphans(store) == expected


@pytest.mark.parametrize(("age", "is_orphan"), [(99.0, False), (100.0, False), (101.0, True)])
def test_an_orphan_is_older_than_the_limit(
    store: RecordingStore, age: float, is_orphan: bool
) -> None:
    key = secret_key("run", 0)
    store.put(key, b"")
    assert orphans(store, now=store.now + age) == ({key} if is_orphan else set())


@pytest.mark.parametrize("young", [data_key("000001-aaaa", 2, 1), index_key("000001-aaaa", 2, 0)])
def test_one_young_object_keeps_the_whole_save(store: RecordingStore, young: str) -> None:
    old = {data_key("000001-aaaa", 2, 0), index_key("000001-aaaa", 2, 1)}
    for key in old:
        store.put(key, b"")
    assert orphans(store) == old
    store.now = 1950.0
    store.put(young, b"")
    others = {data_key("000001-aaaa", 3, 0), data_key("000002-aaaa", 2, 0)}
    for key in others:
        store.put(key, b"")
        store.dates[key] = 1000.0
    assert orphans(store) == others


def test_the_newest_date_of_all_listed_objects_is_given_to_the_clock(store: RecordingStore) -> None:
    clock = FixedClock(0.0)
    assert find_orphans(store, clock, older_than_seconds=1.0) == []
    generation = put_generation(store, 1)
    commit = put_whole_commit(store, generation, 1)
    find_orphans(store, clock, older_than_seconds=1.0)
    assert clock.newest == [], "there is nothing whose age matters"
    keys_by_date = {
        secret_key("run", 0): 1001.0,
        signature_key("0" * 64): 1002.0,
        index_key(generation.name, 2, 0): 1003.0,
        data_key(generation.name, 2, 0): 1004.0,
    }
    for key, date in keys_by_date.items():
        store.now = date
        store.put(key, b"")
        find_orphans(store, clock, older_than_seconds=1.0)
    store.dates[commit.key] = 1005.0
    find_orphans(store, clock, older_than_seconds=1.0)
    assert clock.newest == [1001.0, 1002.0, 1003.0, 1004.0, 1005.0]


def test_orphans_are_deleted_by_eight_threads(store: RecordingStore) -> None:
    put_generation(store, 1)
    for number in range(12):
        store.put(secret_key("run", number), b"")
    at_once = threading.Condition()
    names: list[str] = []

    def meet(key: str) -> None:
        """Wait until eight deletions have begun, then a little for a ninth, which must not come."""
        if not key.startswith("secrets/"):
            return
        with at_once:
            names.append(threading.current_thread().name)
            at_once.notify_all()
            assert at_once.wait_for(lambda: len(names) >= 8, timeout=20)
            at_once.wait_for(lambda: len(names) > 8, timeout=0.1)
            most.append(len(names))

    most: list[int] = []
    store.before_delete = meet
    store.now += 2 * DAY
    Retention(RetentionPolicy()).prune(store)
    assert keys(store, "secrets") == set()
    assert most[0] == 8
    assert all(name.startswith("delete") for name in names)


# Enforcing


def commits_of(
    store: Store, generation: Generation, *numbers: int, **options: Any
) -> list[CommitRef]:
    return [put_whole_commit(store, generation, number, **options) for number in numbers]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
def test_the_best_of_more_commits_than_are_kept_survives_a_run(
    store: RecordingStore, mode: str, best: int
) -> None:
    generation = put_generation(store, 1)
    for step, accuracy in {1: 0.5, 2: 0.1, 3: 0.9, 4: 0.3, 5: 0.4}.items():
        metrics = {"step": step, "accuracy": accuracy, "held_out_loss": -step}
        put_whole_commit(store, generation, step, extra={"metrics": metrics})
    policy = RetentionPolicy(keep_last=1, keep_best=1, best_metric="accuracy", best_mode=mode)
    assert run(Retention(policy), store, generation) == [
        step for step in (1, 2, 3, 4) if step != best
    ]
    assert steps(store) == [5, best]


def test_a_choice_names_what_is_kept_and_why_and_deletes_nothing(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    first, second, third = commits_of(store, generation, 1, 2, 3)
    store.put(pin_key(second.sha256), b"")
    store.forget()
    choice = Retention(RetentionPolicy(keep_last=1)).choose_commits(store)
    assert choice.keep == {third: "last", second: "pinned"}
    assert choice.delete == {first: generation.name}
    assert store.deleted == store.put_keys == []


def test_nothing_is_chosen_while_no_commit_is_whole(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1, 2)
    for step in (1, 2):
        store.delete(data_key(generation.name, step, 0))
    retention = Retention(RetentionPolicy(keep_last=1))
    assert retention.choose_commits(store).keep == retention.choose_commits(store).delete == {}
    assert retention.choose_commits(RecordingStore()).keep == {}


@pytest.mark.parametrize(
    "damage", ["missing", "shorter", "unreadable manifest", "missing manifest"]
)
def test_retention_deletes_a_torn_commit_once_enough_complete_ones_are_newer(
    store: RecordingStore, damage: str
) -> None:
    generation = put_generation(store, 1)
    refs = {ref.step: ref for ref in commits_of(store, generation, 1, 2, 3, 4, 5, 6)}
    for step in (2, 4, 6):
        if damage == "missing":
            store.delete(data_key(generation.name, step, 0))
        elif damage == "shorter":
            store.put(data_key(generation.name, step, 0), bytes(99))
        else:
            store.put(refs[step].key, b"{}")
    if damage == "missing manifest":
        commits = {refs[step].key for step in (2, 4, 6)}

        def remove(key: str) -> None:
            if key in commits:
                Store.delete(store, key)

        store.before_get = remove
    choice = Retention(RetentionPolicy(keep_last=2)).choose_commits(store)
    assert [ref.step for ref in choice.keep] == [5, 3]
    if damage in ("missing", "shorter"):
        name = generation.name
    else:
        name = None
    assert choice.delete == {refs[1]: generation.name, refs[2]: name}
    assert Retention(RetentionPolicy(keep_last=9)).choose_commits(store).delete == {}


def test_a_torn_commit_stays_until_as_many_are_newer_as_there_can_be(store: RecordingStore) -> None:
    """Two whole commits are all there are, though three are to be kept: what is older than both may
    go.
    """
    generation = put_generation(store, 1)
    refs = commits_of(store, generation, 1, 2, 3, 4)
    for step in (1, 3):
        store.delete(data_key(generation.name, step, 0))
    assert Retention(RetentionPolicy(keep_last=3)).choose_commits(store).delete == {
        refs[0]: generation.name
    }


def test_pinned_torn_commits_stay_and_keep_no_other_unreadable_one(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    first, second, third = commits_of(store, generation, 1, 2, 3)
    for commit in (first, second):
        store.put(commit.key, b"{}")
    store.put(pin_key(second.sha256), b"")
    choice = Retention(RetentionPolicy(keep_last=1)).choose_commits(store)
    assert (list(choice.keep), choice.delete) == ([third], {first: None})


@pytest.mark.parametrize("pinned", [0, 1])
def test_two_records_of_one_save_share_its_pin_and_its_place(
    store: RecordingStore, pinned: int
) -> None:
    generation = put_generation(store, 1)
    (oldest,) = commits_of(store, generation, 1)
    twins = [put_whole_commit(store, generation, 2, extra={"number": number}) for number in (1, 2)]
    (newest,) = commits_of(store, generation, 3)
    keep = Retention(RetentionPolicy(keep_last=2)).choose_commits(store).keep
    assert keep == {newest: "last", twins[0]: "last", twins[1]: "last"}
    store.put(pin_key(twins[pinned].sha256), b"")
    choice = Retention(RetentionPolicy(keep_last=1)).choose_commits(store)
    assert choice.keep == {newest: "last", twins[0]: "pinned", twins[1]: "pinned"}
    assert choice.delete == {oldest: generation.name}


@pytest.mark.parametrize(
    ("sizes", "kept"),
    [
        ([10, 10, 10, 10, 10], [3, 4, 5]),  # of 50 bytes, 2 x 10 are given up
        ([20, 10, 10, 10, 10], [2, 3, 4, 5]),
        ([9, 10, 10, 10, 10], [4, 5]),
        ([10, 10, 10, 10, 21], [5]),
        ([30, 30, 10, 10, 10], [2, 3, 4, 5]),
    ],
)
def test_a_full_store_is_cleared_for_two_commits_like_the_newest(
    store: RecordingStore, sizes: list[int], kept: list[int]
) -> None:
    generation = put_generation(store, 1)
    for step, size in enumerate(sizes, start=1):
        put_whole_commit(store, generation, step, size=size)
    put_whole_commit(store, generation, 0, size=1000)  # the policy does not keep it
    retention = Retention(RetentionPolicy(keep_last=5))
    assert sorted(ref.step for ref in retention.choose_commits(store, full=True).keep) == kept
    deleted = retention.make_room(store, save_of(generation), deadline_seconds=1.0)
    assert sorted(ref.step for ref in deleted) == sorted({0, 1, 2, 3, 4, 5} - set(kept))
    assert sorted(steps(store)) == kept
    assert keys(store, "tombstones") == set(), "they take room"


def test_a_full_store_is_cleared_though_no_tombstone_fits(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1, 2, 3)

    def refuse(key: str) -> None:
        raise StoreFull(f"put {key}: no room")

    store.before_put = refuse
    deleted = Retention(RetentionPolicy()).make_room(
        store, save_of(generation), deadline_seconds=1.0
    )
    assert [ref.step for ref in deleted] == [1, 2]


def test_pruning_deletes_what_the_policy_does_not_keep_and_nothing_more(
    store: RecordingStore,
) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1, 2, 3, 4, 5)
    assert [ref.step for ref in Retention(RetentionPolicy(keep_last=3)).prune(store)] == [1, 2]
    assert steps(store) == [5, 4, 3]


def test_commits_are_deleted_oldest_first(store: RecordingStore) -> None:
    first = put_generation(store, 1)
    refs = commits_of(store, first, 1, 2, 3)
    second = put_generation(store, 2, refs[2])
    late = put_whole_commit(store, first, 9)
    other_late = put_whole_commit(store, put_generation(store, 3, refs[2]), 9)
    del second
    commits_of(store, Generation(3, "aaaa"), 11, 12)
    store.now += 2 * DAY
    choice = Retention(RetentionPolicy(keep_last=1, orphan_seconds=DAY)).choose_commits(store)
    assert list(choice.delete) == [
        *refs,
        late,
        other_late,
        *[ref for ref in choice.delete if ref.step == 11],
    ]


def test_stale_commits_go_but_not_the_data_that_a_kept_commit_shares(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    kept = put_whole_commit(store, generation, 5)
    twin = put_whole_commit(store, generation, 5, extra={"number": 2})
    alone = put_whole_commit(store, generation, 4)
    pinned = put_whole_commit(store, generation, 3)
    unreadable = put_whole_commit(store, generation, 2)
    store.put(unreadable.key, b"{}")
    store.put(pin_key(pinned.sha256), b"")
    for commit in (twin, alone, pinned, unreadable):
        store.put(quarantine_key(commit.sha256), b"")
    store.now += DAY + 1
    choice = Retention(RetentionPolicy()).choose_commits(store)
    assert choice.keep == {kept: "last"}
    assert choice.delete == {twin: None, alone: generation.name, unreadable: None}


@pytest.mark.parametrize(("age", "goes"), [(DAY - 1, False), (DAY, False), (DAY + 1, True)])
@pytest.mark.parametrize("writable", [True, False])
def test_retention_deletes_an_unreachable_commit_beyond_the_age_limit(
    store: RecordingStore, clock: list[float], writable: bool, age: float, goes: bool
) -> None:
    generation = put_generation(store, 1)
    stale = put_whole_commit(store, generation, 1)
    store.put(quarantine_key(stale.sha256), b"")
    store.now += age
    put_whole_commit(store, generation, 2)

    def refuse(key: str) -> None:
        raise StoreFull(f"put {key}: no room")

    if not writable:  # then the date of the newest commit is all that is known
        store.before_put = refuse
    deleted = Retention(RetentionPolicy(orphan_seconds=DAY)).choose_commits(store).delete
    assert deleted == ({stale: generation.name} if goes else {})


def test_a_refused_commit_is_kept_however_old_it_is(store: RecordingStore, signing: None) -> None:
    generation = put_generation(store, 1)
    unsigned = put_whole_commit(store, generation, 1)
    signed = put_manifest(
        store,
        Manifest(
            save=CheckpointId(job="test", generation=generation.name, step=2, world_size=0),
            data=(),
            indexes=(),
            tensors={},
        ),
    )
    signer().sign(store, signed.key)
    store.now += 9 * DAY
    assert [commit.ref for commit in trace_lineage(store) if commit.refused] == [unsigned]
    assert Retention(RetentionPolicy()).choose_commits(store).delete == {}


def test_manifests_are_read_once_and_forgotten_with_their_commits(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    first = 987_654_321  # no other test has manifests of these steps
    commits_of(store, generation, first, first + 1, first + 2)
    retention = Retention(RetentionPolicy(keep_last=2))
    retention.choose_commits(store)
    store.forget()
    retention.choose_commits(store)
    assert [key for key in store.got if key.startswith("commits/")] == []
    assert run(retention, store, generation) == [first]
    gc.collect()
    known = [
        candidate
        for candidate in gc.get_objects()
        if isinstance(candidate, Manifest) and candidate.save.step >= first
    ]
    assert sorted(manifest.save.step for manifest in known) == [first + 1, first + 2]


def test_a_superseded_generation_runs_no_retention(store: RecordingStore) -> None:
    old = put_generation(store, 899)
    new = put_generation(store, 900)
    commits_of(store, new, 1, 2, 3, 4)
    store.forget()
    with pytest.raises(
        GenerationSuperseded, match="generation 900 was opened while generation 899 was running"
    ):
        run(Retention(RetentionPolicy(keep_last=1)), store, old)
    assert store.deleted == store.put_keys == []
    assert store.listings == [("generations", "generations/000399")]
    assert run(Retention(RetentionPolicy(keep_last=1)), store, new) == [1, 2, 3]


@pytest.mark.parametrize(
    ("seconds", "deleted"), [(10.0, [1, 2, 3]), (29.5, [1, 2]), (30.0, [1]), (30.5, [1])]
)
@pytest.mark.parametrize("full", [False, True])
def test_retention_ends_30_seconds_after_it_began(
    store: RecordingStore, clock: list[float], full: bool, seconds: float, deleted: list[int]
) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, *range(1, 9))

    def pass_time(key: str) -> None:
        if key.startswith("commits/"):
            clock[0] += seconds

    store.before_delete = pass_time
    retention = Retention(RetentionPolicy(keep_last=1))
    if full:
        found = retention.make_room(store, save_of(generation), deadline_seconds=1.0)
        assert [ref.step for ref in found] == deleted
    else:
        assert run(retention, store, generation) == deleted


def test_retention_ends_after_one_deletion_where_other_work_waits(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1, 2, 3)
    assert run(
        Retention(RetentionPolicy(keep_last=1)), store, generation, interrupted=lambda: True
    ) == [1]
    assert steps(store) == [3, 2]


@pytest.mark.parametrize(
    ("orphan_seconds", "deadline_seconds", "limit"),
    [
        (DAY, 400.0, 800.0),
        (DAY, 300.0, 600.0),
        (DAY, 299.0, 600.0),
        (700.0, 400.0, 700.0),
        (300.0, 100.0, 300.0),
    ],
)
@pytest.mark.parametrize("is_older", [False, True])
def test_a_full_store_loses_orphans_that_no_running_save_can_own(
    store: RecordingStore,
    clock: list[float],
    orphan_seconds: float,
    deadline_seconds: float,
    limit: float,
    is_older: bool,
) -> None:
    generation = put_generation(store, 1)
    orphan = data_key(generation.name, 7, 0)
    store.put(orphan, b"")
    store.now += limit + is_older
    retention = Retention(RetentionPolicy(orphan_seconds=orphan_seconds))
    assert retention.make_room(store, save_of(generation), deadline_seconds=deadline_seconds) == []
    assert keys(store, "data") == (set() if is_older else {orphan})


def test_orphans_are_swept_at_the_first_run_and_then_four_times_per_limit(
    store: RecordingStore, clock: list[float]
) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1)
    retention = Retention(RetentionPolicy(orphan_seconds=400.0))
    orphan = secret_key("run", 0)

    def run_with_an_old_orphan() -> bool:
        """Return whether the run swept it."""
        store.now += 1000.0
        store.put(orphan, b"")
        store.dates[orphan] = 0.0
        run(retention, store, generation)
        return store.head(orphan) is None

    assert run_with_an_old_orphan()
    clock[0] += 99.0
    assert not run_with_an_old_orphan()
    clock[0] += 1.0
    assert not run_with_an_old_orphan()
    clock[0] += 1.0
    assert run_with_an_old_orphan()
    clock[0] += 100.0
    assert not run_with_an_old_orphan(), "the sweep before began the time anew"
    assert {meta.key for meta in retention.orphans(store)} == {orphan}
    retention.prune(store)
    assert store.head(orphan) is None, "prune sweeps at once"


def test_an_interrupted_run_leaves_the_sweep_to_the_next_run(
    store: RecordingStore, clock: list[float]
) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1)
    orphan = secret_key("run", 0)
    store.put(orphan, b"")
    store.now += 2 * DAY
    retention = Retention(RetentionPolicy())
    assert run(retention, store, generation, interrupted=lambda: True) == []
    assert store.head(orphan) is not None
    run(retention, store, generation)
    assert store.head(orphan) is None


def test_a_sweep_stops_when_other_work_arrives(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1)
    orphan = secret_key("run", 0)
    store.put(orphan, b"")
    store.now += 2 * DAY
    store.forget()

    def sweep_has_begun() -> bool:
        return any(prefix == "secrets" for prefix, _ in store.listings)

    run(Retention(RetentionPolicy()), store, generation, interrupted=sweep_has_begun)
    assert store.head(orphan) is not None


@pytest.mark.parametrize(
    ("orphan_seconds", "age", "found"), [(50.0, 51.0, True), (50.0, 50.0, False)]
)
def test_the_listed_orphans_are_those_of_the_policys_limit(
    store: RecordingStore, clock: list[float], orphan_seconds: float, age: float, found: bool
) -> None:
    store.put(secret_key("run", 0), b"")
    store.now += age
    assert bool(Retention(RetentionPolicy(orphan_seconds=orphan_seconds)).orphans(store)) is found


def test_nothing_is_deleted_while_the_generations_record_is_not_listed(clock: list[float]) -> None:
    store = Hidden()
    warnings = list[str]()
    generation = put_generation(store, 1)
    commits_of(store, generation, 1, 2)
    retention = Retention(RetentionPolicy(keep_last=1), warnings.append)
    store.hides = True
    for _ in range(3):
        assert run(retention, store, generation) == []
        clock[0] += 100.0
    store.hides = False
    assert run(retention, store, generation) == [1]
    assert warnings == [], "the record was there all the time"


def test_a_missing_record_is_put_back_at_the_next_save_each_time(store: RecordingStore) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1)
    key = generation_key(1, generation.id)
    record = store.get(key)
    warnings: list[str] = []
    retention = Retention(RetentionPolicy(keep_last=1), warnings.append)
    run(retention, store, generation)
    for times in (1, 2):
        commits_of(store, generation, times + 1)
        store.delete(key)
        assert run(retention, store, generation) == [times]
        assert store.get(key) == record
        assert len(warnings) == times
    assert f"{key} was deleted while the job is running and has been put back" in warnings[0]


def test_a_missing_record_that_was_never_read_is_damage(store: RecordingStore) -> None:
    generation = Generation(1, "aaaa")
    retention = Retention(RetentionPolicy())
    with pytest.raises(
        DamagedLineage, match=r"000001-aaaa\.json was deleted while the job is running"
    ):
        run(retention, store, generation)


def test_the_record_is_read_once_and_may_vanish_between_listing_and_reading(
    store: RecordingStore,
) -> None:
    generation = put_generation(store, 1)
    commits_of(store, generation, 1)
    key = generation_key(1, generation.id)
    record = store.get(key)
    reads = list[str]()

    def vanish(name: str) -> None:
        if name == key:
            reads.append(name)
            if len(reads) == 1:
                Store.delete(store, key)

    store.before_get = vanish
    retention = Retention(RetentionPolicy())
    with pytest.raises(DamagedLineage, match="is missing"):
        run(retention, store, generation)
    store.put(key, record)
    store.forget()
    for _ in range(3):
        run(retention, store, generation)
    own_reads = [name for name in store.got if name == key]
    assert len(own_reads) == 1 + 3, "once for its content, and once in each run for the lineage"
    assert keys(store, data_prefix(generation.name, 1)) == {data_key(generation.name, 1, 0)}
