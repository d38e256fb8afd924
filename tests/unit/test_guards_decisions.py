"""The guards of a rank: what they decide at a step, record, and raise, alone and beside other
ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import GUARD, GuardAction
from ebbflow.core.store import Store
from ebbflow.training import errors
from ebbflow.training.engine.guards.guards import (
    Action,
    Guards,
    Judgement,
    apply_overrides,
    fit_micro_batch,
    make_guards,
    weights_checksum,
)
from ebbflow.training.engine.guards.overrides import Overrides, read_overrides
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Position
from ebbflow.training.step_sync import Row, StepSync
from ebbflow.training.workload import Cursor, Loss
from tests.support.flushed_output import FlushedOutput, flushed
from tests.support.rank_threads import call_on_ranks

__all__ = ["flushed"]

BATCH = 8
AT = Position(6, 48)
HALF = {"fsdp": {"use_mixed_precision": True, "param_dtype": "float16"}}

NAN = {"loss_sum": math.nan}
OVERFLOW = {"square_sum": math.inf}
GOOD: dict[str, float] = {}

EQUAL = "after step 6; they were equal after step 4, to where the job goes back"

FULL = torch.OutOfMemoryError("CUDA out\n of memory." + " x" * 200)
FULL_TEXT = ("CUDA out of memory." + " x" * 200)[:200]


class Rank:
    """Guards of one rank with their recorded events."""

    def __init__(
        self,
        *,
        gang: Gang | None = None,
        copies: int = 1,
        store: Store | None = None,
        overrides: Overrides | None = None,
        emit: Callable[..., object] | None = None,
        sections: dict[str, Any] | None = None,
        **guards: Any,
    ) -> None:
        self.events: list[dict[str, Any]] = []
        self.snapshots: list[int] = []
        config = RunConfig.model_validate(
            {"training": {"batch_size": BATCH}, "guards": guards, **(sections or {})}
        )
        self.guards = Guards(
            config=config,
            gang=gang or Gang(),
            copies=copies,
            emit=emit or self._emit,
            store=store,
            generation=3,
            overrides=overrides or Overrides(),
            keep_snapshot=self.snapshots.append,
        )

    def _emit(self, name: str, **data: Any) -> None:
        assert name == GUARD
        self.events.append(data)

    def judge(
        self,
        *rows: dict[str, float],
        at: Position = AT,
        settle: Callable[[], object] = lambda: None,
    ) -> Judgement:
        return self.guards.judge(at, sync_of(*rows), settle)


class Sized:
    """A workload of one sample per row, of which `largest` rows fit into memory."""

    def __init__(self, largest: int) -> None:
        self.largest = largest
        self.cursors: list[Cursor] = []

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Rows:
        self.cursors.append(cursor)
        return Rows(torch.ones(cursor.count, 2))

    def loss(self, model: nn.Module, batch: Rows) -> Loss:
        if len(batch.rows) > self.largest:
            raise torch.OutOfMemoryError("planted")
        return Loss(model(batch.rows).sum(), batch.weight)


class Rows:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.weight = float(len(rows))

    def split(self, parts: int) -> list[Rows]:
        return [Rows(rows) for rows in self.rows.chunk(parts)]


def sync_of(*changes: dict[str, float]) -> StepSync:
    values = dict.fromkeys(Row._fields[:9], 1.0) | {"stop": 0.0}
    return StepSync([Row(**(values | change)) for change in changes])


def test_a_commit_has_the_state_of_the_guards() -> None:
    rank = Rank(overrides=Overrides(first_sample=40))
    fields = rank.guards.commit_fields(7)
    assert fields == {
        "guards": {"losses": [], "gradient_norms": [], "skipped_in_a_row": 0, "first_sample": 40}
    }
    assert rank.guards.saved_step == 7
    half = Rank(sections=HALF).guards.commit_fields(7)["guards"]
    assert half["loss_scale"] == {"value": 16.0, "good_steps": 0}


@pytest.mark.parametrize("sections", [{}, HALF], ids=["float32", "float16"])
@pytest.mark.parametrize(
    ("cursor", "expected", "skipped_in_a_row"),
    [
        (47, Position(5, 48), 0),  # the next sample is skipped
        (48, Position(5, 48), 2),
        (49, Position(5, 49), 2),
    ],
)
def test_a_resumed_job_has_the_state_of_its_commit_and_skips_to_its_first_sample(
    flushed: FlushedOutput,
    sections: dict[str, Any],
    cursor: int,
    expected: Position,
    skipped_in_a_row: int,
) -> None:
    rank = Rank(overrides=Overrides(first_sample=48), sections=sections)
    state = {
        "losses": [1.0, 2.0],
        "skipped_in_a_row": 2,
        "loss_scale": {"value": 4.0, "good_steps": 9},
    }
    assert rank.guards.resume(Position(5, cursor), {"guards": state, "step": 5}) == expected
    assert rank.guards.numbers.to_json()["losses"] == [1.0, 2.0]
    assert rank.guards.numbers.skipped_in_a_row == skipped_in_a_row
    scale = rank.guards.loss_scale
    assert scale is None or scale.to_json() == {"value": 4.0, "good_steps": 9}
    if cursor == 47:
        said = "samples 47 to 47 are skipped after a rewind\n"
    else:
        said = ""
    assert flushed.text == said


def test_a_commit_without_guards_resets_them(flushed: FlushedOutput) -> None:
    rank = Rank(gang=Gang(rank=1, world_size=2), overrides=Overrides(first_sample=9), sections=HALF)
    assert rank.guards.resume(Position(1, 8), {}) == Position(1, 9)
    assert rank.guards.numbers.skipped_in_a_row == 0
    assert rank.guards.loss_scale is not None and rank.guards.loss_scale.value == 16.0
    assert flushed.text == "", "rank 0 says it"


@pytest.mark.parametrize(
    ("interval", "copies", "agreed_step", "saved_step", "step", "due"),
    [
        (None, 2, None, None, 100, False),
        (100, 1, None, None, 100, False),
        (100, 2, None, None, 1, True),  # nothing has been compared yet
        (100, 2, 50, 50, 51, False),
        (100, 2, 50, 51, 51, True),  # after a save
        (100, 2, 50, None, 100, True),
        (100, 2, 50, None, 200, True),
        (100, 2, 50, None, 101, False),
    ],
)
def test_weights_are_compared_first_after_each_save_and_at_each_interval(
    interval: int | None,
    copies: int,
    agreed_step: int | None,
    saved_step: int | None,
    step: int,
    due: bool,
) -> None:
    model = nn.Linear(2, 2)
    guards = Rank(copies=copies, hash_interval_steps=interval).guards
    guards.agreed_step = agreed_step
    guards.saved_step = saved_step
    assert guards.weights_checksum(step, model) == (weights_checksum(model) if due else 0)


def test_guards_are_given_by_name_and_start_without_records() -> None:
    rank = Rank()
    guards = Guards(config=rank.guards.config, gang=Gang(), copies=1, emit=print)
    assert (guards.store, guards.generation, guards.overrides, guards.growth) == (
        None,
        0,
        Overrides(),
        (),
    )
    assert (guards.agreed_step, guards.saved_step, guards.pace.now) == (None, None, "")
    with pytest.raises(TypeError):
        Guards(rank.guards.config, Gang(), 1, print)  # type: ignore[misc]


def test_a_step_without_checksums_compares_nothing() -> None:
    rank = Rank(copies=2)
    assert rank.judge(GOOD, GOOD) == Judgement(Action.STEP)
    assert rank.guards.agreed_step is None
    assert rank.judge({"weights_checksum": 5.0}, {"weights_checksum": 5.0}) == Judgement(
        Action.STEP
    )
    assert rank.guards.agreed_step == 6


@pytest.mark.parametrize(
    ("sums", "agreed_step", "reason"),
    [
        (
            [5, 5, 7],
            None,
            "weights of rank 2 differ from those of its replicas at the start, step 6",
        ),
        ([5, 5, 7], 4, f"weights of rank 2 differ from those of its replicas {EQUAL}"),
        ([5, 7, 9, 5, 5], 4, f"weights of rank 1, 2 differ from those of their replicas {EQUAL}"),
        ([5, 7], 4, f"weights of ranks 0, 1 differ, and no majority shows which are right {EQUAL}"),
    ],
)
def test_the_guard_names_ranks_with_different_weights_and_rewinds(
    tmp_path: Path, sums: list[float], agreed_step: int | None, reason: str
) -> None:
    store = Store.open(str(tmp_path))

    def judge(gang: Gang) -> Rank:
        rank = Rank(gang=gang, copies=len(sums), store=store)
        rank.guards.agreed_step = agreed_step
        with pytest.raises(errors.DivergenceError) as caught:
            rank.judge(*({"weights_checksum": float(total)} for total in sums))
        assert str(caught.value) == reason
        return rank

    ranks = call_on_ranks(len(sums), judge)
    odd = [number for number, total in enumerate(sums) if total != 5 or len(sums) == 2]
    event = {
        "step": 7,
        "flush": True,
        "action": GuardAction.DIVERGED,
        "ranks": odd,
        "reason": reason,
    }
    assert [rank.events for rank in ranks] == [[event], *[[]] * (len(sums) - 1)]
    orders = [meta.key for meta in store.list("overrides")]
    assert orders == ([] if agreed_step is None else ["overrides/000003-0-rewind-4-0-0.json"])


@pytest.mark.parametrize(
    ("interval", "copies", "raises"), [(100, 2, True), (None, 2, False), (100, 1, False)]
)
def test_weights_are_compared_once_more_after_the_last_step(
    interval: int | None, copies: int, raises: bool
) -> None:
    def compare(gang: Gang) -> Rank:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.weight, float(gang.rank))
        rank = Rank(gang=gang, copies=copies, hash_interval_steps=interval)
        with pytest.raises(errors.DivergenceError) if raises else nullcontext():
            rank.guards.compare_at_end(Position(12, 96), model)
        return rank

    first, _ = call_on_ranks(2, compare)
    assert [event["step"] for event in first.events] == ([12] if raises else [])
    assert first.guards.agreed_step is None, "nothing was compared, or the weights differ"


def test_no_rank_continues_before_its_guard_event_is_recorded() -> None:
    recorded = threading.Event()

    def emit(*_: Any, **__: Any) -> None:
        time.sleep(0.1)
        recorded.set()

    def judge(gang: Gang) -> bool:
        rank = Rank(gang=gang, copies=2, emit=emit)
        with pytest.raises(errors.DivergenceError):
            rank.judge({"weights_checksum": 5.0}, {"weights_checksum": 6.0})
        return recorded.is_set()

    assert call_on_ranks(2, judge) == [True, True]


@pytest.mark.parametrize("number", [0, 1])
def test_a_skipped_step_is_recorded_with_its_samples(number: int, flushed: FlushedOutput) -> None:
    rank = Rank(gang=Gang(rank=number, world_size=2), non_finite="skip")
    reason = "loss is not finite on rank 1"
    assert rank.judge(GOOD, NAN) == Judgement(Action.SKIP, reason, finite=False)
    event = {"step": 7, "action": GuardAction.SKIP, "reason": reason, "samples": [48, 56]}
    assert rank.events == ([] if number else [event])
    assert flushed.text == ("" if number else f"step 7: skipped: {reason}\n")


def test_a_step_is_judged_by_its_mean_loss_and_its_norm() -> None:
    rank = Rank(spike="skip", spike_window_steps=10)
    sync = sync_of(
        {"loss_sum": 6.0, "square_sum": 9.0}, {"loss_sum": 2.0, "weight": 3.0, "square_sum": 16.0}
    )
    rank.guards.judge(AT, sync, lambda: None)
    state = rank.guards.numbers.to_json()
    assert (state["losses"], state["gradient_norms"]) == ([2.0], [2.5])


@pytest.mark.parametrize(
    ("row", "value", "judgement"),
    [
        (GOOD, 16.0, Judgement(Action.STEP)),
        (
            OVERFLOW,
            8.0,
            Judgement(
                Action.SKIP, "float16 overflow in gradients; loss scale 16 → 8", finite=False
            ),
        ),
        (NAN, 16.0, Judgement(Action.STOP, "loss is not finite on rank 0", finite=False)),
        (
            NAN | OVERFLOW,
            16.0,
            Judgement(Action.STOP, "loss is not finite on rank 0", finite=False),
        ),
    ],
)
def test_an_overflow_of_float16_is_skipped_and_a_non_finite_loss_is_not(
    row: dict[str, float], value: float, judgement: Judgement
) -> None:
    rank = Rank(sections=HALF)
    assert rank.judge(row) == judgement
    assert rank.guards.loss_scale is not None and rank.guards.loss_scale.value == value
    assert Rank().judge(OVERFLOW).action is Action.STOP, "float32 has no scale"


@pytest.mark.parametrize(
    ("step", "skips", "margin", "limit"),
    [(6, 0, 0, 6), (6, 2, 0, 4), (6, 2, 3, 1), (6, 2, 4, 0), (6, 2, 5, 0)],
)
def test_a_rewind_leads_back_before_the_first_bad_step(
    tmp_path: Path, step: int, skips: int, margin: int, limit: int
) -> None:
    store = Store.open(str(tmp_path))
    settled: list[bool] = []

    def judge(gang: Gang) -> Rank:
        if skips:
            policy = "skip"
        else:
            policy = "rewind"
        rank = Rank(
            gang=gang, store=store, non_finite=policy, skips_in_a_row=2, rewind_margin_steps=margin
        )
        rank.guards.numbers.skipped_in_a_row = skips
        with pytest.raises(errors.Rewind) as caught:
            rank.judge(NAN, GOOD, at=Position(step, 8 * step), settle=lambda: settled.append(True))
        assert str(caught.value) == reason
        return rank

    if skips:
        skipped = f", after {skips} skipped steps in a row"
    else:
        skipped = ""
    reason = (
        f"step 7: loss is not finite on rank 0{skipped}; back to the newest commit up to step "
        f"{limit}, and on from sample 56"
    )
    first, second = call_on_ranks(2, judge)
    event = {"step": 7, "flush": True, "action": GuardAction.REWIND, "reason": reason}
    assert first.events == [event | {"limit": limit, "first_sample": 56}] and second.events == []
    assert [meta.key for meta in store.list("overrides")] == [
        f"overrides/000003-0-rewind-{limit}-56-1.json"
    ]
    assert settled == [True, True]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (errors.CheckpointError("no index"), errors.Rewind),
        (errors.GenerationSuperseded("left"), None),
    ],
)
def test_a_rewind_waits_for_the_save_in_flight(
    flushed: FlushedOutput, error: Exception, raised: type[Exception] | None
) -> None:
    def settle() -> None:
        raise error

    rank = Rank(non_finite="rewind")
    with pytest.raises(raised or type(error)):
        rank.judge(NAN, settle=settle)
    if raised:
        said = "step 6: the last save did not become a commit: no index\n"
    else:
        said = ""
    assert flushed.text == said
    assert bool(rank.events) is bool(raised)


def test_a_job_that_has_used_its_rewinds_stops() -> None:
    for rewinds, kind in ((1, errors.Rewind), (2, None), (3, None)):
        rank = Rank(non_finite="rewind", max_rewinds=2, overrides=Overrides(rewinds=rewinds))
        if kind is not None:
            with pytest.raises(kind):
                rank.judge(NAN)
            continue
        reason = f"loss is not finite on rank 0; {rewinds} rewinds, the limit of guards.max_rewinds"
        assert rank.judge(NAN) == Judgement(Action.STOP, reason, finite=False)
        assert rank.events == []


def test_a_spike_after_the_last_rewind_is_an_error() -> None:
    rank = Rank(spike="rewind", spike_window_steps=10, max_rewinds=0)
    for _ in range(5):
        rank.judge(GOOD)
    with pytest.raises(errors.TooManyRewinds) as caught:
        rank.judge({"loss_sum": 9.0})
    assert str(caught.value) == (
        "step 7: loss 9 is 8000.0 robust deviations (limit 8) above the median 1 of 5 steps; 0 "
        "rewinds, the limit of guards.max_rewinds"
    )


def test_a_straggler_is_recorded_with_its_price() -> None:
    rank = Rank(gang=Gang(world_size=2))
    slow = {"own_seconds": 3.0, "compute_seconds": 3.0, "data_seconds": 1.0}
    quick = {"own_seconds": 1.0, "compute_seconds": 1.0, "data_seconds": 0.0}
    for step in range(1, 21):
        rank.guards.record_pace(step, sync_of(quick, slow), 0.5)
    straggler, bound = rank.events
    figures = {"step": 20, "rank": 1, "share": 0.5, "usd_per_hour": 900.0}
    assert straggler == figures | {"action": GuardAction.SLOW_RANK, "reason": straggler["reason"]}
    assert straggler["reason"].startswith("rank 1 takes 3.0 times as long")
    assert (bound["action"], bound["share"], bound["usd_per_hour"]) == (
        GuardAction.DATA_BOUND,
        0.25,
        450.0,
    )


@pytest.mark.parametrize(
    ("world_size", "data_seconds", "events"), [(1, 0.0, 0), (1, 0.5, 1), (2, 0.0, 1)]
)
def test_a_rank_alone_is_compared_with_its_data_only(
    world_size: int, data_seconds: float, events: int
) -> None:
    rank = Rank(gang=Gang(world_size=world_size))
    row = {"own_seconds": 1.0, "compute_seconds": 1.0, "data_seconds": data_seconds}
    other = {"own_seconds": 0.5, "compute_seconds": 0.5, "data_seconds": 0.0}
    for step in range(1, 21):
        rank.guards.record_pace(step, sync_of(row) if world_size == 1 else sync_of(row, other), 0.0)
    assert len(rank.events) == events


def test_the_first_memory_that_runs_out_is_recorded(flushed: FlushedOutput) -> None:
    asked: list[tuple[str, float]] = []

    def monitor(name: str, reason: str) -> Any:
        return SimpleNamespace(look=lambda seconds: asked.append((name, seconds)) or reason)

    rank = Rank(gang=Gang(rank=1, world_size=2))
    assert not rank.guards.is_memory_running_out(60.0)
    rank.guards.growth = (
        monitor("host", ""),
        monitor("gpu", "full in 10 s"),
        monitor("other", "full in 20 s"),
    )
    assert rank.guards.is_memory_running_out(60.0)
    assert asked == [("host", 60.0), ("gpu", 60.0)]
    assert rank.events == [{"action": GuardAction.RENEW, "rank": 1, "reason": "full in 10 s"}]
    assert flushed.text == "rank 1: full in 10 s; saved, to go on in new processes\n"


def test_memory_that_runs_out_orders_a_split(tmp_path: Path) -> None:
    rank = Rank(gang=Gang(rank=1, world_size=2), store=Store.open(str(tmp_path)))
    reason = (
        "rank 1, step 5: out of memory in one of 1 micro-batches; from the last commit on with 2"
    )
    with pytest.raises(errors.MicroBatchTooLarge) as caught, rank.guards.catch_out_of_memory(5):
        raise FULL
    assert str(caught.value) == f"{reason}: {FULL_TEXT}" and caught.value.__cause__ is FULL
    event = {
        "step": 5,
        "flush": True,
        "action": GuardAction.SPLIT,
        "rank": 1,
        "accumulation": 2,
        "reason": reason,
    }
    assert rank.events == [event] and rank.snapshots == [5]
    stored = rank.guards.store.list("overrides")  # type: ignore[union-attr]
    assert [meta.key for meta in stored] == ["overrides/000003-1-split-2.json"]
    unstored = Rank()
    with pytest.raises(errors.MicroBatchTooLarge), unstored.guards.catch_out_of_memory(5):
        raise MemoryError


def test_memory_that_runs_out_with_single_samples_is_refused() -> None:
    rank = Rank(sections={"training": {"batch_size": 2, "gradient_accumulation_steps": 2}})
    with pytest.raises(errors.BatchCannotBeSplit) as caught, rank.guards.catch_out_of_memory(5):
        raise FULL
    assert str(caught.value).startswith(
        "rank 0, step 5: out of memory: training.batch_size 2 / 1 ranks = 2 samples"
    )
    assert str(caught.value).endswith(f"or more memory; {FULL_TEXT}") and rank.events == []


@pytest.mark.parametrize(
    ("error", "response", "snapshots"),
    [
        (RuntimeError("planted"), "split", []),
        (ValueError("out of memory"), "split", []),
        (FULL, "stop", [5]),
        (MemoryError("planted"), "stop", [5]),
    ],
)
def test_other_errors_and_other_responses_are_passed_on(
    error: Exception, response: str, snapshots: list[int]
) -> None:
    rank = Rank(out_of_memory=response)
    with pytest.raises(type(error)) as caught, rank.guards.catch_out_of_memory(5):
        raise error
    assert caught.value is error and rank.snapshots == snapshots and rank.events == []


def test_memory_of_other_processes_matters_in_the_first_step_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * gib)
    rank = Rank(gang=Gang(rank=1, world_size=2, device=torch.device("cuda", 0)))
    for _ in range(2):
        with pytest.raises(errors.TrainingError) as caught, rank.guards.catch_out_of_memory(5):
            raise FULL
        assert (
            str(caught.value)
            == f"rank 1: other processes hold 68.0 of 80.0 GiB of its GPU: {FULL_TEXT}"
        )
        assert type(caught.value) is errors.TrainingError and rank.events == []
    with pytest.raises(errors.MicroBatchTooLarge), rank.guards.catch_out_of_memory(6):
        raise FULL


@pytest.mark.parametrize(("ordered", "taken"), [(None, 8), (4, 8), (8, 8), (9, 9)])
def test_a_job_never_gets_fewer_micro_batches_than_configured(
    ordered: int | None, taken: int
) -> None:
    config = RunConfig.model_validate(
        {"training": {"batch_size": 72, "gradient_accumulation_steps": 8}}
    )
    found = apply_overrides(config, Overrides(gradient_accumulation_steps=ordered))
    assert found.training.gradient_accumulation_steps == taken
    assert (found is config) is (taken == 8)


def worker_spec(store_uri: str, **fields: Any) -> WorkerSpec:
    return WorkerSpec(
        job="one",
        run="1",
        attempt=0,
        node=0,
        generation=7,
        generation_id="abc",
        candidates=[],
        config=RunConfig(),
        store_uri=store_uri,
        prepared={},
        **fields,
    )


@pytest.mark.parametrize(("colocated", "sharers"), [(0, 1), (4, 4)])
def test_guards_of_a_rank_are_made_from_its_start(
    tmp_path: Path, colocated: int, sharers: int
) -> None:
    overrides = Overrides(gradient_accumulation_steps=4, first_sample=8, rewinds=1)
    spec = worker_spec(str(tmp_path), overrides=overrides.to_json(), colocated_ranks=colocated)
    config = RunConfig()
    gang = Gang()

    def emit(*_: object, **__: object) -> None:
        """Record nothing."""

    guards = make_guards(spec, config, gang, copies=2, emit=emit)
    assert (guards.config, guards.gang, guards.copies, guards.emit) == (config, gang, 2, emit)
    assert (guards.generation, guards.overrides) == (7, overrides)
    assert guards.store is not None and guards.store.uri == f"{tmp_path}/jobs/one"
    (monitor,) = guards.growth
    assert monitor._sharers == sharers
    silent = RunConfig.model_validate({"guards": {"memory_growth": "off"}})
    assert make_guards(spec, silent, gang, copies=2, emit=emit).growth == ()


def test_growth_of_host_and_gpu_memory_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU has 3 GiB free and 2 GiB cached; each sample finds 100 GiB more in use."""
    gib = 2**30
    held = iter(range(0, 10**6, 100))
    allocated = 0

    def memory_allocated(device: torch.device) -> int:
        nonlocal allocated
        allocated = gib * next(held)
        return allocated

    monkeypatch.setattr(torch.cuda, "memory_allocated", memory_allocated)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: allocated + 102 * gib)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * gib, 80 * gib))
    spec = worker_spec(str(tmp_path), colocated_ranks=4)
    gang = Gang(device=torch.device("cuda", 0))
    host, gpu = make_guards(spec, RunConfig(), gang, copies=1, emit=print).growth
    assert (host._sharers, gpu._sharers) == (4, 1)
    assert host._held() > 2**20 and host._left() > 0
    assert gpu._held() == 0 and gpu._held() == 100 * gib
    assert gpu._left() == (3 + 2) * gib


def fit(rank: Rank, workload: Any, *, optimizer_state: dict[str, Any] | None = None) -> int:
    spread: Any = SimpleNamespace(module=nn.Linear(2, 1))
    optimizer: Any = SimpleNamespace(state=optimizer_state or {})
    return fit_micro_batch(
        rank.guards, workload, spread, optimizer
    ).training.gradient_accumulation_steps


def automatic(mode: str = "ddp", **training: Any) -> dict[str, Any]:
    return {
        "training": {"batch_size": 24, "micro_batch": "auto"} | training,
        "parallel": {"mode": mode},
    }


def test_ranks_find_the_micro_batches_that_fit_once_per_job(
    tmp_path: Path, flushed: FlushedOutput
) -> None:
    """The second rank has room for 5 of its 12 samples, and the first one for all."""
    store = Store.open(str(tmp_path))

    def find(gang: Gang) -> tuple[int, list[Cursor], list[dict[str, Any]]]:
        rank = Rank(gang=gang, store=store, sections=automatic())
        workload = Sized(12 if gang.rank == 0 else 5)
        return fit(rank, workload), workload.cursors, rank.events

    first, second = call_on_ranks(2, find)
    reason = "tried before the first step: 3 micro-batches fit"
    event = {"action": GuardAction.SPLIT, "rank": 0, "accumulation": 3, "reason": reason}
    assert first == (3, [Cursor(0, 12)], [event])
    assert second == (3, [Cursor(12, 12)], [])
    assert read_overrides(store).gradient_accumulation_steps == 3
    said = (
        "before the first step: a step in {} micro-batches does not fit into the memory of rank 1\n"
    )
    assert flushed.text == said.format(1) + said.format(2)


@pytest.mark.parametrize(
    ("sections", "overrides", "expected"),
    [
        (automatic(), Overrides(), 3),
        (automatic("fsdp2"), Overrides(), 3),  # a rank alone has the whole model
        (automatic(gradient_accumulation_steps=6), Overrides(), 6),
        (automatic(), Overrides(gradient_accumulation_steps=2), 1),  # `apply_overrides` has done it
        (automatic(micro_batch="fixed"), Overrides(), 1),
    ],
)
def test_a_rank_alone_tries_unless_the_number_is_fixed_or_known(
    sections: dict[str, Any], overrides: Overrides, expected: int
) -> None:
    rank = Rank(sections=sections, overrides=overrides)
    workload = Sized(8)
    assert fit(rank, workload) == expected
    assert bool(workload.cursors) is (expected != 1) and rank.events == []


def test_ranks_with_parts_of_a_model_try_nothing() -> None:
    workload = Sized(1)
    assert (
        fit(Rank(gang=Gang(world_size=2), sections=automatic("fsdp2")), workload) == 1
        and not workload.cursors
    )


@pytest.mark.parametrize(("state", "ballast"), [({}, 4), ({"weight": 1}, 0)])
def test_a_trial_reserves_room_for_the_optimizer_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, Any], ballast: int
) -> None:
    allocate = torch.empty_like
    allocated = list[torch.Size]()
    monkeypatch.setattr(
        torch, "empty_like", lambda like: allocated.append(like.shape) or allocate(like)
    )
    assert fit(Rank(sections=automatic()), Sized(24), optimizer_state=state) == 1
    assert len(allocated) == ballast
