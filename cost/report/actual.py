"""What came of the plan, from the events: speed, loss against entropy, commits. Measured, unless it says otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from cost.ledger.generations import Generation
from cost.ledger.ledger import Ledger
from cost.report.saves import save_figures
from infra.events import COMMIT, EVALUATION, PEAK, PREPARED, PRICES, STEP, Event
from infra.ledger_classes import LedgerClass


def actual_figures(events: Sequence[Event], generations: dict[int, Generation], ledger: Ledger) -> dict[str, Any]:
    """The `actual` part of a report. Figures that the events do not hold are None.

    weight_unit: what a batch's weight counts, "tokens" for text; speeds are of it. metrics: of the last evaluation.
    tokens_per_second: median over the kept steps, waiting for data included, saves and evaluations not.
    held_out_loss and unigram_entropy_nats in nats per token; held_out_ratio is the first over the second, below 1
    when the model beats the best guess that ignores context. mfu: model flops over time × the matrix product peak that
    the ranks measured at their start. goodput: useful steps' share of the paid rank-seconds. learning_rate: the highest
    of any step.
    """
    peaks = _gang_peaks(events)
    kept = [event for event in events if event.name == STEP and _is_kept(event, generations)]
    prepared = next((event.data for event in reversed(events) if event.name == PREPARED), {})
    entropy = _number(prepared.get("unigram_entropy_nats"))
    held_out = _held_out_loss(events)
    commits = {event.data.get("key", event.step) for event in events if event.name == COMMIT}
    return {
        "wall_hours": _wall_hours(events),
        "steps": max((event.step for event in kept if event.step is not None), default=0),
        "tokens_per_second": _median(_tokens_per_second(event) for event in kept),
        "mfu": _median(_mfu(event, peaks.get(event.generation)) for event in kept),
        "learning_rate": _highest_learning_rate(events),
        "held_out_loss": held_out,
        "unigram_entropy_nats": entropy,
        "held_out_ratio": held_out / entropy if held_out is not None and entropy else None,
        "train_tokens": prepared.get("train_tokens"),
        "weight_unit": str(prepared.get("weight_unit", "tokens")),
        "metrics": _last_metrics(events),
        "commits": len(commits),
        "saves": save_figures(events, ledger),
        "generations": len(generations),
        "goodput": _goodput(ledger),
        "unattributed_share": ledger.unattributed_share,
        "price_kind": ledger.price_kind,
    }


def _wall_hours(events: Sequence[Event]) -> float:
    """From the first sign of the job to the last; prices may be recorded at any time after it."""
    times = [event.t_wall for event in events if event.name != PRICES] or [0.0]
    return (max(times) - min(times)) / 3600


def _is_kept(event: Event, generations: dict[int, Generation]) -> bool:
    generation = generations.get(event.generation)
    return generation is not None and event.step is not None and generation.keeps(event.step)


def _held_out_loss(events: Sequence[Event]) -> float | None:
    for event in reversed(events):
        if event.name == EVALUATION and "held_out_loss" in event.data.get("metrics", {}):
            return _number(event.data["metrics"]["held_out_loss"])
    return None


def _last_metrics(events: Sequence[Event]) -> dict[str, float | None]:
    """Whatever the workload's evaluation gave; None for what is not finite."""
    found = next((event.data.get("metrics", {}) for event in reversed(events) if event.name == EVALUATION), {})
    return {str(name): _number(value) for name, value in found.items()}


def _highest_learning_rate(events: Sequence[Event]) -> float | None:
    rates = [_number(event.data.get("learning_rate")) for event in events if event.name == STEP]
    return max((rate for rate in rates if rate is not None), default=None)


def _tokens_per_second(event: Event) -> float | None:
    busy = _busy_seconds(event)
    tokens = event.data.get("tokens")
    return tokens / busy if tokens and busy > 0 else None


def _gang_peaks(events: Sequence[Event]) -> dict[int, float]:
    """flops per second of all ranks together, by generation."""
    peaks: dict[int, float] = {}
    for event in events:
        if event.name == PEAK:
            peak = _number(event.data.get("flops_per_second")) or 0.0
            peaks[event.generation] = peaks.get(event.generation, 0.0) + peak
    return peaks


def _mfu(event: Event, peak_flops_per_second: float | None) -> float | None:
    flops, busy = event.data.get("flops"), _busy_seconds(event)
    return flops / busy / peak_flops_per_second if flops and busy > 0 and peak_flops_per_second else None


def _busy_seconds(event: Event) -> float:
    seconds = event.data.get("seconds", {})
    return seconds.get(LedgerClass.USEFUL_STEP, 0.0) + seconds.get(LedgerClass.DATA_WAIT, 0.0)


def _goodput(ledger: Ledger) -> float | None:
    useful = sum(line.rank_microseconds for line in ledger.lines if line.ledger_class == LedgerClass.USEFUL_STEP)
    return useful / ledger.paid_microseconds if ledger.paid_microseconds else None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
