"""How much an upload slows the steps beside it, at the interval that is best for interruptions each two hours."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from infra.config.schema import RunConfig
from infra.layout import job_prefix
from infra.store import Store
from training.bench.buckets import null_sink
from training.bench.figures import spread
from training.bench.ranks import run_ranks
from training.bench.uploads import environment
from training.checkpoint.lineage import open_generation

_RANKS = 2
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
    """A lap is all steps of an upload; what they took longer than as many without one is the slow-down.

    Wall time has in it whatever else the machine does; the processor time of a step and of the uploader have not.
    """
    rounds, interval = found["rounds"], found["interval"]
    wall = [{kind: [step[0] for step in lap[kind]] for kind in ("busy", "quiet")} for lap in rounds]
    cpu = [statistics.fmean(s[1] for s in lap["busy"]) / statistics.fmean(s[1] for s in lap["quiet"]) for lap in rounds]
    means = [statistics.fmean(lap["quiet"]) for lap in wall]
    medians = [statistics.median(lap["busy"]) / statistics.median(lap["quiet"]) - 1.0 for lap in wall]
    longer = [sum(lap["busy"]) - len(lap["busy"]) * mean for lap, mean in zip(wall, means, strict=True)]
    return {
        "rounds": len(rounds),
        "mtbf_hours": _MTBF_HOURS,
        "interval_seconds": interval,
        "cap_bytes_per_second": found["cap"],
        "steps_per_upload": statistics.median(len(lap["busy"]) for lap in rounds),
        "step_seconds": spread(means),
        "stall_seconds": spread([lap["stall"] for lap in rounds]),
        "upload_seconds": spread([lap["upload"] for lap in rounds]),
        "slow_down": spread([statistics.fmean(w["busy"]) / mean - 1.0 for w, mean in zip(wall, means, strict=True)]),
        "slow_down_of_medians": spread(medians),
        "slow_down_of_processor_time": spread([ratio - 1.0 for ratio in cpu]),
        "uploader_share_of_a_core": spread([lap["carrier"] / lap["upload"] for lap in rounds]),
        "stall_share_of_time": spread([lap["stall"] / interval for lap in rounds]),
        "share_of_time": spread([(lap["stall"] + s) / interval for lap, s in zip(rounds, longer, strict=True)]),
    }


def slow_down_text(figures: dict[str, Any]) -> str:
    def percent(found: dict[str, float]) -> str:
        return f"{100 * found['median']:.2f} % ({100 * found['low']:.2f}–{100 * found['high']:.2f})"

    return (
        f"slow-down: measured · {figures['bytes'] / 1e6:.1f} MB over {figures['ranks']} ranks of 1 thread, null sink, "
        f"{figures['rounds']} uploads\n\n"
        f"best interval, interrupted each {figures['mtbf_hours']:g} h: {figures['interval_seconds']:.1f} s (Daly)\n"
        f"cap so that an upload ends in half of it: {figures['cap_bytes_per_second'] / 1e6:.1f} MB/s per rank;\n"
        f"uploads took {figures['upload_seconds']['median']:.1f} s\n"
        f"steps beside an upload, of {1e3 * figures['step_seconds']['median']:.0f} ms, "
        f"{figures['steps_per_upload']:g} each time: {percent(figures['slow_down'])} longer in all,\n"
        f"  {percent(figures['slow_down_of_medians'])} by the medians of the steps,\n"
        f"  {percent(figures['slow_down_of_processor_time'])} by their processor time\n"
        f"the uploader takes {percent(figures['uploader_share_of_a_core'])} of a core meanwhile\n"
        f"share of the time: stall {percent(figures['stall_share_of_time'])},\n"
        f"  with the slow-down by wall time {percent(figures['share_of_time'])}"
    )
