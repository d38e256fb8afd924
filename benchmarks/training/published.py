"""`ebbflow bench published`: the plan's memory and speed beside published figures.

Nothing is measured here: each figure on the right is a source's own, each on the left is the plan's
estimate for the same model, batch and GPUs (`cost.plan.throughput`). Where a source does not name a
setting, `_SOURCES` says what was taken. torchtitan's selective recomputation keeps every second
matrix product, where Ebbflow's keeps all: the memory of its runs is that of the plan's formula with
that many products.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.tables import table
from ebbflow.core.config.device_settings import settle_for_device
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.grouping import group_by_key
from ebbflow.cost.catalogue import InstanceType, load_catalogue
from ebbflow.cost.plan.throughput import (
    CONTEXT_BYTES,
    GIB,
    Roofline,
    estimate_roofline,
    estimate_throughput,
    memory_fit,
)

_SOURCES = {
    "M": (
        "MosaicML LLM-Foundry, scripts/train/benchmarking/README.md, commit 061f2c7c; the plan "
        "is fitted to its rows on one node, so these errors are not those of a forecast"
    ),
    "T1": (
        "torchtitan, its page performance.md, commit 04133643; sequences of 8,192 (Llama 3) and "
        "4,096 (Llama 2)"
    ),
    "T2": (
        "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, commit 31a17bfd, tables 1 and "
        "3; H100 of 96 GB at 500 W; sequences of 8,192; memory as torchtitan reports it"
    ),
    "T3": "torchtitan, issue 929, comment of 2025-03-07: llama3_8b.toml, compiled; memory alone",
    "O": (
        "OLMo-core, README of release 1.4.0 on PyPI: H100; the number of GPUs and the batch are "
        "not stated: one node and two samples were taken"
    ),
    "T4": (
        "torchtitan, the same page, table 2, context parallel 1: sequences of 32,768, compiled, fp8; "
        "memory alone"
    ),
    "I": (
        "PyTorch blog, Maximizing training throughput using PyTorch FSDP, 2024-03-13: Llama 2 7B "
        "on 128 A100; nothing recomputed, since MFU and HFU are equal; two samples of 4,096 were "
        "taken"
    ),
}

_A40 = "p4d.24xlarge"
_A80 = "p4de.24xlarge"
_H100 = "p5.48xlarge"
_FOUNDRY = Path(__file__).with_name("llm_foundry.csv")
_FOUNDRY_TYPES = {"a100-40g": _A40, "a100-80g": _A80, "h100-80g": _H100}


@dataclass(frozen=True)
class PublishedRun:
    """A published figure and its setting."""

    source: str  # a key of `_SOURCES`
    model: str
    instance_type: str  # with the GPUs of the source
    nodes: int
    length: int  # tokens per sample
    samples: int  # per GPU and micro-batch
    micro_batches: int = 1
    recompute: str = "none"
    compiled: bool = False
    tokens_per_second: float | None = None  # per GPU; None: not published
    gib: float | None = None  # per GPU; None: not published


@dataclass(frozen=True)
class FoundryRun:
    """A run of LLM-Foundry's table."""

    model: str
    length: int
    gpus: int
    gpu: str
    samples: int
    micro_batches: int
    recompute: str
    tokens_per_second: float

    @property
    def was_fitted(self) -> bool:
        """Whether the plan's speed was fitted to this run and others (`fit_roofline`)."""
        fitted = ("MPT 760M", "MPT 1.3B", "MPT 3B", "MPT 7B", "MPT 13B", "MPT 30B")
        return self.gpus == 8 and self.model in fitted and self.length <= 8192


@dataclass(frozen=True)
class JudgedRun:
    """A run of LLM-Foundry, and what the plan at default settings says of it."""

    run: FoundryRun
    log_error: float  # of the estimated speed: log(estimated / published)
    needed_bytes: int
    has_bytes: int

    @property
    def is_refused(self) -> bool:
        return self.needed_bytes > self.has_bytes


@dataclass(frozen=True)
class RooflineFit:
    """Parameters of the plan's roofline (`Roofline.seconds`), and what was left by GPU."""

    peak_share: float
    bytes_per_flop: float
    runs: dict[str, int]
    deviation: dict[str, float]  # standard deviation of log(published / fitted)

    def render(self) -> str:
        left = ", ".join(
            f"{gpu} {count} runs, deviation {self.deviation[gpu]:.3f}"
            for gpu, count in self.runs.items()
        )
        return (
            f"fit: 1 / MFU = {self.peak_share:.3f} + {self.bytes_per_flop:.5f} × peak / bandwidth, "
            f"and {left}"
        )


RUNS = [
    PublishedRun("M", "MPT 125M", _A80, 1, 2048, 32, 2, "none", False, 141737),
    PublishedRun("M", "MPT 1.3B", _A80, 1, 2048, 14, 4, "none", False, 20513),
    PublishedRun("M", "MPT 7B", _A40, 1, 2048, 12, 4, "full", False, 3679),
    PublishedRun("M", "MPT 7B", _A80, 1, 2048, 6, 2, "none", False, 4641),
    PublishedRun("M", "MPT 13B", _A80, 1, 4096, 10, 3, "full", False, 2060),
    PublishedRun("M", "MPT 1.3B", _H100, 1, 2048, 14, 1, "none", False, 45455),
    PublishedRun("M", "MPT 7B", _H100, 1, 2048, 6, 1, "none", False, 10643),
    PublishedRun("M", "MPT 13B", _H100, 2, 2048, 2, 1, "none", False, 4767),
    PublishedRun("M", "MPT 70B", _H100, 8, 2048, 8, 4, "full", False, 1039),
    PublishedRun("M", "MPT 70B", _A80, 8, 2048, 8, 4, "full", False, 410),
    PublishedRun("T1", "Llama 3 8B", _A80, 8, 8192, 1, 1, "selective", False, 2973),
    PublishedRun("T1", "Llama 3 70B", _A80, 8, 8192, 1, 1, "full", False, 331),
    PublishedRun("T1", "Llama 2 13B", _A80, 8, 4096, 2, 1, "none", False, 2162),
    PublishedRun("T1", "Llama 2 13B", _A80, 8, 4096, 2, 1, "selective", False, 1904),
    PublishedRun("T1", "Llama 2 70B", _A80, 8, 4096, 2, 1, "full", False, 353),
    PublishedRun("T2", "Llama 3 8B", _H100, 1, 8192, 2, 1, "selective", False, 5762, 82.4),
    PublishedRun("T2", "Llama 3 8B", _H100, 1, 8192, 2, 1, "selective", True, 6667, 77.0),
    PublishedRun("T2", "Llama 3 8B", _H100, 16, 8192, 2, 1, "selective", False, 5605, 67.0),
    PublishedRun("T2", "Llama 3 8B", _H100, 16, 8192, 2, 1, "selective", True, 6514, 62.0),
    PublishedRun("T3", "Llama 3 8B", _H100, 1, 8192, 1, 1, "selective", True, None, 47.65),
    PublishedRun("T4", "Llama 3 8B", _H100, 1, 32768, 1, 1, "full", True, None, 83.9),
    PublishedRun("O", "OLMo 2 7B", _H100, 1, 4096, 2, 1, "none", True, 10000),
    PublishedRun("O", "OLMo 2 13B", _H100, 1, 4096, 2, 1, "none", True, 4600),
    PublishedRun("I", "Llama 2 7B", _A80, 16, 4096, 2, 1, "none", False, 3700),
]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench published", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    compared = [compare(run) for run in RUNS]
    errors = {kind: summarise(compared, kind) for kind in ("tokens_per_second", "gib")}
    foundry_runs = read_foundry_runs()
    fit = fit_roofline(foundry_runs)
    foundry = [judge_foundry_run(run) for run in foundry_runs]
    held_out = summarise_foundry(foundry)
    print(render(compared, errors))
    print(render_foundry(held_out))
    print(fit.render())
    if given.json is not None:
        found = {
            "kind": "estimated",
            "compared": compared,
            "errors": errors,
            "llm_foundry": held_out,
            "fit": asdict(fit),
        }
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def read_foundry_runs() -> list[FoundryRun]:
    with _FOUNDRY.open() as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return [
            FoundryRun(
                model=row["model"],
                length=int(row["length"]),
                gpus=int(row["gpus"]),
                gpu=row["gpu"],
                samples=int(row["samples"]),
                micro_batches=int(row["micro_batches"]),
                recompute=row["recompute"],
                tokens_per_second=float(row["tokens_per_second"]),
            )
            for row in rows
        ]


def judge_foundry_run(run: FoundryRun) -> JudgedRun:
    """Estimate a run with the defaults: the precision and the chunks of the loss are automatic."""
    kind = _foundry_type(run)
    config = _configure_foundry(run)
    shape = causal_lm_shape(config.model)
    speed = estimate_throughput(config, shape, kind, run.gpus // 8, 8)
    assert speed is not None
    return JudgedRun(
        run=run,
        log_error=math.log(speed.tokens_per_second / run.gpus / run.tokens_per_second),
        needed_bytes=memory_fit(config, run.gpus, shape).total,
        has_bytes=kind.gpu_memory_bytes,
    )


def fit_roofline(runs: list[FoundryRun]) -> RooflineFit:
    """Fit the two parameters of the plan's roofline to the runs that are to be fitted.

    The sum of squared log errors is minimised by Gauss-Newton steps.
    """
    fitted = [run for run in runs if run.was_fitted]
    rooflines = [_foundry_roofline(run) for run in fitted]
    seconds = np.array(
        [run.length * run.samples * run.micro_batches / run.tokens_per_second for run in fitted]
    )
    peak = np.array([line.peak_seconds for line in rooflines])
    slopes = np.stack([peak, peak * [line.flops_per_byte for line in rooflines]], axis=1)
    moved = np.array([line.moved_seconds for line in rooflines])
    parameters = np.array([1.0, 0.001])
    for _ in range(20):
        planned = slopes @ parameters + moved
        errors = np.log(seconds / planned)
        parameters += np.linalg.lstsq(slopes / planned[:, None], errors, rcond=None)[0]
    left = np.log(seconds / (slopes @ parameters + moved))
    by_gpu = group_by_key(
        (_foundry_type(run).gpu.name, error) for run, error in zip(fitted, left, strict=True)
    )
    return RooflineFit(
        peak_share=float(parameters[0]),
        bytes_per_flop=float(parameters[1]),
        runs={gpu: len(errors) for gpu, errors in by_gpu.items()},
        deviation={gpu: statistics.stdev(errors) for gpu, errors in by_gpu.items()},
    )


def summarise_foundry(judged: list[JudgedRun]) -> dict[str, Any]:
    """Return the refused runs, and bias and spread of the speed of the fitted and the other runs."""
    parts: dict[str, Any] = {}
    for name, wanted in (("fitted", True), ("held_out", False)):
        errors = [entry.log_error for entry in judged if entry.run.was_fitted is wanted]
        parts[name] = {
            "runs": len(errors),
            "bias": math.exp(statistics.mean(errors)) - 1,
            "spread": math.exp(statistics.stdev(errors)) - 1,
        }
    refused = [
        f"{entry.run.model}, {entry.run.gpus} {entry.run.gpu}, {entry.run.samples} × "
        f"{entry.run.length}: needs {entry.needed_bytes / GIB:.1f} of {entry.has_bytes / GIB:.1f} GiB"
        for entry in judged
        if entry.is_refused
    ]
    return {"runs": len(judged), "refused": refused, **parts}


def render_foundry(found: dict[str, Any]) -> str:
    lines = [f"\nLLM-Foundry, {found['runs']} runs at default settings:"]
    for name, label in (("fitted", "fitted"), ("held_out", "held out")):
        part = found[name]
        lines.append(
            f"{label}: {part['runs']} runs, bias of the speed {part['bias']:+.1%}, spread "
            f"{part['spread']:.1%}"
        )
    lines.append(f"refused for memory, though they ran: {len(found['refused'])}")
    return "\n".join([*lines, *(f"  {run}" for run in found["refused"])])


def configure(
    model: dict[str, Any], *, ranks: int, length: int, samples: int, parts: int, recompute: str
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**model, "sequence_length": length},
            "training": {
                "batch_size": ranks * samples * parts,
                "gradient_accumulation_steps": parts,
            },
            "parallel": {"mode": "fsdp2", "recompute": recompute},
            "batch": {"efa_interfaces": 32},  # the sources have RDMA between their nodes
        }
    )


def compare(run: PublishedRun) -> dict[str, Any]:
    """Return the run with the plan's tokens per second and GiB per GPU."""
    kind = load_catalogue()[run.instance_type]
    ranks = run.nodes * kind.gpu_count
    config = configure(
        _MODELS[run.model],
        ranks=ranks,
        length=run.length,
        samples=run.samples,
        parts=run.micro_batches,
        recompute=run.recompute,
    )
    config = settle_for_device(config, kind.gpu.compute_capability)
    config = config.changed("training", loss_chunk_tokens=None)  # the sources keep all logits
    shape = causal_lm_shape(config.model)
    if run.recompute == "selective":
        model = config.model
        q = model.num_heads * model.head_width
        k = model.kv_heads * model.head_width
        # The block's input, queries, values, attention, the first product of the MLP and its
        # output.
        kept = 2 * model.hidden_size + 2 * q + k + model.mlp_width
        shape = replace(shape, product_floats=kept / model.hidden_size)
    speed = estimate_throughput(config, shape, kind, run.nodes, kind.gpu_count)
    assert speed is not None
    # torch's allocator, which sources read, does not see CUDA's context.
    found = {"tokens_per_second": speed.tokens_per_second / ranks, "gib": None}
    found["gib"] = (memory_fit(config, ranks, shape).total - CONTEXT_BYTES) / GIB
    return {**asdict(run), "gpu": kind.gpu.name, "gpus": ranks, "estimated": found}


def summarise(compared: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Return the median of the errors' absolute values, of all runs and of those that calibrated
    nothing.
    """
    errors = []
    others = []
    for run in compared:
        if run[kind] is None:
            continue
        error = run["estimated"][kind] / run[kind] - 1
        errors.append(error)
        if run["source"] != "M":
            others.append(error)
    return {
        "figures": len(errors),
        "median": statistics.median(map(abs, errors)),
        "others": len(others),
        "median_of_others": statistics.median(map(abs, others)),
        "lowest": min(errors),
        "highest": max(errors),
    }


def render(compared: list[dict[str, Any]], errors: dict[str, Any]) -> str:
    heads = ["", "model", "GPUs", "batch", "recompute"]
    heads += ["tok/s/GPU", "published", "", "GiB", "published", ""]
    rows = []
    for run in compared:
        batch = f"{run['samples']} × {run['length']}"
        if run["micro_batches"] > 1:
            batch += f" × {run['micro_batches']}"
        rows.append(
            [
                run["source"],
                run["model"] + (" compiled" if run["compiled"] else ""),
                f"{run['gpus']} {run['gpu']}",
                batch,
                run["recompute"],
                *_compared_cells(run, "tokens_per_second", digits=0),
                *_compared_cells(run, "gib", digits=1),
            ]
        )
    lines = [table(heads, rows, text_columns=5), ""]
    for kind, label in (("tokens_per_second", "tokens per second"), ("gib", "memory")):
        error = errors[kind]
        lines.append(
            f"{label}: median error {error['median']:.0%} of {error['figures']} figures, "
            f"{error['median_of_others']:.0%} of the {error['others']} that are not MosaicML's; "
            f"from {error['lowest']:+.0%} to {error['highest']:+.0%}"
        )
    return "\n".join([*lines, "", *(f"{key}: {text}" for key, text in _SOURCES.items())])


def _foundry_type(run: FoundryRun) -> InstanceType:
    return load_catalogue()[_FOUNDRY_TYPES[run.gpu]]


def _configure_foundry(run: FoundryRun) -> RunConfig:
    written = configure(
        _MODELS[run.model],
        ranks=run.gpus,
        length=run.length,
        samples=run.samples,
        parts=run.micro_batches,
        recompute=run.recompute,
    )
    return settle_for_device(written, _foundry_type(run).gpu.compute_capability)


def _foundry_roofline(run: FoundryRun) -> Roofline:
    config = _configure_foundry(run)
    shape = causal_lm_shape(config.model)
    found = estimate_roofline(config, shape, _foundry_type(run).gpu, run.gpus, 8)
    assert found is not None
    return found


# Width, blocks, heads and vocabulary; of llama also the heads of keys and the width of the MLP
def _gpt(width: int, blocks: int, heads: int) -> dict[str, Any]:
    return {"hidden_size": width, "num_layers": blocks, "num_heads": heads, "vocab_size": 50368}


def _llama(
    width: int, blocks: int, heads: int, kv_heads: int, mlp: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "architecture": "llama",
        "hidden_size": width,
        "num_layers": blocks,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
    }


_MODELS = {
    "MPT 125M": _gpt(768, 12, 12),
    "MPT 350M": _gpt(1024, 24, 16),
    "MPT 760M": _gpt(1536, 24, 12),
    "MPT 3B": _gpt(2560, 32, 20),
    "MPT 30B": _gpt(7168, 48, 56),
    "MPT 1.3B": _gpt(2048, 24, 16),
    "MPT 7B": _gpt(4096, 32, 32),
    "MPT 13B": _gpt(5120, 40, 40),
    "MPT 70B": _gpt(8192, 80, 64),
    "Llama 2 7B": _llama(4096, 32, 32, 32, 11008, 32000),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13824, 32000),
    "Llama 2 70B": _llama(8192, 80, 64, 8, 28672, 32000),
    "Llama 3 8B": _llama(4096, 32, 32, 8, 14336, 128256),
    "Llama 3 70B": _llama(8192, 80, 64, 8, 28672, 128256),
    "OLMo 2 7B": _llama(4096, 32, 32, 32, 11008, 100352),
    "OLMo 2 13B": _llama(5120, 40, 40, 40, 13824, 100352),
}


def _compared_cells(run: dict[str, Any], kind: str, *, digits: int) -> list[str]:
    """Return the estimate, the published figure and the error; empty if it was not published."""
    theirs = run[kind]
    if theirs is None:
        return ["", "", ""]
    ours = run["estimated"][kind]
    return [f"{ours:,.{digits}f}", f"{theirs:,.{digits}f}", f"{ours / theirs - 1:+.0%}"]
