"""The report as a Metaflow card. The figures are those of every other rendering; only the clothes are Metaflow's."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from metaflow.cards import Markdown, Table, VegaChart

from cost.jobs.commands import HEADER, kinds_text, table_rows
from cost.report.attempts import ATTEMPT_HEADER, PLACE_HEADER, attempt_rows, place_rows
from cost.report.figures import (
    GENERATION_HEADER,
    comparison_header,
    comparison_rows,
    generation_rows,
    key_figures,
    ledger_rows,
    trust_lines,
)
from cost.report.money_rows import CAUSE_HEADER, cause_rows
from cost.report.next_step import resume_line
from cost.report.report import RunReport


def show_report(card: Any, report: dict, earlier: Sequence[dict] = ()) -> None:
    """Fill a blank card. Foreign text is escaped; a single NaN would leave the whole page blank, so none gets in.

    earlier: reports of other jobs, to compare with.
    """
    run = RunReport.from_json(report)
    card.append(Markdown(f"# {_text(run.job)}: {_text(run.state)}"))
    card.append(Table([_cells(figure) for figure in key_figures(run).items()], headers=["", ""]))
    card.append(Markdown("## Where the paid time went"))
    headers = ["class", "rank-seconds", "share", "USD", "figure"]
    card.append(Table([_cells(row) for row in ledger_rows(run)], headers=headers))
    if causes := cause_rows(run):
        card.append(Markdown("## Dollars by cause"))
        card.append(Table([_cells(row) for row in causes], headers=list(CAUSE_HEADER)))
    curve = [{"step": step, "loss": loss} for step, loss in run.loss_curve if loss is not None and math.isfinite(loss)]
    if curve:
        card.append(Markdown("## Loss"))
        card.append(VegaChart(_loss_chart(curve)))
    if attempts := run.money.get("attempts"):
        card.append(Markdown("## Attempts, planned against actual"))
        card.append(Table([_cells(row) for row in attempt_rows(attempts)], headers=list(ATTEMPT_HEADER)))
        card.append(Table([_cells(row) for row in place_rows(attempts)], headers=list(PLACE_HEADER)))
    if starts := generation_rows(run):
        card.append(Markdown("## Generations"))
        card.append(Table([_cells(row) for row in starts], headers=list(GENERATION_HEADER)))
    card.append(Markdown("## Plan against actual"))
    card.append(Table([_cells(row) for row in comparison_rows(run)], headers=_cells(comparison_header(run))))
    if earlier:
        compared = [*map(RunReport.from_json, earlier), run]
        card.append(Markdown("## Beside the jobs before it"))
        card.append(Table([_cells(row) for row in table_rows(compared)], headers=list(HEADER)))
        card.append(Markdown(_text(kinds_text(compared))))
    if step := resume_line(run):
        card.append(Markdown(f"## Next\n{_text(step.words)}: {_text(step.command)}"))
    card.append(Markdown("## How far to trust this"))
    card.append(Markdown("\n".join(f"- {_text(line)}" for line in trust_lines(run))))


def _loss_chart(curve: list[dict]) -> dict:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": "container",
        "height": 260,
        "data": {"values": curve},
        "mark": {"type": "line"},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "step"},
            "y": {"field": "loss", "type": "quantitative", "title": "nats per token", "scale": {"zero": False}},
        },
    }


def _cells(row: Iterable[object]) -> list[str]:
    return [_text(cell) for cell in row]


def _text(value: object) -> str:
    """Markdown in a card lets block HTML through; what is not ours must not become markup."""
    return html.escape(str(value)).replace("|", "\\|")
