"""Parts of the report page and of the card: tables, the loss curve, the bar of where paid time went. No script."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence

from ebbflow.cost.report.figures import number
from ebbflow.cost.report.report import RunReport
from ebbflow.infra.ledger_classes import LedgerClass

# One hue per class of time: work green, its overheads blue, what interruptions cost warm, the unknown grey.
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
_LONGEST_NUMBER = 32  # characters; a column with a longer cell is text, which may be broken into lines
# Below 700 px each row becomes a block with a line for each cell, so that no column is cut off on a phone.
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


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, colours: Sequence[str] = (), total: bool = False
) -> str:
    """A table in one line of HTML. Cells are escaped here, once; those of a row beyond the header are left out.

    colours: of a mark before the first cell of each row; total: whether the last row sums up the others.
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


def ledger_bar(report: RunReport) -> str:
    """Shares of the paid time side by side, each with its name as a tooltip."""
    parts = [
        f'<span style="flex:{line.rank_microseconds} 1 0;background:{COLOURS[line.ledger_class]}" '
        f'title="{escape(line.ledger_class)} {number(line.rank_seconds, 2)} s"></span>'
        for line in report.ledger
        if line.rank_microseconds > 0
    ]
    return f'<div class="bar" role="img" aria-label="share of paid time by class">{"".join(parts)}</div>'


def loss_chart(report: RunReport) -> str:
    """The loss over steps, gaps where it was not finite, with the unigram entropy as a dashed line."""
    points = thinned(report.loss_curve)
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


def thinned(
    points: Sequence[tuple[int, float | None]], largest: int = _LARGEST_POINTS
) -> list[tuple[int, float | None]]:
    """At most about `largest` points, evenly taken, the last one always among them."""
    stride = max(1, math.ceil(len(points) / largest))
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def _pieces(points: Sequence[tuple[int, float | None]]) -> list[list[tuple[int, float]]]:
    """Runs of finite points: a line must not bridge what was not finite."""
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
            f'<text x="{_LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{number(loss, 2)}</text>'
            f'<text x="{x(step):.1f}" y="{_HEIGHT - 10}" text-anchor="{anchor}">{step:,}</text>'
        )
    return "".join(marks)
