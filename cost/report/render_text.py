"""The report as a block for the terminal, at most 100 columns wide. Only a command is never broken."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from ebbflow.cost.amounts import format_number, format_percent, format_usd, usd_decimals
from ebbflow.cost.report.figure_text import (
    ATTEMPT_HEADER,
    CAUSE_HEADER,
    GENERATION_HEADER,
    explain_figures,
    format_attempt_rows,
    format_cause_rows,
    format_comparison_rows,
    format_failures,
    format_generation_rows,
    format_key_figures,
    format_ledger_rows,
    format_placements,
    format_pool,
    get_comparison_header,
)
from ebbflow.cost.report.report import RunReport
from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import LedgerClass
from ebbflow.infra.untrusted_text import one_line

PYTHON = ".venv/bin/python"
_FLOW = "flows/train_flow.py"
# `run` reads the configuration anew; the events do not hold where it came from.
_AS_BEFORE = "(add the --config and --set of before)"
_SENT_AS_BEFORE = "(add the --with, --config and --set of before)"


# What a person must allow before a start gives up commits.
_PERMITS = {Outcome.NO_RESTORE: "--from-scratch", Outcome.ROLLED_BACK: "--accept-rollback"}


class NextStep(NamedTuple):
    """words: when and why, without a full stop; command: a line for a shell in the project's folder."""

    words: str
    command: str


def suggest_next_step(report: RunReport, *, python: str = PYTHON) -> NextStep | None:
    """How to go on with a job; None when it is completed or running. python: the interpreter to name.

    `resume` repeats the steps of a run with its plan and configuration as they were: it cures what came from outside.
    What a limit or a value stopped needs a new `run` of the same job, which restores the job's last commit.
    """
    if report.outcome in (None, Outcome.COMPLETED):
        return None
    words, settings = _advice(report)
    if settings is None and _was_sent_away(report):
        words, settings = f"{words} {_SENT_AS_BEFORE}", []
    interpreter = shlex.quote(one_line(python))
    run = one_line(report.events.get("run") or "")
    if settings is None and run:
        return NextStep(words, f"{interpreter} {_FLOW} resume train --origin-run-id {shlex.quote(run)}")
    command = f"{interpreter} {_FLOW} run --job {shlex.quote(one_line(report.job))}"
    permits = [_PERMITS[report.outcome]] if report.outcome in _PERMITS else []
    return NextStep(words, " ".join([command, *permits, *(f"--set {setting}" for setting in settings or [])]))


def _was_sent_away(report: RunReport) -> bool:
    """Training ran on other machines: where it goes next is planned anew, and not as one step of an old run."""
    return bool(report.money.get("attempts"))


def _advice(report: RunReport) -> tuple[str, list[str] | None]:
    """The words, and what to set in a new run; None: resume the run as it is."""
    outcome = report.outcome
    if outcome is Outcome.INTERRUPTED:
        return "to go on from the last commit", None
    if outcome in (Outcome.FAILED, Outcome.CRASH_LOOP):
        return "fix what went wrong, then go on from the last commit", None
    if outcome is Outcome.BUDGET:
        return f"to go on with a larger budget {_AS_BEFORE}", [f"cost.budget_usd={_budget(report)}"]
    if outcome is Outcome.DEADLINE:
        words = f"to go on with a later deadline, which counts anew from the next start {_AS_BEFORE}"
        return words, [f"cost.deadline_hours={_deadline(report)}"]
    if outcome is Outcome.NON_FINITE:
        return _non_finite(report)
    if outcome is Outcome.NO_RESTORE:
        return f"bring back a sound commit and go on, or give up all steps and begin anew {_AS_BEFORE}", []
    if outcome is Outcome.ROLLED_BACK:
        return f"bring the newer commits back and go on, or go on from the older one {_AS_BEFORE}", []
    hint = one_line(_refusal(report).get("hint") or "")
    return f"fix what went wrong{f' ({hint})' if hint else ''} and run again {_AS_BEFORE}", []


def _budget(report: RunReport) -> str:
    """As much again as was spent, on top of the old budget, and what the plan needs: its refusal must not come back."""
    plan = report.plan or {}
    spent = float(report.total_usd)
    again = spent + max(spent, plan.get("budget_usd") or 0.0) if spent else 0.0
    return _rounded_up(max(again, _refusal(report).get("enough") or 0.0), "DOLLARS")


def _deadline(report: RunReport) -> str:
    """What the plan said would do, else twice the deadline that did not."""
    enough = _refusal(report).get("enough")
    given = (report.plan or {}).get("deadline_hours") or report.actual.get("wall_hours") or 0.0
    return _rounded_up(enough or 2 * given, "HOURS")


def _non_finite(report: RunReport) -> tuple[str, list[str]]:
    """Half the highest learning rate that was used, which after the warm-up is half the configured one."""
    steps = [step for step, loss in report.loss_curve if loss is None]
    at = f" at step {max(steps):,}" if steps else ""
    words = f"the same run would fail again{at}: lower the learning rate {_AS_BEFORE}"
    rate = report.actual.get("learning_rate")
    return words, [f"training.learning_rate={f'{rate / 2:.3g}' if rate else 'RATE'}"]


def _refusal(report: RunReport) -> dict[str, Any]:
    return (report.plan or {}).get("refusal") or {}


def _rounded_up(value: float, unknown: str) -> str:
    """To two significant digits, never down; `unknown` for what is no amount."""
    if not math.isfinite(value) or value <= 0:
        return unknown
    exact = Decimal(str(value))
    return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), ROUND_CEILING).normalize():f}"


WIDTH = 100
BAR = "│"  # log viewers drop leading spaces: every line begins with a visible character
_LISTED_FAILURES = 5
_LISTED_GENERATIONS = 12
_LISTED_ATTEMPTS = 12
_LONGEST_END = 20


def render(report: RunReport, *, python: str = PYTHON) -> str:
    """The whole report, ready to print. python: the interpreter that the command to go on names."""
    figures = format_key_figures(report)
    sections = [
        _pairs(figures),
        _table(format_ledger_rows(report), ("where the paid time went", "rank-seconds", "share", "USD", "figure")),
    ]
    if causes := format_cause_rows(report):
        sections.append(_table(causes, CAUSE_HEADER))
    if compared := format_comparison_rows(report):
        sections.append(_table(compared, get_comparison_header(report)))
    if attempts := (report.money.get("attempts") or [])[-_LISTED_ATTEMPTS:]:
        sections.append(_table(format_attempt_rows(attempts), ATTEMPT_HEADER))
        sections.append(["where each attempt was placed, and why:", *_wrapped(format_placements(attempts))])
    if started := format_generation_rows(report):
        sections.append(_generations(started))
    if found := format_failures(report):
        more = len(found) - _LISTED_FAILURES
        listed = found[:_LISTED_FAILURES] + ([f"… and {more} more"] if more > 0 else [])
        sections.append(["what went wrong, first failure first:", *_wrapped(listed)])
    if message := report.events.get("message"):
        sections.append(_wrapped([f"message: {one_line(message)}"]))
    sections.append(["how far to trust this:", *_wrapped(explain_figures(report))])
    if following := suggest_next_step(report, python=python):
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


# Of a CSV: plain numbers and words, dollars to six decimals.
JOB_COLUMNS: tuple[str, ...] = (
    "job", "owner", "project", "outcome", "pool", "price_kind", "forecast_usd", "total_usd", "savings_usd",
    "hindsight_usd", "regret_usd", "forecast_hours", "wall_hours", "paid_rank_seconds", "goodput", "interruptions",
    "failures", "redone_steps", "steps", "tokens_per_second", "final_loss",
)  # fmt: skip
JOB_HEADER = ("job", "outcome", "pool", "forecast", "paid", "savings", "regret", "hours", "goodput", "interr.", "loss")
_LONGEST = 34


def build_job_row(report: RunReport) -> dict[str, Any]:
    """One job by `JOB_COLUMNS`; None for what is not known."""
    money, actual = report.money, report.actual
    forecast, found = money.get("forecast") or {}, money.get("hindsight") or {}
    known = {
        "job": one_line(report.job),
        "owner": one_line(money.get("owner") or ""),
        "project": one_line(money.get("project") or ""),
        "outcome": report.state,
        "pool": one_line(format_pool(report.plan)),
        "price_kind": one_line(actual.get("price_kind") or ""),
        "forecast_usd": forecast.get("compute_usd", forecast.get("usd")),  # what is paid for below is compute alone
        "total_usd": report.total_usd,
        "savings_usd": report.savings_usd,
        "hindsight_usd": found.get("usd"),
        "regret_usd": found.get("regret_usd"),
        "forecast_hours": forecast.get("hours"),
        "paid_rank_seconds": report.paid_rank_seconds,
        "interruptions": report.interruptions,
        "failures": report.failures,
        "redone_steps": report.redone_steps,
        "final_loss": report.loss_curve[-1][1] if report.loss_curve else None,
    }
    return {name: known.get(name, actual.get(name)) for name in JOB_COLUMNS}


def format_job_rows(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """`JOB_HEADER` of each job and, of several, a last row with the sums of what can be summed."""
    decimals = usd_decimals(max((report.total_usd for report in reports), default=0))
    rows = [_cells(build_job_row(report), decimals) for report in reports]
    if len(reports) > 1:
        total = sum(report.total_usd for report in reports)
        saved = [report.savings_usd for report in reports]
        savings = None if None in saved else sum(usd for usd in saved if usd is not None)
        rows.append(
            ("total", "", "", "", format_usd(total, decimals), format_usd(savings, decimals), "", "",
             format_percent(_goodput(reports)), str(sum(report.interruptions for report in reports)), "")
        )  # fmt: skip
    return rows


def render_table(reports: Sequence[RunReport]) -> str:
    """For the terminal, as wide as it must be, with what the dollars are."""
    table = [JOB_HEADER, *format_job_rows(reports)]
    widths = [max(len(row[column]) for row in table) for column in range(len(JOB_HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join([*lines, describe_price_kinds(reports), *_damaged(reports)])


def _damaged(reports: Sequence[RunReport]) -> list[str]:
    """Jobs whose figures are folded from a damaged event log."""
    places = [(one_line(report.job), len(report.events.get("damage") or [])) for report in reports]
    return [
        f"{job}: the event log is damaged in {found} places: ebbflow report {job}" for job, found in places if found
    ]


def describe_price_kinds(reports: Sequence[RunReport]) -> str:
    """How the dollars of the table are to be read."""
    kinds = sorted({one_line(report.actual.get("price_kind") or "unpriced") for report in reports})
    estimated = "forecast (compute alone, as what is paid), savings, regret: estimated"
    return f"paid: measured time at prices that are {'; '.join(kinds)}. {estimated}"


def _cells(row: dict[str, Any], decimals: int) -> tuple[str, ...]:
    return (
        _short(row["job"]),
        row["outcome"],
        _short(row["pool"]),
        format_usd(row["forecast_usd"], decimals),
        format_usd(row["total_usd"], decimals),
        format_usd(row["savings_usd"], decimals),
        format_usd(row["regret_usd"], decimals),
        format_number(row["wall_hours"], 3),
        format_percent(row["goodput"]),
        str(row["interruptions"]),
        format_number(row["final_loss"]),
    )


def _goodput(reports: Sequence[RunReport]) -> float | None:
    """Useful steps' share of the rank-seconds that all jobs paid for; None when they paid for none."""
    lines = [line for report in reports for line in report.ledger if line.ledger_class == LedgerClass.USEFUL_STEP]
    paid = sum(report.paid_microseconds for report in reports)
    return sum(line.rank_microseconds for line in lines) / paid if paid else None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
