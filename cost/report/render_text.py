"""The report as a block for the terminal, at most 100 columns wide. Only a command is never broken."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from ebbflow.cost.report.attempts import ATTEMPT_HEADER, attempt_rows, place_lines
from ebbflow.cost.report.figures import (
    GENERATION_HEADER,
    comparison_header,
    comparison_rows,
    failure_lines,
    generation_rows,
    key_figures,
    ledger_rows,
    plain,
    trust_lines,
)
from ebbflow.cost.report.money_rows import CAUSE_HEADER, cause_rows
from ebbflow.cost.report.next_step import PYTHON, resume_line
from ebbflow.cost.report.report import RunReport

WIDTH = 100
BAR = "│"  # log viewers drop leading spaces: every line begins with a visible character
_LISTED_FAILURES = 5
_LISTED_GENERATIONS = 12
_LISTED_ATTEMPTS = 12
_LONGEST_END = 20


def render(report: RunReport, *, python: str = PYTHON) -> str:
    """The whole report, ready to print. python: the interpreter that the command to go on names."""
    figures = key_figures(report)
    sections = [
        _pairs(figures),
        _table(ledger_rows(report), ("where the paid time went", "rank-seconds", "share", "USD", "figure")),
    ]
    if causes := cause_rows(report):
        sections.append(_table(causes, CAUSE_HEADER))
    if compared := comparison_rows(report):
        sections.append(_table(compared, comparison_header(report)))
    if attempts := (report.money.get("attempts") or [])[-_LISTED_ATTEMPTS:]:
        sections.append(_table(attempt_rows(attempts), ATTEMPT_HEADER))
        sections.append(["where each attempt was placed, and why:", *_wrapped(place_lines(attempts))])
    if started := generation_rows(report):
        sections.append(_generations(started))
    if found := failure_lines(report):
        more = len(found) - _LISTED_FAILURES
        listed = found[:_LISTED_FAILURES] + ([f"… and {more} more"] if more > 0 else [])
        sections.append(["what went wrong, first failure first:", *_wrapped(listed)])
    if message := report.events.get("message"):
        sections.append(_wrapped([f"message: {plain(message)}"]))
    sections.append(["how far to trust this:", *_wrapped(trust_lines(report))])
    if following := resume_line(report, python=python):
        sections.append([*_wrapped([f"{following.words}:"]), f"  {following.command}"])
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


def _generations(rows: Sequence[Sequence[str]]) -> list[str]:
    """The newest generations; a culprit gets what the line has left, and is told in full by what went wrong."""
    more = len(rows) - _LISTED_GENERATIONS
    *names, last = GENERATION_HEADER
    shown = rows[-_LISTED_GENERATIONS:]
    lines = _table([[*row[:-2], _shortened(row[-2], _LONGEST_END)] for row in shown], names)
    left = WIDTH - 2 - len(lines[0]) - 2
    culprits = [last, "─" * left, *(_shortened(row[-1], left) for row in shown)]
    table = [f"{line}  {culprit}" for line, culprit in zip(lines, culprits, strict=True)]
    return table + ([f"… and {more} earlier ones"] if more > 0 else [])


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _wrapped(lines: Sequence[str]) -> list[str]:
    return [
        piece
        for line in lines
        for piece in textwrap.wrap(line, WIDTH - 4, initial_indent="· ", subsequent_indent="  ", break_on_hyphens=False)
        or ["·"]
    ]
