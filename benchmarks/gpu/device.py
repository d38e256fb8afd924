"""Lines of `ebbflow bench gpu` that are measured in one process on one device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.bench import EXPECTED, NO_RANGE, Bench, Row, judge, verdict
from ebbflow.cost.catalogue import Gpu, load_catalogue
from ebbflow.training.compat import all_gather_flat

# Bytes per second of a PCIe lane in one direction, by generation: transfer rate × coding (PCI-SIG
# base specifications).
_PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
_PINNED_SHARE = 0.6  # an assumption: packet headers and a shared root complex take the rest
# NVIDIA's GPUs reach 78 to 86 % of the sheet's bfloat16 peak with the best of many shapes
# (stas00/ml-engineering, compute/accelerator/README.md, maximum achievable matmul FLOPS). Three
# square sizes may miss the best shape.
_MATMUL_SHARE = 0.65
_COLLECTIVES = 5

# Their peaks are not those of the sheet of the same name
_OTHER_EDITIONS = {"PCIe", "PCIE", "NVL", "MIG"}


def describe_device() -> dict[str, Any]:
    """Describe the GPUs, for the other processes of the run, or return the `trouble` if torch
    cannot use them.
    """
    if not torch.cuda.is_available():
        return {
            "trouble": (
                f"torch {torch.__version__} sees no GPU (built for CUDA "
                f"{torch.version.cuda or 'none'})"
            )
        }
    own = torch.cuda.get_device_properties(0)
    if torch.cuda.is_bf16_supported(including_emulation=False):
        half = "bfloat16"
    else:
        half = "float16"
    return {
        "type": "cuda",
        "name": own.name,
        "count": torch.cuda.device_count(),
        "memory_bytes": own.total_memory,
        "capability": f"{own.major}.{own.minor}",
        "dtype": half,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[attr-defined]
    }


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def fastest_seconds(device: torch.device, call: Callable[[], object], *, seconds: float) -> float:
    """Return the duration of the fastest call within `seconds`, after one that warms up."""
    call()
    wait(device)
    best = float("inf")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        call()
        wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def published_peak(bench: Bench, dtype: str) -> tuple[float | None, str]:
    """Return the dense peak of the vendor's data sheet in FLOP/s, and its source; (None, "") if
    there is none.
    """
    gpu = catalogued_gpu(bench)
    if gpu is None:
        return (None, "")
    return (gpu.peak_flops(dtype), f"cost/gpus.csv: {gpu.source}")


def catalogued_gpu(bench: Bench) -> Gpu | None:
    words = set(bench.device["name"].replace("-", " ").split())
    if not bench.on_gpu or words & _OTHER_EDITIONS:
        return None
    gpus = {kind.gpu.name: kind.gpu for kind in load_catalogue().types}
    return next((gpu for name, gpu in gpus.items() if set(name.split()) <= words), None)


def measure_matmul(bench: Bench) -> list[Row]:
    """The speed of the fastest matrix product, of several sizes, in the precision that training
    uses.
    """
    device = bench.gang.device
    if bench.on_gpu:
        dtype = getattr(torch, bench.device["dtype"])
    else:
        dtype = torch.float32
    name = str(dtype).removeprefix("torch.")
    speeds = {}
    for size in (4096, 8192, 16384) if bench.on_gpu else (512,):
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        seconds = fastest_seconds(
            device, partial(torch.mm, left, right, out=out), seconds=1.0 if bench.on_gpu else 0.1
        )
        speeds[size] = 2.0 * size**3 / seconds
    best = max(speeds.values())
    bench.remember(matmul_flops_per_second=best)
    peak, source = published_peak(bench, name)
    return [
        Row(
            what=f"matrix product, {name}",
            measured=f"{best / 1e12:.3g} TFLOP/s",
            expected=f"{_MATMUL_SHARE * peak / 1e12:.3g} to {peak / 1e12:.3g} TFLOP/s"
            if peak
            else "",
            source=f"{source}; NVIDIA's GPUs reach 78 to 86 % of it (stas00/ml-engineering)"
            if source
            else "",
            verdict=judge(best, _MATMUL_SHARE * peak, peak) if peak else NO_RANGE,
            figures={
                "flops_per_second": best,
                "by_size": speeds,
                "published_flops_per_second": peak,
            },
        )
    ]


def measure_copies(bench: Bench) -> list[Row]:
    """Bytes per second between host and device, from pinned and from pageable memory; on a CPU
    within its memory.
    """
    device = bench.gang.device
    count = bench.size.copy_bytes
    there = torch.empty(count, dtype=torch.uint8, device=device)
    limit, source = _link_limit(device)
    seconds = 1.0 if bench.on_gpu else 0.1
    rows = []
    for pinned in (True, False) if bench.on_gpu else (False,):
        here = torch.ones(count, dtype=torch.uint8, pin_memory=pinned)
        up = count / fastest_seconds(
            device, partial(there.copy_, here, non_blocking=pinned), seconds=seconds
        )
        down = count / fastest_seconds(
            device, partial(here.copy_, there, non_blocking=pinned), seconds=seconds
        )
        if bench.on_gpu:
            kind = "pinned" if pinned else "pageable"
        else:
            kind = "within memory"
        bench.remember(**{f"{'pinned' if pinned else 'pageable'}_down_bytes_per_second": down})
        if pinned and limit:
            low = _PINNED_SHARE * limit
        else:
            low = None
        if limit is None:
            shown = ""
        elif low is None:
            shown = f"at most {limit / 1e9:.3g}"
        else:
            shown = f"{low / 1e9:.3g} to {limit / 1e9:.3g}"
        verdicts = [judge(speed, low, limit) for speed in (up, down)]
        rows.append(
            Row(
                what=f"copy host → device and back, {kind}",
                measured=f"{up / 1e9:.3g} and {down / 1e9:.3g} GB/s",
                expected=shown,
                source=source,
                verdict=next((verdict for verdict in verdicts if verdict != EXPECTED), EXPECTED),
                figures={
                    "up_bytes_per_second": up,
                    "down_bytes_per_second": down,
                    "link_bytes_per_second": limit,
                },
            )
        )
    return rows


def measure_collective_rank(bench: Bench) -> list[Row]:
    """One rank's part of `benchmarks.gpu.jobs.measure_collectives`: the same rows on all ranks.

    Collective.
    """
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    if bench.on_gpu:
        backend = "nccl"
        device = torch.device("cuda", rank % bench.device["count"])
        torch.cuda.set_device(device)
    else:
        backend = "gloo"
        device = torch.device("cpu")
    dist.init_process_group(backend, timeout=timedelta(seconds=120))
    own = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(own)
    right = {"all-reduce": own.eq(ranks * (ranks + 1) / 2).all().item()}
    gathered = torch.empty(ranks * 4, device=device)
    all_gather_flat(gathered, torch.full((4,), float(rank), device=device))
    right["all-gather"] = (
        gathered.view(ranks, 4).eq(torch.arange(float(ranks), device=device)[:, None]).all().item()
    )
    count = bench.size.copy_bytes // 4 // ranks * ranks
    part = torch.ones(count // ranks, device=device)
    whole = torch.ones(count, device=device)
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-reduce": (partial(dist.all_reduce, whole), 2 * (ranks - 1) / ranks),
        "all-gather": (partial(all_gather_flat, whole, part), (ranks - 1) / ranks),
    }
    rows = []
    for name, (call, factor) in calls.items():
        dist.barrier()
        call()
        wait(device)
        began = time.perf_counter()
        for _ in range(_COLLECTIVES):  # the same number on all ranks
            call()
        wait(device)
        seconds = (time.perf_counter() - began) / _COLLECTIVES
        speed = factor * 4 * count / seconds
        rows.append(
            Row(
                what=f"{name} of {ranks} ranks, {backend}",
                measured=(
                    f"{4 * count / 1e6:.3g} MB in {1e3 * seconds:.3g} ms, bus {speed / 1e9:.3g} "
                    "GB/s"
                ),
                expected="the sum of all ranks"
                if name == "all-reduce"
                else "each rank's part in its place",
                source="bus bandwidth as nccl-tests defines it",
                verdict=verdict(bool(right[name])),
                figures={
                    "bytes": 4 * count,
                    "seconds": seconds,
                    "bus_bytes_per_second": speed,
                    "right": right[name],
                },
            )
        )
    dist.destroy_process_group()
    return rows


def _link_limit(device: torch.device) -> tuple[float | None, str]:
    """Return the bytes per second of the GPU's PCIe link in one direction, by NVML; None if it is
    unknown.
    """
    if device.type != "cuda":
        return None, ""
    try:
        import pynvml

        pynvml.nvmlInit()
        own = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(own)
        width = pynvml.nvmlDeviceGetMaxPcieLinkWidth(own)
        return (
            _PCIE_LANE[generation] * width,
            f"PCIe {generation}.0 × {width}, PCI-SIG; at least {_PINNED_SHARE:.0%}: an assumption",
        )
    except Exception as error:
        return None, f"link unknown: {type(error).__name__}"
