"""Lineage, not step, decides: a zombie's late commit and the steps of a rewind are never restored."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    Checkpointer,
    Generation,
    open_generation,
    reachable_commits,
    read_generation,
    trace_lineage,
)
from ebbflow.training.checkpoint.manifest import CheckpointId, Manifest
from ebbflow.training.checkpoint.verified_io import sha256_text
from ebbflow.training.errors import (
    CheckpointError,
    DamagedLineage,
    GenerationSuperseded,
    TwoLaunchers,
    UnreliableReader,
)
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.session import open_saver


@pytest.fixture
def job(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "jobs" / "test"))


def model_of(value: float) -> nn.Module:
    model = nn.Linear(3, 3)
    torch.nn.init.constant_(model.weight, value)
    return model


def steps(job: Store) -> list[tuple[int, int]]:
    return [(ref.generation, ref.step) for ref in reachable_commits(job)]


def test_a_zombies_late_commit_is_never_restored(job: Store, capfd: pytest.CaptureFixture) -> None:
    """Rank 1 of the first gang freezes before its save of step 30 and thaws when the second gang is
    at step 20.
    """
    gang = {"generation": open_generation(job, run="r", attempt=0), "world_size": 2}
    with (
        Checkpointer(job.uri, rank=0, **gang) as zombie,
        Checkpointer(job.uri, rank=1, **gang) as frozen,
    ):
        for rank in (zombie, frozen):
            rank.save(10, model_of(10), None, {})
        zombie.wait()
        zombie.save(30, model_of(30), None, {})
        with Checkpointer(
            job.uri, generation=open_generation(job, run="r", attempt=1)
        ) as checkpointer:
            checkpointer.save(20, model_of(20), None, {})
            checkpointer.wait()
            frozen.save(30, model_of(30), None, {})
            assert frozen.wait().step == 30, "the zombie does commit"
            assert steps(job) == [(2, 20), (1, 10)], "but it does not count"
            assert trace_lineage(job)[-1].unreachable_because == "generation 1 was left at step 10"
            model = model_of(0)
            checkpointer.restore([ref.key for ref in reachable_commits(job)], model, None)
            assert model.weight[0, 0].item() == 20
        deadline = time.monotonic() + 10
        with pytest.raises(
            GenerationSuperseded, match="generation 2 was opened while generation 1 was running"
        ):
            while time.monotonic() < deadline:
                zombie.wait()
    assert "would never be restored" in capfd.readouterr().err


def test_steps_abandoned_by_a_rewind_do_not_count_though_they_are_higher(job: Store) -> None:
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as checkpointer:
        commits = {}
        for step in (10, 20, 30):
            checkpointer.save(step, model_of(step), None, {})
            commits[step] = checkpointer.wait().key
    middle = open_generation(job, run="r", attempt=1)
    assert middle.parent == commits[30]
    rewound = open_generation(job, run="r", attempt=2, parent=commits[10])
    assert steps(job) == [(1, 10)]
    with Checkpointer(job.uri, generation=rewound) as checkpointer:
        with pytest.raises(
            CheckpointError, match="to rewind, open the generation with that commit as its parent"
        ):
            checkpointer.restore([commits[20]], model_of(0), None)
        assert checkpointer.restore([commits[10]], model_of(0), None).step == 10
        checkpointer.save(15, model_of(15), None, {})
        checkpointer.wait()
    assert steps(job) == [(3, 15), (1, 10)]


def test_a_generation_that_started_afresh_inherits_nothing(job: Store) -> None:
    first, second = (open_generation(job, run="r", attempt=attempt) for attempt in (0, 1))
    assert (first.number, second.number, second.parent) == (1, 2, None)
    put_commit(job, first, 40)
    assert steps(job) == []


def test_a_parent_is_a_commit_that_reads_well(job: Store, capfd: pytest.CaptureFixture) -> None:
    generation = open_generation(job, run="r", attempt=0)
    older = put_commit(job, generation, 10)
    newer = put_commit(job, generation, 20)
    job.put(newer, job.get(newer)[:-1])
    assert open_generation(job, run="r", attempt=1).parent == older
    assert f"passed over as a parent: {newer}" in capfd.readouterr().err


@pytest.mark.parametrize(("hurt", "found", "readings"), [(3, True, 4), (99, False, 6)])
def test_a_parent_that_is_hurt_on_the_way_is_read_again(
    job: Store, monkeypatch: pytest.MonkeyPatch, hurt: int, found: bool, readings: int
) -> None:
    """Each reading of a commit's manifest is hurt elsewhere; alike twice, it would lie there like
    that.
    """
    key = put_commit(job, open_generation(job, run="r", attempt=0), 10)
    read: list[int] = []
    get = Store.get

    def unlucky(store: Store, name: str) -> bytes:
        data = get(store, name)
        if name != key:
            return data
        read.append(len(read))
        if len(read) > hurt:
            return data
        return data[: read[-1]] + b"?" + data[read[-1] + 1 :]

    monkeypatch.setattr(Store, "get", unlucky)
    if found:
        assert open_generation(job, run="r", attempt=1).parent == key
    else:  # a new process reads it as it was put: not the commit is bad, but this reader
        with pytest.raises(UnreliableReader, match="a new process finds it as it was saved"):
            open_generation(job, run="r", attempt=1)
    assert job.list("quarantine") == []
    assert len(read) == readings


def test_a_gang_commits_with_the_parent_on_record_and_not_with_the_first_candidate(
    tmp_path: Path,
) -> None:
    job = Store.open(str(tmp_path)).sub(job_prefix("test"))
    first = open_generation(job, run="r", attempt=0)
    older = put_commit(job, first, 10)
    newer = put_commit(job, first, 20)
    job.put(newer, job.get(newer)[:-1])
    second = open_generation(job, run="r", attempt=1)
    assert second.parent == older
    spec = WorkerSpec(
        job="test",
        run="r",
        attempt=1,
        node=0,
        generation=second.number,
        generation_id=second.id,
        candidates=[newer, older],  # as listed before the manifests were looked at
        config=RunConfig(),
        store_uri=str(tmp_path),
        prepared={},
    )
    with open_saver(
        spec, Gang(), Reporter(Clock(ignore := lambda *_, **__: None), ignore)
    ) as saver:
        saver.save(15, model_of(1), None, {})
        commit = saver.wait()
    assert Manifest.from_bytes(job.get(commit.key), commit.key).common["parent"] == older


def test_a_gang_that_fell_back_leaves_the_steps_of_its_parent_behind(job: Store) -> None:
    """Step 20 is rotten, and step 15 shows up when the gang has gone on from step 10: late, as from
    a zombie.
    """
    with Checkpointer(job.uri, generation=open_generation(job, run="r", attempt=0)) as first:
        commits = {}
        for step in (10, 15, 20):
            first.save(step, model_of(step), None, {})
            commits[step] = first.wait().key
    late = job.get(commits[15])
    job.delete(commits[15])
    rotten = Manifest.from_bytes(job.get(commits[20]), commits[20]).data[0].key
    job.put(rotten, bytes(len(job.get(rotten))))
    opened = open_generation(job, run="r", attempt=1)
    assert opened.parent == commits[20], "its manifest reads well"
    with Checkpointer(job.uri, generation=opened) as second:
        assert second.restore([commits[20], commits[10]], model_of(0), None).step == 10
        second.save(12, model_of(12), None, {})
        last = second.wait().key
    assert Manifest.from_bytes(job.get(last), last).common["parent"] == commits[10]
    job.put(commits[15], late)
    assert steps(job) == [(2, 12), (1, 10)]
    reasons = {traced.ref.step: traced.unreachable_because for traced in trace_lineage(job)}
    assert reasons[15] == "generation 1 was left at step 10"
    record = read_generation(job, 2, opened.id)
    assert (record.parent, record.parent_step) == (commits[10], 10)
    assert open_generation(job, run="r", attempt=2).parent == last


def test_a_generation_is_read_as_it_was_opened(job: Store) -> None:
    opened = open_generation(job, run="r", attempt=0)
    put_commit(job, opened, 10)
    child = open_generation(job, run="r", attempt=1)
    assert [read_generation(job, g.number, g.id) for g in (opened, child)] == [opened, child]
    with pytest.raises(ObjectNotFound, match="000002-0000"):
        read_generation(job, 2, "0000")
    job.put(f"generations/000002-{opened.id}.json", job.get(f"generations/{opened.name}.json"))
    with pytest.raises(DamagedLineage, match=f"is the record of 1-{opened.id}"):
        read_generation(job, 2, opened.id)


def test_two_launchers_are_noticed_and_both_records_named(job: Store) -> None:
    generation = open_generation(job, run="r", attempt=0)
    put_commit(job, generation, 10)
    record = job.get(f"generations/{generation.name}.json")
    job.put("generations/000001-deadbeef.json", record)
    with pytest.raises(
        TwoLaunchers,
        match=rf"000001-deadbeef.*{generation.name}|{generation.name}.*000001-deadbeef",
    ):
        reachable_commits(job)
    job.delete("generations/000001-deadbeef.json")
    job.put(f"generations/{generation.name}.json", record.replace(b'"attempt":0', b'"attempt":1'))
    with pytest.raises(DamagedLineage, match="its seal says"):
        reachable_commits(job)


def test_at_most_one_of_racing_launchers_continues(tmp_path: Path) -> None:
    for round_number in range(10):
        uri = str(tmp_path / str(round_number))

        def launch(_: int, uri: str = uri) -> Generation | None:
            try:
                return open_generation(Store.open(uri), run="r", attempt=0)
            except TwoLaunchers:
                return None

        with ThreadPoolExecutor(4) as pool:
            opened = [
                generation for generation in pool.map(launch, range(4)) if generation is not None
            ]
        numbers = [generation.number for generation in opened]
        assert len(numbers) == len(set(numbers)), "one number was given out twice"
        assert sorted(meta.key for meta in Store.open(uri).list("generations")) == sorted(
            f"generations/{generation.name}.json" for generation in opened
        )


def put_commit(job: Store, generation: Generation, step: int) -> str:
    """A commit without data: lineage looks at manifests only."""
    save = CheckpointId(job="test", generation=generation.name, step=step, world_size=0)
    raw = Manifest(save=save, data=(), indexes=(), tensors={}).to_bytes()
    key = f"commits/{10**12 - 1 - step:012d}/{10**6 - 1 - generation.number:06d}/{sha256_text(raw)}.json"
    job.put(key, raw)
    return key


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=6)
)
def test_commits_that_count_are_the_history_of_the_newest_generation(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, int, bool]]
) -> None:
    """Against a model: each start inherits its parent's history up to the parent; zombies add
    nothing to it.
    """
    job = Store.open(str(tmp_path_factory.mktemp("lineage")))
    past: list[
        tuple[int, int, str]
    ] = []  # (generation, step, key) of the living lineage, oldest first
    previous: Generation | None = None
    for rewind, commits, zombie in history:
        if past:
            past = past[: max(1, len(past) - rewind)]
        else:
            past = []
        if past and rewind:
            parent = past[-1][2]
        else:
            parent = None
        generation = open_generation(job, run="r", attempt=0, parent=parent)
        if past:
            start = past[-1][1]
        else:
            start = 0
        assert (generation.parent, generation.parent_step) == (
            (past[-1][2], start) if past else (None, 0)
        )
        if zombie and previous is not None:
            put_commit(job, previous, 1000)
        for number in range(commits):
            step = start + number + 1
            past.append((generation.number, step, put_commit(job, generation, step)))
        previous = generation
        assert [ref.key for ref in reachable_commits(job)] == [key for _, _, key in reversed(past)]
