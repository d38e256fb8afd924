"""How much an upload slows the steps beside it, at the interval that is best for interruptions each
two hours.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.buckets import null_sink
from benchmarks.training.figures import interval_of_median, spread
from benchmarks.training.ranks import run_ranks
from benchmarks.training.uploads import environment
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.lineage import open_generation

_RANKS = 2
_KINDS = ("busy", "quiet")
_MTBF_HOURS = 2.0
# Weights and moments of 148 MB, and few tokens, so that a step is short and there are many of them.
_MODEL = {"hidden_size": 512, "num_layers": 4, "num_heads": 4, "sequence_length": 32}


def bench_slow_down(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The cap is such that an upload ends within half an interval; the bytes go into a null sink."""
    rounds = min(given.rounds, 7)
    with null_sink() as place, environment(place.environment):
        store = Store.open(place.uri)
        generation = open_generation(store.sub(job_prefix("slow")), run="bench", attempt=0)
        task = {
            "kind": "slow_down",
            "config": RunConfig(model=_MODEL, training={"batch_size": 4}).model_dump(mode="json"),
            "store_uri": place.uri,
            "job": "slow",
            "generation": generation.number,
            "generation_id": generation.id,
            "hazard_per_hour": 1.0 / _MTBF_HOURS,
            "rounds": rounds,
        }
        ranks = run_ranks(task, folder, ranks=_RANKS, deadline_seconds=given.deadline)
    return {**_figures(ranks[0]), "bytes": sum(rank["bytes"] for rank in ranks), "ranks": _RANKS}


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    """Of each upload: what its steps took longer than those while it was held, of which there are
    as many.

    slow_down_of_pairs is the least noisy: each block of steps is compared with the block right
    after it, of all uploads, and the median of those is given with its 95 % interval. Processor
    time has nothing in it of what others do to the machine, but for their hold on its caches.
    """
    rounds = found["rounds"]
    interval = found["interval"]
    upload = statistics.median(lap["upload"] for lap in rounds)
    stall = statistics.median(lap["stall"] for lap in rounds)
    pairs = interval_of_median(
        [ratio for lap in rounds for ratio in _pairs(lap, found["block_steps"])]
    )
    shares = {name: (stall + upload * pairs[name]) / interval for name in ("median", "low", "high")}
    return {
        "rounds": len(rounds),
        "mtbf_hours": _MTBF_HOURS,
        "interval_seconds": interval,
        "cap_bytes_per_second": found["cap"],
        "steps_per_upload": statistics.median(len(lap["busy"]) for lap in rounds),
        "step_seconds": spread([statistics.median(_column(lap["quiet"], 0)) for lap in rounds]),
        "stall_seconds": spread([lap["stall"] for lap in rounds]),
        "upload_seconds": spread([lap["upload"] for lap in rounds]),
        "slow_down_of_pairs": pairs,
        "slow_down": spread([_longer(lap, 0, statistics.fmean) for lap in rounds]),
        "slow_down_of_medians": spread([_longer(lap, 0, statistics.median) for lap in rounds]),
        "slow_down_of_processor_time": spread(
            [_longer(lap, 1, statistics.fmean) for lap in rounds]
        ),
        "uploader_share_of_a_core": spread([lap["carrier"] / lap["upload"] for lap in rounds]),
        "stall_share_of_time": spread([lap["stall"] / interval for lap in rounds]),
        "share_of_time": {**shares, "rounds": pairs["rounds"]},
    }


def _column(steps: Sequence[Sequence[float]], column: int) -> list[float]:
    """0: wall seconds, 1: processor seconds."""
    return [step[column] for step in steps]


def _longer(lap: dict[str, Any], column: int, middle: Callable[[list[float]], float]) -> float:
    return middle(_column(lap["busy"], column)) / middle(_column(lap["quiet"], column)) - 1.0


def _pairs(lap: dict[str, Any], length: int) -> list[float]:
    """By how much each block was longer than the next; not of the last, in which the upload ended."""
    busy, quiet = (
        [sum(_column(lap[k][at : at + length], 0)) for at in range(0, len(lap[k]), length)]
        for k in _KINDS
    )
    ratios = [own / other - 1.0 for own, other in zip(busy, quiet, strict=True)]
    return ratios[:-1] or ratios


def slow_down_text(figures: dict[str, Any]) -> str:
    def percent(found: dict[str, float]) -> str:
        return f"{100 * found['median']:.2f} % ({100 * found['low']:.2f}–{100 * found['high']:.2f})"

    return (
        f"slow-down: measured · {figures['bytes'] / 1e6:.1f} MB over {figures['ranks']} ranks of "
        f"1 thread, null sink, {figures['rounds']} uploads\n\nbest interval, interrupted each "
        f"{figures['mtbf_hours']:g} h: {figures['interval_seconds']:.1f} s (Daly)\ncap so that "
        f"an upload ends in half of it: {figures['cap_bytes_per_second'] / 1e6:.1f} MB/s per "
        f"rank;\nuploads took {figures['upload_seconds']['median']:.1f} s\nsteps beside an "
        f"upload, {figures['steps_per_upload']:g} each time, of "
        f"{1e3 * figures['step_seconds']['median']:.0f} ms:\n  "
        f"{percent(figures['slow_down_of_pairs'])} longer than the next few without it,\n    the "
        f"median of {figures['slow_down_of_pairs']['rounds']} pairs with its 95 % interval;\n  "
        f"of each upload's means {percent(figures['slow_down'])},\n  of its medians "
        f"{percent(figures['slow_down_of_medians'])},\n  of its processor time "
        f"{percent(figures['slow_down_of_processor_time'])}\nthe uploader takes "
        f"{percent(figures['uploader_share_of_a_core'])} of a core meanwhile\nshare of the time: "
        f"stall {percent(figures['stall_share_of_time'])},\n  with the slow-down of the pairs "
        f"{percent(figures['share_of_time'])}"
    )
