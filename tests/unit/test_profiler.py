"""The tables of a profile, from a trace with the fields that Kineto records of NCCL's kernels."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.command import main
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import LedgerClass, read_events
from ebbflow.core.store import Store
from ebbflow.training.engine.profiler import (
    StepProfiler,
    format_lines,
    profile_script,
    summarize_trace,
)
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.reporter import Clock, Reporter


def profiled_job(name: str, config: RunConfig, folder: Path) -> WorkerSpec:
    return WorkerSpec(
        job=name,
        run="1",
        attempt=0,
        node=0,
        generation=1,
        generation_id="a",
        candidates=[],
        config=config,
        store_uri=str(folder),
        prepared={},
    )


def kernel(name: str, start: float, length: float, stream: int = 7, **facts: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": length,
        "args": facts,
    }


def collective(
    name: str, sizes: tuple[int, int], dtype: str, ranks: int, group: str
) -> dict[str, Any]:
    facts = {
        "Collective name": name,
        "In msg nelems": sizes[0],
        "Out msg nelems": sizes[1],
        "dtype": dtype,
    }
    return {**facts, "Group size": ranks, "Process Group Description": group}


GATHER = collective("_allgather_base", (1_000_000, 8_000_000), "BFloat16", 8, "shard")
REDUCE = collective("allreduce", (2_000_000, 2_000_000), "Float", 2, "replicate")
TRACE = [
    {"ph": "M", "name": "process_name", "pid": 0},
    {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": 0,
        "dur": 900,
        "args": {},
    },
    kernel(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 100, 20, **GATHER
    ),
    kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", 200, 100, 20, **REDUCE),
    kernel(
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 400, 100, 20, **GATHER
    ),
    # Half of the first gather, half of the reduction
    kernel("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 50, 200),
    kernel("void flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", 300, 50),
    kernel("triton_poi_fused_add_gelu_3", 350, 50),
    kernel("Memcpy DtoH (Device -> Pinned)", 600, 25),
]


def test_kernels_are_classed_and_collectives_have_their_bus_bandwidth() -> None:
    found = summarize_trace(TRACE, None)
    assert found["classes"] == pytest.approx(
        {
            "communication": 300e-6,
            "matrix products": 200e-6,
            "attention": 50e-6,
            "elementwise": 50e-6,
            "copies": 25e-6,
        }
    )
    gather, reduce = found["collectives"]
    assert (gather["name"], gather["group"], gather["ranks"], gather["calls"]) == (
        "allgather",
        "shard",
        8,
        2,
    )
    # Two of 8 million elements of 2 bytes in 200 µs are 160 GB/s; of each byte, 7/8 pass through a
    # link.
    assert gather["bytes"] == 32e6 and gather["bus_bytes_per_second"] == pytest.approx(
        160e9 * 7 / 8
    )
    assert (reduce["name"], reduce["bytes"]) == ("allreduce", 8e6)
    assert reduce["bus_bytes_per_second"] == pytest.approx(80e9)  # 2 (n - 1) / n is 1 for two ranks
    assert found["overlap_share"] == pytest.approx(100 / 300)


def test_an_operator_inside_another_counts_once() -> None:
    nested = [
        {
            "ph": "X",
            "cat": "cpu_op",
            "name": name,
            "pid": 1,
            "tid": 1,
            "ts": ts,
            "dur": dur,
            "args": {},
        }
        for name, ts, dur in (
            ("aten::linear", 0, 100),
            ("aten::addmm", 10, 60),
            ("aten::copy_", 20, 10),
        )
    ]
    found = summarize_trace(nested, 1)
    assert found["classes"] == pytest.approx({"matrix products": 90e-6, "copies": 10e-6})
    assert found["collectives"] == [] and found["overlap_share"] is None


def test_each_class_and_collective_has_a_line_per_step() -> None:
    lines = format_lines(summarize_trace(TRACE, None), 2)
    assert lines["· matrix products"] == "0.10 ms per step, 32.0 %"
    assert (
        lines["· allgather, 8 ranks (shard)"]
        == "16.00 MB in 0.10 ms per step, 140.00 GB/s on the bus"
    )
    assert lines["· overlapped"] == "33.3 % of the collectives' time"
    nothing = {"classes": {}, "collectives": [], "overlap_share": None}
    assert format_lines(nothing, 1) == {}


@pytest.mark.parametrize("first", [2, 9])
def test_a_script_that_does_not_attach_is_profiled_by_its_first_optimizer(
    first: int, tmp_path: Path
) -> None:
    config = RunConfig.model_validate({"training": {"profile_from": first, "profile_steps": 2}})
    spec = profiled_job("plain", config, tmp_path)
    model = torch.nn.Linear(8, 8)
    other = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (model, other)]
    with profile_script(spec, lambda: False):
        for _ in range(5):
            model(torch.ones(4, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    events = read_events(Store.open(str(tmp_path)).sub("jobs/plain"))
    found = [event for event in events if event.name in ("profile", "notice")]
    if first == 9:
        assert [event.data["message"].partition(";")[0] for event in found] == [
            "training.profile_from 9: training reached step 6 only, so nothing was profiled"
        ]
        return
    (event,) = found
    assert (event.data["first"], event.data["last"]) == (2, 3)
    trace = json.loads(gzip.decompress(Path(event.data["trace"]).read_bytes()))
    assert sum(traced["name"] == "aten::addmm" for traced in trace["traceEvents"]) == 2


@pytest.mark.parametrize("profiled", ["profile_from", "memory_snapshot_step"])
@pytest.mark.parametrize("error", [SystemExit(0), SystemExit(3), ValueError("a bad batch")])
def test_a_script_that_fails_before_the_chosen_step_may_reach_it_in_its_next_start(
    tmp_path: Path, profiled: str, error: BaseException
) -> None:
    config = RunConfig.model_validate({"training": {profiled: 9}})
    spec = profiled_job("plain", config, tmp_path)
    with pytest.raises(type(error)), profile_script(spec, lambda: False):
        raise error
    events = read_events(Store.open(str(tmp_path)).sub("jobs/plain"))
    told = [event.data["message"] for event in events if event.name == "notice"]
    assert len(told) == (getattr(error, "code", 1) == 0)
    assert all("an earlier step" in message for message in told)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_memory_snapshot_without_a_gpu_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: int
) -> None:
    config = RunConfig.model_validate({"training": {"memory_snapshot_step": step}})
    spec = profiled_job("plain", config, tmp_path)
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with profile_script(spec, lambda: False):
        for _ in range(4):
            optimizer.step()
    expected = (
        f"training.memory_snapshot_step {step}: no snapshot, because these ranks use no GPU, and torch "
        "records CUDA's memory alone"
    )
    events = read_events(Store.open(str(tmp_path)).sub("jobs/plain"))
    assert [event.data.get("message") for event in events] == [expected]
    assert capsys.readouterr().out.splitlines() == [expected]


def test_the_profilers_own_time_is_a_class_of_its_own(tmp_path: Path) -> None:
    """It was booked as checkpoint stall, 36 % of the paid time of a short job."""
    config = RunConfig.model_validate({"training": {"profile_from": 1, "profile_steps": 1}})
    spec = profiled_job("profiled", config, tmp_path)
    clock = Clock(lambda *_, **__: None)
    reporter = Reporter(clock, lambda *_, **__: None)
    profiler = StepProfiler(spec, config, Gang(), reporter, never_comes=lambda step: False)
    clock.enter(LedgerClass.USEFUL_STEP)

    profiler.reach(1)
    torch.ones(4, 4).sum()
    profiler.reach(2)

    seconds = clock.take()
    assert seconds[LedgerClass.PROFILING] > 0
    assert LedgerClass.CHECKPOINT_STALL not in seconds


@pytest.mark.parametrize(
    "given",
    [["--profile"], ["--profile", "15:10"], ["--profile", "0:3"], ["a.py", "--profile", "x"]],
)
def test_steps_that_cannot_be_profiled_are_refused_in_one_line(
    given: list[str], capsys: Any
) -> None:
    assert main(["run", *given]) == 2
    word = given[-1] if given[-1] != "--profile" else ""
    assert capsys.readouterr().err == (
        "ebbflow run: --profile takes FIRST:LAST, the steps to profile, such as 10:15, and not "
        f"{word!r}\n"
    )


@pytest.mark.parametrize("given", [["--memory-snapshot"], ["--memory-snapshot", "0"]])
def test_a_memory_snapshot_of_no_step_is_refused_in_one_line(given: list[str], capsys: Any) -> None:
    assert main(["run", *given]) == 2
    assert capsys.readouterr().err == (
        f"ebbflow run: --memory-snapshot takes a step, from 1 on, and not {''.join(given[1:])!r}\n"
    )
