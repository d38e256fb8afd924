"""The report's tables as pandas DataFrames, for notebooks. pandas is imported only when one is made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ebbflow.cost.report.report import RunReport
from ebbflow.infra.events import Event

if TYPE_CHECKING:
    import pandas


def loss_frame(report: RunReport) -> pandas.DataFrame:
    """Columns step (int), loss (float, NaN where it was not finite)."""
    import pandas

    steps = [step for step, _ in report.loss_curve]
    losses = [loss for _, loss in report.loss_curve]
    return pandas.DataFrame({"step": pandas.Series(steps, dtype="int64"), "loss": pandas.Series(losses, dtype="float")})


def ledger_frame(report: RunReport) -> pandas.DataFrame:
    """Columns class, rank_seconds, usd (Decimal, so that the column's sum is exactly the total), kind."""
    import pandas

    rows = [(str(line.ledger_class), line.rank_seconds, line.usd, line.kind) for line in report.ledger]
    return pandas.DataFrame(rows, columns=["class", "rank_seconds", "usd", "kind"])


def events_frame(events: Sequence[Event]) -> pandas.DataFrame:
    """One row per event, its fields as columns; `data` stays a dictionary."""
    import pandas

    return pandas.DataFrame([vars(event) for event in events], columns=list(Event.__dataclass_fields__))
