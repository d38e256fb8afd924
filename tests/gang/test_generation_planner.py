"""What node 0 decides between two generations: what the next one may still spend, and whether there
is a next one.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import StoreUnavailable
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import (
    BATCH_ATTEMPT,
    COMMIT,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_STARTED,
    NOTICE,
    OUTCOME,
    Origin,
    read_events,
)
from ebbflow.core.layout import commit_key, job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import RankPrice, Terms
from ebbflow.training.checkpoint import reachable_commits, read_generation
from ebbflow.training.checkpoint.lineage import amend_parent
from ebbflow.training.errors import CrashLoop
from ebbflow.training.launch.coordinator import GenerationPlanner
from ebbflow.training.launch.crash_loop import (
    FailedGeneration,
    find_crash_loop,
    read_failed_generations,
)
from ebbflow.training.launch.messages import GangSpec, GenerationEnd

A = "ValueError at model.py:12 in loss"
B = "killed by SIGSEGV"
OUT_OF_MEMORY = "OutOfMemoryError: Container killed due to memory usage"


@pytest.mark.parametrize(
    ("failed", "commit_of", "loop"),
    [
        ([(1, A), (2, A)], 0, []),
        ([(1, A), (2, A), (3, A)], 0, [1, 2, 3]),
        ([(1, A), (2, B), (3, A), (4, B), (5, A)], 0, [1, 3, 5]),
        ([(1, A), (2, A), (3, A)], 1, [1, 2, 3]),  # the commit came before the first of them
        ([(1, A), (2, A), (3, A)], 2, []),
        ([(1, A), (2, A), (3, A), (4, A)], 2, [2, 3, 4]),
        # An end without a known reason may be any failure
        ([(1, ""), (2, "")], 0, []),
        ([(1, ""), (2, ""), (3, "")], 0, [1, 2, 3]),
        ([(1, A), (2, ""), (3, "")], 0, [1, 2, 3]),
        ([(1, A), (2, B), (3, "")], 0, []),
        ([(1, A), (2, ""), (3, B)], 0, []),
        ([(1, A), (2, ""), (3, B), (4, B)], 0, [2, 3, 4]),
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


def test_an_unexplained_end_takes_no_mark_of_an_earlier_run() -> None:
    """Whoever started the job again may have mended what failed before."""
    earlier = [
        FailedGeneration(generation=number, fingerprint=A, rank_seconds=1.0, run="1")
        for number in (1, 2, 3)
    ]
    lost = FailedGeneration(generation=4, fingerprint="", rank_seconds=1.0, run="2")

    assert find_crash_loop([*earlier, lost], 0) == []


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


def test_a_node_is_paid_for_from_its_join_on(spec: GangSpec) -> None:
    """Node 0 alone for 100 s, two nodes for 800 s, three for 100 s, of two ranks each."""
    terms = Terms(usd_per_rank_second=0.01, budget_usd=90.0)
    planner = GenerationPlanner(
        replace(spec, terms=terms), job_store(spec), born=0.0, now=lambda: 1000.0
    )
    joined = {2: 100.0, 1: 900.0}
    start = planner.plan(planner.open(), [0, 1, 2], ["a", "b", "c"], joined)
    assert start.terms is not None
    assert start.terms.spent_usd == pytest.approx(0.02 * (100 + 2 * 800 + 3 * 100))


def test_a_crash_loop_costs_what_the_joined_nodes_cost(spec: GangSpec) -> None:
    """Three failures of 1,000 s, in which node 0 was alone for the first 100 s, of two ranks each."""
    terms = Terms(usd_per_rank_second=0.01)
    planner = GenerationPlanner(
        replace(spec, terms=terms), job_store(spec), born=0.0, now=lambda: 1000.0
    )
    planner.plan(planner.open(), [0, 1, 2], ["a", "b", "c"], {2: 100.0, 1: 900.0})
    failure = GenerationEnd(culprit="rank 1: ValueError: x", fingerprint=A)
    assert planner.check_crash_loop(failure, 1, 1000.0) is None
    assert planner.check_crash_loop(failure, 2, 1000.0) is None
    last = planner.check_crash_loop(failure, 3, 1000.0)
    assert last is not None
    assert "12000 rank-seconds, $120.0000 at the planned price" in last.culprit


def test_spending_follows_the_price_from_the_time_of_its_change(spec: GangSpec) -> None:
    """100 s with 6 ranks at a cent, then 50 s at 3 cents, of which the launcher told late."""
    terms = Terms(usd_per_rank_second=0.01, budget_usd=20.0, reserve_usd=1.0)
    now = time.monotonic()
    planner = GenerationPlanner(
        replace(spec, terms=terms), job_store(spec), born=now - 150.0, now=lambda: now
    )
    risen = planner.follow_price(RankPrice(0.01, [(time.time() - 50.0, 0.03)]))
    assert risen is not None and risen.spent_usd == pytest.approx(15.0, abs=0.01)
    assert (risen.usd_per_rank_second, risen.reserve_usd) == (0.03, pytest.approx(3.0))


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
    born = time.monotonic() - 100.0
    later = GenerationPlanner(replace(spec, attempt=2, terms=terms), store, born=born)
    seconds = 10.0 / spec.world_size
    generation = later.open()
    assert (
        later.check_crash_loop(
            GenerationEnd(culprit="rank 3: other", fingerprint=B), generation.number, seconds
        )
        is None
    )
    last = later.check_crash_loop(
        GenerationEnd(culprit="rank 1: ValueError: x", fingerprint=A), generation.number, seconds
    )
    assert (
        last is not None and last.failed_as == "crash_loop" and not last.curable and not last.again
    )
    assert (
        "38 rank-seconds, $19.0000 at the planned price; the last one: rank 1: ValueError: x"
        in last.culprit
    )


def vanish(
    planner: GenerationPlanner,
    store: Store,
    *,
    run: str = "run",
    attempt: int = 0,
    cause: str = "",
    reason: str = "",
    notice: str = "",
    ended: dict[str, Any] | None = None,
    seconds: float = 60.0,
) -> None:
    """Open a generation whose node is gone at once, with all that it ran."""
    generation = planner.open()
    began = time.time() - 86400.0
    origin = Origin(
        job="job", run=run, attempt=attempt, generation=generation.number, process="agent"
    )
    with EventLog(store, origin) as log:
        log.emit(GENERATION_STARTED, at=(began, 0.0))
        log.emit(
            NODE_STARTED, ranks=[0, 1], batch_job_id=f"job-{generation.number}", at=(began, 0.0)
        )
        if notice:
            log.emit(NOTICE, action=notice, does="leave", at=(began + seconds, seconds))
        log.emit("node_heartbeat", seconds=seconds, at=(began + seconds, seconds))
        if ended is not None:
            log.emit(GENERATION_ENDED, **ended, at=(began + seconds, seconds))
    if cause:
        launcher = Origin(job="job", run=run, attempt=0, generation=0, process="settle")
        with EventLog(store, launcher) as log:
            log.emit(BATCH_ATTEMPT, job_id=f"job-{generation.number}", cause=cause, reason=reason)


def attempt_of(spec: GangSpec, store: Store, number: int) -> GenerationPlanner:
    return GenerationPlanner(replace(spec, attempt=number), store, born=time.monotonic())


@pytest.mark.parametrize(
    "known",
    [
        {},
        {"cause": "unknown", "reason": OUT_OF_MEMORY},
        {"cause": "user_code", "reason": OUT_OF_MEMORY},
        {"ended": {"reason": "node_lost", "culprit": "node 1 (b) lost"}},
    ],
)
def test_starts_that_take_their_whole_node_with_them_are_a_crash_loop(
    spec: GangSpec, known: dict[str, Any]
) -> None:
    store = job_store(spec)
    for number in range(3):
        vanish(attempt_of(spec, store, number), store, attempt=number, **known)
    with pytest.raises(CrashLoop, match="3 starts, 3 of which ended without a known reason") as end:
        attempt_of(spec, store, 3).open()
    assert end.value.outcome == "crash_loop" and not end.value.curable
    assert known.get("reason", "") in str(end.value), "what the scheduler says"
    assert len(store.list("generations")) == 3, "nothing was opened"


@pytest.mark.parametrize(
    "known",
    [
        {"notice": "terminate"},
        {"cause": "reclaimed", "reason": "Host EC2 (instance i-1) terminated."},
        {"ended": {"reason": "node_lost", "known_cause": True}},
        {"ended": {"reason": "agent_stopped"}},
        {"ended": {"reason": "roll_call", "ranks_started": False}},
    ],
)
def test_ends_whose_cause_is_proven_are_no_crash_loop(
    spec: GangSpec, known: dict[str, Any]
) -> None:
    store = job_store(spec)
    for number in range(5):
        vanish(attempt_of(spec, store, number), store, attempt=number, **known)
    assert attempt_of(spec, store, 5).open().number == 6


def test_a_new_commit_or_a_new_run_begins_the_count_of_lost_nodes_anew(spec: GangSpec) -> None:
    store = job_store(spec)
    for number in range(3):
        vanish(attempt_of(spec, store, number), store, attempt=number)
    again = replace(spec, run="run-2")
    for number in range(3):
        vanish(attempt_of(again, store, number), store, run="run-2", attempt=number)
    with pytest.raises(CrashLoop):
        attempt_of(again, store, 3).open()
    origin = Origin(job="job", run="run-2", attempt=3, generation=0, process="train")
    with EventLog(store, origin) as log:
        log.emit(OUTCOME, outcome="crash_loop", message="crash loop: …")
    assert attempt_of(again, store, 4).open().number == 7


def test_reclamations_are_bounded_by_hours_and_dollars_alone(spec: GangSpec) -> None:
    store = job_store(spec)
    survival = spec.config.survival.model_copy(
        update={"no_progress_hours": 5.0, "no_progress_usd": 90.0}
    )
    bounded = replace(spec, config=spec.config.model_copy(update={"survival": survival}))
    for number in range(4):
        planner = attempt_of(bounded, store, number)
        vanish(planner, store, attempt=number, notice="terminate", seconds=4000.0)
    terms = Terms(usd_per_rank_second=90.0 / (4 * 4000 * 2) - 1e-6)
    assert attempt_of(replace(bounded, terms=terms), store, 4).open().number == 5
    dearer = replace(bounded, terms=Terms(usd_per_rank_second=0.01))
    with pytest.raises(CrashLoop, match=r"\$320.00, more than survival.no_progress_usd \(90\)"):
        attempt_of(dearer, store, 5).open()
    vanish(attempt_of(bounded, store, 5), store, attempt=5, notice="stop", seconds=4000.0)
    with pytest.raises(CrashLoop, match=r"5.6 h, more than survival.no_progress_hours \(5\)"):
        attempt_of(bounded, store, 6).open()


def test_only_the_time_since_the_newest_commit_counts_towards_the_bound(spec: GangSpec) -> None:
    store = job_store(spec)
    generation = attempt_of(spec, store, 0).open()
    origin = Origin(job="job", run="run", attempt=0, generation=generation.number, process="agent")
    now = time.time()
    with EventLog(store, origin) as log:
        log.emit(GENERATION_STARTED, at=(now - 90 * 3600, 0.0))
        log.emit(COMMIT, step=1, key=commit_key(1, 1, "0" * 64), at=(now - 3600, 1.0))
        log.emit("node_heartbeat", seconds=1.0, at=(now, 2.0))
    known = read_failed_generations(read_events(store))
    assert [round(failure.idle_seconds) for failure in known] == [3600]
