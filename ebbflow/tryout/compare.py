"""`ebbflow compare CONFIG`: measure a model's speed, memory and start-up in each parallel mode.

On this machine, it trains a small copy of the job in each mode, in turn and several times, and
resumes the copy from its commit. Importing this module does not import torch.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import (
    COMMIT,
    NODE_HEARTBEAT,
    PHASE,
    RESTORE,
    STEP,
    Event,
    LedgerClass,
)
from ebbflow.core.grouping import sum_by_key
from ebbflow.infra.checks.gpu import gpu_files, gpus_hidden
from ebbflow.infra.instance import describe_machine
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.tryout.harness import (
    config_parser,
    fixed_gang_size,
    given_config,
    job_events,
    local_spec,
    prepare,
    run_to_end,
    small_config,
    write_answer,
)

MODES = ("ddp", "fsdp2", "hsdp")
DEFAULT_STEPS = 20
_WARM_UP_STEPS = 3  # the first steps of a start compile, allocate and connect
_MORE_STEPS = 2  # after the restore
_MIB = 2**20

Figures = dict[str, float | None]  # by name; None if a figure was not measured


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
    with tempfile.TemporaryDirectory(prefix="ebbflow-compare-", dir=parent) as name:
        folder = Path(name)
        small = small_config(config, store=folder / "store", steps=steps)
        prepared = prepare(small)
        configs = {mode: small.changed("parallel", mode=mode) for mode in modes}
        refusals = {mode: _refusal(configs[mode]) for mode in modes}
        measured: dict[str, list[Figures]] = {mode: [] for mode in modes}
        for number in range(rounds):
            for mode in modes:
                if refusals[mode]:
                    continue
                run = folder / f"{mode}-{number}"
                measured[mode].append(_measure(configs[mode], prepared, run, steps))
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
            "modes": {mode: refusals[mode] or _summarize(measured[mode]) for mode in modes},
        }


def format_comparison(comparison: dict[str, Any]) -> str:
    """Format a comparison as a table of medians, each with its lowest and highest value in
    brackets.
    """
    ranks = f"{comparison['nodes']} × {comparison['processes_per_node']} ranks"
    lines = [
        f"measured on this machine: {ranks}, {comparison['steps']} steps, medians of "
        f"{comparison['rounds']} rounds, low–high in brackets"
    ]
    for mode, figures in comparison["modes"].items():
        if isinstance(figures, str):
            lines.append(f"{mode}: not supported: {figures}")
            continue
        lines.append(mode)
        for name in _FORMATS:
            label = name.removesuffix("_bytes").replace("_", " ")
            lines.append(f"  {label:22} {_format_figure(name, figures[name])}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Run `ebbflow compare`, and return its exit code."""
    parser = config_parser(
        "compare", "Measure one's own model in each parallel mode, on this machine."
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
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        parser.error(f"--modes {given.modes}: {unknown[0]!r} is none of {', '.join(MODES)}")
    if given.steps < 2 * _WARM_UP_STEPS or given.rounds < 1:
        parser.error(
            f"at least --steps {2 * _WARM_UP_STEPS}, of which {_WARM_UP_STEPS} are warm-up, and "
            "--rounds 1"
        )
    config = given_config(parser, given)
    comparison = compare_modes(config, modes, steps=given.steps, rounds=given.rounds)
    write_answer(given.json, comparison)
    print(format_comparison(comparison), flush=True)
    return 0


class _Format(NamedTuple):
    pattern: str
    unit: int = 1


_FORMATS = {
    "tokens_per_second": _Format("{:,.0f}"),
    "step_seconds": _Format("{:.3f}"),
    "rank_memory_bytes": _Format("{:,.0f} MiB", _MIB),
    "commit_bytes": _Format("{:,.1f} MiB", _MIB),
    "commit_stall_seconds": _Format("{:.3f}"),
    "startup_seconds": _Format("{:.1f}"),
    "restore_seconds": _Format("{:.2f}"),
}


def _refusal(config: RunConfig) -> str:
    gpu = config.cluster.device != "cpu" and bool(gpu_files()) and not gpus_hidden()
    nodes, processes = fixed_gang_size(config)
    layout = RankLayout(nodes * processes, processes, gpu)
    return "; ".join(map(str, find_unsupported_options(config, layout)))


def _measure(config: RunConfig, prepared: dict[str, Any], folder: Path, steps: int) -> Figures:
    """Train for `steps` steps, then resume and train for a few more."""
    folder.mkdir()
    job = folder.name
    longer = config.changed("training", max_steps=steps + _MORE_STEPS)
    run_to_end(local_spec(config, prepared, job=job, logs=folder / "logs"), folder / "first")
    run_to_end(local_spec(longer, prepared, job=job, logs=folder / "logs"), folder / "again")
    return _figures(job_events(config, job), steps)


def _figures(events: Sequence[Event], steps: int) -> Figures:
    first = [event for event in events if event.name == STEP and (event.step or 0) <= steps]
    commits = [event for event in events if event.name == COMMIT]
    restores = [event for event in events if event.name == RESTORE and event.data.get("key")]
    startups = [
        event
        for event in events
        if event.name == PHASE and event.data["class"] == LedgerClass.STARTUP and event.rank == 0
    ]
    seconds = {
        event.step: sum(event.data["seconds"].values()) for event in first if event.rank == 0
    }
    tokens = sum_by_key((event.step, event.data["tokens"]) for event in first)
    warm = [step for step in seconds if step is not None and step > _WARM_UP_STEPS]
    return {
        "tokens_per_second": statistics.median(tokens[step] / seconds[step] for step in warm),
        "step_seconds": statistics.median(seconds[step] for step in warm),
        "rank_memory_bytes": _rank_memory(events, first),
        "commit_bytes": _median([event.data.get("bytes") for event in commits]),
        "commit_stall_seconds": _median([event.data.get("stall_seconds") for event in commits]),
        "startup_seconds": startups[0].data["seconds"] if startups else None,
        "restore_seconds": _median([event.data.get("seconds") for event in restores]),
    }


def _rank_memory(events: Sequence[Event], steps: Sequence[Event]) -> float | None:
    """Return the largest memory of a node in bytes, divided by the number of its ranks."""
    resident = [
        event.data.get("resident_bytes") for event in events if event.name == NODE_HEARTBEAT
    ]
    known = [value for value in resident if value]
    if not known:
        return None
    nodes = len({event.node for event in steps})
    ranks = len({event.rank for event in steps})
    return max(known) * nodes / ranks


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return statistics.median(known)
    return None


def _summarize(rounds: Sequence[Figures]) -> dict[str, dict[str, float] | None]:
    summary: dict[str, dict[str, float] | None] = {}
    for name in _FORMATS:
        values = [figures[name] for figures in rounds]
        known = [value for value in values if value is not None]
        if known:
            summary[name] = {
                "median": statistics.median(known),
                "low": min(known),
                "high": max(known),
            }
        else:
            summary[name] = None
    return summary


def _format_figure(name: str, summary: dict[str, float] | None) -> str:
    if summary is None:
        return "unknown"
    pattern, unit = _FORMATS[name]
    median = pattern.format(summary["median"] / unit)
    low = pattern.format(summary["low"] / unit)
    high = pattern.format(summary["high"] / unit)
    return f"{median}  ({low}–{high})"
