"""The curves that must be equal whatever the mode: what they train, how they are run, and how they
are compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.core.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import open_generation, reachable_commits
from ebbflow.training.data import prepare_tokens
from tests.support.gangs import run_ranks

STEPS = 200
STOP_AT = 100
BATCH_SIZE = 16
REFERENCE = "single process"
MUON = "Muon, single process"
TEXT = PROJECT_ROOT / "tests" / "text"
GOLDEN = PROJECT_ROOT / "tests" / "golden" / "float32.json"


@dataclass(frozen=True)
class Variant:
    """One way to train the same job. goes_on: the variant that it takes over from, which stops at
    STOP_AT.

    tensor: the ranks that compute each layer together, and see the same samples.
    """

    ranks: int
    mode: str = "ddp"
    accumulation: int = 1
    recompute: str = "none"
    goes_on: str | None = None
    stops: bool = False
    tensor: int = 1
    optimizer: str = "adamw"
    chunk: int | None = None  # tokens of the loss at a time

    @property
    def reference(self) -> str:
        if self.optimizer == "adamw":
            return REFERENCE
        return MUON


# In the order in which gangs are started: who goes on comes after who stopped.
VARIANTS = {
    "HSDP 2×2": Variant(4, "hsdp", chunk=50),
    "FSDP2 × tensor 2 on 4 ranks, to step 100": Variant(
        4, "fsdp2", tensor=2, stops=True, chunk=100
    ),
    "HSDP 2×2, to step 100": Variant(4, "hsdp", stops=True),
    "Muon, HSDP 2×2, to step 100": Variant(4, "hsdp", stops=True, optimizer="muon"),
    "DDP on 2 ranks": Variant(2),
    "DDP on 2 ranks, 2 micro-batches": Variant(2, accumulation=2, chunk=30),
    "FSDP2 on 2 ranks": Variant(2, "fsdp2"),
    "FSDP2 on 2 ranks, recompute full": Variant(2, "fsdp2", recompute="full"),
    "tensor 2 on 2 ranks": Variant(2, "fsdp2", tensor=2),
    "tensor 2 on 2 ranks, to step 100": Variant(2, "fsdp2", tensor=2, stops=True),
    "tensor 2 on 2 ranks, resumed": Variant(
        2, "fsdp2", tensor=2, goes_on="tensor 2 on 2 ranks, to step 100"
    ),
    "FSDP2 × tensor 2 on 4 ranks, then DDP on 2": Variant(
        2, goes_on="FSDP2 × tensor 2 on 4 ranks, to step 100"
    ),
    "Muon, HSDP 2×2, then FSDP2 on 2": Variant(
        2, "fsdp2", goes_on="Muon, HSDP 2×2, to step 100", optimizer="muon"
    ),
    REFERENCE: Variant(1),
    MUON: Variant(1, optimizer="muon"),
    "4 micro-batches": Variant(1, accumulation=4),
    "recompute full": Variant(1, recompute="full"),
    "recompute selective": Variant(1, recompute="selective"),
    "HSDP 2×2, then single process": Variant(1, goes_on="HSDP 2×2, to step 100"),
}


@dataclass
class Curve:
    """What all ranks saw together. seen: (global sample index, checksum of its text), of every rank
    and step.

    committed_bytes: of a variant that stopped, all that its one commit wrote.
    """

    losses: list[float]
    held_out: list[float]
    seen: list[tuple[int, int]]
    weights_sha256: str | None
    weights: dict[str, Any] = field(repr=False)
    committed_bytes: int = 0


def make_config(variant: Variant, store: str) -> RunConfig:
    return RunConfig(
        store=store,
        model=ModelConfig(hidden_size=32, num_layers=2, num_heads=2, sequence_length=32),
        training=TrainingConfig(
            batch_size=BATCH_SIZE,
            learning_rate=1e-3,
            optimizer=variant.optimizer,
            max_steps=STEPS,
            gradient_accumulation_steps=variant.accumulation,
            loss_chunk_tokens=variant.chunk,
            # Not a step that a variant stops at, where nobody evaluates
            evaluation_interval_steps=60,
        ),
        data=DataConfig(
            path=str(TEXT), suffixes=[".txt"], held_out_fraction=0.15, held_out_samples=32
        ),
        parallel=ParallelConfig(
            mode=variant.mode,
            shard_size=2 if variant.mode == "hsdp" else None,
            recompute=variant.recompute,
            tensor_size=variant.tensor,
        ),
        checkpoint=CheckpointConfig(interval_steps=STEPS),
    )


def train_curves(folder: Path, names: list[str]) -> dict[str, Curve]:
    """Train the variants, those of one world size one after another in one gang.

    Those that take over from a gang of their own size are trained in a second gang.
    """
    store = str(folder / "store")
    data = make_config(VARIANTS[REFERENCE], store).data
    prepared = prepare_tokens(data, Store.open(store), project_root=PROJECT_ROOT).to_json()
    curves: dict[str, Curve] = {}
    second = {
        name
        for name in names
        if (b := VARIANTS[name].goes_on) and VARIANTS[b].ranks == VARIANTS[name].ranks
    }
    for ranks, late in sorted({(-VARIANTS[name].ranks, name in second) for name in names}):
        ranks = -ranks
        together = {
            n: VARIANTS[n] for n in names if VARIANTS[n].ranks == ranks and (n in second) == late
        }
        tasks = {name: _task(name, variant, store, prepared) for name, variant in together.items()}
        path = folder / f"curves-{ranks}-{late}.json"
        path.write_text(json.dumps(tasks))
        run_ranks(ranks, ["-m", "tests.support.curve_rank", str(path)], deadline_seconds=420)
        results = [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]
        for name, variant in together.items():
            curves[name] = _gather(
                name, variant, [result[name] for result in results], Path(f"{path}.{name}.pt")
            )
            if variant.stops:
                files = Path(store, job_prefix(tasks[name]["spec"]["job"]), "data").rglob("*")
                curves[name].committed_bytes = sum(
                    file.stat().st_size for file in files if file.is_file()
                )
    for name in names:
        if before := VARIANTS[name].goes_on:
            curves[name].losses[:0] = curves[before].losses
            curves[name].held_out[:0] = curves[before].held_out
            curves[name].seen[:0] = curves[before].seen
    return curves


def largest_relative_difference(ours: list[float], theirs: list[float]) -> float:
    assert len(ours) == len(theirs)
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def lost_and_repeated(curve: Curve) -> tuple[int, int]:
    """Samples of 0 … steps × batch − 1 that nobody saw, and sightings beyond the first."""
    numbers = [number for number, _ in curve.seen]
    distinct = set(numbers)
    return len(set(range(STEPS * BATCH_SIZE)) - distinct), len(numbers) - len(distinct)


def largest_weight_difference(ours: Curve, theirs: Curve) -> float:
    assert ours.weights.keys() == theirs.weights.keys()
    return max(
        float((ours.weights[name] - theirs.weights[name]).abs().max()) for name in ours.weights
    )


def table(curves: dict[str, Curve], golden: dict[str, list[float]]) -> str:
    """Each finished variant beside the single process with its optimizer and, with AdamW, beside
    the golden curve.
    """
    rows = []
    for name, curve in curves.items():
        if VARIANTS[name].stops:
            continue
        reference = curves[VARIANTS[name].reference]
        adamw = VARIANTS[name].optimizer == "adamw"
        same = curve.weights_sha256 == reference.weights_sha256
        row = (
            name,
            f"{largest_relative_difference(curve.losses, reference.losses):.1e}",
            f"{largest_relative_difference(curve.held_out, reference.held_out):.1e}",
            f"{largest_relative_difference(curve.losses, golden['losses']):.1e}" if adamw else "",
            "bit-equal" if same else f"{largest_weight_difference(curve, reference):.1e}",
            "{} / {}".format(*lost_and_repeated(curve)),
        )
        rows.append(row)
    head = ("mode", "loss", "held-out", "loss, golden", "weights", "lost / twice")
    widths = []
    for column in range(len(head)):
        widths.append(max(len(row[column]) for row in [head, *rows]))
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _task(name: str, variant: Variant, store: str, prepared: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "job": (variant.goes_on or name).replace(" ", "-"),
        "run": "curves",
        "attempt": 0,
        "node": 0,
        "generation": 0,
        "generation_id": "",
        "candidates": [],
        "config": make_config(variant, store).model_dump(mode="json"),
        "store_uri": store,
        "prepared": prepared,
    }
    if variant.stops or variant.goes_on:
        job_store = Store.open(store).sub(job_prefix(spec["job"]))
        generation = open_generation(job_store, run="curves", attempt=1 if variant.goes_on else 0)
        candidates = [commit.key for commit in reachable_commits(job_store)]
        assert bool(candidates) == bool(variant.goes_on)
        spec |= {
            "generation": generation.number,
            "generation_id": generation.id,
            "candidates": candidates,
        }
    return {"spec": spec, "leave_after": STOP_AT if variant.stops else None}


def _gather(name: str, variant: Variant, ranks: list[dict[str, Any]], weights: Path) -> Curve:
    import torch  # only here, so that who compares golden curves alone needs none

    first = ranks[0]
    assert {rank["outcome"] for rank in ranks} == {
        "interrupted" if variant.stops else "completed"
    }, name
    assert {rank["began"] for rank in ranks} == {STOP_AT if variant.goes_on else 0}, name
    assert all(rank["losses"] == first["losses"] for rank in ranks), (
        f"{name}: ranks differ in the mean loss"
    )
    assert all(
        ranks[r]["seen"] == ranks[r - r % variant.tensor]["seen"] for r in range(len(ranks))
    ), name
    seen = []
    for rank in ranks[:: variant.tensor]:
        seen += [tuple(pair) for pair in rank["seen"]]
    return Curve(
        first["losses"], first["held_out"], seen, first["weights_sha256"], torch.load(weights)
    )
