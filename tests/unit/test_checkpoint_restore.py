"""Restoring: what each error of each rank comes to, who reads again, and which commits are passed
over.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbflow.core.errors import (
    ObjectNotFound,
    StoreError,
    StoreForbidden,
    StoreTimeout,
    StoreUnavailable,
)
from ebbflow.core.layout import commit_key, data_key, index_key, quarantine_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.lineage import CommitRef, Generation, reachable_commits
from ebbflow.training.checkpoint.manifest import (
    CheckpointId,
    DataObject,
    RankIndex,
    TensorEntry,
    merge_indexes,
)
from ebbflow.training.checkpoint.restore import (
    RestoreResult,
    RestoreSeconds,
    assign_second_readers,
    restore_newest,
)
from ebbflow.training.checkpoint.save_plan import TensorShard, lay_out
from ebbflow.training.checkpoint.state import (
    SHARED_PREFIX,
    apply_settings,
    capture_rng,
    named_state,
    optimizer_settings,
    rng_name,
)
from ebbflow.training.checkpoint.verified_io import crc_text, sha256_text, unseal
from ebbflow.training.engine.optimizer import Muon
from ebbflow.training.errors import (
    CheckpointError,
    CommitMismatch,
    CorruptCommit,
    MisplacedCommit,
    NothingToRestore,
    RefusedCommit,
    UnreliableReader,
)
from tests.support.commits import RecordingStore, put_generation, put_manifest

FURTHER = {f"{SHARED_PREFIX}a": torch.tensor([1.0, 2.0]), f"{SHARED_PREFIX}b": torch.tensor([3])}

NOT_THE_COMMIT = "could not be read, which says nothing about the commit itself"

REJECTING = {
    "corrupt": (CorruptCommit("flipped"), "damaged", True),
    "misplaced": (MisplacedCommit("of another step"), "damaged", False),
    "refused": (RefusedCommit("not signed"), "refused", False),
    "missing": (ObjectNotFound("gone"), "damaged", True),
}

ERRORS: dict[str, Callable[[], Exception]] = {
    "error": lambda: StoreError("truncated"),
    "away": lambda: StoreUnavailable("503"),
    "refused": lambda: RefusedCommit("not signed"),
    "mismatch": lambda: CommitMismatch("another model"),
    "misplaced": lambda: MisplacedCommit("of another step"),
}

ONE_REFUSES = "rank 1 on here refuses what the others accept: another key there?"


class Job:
    """A store with commits of steps 3, 2 and 1, newest first."""

    def __init__(self) -> None:
        self.store = RecordingStore()
        self.generation = put_generation(self.store, 1)
        self.refs = [put_state(self.store, self.generation, step) for step in (3, 2, 1)]
        self.candidates = [ref.key for ref in self.refs]

    def quarantined(self) -> list[str]:
        return [meta.key for meta in self.store.list("quarantine")]


class View(Store):
    """How one rank sees a store: some manifests cannot be read, or bytes of data objects are
    flipped.
    """

    def __init__(self, store: Store, *, flips: str = "") -> None:
        self.__dict__.update(store.__dict__)
        self.errors: dict[str, list[Exception]] = {}  # by key, one for each of the next reads
        self._flips = flips

    def get(self, key: str) -> bytes:
        if left := self.errors.get(key):
            raise left.pop(0)
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = super().get_range(key, start, length)
        if self._flips and self._flips in key:
            return bytes([data[0] ^ 1]) + data[1:]
        return data


# Several ranks


class Ranks:
    """Ranks as threads of this process, whose all-gather is a meeting of the threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
        self._world_size = world_size
        self._rows: dict[int, Tensor] = {}
        self._meeting = threading.Barrier(world_size, timeout=20)
        self._local = threading.local()
        self.slept: dict[int, list[float]] = {rank: [] for rank in range(world_size)}
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
        monkeypatch.setattr(dist, "all_gather", self._all_gather)
        monkeypatch.setattr(
            time, "sleep", lambda seconds: self.slept[self._local.rank].append(seconds)
        )

    def _all_gather(self, gathered: list[Tensor], mine: Tensor) -> None:
        assert (mine.numel(), mine.dtype, mine.device.type) == (4096, torch.uint8, "cpu")
        self._rows[self._local.rank] = mine.clone()
        self._meeting.wait()
        for rank, row in self._rows.items():
            gathered[rank].copy_(row)
        self._meeting.wait()

    def restore(
        self,
        stores: list[Store],
        candidates: list[str],
        nodes: list[int],
        read_again: Callable[..., str],
    ) -> list[RestoreResult | Exception]:
        """Restore on each rank with its own view of the store.

        Returns each rank's result or exception.

        `read_again` is called with the rank that reads again, the commit's key, the object's key
        and the chunk.
        """
        found: dict[int, RestoreResult | Exception] = {}

        def work(rank: int) -> None:
            self._local.rank = rank
            try:
                found[rank] = restore_newest(
                    stores[rank],
                    candidates,
                    model_of(-1),
                    None,
                    rank,
                    self._world_size,
                    node=nodes[rank],
                    read_again=lambda *part: read_again(rank, *part),
                )
            except Exception as error:
                found[rank] = error

        threads = [
            threading.Thread(target=work, args=(rank,), daemon=True)
            for rank in range(self._world_size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[rank] for rank in range(self._world_size)]


class SecondReaders:
    """Second readers with prepared answers, by rank: a problem, "" for none, or an exception."""

    def __init__(self, **answers: str | Exception) -> None:
        self._answers = answers
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, rank: int, *part: Any) -> str:
        self.calls.append((rank, *part))
        answer = self._answers[f"rank_{rank}"]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Lion(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})


class OwnAdamW(torch.optim.AdamW):
    pass


class PagedLion8bit(Lion):
    pass


class Wrapper(Lion):
    """A wrapper as accelerate's."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.optimizer = torch.optim.AdamW(self.param_groups[0]["params"], lr)


def model_of(value: float) -> nn.Module:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_of(model: nn.Module) -> float:
    values = set()
    for parameter in model.parameters():
        values.update(parameter.flatten().tolist())
    assert len(values) == 1
    return values.pop()


def put_state(store: Store, generation: Generation, step: int, **common: Any) -> CommitRef:
    """Commit a model whose weights equal the step, as one rank saves it, with further tensors of
    two kinds.
    """
    model = model_of(step)
    optimizer = torch.optim.SGD(model.parameters(), lr=step / 8)
    own = {rng_name(0, "position"): torch.tensor([step])}
    state = {**named_state(model, optimizer), **capture_rng(0), **own, **FURTHER}
    layout = lay_out(1, [TensorShard.of_whole(name, tensor) for name, tensor in state.items()])
    raw = bytearray(layout.length)
    for entry in layout.items:
        tensor = state[entry.name].contiguous().view(-1).view(torch.uint8)
        raw[entry.start : entry.start + entry.length] = tensor.numpy().tobytes()
    key = data_key(generation.name, step, 0)
    store.put(key, bytes(raw))
    data = DataObject(
        key=key, size=len(raw), crc64nvme="", chunk_bytes=2**24, chunks=(crc_text(bytes(raw)),)
    )
    save = CheckpointId(job="job", generation=generation.name, step=step, world_size=1)
    settings = optimizer_settings(model, optimizer)
    common = {"extra": {"cursor": step}, "optimizer": settings, "parent": None, **common}
    index = RankIndex(save=save, rank=0, data=data, items=layout.items, common=common)
    store.put(index_key(generation.name, step, 0), index.to_bytes())
    return put_manifest(store, merge_indexes(save, [(index, index.to_bytes())]))


@pytest.fixture
def job() -> Job:
    return Job()


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made; nothing waits."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def failing(job: Job, *errors: Exception, times: int = 1) -> View:
    """A view in which the newest manifest cannot be read `times` times for each of the errors."""
    view = View(job.store)
    view.errors[job.candidates[0]] = [error for error in errors for _ in range(times)]
    return view


def restore(
    store: Store, candidates: list[str], **options: Any
) -> tuple[RestoreResult | None, float]:
    """Restore as the only rank. Returns the result and the value of the weights."""
    model = model_of(-1)
    found = restore_newest(
        store,
        candidates,
        model,
        None,
        options.pop("rank", 0),
        options.pop("world_size", 1),
        **options,
    )
    return found, value_of(model)


# One rank


def test_without_candidates_nothing_is_restored(job: Job) -> None:
    assert restore(job.store, []) == (None, -1)


def test_the_first_candidate_is_restored_with_all_that_is_stored_beside_the_weights(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    random.seed(5)
    torch.manual_seed(5)
    newest = put_state(job.store, job.generation, 4)
    drawn = (random.random(), torch.rand(1).item())
    model = model_of(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = restore_newest(job.store, [newest.key, *job.candidates], model, optimizer, 0, 1)
    assert found is not None
    assert (value_of(model), optimizer.param_groups[0]["lr"]) == (4.0, 0.5)
    assert (found.step, found.extra, found.key, found.world_size) == (
        4,
        {"cursor": 4},
        newest.key,
        1,
    )
    assert found.bytes_read == job.store.head(data_key(job.generation.name, 4, 0)).size
    assert (found.rng, found.rejected) == ("restored", [])
    assert (random.random(), torch.rand(1).item()) == drawn
    assert found.further.own["position"].tolist() == [4]
    assert set(found.further.own) >= {"torch", "python", "position"}
    assert found.further.shared == {}
    assert capsys.readouterr().err == ""
    assert job.quarantined() == []


def test_shared_tensors_are_read_into_the_given_places_and_others_are_skipped(job: Job) -> None:
    asked: dict[str, tuple[int, ...]] = {}
    target = torch.zeros(2)

    def place(name: str, entry: TensorEntry) -> Tensor | None:
        asked[name] = entry.shape
        if name == f"{SHARED_PREFIX}a":
            return target
        return None

    found, _ = restore(job.store, job.candidates, place=place)
    assert asked == {f"{SHARED_PREFIX}a": (2,), f"{SHARED_PREFIX}b": (1,)}
    assert list(found.further.shared) == [f"{SHARED_PREFIX}a"]
    assert target.tolist() == [1.0, 2.0]


def test_at_another_world_size_the_random_states_come_from_the_commit_and_the_rank(
    job: Job,
) -> None:
    draws = []
    for rank, candidates in (
        (0, job.candidates),
        (1, job.candidates),
        (0, job.candidates[1:]),
        (0, job.candidates),
    ):
        found, _ = restore(job.store, candidates, rank=rank, world_size=2)
        assert (found.rng, found.world_size, found.further.own) == (
            "reseeded from the commit",
            1,
            {},
        )
        draws.append(torch.rand(1).item())
    assert len(set(draws[:3])) == 3
    assert draws[3] == draws[0]


def test_an_optimizer_keeps_its_settings_where_the_commit_has_none(job: Job) -> None:
    ref = put_state(job.store, job.generation, 5, optimizer=None)
    model = model_of(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert restore_newest(job.store, [ref.key], model, optimizer, 0, 1).step == 5
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(
    ("error", "tries", "kind", "words"),
    [
        (StoreUnavailable("503"), 5, CheckpointError, f"{NOT_THE_COMMIT}: 503"),
        (StoreTimeout("it hangs"), 1, CheckpointError, f"{NOT_THE_COMMIT}: it hangs"),
        (StoreForbidden("403"), 1, CheckpointError, f"{NOT_THE_COMMIT}: 403"),
        (StoreError("truncated"), 1, CheckpointError, f"{NOT_THE_COMMIT}: truncated"),
        (CheckpointError("version 2"), 1, CheckpointError, f"{NOT_THE_COMMIT}: version 2"),
        (ValueError("odd"), 1, CheckpointError, rf"{NOT_THE_COMMIT}: ValueError\('odd'\)"),
        (CommitMismatch("another model"), 1, CommitMismatch, "json: another model"),
    ],
)
def test_an_error_about_the_newest_commit_ends_the_restore_and_rejects_nothing(
    job: Job, sleeps: list[float], error: Exception, tries: int, kind: type[Exception], words: str
) -> None:
    view = failing(job, error, times=9)
    stages: list[str] = []
    with pytest.raises(kind, match=words) as raised:
        restore(view, job.candidates, meet=stages.append)
    assert type(raised.value) is kind
    assert str(raised.value).startswith(job.candidates[0])
    assert sleeps == [0.5, 1.0, 2.0, 4.0][: tries - 1]
    assert stages == [
        f"reading {job.candidates[0]}, try {number}" for number in range(1, tries + 1)
    ]
    assert job.quarantined() == []


def test_a_store_that_is_away_for_a_while_is_read_again(job: Job, sleeps: list[float]) -> None:
    found, value = restore(failing(job, StoreUnavailable("503"), times=4), job.candidates)
    assert (found.step, value, found.rejected) == (3, 3.0, [])
    assert sleeps == [0.5, 1.0, 2.0, 4.0]


def test_a_reason_is_ascii_on_one_line_of_at_most_250_characters(job: Job) -> None:
    with pytest.raises(CheckpointError) as cut:
        restore(failing(job, StoreError("x" * 300)), job.candidates)
    assert str(cut.value).endswith(f": {'x' * 250}")
    with pytest.raises(CheckpointError, match=r"commit itself: two lines of gr\?n$"):
        restore(failing(job, StoreError("two\n  lines of grün")), job.candidates)


# Commits that are passed over


def torn(*_: Any) -> str:
    return "it is torn"


@pytest.mark.parametrize("case", list(REJECTING))
def test_a_rejected_commit_is_reported_and_the_one_before_it_restored(
    job: Job,
    sleeps: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    error, standing, is_quarantined = REJECTING[case]
    monkeypatch.setattr(time, "time", lambda: 1234.5)
    view = failing(job, error, times=2 if case == "corrupt" else 1)
    found, value = restore(view, job.candidates, read_again=torn)
    assert (found.step, value) == (2, 2.0)
    (rejected,) = found.rejected
    key = job.candidates[0]
    reason = rejected.reason
    assert (rejected.key, rejected.step) == (key, 3)
    if case == "refused":
        assert reason == "not signed"
    elif case == "missing":
        assert reason == f"{key}: there is no such commit; a second reader (a new process) agrees"
    else:
        assert reason == f"{error}; a second reader (a new process) agrees"
    where = quarantine_key(job.refs[0].sha256)
    assert job.quarantined() == ([where] if is_quarantined else [])
    if is_quarantined:
        record = unseal(job.store.get(where), where)
        assert record == {"version": 1, "key": key, "reason": reason, "t_wall": 1234.5}
    if is_quarantined:
        note = f"to be quarantined in {where}; "
    else:
        note = ""
    assert capsys.readouterr().err.splitlines() == [
        f"checkpoint: ERROR: {job.store.uri}/{key} is {standing} and will not be used: {reason}",
        f"checkpoint: {note}going back to the commit before it",
        "checkpoint: 1 committed steps are lost: from 3 back to 2",
    ]
    assert sleeps == []


@pytest.mark.parametrize("in_the_way", ["damage", "error", "no extra", ""])
def test_a_rejected_commit_has_its_extra_data_if_they_are_readable(
    job: Job, in_the_way: str
) -> None:
    view = View(job.store, flips="/000000000003/")
    first = job.candidates[0]
    if in_the_way == "no extra":
        ref = put_state(job.store, job.generation, 4)
        manifest = json.loads(job.store.get(ref.key))
        del manifest["common"]["extra"]
        raw = json.dumps(manifest).encode()
        first = commit_key(4, 1, sha256_text(raw))
        job.store.put(first, raw)
        view = View(job.store, flips="/000000000004/")

    def damage_too(*_: Any) -> str:
        if in_the_way == "damage":
            job.store.put(first, b"{}")
        elif in_the_way == "error":
            view.errors[first] = [StoreUnavailable("503")]
        return "it is torn"

    found, _ = restore(view, [first, *job.candidates[1:]], read_again=damage_too)
    (rejected,) = found.rejected
    assert rejected.extra == (None if in_the_way else {"cursor": 3})


def test_a_quarantine_that_cannot_be_written_does_not_stop_the_restore(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(key: str) -> None:
        raise StoreForbidden(f"put {key}: 403")

    job.store.before_put = refuse
    view = View(job.store, flips="/000000000003/")
    view.put = job.store.put
    found, _ = restore(view, job.candidates, read_again=torn)
    where = quarantine_key(job.refs[0].sha256)
    assert found.step == 2
    assert (
        f"checkpoint: WARNING: {where} could not be written: put {where}: 403\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("problem", ["it is torn", ""])
def test_by_default_a_new_process_on_node_0_reads_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command[4:])
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"problem": problem}))

    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", answer)
    view = View(job.store, flips="/000000000003/")
    if problem:
        assert restore(view, job.candidates)[1] == 2.0
    else:
        with pytest.raises(
            UnreliableReader,
            match=r"node 0 reads wrongly .*a second reader \(a new process\) finds",
        ):
            restore(view, job.candidates)
    assert commands == [
        [job.store.uri, job.candidates[0], data_key(job.generation.name, 3, 0), "0"]
    ]


def test_all_lost_steps_are_counted_from_the_newest_commit(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.store.put(job.candidates[0], b"{}")
    job.store.put(job.candidates[1], b"{}")
    found, value = restore(job.store, job.candidates, read_again=torn)
    assert (value, [rejected.step for rejected in found.rejected]) == (1.0, [3, 2])
    assert capsys.readouterr().err.endswith(
        "checkpoint: 2 committed steps are lost: from 3 back to 1\n"
    )


@pytest.mark.parametrize("error", [CorruptCommit("torn"), MisplacedCommit("of another step")])
def test_a_job_whose_commits_are_all_rejected_has_nothing_to_restore(
    job: Job, error: Exception
) -> None:
    """Misplaced manifests are not quarantined and are still listed."""
    view = View(job.store)
    for key in job.candidates:
        view.errors[key] = [error] * 2
    with pytest.raises(
        NothingToRestore, match=f"none of 3 commits verifies: {job.candidates[0]}: .*; hint: "
    ):
        restore(view, job.candidates, read_again=torn)


def test_a_restore_continues_with_older_commits_next_time(
    job: Job,
) -> None:
    view = View(job.store)
    for key in job.candidates[:2]:
        view.errors[key] = [CorruptCommit("torn")] * 2
    words = (
        f"none of 2 commits verifies; there are older ones: {job.candidates[0]}: "
        f"torn.*{job.candidates[1]}: torn"
    )
    with pytest.raises(CheckpointError, match=words) as error:
        restore(view, job.candidates[:2], read_again=torn)
    assert not isinstance(error.value, NothingToRestore)
    assert reachable_commits(job.store) == job.refs[2:]


# Durations


def test_the_seconds_of_a_restore_are_divided_by_activity(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try takes 2 s of a failed read, 16 s of agreeing and a pause of 0.5 s; the second
    one succeeds.
    """
    clock = [1000.0]

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    view = failing(job, StoreUnavailable("503"))
    get = view.get

    def get_slowly(key: str) -> bytes:
        pass_time(2.0)
        return get(key)

    view.get = get_slowly
    thread_seconds = iter([100.0, 101.0, 103.0, 107.0])  # download 1, verify 2, place 4
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", pass_time)
    monkeypatch.setattr(time, "perf_counter", lambda: next(thread_seconds))
    found, _ = restore(
        view, job.candidates, progress=lambda: pass_time(14.0), meet=lambda stage: pass_time(16.0)
    )
    assert found.seconds == 50.5
    assert found.split == RestoreSeconds(
        list=2 + 16 + 0.5 + 2, download=2.0, verify=4.0, load=8.0, agree=16.0
    )


def test_a_restore_without_measured_reads_counts_its_reading_as_loading(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]

    def pass_time() -> None:
        clock[0] += 3.0

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    found, _ = restore(job.store, job.candidates, progress=pass_time)
    assert found.split == RestoreSeconds(list=0.0, download=0.0, verify=0.0, load=3.0, agree=0.0)


def view_of(job: Job, kind: str) -> View:
    """What a rank sees that comes to the verdict `kind` about the newest commit."""
    if kind in ERRORS:
        return failing(job, ERRORS[kind](), times=9)
    return View(job.store, flips="/000000000003/" if kind == "corrupt" else "")


def never(*_: Any) -> str:
    pytest.fail("a second reader was asked")


@pytest.mark.parametrize(
    ("kinds", "error", "words", "tries"),
    [
        (["sound", "error"], CheckpointError, f"{NOT_THE_COMMIT}: rank 1: truncated", 1),
        (["error", "error"], CheckpointError, f"{NOT_THE_COMMIT}: rank 0: truncated", 1),
        (["away", "error"], CheckpointError, f"{NOT_THE_COMMIT}: rank 1: truncated", 1),
        (["error", "corrupt"], CheckpointError, f"{NOT_THE_COMMIT}: rank 0: truncated", 1),
        (["sound", "away"], CheckpointError, f"{NOT_THE_COMMIT}: rank 1: 503", 5),
        (["away", "refused"], CheckpointError, f"{NOT_THE_COMMIT}: rank 0: 503", 5),
        (["corrupt", "away"], CheckpointError, f"{NOT_THE_COMMIT}: rank 1: 503", 5),
        (
            ["sound", "refused"],
            CheckpointError,
            f"{NOT_THE_COMMIT}: {ONE_REFUSES} fix: give all nodes",
            1,
        ),
        (["mismatch", "refused"], CheckpointError, f"{NOT_THE_COMMIT}: {ONE_REFUSES}", 1),
        (["sound", "mismatch"], CommitMismatch, "rank 1: another model", 1),
        (["corrupt", "mismatch"], CommitMismatch, "rank 1: another model", 1),
        (["misplaced", "mismatch"], CommitMismatch, "rank 1: another model", 1),
    ],
)
def test_the_worst_verdict_of_any_rank_is_that_of_all(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[str],
    error: type[Exception],
    words: str,
    tries: int,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    ranks = Ranks(monkeypatch, len(kinds))
    found = ranks.restore([view_of(job, kind) for kind in kinds], job.candidates, [0, 1], never)
    for result in found:
        assert type(result) is error
        assert words in str(result)
    assert list(ranks.slept.values()) == [[0.5, 1.0, 2.0, 4.0][: tries - 1]] * 2
    assert job.quarantined() == []


@pytest.mark.parametrize(
    "kinds", [["refused", "refused"], ["refused", "corrupt"], ["misplaced", "refused"]]
)
def test_a_commit_that_no_rank_accepts_is_passed_over_as_refused_and_not_as_damaged(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kinds: list[str]
) -> None:
    found = Ranks(monkeypatch, 2).restore(
        [view_of(job, kind) for kind in kinds], job.candidates, [0, 1], never
    )
    assert [(result.step, result.rejected[0].reason) for result in found] == [
        (2, f"rank {kinds.index('refused')}: not signed")
    ] * 2
    assert capfd.readouterr().err.count("is refused and will not be used") == 1, (
        "rank 0 alone reports it"
    )
    assert job.quarantined() == []


@pytest.mark.parametrize(
    ("refusing", "named"),
    [
        (1, "rank 1 on HOST refuses what"),
        (2, "rank 1 on HOST, rank 2 on HOST refuse what"),
        (
            5,
            "rank 1 on HOST, rank 2 on HOST, rank 3 on HOST, rank 4 on HOST, rank 5 on HOST "
            "refuse what",
        ),
        (6, "rank 4 on HOST, rank 5 on HOST and 1 more refuse what"),
    ],
)
def test_five_ranks_that_refuse_a_signature_are_named_with_their_hosts(
    job: Job, monkeypatch: pytest.MonkeyPatch, refusing: int, named: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 70)
    kinds = ["sound", *["refused"] * refusing]
    views = [view_of(job, kind) for kind in kinds]
    found = Ranks(monkeypatch, len(kinds)).restore(views, job.candidates, [0] * len(kinds), never)
    assert f"{named.replace('HOST', 'h' * 64)} the others accept" in str(found[0])
    assert str(found[0]).endswith("fix: give all nodes the same key; not signed")


def test_damage_that_a_second_node_confirms_is_quarantined(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    readers = SecondReaders(rank_1="it is torn")
    views = [view_of(job, "corrupt"), view_of(job, "sound")]
    found = Ranks(monkeypatch, 2).restore(views, job.candidates, [0, 1], readers)
    data = data_key(job.generation.name, 3, 0)
    assert readers.calls == [(1, job.candidates[0], data, 0)]
    for result in found:
        assert (result.step, len(result.rejected)) == (2, 1)
        reason = result.rejected[0].reason
        assert reason.startswith(f"rank 0: {data}: chunk 0 has CRC64NVME")
        assert reason.endswith("; a second reader (rank 1 on node 1) agrees")
    assert job.quarantined() == [quarantine_key(job.refs[0].sha256)]
    assert capfd.readouterr().err.count("1 committed steps are lost") == 1, (
        "rank 0 alone reports it"
    )


def test_damage_that_a_second_node_does_not_find_is_the_first_readers(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that reads wrongly fails 20 s before the others, so that it is blamed."""
    readers = SecondReaders(rank_0="")
    ranks = Ranks(monkeypatch, 3)
    views = [view_of(job, "sound"), view_of(job, "corrupt"), view_of(job, "sound")]
    found = ranks.restore(views, job.candidates, [7, 8, 7], readers)
    data = data_key(job.generation.name, 3, 0)
    for result in found:
        assert type(result) is UnreliableReader
        assert str(result).startswith(
            f"node 8 reads wrongly (rank 1): {data}: chunk 0 has CRC64NVME"
        )
        assert (
            f"; a second reader (rank 0 on node 7) finds {data} as saved, so the commit is "
            "sound; fix: " in str(result)
        )
    assert ranks.slept == {0: [20.0], 1: [], 2: [20.0]}
    assert job.quarantined() == []


def test_all_ranks_that_read_wrongly_are_suspects(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = SecondReaders(rank_0="", rank_2="")
    ranks = Ranks(monkeypatch, 4)
    kinds = ["sound", "misplaced", "sound", "corrupt"]
    found = ranks.restore(
        [view_of(job, kind) for kind in kinds], job.candidates, [2, 1, 2, 8], readers
    )
    assert sorted(readers.calls, key=lambda call: call[0]) == [
        (0, job.candidates[0], "", None),
        (2, job.candidates[0], data_key(job.generation.name, 3, 0), 0),
    ]
    assert str(found[0]).startswith(
        "node 1, 8 reads wrongly (rank 1): of another step; a second reader (rank 0 on node 2)"
    )
    assert f"finds {job.candidates[0]} as saved" in str(found[0])
    assert ranks.slept == {0: [20.0], 1: [], 2: [20.0], 3: []}


def test_on_one_node_a_new_process_reads_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    readers = SecondReaders(rank_1="")
    views = [view_of(job, "sound"), view_of(job, "misplaced")]
    found = Ranks(monkeypatch, 2).restore(views, job.candidates, [0, 0], readers)
    assert readers.calls == [(1, job.candidates[0], "", None)]
    assert "a second reader (a new process) finds" in str(found[0])


@pytest.mark.parametrize(
    ("first", "second", "outcome"),
    [
        ("", "it is torn", "rejected"),
        ("it is torn", "", "rejected"),
        (StoreUnavailable("503"), "it is torn", "rejected"),
        (StoreUnavailable("503"), "", "away"),
        ("", StoreError("truncated"), "away"),
        ("", CheckpointError("version 2"), "away"),
        ("", "", "unreliable"),
    ],
)
def test_one_second_reader_that_finds_damage_suffices_and_all_must_find_none(
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
    first: str | Exception,
    second: str | Exception,
    outcome: str,
) -> None:
    """Ranks 0 and 1 doubt the commit; rank 2 reads again for rank 0, and rank 3 for rank 1."""
    readers = SecondReaders(rank_2=first, rank_3=second)
    ranks = Ranks(monkeypatch, 4)
    kinds = ["misplaced", "corrupt", "sound", "sound"]
    found = ranks.restore(
        [view_of(job, kind) for kind in kinds], job.candidates, [0, 1, 2, 2], readers
    )
    if outcome == "rejected":
        (rejected,) = found[0].rejected
        if first == "it is torn":
            confirmed = 0
        else:
            confirmed = 1
        assert rejected.reason.startswith(f"rank {confirmed}: ")
        assert rejected.reason.endswith(
            f"; a second reader (rank {confirmed + 2} on node 2) agrees"
        )
        assert len(job.quarantined()) == confirmed, "a misplaced manifest is not quarantined"
    elif outcome == "away":
        if isinstance(first, Exception):
            reader = 2
        else:
            reader = 3
        if isinstance(first, Exception):
            reason = first
        else:
            reason = second
        assert f"{NOT_THE_COMMIT}: rank {reader}: {reason}" in str(found[0])
        assert ranks.slept[0] == [0.5, 1.0, 2.0, 4.0]
    else:
        assert type(found[0]) is UnreliableReader
    assert {type(result) for result in found} == {type(found[0])}


@pytest.mark.parametrize(
    ("nodes", "doubting", "expected"),
    [
        ([0], [0], [(0, 0)]),
        ([0, 0], [1], [(1, 1)]),
        ([0, 0, 1, 1], [], []),
        ([0, 0, 1, 1], [2], [(2, 0)]),
        ([0, 0, 1, 1], [2, 3], [(2, 0)]),  # one for each node
        ([0, 0, 1, 1], [0, 2, 3], [(0, 2), (2, 1)]),  # no rank of node 1 is without doubts
        ([0, 1, 2, 3], [0, 1], [(0, 2), (1, 3)]),  # the work is spread
        ([0, 1, 2], [1, 2], [(1, 0), (2, 0)]),
        ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [(1, 0), (2, 0), (3, 0), (4, 0)]),  # four at most
        ([0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_second_readers_are_ranks_of_other_nodes_without_doubts_if_there_are_any(
    nodes: list[int], doubting: list[int], expected: list[tuple[int, int]]
) -> None:
    assert (
        assign_second_readers(nodes, [rank in doubting for rank in range(len(nodes))]) == expected
    )


def test_rows_are_exchanged_on_the_device_of_the_backend(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory stands for the GPU, whose rows cannot be read back here."""
    device = torch.device
    devices: list[str] = []

    def refuse(gathered: list[Tensor], mine: Tensor) -> None:
        devices.extend([mine.device.type, *(row.device.type for row in gathered)])
        raise RuntimeError("no answer")

    monkeypatch.setattr(torch, "device", lambda name: device("meta" if name == "cuda" else name))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "all_gather", refuse)
    with pytest.raises(RuntimeError, match="no answer"):
        restore(job.store, job.candidates, world_size=2)
    assert devices == ["meta"] * 3


@pytest.mark.parametrize(
    "missing", ["torch was built without it", "it is not initialised", "there is one rank"]
)
def test_a_rank_without_a_process_group_decides_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: missing != "torch was built without it")
    monkeypatch.setattr(dist, "is_initialized", lambda: missing != "it is not initialised")
    monkeypatch.setattr(dist, "all_gather", lambda *_: pytest.fail("a collective was called"))
    found, _ = restore(
        job.store, job.candidates, world_size=1 if missing == "there is one rank" else 2
    )
    assert found.step == 3


@pytest.mark.parametrize(
    ("saved", "resumed", "refused"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "betas"),
        (torch.optim.SGD, torch.optim.AdamW, "nesterov"),
        (torch.optim.Adam, torch.optim.RMSprop, "betas"),
        (torch.optim.Adam, torch.optim.Adam, None),
        (torch.optim.SGD, torch.optim.SGD, None),
    ],
)
def test_settings_of_another_class_of_optimizer_are_refused(
    saved: type[Any], resumed: type[Any], refused: str | None
) -> None:
    """A job that resumed AdamW's commit with SGD carried the moments along and said nothing."""
    model = torch.nn.Linear(2, 2)
    before = saved(model.parameters(), lr=0.5)
    torch.optim.lr_scheduler.OneCycleLR(before, 1.0, total_steps=9)  # adds settings of its own
    settings = optimizer_settings(model, before)
    del settings["class"]  # as of an older Ebbflow
    del settings["param_groups"][0]["maximize"]  # as of an older torch
    after = resumed(model.parameters(), lr=0.1)
    if refused is None:
        apply_settings(settings, model, after)
        assert after.param_groups[0]["lr"] == before.param_groups[0]["lr"]
        return
    with pytest.raises(
        CommitMismatch, match=rf"another optimizer, with .*{refused}.*; {resumed.__name__} has"
    ):
        apply_settings(settings, model, after)
    assert after.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.AdamW, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.RAdam),
        (torch.optim.Adam, torch.optim.NAdam),
        (torch.optim.Adam, torch.optim.Adamax),
        (torch.optim.Adam, torch.optim.Adadelta),
        (torch.optim.AdamW, Lion),
        (Lion, torch.optim.Adafactor),
    ],
)
def test_a_commit_of_another_class_of_optimizer_is_refused(
    saved: type[Any], resumed: type[Any]
) -> None:
    """AdamW on a commit of Adam trained as Adam, since this is one of its settings."""
    model = torch.nn.Linear(2, 2)
    settings = optimizer_settings(model, saved(model.parameters(), lr=0.5))
    after = resumed(model.parameters(), lr=0.1)
    names = f"state of {saved.__name__}, and the optimizer is {resumed.__name__}; fix: {saved.__name__},"
    with pytest.raises(CommitMismatch, match=names):
        apply_settings(json.loads(json.dumps(settings)), model, after)
    assert after.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (torch.optim.AdamW, partial(torch.optim.AdamW, foreach=True, weight_decay=0.3)),
        (torch.optim.AdamW, partial(torch.optim.AdamW, fused=True)),
        (torch.optim.AdamW, OwnAdamW),
        (OwnAdamW, torch.optim.AdamW),
        (Muon, Muon),
        (Lion, PagedLion8bit),
    ],
)
def test_a_commit_of_the_same_class_of_optimizer_is_restored(
    saved: Callable[..., Any], resumed: Callable[..., Any]
) -> None:
    model = torch.nn.Linear(2, 2)
    settings = optimizer_settings(model, saved(model.parameters(), lr=0.5))
    after = resumed(model.parameters(), lr=0.1)
    apply_settings(json.loads(json.dumps(settings)), model, after)
    assert after.param_groups[0]["lr"] == 0.5


def test_a_commit_names_the_class_of_a_wrapped_optimizer() -> None:
    model = torch.nn.Linear(2, 2)
    assert optimizer_settings(model, Wrapper(model.parameters(), 0.1))["class"] == "AdamW"
