"""Line charts of a job as SVG.

SVG needs no JavaScript, so one chart serves the report, the live page, print, and Metaflow's cards.
The page's script only adds the values at the pointer.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_number
from ebbflow.cost.report.charts import has_values, thin_columns
from ebbflow.cost.report.figure_text import get_loss_unit, get_weight_unit
from ebbflow.cost.report.parts import Columns, Mark
from ebbflow.cost.report.report import RunReport

_WIDTH = 560
_HEIGHT = 230
_LEFT = 64
_RIGHT = 12
_TOP = 12
_BOTTOM = 30
_COMPARED_POINTS = 120
_GIB = 2**30


class ChartLine(NamedTuple):
    """A line of a chart, with its label and style.

    `key` is the name of the column with the values, `colour` a CSS variable.
    """

    key: str
    label: str
    colour: str
    points: bool = False  # single points instead of a line
    span: bool = False  # missing values do not interrupt the line
    dash: tuple[int, int] | None = None


class Figure(NamedTuple):
    """A line chart: its title, its lines, and the name of the table with their values."""

    id: str
    title: str
    table: str
    series: tuple[ChartLine, ...]


def list_figures(
    report: RunReport, earlier: Sequence[RunReport] = ()
) -> tuple[list[Figure], dict[str, Columns]]:
    """Return the charts that have data, and their values as {table: {column: values}}."""
    charts = report.charts
    recorded = charts.get("steps") or {}
    if not recorded.get("step"):
        recorded = _old_columns(report)
    steps = _with_forecast(report, _with_held_out(recorded, charts.get("held_out") or {}))
    (compared, names) = _compare(report, earlier)
    machine = {}
    for name, values in (charts.get("machine") or {}).items():
        if name.endswith("_bytes"):
            machine[name] = [None if value is None else value / _GIB for value in values]
        else:
            machine[name] = values
    tables = {"steps": steps, "machine": machine, "compare": compared}
    unit = get_weight_unit(report)
    loss = (ChartLine("loss", "loss", "soft"), ChartLine("smooth", "smoothed", "c1"))
    money = (
        ChartLine("usd_spent", "spent", "c1"),
        ChartLine("usd_forecast", "forecast", "c2", dash=(6, 4), span=True),
        ChartLine("usd_budget", "budget", "c4", dash=(2, 4), span=True),
    )
    split = (
        ChartLine("useful", "compute and communication", "c3"),
        ChartLine("data", "data", "c2"),
        ChartLine("wait", "of it waiting for other ranks", "c1"),
        ChartLine("stall", "checkpoint stall", "c4"),
    )
    memory = (
        ChartLine("resident_bytes", "ranks", "c1"),
        ChartLine("memory_available_bytes", "available", "c3"),
    )
    entropy = ChartLine("entropy", "unigram entropy", "c4", dash=(4, 4), span=True)
    held_out = ChartLine("held_out", "held-out", "c2", points=True)
    found = [
        Figure(
            "loss", f"Training loss, {get_loss_unit(report)}", "steps", (*loss, held_out, entropy)
        ),
        Figure(
            "speed",
            f"Throughput, {unit} per second",
            "steps",
            (ChartLine("speed", f"{unit}/s", "c1"),),
        ),
        Figure("mfu", "MFU, % of the measured peak", "steps", (ChartLine("mfu", "MFU", "c3"),)),
        Figure("usd", "Dollars", "steps", money),
        Figure("split", "Seconds per step", "steps", split),
        Figure(
            "rate", "Learning rate", "steps", (ChartLine("learning_rate", "learning rate", "c1"),)
        ),
        Figure(
            "norm", "Gradient norm", "steps", (ChartLine("gradient_norm", "gradient norm", "c1"),)
        ),
        Figure(
            "busy",
            "GPU utilisation, %",
            "machine",
            (ChartLine("gpu_busy_percent", "mean of nodes", "c3"),),
        ),
        Figure(
            "gpumem",
            "GPU memory of a node, GiB",
            "machine",
            (ChartLine("gpu_memory_used_bytes", "used", "c1"),),
        ),
        Figure(
            "heat",
            "GPU temperature, °C",
            "machine",
            (ChartLine("gpu_celsius", "hottest, mean of nodes", "c2"),),
        ),
        Figure(
            "power",
            "GPU power of a node, W",
            "machine",
            (ChartLine("gpu_watts", "mean of nodes", "c4"),),
        ),
        Figure("memory", "Memory of a node, GiB", "machine", memory),
    ]
    lines = tuple(
        ChartLine(f"job{number}", name, f"c{1 + number % 4}", span=True)
        for number, name in enumerate(names)
    )
    found.append(Figure("compare", "Loss beside the jobs before it, by step", "compare", lines))
    kept = []
    for figure in found:
        table = tables[figure.table]
        known = tuple(line for line in figure.series if has_values(table.get(line.key, ())))
        if known and known != (entropy,) and (figure.id != "compare" or len(known) > 1):
            kept.append(figure._replace(series=known))
    used = {figure.table for figure in kept}
    return kept, {name: table for name, table in tables.items() if name in used}


def render_chart(figure: Figure, table: Columns, marks: Sequence[Mark]) -> str:
    """Render a figure as SVG with steps on the x-axis, gaps at missing values, and marks such as
    interruptions.

    Below a figure with several lines, a legend in HTML names them.
    """
    steps = [step or 0.0 for step in table["step"]]
    values: list[float] = []
    for line in figure.series:
        values += [value for value in table[line.key] if value is not None]
    axes = _Axes(first=steps[0], last=steps[-1], low=min(values), high=max(values))
    drawn = _draw_grid(axes)
    if figure.table == "steps":
        drawn += _draw_marks(axes, marks)
    for line in figure.series:
        for piece in _pieces(steps, table[line.key], line):
            drawn += _draw_piece(axes, line, piece)
    names = ", ".join(line.label for line in figure.series)
    label = html.escape(
        f"{figure.title}: {names}; {_tick(axes.low)} to {_tick(axes.high)}, "
        f"steps {axes.first:,.0f} to {axes.last:,.0f}"
    )
    svg = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" data-left="{_LEFT / _WIDTH:.4f}" '
        f'data-right="{1 - _RIGHT / _WIDTH:.4f}" role="img" '
        f'aria-label="{label}">{"".join(drawn)}</svg>'
    )
    if len(figure.series) < 2:
        return svg
    keys = (
        f'<span><i style="background:var(--{line.colour})"></i>{html.escape(line.label)}</span>'
        for line in figure.series
    )
    return f'{svg}<div class="keys">{"".join(keys)}</div>'


def _old_columns(report: RunReport) -> Columns:
    """Make the table of values per step from the loss curve.

    Old reports have no `charts` and need this.
    """
    steps: list[float | None] = [float(step) for step, _ in report.loss_curve]
    losses = [loss for _, loss in report.loss_curve]
    if steps:
        return thin_columns({"step": steps, "seconds": [*steps], "usd": [*steps], "loss": losses})
    return {}


def _with_held_out(steps: Columns, held: Columns) -> Columns:
    """Add the held-out losses as a column to the values per step."""
    if not held.get("step") or not steps.get("step"):
        return dict(steps)
    rows: list[dict[str, float | None]] = [
        dict(zip(steps, values, strict=True)) for values in zip(*steps.values(), strict=False)
    ]
    rows += [
        {"step": step, "seconds": seconds, "usd": usd, "held_out": value}
        for step, seconds, usd, value in zip(
            held["step"], held["seconds"], held["usd"], held["value"], strict=True
        )
    ]
    rows.sort(key=lambda row: row["step"] or 0.0)
    merged: list[dict[str, float | None]] = []
    for row in rows:
        if "held_out" in row and merged and merged[-1]["step"] == row["step"]:
            merged[-1]["held_out"] = row["held_out"]
        else:
            merged.append(row)
    for name in ("seconds", "usd"):
        highest = 0.0
        for row in merged:
            highest = max(highest, row[name] or 0.0)
            row[name] = highest
    return {name: [row.get(name) for row in merged] for name in (*steps, "held_out")}


def _with_forecast(report: RunReport, columns: Columns) -> Columns:
    """Add columns with spent, forecast and budgeted dollars.

    For a running job, add a row for its estimated end.
    """
    if not columns.get("step"):
        return columns
    found = report.progress
    entropy = report.actual.get("unigram_entropy_nats")
    size = len(columns["step"])
    reached = size
    if report.outcome is None:
        # Later rows are lost steps that are not yet redone
        done = found.get("step") or 0
        reached = sum((step or 0) <= done for step in columns["step"])
    columns = {
        **columns,
        "usd_spent": [*columns["usd"][:reached], *[None] * (size - reached)],
        "usd_forecast": [None] * size,
    }
    forecast = found.get("forecast_usd")
    eta = found.get("eta_seconds")
    if forecast is not None and eta and reached:
        columns["usd_forecast"][reached - 1] = columns["usd"][reached - 1]
        end = {
            "step": found.get("steps"),
            "seconds": (columns["seconds"][-1] or 0.0) + eta,
            "usd": forecast,
        }
        columns = {name: [*values, end.get(name)] for name, values in columns.items()}
        columns["usd_forecast"][-1] = forecast
    size = len(columns["step"])
    top = max(columns["usd"][-1] or 0.0, forecast or 0.0)
    budget = found.get("budget_usd")
    # A distant budget would flatten the curve; the number is in the bar above
    if budget and budget <= 3 * top:
        columns["usd_budget"] = [budget] * size
    losses = [loss for loss in columns.get("loss", ()) if loss is not None]
    if entropy is not None and losses and entropy <= 1.5 * max(losses):
        columns["entropy"] = [entropy] * size
    return columns


def _compare(report: RunReport, earlier: Sequence[RunReport]) -> tuple[Columns, list[str]]:
    """Put the loss curves of this job and of the newest four jobs with the same loss unit into one
    table.

    Each curve has at most 120 points.

    Returns:
        The columns step, job0 (this job), job1, …, and the names of these jobs.
    """
    same = [
        compared
        for compared in earlier
        if compared.loss_curve and get_loss_unit(compared) == get_loss_unit(report)
    ][-4:]
    if not same or not report.loss_curve:
        return {}, []
    curves = []
    for compared in (report, *same[::-1]):
        points = compared.loss_curve
        picked = {
            points[number * (len(points) - 1) // (_COMPARED_POINTS - 1)]
            for number in range(_COMPARED_POINTS)
        }
        curves.append({step: loss for step, loss in picked if loss is not None})
    steps = sorted(set().union(*curves))
    columns: Columns = {"step": steps}
    for number, curve in enumerate(curves):
        columns[f"job{number}"] = [curve.get(step) for step in steps]
    return columns, [one_line(compared.job) for compared in (report, *same[::-1])]


@dataclass(frozen=True, kw_only=True)
class _Axes:
    """Range of a chart's steps and values, and their positions in the picture."""

    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        share = (step - self.first) / max(1, self.last - self.first)
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * share, 1)

    def y(self, value: float) -> float:
        # A constant still needs a range.
        margin = 0.05 * (self.high - self.low) or 0.05 * abs(self.high) or 0.5
        share = (self.high + margin - value) / (self.high - self.low + 2 * margin)
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * share, 1)


def _draw_grid(axes: _Axes) -> list[str]:
    drawn = []
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        value = axes.low + share * (axes.high - axes.low)
        step = axes.first + share * (axes.last - axes.first)
        drawn.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{axes.y(value)}" '
            f'y2="{axes.y(value)}"/><text x="{_LEFT - 8}" y="{axes.y(value) + 4}" '
            f'text-anchor="end">{_tick(value)}</text><text x="{axes.x(step)}" y="{_HEIGHT - 8}" '
            f'text-anchor="{anchor}">{round(step):,}</text>'
        )
    return drawn


def _draw_marks(axes: _Axes, marks: Sequence[Mark]) -> list[str]:
    drawn = []
    bottom = _HEIGHT - _BOTTOM
    for mark in marks:
        if not axes.first <= mark["step"] <= axes.last:
            continue
        # Commits are frequent, so they are only ticks at the axis.
        if mark["kind"] == "commit":
            top = bottom - 6
        else:
            top = _TOP
        x = axes.x(mark["step"])
        drawn.append(
            f'<line class="mark {mark["kind"]}" x1="{x}" x2="{x}" y1="{top}" y2="{bottom}">'
            f"<title>{html.escape(one_line(mark['text']))}</title></line>"
        )
    return drawn


def _draw_piece(axes: _Axes, line: ChartLine, piece: Sequence[tuple[float, float]]) -> list[str]:
    """Draw a piece of a line that has no gaps, or the single points of the line."""
    if line.points or len(piece) == 1:
        return [
            f'<circle class="{line.colour}" cx="{axes.x(step)}" cy="{axes.y(value)}" r="3"/>'
            for step, value in piece
        ]
    path = " ".join(f"{axes.x(step)},{axes.y(value)}" for step, value in piece)
    if line.dash:
        dash = f' stroke-dasharray="{line.dash[0]} {line.dash[1]}"'
    else:
        dash = ""
    return [f'<polyline class="{line.colour}"{dash} points="{path}"/>']


def _pieces(
    xs: Sequence[float], values: Sequence[float | None], line: ChartLine
) -> list[list[tuple[float, float]]]:
    """Split a line at missing values.

    If `ChartLine.span` is set, connect the points across missing values instead.
    """
    pieces: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(xs, values, strict=True):
        if value is not None:
            pieces[-1].append((step, value))
        elif pieces[-1] and not (line.span or line.points):
            pieces.append([])
    return [piece for piece in pieces if piece]


def _tick(value: float) -> str:
    size = abs(value)
    if size >= 1e6 or (size and size < 1e-3):
        return f"{value:.2g}"
    if size >= 100:
        return format_number(value, 0)
    return format_number(value, 2 if size >= 1 else 4)
