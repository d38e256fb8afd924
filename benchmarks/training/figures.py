"""From the ranks' seconds to figures: plain arithmetic, no torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Laps = list[dict[str, Any]]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of the rounds."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "rounds": len(values),
    }


def engine_figures(
    ranks: Sequence[dict[str, dict[str, Laps]]], tokens_per_step: int
) -> dict[str, Any]:
    """Turn each rank's laps, by mode and contestant, into figures by mode and contestant.

    A lap takes as long as its slowest rank's. `engine_over_this` compares laps of the same round,
    so that a disturbance of the machine that outlasts a round cancels out: the engine's tokens/s
    over the other's, above 1 if the engine is faster. cpu_…: processor time, mean of the ranks.
    """
    figures = {}
    for mode in ranks[0]:
        figures[mode] = _mode_figures([rank[mode] for rank in ranks], tokens_per_step)
    return figures


def checkpoint_figures(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A save blocks as long as its slowest rank's, and is durable when rank 0 knows it.

    Multiples are taken within each round.
    """
    size = sum(rank["bytes"] for rank in ranks)
    memcpy = _slowest([rank["memcpy"] for rank in ranks])
    figures: dict[str, Any] = {"bytes": size, "memcpy_seconds": spread(memcpy), "contestants": {}}
    for name in ranks[0]["contestants"]:
        of_ranks = [rank["contestants"][name] for rank in ranks]
        blocked = _slowest([rank["blocked"] for rank in of_ranks])
        # Empty where another contestant reads the same
        restore = _slowest([rank["restore"] for rank in of_ranks])
        durable = of_ranks[0]["durable"]
        first = max(rank["cold"][0] for rank in of_ranks)
        figures["contestants"][name] = {
            "blocked_seconds": spread(blocked),
            "blocked_over_memcpy": spread(_ratios(blocked, memcpy)),
            "first_blocked_seconds": first,
            "first_blocked_over_memcpy": first / statistics.median(memcpy),
            "durable_seconds": spread(durable),
            "durable_bytes_per_second": spread([size / seconds for seconds in durable]),
            **_restore_figures(restore, size, of_ranks),
            "saves": len(of_ranks[0]["cold"]) + len(blocked),
        }
    return figures


def _mode_figures(ranks: Sequence[dict[str, Laps]], tokens_per_step: int) -> dict[str, Any]:
    seconds = {name: _slowest(_columns(ranks, name, "seconds")) for name in ranks[0]}
    cpu = {name: _mean(_columns(ranks, name, "cpu_seconds")) for name in ranks[0]}
    figures = {}
    for name, laps in ranks[0].items():
        # Each lap has as many, and the warm-up lap too
        steps = laps[-1]["steps"] // (len(laps) + 1)
        figures[name] = {
            "tokens_per_second": spread([tokens_per_step * steps / lap for lap in seconds[name]]),
            "milliseconds_per_step": spread([1e3 * lap / steps for lap in seconds[name]]),
            "engine_over_this": spread(_ratios(seconds[name], seconds["engine"])),
            "cpu_milliseconds_per_step": spread([1e3 * lap / steps for lap in cpu[name]]),
            "engine_cpu_over_this": spread(_ratios(cpu["engine"], cpu[name])),
            "steps": laps[-1]["steps"],
            "last_loss": laps[-1]["loss"],
        }
    return figures


def _restore_figures(
    restore: list[float], size: int, of_ranks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    if not restore:
        return {}
    return {
        "restore_seconds": spread(restore),
        "restore_bytes_per_second": spread([size / seconds for seconds in restore]),
        "restored_equal": all(rank["restored_equal"] for rank in of_ranks),
    }


def _columns(ranks: Sequence[dict[str, Laps]], name: str, key: str) -> list[list[float]]:
    """Return one figure of a contestant's laps, by rank."""
    columns = []
    for rank in ranks:
        columns.append([lap[key] for lap in rank[name]])
    return columns


def _ratios(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(upper, lower, strict=True)]


def _slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(values) for values in zip(*of_ranks, strict=True)]


def _mean(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(values) for values in zip(*of_ranks, strict=True)]
