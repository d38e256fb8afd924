"""The report as a block for the terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from cost.figures import (
    comparison_header,
    comparison_rows,
    failure_lines,
    key_figures,
    ledger_rows,
    plain,
    resume_line,
    trust_lines,
)
from cost.report import RunReport

WIDTH = 100
BAR = "│"  # log viewers drop leading spaces: every line begins with a visible character
_LISTED_FAILURES = 5


def render(report: RunReport) -> str:
    """The whole report, ready to print."""
    figures = key_figures(report)
    sections = [
        _pairs(figures),
        _table(ledger_rows(report), ("where the paid time went", "rank-seconds", "share", "USD", "figure")),
    ]
    if compared := comparison_rows(report):
        sections.append(_table(compared, comparison_header(report)))
    if found := failure_lines(report):
        more = len(found) - _LISTED_FAILURES
        listed = found[:_LISTED_FAILURES] + ([f"… and {more} more"] if more > 0 else [])
        sections.append(["what went wrong, first failure first:", *_wrapped(listed)])
    if message := report.events.get("message"):
        sections.append(_wrapped([f"message: {plain(message)}"]))
    sections.append(["how far to trust this:", *_wrapped(trust_lines(report))])
    if command := resume_line(report):
        sections.append(["to go on from the last commit:", f"  {command}"])
    title = f"report of job {figures['job']}"
    lines = [f"┌─ {title} ".ljust(WIDTH - 1, "─")]
    for index, section in enumerate(sections):
        lines += [BAR] if index else []
        lines += [f"{BAR} {line}".rstrip() for line in section]
    return "\n".join([*lines, "└" + "─" * (WIDTH - 2)])


def _pairs(figures: dict[str, str]) -> list[str]:
    """The figures below each other; a value too long for the line continues under itself."""
    width = max(map(len, figures))
    return [f"{name:<{width}}  {value}" for name, value in figures.items() if name != "job"]


def _table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> list[str]:
    """Columns as wide as their widest cell: names left, figures right."""
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )

    return [line(header), "─" * min(WIDTH - 2, len(line(header))), *map(line, rows)]


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, WIDTH - 4, initial_indent="· ", subsequent_indent="  ") or ["·"]
    ]
