"""From the ranks' seconds to figures: plain arithmetic, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of the rounds."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "rounds": len(values)}


def engine_figures(modes: Sequence[dict[str, dict[str, list[dict[str, Any]]]]], tokens_per_step: int) -> dict[str, Any]:
    """modes: of each rank, laps by mode and contestant.

    A lap lasts as long as its slowest rank's. Ratios are those of laps of the same round, so that a disturbance of
    the whole machine that lasts longer than a round cancels out: engine's tokens/s over the other's, above 1: faster.
    """
    figures: dict[str, Any] = {}
    for mode, contestants in modes[0].items():
        seconds = {
            name: _slowest(modes, lambda rank, n=name, m=mode: [lap["seconds"] for lap in rank[m][n]])
            for name in contestants
        }
        figures[mode] = {}
        for name, laps in contestants.items():
            steps = laps[-1]["steps"] // (len(laps) + 1)  # each lap has as many, and the warm-up lap too
            figures[mode][name] = {
                "tokens_per_second": spread([tokens_per_step * steps / s for s in seconds[name]]),
                "milliseconds_per_step": spread([1e3 * s / steps for s in seconds[name]]),
                "engine_over_this": spread([s / own for s, own in zip(seconds[name], seconds["engine"], strict=True)]),
                "steps": laps[-1]["steps"],
                "last_loss": laps[-1]["loss"],
            }
    return figures


def part_figures(ranks: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    """Microseconds per call by part; of the slowest rank in each round."""
    return {name: spread(_slowest(ranks, lambda rank, n=name: rank[n])) for name in ranks[0]}


def checkpoint_figures(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A save blocks as long as its slowest rank's; it is durable when rank 0 knows it. Multiples are per round."""
    size = sum(rank["bytes"] for rank in ranks)
    memcpy = _slowest(ranks, lambda rank: rank["memcpy"])
    figures: dict[str, Any] = {"bytes": size, "memcpy_seconds": spread(memcpy), "contestants": {}}
    for name in [name for name in ranks[0] if name not in ("memcpy", "bytes")]:
        blocked = _slowest(ranks, lambda rank, n=name: rank[n]["blocked"])
        durable = ranks[0][name]["durable"]
        restore = _slowest(ranks, lambda rank, n=name: rank[n]["restore"])
        first = max(rank[name]["cold"][0] for rank in ranks)
        figures["contestants"][name] = {
            "blocked_seconds": spread(blocked),
            "blocked_over_memcpy": spread([b / copy for b, copy in zip(blocked, memcpy, strict=True)]),
            "first_blocked_seconds": first,
            "first_blocked_over_memcpy": first / statistics.median(memcpy),
            "durable_seconds": spread(durable),
            "durable_bytes_per_second": spread([size / seconds for seconds in durable]),
            "restore_seconds": spread(restore),
            "restore_bytes_per_second": spread([size / seconds for seconds in restore]),
            "restored_equal": all(rank[name]["restored_equal"] for rank in ranks),
        }
    return figures


def _slowest(ranks: Sequence[Any], values: Callable[[Any], list[float]]) -> list[float]:
    return [max(of_ranks) for of_ranks in zip(*map(values, ranks), strict=True)]
