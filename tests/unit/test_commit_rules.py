"""Who commits a save, when, and from which indexes; in a store in memory, by a clock that only
pauses move.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from obstore.store import MemoryStore

from ebbflow.core.errors import ObjectNotFound, StoreUnavailable
from ebbflow.core.layout import (
    commit_key,
    commit_prefix,
    data_key,
    index_key,
    parse_commit_key,
    signature_key,
)
from ebbflow.core.signing_key import NAME_VARIABLE
from ebbflow.core.store import ObjectMeta, Store
from ebbflow.training.checkpoint.commit import (
    CommitAttempt,
    CommitWatch,
    await_commit,
    commit_as_backup,
    find_commit,
)
from ebbflow.training.checkpoint.manifest import (
    CheckpointId,
    DataObject,
    Manifest,
    RankIndex,
    merge_indexes,
)
from ebbflow.training.checkpoint.signing import signed_index_bytes
from ebbflow.training.checkpoint.verified_io import Deadline, sha256_text
from ebbflow.training.errors import CheckpointError


class RecordingStore(Store):
    """A bucket in memory that records its requests, and hides or refuses what a test asks for."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "s3://bucket/jobs/job", None)
        self.requests: list[str] = []
        self.hidden: Callable[[str], bool] = lambda key: False  # keys that listings leave out
        self.failing: Callable[[str], bool] = lambda request: False

    def _record(self, request: str) -> None:
        self.requests.append(request)
        if self.failing(request):
            raise StoreUnavailable(f"{request} failed")

    def put(self, key: str, data: Any, **options: Any) -> None:
        self._record(f"put {key}")
        super().put(key, data, **options)

    def get(self, key: str) -> bytes:
        self._record(f"get {key}")
        return super().get(key)

    def head(self, key: str) -> ObjectMeta | None:
        self._record(f"head {key}")
        return super().head(key)

    def list(self, prefix: str = "", *, limit: int | None = None) -> list[ObjectMeta]:
        self._record(f"list {prefix}" if limit is None else f"list {prefix} limit {limit}")
        return [meta for meta in super().list(prefix, limit=limit) if not self.hidden(meta.key)]

    def asked(self, start: str) -> list[str]:
        return [request for request in self.requests if request.startswith(start)]


class Clock:
    """The process's clock, which only pauses move.

    A pause is as long as its upper limit, or `pause_seconds`.
    """

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.pauses: list[float] = []
        self.upper_limits: list[float] = []
        self.pause_seconds: float | None = None

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds

    def draw(self, least: float, most: float) -> float:
        self.upper_limits.append(most)
        if self.pause_seconds is None:
            return most
        return self.pause_seconds


class Waits:
    """The waits of a rank above 0, by the clock.

    Wait number `interrupted_at` ends with other work.
    """

    def __init__(self, clock: Clock, interrupted_at: int = 10**6) -> None:
        self._clock = clock
        self._interrupted_at = interrupted_at
        self.seconds: list[float] = []

    def __call__(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        self._clock.seconds += seconds
        return len(self.seconds) >= self._interrupted_at


def save_of(world_size: int, step: int = 5) -> CheckpointId:
    return CheckpointId(job="job", generation="000001-x", step=step, world_size=world_size)


def index_of(save: CheckpointId, rank: int, size: int = 1) -> RankIndex:
    key = data_key(save.generation, save.step, rank)
    data = DataObject(
        key=key, size=size, crc64nvme="0" * 16, chunk_bytes=1, chunks=("0" * 16,) * size
    )
    return RankIndex(
        save=save, rank=rank, data=data, items=(), common={"extra": {}} if rank == 0 else None
    )


def put_index(store: Store, save: CheckpointId, *ranks: int) -> None:
    for rank in ranks:
        key = index_key(save.generation, save.step, rank)
        store.put(key, signed_index_bytes(store, key, index_of(save, rank, size=rank + 1)))


def put_commit(store: Store, save: CheckpointId, size: int = 1) -> str:
    """Put the manifest of a save whose ranks have `size` bytes each, without a signature."""
    indexes = [index_of(save, rank, size) for rank in range(save.world_size)]
    raw = merge_indexes(save, [(index, index.to_bytes()) for index in indexes]).to_bytes()
    key = commit_key(save.step, save.generation_number, sha256_text(raw))
    store.put(key, raw)
    return key


def commits_of(store: Store, save: CheckpointId) -> list[str]:
    return [
        meta.key for meta in Store.list(store, commit_prefix(save.step, save.generation_number))
    ]


@pytest.fixture
def store() -> RecordingStore:
    return RecordingStore()


@pytest.fixture
def signing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME_VARIABLE, "EBBFLOW_TEST_KEY")
    monkeypatch.setenv("EBBFLOW_TEST_KEY", "a key of these tests alone")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock.seconds)
        patch.setattr(time, "sleep", clock.sleep)
        patch.setattr(random.SystemRandom, "uniform", clock.draw)
        yield clock


def test_a_save_is_committed_once_every_rank_has_its_index(store: RecordingStore) -> None:
    save = save_of(3)
    watch = CommitWatch(store, save)
    assert not watch.all_there()
    assert watch.look() == CommitAttempt(None, 0, [0, 1, 2])
    put_index(store, save, 0, 2)
    assert watch.look() == CommitAttempt(None, 0, [1])
    put_index(store, save, 1)
    assert watch.all_there()
    attempt = watch.look()
    assert attempt.commit is not None and (attempt.size, attempt.missing_ranks, attempt.cause) == (
        1 + 2 + 3,
        [],
        "",
    )
    assert commits_of(store, save) == [attempt.commit.key]
    assert Manifest.from_bytes(store.get(attempt.commit.key), attempt.commit.key).save == save
    assert (attempt.commit.step, attempt.commit.generation) == (5, 1)
    assert store.list("signatures") == []
    with pytest.raises(dataclasses.FrozenInstanceError):
        attempt.size = 0


def test_an_index_is_read_once(store: RecordingStore) -> None:
    save = save_of(3)
    watch = CommitWatch(store, save)
    put_index(store, save, 0, 2)
    for _ in range(3):
        watch.look()
    put_index(store, save, 1)
    for _ in range(2):
        watch.look()
    read = [index_key(save.generation, 5, rank) for rank in (0, 1, 2)]
    assert sorted(store.asked("get index/")) == [f"get {key}" for key in read]
    before = len(store.asked("list index/"))
    assert watch.all_there() and watch.look().commit is not None
    assert len(store.asked("list index/")) == before, "all are known"


@pytest.mark.parametrize(("world_size", "is_asked"), [(1, True), (8, True), (9, False)])
def test_up_to_eight_indexes_that_a_listing_lacks_are_looked_up_by_name(
    store: RecordingStore, world_size: int, is_asked: bool
) -> None:
    save = save_of(world_size)
    put_index(store, save, *range(world_size))
    store.hidden = lambda key: key.startswith("index/")
    assert CommitWatch(store, save).all_there() is is_asked
    assert len(store.asked("head ")) == (world_size if is_asked else 0)
    attempt = CommitWatch(store, save).look()
    assert attempt.missing_ranks == ([] if is_asked else list(range(world_size)))


def test_only_indexes_that_a_listing_lacks_are_looked_up_by_name(store: RecordingStore) -> None:
    save = save_of(12)
    put_index(store, save, *range(9))
    assert CommitWatch(store, save).look().missing_ranks == [9, 10, 11]
    assert store.asked("head ") == [
        f"head {index_key(save.generation, 5, rank)}" for rank in (9, 10, 11)
    ]


def test_sixteen_indexes_are_read_at_once(
    store: RecordingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = save_of(40)
    put_index(store, save, *range(40))
    get = store.get
    counted = threading.Lock()
    sixteen = threading.Event()
    active = most = 0

    def get_slowly(key: str) -> bytes:
        nonlocal active, most
        with counted:
            active += 1
            most = max(most, active)
            if active == 16:
                sixteen.set()
        sixteen.wait(30)
        time.sleep(0.01)  # for a seventeenth
        with counted:
            active -= 1
        return get(key)

    monkeypatch.setattr(store, "get", get_slowly)
    assert CommitWatch(store, save).look().commit is not None
    assert most == 16


def test_reads_of_indexes_that_wait_are_dropped_once_one_has_failed(store: RecordingStore) -> None:
    save = save_of(200)
    put_index(store, save, *range(200))

    def fail_slowly(request: str) -> bool:
        if not request.startswith("get "):
            return False
        time.sleep(0.02)
        return True

    store.failing = fail_slowly
    with pytest.raises(StoreUnavailable):
        CommitWatch(store, save).look()
    assert len(store.asked("get ")) < 100


def test_indexes_that_are_damaged_count_as_missing_and_three_are_named(
    store: RecordingStore,
) -> None:
    save = save_of(5)
    put_index(store, save, 0)
    for rank in range(1, 5):
        store.put(index_key(save.generation, 5, rank), b"damaged")
    watch = CommitWatch(store, save)
    attempt = watch.look()
    assert (attempt.commit, attempt.missing_ranks) == (None, [1, 2, 3, 4])
    named = [
        f"{store.uri}/{index_key(save.generation, 5, rank)}: not a sealed JSON document"
        for rank in (1, 2, 3)
    ]
    assert [cause.partition(": JSON")[0] for cause in attempt.cause.split("; ")] == named
    put_index(store, save, 1, 2, 3, 4)
    assert watch.look().commit is not None, "a damaged index is not remembered"


@pytest.mark.usefixtures("signing")
def test_a_signature_is_there_before_the_commit_that_it_is_of(store: RecordingStore) -> None:
    save = save_of(2)
    put_index(store, save, 0, 1)
    commit = CommitWatch(store, save).look().commit
    assert commit is not None
    puts = [request for request in store.asked("put ") if "index/" not in request]
    assert puts == [f"put {signature_key(commit.sha256)}", f"put {commit.key}"]
    assert find_commit(store, save) == CommitAttempt(commit, 1 + 2, [])


@pytest.mark.usefixtures("signing")
def test_an_index_without_a_signature_is_not_committed(store: RecordingStore) -> None:
    save = save_of(2)
    put_index(store, save, 0)
    store.put(index_key(save.generation, 5, 1), index_of(save, 1).to_bytes())
    attempt = CommitWatch(store, save).look()
    assert attempt.missing_ranks == [1] and "its HMAC is missing" in attempt.cause


def test_a_commit_by_another_rank_is_found_with_its_size(store: RecordingStore) -> None:
    save = save_of(2)
    assert find_commit(store, save) is None
    key = put_commit(store, save, size=3)
    found = find_commit(store, save)
    assert found is not None and found.commit is not None
    assert (found.commit.key, found.size, found.missing_ranks) == (key, 6, [])
    assert find_commit(store, save_of(2, step=6)) is None


def first_in_a_listing(store: Store, save: CheckpointId) -> str:
    """Put the commit whose key comes before those of all other sizes up to 8."""
    scratch = RecordingStore()
    sizes = {put_commit(scratch, save, size): size for size in range(1, 9)}
    return put_commit(store, save, sizes[min(sizes)])


@pytest.mark.parametrize("hindrance", ["damaged", "deleted", "of another save"])
def test_a_commit_is_found_behind_one_that_does_not_count(
    store: RecordingStore, hindrance: str
) -> None:
    save = save_of(1)
    key = put_commit(store, save)
    other = f"{commit_prefix(5, 1)}{'0' * 64}.json"
    if hindrance == "of another save":
        other = next(
            committed
            for committed in (put_commit(store, save_of(2), size) for size in range(1, 99))
            if committed < key
        )
    else:
        store.put(other, b"{}")
    get = store.get

    def get_unless_deleted(key: str) -> bytes:
        if key == other and hindrance == "deleted":
            raise ObjectNotFound(key)
        return get(key)

    store.get = get_unless_deleted
    assert commits_of(store, save)[0] < key
    found = find_commit(store, save)
    assert found is not None and found.commit is not None and found.commit.key == key


@pytest.mark.usefixtures("signing")
def test_a_commit_is_not_found_unless_its_signature_is_valid(store: RecordingStore) -> None:
    """Any writer of the store could put a manifest of this save."""
    save = save_of(1)
    forged = put_commit(store, save, size=7)
    assert find_commit(store, save) is None
    put_index(store, save, 0)
    signed = CommitWatch(store, save).look().commit
    assert signed is not None
    store.put(signature_key(parse_commit_key(forged)[2]), store.get(signature_key(signed.sha256)))
    found = find_commit(store, save)
    assert found is not None and found.commit == signed
    store.delete(signed.key)
    assert find_commit(store, save) is None, "the signature of another commit is none"


@pytest.mark.usefixtures("signing")
@pytest.mark.parametrize("seed", range(4))
def test_a_commit_is_found_behind_one_whose_signature_is_refused(
    store: RecordingStore, seed: int
) -> None:
    save = save_of(1, step=seed)
    forged = first_in_a_listing(store, save)
    put_index(store, save, 0)
    CommitWatch(store, save).look()
    keys = commits_of(store, save)
    found = find_commit(store, save)
    assert found is not None and found.commit is not None
    assert [found.commit.key] == [key for key in keys if key != forged]


def test_the_wait_for_a_commit_looks_for_one_by_another_rank_at_every_fourth_try(
    store: RecordingStore, clock: Clock
) -> None:
    clock.pause_seconds = 0.25
    save = save_of(2)
    put_index(store, save, 0)
    foreign = f"list {commit_prefix(5, 1)}"
    indexes = "list index/000001-x/000000000005/"
    for foreign_first, tries in ((False, [3, 7]), (True, [0, 4])):
        store.requests.clear()
        with pytest.raises(
            CheckpointError, match=r"no index from rank 1 \(1 of 2 ranks are durable\)$"
        ):
            await_commit(store, save, Deadline(2.0), foreign_first=foreign_first)
        expected: list[str] = []
        for number in range(8):
            if number in tries:
                expected += [foreign, indexes]
            else:
                expected += [indexes]
        assert store.asked("list ") == expected
    assert clock.pauses == [0.25] * 14, "a pause that ends at the deadline is not made"


def test_the_pauses_of_the_wait_for_a_commit_grow_to_half_a_second(
    store: RecordingStore, clock: Clock
) -> None:
    with pytest.raises(CheckpointError):
        await_commit(store, save_of(1), Deadline(3.0))
    assert clock.upper_limits[:8] == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5, 0.5])


def test_the_wait_for_a_commit_ends_with_one_by_another_rank(
    store: RecordingStore, clock: Clock
) -> None:
    save = save_of(2)
    key = put_commit(store, save)
    attempt = await_commit(store, save, Deadline(60.0))
    assert attempt.commit is not None and attempt.commit.key == key
    assert len(clock.pauses) == 3, "found at the fourth try"
    clock.pauses.clear()
    assert await_commit(store, save, Deadline(60.0), foreign_first=True) == attempt
    assert clock.pauses == []


def test_the_wait_for_a_commit_lasts_until_it_is_listed_and_makes_it_once(
    store: RecordingStore, clock: Clock
) -> None:
    save = save_of(1)
    put_index(store, save, 0)
    store.hidden = lambda key: key.startswith("commits/") and len(clock.pauses) < 6
    attempt = await_commit(store, save, Deadline(60.0), given_up=lambda: True)
    assert attempt.commit is not None and commits_of(store, save) == [attempt.commit.key]
    assert len(clock.pauses) == 6, "who has put a commit does not give up"
    assert len(store.asked("put commits/")) == 1
    assert len(store.asked(f"list {commit_prefix(5, 1)} limit 1")) == 7


def test_a_commit_that_is_never_listed_is_an_error_that_names_it(
    store: RecordingStore, clock: Clock
) -> None:
    save = save_of(1)
    put_index(store, save, 0)
    store.hidden = lambda key: key.startswith("commits/")
    with pytest.raises(CheckpointError) as failed:
        await_commit(store, save, Deadline(2.0))
    assert str(failed.value) == (
        f"save of step 5 of 000001-x: {commits_of(store, save)[0]} was put and is not listed "
        "within 2 s; a start from now may miss it"
    )


def test_the_wait_for_a_commit_survives_store_errors_and_reports_the_last(
    store: RecordingStore, clock: Clock
) -> None:
    save = save_of(2)
    put_index(store, save, 0)
    start = "save of step 5 of 000001-x was not committed within 4 s: "
    store.failing = lambda request: request.startswith("list index/")
    with pytest.raises(CheckpointError) as away:
        await_commit(store, save, Deadline(4.0))
    assert str(away.value).startswith(f"{start}the store did not answer (")
    assert str(away.value).endswith("; last error: list index/000001-x/000000000005/ failed")
    store.failing = lambda request: (
        request.startswith("list index/") and len(store.asked(request)) < 5
    )
    with pytest.raises(CheckpointError) as missing:
        await_commit(store, save, Deadline(4.0))
    assert str(missing.value) == f"{start}no index from rank 1 (1 of 2 ranks are durable)", (
        "an error that has passed"
    )
    put_index(store, save, 1)
    store.requests.clear()
    store.failing = lambda request: (
        request.startswith("list index/") and len(store.asked(request)) < 5
    )
    assert await_commit(store, save, Deadline(4.0)).commit is not None


def test_an_uncommitted_save_reports_why_an_index_is_unusable(
    store: RecordingStore, clock: Clock
) -> None:
    save = save_of(1)
    store.put(index_key(save.generation, 5, 0), b"[]")
    with pytest.raises(
        CheckpointError, match=r"no index from rank 0 \(0 of 1 ranks are durable\); s3://\S+: not a"
    ):
        await_commit(store, save, Deadline(2.0))


@pytest.mark.parametrize(
    ("world_size", "ending"), [(20, "18, 19 (0 of 20"), (21, "18, 19 … (0 of 21")]
)
def test_twenty_ranks_without_an_index_are_named(
    store: RecordingStore, clock: Clock, world_size: int, ending: str
) -> None:
    with pytest.raises(CheckpointError) as failed:
        await_commit(store, save_of(world_size), Deadline(0.0))
    assert "no index from rank 0, 1, 2, " in str(failed.value) and ending in str(failed.value)
    assert clock.pauses == []


def test_the_wait_for_a_commit_ends_when_it_is_given_up(
    store: RecordingStore, clock: Clock
) -> None:
    answers = [False, False, True]
    with pytest.raises(CheckpointError, match="no index from rank 0"):
        await_commit(store, save_of(1), Deadline(60.0), given_up=lambda: answers.pop(0))
    assert len(clock.pauses) == 2 and answers == []


@pytest.mark.parametrize(
    ("rank", "deadline_seconds", "waits"),
    [
        (1, 64.0, [1, 2, 4, 8, 16, 32, 1]),
        (3, 64.0, [1, 2, 4, 8, 16, 32, 1]),
        (4, 64.0, [3, 4, 8, 16, 32, 1]),
        (15, 64.0, [3, 4, 8, 16, 32, 1]),
        (16, 64.0, [7, 8, 16, 32, 1]),
        (1, 32.0, [0.5, 1, 2, 4, 8, 16, 0.5]),
        (1, 128.0, [1, 2, 4, 8, 16, 32, 64, 1]),
        (4095, 64.0, [63, 1]),
    ],
)
def test_a_rank_above_0_looks_rarely_and_later_the_higher_it_is(
    store: RecordingStore, clock: Clock, rank: int, deadline_seconds: float, waits: list[float]
) -> None:
    waited = Waits(clock)
    commit_as_backup(store, save_of(2), rank, Deadline(deadline_seconds), waited)
    assert waited.seconds == waits
    assert len(store.asked(f"list {commit_prefix(5, 1)} limit 1")) == len(waits), (
        "one request at each look"
    )
    assert commits_of(store, save_of(2)) == []


def test_a_rank_above_0_looks_no_more_once_there_is_a_commit(
    store: RecordingStore, clock: Clock
) -> None:
    save = save_of(2)
    put_index(store, save, 0, 1)
    put_commit(store, save)
    waited = Waits(clock)
    commit_as_backup(store, save, 1, Deadline(64.0), waited)
    assert waited.seconds == [1]
    assert store.asked("list index/") == []


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The limits of the waits for lower ranks, each of which is as long as its upper limit."""
    limits: list[tuple[float, float]] = []

    def draw(least: float, most: float) -> float:
        limits.append((least, most))
        return most

    monkeypatch.setattr(random, "uniform", draw)
    return limits


@pytest.mark.parametrize(
    ("rank", "world_size", "deadline_seconds", "first", "wait"),
    [(1, 100, 64.0, 1, 5.0 + 0.5), (4, 100, 64.0, 3, 6.0 + 0.5), (1, 400, 32.0, 0.5, 2.5 + 2.0)],
)
def test_a_rank_above_0_leaves_the_commit_to_lower_ranks_for_a_while_and_then_makes_it(
    store: RecordingStore,
    clock: Clock,
    drawn: list[tuple[float, float]],
    rank: int,
    world_size: int,
    deadline_seconds: float,
    first: float,
    wait: float,
) -> None:
    save = save_of(world_size)
    put_index(store, save, *range(world_size))
    waited = Waits(clock)
    commit_as_backup(store, save, rank, Deadline(deadline_seconds), waited)
    assert drawn == [(2.0, 4.0 + rank**0.5)]
    assert waited.seconds[:2] == pytest.approx([first, wait])
    assert len(waited.seconds) == 3 and len(commits_of(store, save)) == 1


@pytest.mark.parametrize("interrupted_at", [1, 2])
def test_a_rank_above_0_stops_as_soon_as_other_work_arrives(
    store: RecordingStore, clock: Clock, drawn: list[tuple[float, float]], interrupted_at: int
) -> None:
    save = save_of(2)
    put_index(store, save, 0, 1)
    waited = Waits(clock, interrupted_at)
    commit_as_backup(store, save, 1, Deadline(64.0), waited)
    assert len(waited.seconds) == interrupted_at and commits_of(store, save) == []


def test_a_rank_above_0_does_not_commit_what_another_committed_meanwhile(
    store: RecordingStore, clock: Clock, drawn: list[tuple[float, float]]
) -> None:
    save = save_of(2)
    put_index(store, save, 0, 1)
    waited = Waits(clock)

    def wait(seconds: float) -> bool:
        if len(waited.seconds) == 1:
            put_commit(store, save, size=9)
        return waited(seconds)

    commit_as_backup(store, save, 1, Deadline(64.0), wait)
    assert len(waited.seconds) == 2 and len(store.asked("put commits/")) == 1


@pytest.mark.parametrize("failing", ["list commits/", "list index/", "put commits/"])
def test_a_rank_above_0_tries_again_after_an_error_of_the_store(
    store: RecordingStore, clock: Clock, drawn: list[tuple[float, float]], failing: str
) -> None:
    save = save_of(2)
    put_index(store, save, 0, 1)
    store.failing = lambda request: request.startswith(failing) and len(store.asked(failing)) == 1
    commit_as_backup(store, save, 1, Deadline(64.0), Waits(clock))
    assert len(commits_of(store, save)) == 1


def test_a_rank_above_0_tries_again_after_indexes_that_contradict_each_other(
    store: RecordingStore, clock: Clock, drawn: list[tuple[float, float]]
) -> None:
    save = save_of(2)
    put_index(store, save, 0)
    store.put(index_key(save.generation, 5, 1), index_of(save, 0).to_bytes())
    waited = Waits(clock)
    commit_as_backup(store, save, 1, Deadline(64.0), waited)
    assert clock.seconds >= 1064.0 and commits_of(store, save) == []
