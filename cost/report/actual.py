"""What came of the plan, from the events: speed, loss against entropy, commits. Measured, unless it says otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from ebbflow.cost.ledger.generations import Generation
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.report.saves import save_figures
from ebbflow.infra.events import COMMIT, EVALUATION, NODE_STARTED, PEAK, PREPARED, PRICES, STEP, Event
from ebbflow.infra.ledger_classes import LedgerClass


def actual_figures(events: Sequence[Event], generations: dict[int, Generation], ledger: Ledger) -> dict[str, Any]:
    """The `actual` part of a report. Figures that the events do not hold are None.

    weight_unit: what a batch's weight counts, "tokens" for text; speeds are of it. metrics: of the last evaluation.
    tokens_per_second: median over the kept steps, waiting for data included, saves and evaluations not.
    held_out_loss and unigram_entropy_nats in nats per token; held_out_ratio is the first over the second, below 1
    when the model beats the best guess that ignores context. mfu: model flops over time × the matrix product peak of
    their machines, the best that the ranks measured there; never above 1, see `_mfu_figures`. goodput: useful steps'
    share of the paid rank-seconds. learning_rate: the highest of any step.
    """
    kept = [event for event in events if event.name == STEP and _is_kept(event, generations)]
    prepared = next((event.data for event in reversed(events) if event.name == PREPARED), {})
    entropy = _number(prepared.get("unigram_entropy_nats"))
    held_out = _held_out_loss(events)
    commits = {event.data.get("key", event.step) for event in events if event.name == COMMIT}
    return {
        "wall_hours": _wall_hours(events),
        "steps": max((event.step for event in kept if event.step is not None), default=0),
        "tokens_per_second": _median(_tokens_per_second(event) for event in kept),
        **_mfu_figures(events, kept),
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


def _mfu_figures(events: Sequence[Event], kept: Sequence[Event]) -> dict[str, Any]:
    """mfu: the median of the kept steps; mfu_withheld: why there is none although a peak was measured, else None."""
    peaks = _gang_peaks(events)
    mfu = _median(_mfu(event, peaks.get(event.generation)) for event in kept)
    if mfu is None or mfu <= 1.0:
        return {"mfu": mfu, "mfu_withheld": None}
    why = f"{mfu:.1f} times the peak, which was measured while the machine was busy"
    return {"mfu": None, "mfu_withheld": why}


def _gang_peaks(events: Sequence[Event]) -> dict[int, float]:
    """Flops per second of all ranks together, by generation.

    One peak per machine and job: the best of all generations with as many ranks on it, since a measurement on a busy
    machine is too low and none is too high.
    """
    machines = {
        (event.run, event.attempt, event.generation, event.node): event.data.get("instance_id")
        or event.data.get("host")
        for event in events
        if event.name == NODE_STARTED
    }
    ranks: dict[tuple[Any, ...], dict[int, float]] = {}
    dtypes: dict[tuple[Any, ...], str] = {}
    for event in events:
        if event.name == PEAK:
            place = event.run, event.attempt, event.generation, event.node
            peak = _number(event.data.get("flops_per_second")) or 0.0
            ranks.setdefault(place, {})[event.rank] = peak
            dtypes[place] = str(event.data.get("dtype"))
    best: dict[tuple[Any, ...], float] = {}
    for place, found in ranks.items():
        key = machines.get(place) or place[-1], dtypes[place], len(found)
        best[key] = max(best.get(key, 0.0), sum(found.values()))
    peaks: dict[int, float] = {}
    for place, found in ranks.items():
        generation = place[2]
        key = machines.get(place) or place[-1], dtypes[place], len(found)
        peaks[generation] = peaks.get(generation, 0.0) + best[key]
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
