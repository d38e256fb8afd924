"""Guards of memory: growth that fills it, errors that mean it is full, and micro-batches that fit."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.training.engine.guards.memory import (
    MemoryGrowthMonitor,
    fitting_accumulation,
    is_out_of_memory,
    memory_of_other_processes,
    more_micro_batches,
    try_micro_batch,
)
from ebbflow.training.errors import BatchCannotBeSplit
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Loss
from tests.support.rank_threads import call_on_ranks

MIB = 2**20
GIB = 2**30
CUDA = torch.device("cuda", 0)


class Memory:
    """A monitor with a clock by hand, whose process holds `held(samples so far)` bytes."""

    def __init__(
        self, held: Callable[[int], float], *, left: float, sharers: int = 1, began: float = 0.0
    ) -> None:
        self.now = began
        self.samples = 0
        self._held = held
        self.monitor = MemoryGrowthMonitor(
            "memory", held=self._sample, left=lambda: left, sharers=sharers, now=lambda: self.now
        )

    def _sample(self) -> float:
        self.samples += 1
        return self._held(self.samples)

    def watch(self, samples: int, *, needed_seconds: float = math.inf) -> dict[int, str]:
        """Take samples once per second, and return the warnings by the number of the sample."""
        warnings = {}
        for _ in range(samples):
            if warning := self.monitor.look(needed_seconds):
                warnings[self.samples] = warning
            self.now += 1.0
        return warnings


class Samples:
    """A batch whose micro-batches have the given weights."""

    def __init__(self, weights: list[float]) -> None:
        self.weights = weights
        self.weight = sum(weights)

    def split(self, parts: int) -> list[Samples]:
        assert parts == len(self.weights)
        return [Samples([weight]) for weight in self.weights]


class Task:
    """A workload that keeps the weight of the batch whose loss it took, and fails with `error`."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.taken = list[float]()
        self.activations: weakref.ref[Tensor] | None = None

    def loss(self, model: nn.Module, batch: Samples) -> Loss:
        self.taken.append(batch.weight)
        inputs = torch.ones(4, 3)
        self.activations = weakref.ref(inputs)
        cycle: list[Any] = [inputs]
        cycle.append(cycle)
        result = model(inputs).sum()
        if self.error is not None:
            raise self.error
        return Loss(result, batch.weight)


def test_the_monitor_samples_once_per_second() -> None:
    memory = Memory(lambda number: 0.0, left=1.0)
    sampled = []
    for now in (0.0, 0.5, 0.9990234375, 1.0, 1.75, 2.0, 5.5, 6.0, 6.5):
        memory.now = now
        before = memory.samples
        memory.monitor.look(1.0)
        if memory.samples > before:
            sampled.append(now)
    assert sampled == [0.0, 1.0, 2.0, 5.5, 6.5]


def test_the_monitor_judges_the_last_sixty_samples_at_each_tenth() -> None:
    memory = Memory(lambda number: number * MIB, left=30.0 * MIB, sharers=3)
    warnings = memory.watch(89)
    assert set(warnings) == {60, 70, 80}
    assert warnings[60] == "memory grows by 3.0 MiB/s and 0.03 GiB are left: full in 10 s"
    grown = Memory(lambda number: min(number, 61) * MIB, left=MIB)
    assert set(grown.watch(200)) == {60, 70, 80, 90}, (
        "at the 100th sample, too few pairs of the last 60 rise"
    )


@pytest.mark.parametrize(
    ("left_seconds", "began", "warned_at"),
    [
        (59.0, 0.0, 60),  # the time since the first sample: 59 s at the 60th
        (59.5, 0.0, 70),
        (59.0, 1000.0, 60),
        (59.5, 1000.0, 70),
        (300.0, 0.0, 310),  # the horizon
        (300.5, 0.0, None),
    ],
)
def test_the_monitor_warns_if_memory_is_full_before_it_has_grown_as_long_again(
    left_seconds: float, began: float, warned_at: int | None
) -> None:
    memory = Memory(lambda number: number * MIB, left=left_seconds * MIB, began=began)
    assert next(iter(memory.watch(700)), None) == warned_at


def test_the_monitor_is_silent_if_training_ends_before_memory_is_full() -> None:
    for needed_seconds, warned in ((20.0, True), (19.75, False)):
        memory = Memory(lambda number: number * MIB, left=20.0 * MIB)
        assert bool(memory.watch(60, needed_seconds=needed_seconds)) is warned


@pytest.mark.parametrize(("level", "warned"), [(30, True), (31, False)])
@pytest.mark.parametrize("slope", [0.0, -1.0], ids=["constant", "falling"])
def test_the_monitor_warns_only_if_three_quarters_of_the_pairs_rise(
    level: int, warned: bool, slope: float
) -> None:
    """30 and 31 samples without growth are 435 and 465 of 1770 pairs, of which a quarter are 442."""

    def held(number: int) -> float:
        if number <= level:
            return slope * number
        return float(number * GIB)

    assert bool(Memory(held, left=1.0).watch(60)) is warned


def test_the_monitor_sees_growth_of_half_a_byte_per_second() -> None:
    assert Memory(lambda number: number / 2, left=1.0).watch(60)[60].endswith("full in 2 s")


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("any text"), True),
        (MemoryError("any text"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("not enough memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("NCCL error: CUDA Out Of Memory"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUSOLVER_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUSPARSE_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt("out of memory"), False),
    ],
)
def test_an_error_means_full_memory_by_its_class_or_text(error: BaseException, full: bool) -> None:
    assert is_out_of_memory(error) is full


@pytest.mark.parametrize(
    ("total", "free", "reserved", "text"),
    [
        (80.0, 70.0, 2.0, ""),  # a tenth of the GPU
        (80.0, 69.5, 2.0, "8.5 of 80.0 GiB"),
        (80.0, 69.5, 2.5, ""),
        (8.0, 5.0, 1.0, ""),  # 2 GiB
        (8.0, 4.5, 1.0, "2.5 of 8.0 GiB"),
    ],
)
def test_memory_of_other_processes_counts_beyond_what_libraries_hold(
    monkeypatch: pytest.MonkeyPatch, total: float, free: float, reserved: float, text: str
) -> None:
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(total * GIB))
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved * GIB))
    assert memory_of_other_processes(CUDA) == text
    assert memory_of_other_processes(torch.device("cpu")) == ""


def config_of(batch_size: int = 48, accumulation: int = 1, **sections: Any) -> RunConfig:
    training = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    return RunConfig.model_validate({"training": training, **sections})


@pytest.mark.parametrize(
    ("batch_size", "world_size", "accumulation", "factor", "expected"),
    [
        (48, 2, 1, 2, 2),
        (48, 2, 3, 2, 6),
        (48, 2, 4, 2, 8),
        (48, 2, 8, 2, 24),  # 16 would leave micro-batches of different sizes
        (48, 2, 23, 2, 24),
        (48, 2, 4, 1, 6),
        (48, 2, 3, 1, 4),
        (48, 2, 4, 3, 12),
        (47, 2, 1, 2, 2),  # 24 samples on one of the ranks
        (5, 1, 3, 2, 5),
        (2, 1, 1, 2, 2),
    ],
)
def test_micro_batches_are_the_fewest_that_divide_the_samples(
    batch_size: int, world_size: int, accumulation: int, factor: int, expected: int
) -> None:
    assert (
        more_micro_batches(config_of(batch_size), world_size, accumulation, factor=factor)
        == expected
    )
    if factor == 2:
        assert more_micro_batches(config_of(batch_size), world_size, accumulation) == expected


def test_ranks_of_a_tensor_group_share_their_samples() -> None:
    config = config_of(
        8,
        parallel={"tensor_size": 2, "mode": "fsdp2"},
        cluster={"nodes": 1, "processes_per_node": 4},
    )
    assert more_micro_batches(config, 4, 2) == 4
    with pytest.raises(BatchCannotBeSplit) as caught:
        more_micro_batches(config, 4, 4)
    assert str(caught.value) == (
        "training.batch_size 8 / 2 ranks = 4 samples per rank, in 4 micro-batches of one sample "
        "each, which is the least there can be; fix: training.loss_chunk_tokens 262144, "
        "parallel.recompute full, fsdp.use_mixed_precision true, fsdp.cpu_offload true, a shorter "
        "model.sequence_length, or more memory"
    )
    with pytest.raises(BatchCannotBeSplit):
        more_micro_batches(config, 4, 5)


@pytest.mark.parametrize(
    ("mode", "static_graph", "compression", "refused"),
    [
        ("ddp", True, "bfloat16", True),
        ("ddp", True, "none", False),
        ("ddp", False, "bfloat16", False),
        ("fsdp2", True, "bfloat16", False),
    ],
)
def test_a_static_graph_with_compression_allows_one_micro_batch(
    mode: str, static_graph: bool, compression: str, refused: bool
) -> None:
    ddp = {"static_graph": static_graph, "gradient_compression": compression}
    config = config_of(48, parallel={"mode": mode}).model_copy(
        update={"ddp": RunConfig(ddp=ddp).ddp}
    )
    if not refused:
        assert more_micro_batches(config, 2, 1) == 2
        return
    with pytest.raises(BatchCannotBeSplit) as caught:
        more_micro_batches(config, 2, 1)
    assert str(caught.value) == (
        "ddp.static_graph reduces gradients after each micro-batch, and ddp.gradient_compression "
        "bfloat16 would compress what was compressed before, so that there can be only one; fix: "
        "set ddp.static_graph to false"
    )


def test_all_ranks_take_the_micro_batches_that_fit_on_each() -> None:
    """The first ranks need 2 micro-batches and the last one 3.

    Each rank hears at most five names.
    """

    def find(gang: Gang) -> tuple[int, list[int], list[str]]:
        tried: list[int] = []
        told: list[str] = []

        def fits(parts: int) -> bool:
            tried.append(parts)
            return parts >= (3 if gang.rank == 6 else 2)

        found = fitting_accumulation(config_of(7 * 12), gang, fits, tell=told.append)
        return found, tried, told

    told = [
        "a step in 1 micro-batches does not fit into the memory of rank 0, 1, 2, 3, 4",
        "a step in 2 micro-batches does not fit into the memory of rank 6",
    ]
    assert call_on_ranks(7, find) == [(3, [1, 2, 3], told)] * 7


def test_micro_batches_are_never_fewer_than_configured() -> None:
    assert (
        fitting_accumulation(config_of(48, accumulation=4), Gang(), lambda parts: parts >= 5) == 6
    )
    assert fitting_accumulation(config_of(48, accumulation=4), Gang(), lambda parts: True) == 4


def frozen_and_trained() -> nn.Module:
    """Return a batch norm, whose buffers change in each pass, a frozen layer and a trained one."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("error", "fits"),
    [(None, True), (torch.OutOfMemoryError("planted"), False), (MemoryError("planted"), False)],
)
@pytest.mark.parametrize("has_state", [True, False])
def test_a_trial_takes_the_largest_micro_batch_and_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch, error: BaseException | None, fits: bool, has_state: bool
) -> None:
    model = frozen_and_trained()
    task = Task(error)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    shapes: list[torch.Size] = []
    allocate = torch.empty_like
    emptied = list[bool]()

    def allocate_and_record(like: Tensor) -> Tensor:
        shapes.append(like.shape)
        return allocate(like)

    monkeypatch.setattr(torch, "empty_like", allocate_and_record)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    gc.disable()
    try:
        fitted = try_micro_batch(task, model, Samples([2.0, 5.0, 3.0]), 3, has_state=has_state)  # type: ignore[arg-type]
        assert fitted is fits
        assert task.activations is not None and task.activations() is None, (
            "the activations are freed"
        )
    finally:
        gc.enable()
    assert task.taken == [5.0] and emptied == [True]
    trained = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    assert sorted(shapes) == ([] if has_state else sorted(2 * trained)), "AdamW has two moments"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert error is None or error.__traceback__ is None


@pytest.mark.parametrize("error", [RuntimeError("planted"), ValueError("out of memory")])
def test_a_trial_passes_on_other_errors_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model = frozen_and_trained()
    allocated = list[weakref.ref[Tensor]]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    allocate = torch.empty_like
    emptied = list[bool]()

    def allocate_and_record(like: Tensor) -> Tensor:
        tensor = allocate(like)
        allocated.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty_like", allocate_and_record)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    with pytest.raises(type(error)) as caught:
        try_micro_batch(Task(error), model, Samples([1.0]), 1, has_state=False)  # type: ignore[arg-type]
    assert caught.value is error and len(allocated) == 8
    assert not any(tensor() is not None for tensor in allocated), "the error's traceback holds none"
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert emptied == []
