"""The command `ebbflow bench engine|checkpoint`: options, measuring ranks, and figures."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training.figures import checkpoint_figures, engine_figures
from benchmarks.training.ranks import run_ranks
from benchmarks.training.tables import checkpoint_text, engine_text, machine_line
from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.layout import job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.infra.instance import describe_machine
from ebbflow.training.checkpoint.lineage import open_generation
from ebbflow.training.data import prepare_tokens
from ebbflow.training.errors import TrainingError

_RANKS = 2
_NEVER = 10**9
_STATE_BYTES_PER_PARAMETER = 12  # a float32 weight and AdamW's two moments
_STATE_LAYERS = 4


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
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
    checkpoint = parser.add_argument_group("checkpoint")
    checkpoint.add_argument(
        "--megabytes", type=float, default=200.0, help="of state over all ranks (default 200)"
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
    if given.what in ("engine", "all"):
        with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as folder:
            figures["engine"] = _bench_engine(given, Path(folder))
        print(f"\n{engine_text(figures['engine'])}", flush=True)
    if given.what in ("checkpoint", "all"):
        with tempfile.TemporaryDirectory(prefix="ebbflow-bench-", dir=given.folder) as folder:
            figures["checkpoint"] = _bench_checkpoint(given, Path(folder))
        print(f"\n{checkpoint_text(figures['checkpoint'])}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _bench_engine(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure ddp and fsdp2 with two ranks, and single with one."""
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
    }
    tokens_per_step = config.training.batch_size * config.model.sequence_length
    modes: dict[str, Any] = {}
    for ranks, names in ((_RANKS, ["ddp", "fsdp2"]), (1, ["single"])):
        found = run_ranks(
            {**task, "modes": names}, folder, ranks=ranks, deadline_seconds=given.deadline
        )
        modes |= engine_figures([rank["modes"] for rank in found], tokens_per_step)
    return {
        "modes": modes,
        "ranks": {"ddp": _RANKS, "fsdp2": _RANKS, "single": 1},
        "threads_per_rank": 1,
        "rounds": given.rounds,
        "steps": given.steps,
        "model": config.model.model_dump(mode="json"),
        "parameters": causal_lm_shape(config.model).parameters,
        "tokens_per_step": tokens_per_step,
    }


def _bench_checkpoint(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure the stall, the time until durable and the restore; all savers write below one folder."""
    store = Store.open(str(folder / "store"))
    generation = open_generation(store.sub(job_prefix("bench")), run="bench", attempt=0)
    task = {
        "kind": "checkpoint",
        "config": _sized_config(given.megabytes).model_dump(mode="json"),
        "store_uri": store.uri,
        "job": "bench",
        "generation": generation.number,
        "generation_id": generation.id,
        "rounds": given.rounds,
    }
    ranks = run_ranks(task, folder, ranks=_RANKS, deadline_seconds=given.deadline)
    return {
        **checkpoint_figures(ranks),
        "ranks": _RANKS,
        "threads_per_rank": 1,
        "rounds": given.rounds,
        "file_system": _file_system(folder),
    }


def _file_system(folder: Path) -> str:
    """Return the type of a folder's file system, such as ext4 or tmpfs; "unknown" if /proc/mounts
    does not list it.
    """
    path = str(folder.resolve())
    best = ""
    kind = "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, mounted, *_ = line.split()
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        # A later mount hides an earlier one on the same place
        if inside and len(mount) >= len(best):
            best = mount
            kind = mounted
    return kind


def _sized_config(megabytes: float) -> RunConfig:
    """Return the model with about so many megabytes of weights and moments.

    A layer has about 12 × hidden² parameters.
    """
    parameters = 1e6 * megabytes / _STATE_BYTES_PER_PARAMETER
    hidden = max(16, 16 * round(math.sqrt(parameters / (12 * _STATE_LAYERS)) / 16))
    model = {
        "hidden_size": hidden,
        "num_layers": _STATE_LAYERS,
        "num_heads": 4,
        "sequence_length": 128,
    }
    return RunConfig(model=model)


def _plain(config: RunConfig) -> RunConfig:
    """Return the configuration of what a bare loop does too.

    That is a constant rate, whole steps and float32, with nothing between the steps of a lap.
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
