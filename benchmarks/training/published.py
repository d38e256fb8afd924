"""`ebbflow bench published`: the plan's memory and speed beside figures that others have published.

Nothing is measured here: each figure on the right is a source's own, each on the left is the plan's
estimate for the same model, batch and GPUs (`cost.plan.throughput`). Where a source does not name a
setting, `_SOURCES` says what was taken. torchtitan's selective recomputation keeps every second
matrix product, where Ebbflow's keeps all: the memory of its runs is that of the plan's formula with
that many products.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.training.tables import table
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.plan.throughput import CONTEXT_BYTES, GIB, estimate_throughput, memory_fit

# Width, blocks, heads and vocabulary; with `architecture: llama` also the heads of keys and the
# width of the MLP.
_GPT: dict[str, dict[str, Any]] = {
    name: {"hidden_size": d, "num_layers": layers, "num_heads": heads, "vocab_size": 50368}
    for name, (d, layers, heads) in {
        "125M": (768, 12, 12),
        "1.3B": (2048, 24, 16),
        "7B": (4096, 32, 32),
        "13B": (5120, 40, 40),
        "70B": (8192, 80, 64),
    }.items()
}
_LLAMA: dict[str, dict[str, Any]] = {
    name: {
        "architecture": "llama",
        "hidden_size": d,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "intermediate_size": mlp,
        "vocab_size": vocab,
    }
    for name, (d, layers, heads, kv_heads, mlp, vocab) in {
        "Llama 2 7B": (4096, 32, 32, 32, 11008, 32000),
        "Llama 2 13B": (5120, 40, 40, 40, 13824, 32000),
        "Llama 2 70B": (8192, 80, 64, 8, 28672, 32000),
        "Llama 3 8B": (4096, 32, 32, 8, 14336, 128256),
        "Llama 3 70B": (8192, 80, 64, 8, 28672, 128256),
        "OLMo 2 7B": (4096, 32, 32, 32, 11008, 100352),
        "OLMo 2 13B": (5120, 40, 40, 40, 13824, 100352),
    }.items()
}
_MODELS = {f"MPT {name}": model for name, model in _GPT.items()} | _LLAMA

_SOURCES = {
    "M": (
        "MosaicML LLM-Foundry, scripts/train/benchmarking/README.md, commit 061f2c7c; its rows "
        "on one node are those from which the plan's MFU was taken, so these errors are not "
        "those of a forecast"
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
    "I": (
        "PyTorch blog, Maximizing training throughput using PyTorch FSDP, 2024-03-13: Llama 2 7B "
        "on 128 A100; nothing recomputed, since MFU and HFU are equal; two samples of 4,096 were "
        "taken"
    ),
}


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
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


def _run(
    source: str, model: str, kind: str, nodes: int, length: int, samples: int, *rest: Any
) -> PublishedRun:
    names = ("micro_batches", "recompute", "compiled", "tokens_per_second", "gib")
    given = dict(zip(names, rest, strict=False))
    return PublishedRun(
        source=source,
        model=model,
        instance_type=kind,
        nodes=nodes,
        length=length,
        samples=samples,
        **given,
    )


_A40 = "p4d.24xlarge"
_A80 = "p4de.24xlarge"
_H100 = "p5.48xlarge"
RUNS = [
    _run("M", "MPT 125M", _A80, 1, 2048, 32, 2, "none", False, 141737),
    _run("M", "MPT 1.3B", _A80, 1, 2048, 14, 4, "none", False, 20513),
    _run("M", "MPT 7B", _A40, 1, 2048, 12, 4, "full", False, 3679),
    _run("M", "MPT 7B", _A80, 1, 2048, 6, 2, "none", False, 4641),
    _run("M", "MPT 13B", _A80, 1, 4096, 10, 3, "full", False, 2060),
    _run("M", "MPT 1.3B", _H100, 1, 2048, 14, 1, "none", False, 45455),
    _run("M", "MPT 7B", _H100, 1, 2048, 6, 1, "none", False, 10643),
    _run("M", "MPT 13B", _H100, 2, 2048, 2, 1, "none", False, 4767),
    _run("M", "MPT 70B", _H100, 8, 2048, 8, 4, "full", False, 1039),
    _run("M", "MPT 70B", _A80, 8, 2048, 8, 4, "full", False, 410),
    _run("T1", "Llama 3 8B", _A80, 8, 8192, 1, 1, "selective", False, 2973),
    _run("T1", "Llama 3 70B", _A80, 8, 8192, 1, 1, "full", False, 331),
    _run("T1", "Llama 2 13B", _A80, 8, 4096, 2, 1, "none", False, 2162),
    _run("T1", "Llama 2 13B", _A80, 8, 4096, 2, 1, "selective", False, 1904),
    _run("T1", "Llama 2 70B", _A80, 8, 4096, 2, 1, "full", False, 353),
    _run("T2", "Llama 3 8B", _H100, 1, 8192, 2, 1, "selective", False, 5762, 82.4),
    _run("T2", "Llama 3 8B", _H100, 1, 8192, 2, 1, "selective", True, 6667, 77.0),
    _run("T2", "Llama 3 8B", _H100, 16, 8192, 2, 1, "selective", False, 5605, 67.0),
    _run("T2", "Llama 3 8B", _H100, 16, 8192, 2, 1, "selective", True, 6514, 62.0),
    _run("T3", "Llama 3 8B", _H100, 1, 8192, 1, 1, "selective", True, None, 47.65),
    _run("O", "OLMo 2 7B", _H100, 1, 4096, 2, 1, "none", True, 10000),
    _run("O", "OLMo 2 13B", _H100, 1, 4096, 2, 1, "none", True, 4600),
    _run("I", "Llama 2 7B", _A80, 16, 4096, 2, 1, "none", False, 3700),
]

# Models of the plan's table: GPUs, and micro-batches of one sample of 2,048 tokens.
_MACHINES = [("1 × A10G", "g5.xlarge", 1), ("8 × A100 40 GB", _A40, 1), ("8 × A100 80 GB", _A80, 1)]
_MACHINES += [("8 × H100", _H100, 1), ("2 × 8 × H100", _H100, 2)]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench published", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    compared = [compare(run) for run in RUNS]
    planned = plan_table()
    errors = {kind: summarise(compared, kind) for kind in ("tokens_per_second", "gib")}
    print(render(compared, errors, planned))
    if given.json is not None:
        found = {"kind": "estimated", "compared": compared, "errors": errors, "planned": planned}
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


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
            "fsdp": {"use_mixed_precision": True},
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
    signed = {
        number: one["estimated"][kind] / one[kind] - 1
        for number, one in enumerate(compared)
        if one[kind] is not None
    }
    others = [error for number, error in signed.items() if compared[number]["source"] != "M"]
    return {
        "figures": len(signed),
        "median": statistics.median(map(abs, signed.values())),
        "others": len(others),
        "median_of_others": statistics.median(map(abs, others)),
        "lowest": min(signed.values()),
        "highest": max(signed.values()),
    }


def plan_table() -> list[dict[str, Any]]:
    """Return fit and speed of five models on five machines, at one sample of 2,048 tokens per GPU."""
    rows = []
    for name, model in _GPT.items():
        for machine, type_name, nodes in _MACHINES:
            kind = load_catalogue()[type_name]
            ranks = nodes * kind.gpu_count
            config = configure(
                model, ranks=ranks, length=2048, samples=1, parts=1, recompute="full"
            )
            shape = causal_lm_shape(config.model)
            fit = memory_fit(config, ranks, shape)
            speed = estimate_throughput(config, shape, kind, nodes, kind.gpu_count)
            fits = fit.total <= kind.gpu_memory_bytes
            rows.append({"model": name, "machine": machine, "fits": fits, "gib": fit.total / GIB})
            if fits and speed is not None:
                rows[-1]["tokens_per_second"] = speed.tokens_per_second
            else:
                rows[-1]["tokens_per_second"] = None
    return rows


def render(
    compared: list[dict[str, Any]], errors: dict[str, Any], planned: list[dict[str, Any]]
) -> str:
    def pair(one: dict[str, Any], kind: str, digits: int) -> list[str]:
        if one[kind] is None:
            return ["", "", ""]
        ours = one["estimated"][kind]
        theirs = one[kind]
        return [f"{ours:,.{digits}f}", f"{theirs:,.{digits}f}", f"{ours / theirs - 1:+.0%}"]

    rows = [
        [
            one["source"],
            one["model"] + (" compiled" if one["compiled"] else ""),
            f"{one['gpus']} {one['gpu']}",
            f"{one['samples']} × {one['length']}"
            + (f" × {one['micro_batches']}" if one["micro_batches"] > 1 else ""),
            one["recompute"],
            *pair(one, "tokens_per_second", 0),
            *pair(one, "gib", 1),
        ]
        for one in compared
    ]
    names = [
        "",
        "model",
        "GPUs",
        "batch",
        "recompute",
        "tok/s/GPU",
        "published",
        "",
        "GiB",
        "published",
        "",
    ]
    lines = [table(names, rows, text_columns=5), ""]
    for kind, label in (("tokens_per_second", "tokens per second"), ("gib", "memory")):
        one = errors[kind]
        lines.append(
            f"{label}: median error {one['median']:.0%} of {one['figures']} figures, "
            f"{one['median_of_others']:.0%} of the {one['others']} that are not MosaicML's; from "
            f"{one['lowest']:+.0%} to {one['highest']:+.0%}"
        )
    machines = [machine for machine, _, _ in _MACHINES]
    cells = [
        [
            f"{one['gib']:.1f} {one['tokens_per_second']:,.0f}"
            if one["fits"]
            else f"{one['gib']:.1f} no"
            for one in planned
            if one["model"] == name
        ]
        for name in _GPT
    ]
    rows = [[name, *found] for name, found in zip(_GPT, cells, strict=True)]
    lines += [
        "",
        "GiB per GPU and tokens per second of all; no: does not fit",
        table(["", *machines], rows, text_columns=1),
        "",
    ]
    return "\n".join(lines + [f"{key}: {text}" for key, text in _SOURCES.items()])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
