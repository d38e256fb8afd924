"""What saves and the lack of them cost, beside what was predicted when the interval was chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.infra.events import COMMIT, COMMIT_FAILED, COMMIT_SKIPPED, INTERVAL, Event
from ebbflow.infra.ledger_classes import LedgerClass

_LOST = (LedgerClass.CHECKPOINT_STALL, LedgerClass.REDONE_STEP)


def save_figures(events: Sequence[Event], ledger: Ledger) -> dict[str, Any]:
    """The `saves` part of a report's `actual`. Figures that the events do not hold are None.

    actual_loss: share of the paid time that went into stalls and steps taken again, measured. predicted_loss: the mean
    of what was expected after each save, by the stall and the hazard known then; estimated.
    """
    predicted = _numbers(events, INTERVAL, "predicted_loss")
    lost = sum(line.rank_microseconds for line in ledger.lines if line.ledger_class in _LOST)
    return {
        "skipped": sum(event.name == COMMIT_SKIPPED for event in events),
        "failed": len({(event.generation, event.step) for event in events if event.name == COMMIT_FAILED}),
        "stall_seconds": _median(_numbers(events, COMMIT, "stall_seconds")),
        "durable_seconds": _median(_numbers(events, COMMIT, "seconds")),
        "interval_seconds": _median(_numbers(events, INTERVAL, "seconds")),
        "predicted_loss": fmean(predicted) if predicted else None,
        "actual_loss": lost / ledger.paid_microseconds if ledger.paid_microseconds else None,
    }


def _numbers(events: Sequence[Event], name: str, key: str) -> list[float]:
    values = [event.data.get(key) for event in events if event.name == name]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
