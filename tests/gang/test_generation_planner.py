"""What node 0 decides between two generations: what the next one may still spend, and whether there
is a next one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import StoreUnavailable
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import GENERATION_ENDED, NODE_ENDED, NODE_STARTED, Origin
from ebbflow.core.layout import commit_key, job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.training.checkpoint import reachable_commits, read_generation
from ebbflow.training.checkpoint.lineage import amend_parent
from ebbflow.training.launch.coordinator import FailedGeneration, GenerationPlanner, find_crash_loop
from ebbflow.training.launch.messages import GangSpec, GenerationEnd

A = "ValueError at model.py:12 in loss"
B = "killed by SIGSEGV"


@pytest.mark.parametrize(
    ("failed", "commit_of", "loop"),
    [
        ([(1, A), (2, A)], 0, []),
        ([(1, A), (2, A), (3, A)], 0, [1, 2, 3]),
        ([(1, A), (2, B), (3, A), (4, B), (5, A)], 0, [1, 3, 5]),
        ([(1, A), (2, A), (3, A)], 1, [1, 2, 3]),  # the commit came before the first of them
        ([(1, A), (2, A), (3, A)], 2, []),
        ([(1, A), (2, A), (3, A), (4, A)], 2, [2, 3, 4]),
        ([(number, f"ValueError at {number}") for number in range(1, 10)], 0, []),
        ([(number, f"ValueError at {number}") for number in range(1, 11)], 0, list(range(1, 11))),
    ],
)
def test_a_loop_is_the_same_failure_three_times_without_a_commit_or_any_ten(
    failed: list[tuple[int, str]], commit_of: int, loop: list[int]
) -> None:
    failures = [
        FailedGeneration(generation=number, fingerprint=mark, rank_seconds=1.0)
        for number, mark in failed
    ]
    assert [failure.generation for failure in find_crash_loop(failures, commit_of)] == loop


@pytest.fixture
def spec(tmp_path: Path) -> GangSpec:
    return GangSpec(
        job="job",
        run="run",
        attempt=1,
        node=0,
        nodes=3,
        processes_per_node=2,
        main_address="127.0.0.1",
        config=RunConfig(store=str(tmp_path)),
        store_uri=str(tmp_path),
        prepared={},
        log_folder=str(tmp_path / "logs"),
    )


def job_store(spec: GangSpec) -> Store:
    return Store.open(spec.store_uri).sub(job_prefix(spec.job))


def test_each_generation_has_less_to_spend_and_fewer_nodes_cost_less(spec: GangSpec) -> None:
    """100 s to find each other and 100 s of training with 6 ranks, then 50 s with 4, at a cent per
    rank-second, on top of the $5 of earlier attempts."""
    terms = Terms(usd_per_rank_second=0.01, spent_usd=5.0, budget_usd=20.0, reserve_usd=1.0)
    now = iter((100.0, 200.0, 250.0))
    planner = GenerationPlanner(
        replace(spec, terms=terms), job_store(spec), born=0.0, now=lambda: next(now)
    )
    first = planner.plan(planner.open(), [0, 1, 2], ["a", "a", "b"])
    assert first.terms == replace(terms, spent_usd=11.0)
    second = planner.plan(planner.open(), [0, 2], ["a", "b"])
    # Its ranks have reported 80 %
    assert second.terms == replace(terms, spent_usd=17.0, last_notified_threshold=0.8)
    third = planner.plan(planner.open(), [0, 2], ["a", "b"])
    assert third.terms is not None and third.terms.spent_usd == 19.0
    assert (first.generation, second.generation, third.generation) == (1, 2, 3)
    assert (first.colocated_nodes(0), second.colocated_nodes(1)) == (2, 1)


def open_in_vain(
    planner: GenerationPlanner, store: Store, monkeypatch: pytest.MonkeyPatch, *, arrives: bool
) -> list[tuple[str, bytes]]:
    """(key, data) of the records whose put was given up. arrives: they are in the store all the
    same.
    """
    late = []
    put = store.put

    def give_up(key: str, data: bytes) -> None:
        late.append((key, data))
        if arrives:
            put(key, data)
        raise StoreUnavailable(f"put {key}: no answer in time")

    with monkeypatch.context() as patch:
        patch.setattr(store, "put", give_up)
        with pytest.raises(StoreUnavailable):
            planner.open()
    return late


@pytest.mark.parametrize("arrives", ["before the next try", "after it"])
def test_a_record_whose_put_was_given_up_is_nobodys_rival(
    arrives: str, spec: GangSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = job_store(spec)
    planner = GenerationPlanner(spec, store, born=0.0)
    late = open_in_vain(planner, store, monkeypatch, arrives=arrives == "before the next try")
    opened = planner.open()
    store.put(*late[0])
    following = planner.open()
    assert following.number == opened.number + 1 and following.id != opened.id
    assert reachable_commits(store) == [], "the chain can be read"


def test_a_record_that_arrives_late_undoes_nothing_that_was_recorded_since(
    spec: GangSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start has gone back to an older parent meanwhile: what it left behind must not count
    again.
    """
    store = job_store(spec)
    planner = GenerationPlanner(spec, store, born=0.0)
    late = open_in_vain(planner, store, monkeypatch, arrives=False)
    opened = planner.open()
    older = replace(opened, parent=commit_key(4, 0, "0" * 64), parent_step=4)
    amend_parent(store, opened, older)
    store.put(*late[0])
    assert read_generation(store, opened.number, opened.id) == older


def test_failures_of_earlier_attempts_count(spec: GangSpec) -> None:
    store = job_store(spec)
    planner = GenerationPlanner(spec, store, born=time.monotonic())
    for number in (1, 2):
        generation = planner.open()
        with EventLog(
            store, Origin(job="job", run="run", attempt=0, generation=number, process="agent")
        ) as log:
            log.emit(NODE_STARTED, ranks=[0, 1])
            log.emit(GENERATION_ENDED, reason="rank_failed", fingerprint=A)
            log.emit(NODE_ENDED, seconds=7.0)
    terms = Terms(usd_per_rank_second=0.5)
    later = GenerationPlanner(replace(spec, attempt=2, terms=terms), store, born=time.monotonic())
    generation = later.open()
    assert (
        later.check_crash_loop(
            GenerationEnd(culprit="rank 3: other", fingerprint=B), generation.number, 10.0
        )
        is None
    )
    last = later.check_crash_loop(
        GenerationEnd(culprit="rank 1: ValueError: x", fingerprint=A), generation.number, 10.0
    )
    assert (
        last is not None and last.failed_as == "crash_loop" and not last.curable and not last.again
    )
    assert (
        "38 rank-seconds, $19.0000 at the planned price; the last one: rank 1: ValueError: x"
        in last.culprit
    )
