"""The report as a Metaflow card. The figures are those of every other rendering; only the clothes are Metaflow's."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Sequence
from typing import Any

from metaflow.cards import Markdown, VegaChart

from ebbflow.cost.report.figure_text import (
    ATTEMPT_HEADER,
    CAUSE_HEADER,
    GENERATION_HEADER,
    LEDGER_HEADER,
    PLACE_HEADER,
    attempt_rows,
    cause_rows,
    comparison_header,
    comparison_rows,
    generation_rows,
    key_figures,
    ledger_rows,
    loss_unit,
    place_rows,
    trust_lines,
)
from ebbflow.cost.report.render_html import COLOURS, TABLE_STYLE, table
from ebbflow.cost.report.render_text import HEADER, kinds_text, resume_line, table_rows
from ebbflow.cost.report.report import RunReport


def show_report(card: Any, report: dict, earlier: Sequence[dict] = ()) -> None:
    """Fill a blank card. Foreign text is escaped; a single NaN would leave the whole page blank, so none gets in.

    Tables are those of the page report.html: Metaflow's own are cut off on a phone.

    earlier: reports of other jobs, to compare with.
    """
    run = RunReport.from_json(report)
    card.append(Markdown(f"<style>{TABLE_STYLE.replace(chr(10), '')}</style>"))
    card.append(Markdown(f"# {_text(run.job)}: {_text(run.state)}"))
    card.append(Markdown(table(("figure", "value"), [*key_figures(run).items()])))
    card.append(Markdown("## Where the paid time went"))
    colours = [COLOURS[line.ledger_class] for line in run.ledger]
    card.append(Markdown(table(LEDGER_HEADER, ledger_rows(run), colours=colours, total=True)))
    _show_table(card, "Dollars by cause", CAUSE_HEADER, cause_rows(run))
    curve = [{"step": step, "loss": loss} for step, loss in run.loss_curve if loss is not None and math.isfinite(loss)]
    if curve:
        card.append(Markdown("## Loss"))
        card.append(VegaChart(_loss_chart(curve, loss_unit(run))))
    if attempts := run.money.get("attempts"):
        _show_table(card, "Attempts, planned against actual", ATTEMPT_HEADER, attempt_rows(attempts))
        card.append(Markdown(table(PLACE_HEADER, place_rows(attempts))))
    _show_table(card, "Generations", GENERATION_HEADER, generation_rows(run))
    _show_table(card, "Plan against actual", comparison_header(run), comparison_rows(run))
    if earlier:
        compared = [*map(RunReport.from_json, earlier), run]
        _show_table(card, "Beside the jobs before it", HEADER, table_rows(compared))
        card.append(Markdown(_text(kinds_text(compared))))
    if step := resume_line(run):
        card.append(Markdown(f"## Next\n{_text(step.words)}: {_text(step.command)}"))
    card.append(Markdown("## How far to trust this"))
    card.append(Markdown("\n".join(f"- {_text(line)}" for line in trust_lines(run))))


def _show_table(card: Any, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table under its title; nothing without rows."""
    if rows:
        card.append(Markdown(f"## {title}"))
        card.append(Markdown(table(header, rows)))


def _loss_chart(curve: list[dict], unit: str) -> dict:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": "container",
        "height": 260,
        "data": {"values": curve},
        "mark": {"type": "line"},
        "encoding": {
            "x": {"field": "step", "type": "quantitative", "title": "step"},
            "y": {"field": "loss", "type": "quantitative", "title": unit, "scale": {"zero": False}},
        },
    }


def _text(value: object) -> str:
    """Foreign text in Markdown, shown letter by letter: neither HTML nor emphasis, links or code."""
    return re.sub(r"([\\`*_~\[\]|])", r"\\\1", html.escape(str(value), quote=False))
