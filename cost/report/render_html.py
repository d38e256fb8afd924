"""Render the report as one self-contained HTML page: no requests, no scripts, light and dark, readable on a phone.

Text from outside this program is always passed through `escape`. `cost.report.figure_text` formats the numbers.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from ebbflow.cost.amounts import format_number
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
    format_configuration_rows,
    format_failures,
    format_generation_rows,
    format_key_figures,
    format_ledger_rows,
    format_placement_rows,
    get_comparison_header,
    get_loss_unit,
)
from ebbflow.cost.report.render_text import PYTHON, suggest_next_step
from ebbflow.cost.report.report import RunReport
from ebbflow.infra.events import LedgerClass
from ebbflow.infra.untrusted_text import one_line

# One colour per class of time: work green, its overheads blue, costs of interruptions warm, unknown time grey.
COLOURS = {
    LedgerClass.USEFUL_STEP: "#2f9e64",
    LedgerClass.DATA_WAIT: "#8bc34a",
    LedgerClass.CHECKPOINT_STALL: "#3b82c4",
    LedgerClass.EVALUATION: "#26a5b8",
    LedgerClass.STARTUP: "#7986cb",
    LedgerClass.RESTORE: "#9575cd",
    LedgerClass.SHUTDOWN: "#9fa8b8",
    LedgerClass.HANG: "#b5443a",
    LedgerClass.REDONE_STEP: "#e0813a",
    LedgerClass.SKIPPED_STEP: "#f0b04f",
    LedgerClass.INTERRUPTION: "#d9534f",
    LedgerClass.UNATTRIBUTED: "#757575",
    LedgerClass.IDLE: "#a1887f",
    LedgerClass.MINIMUM_CHARGE: "#bcaaa4",
}
_WIDTH, _HEIGHT = 760, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34
_LARGEST_POINTS = 600
_LONGEST_NUMBER = 32  # characters; a column with a longer cell is text, which may wrap
# On screens below 700 px each row becomes a block with a line for each cell, so that no column is cut off.
TABLE_STYLE = """
.wide{overflow-x:auto}
.wide table{width:100%;border-collapse:collapse;font-variant-numeric:tabular-nums}
.wide th,.wide td{padding:6px 8px;text-align:right;border-bottom:1px solid var(--line,#8884);white-space:nowrap}
.wide th{color:var(--quiet,inherit);font-weight:500;font-size:.85rem;white-space:normal}
.wide th:first-child,.wide td:first-child,.wide .text{text-align:left}
.wide td.text{white-space:normal;overflow-wrap:anywhere}
.wide .total td{font-weight:600;border-bottom:0}
.wide td i{display:inline-block;width:10px;height:10px;border-radius:3px;margin-right:8px}
@media (max-width:700px){
.wide thead{display:none}
.wide table,.wide tbody{display:block}
.wide tr{display:block;padding:8px 0;border-bottom:1px solid var(--line,#8884)}
.wide td,.wide td.text{display:flex;justify-content:space-between;gap:16px;padding:2px 0;border:0;white-space:normal;
overflow-wrap:anywhere;text-align:right}
.wide td[data-label]::before{content:attr(data-label);color:var(--quiet,inherit);text-align:left;flex:none;
max-width:50%}
.wide td:first-child{font-weight:600;text-align:left}
.wide td:first-child::before{display:none}
.wide td i{flex:none;align-self:center}
.wide td:first-child{justify-content:flex-start;gap:0}
}
"""


def escape(text: object) -> str:
    return html.escape(str(text), quote=True)


def render_html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, colours: Sequence[str] = (), total: bool = False
) -> str:
    """Render a table and escape its cells. Cells beyond the last column of the header are left out.

    Args:
        colours: Colours of the marks in the first cell of each row.
        total: Whether the last row is the total.
    """
    kinds = [
        ' class="text"' if any(len(row[column]) > _LONGEST_NUMBER for row in rows) else ""
        for column in range(len(header))
    ]
    head = "".join(f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, header, strict=True))
    body = []
    for at, row in enumerate(rows):
        mark = f'<i style="background:{colours[at]}"></i>' if at < len(colours) else ""
        cells = "".join(
            _cell(row[column], label, kinds[column], mark if column == 0 else "") for column, label in enumerate(header)
        )
        body.append(f"<tr{' class=total' if total and at == len(rows) - 1 else ''}>{cells}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _cell(cell: str, label: str, kind: str, mark: str) -> str:
    named = f' data-label="{escape(label)}"' if label else ""
    return f"<td{kind}{named}>{mark}{escape(cell).replace(chr(10), ' ')}</td>"


def render_ledger_bar(report: RunReport) -> str:
    """Render the paid time as a bar with one segment per ledger class, whose name is the tooltip."""
    parts = [
        f'<span style="flex:{line.rank_microseconds} 1 0;background:{COLOURS[line.ledger_class]}" '
        f'title="{escape(line.ledger_class)} {format_number(line.rank_seconds, 2)} s"></span>'
        for line in report.ledger
        if line.rank_microseconds > 0
    ]
    return f'<div class="bar" role="img" aria-label="share of paid time by class">{"".join(parts)}</div>'


def render_loss_chart(report: RunReport) -> str:
    """Render the loss over steps as SVG, with gaps for non-finite losses and the unigram entropy as a dashed line."""
    points = thin_points(report.loss_curve)
    losses = [loss for _, loss in points if loss is not None and math.isfinite(loss)]
    if not losses:
        return '<p class="quiet">no finite loss was recorded</p>'
    entropy = report.actual.get("unigram_entropy_nats")
    seen = losses if entropy is None else [*losses, entropy]
    low, high = min(seen), max(seen)
    margin = 0.05 * (high - low) or 0.5
    first, last = points[0][0], points[-1][0]

    def x(step: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / max(1, last - first)

    def y(loss: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (high + margin - loss) / (high - low + 2 * margin)

    drawn = [_axis(x, y, (first, last), (low, high))]
    if entropy is not None:
        drawn.append(
            f'<line class="entropy" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(entropy):.1f}" y2="{y(entropy):.1f}"/>'
            f'<text x="{_WIDTH - _RIGHT}" y="{y(entropy) - 5:.1f}" text-anchor="end">unigram entropy</text>'
        )
    for piece in _pieces(points):
        if len(piece) == 1:
            drawn.append(f'<circle class="dot" cx="{x(piece[0][0]):.1f}" cy="{y(piece[0][1]):.1f}" r="2"/>')
            continue
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in piece)
        drawn.append(f'<polyline class="loss" points="{path}"/>')
    label = f"training loss from step {first} to {last}"
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def thin_points(
    points: Sequence[tuple[int, float | None]], largest: int = _LARGEST_POINTS
) -> list[tuple[int, float | None]]:
    """Return at most `largest` evenly spaced points, plus the last one."""
    stride = max(1, math.ceil(len(points) / largest))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _pieces(points: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    """Split the points at non-finite losses, so that the chart has gaps there."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, loss in points:
        if loss is not None and math.isfinite(loss):
            pieces[-1].append((step, loss))
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _axis(
    x: Callable[[float], float], y: Callable[[float], float], steps: tuple[int, int], losses: tuple[float, float]
) -> str:
    marks = []
    for share in (0.0, 0.5, 1.0):
        loss = losses[0] + share * (losses[1] - losses[0])
        step = round(steps[0] + share * (steps[1] - steps[0]))
        anchor = {0.0: "start", 0.5: "middle", 1.0: "end"}[share]
        marks.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{format_number(loss, 2)}</text>'
            f'<text x="{x(step):.1f}" y="{_HEIGHT - 10}" text-anchor="{anchor}">{step:,}</text>'
        )
    return "".join(marks)


# Figures shown large, in this order. The list "All figures" has the others too.
_HEADLINES = (
    "total",
    "savings",
    "held-out loss",
    "loss / entropy",
    "interruptions",
    "redone",
    "goodput",
    "speed",
    "MFU",
)


def render(report: RunReport, *, python: str = PYTHON) -> str:
    """Render the whole page.

    Args:
        python: Path of the Python interpreter in the command that continues the job.
    """
    figures = format_key_figures(report)
    title = f"Ebbflow report: {figures['job']}"
    tone = "bad" if report.exit_code else "good"
    colours = [COLOURS[line.ledger_class] for line in report.ledger]
    ledger = render_html_table(LEDGER_HEADER, format_ledger_rows(report), colours=colours, total=True)
    body = [
        f'<header><h1>{escape(figures["job"])}</h1><p class="badge {tone}">{escape(figures["outcome"])}</p></header>',
        _message(report),
        _tiles(figures),
        _section("Where the paid time went", render_ledger_bar(report) + ledger),
        _table_section("Dollars by cause", CAUSE_HEADER, format_cause_rows(report)),
        _section(f"Training loss, {get_loss_unit(report)}", render_loss_chart(report)),
        _table_section("Plan against actual", ("", *get_comparison_header(report)[1:]), format_comparison_rows(report)),
        _attempts(report),
        _table_section("Generations", GENERATION_HEADER, format_generation_rows(report)),
        _list("What went wrong, first failure first", format_failures(report)),
        _section("All figures", _definitions(figures)),
        _configuration(report),
        _list("How far to trust this", explain_figures(report)),
        _next_step(report, python),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_STYLE}{TABLE_STYLE}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _tiles(figures: dict[str, str]) -> str:
    tiles = "".join(
        f'<div class="tile"><span>{escape(name)}</span><b>{escape(figures[name])}</b></div>'
        for name in _HEADLINES
        if name in figures
    )
    return f'<div class="tiles">{tiles}</div><p class="quiet">Dollars: {escape(figures["prices"])}</p>'


def _definitions(figures: dict[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in figures.items())
    return f"<dl>{rows}</dl>"


def _message(report: RunReport) -> str:
    message = report.events.get("message")
    return f'<p class="message">{escape(one_line(message))}</p>' if message else ""


def _attempts(report: RunReport) -> str:
    attempts = report.money.get("attempts") or []
    if not attempts:
        return ""
    figures = render_html_table(ATTEMPT_HEADER, format_attempt_rows(attempts))
    return _section("Attempts", figures + render_html_table(PLACE_HEADER, format_placement_rows(attempts)))


def _configuration(report: RunReport) -> str:
    if not report.configuration:
        return ""
    chosen, defaults = (format_configuration_rows(report, defaults=each) for each in (False, True))
    header = ("key", "value", "source")
    folded = f"<details><summary>{len(defaults)} defaults</summary>{render_html_table(header[:2], defaults)}</details>"
    return _section("Configuration", (render_html_table(header, chosen) if chosen else "") + folded)


def _next_step(report: RunReport, python: str) -> str:
    following = suggest_next_step(report, python=python)
    if following is None:
        return ""
    return _section("What next", f"<p>{escape(following.explanation)}:</p><pre>{escape(following.command)}</pre>")


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return ""
    return _section(title, f"<ol>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ol>")


def _table_section(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return _section(title, render_html_table(header, rows)) if rows else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


_STYLE = """
:root{--ink:#1c2430;--quiet:#5d6878;--line:#dde2e9;--page:#f6f7f9;--card:#fff;--good:#1c7c4c;--bad:#b5352c;
--loss:#2663b8;--entropy:#b06a1b}
@media (prefers-color-scheme:dark){:root{--ink:#e7ebf1;--quiet:#9aa6b6;--line:#303a48;--page:#12161c;--card:#1a2029;
--good:#56c48a;--bad:#f0857c;--loss:#7db1ff;--entropy:#e3a55c}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:860px;margin:0 auto;padding:24px 16px 48px}
header{display:flex;flex-wrap:wrap;gap:8px 16px;align-items:baseline;justify-content:space-between}
h1{font-size:1.5rem;margin:0;overflow-wrap:anywhere}
h2{font-size:1rem;margin:0 0 12px}
.badge{margin:0;font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.quiet{color:var(--quiet);font-size:.9rem}
.message{border-left:3px solid var(--bad);padding-left:12px;overflow-wrap:anywhere}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:16px;margin-top:16px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(180px,1fr));gap:10px;margin-top:16px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px}
.tile span{display:block;color:var(--quiet);font-size:.8rem}
.tile b{font-size:1.1rem;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.bar{display:flex;height:22px;border-radius:6px;overflow:hidden;margin-bottom:12px}
dl{display:grid;grid-template-columns:minmax(110px,auto) 1fr;gap:4px 16px;margin:0}
dt{color:var(--quiet)}dd{margin:0;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
ol{margin:0;padding-left:1.2em}li{overflow-wrap:anywhere}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:14px/1.5 ui-monospace,monospace}
summary{cursor:pointer;color:var(--quiet)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--quiet);font:12px system-ui,sans-serif}
.grid{stroke:var(--line)}.loss{fill:none;stroke:var(--loss);stroke-width:1.8;stroke-linejoin:round}
.dot{fill:var(--loss)}.entropy{stroke:var(--entropy);stroke-dasharray:5 4}
"""
