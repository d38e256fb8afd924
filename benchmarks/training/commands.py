"""The command: what to measure, with how many rounds, and where the figures go."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.training.checkpoints import PARTS, bench_checkpoint
from benchmarks.training.figures import engine_figures, part_figures
from benchmarks.training.ranks import run_ranks
from benchmarks.training.tables import engine_text, machine_line
from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.training.data import prepare_tokens
from ebbflow.training.errors import TrainingError

_RANKS = 2
_NEVER = 10**9


def main(arguments: list[str]) -> int:
    """0, or the exit code of the error that ended it, which is printed."""
    given = _parse(arguments)
    try:
        return _bench(given)
    except (InfraError, TrainingError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ebbflow bench", description="Measure the engine and the commits beside torch alone."
    )
    parser.add_argument("what", nargs="?", choices=["engine", "checkpoint", "all"], default="all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    parser.add_argument(
        "--rounds", type=_positive, default=15, help="of which medians are taken (default 15)"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the store is made (default: the temporary folder)"
    )
    engine = parser.add_argument_group("engine")
    default = PROJECT_ROOT / "ebbflow/configs" / "laptop.yaml"
    engine.add_argument(
        "--config", default=str(default), help="whose model and batch (default configs/laptop.yaml)"
    )
    engine.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override, model.num_layers=6",
    )
    engine.add_argument("--steps", type=_positive, default=10, help="in a round (default 10)")
    engine.add_argument(
        "--calls", type=_positive, default=500, help="of each part in a round (default 500)"
    )
    checkpoint = parser.add_argument_group("checkpoint")
    checkpoint.add_argument(
        "--megabytes", type=float, default=200.0, help="of state over all ranks (default 200)"
    )
    checkpoint.add_argument(
        "--parts",
        default=",".join(PARTS),
        metavar="LIST",
        help=f"which of {', '.join(PARTS)} (default: all)",
    )
    checkpoint.add_argument(
        "--store", metavar="URI", help="s3://bucket/prefix to upload to as well"
    )
    checkpoint.add_argument(
        "--bucket-megabytes", type=float, default=400.0, help="of state per upload (default 400)"
    )
    checkpoint.add_argument(
        "--simulated-ranks", type=_positive, default=1024, help="the most of them (default 1024)"
    )
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="seconds for each part (default 1800)"
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a positive number")
    return number


def _bench(given: argparse.Namespace) -> int:
    figures: dict[str, Any] = {"kind": "measured", "machine": describe_machine()}
    print(machine_line(figures["machine"]), flush=True)
    benches: dict[
        str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], str] | None]
    ] = {
        "engine": (_bench_engine, engine_text),
        "checkpoint": (bench_checkpoint, None),  # tells each of its parts by itself
    }
    for name, (measure, render) in benches.items():
        if given.what in (name, "all"):
            with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as folder:
                figures[name] = measure(given, Path(folder))
            if render is not None:
                print(f"\n{render(figures[name])}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _bench_engine(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One gang of two ranks for ddp, fsdp2 and the parts; one rank alone for single."""
    config = _plain(load_config(given.config, given.set, project_root=PROJECT_ROOT).config)
    store = Store.open(str(folder / "store"))
    tokens = prepare_tokens(config.data, store, project_root=PROJECT_ROOT)
    task = {
        "kind": "engine",
        "config": config.model_dump(mode="json"),
        "store_uri": store.uri,
        "tokens": tokens.fingerprint,
        "folder": str(folder),
        "rounds": given.rounds,
        "steps": given.steps,
        "calls": given.calls,
    }
    tokens_per_step = config.training.batch_size * config.model.sequence_length
    modes: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for ranks, names in ((_RANKS, ["ddp", "fsdp2"]), (1, ["single"])):
        found = run_ranks(
            {**task, "modes": names}, folder, ranks=ranks, deadline_seconds=given.deadline
        )
        modes |= engine_figures([rank["modes"] for rank in found], tokens_per_step)
        parts |= part_figures([rank["parts"] for rank in found])
    return {
        "modes": modes,
        "parts": parts,
        "ranks": {"ddp": _RANKS, "fsdp2": _RANKS, "single": 1},
        "threads_per_rank": 1,
        "rounds": given.rounds,
        "steps": given.steps,
        "model": config.model.model_dump(mode="json"),
        "parameters": causal_lm_shape(config.model).parameters,
        "tokens_per_step": tokens_per_step,
    }


def _plain(config: RunConfig) -> RunConfig:
    """What a bare loop does too: a constant rate, whole steps, float32; and nothing between the
    steps of a lap.
    """
    training = config.training.model_copy(
        update={
            "gradient_accumulation_steps": 1,
            "evaluation_interval_steps": _NEVER,
            "scheduler": config.training.scheduler.model_copy(
                update={"type": "constant", "warmup_steps": 0}
            ),
        }
    )
    return config.model_copy(
        update={
            "training": training,
            "fsdp": config.fsdp.model_copy(update={"use_mixed_precision": False}),
            "checkpoint": config.checkpoint.model_copy(update={"interval_steps": _NEVER}),
            "data": config.data.model_copy(update={"held_out_samples": 1}),
        }
    )
