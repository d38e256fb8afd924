"""The command `ebbflow compare CONFIG`: measure speed, memory and start-up of your model in each
parallel mode.

On this machine, it trains a small copy of the job in each mode, in turn and several times, and
resumes the copy from its commit. Importing this module does not import torch.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import (
    COMMIT,
    NODE_HEARTBEAT,
    PHASE,
    RESTORE,
    STEP,
    Event,
    LedgerClass,
    read_events,
)
from ebbflow.core.grouping import sum_by_key
from ebbflow.core.layout import job_prefix
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.infra.checks.gpu import gpu_files, gpus_hidden
from ebbflow.infra.instance import describe_machine
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.tryout.certify import local_spec, run_to_end, small_config

MODES = ("ddp", "fsdp2", "hsdp")
DEFAULT_STEPS = 20
_WARM_UP_STEPS = 3  # the first steps of a start compile, allocate and connect
_MORE_STEPS = 2  # after the restore
_FIGURES = {
    "tokens_per_second": "{:,.0f}",
    "step_seconds": "{:.3f}",
    "rank_memory_bytes": "{:,.0f} MiB",
    "commit_bytes": "{:,.1f} MiB",
    "commit_stall_seconds": "{:.3f}",
    "startup_seconds": "{:.1f}",
    "restore_seconds": "{:.2f}",
}
_MIB = 2**20


def compare_modes(
    config: RunConfig, modes: Sequence[str], *, steps: int, rounds: int, parent: Path | None = None
) -> dict[str, Any]:
    """Train a small copy of the job (`small_config`) in each mode, `rounds` times.

    Returns:
        For each mode, the median, lowest and highest value of each figure over the rounds, or the
        reason why the mode is unsupported. The result also describes the machine and the
        measurement.

    Raises TrainingError and InfraError.
    """
    from ebbflow.training.gang import Gang
    from ebbflow.training.workload_loader import prepare_data, workload_context

    with tempfile.TemporaryDirectory(prefix="ebbflow-compare-", dir=parent) as name:
        folder = Path(name)
        small = small_config(config, store=folder / "store", steps=steps)
        prepared = prepare_data(
            small, workload_context(small, Gang(), store=Store.open(small.store))
        )
        found: dict[str, list[dict[str, float | None]]] = {mode: [] for mode in modes}
        refused: dict[str, str] = {}
        for number in range(rounds):
            for mode in modes:
                own = small.changed("parallel", mode=mode)
                if mode not in refused and (why := _refusal(own)):
                    refused[mode] = why
                if mode in refused:
                    continue
                found[mode].append(_measure(own, prepared, folder / f"{mode}-{number}", steps))
                print(
                    f"round {number + 1} of {rounds}: {mode} measured", file=sys.stderr, flush=True
                )
        return {
            "kind": "measured",
            "nodes": small.cluster.nodes,
            "processes_per_node": small.cluster.processes_per_node,
            "steps": steps,
            "rounds": rounds,
            "load_average": os.getloadavg()[0],
            "machine": describe_machine(),
            "modes": {mode: refused.get(mode) or _summarize(found[mode]) for mode in modes},
        }


def _refusal(config: RunConfig) -> str:
    gpu = config.cluster.device != "cpu" and bool(gpu_files()) and not gpus_hidden()
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    assert isinstance(nodes, int) and isinstance(processes, int)
    layout = RankLayout(nodes * processes, processes, gpu)
    return "; ".join(map(str, find_unsupported_options(config, layout)))


def _measure(
    config: RunConfig, prepared: dict, folder: Path, steps: int
) -> dict[str, float | None]:
    folder.mkdir()
    job = folder.name
    run_to_end(local_spec(config, prepared, job=job, logs=folder / "logs"), folder / "first")
    longer = config.changed("training", max_steps=steps + _MORE_STEPS)
    again = local_spec(longer, prepared, job=job, logs=folder / "logs")
    run_to_end(replace(again, attempt=8), folder / "again")
    return _figures(read_events(Store.open(config.store).sub(job_prefix(job))), steps)


def _figures(events: Sequence[Event], steps: int) -> dict[str, float | None]:
    first = [event for event in events if event.name == STEP and (event.step or 0) <= steps]
    seconds = {
        event.step: sum(event.data["seconds"].values()) for event in first if event.rank == 0
    }
    tokens = sum_by_key((event.step, event.data["tokens"]) for event in first)
    warm = [step for step in seconds if step is not None and step > _WARM_UP_STEPS]
    ranks = len({event.rank for event in first})
    beats = [event.data.get("resident_bytes") for event in events if event.name == NODE_HEARTBEAT]
    nodes = len({event.node for event in first})
    memory = max((beat for beat in beats if beat), default=None)
    starts = [
        event.data["seconds"]
        for event in events
        if event.name == PHASE and event.data["class"] == LedgerClass.STARTUP and event.rank == 0
    ]
    return {
        "tokens_per_second": statistics.median(tokens[step] / seconds[step] for step in warm),
        "step_seconds": statistics.median(seconds[step] for step in warm),
        "rank_memory_bytes": None if memory is None else memory * nodes / ranks,
        "commit_bytes": _median(
            [event.data.get("bytes") for event in events if event.name == COMMIT]
        ),
        "commit_stall_seconds": _median(
            [event.data.get("stall_seconds") for event in events if event.name == COMMIT]
        ),
        "startup_seconds": starts[0] if starts else None,
        "restore_seconds": _median(
            [
                event.data.get("seconds")
                for event in events
                if event.name == RESTORE and event.data.get("key")
            ]
        ),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return statistics.median(known)
    return None


def _summarize(rounds: Sequence[dict[str, float | None]]) -> dict[str, dict[str, float] | None]:
    summary: dict[str, dict[str, float] | None] = {}
    for name in _FIGURES:
        known = [value for each in rounds if (value := each[name]) is not None]
        middle = _median(known)
        if middle is None:
            summary[name] = None
        else:
            summary[name] = {"median": middle, "low": min(known), "high": max(known)}
    return summary


def format_comparison(found: dict[str, Any]) -> str:
    """Format a comparison as a table of medians, with the lowest and highest value of the rounds in
    brackets.
    """
    shape = f"{found['nodes']} × {found['processes_per_node']} ranks, {found['steps']} steps"
    lines = [
        f"measured on this machine: {shape}, medians of {found['rounds']} rounds, low–high in "
        "brackets"
    ]
    for mode, figures in found["modes"].items():
        if isinstance(figures, str):
            lines.append(f"{mode}: not supported: {figures}")
            continue
        lines.append(mode)
        for name, pattern in _FIGURES.items():
            value = figures[name]
            if name.endswith("bytes"):
                scale = _MIB
            else:
                scale = 1
            if value is None:
                text = "unknown"
            else:
                middle, low, high = (
                    pattern.format(value[each] / scale) for each in ("median", "low", "high")
                )
                text = f"{middle}  ({low}–{high})"
            lines.append(f"  {name.removesuffix('_bytes').replace('_', ' '):22} {text}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="ebbflow compare",
        description="Measure one's own model in each parallel mode, on this machine.",
    )
    parser.add_argument("config", help="YAML file, such as configs/laptop.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override, model.num_layers=2",
    )
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        metavar="MODES",
        help=f"some of {', '.join(MODES)} (all)",
    )
    parser.add_argument(
        "--steps", type=int, default=DEFAULT_STEPS, help=f"of each run ({DEFAULT_STEPS})"
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each mode (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    given = parser.parse_args(arguments)
    modes = tuple(dict.fromkeys(given.modes.split(",")))
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes {given.modes}: {unknown[0]!r} is none of {', '.join(MODES)}")
    if given.steps < 2 * _WARM_UP_STEPS or given.rounds < 1:
        parser.error(
            f"at least --steps {2 * _WARM_UP_STEPS}, of which {_WARM_UP_STEPS} are warm-up, and "
            "--rounds 1"
        )
    config = load_config(given.config, given.set, project_root=PROJECT_ROOT).config
    found = compare_modes(config, modes, steps=given.steps, rounds=given.rounds)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    print(format_comparison(found), flush=True)
    return 0
