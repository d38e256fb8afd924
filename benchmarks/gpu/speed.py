"""Lines of `ebbflow bench gpu` that run the engine's loop on one device: speed, memory, waits of
the host, saves.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import HIGH, LOW, NO_RANGE, NOT_RUN, Bench, Row, judge
from benchmarks.gpu.device import catalogued_gpu, published_peak
from benchmarks.gpu.loop_process import LoopProcess
from benchmarks.training.engine_rank import UNLIMITED, EngineLoop
from benchmarks.training.laps import Contestant, run_laps
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import COMMIT, STEP, Event
from ebbflow.core.footprint import causal_lm_shape, commit_bytes, rank_bytes
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import available_bytes
from ebbflow.core.store import Store
from ebbflow.cost.plan.throughput import (
    MFU_PRIOR,
    RECOMPUTE_FACTOR,
    UNMEASURED_LOG_DEVIATION,
    gib_text,
    large_model_mfu,
    memory_fit,
)
from ebbflow.training.checkpoint import open_generation
from ebbflow.training.data import SampleOrder, open_tokens
from ebbflow.training.launch.messages import WorkerSpec

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "compiled": {"compile": True},
    "recomputed": {"recompute": "full"},
}
_MOST_SAMPLES = 32
_USABLE_SHARE = 0.9  # of the GPU's memory, for the largest batch that is tried
_MEMORY_BAND = 0.15  # of the estimate
_TARGET_RATIO = 0.98
_TARGET_BUSY = 0.9
_TARGET_MFU = {("H100", "1.3B", "compiled"): 0.45}
_SOURCE_TARGET = "a target of this project"
# Calls of CUDA's runtime that hold the host until the device has done its work.
_BLOCKING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
_PROFILED_AFTER = 3  # steps
_SAVES = 6
_COLD_SAVES = 2  # one for each staging buffer


def open_engine(bench: Bench, name: str, config: RunConfig, **options: Any) -> EngineLoop:
    """Return the engine of a rank alone, as a worker assembles it. options: of `EngineLoop`."""
    generation = open_generation(
        Store.open(config.store).sub(job_prefix(name)), run="bench", attempt=0
    )
    spec = WorkerSpec(
        job=name,
        run="bench",
        attempt=0,
        node=0,
        generation=generation.number,
        generation_id=generation.id,
        candidates=[],
        config=config,
        store_uri=config.store,
        prepared=bench.prepared,
        terms=UNLIMITED,
        colocated_ranks=1,
    )
    return EngineLoop(spec, bench.gang, bench.folder, **options)


def fitting_samples(
    bench: Bench, model: str, parallel: dict[str, Any], *, share: float = 1.0
) -> tuple[int, str]:
    """Return the most samples of a step that the plan expects to fit into `share` of the device's
    memory.

    Returns:
        The samples, a power of two; and if not even one fits, 0 and why.
    """
    if not bench.on_gpu:
        return 4, ""
    usable = _USABLE_SHARE * share * bench.device["memory_bytes"]
    samples = _MOST_SAMPLES
    while (
        samples
        and memory_fit(bench.config(model, samples=samples, parallel=parallel), 1).total > usable
    ):
        samples //= 2
    needed = memory_fit(bench.config(model, samples=1, parallel=parallel), 1).total
    return samples, f"one sample needs {gib_text(needed)}, of {gib_text(int(usable))} usable"


def measure_speed(bench: Bench, model: str, variant: str) -> list[Row]:
    """Tokens per second, MFU and, on a GPU, peak memory of the engine with an option of `VARIANTS`."""
    parallel = VARIANTS[variant]
    what = f"{model}, {variant}"
    samples, why = fitting_samples(bench, model, parallel)
    if not samples:
        return [Row(what=what, measured=why, verdict=NOT_RUN)]
    config = bench.config(model, samples=samples, parallel=parallel)
    device = bench.gang.device
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    engine = open_engine(bench, f"{model}-{variant}", config)
    try:
        laps = run_laps({"engine": engine}, rounds=bench.size.rounds, steps=bench.size.steps)[
            "engine"
        ]
        memory = [_memory_row(bench, what, config, samples)] if bench.on_gpu else []
    finally:
        engine.close()
    seconds = statistics.median(lap["seconds"] for lap in laps) / bench.size.steps
    flops = samples * causal_lm_shape(config.model).flops_per_sample
    peak, source = published_peak(bench, config.fsdp.compute_dtype)
    divisor = peak or bench.recall().get("matmul_flops_per_second")
    if divisor:
        mfu = flops / seconds / divisor
    else:
        mfu = None
    if peak:
        low, high, why = mfu_range(bench, model, variant)
    else:
        low = None
        high = None
        why = ""
    tokens = samples * config.model.sequence_length / seconds
    if mfu is None:
        share = ""
    else:
        share = f", MFU {100 * mfu:.1f} % of the {'data sheet' if peak else 'measured peak'}"
    figures = {
        "tokens_per_second": tokens,
        "seconds_per_step": seconds,
        "mfu": mfu,
        "peak_source": source or "the matrix product of this run",
        "samples": samples,
        "parameters": causal_lm_shape(config.model).parameters,
        "loss": laps[-1]["loss"],
    }
    row = Row(
        what=what,
        measured=f"{tokens:,.0f} tokens/s{share}",
        expected=f"MFU {100 * low:.0f} to {100 * high:.0f} %"
        if low is not None and high is not None
        else "",
        source=why,
        verdict=judge(mfu, low, high) if mfu is not None else NO_RANGE,
        figures=figures,
    )
    return [row, *memory]


def mfu_range(bench: Bench, model: str, variant: str) -> tuple[float, float, str]:
    """Return the range of the plan's own prior, at two standard deviations, and its source."""
    gpu = catalogued_gpu(bench)
    peak = None if gpu is None else gpu.peak_flops("bfloat16")
    if gpu is None or peak is None:
        prior = MFU_PRIOR
    else:
        prior = large_model_mfu(gpu, peak)
    prior /= RECOMPUTE_FACTOR[VARIANTS[variant].get("recompute", "none")]
    low, high = (prior * math.exp(sign * 2 * UNMEASURED_LOG_DEVIATION) for sign in (-1, 1))
    target = _TARGET_MFU.get((gpu.name if gpu else "", model, variant), 0.0)
    source = "the plan's prior ± 2 log deviations, cost/plan/throughput.py"
    return (
        max(low, target),
        min(high, 1.0),
        f"{source}; at least {target:g}: {_SOURCE_TARGET}" if target else source,
    )


def measure_ratio(bench: Bench) -> list[Row]:
    """Compare the engine's speed with that of a bare loop in a process of its own, in turn; both
    compiled on a GPU.
    """
    model = bench.size.models[0]
    parallel = {"mode": "ddp", "compile": bench.on_gpu}
    # Both are on the device at once
    samples, why = fitting_samples(bench, model, parallel, share=0.4)
    what = f"{model}: engine ÷ bare{' compiled' if bench.on_gpu else ''} loop"
    if not samples:
        return [Row(what=what, measured=why, verdict=NOT_RUN)]
    config = bench.config(model, samples=samples, parallel=parallel)
    tokens = open_tokens(Store.open(config.store), bench.prepared["fingerprint"]).train
    order = SampleOrder((tokens.size - 1) // config.model.sequence_length, config.training.seed)
    windows = order.window(0, samples * bench.size.steps * (bench.size.rounds + 1))
    engine = open_engine(bench, "ratio", config)
    bare = LoopProcess(config, bench.gang.device, bench.prepared["fingerprint"], windows)
    contestants: dict[str, Contestant] = {"engine": engine, "bare": bare}
    try:
        laps = run_laps(contestants, rounds=bench.size.rounds, steps=bench.size.steps)
    finally:
        bare.close()
        engine.close()
    ratios = [
        bare_lap["seconds"] / engine_lap["seconds"]
        for engine_lap, bare_lap in zip(laps["engine"], laps["bare"], strict=True)
    ]
    ratio = statistics.median(ratios)
    losses = {name: of_name[-1]["loss"] for name, of_name in laps.items()}
    return [
        Row(
            what=what,
            measured=f"{ratio:.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
            expected=f"at least {_TARGET_RATIO}" if bench.on_gpu else "",
            source=_SOURCE_TARGET if bench.on_gpu else "",
            verdict=judge(ratio, _TARGET_RATIO, None) if bench.on_gpu else NO_RANGE,
            figures={"ratio": ratio, "ratios": ratios, "samples": samples, "losses": losses},
        )
    ]


def measure_waits(bench: Bench) -> list[Row]:
    """Count the calls per step that hold the host, and the share of the time in which the device is
    busy.
    """
    model = bench.size.models[0]
    samples, why = fitting_samples(bench, model, {})
    what = f"{model}: waits of the host"
    if not samples:
        return [Row(what=what, measured=why, verdict=NOT_RUN)]
    steps = bench.size.steps
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if bench.on_gpu else [])]
    profiler = profile(activities=activities)
    seconds = [0.0]

    def watch(event: Event) -> None:
        if event.name == STEP and event.step == _PROFILED_AFTER:
            profiler.start()
            seconds[0] = time.monotonic()
        elif event.name == STEP and event.step == _PROFILED_AFTER + steps:
            seconds[0] = time.monotonic() - seconds[0]
            profiler.stop()

    engine = open_engine(bench, "waits", bench.config(model, samples=samples), watch=watch)
    try:
        engine.run(_PROFILED_AFTER + steps + 2)
    finally:
        engine.close()
    found = list(profiler.events() or ())
    if not bench.on_gpu:
        reads = sum(event.name == "aten::_local_scalar_dense" for event in found) / steps
        busy = sum(event.self_cpu_time_total for event in found) / 1e6 / seconds[0]
        figures = {"reads_per_step": reads, "busy_share": busy}
        shown = f"{reads:.1f} reads of a tensor per step, operators {100 * busy:.0f} % of the time"
        return [Row(what=what, measured=shown, figures=figures)]
    blocking = (
        sum(event.name.startswith(_BLOCKING) and "Async" not in event.name for event in found)
        / steps
    )
    late = sum(event.name == "cudaEventSynchronize" for event in found) / steps
    on_gpu = [event for event in found if str(event.device_type).endswith("CUDA")]
    # Which span the gaps
    kernels = [event.time_range for event in on_gpu if not event.is_user_annotation]
    busy = busy_share((kernel.start, kernel.end) for kernel in kernels)
    if busy >= _TARGET_BUSY:
        right = judge(blocking, None, 0.0)
    else:
        right = LOW
    return [
        Row(
            what=what,
            measured=(
                f"{blocking:.1f} blocking and {late:.1f} late per step, GPU busy {100 * busy:.0f} %"
            ),
            expected=f"0 blocking, busy at least {100 * _TARGET_BUSY:.0f} %",
            source=f"{_SOURCE_TARGET}; late: the step before is read, training/step_sync.py",
            verdict=right,
            figures={"blocking_per_step": blocking, "late_per_step": late, "busy_share": busy},
        )
    ]


def busy_share(spans: Iterable[tuple[float, float]]) -> float:
    """Return the share of the time from the first span's begin to the last one's end that any span
    covers.
    """
    ordered = sorted(spans)
    if not ordered:
        return 0.0
    covered = 0.0
    reached = ordered[0][0]
    for begin, end in ordered:
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered / max(reached - ordered[0][0], 1e-9)


def measure_save(bench: Bench) -> list[Row]:
    """Save the state while training goes on: the stall, what a save costs the steps, and when it is
    durable.
    """
    fitting = [name for name in bench.size.models if not _why_no_save(bench, name)]
    if not fitting:
        why = _why_no_save(bench, bench.size.models[0])
        return [Row(what="save beside training", measured=why, verdict=NOT_RUN)]
    model = fitting[-1]
    every = bench.size.save_steps
    samples = min(4, fitting_samples(bench, model, {})[0])
    checkpoint = {"interval_steps": every, "keep_last": 1, "when_busy": "wait"}
    events: list[Event] = []
    config = bench.config(model, samples=samples, checkpoint=checkpoint)
    engine = open_engine(bench, "save", config, saves=True, watch=events.append)
    try:
        engine.run(_SAVES * every + 1)
    finally:
        engine.close()
    at = {event.step or 0: event.t_mono for event in events if event.name == STEP}
    lengths = [at[step] - at[step - 1] for step in range(every // 2 + 1, every)]
    plain = statistics.median(lengths) * every
    warm = range((_COLD_SAVES + 1) * every, _SAVES * every, every)
    extra = statistics.median(at[step + every] - at[step] - plain for step in warm)
    commits = [event.data for event in events if event.name == COMMIT]
    size = commits[-1]["bytes"]
    stall = commits[-1]["stall_seconds"]
    durable = commits[-1]["seconds"]
    copy = bench.recall().get("pinned_down_bytes_per_second")
    if copy:
        limit = 1.25 * size / copy + 0.1
    else:
        limit = None
    figures = {
        "bytes": size,
        "stall_seconds": stall,
        "extra_seconds": extra,
        "durable_seconds": durable,
        "hidden_share": 1 - extra / durable,
        "commits": len(commits),
        "copy_bytes_per_second": copy,
    }
    return [
        Row(
            what=f"save beside training, {size / 1e9:.3g} GB",
            measured=(
                f"stall {1e3 * stall:.3g} ms, costs {1e3 * extra:.3g} ms, durable after "
                f"{durable:.3g} s"
            ),
            expected=f"costs at most {1e3 * limit:.3g} ms" if limit else "",
            source="1.25 × the pinned copy of this run + 0.1 s: nothing overlaps" if limit else "",
            verdict=judge(extra, None, limit),
            figures=figures,
        )
    ]


def _memory_row(bench: Bench, what: str, config: RunConfig, samples: int) -> Row:
    """Compare the peak of all tensors, and all memory that is taken, with the plan's estimates."""
    shape = causal_lm_shape(config.model)
    most = memory_fit(config, 1).total
    estimate = rank_bytes(config, shape, ranks=1, samples=samples, fused_norms=True).total
    device = bench.gang.device
    tensors = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device) + reserved
    if taken > most:
        verdict = HIGH
    else:
        verdict = judge(tensors / estimate, 1 - _MEMORY_BAND, 1 + _MEMORY_BAND)
    return Row(
        what=f"memory of {what}",
        measured=f"{gib_text(tensors)} of tensors, {gib_text(taken)} in all",
        expected=(
            f"tensors {gib_text(estimate)} ± {_MEMORY_BAND:.0%}, at most {gib_text(most)} in all"
        ),
        source="the plan's estimate, core/footprint.py",
        verdict=verdict,
        figures={
            "estimated_tensor_bytes": estimate,
            "estimated_bytes": most,
            "samples": samples,
            "tensor_bytes": tensors,
            "bytes": taken,
        },
    )


def _why_no_save(bench: Bench, model: str) -> str:
    """Return why a model's state cannot be saved here; "" if it can."""
    config = bench.config(model, samples=1)
    size = commit_bytes(config, causal_lm_shape(config.model))
    memory = available_bytes()
    disk = shutil.disk_usage(bench.folder).free
    if memory is not None and 3 * size > memory:
        return (
            f"{model}: two staging buffers of {gib_text(size)} need more than {gib_text(memory)} "
            "of main memory"
        )
    if 3 * size > disk:
        return f"{model}: commits of {gib_text(size)} need more than {gib_text(disk)} of disk"
    if fitting_samples(bench, model, {})[0]:
        return ""
    return fitting_samples(bench, model, {})[1]
