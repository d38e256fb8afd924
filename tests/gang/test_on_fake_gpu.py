"""The real engine loop on a device that says it is a GPU: what waits for it, and what reaches a
commit.
"""

from __future__ import annotations

import math
import pickle
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ebbflow.core import process
from ebbflow.core.config.schema import DataConfig, RunConfig, TrainingConfig
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import Event, Origin, read_events
from ebbflow.core.store import Store
from ebbflow.cost.report.figure_text import format_gpu_memory
from ebbflow.cost.report.figures import list_gpu_memory
from ebbflow.cost.report.report import list_notable_events
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.save_plan import SavePlanner
from ebbflow.training.checkpoint.staging import StagingArea
from ebbflow.training.data import prepare_tokens
from ebbflow.training.engine.guards.guards import Guards
from ebbflow.training.engine.guards.memory import is_out_of_memory
from ebbflow.training.engine.loop import train
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.engine.profiler import make_step_watches, profile_script, record_memory
from ebbflow.training.engine.trainer import Trainer
from ebbflow.training.errors import DivergenceError, MicroBatchTooLarge, TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import OrderRecord, WorkerSpec
from ebbflow.training.limits import Limits
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.step_sync import DeviceExchange, Row
from ebbflow.training.worker import arrange_arithmetic, describe_promise, flush_before_end
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.training.workload_loader import make_workload, prepare_data, workload_context
from ebbflow.workloads.language.language_model import TextWorkload
from tests.support.assembled_trainer import assemble_trainer
from tests.support.fake_gpu import GIB, FakeGpu, GpuTensor, fake_gpu
from tests.support.flow import wait_until
from tests.support.no_saver import NoSaver

CUDA = torch.device("cuda", 0)

ROW = Row(
    step=5.0,
    cursor=2.0**40 + 1,
    loss_sum=0.0,
    weight=3.0,
    square_sum=0.0,
    flops=1.0,
    compute_seconds=0.5,
    data_seconds=0.25,
    stop=0.0,
)
OTHER = ROW._replace(loss_sum=4.0, weight=5.0, square_sum=7.0, stop=1.0)
BUILT_IN = {
    "text": {"model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 16}},
    "text, chunks": {
        "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "sequence_length": 16},
        "training": {"batch_size": 4, "loss_chunk_tokens": 8},
    },
    "documents": {
        "model": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "sequence_length": 16,
            "end_of_document": 10,
        }
    },
    "points": {
        "workload": "ebbflow.workloads.points.point_clouds:PointCloudDiffusion",
        "workload_options": {"num_points": 16, "hidden": 16, "layers": 1, "heads": 2},
    },
    "images": {
        "workload": "ebbflow.workloads:ImageClassifier",
        "workload_options": {"size": 12, "width": 8, "layers": 3, "workers": 0},
    },
    "points, known": {
        "workload": "ebbflow.workloads.points.point_clouds:PointCloudDiffusion",
        "workload_options": {
            "num_points": 16,
            "known_points": 4,
            "hidden": 16,
            "layers": 1,
            "heads": 2,
            "by_category": True,
        },
    },
}


class Numbers:
    """Samples that are a function of their index, already on the device."""

    def __init__(self, first: int, count: int, *, on_gpu: bool) -> None:
        rows = torch.arange(first, first + count, dtype=torch.float32)[:, None] * torch.tensor(
            [0.1, 0.2, 0.3, 0.4]
        )
        rows = torch.sin(rows)
        if on_gpu:
            self.rows = GpuTensor(rows, FakeGpu.newest)
        else:
            self.rows = rows
        self.weight = float(count)

    def split(self, parts: int) -> list[Numbers]:
        return [self]


class Workload:
    """A model whose forward pass changes a persistent buffer, as a batch norm's does."""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))

    def units(self, model: nn.Module) -> list[nn.Module]:
        return []

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Numbers:
        return Numbers(cursor.first, cursor.count, on_gpu=next(model.parameters()).is_cuda)

    def loss(self, model: nn.Module, batch: Numbers) -> Loss:
        return Loss(model(batch.rows).square().sum(), batch.weight)

    def flops(self, batch: Numbers) -> float:
        return 1.0

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class Kept(NoSaver):
    """Keeps what a commit of each step should have."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[int, dict[str, Tensor]] = {}

    def save(self, step: int, model: nn.Module, *_: Any, **__: Any) -> float:
        self.states[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return 0.0


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as gpu:
        yield gpu


def make_config(*, steps: int, every: int, **guards: Any) -> RunConfig:
    training = {
        "batch_size": 8,
        "max_steps": steps,
        "evaluation_interval_steps": 1000,
        "scheduler": {"warmup_steps": 1},
    }
    return RunConfig.model_validate(
        {
            "training": training,
            "guards": guards,
            "checkpoint": {"interval_steps": every, "when_busy": "wait"},
        }
    )


def job_spec(folder: Path) -> WorkerSpec:
    return WorkerSpec(
        job="one",
        run="1",
        attempt=0,
        node=0,
        generation=3,
        generation_id="abc",
        candidates=[],
        config=RunConfig(),
        store_uri=str(folder),
        prepared={},
    )


def make_trainer(
    config: RunConfig, *, saver: Any = None, device: torch.device = CUDA
) -> tuple[Trainer, list]:
    events: list[tuple[str, dict]] = []

    def emit(name: str, **data: Any) -> None:
        events.append((name, data))

    gang = Gang(device=device)
    clock = Clock(emit)
    workload = Workload()
    spread = spread_model(workload, config, gang)  # type: ignore[arg-type]
    trainer = assemble_trainer(
        config,
        gang,
        workload=workload,
        spread=spread,
        optimizer=make_optimizer(spread.module, config.training),
        saver=saver or NoSaver(),
        limits=Limits(None, world_size=1, elapsed_seconds=lambda: clock.elapsed_seconds),
        reporter=Reporter(clock, emit),
        guards=Guards(config=config, gang=gang, copies=spread.copies, emit=emit),
    )
    return trainer, events


def open_saver(folder: Path) -> Checkpointer:
    store = Store.open(str(folder)).sub("jobs/one")
    return Checkpointer(store.uri, generation=open_generation(store, run="1", attempt=0))


def saved_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """The model of the commit of a step."""
    store = Store.open(str(folder)).sub("jobs/one")
    keys = [ref.key for ref in reachable_commits(store) if ref.step == step]
    module = Workload().model().to_empty(device="cpu")
    optimizer = make_optimizer(module, RunConfig().training)
    generation = open_generation(store, run="2", attempt=0, parent=keys[0])
    with Checkpointer(store.uri, generation=generation) as saver:
        saver.restore(keys, module, optimizer)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_a_commit_holds_one_step_though_it_is_copied_at_the_last_moment(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    """The next forward pass changes the batch norm's statistics before the copy is awaited."""
    with open_saver(tmp_path) as saver:
        trainer, _ = make_trainer(make_config(steps=5, every=2), saver=saver)
        saver.prepare(trainer.spread.module, trainer.optimizer)
        train(trainer)
    kept = Kept()
    train(make_trainer(make_config(steps=5, every=1), saver=kept, device=torch.device("cpu"))[0])
    expected = kept.states[3]
    found = saved_tensors(tmp_path, 3)
    assert set(found) == set(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    assert gpu.threads == ["staging", "staging"], "no save page-locks memory in the loop"


def test_the_host_waits_for_no_result_of_the_step_in_progress(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between saves, each step waits once for the event of the step before, and for nothing else."""
    trainer, events = make_trainer(make_config(steps=8, every=4))
    waits: list[list[tuple[str, str]]] = []
    take_step = trainer.optimizer.step
    monkeypatch.setattr(
        trainer.optimizer, "step", lambda: (waits.append(gpu.take_waits()), take_step())
    )
    gpu.take_waits()
    ending = train(trainer)
    assert (ending.outcome, ending.step, trainer.session.saver.steps) == ("completed", 8, [5, 8])  # type: ignore[attr-defined]
    kinds = []
    for wait in waits:
        kinds.append([f"{what} {place.rpartition(' ')[2]}" for what, place in wait])
    read = ["event.synchronize read"]
    assert kinds == [[], read, read, read, read, read, read, read], kinds
    steps = [data for name, data in events if name == "step"]
    cpu, expected = make_trainer(make_config(steps=8, every=4), device=torch.device("cpu"))
    train(cpu)
    for step, other in zip(steps, [data for name, data in expected if name == "step"], strict=True):
        assert step["step"] == other["step"] and step["learning_rate"] == other["learning_rate"]
        assert step["loss"] == other["loss"] and step["gradient_norm"] == pytest.approx(
            other["gradient_norm"], rel=1e-12
        )
    weights = zip(trainer.spread.module.parameters(), cpu.spread.module.parameters(), strict=True)
    assert all(torch.equal(tensor.cpu(), other) for tensor, other in weights)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_loss_that_is_not_finite_ends_the_job_before_it_is_saved(
    gpu: FakeGpu, steps: int
) -> None:
    """In the third step: seen in the fourth, or at the end."""
    trainer, _ = make_trainer(make_config(steps=steps, every=100))
    take_loss = trainer.workload.loss
    count = 0

    def loss(model: nn.Module, batch: Numbers) -> Loss:
        nonlocal count
        count += 1
        found = take_loss(model, batch)
        if count == 3:
            return Loss(found.sum * torch.nan, found.weight)
        return found

    trainer.workload.loss = loss  # type: ignore[method-assign,assignment]
    ending = train(trainer)
    assert (ending.outcome, ending.step, trainer.session.saver.steps) == ("non_finite", 2, [])  # type: ignore[attr-defined]
    assert ending.message.startswith("step 3: loss is not finite on rank 0")


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adamax])
def test_a_module_whose_output_is_not_finite_is_named_though_it_is_seen_late(
    gpu: FakeGpu, steps: int, kind: Any
) -> None:
    """A fused optimizer does not take the third step.

    Another has taken it, so that every module looks guilty.
    """
    trainer, _ = make_trainer(make_config(steps=steps, every=100))
    fused = kind is torch.optim.AdamW
    if not fused:
        trainer = replace(trainer, optimizer=kind(trainer.spread.module.parameters()))
    draw = trainer.workload.next_batch

    def next_batch(model: nn.Module, cursor: Cursor) -> Numbers:
        batch = draw(model, cursor)
        if cursor.first != 16:
            return batch
        return replace_rows(batch, torch.inf)

    trainer.workload.next_batch = next_batch  # type: ignore[method-assign]
    message = train(trainer).message
    assert message.startswith("step 3: loss is not finite on rank 0")
    assert ("the first such output is that of 0 (Linear) on rank 0" in message) is fused
    assert (
        all(parameter.isfinite().all() for parameter in trainer.spread.module.parameters()) is fused
    )


def replace_rows(batch: Numbers, value: float) -> Numbers:
    batch.rows[3] = value
    return batch


def test_steps_that_a_guard_may_skip_are_judged_before_they_are_taken(gpu: FakeGpu) -> None:
    trainer, events = make_trainer(make_config(steps=3, every=100, non_finite="skip"))
    assert trainer.device_exchange is None
    train(trainer)
    assert [data["step"] for name, data in events if name == "step"] == [1, 2, 3]


def test_a_straggler_is_found_by_the_time_of_its_device(gpu: FakeGpu) -> None:
    """The host is done with a forward pass long before its GPU."""
    trainer, _ = make_trainer(make_config(steps=5, every=100))
    gpu.milliseconds = 250.0
    train(trainer)
    assert trainer.device_exchange is not None and trainer.device_exchange.own_seconds == 0.25


@pytest.mark.parametrize(
    ("mode", "device", "level", "on", "warns"),
    [
        ("auto", "cpu", "bit for bit", True, False),
        ("auto", "cuda", "within tolerance", True, True),
        ("strict", "cuda", "bit for bit", True, False),
        ("off", "cuda", "within tolerance", False, False),
        ("off", "cpu", "within tolerance", False, False),
    ],
)
def test_deterministic_settings_match_the_reports_promise(
    mode: str, device: str, level: str, on: bool, warns: bool
) -> None:
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(False)
    try:
        arrange_arithmetic(
            TrainingConfig.model_validate({"deterministic": mode}), torch.device(device)
        )
        enabled = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        assert enabled == (on, warns)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    promise = describe_promise(mode, torch.device(device))
    assert promise["level"] == level and bool(promise["reasons"]) == (
        (mode, device) != ("auto", "cpu")
    )


def test_tf32_is_off_unless_it_is_configured_and_no_matter_of_a_cpu() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for tf32, device, expected in (
            (True, "cpu", before),
            (True, "cuda", "high"),
            (False, "cuda", "highest"),
        ):
            arrange_arithmetic(TrainingConfig(tf32=tf32, deterministic="off"), torch.device(device))
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
    assert before == "highest" and not TrainingConfig().tf32, "the defaults"


def test_a_rank_that_waits_for_its_gpu_flushes_its_events_before_it_is_ended(
    tmp_path: Path,
) -> None:
    """NCCL raises nothing in the main thread of a survivor.

    Otherwise events are written every 100 s here.
    """
    store = Store.open(str(tmp_path)).sub("jobs/one")
    record = OrderRecord.create(tmp_path / "node-0.control")
    origin = Origin(job="one", run="1", attempt=0, generation=1, node=0, rank=1)
    with EventLog(store, origin, flush_seconds=100.0) as log:
        threading.Thread(target=flush_before_end, args=(log, record), daemon=True).start()
        log.emit("step", step=7, loss=1.0)
        time.sleep(0.5)
        assert not list(read_events(store))
        record.announce_end()
        wait_until(
            "the event", lambda: [event.step for event in read_events(store)] == [7], timeout=60
        )


def test_text_for_the_next_step_is_read_in_the_background(gpu: FakeGpu, tmp_path: Path) -> None:
    """Its samples are those of a CPU, also after a jump, and no copy of it makes the host wait."""
    (tmp_path / "a.txt").write_text("".join(f"{number} times {number}\n" for number in range(900)))
    (tmp_path / "b.txt").write_text("".join(f"{number} and {number}\n" for number in range(900)))
    store = Store.open(str(tmp_path / "store"))
    data = DataConfig(path=".", suffixes=[".txt"], held_out_fraction=0.4, held_out_samples=2)
    prepared = prepare_tokens(data, store, project_root=tmp_path).to_json()
    config = RunConfig.model_validate(
        {"model": {"sequence_length": 16}, "training": {"batch_size": 4}}
    )
    config = config.model_copy(update={"data": data})
    on = {
        device: TextWorkload(
            WorkloadContext(
                config=config, store=store, project_root=tmp_path, prepared=prepared, device=device
            )
        )
        for device in (torch.device("cpu"), CUDA)
    }
    gpu.take_waits()
    for first in (0, 4, 8, 100, 104):
        expected, found = (
            workload.next_batch(nn.Module(), Cursor(first, 4)) for workload in on.values()
        )
        assert gpu.take_waits() == []
        assert torch.equal(found.inputs.cpu(), expected.inputs) and torch.equal(
            found.targets.cpu(), expected.targets
        )
        gpu.take_waits()
    assert "reader_0" in {thread.name for thread in threading.enumerate()}


def list_tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for part in tree_leaves(batch):
        values = vars(part) if is_dataclass(part) else part
        found += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return found


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_workload_never_waits_for_its_gpu_in_a_step(
    gpu: FakeGpu, tmp_path: Path, name: str
) -> None:
    """Samples come from page-locked memory, and are those of a CPU."""
    (tmp_path / "a.txt").write_text("".join(f"{number} times {number}\n" for number in range(900)))
    (tmp_path / "b.txt").write_text("".join(f"{number} and {number}\n" for number in range(900)))
    data = {"path": ".", "suffixes": [".txt"], "held_out_fraction": 0.4, "held_out_samples": 2}
    config = RunConfig.model_validate(
        {"training": {"batch_size": 4}, "data": data} | BUILT_IN[name]
    )
    store = Store.open(str(tmp_path / "store"))
    context = replace(workload_context(config, Gang(), store=store), project_root=tmp_path)
    prepared = prepare_data(config, context)
    on_cpu, on_gpu_ = (
        make_workload(config, replace(context, prepared=prepared, device=device))
        for device in (torch.device("cpu"), CUDA)
    )
    spread = spread_model(on_gpu_, config.changed("parallel", mode="ddp"), Gang(device=CUDA))
    for step in range(3):
        gpu.take_waits()
        batch = on_gpu_.next_batch(spread.model, Cursor(4 * step, 4))
        on_gpu_.loss(spread.model, batch).sum.backward()
        assert gpu.take_waits() == []
        expected = on_cpu.next_batch(nn.Module(), Cursor(4 * step, 4))
        for found, wanted in zip(list_tensors(batch), list_tensors(expected), strict=True):
            assert torch.equal(found.cpu(), wanted)
    spread.module.zero_grad()


def test_policy_optimization_waits_for_its_gpu_when_it_judges_and_not_in_an_update(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    """A round of rollouts has two updates: the second finds its rollouts on the GPU."""
    config = RunConfig.model_validate(
        {
            "workload": "ebbflow.workloads:PolicyOptimization",
            "workload_options": {
                "prompt_max_len": 6,
                "generate_max_len": 4,
                "held_out_prompts": 8,
                "n_samples_per_prompt": 2,
                "max_epochs": 2,
                "reward": "tests.gang.test_policy_training:small_bytes",
            },
            "training": {"batch_size": 4},
            "model": {
                "hidden_size": 16,
                "num_layers": 1,
                "num_heads": 2,
                "sequence_length": 12,
            },
        }
    )
    store = Store.open(str(tmp_path / "store"))
    context = replace(workload_context(config, Gang(), store=store), project_root=tmp_path)
    context = replace(context, prepared=prepare_data(config, context), device=CUDA)
    workload = make_workload(config, context)
    spread = spread_model(workload, config.changed("parallel", mode="ddp"), Gang(device=CUDA))
    drawn: list[Counter[str]] = []
    for step in range(4):
        gpu.take_waits()
        batch = workload.next_batch(spread.model, Cursor(4 * step, 4))
        drawn.append(Counter(place.rpartition(" ")[2] for _, place in gpu.take_waits()))
        workload.loss(spread.model, batch).sum.backward()
        assert gpu.take_waits() == []
        spread.module.zero_grad()
    first, same_round, second, again = drawn
    assert (same_round, again) == ({}, {})
    del first["_copy_own_part"]  # of the reference's weights, once
    for reads in (first, second):
        assert 0 < reads.pop("_generate") <= 4, "one for each token of the longest completion"
        assert reads == {"_texts": 3, "add": 2, "_judge": 1, "_roll_out": 1, "read": 1, "write": 1}
    resumed = make_workload(config, context)  # in the middle of the round
    waits = []
    for _ in range(2):
        resumed.next_batch(spread.model, Cursor(12, 4))
        waits.append([place.rpartition(" ")[2] for _, place in gpu.take_waits()])
    assert waits == [["read"], []]


def test_memory_that_cannot_be_page_locked_is_copied_all_the_same(
    gpu: FakeGpu, capfd: pytest.CaptureFixture[str]
) -> None:
    gpu.refuse_pinning = True
    stage = StagingArea()
    stage.prepare(1000, CUDA)
    planner = SavePlanner(0, 1)
    module = nn.Linear(4, 2)
    source: dict[str, Tensor] = {"x": GpuTensor(torch.arange(6.0), gpu)}
    sources = planner.plan(module, None, {}, source)
    state = stage.stage(sources, planner.layout)
    assert state.copied is not None
    state.copied.synchronize()
    copied = stage._views(0, planner.layout)[
        [entry.name for entry in planner.layout.items].index("x")
    ]
    assert copied.tolist() == [0, 1, 2, 3, 4, 5]
    said = capfd.readouterr().err
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == -1:
        allowed = "unlimited"
    else:
        allowed = f"{limit // 1024} KiB"
    assert (
        "are not page-locked, so saves hold up training: cudaHostRegister failed with error 2; "
        f"ulimit -l is {allowed}" in said
    )
    assert threading.current_thread().name not in gpu.threads and set(gpu.threads) == {"staging"}
    assert gpu.errors and threading.get_ident() not in gpu.errors, (
        "torch would raise it at this thread's next call"
    )
    stage.close()


@pytest.mark.parametrize("version", ["", "memory"])
def test_no_more_is_page_locked_than_a_container_has(
    gpu: FakeGpu,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    version: str,
) -> None:
    """What is left of a container's memory decides, and page-locking happens in the background,
    before a save.
    """
    limit, use, (cached, _) = process._CGROUP_FILES[version]
    folder = tmp_path / version
    folder.mkdir(exist_ok=True)
    for name, text in (
        (limit, f"{2**30}"),
        (use, f"{2**30 - 2**20}"),
        ("memory.stat", f"{cached} {2**20}\nanon 5"),
    ):
        (folder / name).write_text(text)
    monkeypatch.setattr(process, "_CGROUPS", tmp_path)
    assert process.host_bytes_left() == 2**21, "1 MiB is unused, and 1 MiB is page cache"
    for size, locked in ((2**21, False), (2**20, True)):
        stage = StagingArea()
        stage.prepare(size, CUDA)
        for buffer in stage._buffers:
            buffer.join()
        assert len(gpu.pinned) == (2 if locked else 0)
        assert (
            "it would take more than half of the free memory" in capfd.readouterr().err
        ) is not locked
        stage.close()
    assert set(gpu.threads) == {"staging"} and not gpu.pinned


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    ],
)
def test_memory_that_runs_out_in_the_optimizer_splits_the_batch(gpu: FakeGpu, message: str) -> None:
    assert is_out_of_memory(RuntimeError(message)) and not is_out_of_memory(
        RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")
    )
    trainer, events = make_trainer(make_config(steps=4, every=100))
    take_step = trainer.optimizer.step
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == 2:
            raise RuntimeError(message)
        take_step()

    trainer.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(MicroBatchTooLarge, match="out of memory in one of 1 micro-batches"):
        train(trainer)
    assert [data["accumulation"] for name, data in events if name == "guard"] == [2]


@pytest.mark.parametrize(("response", "again"), [("split", False), ("stop", True)])
def test_memory_that_runs_out_leaves_a_snapshot_with_the_job(
    gpu: FakeGpu, tmp_path: Path, response: str, again: bool
) -> None:
    """Allocations are recorded from the job's first such error on."""
    trainer, events = make_trainer(
        make_config(steps=4, every=100, out_of_memory=response, memory_history=500)
    )
    overrides = {"gradient_accumulation_steps": 2} if again else {}
    spec = replace(job_spec(tmp_path), overrides=overrides)
    recorded = (500, "python") if again else None
    session = trainer.session
    keep = record_memory(spec, trainer.config, session.gang, session.reporter)
    guards = replace(session.guards, keep_snapshot=keep)
    trainer = replace(trainer, session=replace(session, guards=guards))
    assert gpu.recorded == recorded

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.optimizer.step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(MicroBatchTooLarge if response == "split" else torch.OutOfMemoryError):
        train(trainer)
    (kept,) = tmp_path.rglob("*.pickle")
    assert (
        kept.relative_to(tmp_path).as_posix()
        == "jobs/one/profiles/000003-abc/rank-0-memory-step-1.pickle"
    )
    assert pickle.loads(kept.read_bytes())["recorded"] == recorded
    said = [data["message"] for name, data in events if name == "notice"]
    assert said == [f"rank 0, step 1: out of memory; open {kept} in pytorch.org/memory_viz"]
    place: dict[str, Any] = {
        "job": "one",
        "run": "1",
        "attempt": 0,
        "generation": 3,
        "node": 0,
        "rank": 0,
        "step": 1,
    }
    notice = Event(name="notice", t_wall=1.0, t_mono=1.0, data={"message": said[0]}, **place)
    assert str(kept) in list_notable_events([notice])[0]["text"], "the report's page names it"
    trainer.session.reporter.close()
    assert gpu.recorded is None
    record_memory(spec, trainer.config, Gang(), trainer.session.reporter)(2)
    assert [*tmp_path.rglob("*.pickle")] == [kept], "of a CPU there is none"


@pytest.mark.parametrize("step", [2, 4])
def test_the_memory_of_a_chosen_step_is_recorded_and_kept_with_the_job(
    gpu: FakeGpu, tmp_path: Path, step: int
) -> None:
    """Also of the last step, after which no other begins."""
    config = make_config(steps=4, every=100, memory_history=500)
    config = config.changed("training", memory_snapshot_step=step)
    trainer, events = make_trainer(config)
    reporter = trainer.session.reporter
    recorded: dict[int, Any] = {}
    watches = make_step_watches(job_spec(tmp_path), config, trainer.session.gang, reporter)

    def note(number: int) -> None:
        recorded[number] = gpu.recorded

    train(replace(trainer, on_step=[*watches, note]))
    reporter.close()
    assert [number for number, state in recorded.items() if state] == [step]
    assert recorded[step] == (500, "python") and gpu.recorded is None
    (kept,) = tmp_path.rglob("*.pickle")
    assert kept.name == f"rank-0-memory-step-{step}.pickle"
    assert pickle.loads(kept.read_bytes())["recorded"] == (500, "python")
    said = [data["message"] for name, data in events if name == "notice"]
    assert said == [f"rank 0, step {step}: memory snapshot; open {kept} in pytorch.org/memory_viz"]


def test_a_memory_snapshot_of_a_step_that_never_comes_is_told(gpu: FakeGpu, tmp_path: Path) -> None:
    config = make_config(steps=3, every=100).changed("training", memory_snapshot_step=9)
    trainer, events = make_trainer(config)
    reporter = trainer.session.reporter
    watches = make_step_watches(job_spec(tmp_path), config, trainer.session.gang, reporter)
    train(replace(trainer, on_step=watches))
    reporter.close()
    assert [data["message"] for name, data in events if name == "notice"] == [
        "training.memory_snapshot_step 9: no snapshot, because training reached step 3 only; fix: "
        "an earlier step"
    ]
    assert not [*tmp_path.rglob("*.pickle")]


def make_memory_watch(
    folder: Path, *, steps: int, chosen: int, is_over: Callable[[], bool] | None = None
) -> tuple[Callable[[int], None], Reporter, list[str]]:
    """A watch of the memory of step `chosen`, its reporter, and the notices of both."""
    config = make_config(steps=steps, every=100).changed("training", memory_snapshot_step=chosen)
    notices: list[str] = []
    clock = Clock(lambda *_, **__: None)
    reporter = Reporter(clock, lambda name, **data: notices.append(data["message"]))
    gang = Gang(device=CUDA)
    (watch,) = make_step_watches(job_spec(folder), config, gang, reporter, is_over=is_over)
    return watch, reporter, notices


@pytest.mark.parametrize(
    ("last_step", "is_over", "told"),
    [(1000, None, False), (999, None, True), (240, lambda: True, True)],
)
def test_an_interrupted_start_says_nothing_of_a_snapshot_that_a_later_start_makes(
    gpu: FakeGpu, tmp_path: Path, last_step: int, is_over: Any, told: bool
) -> None:
    watch, reporter, notices = make_memory_watch(
        tmp_path, steps=last_step, chosen=1000, is_over=is_over
    )
    watch(499)
    watch(500)
    reporter.close()
    line = "no snapshot, because training reached step 500 only; fix: an earlier step"
    assert notices == ([f"training.memory_snapshot_step 1000: {line}"] if told else [])


def test_a_start_after_the_chosen_step_says_so_unless_an_earlier_one_made_the_snapshot(
    gpu: FakeGpu, tmp_path: Path
) -> None:
    torch.cuda.memory._record_memory_history(max_entries=1)  # by a script before it attached
    watch, reporter, notices = make_memory_watch(tmp_path, steps=100, chosen=2)
    watch(61)
    assert gpu.recorded is None
    reporter.close()
    assert notices == [
        "training.memory_snapshot_step 2: no snapshot, because this start began after it; fix: a "
        "later step"
    ]
    kept = tmp_path / "jobs/one/profiles/000001-earlier/rank-0-memory-step-2.pickle"
    kept.parent.mkdir(parents=True)
    kept.touch()
    watch, reporter, notices = make_memory_watch(tmp_path, steps=100, chosen=2)
    watch(61)
    reporter.close()
    assert notices == []


@pytest.mark.parametrize("attaches", [False, True])
def test_the_memory_of_a_scripts_first_step_is_recorded_from_its_first_use_of_the_gpu(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attaches: bool
) -> None:
    """It was recorded from the second step on, so that the first had no snapshot."""
    uses = [False]
    queued: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: uses[0])
    monkeypatch.setattr(torch.cuda, "_queued_calls", queued)
    config = RunConfig.model_validate({"training": {"memory_snapshot_step": 1}})
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    recorded = []
    with profile_script(replace(job_spec(tmp_path), config=config), lambda: attaches):
        for call, _ in queued:
            call()
        uses[0] = True
        for _ in range(3):
            recorded.append(bool(gpu.recorded))
            optimizer.step()
    if attaches:
        assert not [*tmp_path.rglob("*.pickle")], "its job keeps them"
    else:
        assert recorded == [True, False, False]
        (kept,) = tmp_path.rglob("*.pickle")
        assert pickle.loads(kept.read_bytes())["recorded"] == (20_000, "python")


def test_peaks_of_a_gpus_memory_are_reported_when_they_grow_beside_the_plans(
    gpu: FakeGpu,
) -> None:
    trainer, events = make_trainer(make_config(steps=6, every=100))
    draw = trainer.workload.next_batch

    def next_batch(model: nn.Module, cursor: Cursor) -> Any:
        gpu.peak_bytes = (5 if cursor.first >= 24 else 3) * GIB  # from the fourth step on
        return draw(model, cursor)

    trainer.workload.next_batch = next_batch  # type: ignore[method-assign]
    train(trainer)
    told = [data for name, data in events if name == "gpu_memory"]
    assert [data["allocated_bytes"] // GIB for data in told] == [3, 5]
    assert [data["reserved_bytes"] // GIB for data in told] == [4, 6]

    def peak(generation: int, rank: int, data: dict) -> Event:
        return Event(
            name="gpu_memory",
            job="one",
            run="1",
            attempt=0,
            node=0,
            step=1,
            generation=generation,
            rank=rank,
            t_wall=1.0,
            t_mono=1.0,
            data=data,
        )

    memory = [peak(1, 0, told[1]), peak(2, 0, told[0]), peak(2, 1, told[1]), peak(2, 1, told[0])]
    rows = list_gpu_memory(memory)
    assert [(row["rank"], row["allocated_bytes"] // GIB) for row in rows] == [(0, 3), (1, 5)]
    fit = {"parameters": 2 * GIB, "logits": GIB, "allowance": GIB}
    report = SimpleNamespace(
        actual={"gpu_memory": rows}, plan={"chosen": {"fit": fit, "gpu": "A100"}}
    )
    assert format_gpu_memory(report) == (  # type: ignore[arg-type]
        "peak 5.00 GiB allocated, 6.00 GiB reserved on rank 1; the plan estimated 3.00 GiB of "
        "tensors and 4.00 GiB in all on A100"
    )


def test_memory_that_another_process_still_holds_splits_nothing(gpu: FakeGpu) -> None:
    """The rank before was killed, and the driver has not freed its memory yet: the first step does
    not fit.
    """
    gpu.free_bytes = 10 * GIB
    trainer, events = make_trainer(make_config(steps=4, every=100))

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.optimizer.step = step  # type: ignore[method-assign,assignment]
    with pytest.raises(TrainingError, match="other processes hold 68"):
        train(trainer)
    assert [name for name, _ in events if name == "guard"] == []


@pytest.fixture
def late_sync(gpu: FakeGpu) -> DeviceExchange:
    """The exchange of rank 0 with a rank whose row is always `OTHER`."""

    def gather(own: torch.Tensor) -> torch.Tensor:
        other = GpuTensor(torch.tensor(OTHER, dtype=torch.float64), gpu)
        other[0] = own[0]
        return torch.stack([own, other])

    return DeviceExchange(SimpleNamespace(world_size=2, device=CUDA, gather=gather))  # type: ignore[arg-type]


def on_gpu(gpu: FakeGpu, value: float) -> torch.Tensor:
    return GpuTensor(torch.tensor(value), gpu)


def test_a_device_exchange_is_read_in_order_and_one_step_late(
    gpu: FakeGpu, late_sync: DeviceExchange
) -> None:
    def send(step: float) -> list[float]:
        own = ROW._replace(step=step)
        return [
            float(value.cpu())
            for value in late_sync.send(own, on_gpu(gpu, 10.0 * step), on_gpu(gpu, 2.0 * step))
        ]

    assert late_sync.unread == 0
    for step in (1.0, 2.0):
        scale, norm = send(step)
        assert scale == 2 / 8.0
        assert norm == pytest.approx(2 / 8.0 * math.sqrt(2.0 * step + 7.0), rel=1e-15)
    assert late_sync.unread == 2
    for step in (1.0, 2.0, 3.0):
        own = ROW._replace(step=step, loss_sum=10.0 * step, square_sum=2.0 * step)
        assert late_sync.read().rows == [own, OTHER._replace(step=step)]
        assert late_sync.unread == 1
        send(step + 2)


def test_a_device_exchange_checks_the_rows_that_it_reads(
    gpu: FakeGpu, late_sync: DeviceExchange
) -> None:
    late_sync.send(ROW._replace(cursor=0.0), on_gpu(gpu, 1.0), on_gpu(gpu, 1.0))
    with pytest.raises(DivergenceError, match="ranks have gone apart"):
        late_sync.read()


def test_a_device_exchange_adds_up_the_own_time_of_whole_micro_batches(
    gpu: FakeGpu, late_sync: DeviceExchange
) -> None:
    def send(*, micro_batches: int) -> None:
        for _ in range(micro_batches):
            late_sync.begin_own()
            late_sync.end_own()
        late_sync.send(ROW, on_gpu(gpu, 1.0), on_gpu(gpu, 1.0))

    gpu.milliseconds = 500.0
    late_sync.end_own()  # of an evaluation, which has no begin
    assert late_sync.own_seconds == 0.0
    send(micro_batches=3)
    late_sync.begin_own()  # a micro-batch whose backward pass does not end on this rank
    send(micro_batches=1)
    own_seconds = []
    for _ in range(2):
        late_sync.read()
        own_seconds.append(late_sync.own_seconds)
    assert own_seconds == [1.5, 0.5]
