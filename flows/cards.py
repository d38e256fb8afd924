"""The job's report as a Metaflow card, with the same figures as on the terminal and in report.html."""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false

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
    explain_figures,
    format_attempt_rows,
    format_cause_rows,
    format_comparison_rows,
    format_generation_rows,
    format_key_figures,
    format_ledger_rows,
    format_placement_rows,
    get_comparison_header,
    get_loss_unit,
)
from ebbflow.cost.report.render_html import COLOURS, TABLE_STYLE, render_html_table
from ebbflow.cost.report.render_text import JOB_HEADER, describe_price_kinds, format_job_rows, suggest_next_step
from ebbflow.cost.report.report import RunReport


def show_report(card: Any, report: dict, earlier: Sequence[dict] = ()) -> None:
    """Fill a blank card with a report (JSON) and, for comparison, with earlier reports of other jobs.

    Text from outside this program is escaped. NaN losses are left out, because a single NaN blanks the whole page.
    Tables use the HTML of report.html, because Metaflow's own tables are cut off on a phone.
    """
    run = RunReport.from_json(report)
    card.append(Markdown(f"<style>{TABLE_STYLE.replace(chr(10), '')}</style>"))
    card.append(Markdown(f"# {_text(run.job)}: {_text(run.state)}"))
    card.append(Markdown(render_html_table(("figure", "value"), [*format_key_figures(run).items()])))
    card.append(Markdown("## Where the paid time went"))
    colours = [COLOURS[line.ledger_class] for line in run.ledger]
    card.append(Markdown(render_html_table(LEDGER_HEADER, format_ledger_rows(run), colours=colours, total=True)))
    _show_table(card, "Dollars by cause", CAUSE_HEADER, format_cause_rows(run))
    curve = [{"step": step, "loss": loss} for step, loss in run.loss_curve if loss is not None and math.isfinite(loss)]
    if curve:
        card.append(Markdown("## Loss"))
        card.append(VegaChart(_loss_chart(curve, get_loss_unit(run))))
    if attempts := run.money.get("attempts"):
        _show_table(card, "Attempts, planned against actual", ATTEMPT_HEADER, format_attempt_rows(attempts))
        card.append(Markdown(render_html_table(PLACE_HEADER, format_placement_rows(attempts))))
    _show_table(card, "Generations", GENERATION_HEADER, format_generation_rows(run))
    _show_table(card, "Plan against actual", get_comparison_header(run), format_comparison_rows(run))
    if earlier:
        compared = [*map(RunReport.from_json, earlier), run]
        _show_table(card, "Beside the jobs before it", JOB_HEADER, format_job_rows(compared))
        card.append(Markdown(_text(describe_price_kinds(compared))))
    if step := suggest_next_step(run):
        card.append(Markdown(f"## Next\n{_text(step.explanation)}: {_text(step.command)}"))
    card.append(Markdown("## How far to trust this"))
    card.append(Markdown("\n".join(f"- {_text(line)}" for line in explain_figures(run))))


def _show_table(card: Any, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        card.append(Markdown(f"## {title}"))
        card.append(Markdown(render_html_table(header, rows)))


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
    """Escape text from outside this program, so that Markdown shows it without HTML, emphasis, links or code."""
    return re.sub(r"([\\`*_~\[\]|])", r"\\\1", html.escape(str(value), quote=False))
