"""Render one report as terminal text of at most 100 columns, or several jobs as a table."""

import math
import shlex
import textwrap
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from ebbflow.core.errors import Outcome
from ebbflow.core.events import FAULT_INJECTED, LedgerClass
from ebbflow.core.json_values import JsonObject
from ebbflow.core.untrusted_text import one_line, wrap_line
from ebbflow.cost.amounts import format_number, format_percent, format_usd, usd_decimals
from ebbflow.cost.report import figure_text
from ebbflow.cost.report.report import RunReport
from ebbflow.cost.report.slurm_jobs import HEADER as SLURM_HEADER
from ebbflow.cost.report.slurm_jobs import format_slurm_rows, list_reasons
from ebbflow.cost.report.verdict import describe_slowest_rank, render_verdict, script_command

PROGRAM = "ebbflow"  # the console command
# `run` reads the configuration again; the events do not record the options of the earlier run.
_SAME_OPTIONS = "(repeat the earlier --config and --set)"
_SAME_REMOTE_OPTIONS = "(repeat the earlier --with, --config and --set)"
# Options with which a user allows a run to discard commits.
_PERMITS = {Outcome.NO_RESTORE: "--from-scratch", Outcome.ROLLED_BACK: "--accept-rollback"}

WIDTH = 100
BAR = "│"  # starts every line, because log viewers drop leading spaces
_LISTED_FAILURES = 5
_LISTED_GENERATIONS = 12
_LISTED_ATTEMPTS = 12
_LONGEST_END = 20

# Key figures of the closing block
_CLOSING = ("budget", "goodput", "held-out loss", "final loss", "redone")
_LONGEST_CLOSING = 15

# Settings on which the weights depend.
_DECISIVE = ("workload", "model.", "data.", "training.", "cluster.", "parallel.")

# Columns of the CSV: plain numbers and text, dollars with six decimals.
JOB_COLUMNS: tuple[str, ...] = (
    "job",
    "owner",
    "project",
    "outcome",
    "pool",
    "price_kind",
    "forecast_usd",
    "total_usd",
    "savings_usd",
    "hindsight_usd",
    "regret_usd",
    "forecast_hours",
    "wall_hours",
    "paid_rank_seconds",
    "goodput",
    "interruptions",
    "failures",
    "redone_steps",
    "steps",
    "tokens_per_second",
    "final_loss",
)
JOB_HEADER = (
    "job",
    "outcome",
    "pool",
    "forecast",
    "paid",
    "savings",
    "regret",
    "hours",
    "goodput",
    "interr.",
    "loss",
)
_LONGEST_NAME = 34


class NextStep(NamedTuple):
    """Suggestion for continuing a job.

    `explanation` has no full stop at the end. `command` is a shell command for the folder in which
    the job was started.
    """

    explanation: str
    command: str


def suggest_next_step(report: RunReport, *, program: str = PROGRAM) -> NextStep | None:
    """Suggest how to continue a job; None if it is completed or running.

    After an interruption or a failure, suggest `resume`, which continues the run with the same plan
    and configuration. On AWS Batch, and after an exceeded limit or a bad setting, suggest a new
    `run`, which restores the last commit.

    Args:
        program: Shell command that runs `ebbflow` (`ebbflow.core.program.own_command`).
    """
    if report.outcome in (None, Outcome.COMPLETED):
        return None
    explanation, settings = _advise(report)
    own = script_command(report, "--job", report.job)
    if own is not None:  # it ran here, without the flow
        return NextStep(explanation, own.replace("ebbflow", program, 1))
    # On AWS Batch and Slurm a new run places the next attempt
    on_slurm = (report.plan or {}).get("backend") == "slurm"
    if settings is None and (report.money.get("attempts") or on_slurm):
        explanation = f"{explanation} {_SAME_REMOTE_OPTIONS}"
        settings = []
    run = one_line(report.events.get("run") or "")
    if settings is None and run:
        return NextStep(explanation, f"{program} resume train --origin-run-id {shlex.quote(run)}")
    command = f"{program} run --job {shlex.quote(one_line(report.job))}"
    if report.outcome in _PERMITS:
        permits = [_PERMITS[report.outcome]]
    else:
        permits = []
    return NextStep(
        explanation,
        " ".join([command, *permits, *(f"--set {setting}" for setting in settings or [])]),
    )


def render(report: RunReport, *, program: str = PROGRAM) -> str:
    """Render the whole report.

    Args:
        program: Shell command that runs `ebbflow`. The report shows it in the command that
            continues the job.
    """
    figures = figure_text.format_key_figures(report)
    sections = [
        [
            f"{name:<{max(map(len, figures))}}  {value}"
            for name, value in figures.items()
            if name != "job"
        ],
        format_table(
            figure_text.format_ledger_rows(report),
            ("where the paid time went", "rank-seconds", "share", "USD", "figure"),
        ),
    ]
    causes = figure_text.format_cause_rows(report)
    if causes:
        sections.append(format_table(causes, figure_text.CAUSE_HEADER))
    compared = figure_text.format_comparison_rows(report)
    if compared:
        sections.append(format_table(compared, figure_text.get_comparison_header(report)))
    sections += _attempts(report)
    started = figure_text.format_generation_rows(report)
    if started:
        sections.append(_generations(started))
    found = figure_text.format_failures(report)
    if found:
        more = len(found) - _LISTED_FAILURES
        listed = found[:_LISTED_FAILURES] + ([f"… and {more} more"] if more > 0 else [])
        finding = figure_text.describe_finding(report)
        if finding:
            listed += [f"diagnosis: {finding}"]
        sections.append(["what went wrong, first failure first:", *_wrapped(listed)])
    slow = describe_slowest_rank(report, if_slow=True)
    if slow:
        sections.append(_wrapped([slow]))
    message = report.events.get("message")
    if message:
        sections.append(_wrapped([f"message: {one_line(message)}"]))
    sections.append(["how far to trust this:", *_wrapped(figure_text.explain_figures(report))])
    following = suggest_next_step(report, program=program)
    if following:
        sections.append([*_wrapped([f"{following.explanation}:"]), f"  {following.command}"])
    title = f"report of job {figures['job']}"
    lines = [f"┌─ {title} ".ljust(WIDTH - 1, "─")]
    for index, section in enumerate(sections):
        if index:
            lines += [BAR]
        lines += [f"{BAR} {line}".rstrip() for line in section]
    return "\n".join([*lines, "└" + "─" * (WIDTH - 2)])


def render_closing(
    report: RunReport,
    page: str,
    *,
    program: str = PROGRAM,
    notes: Sequence[str] = (),
    width: int = 80,
) -> str:
    """Render the end of a job in at most 15 lines: the verdict, failures, key figures and the next
    step.

    Args:
        page: Path of the report page.
        notes: Further lines, such as the verdict of a rehearsal.
        width: Columns to wrap at. Commands are never wrapped.
    """
    figures = figure_text.format_key_figures(report)
    following = suggest_next_step(report, program=program)
    if report.outcome is Outcome.COMPLETED:
        mark = "✓"
    else:
        mark = "✗"
    verdict = render_verdict(report)
    message = one_line(report.events.get("message") or "")
    lines = [f"{mark} {verdict}", *notes]
    failures = figure_text.format_failures(report)
    completed = report.outcome is Outcome.COMPLETED
    if len(failures) > 1 or completed:  # else it is in the verdict
        if completed:
            name = "survived"
        else:
            name = "cause"
        lines += [f"  {name:<9} {failure}" for failure in failures[:2]]
    if message and message not in verdict:
        lines.append(f"  message   {message}")
    slow = describe_slowest_rank(report, if_slow=True)
    if slow:
        lines.append(f"  slow      {slow}")
    shown = [
        f"{name} {figures[name]}"
        for name in _CLOSING
        if name in figures and not figures[name].startswith("0 ")
    ]
    if shown:
        lines += [f"  figures   {'; '.join(shown)}"]
    wrapped = []
    for line in lines:
        wrapped.extend(wrap_line(line, width, indent=" " * (12 if line[0] == " " else 2)))
    end = [f"  report    {page}", f"  all       ebbflow report {one_line(report.job)}"]
    if following:
        explained = wrap_line(f"  next      {following.explanation}:", width, indent=" " * 12)
        end += [*explained[:2], f"  {following.command}"]
    room = _LONGEST_CLOSING - len(end)
    if len(wrapped) > room:
        wrapped = [*wrapped[: room - 1], f"{' ' * 12}…"]
    return "\n".join([*wrapped, *end])


def describe_rehearsal(report: RunReport, others: Sequence[RunReport]) -> list[str]:
    """Return lines that say whether a rehearsed fault changed the weights; [] without a rehearsal.

    Args:
        others: Reports of other jobs, newest last. The weights are compared with those of an
            uninterrupted run among them.
    """
    if not (report.events.get("counts") or {}).get(FAULT_INJECTED):
        return []
    if report.outcome is not Outcome.COMPLETED:
        return [f"  rehearsal not survived so far: {report.outcome}"]
    quiet = [
        other
        for other in others
        if other.outcome is Outcome.COMPLETED
        and not other.interruptions
        and _decisive(other) == _decisive(report)
    ]
    if not quiet:
        compared = "no uninterrupted run of these settings is on this machine; --compare runs one"
    else:
        equal = quiet[-1].weights_sha256 == report.weights_sha256
        compared = (
            f"weights {'equal to' if equal else 'DIFFER from'} the uninterrupted run "
            f"{one_line(quiet[-1].job)}"
        )
    return [f"  rehearsal survived; {compared}"]


def format_table(
    rows: Sequence[Sequence[str]],
    header: Sequence[str],
    *,
    left: int = 1,
    width: int | None = WIDTH - 2,
) -> list[str]:
    """Format the rows as lines below the header. Each column is as wide as its widest cell.

    Args:
        left: Number of leading columns that are left-aligned. All other columns are right-aligned.
        width: Maximum length of the rule below the header, in characters; None for the length of
            the header.
    """
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )

    head = line(header)
    return [head, "─" * min(width or len(head), len(head)), *map(line, rows)]


def build_job_row(report: RunReport) -> dict[str, Any]:
    """Build the row of one job: a value for each of `JOB_COLUMNS`, None if unknown."""
    money = report.money
    actual = report.actual
    forecast = money.get("forecast") or {}
    found = money.get("hindsight") or {}
    known = {
        "job": one_line(report.job),
        "owner": one_line(money.get("owner") or ""),
        "project": one_line(money.get("project") or ""),
        "outcome": report.state,
        "pool": one_line(figure_text.format_pool(report.plan)),
        "price_kind": one_line(actual.get("price_kind") or ""),
        # Compute alone, like total_usd
        "forecast_usd": forecast.get("compute_usd", forecast.get("usd")),
        "total_usd": report.total_usd,
        "savings_usd": report.savings_usd,
        "hindsight_usd": found.get("usd"),
        "regret_usd": found.get("regret_usd"),
        "forecast_hours": forecast.get("hours"),
        "paid_rank_seconds": report.paid_rank_seconds,
        "interruptions": report.interruptions,
        "failures": report.failures,
        "redone_steps": report.redone_steps,
        "final_loss": figure_text.get_final_loss(report),
    }
    return {name: known.get(name, actual.get(name)) for name in JOB_COLUMNS}


def format_job_rows(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """Format one row per job with the columns of `JOB_HEADER`.

    For several jobs, a last row has the totals.
    """
    decimals = usd_decimals(max((report.total_usd for report in reports), default=0))
    rows = [_cells(build_job_row(report), decimals) for report in reports]
    if len(reports) > 1:
        total = sum(report.total_usd for report in reports)
        saved = [report.savings_usd for report in reports]
        if None in saved:
            savings = None
        else:
            savings = sum(usd for usd in saved if usd is not None)
        rows.append(
            (
                "total",
                "",
                "",
                "",
                format_usd(total, decimals),
                format_usd(savings, decimals),
                "",
                "",
                format_percent(_goodput(reports)),
                str(sum(report.interruptions for report in reports)),
                "",
            )
        )
    return rows


def render_table(reports: Sequence[RunReport]) -> str:
    """Render several jobs as a table of unlimited width, followed by notes on prices and damaged
    event logs.
    """
    table = format_table(format_job_rows(reports), JOB_HEADER, left=3, width=None)
    lines = [*(line.rstrip() for line in table), describe_price_kinds(reports)]
    for report in reports:
        damage = report.events.get("damage")
        if damage:
            job = one_line(report.job)
            lines.append(
                f"{job}: the event log is damaged in {len(damage)} places: ebbflow report {job}"
            )
    return "\n".join(lines)


def describe_price_kinds(reports: Sequence[RunReport]) -> str:
    """Describe where the prices in the table of jobs come from, and which columns are estimated."""
    kinds = sorted({one_line(report.actual.get("price_kind") or "unpriced") for report in reports})
    estimated = "forecast (compute alone, like paid), savings, regret: estimated"
    return f"paid: measured time at prices that are {'; '.join(kinds)}. {estimated}"


# One return per outcome.
def _advise(report: RunReport) -> tuple[str, list[str] | None]:  # noqa: PLR0911
    """Return advice for continuing the job, and the settings that a new run must change (None: use
    `resume`).
    """
    plan = report.plan or {}
    outcome = report.outcome
    refusal = plan.get("refusal") or {}
    if outcome is Outcome.INTERRUPTED:
        return "to continue from the last commit", None
    if outcome in (Outcome.FAILED, Outcome.CRASH_LOOP):
        return "fix the failure, then continue from the last commit", None
    if outcome is Outcome.BUDGET:
        # Spend as much again on top of the old budget, and at least what the plan's refusal asked
        # for.
        spent = float(report.total_usd)
        if spent:
            budget = spent + max(spent, plan.get("budget_usd") or 0.0)
        else:
            budget = 0.0
        budget_text = _round_up(max(budget, refusal.get("enough") or 0.0), "DOLLARS")
        return f"to continue with a larger budget {_SAME_OPTIONS}", [
            f"cost.budget_usd={budget_text}"
        ]
    if outcome is Outcome.DEADLINE:
        hours = plan.get("deadline_hours") or report.actual.get("wall_hours") or 0.0
        deadline = _round_up(refusal.get("enough") or 2 * hours, "HOURS")
        explanation = (
            f"to continue with a later deadline, which counts from the next start {_SAME_OPTIONS}"
        )
        return explanation, [f"cost.deadline_hours={deadline}"]
    if outcome is Outcome.NON_FINITE:
        steps = [step for step, loss in report.loss_curve if loss is None]
        if steps:
            at = f" at step {max(steps):,}"
        else:
            at = ""
        # The highest one, which is the configured one after the warm-up
        rate = report.actual.get("learning_rate")
        explanation = f"the same run would fail again{at}: lower the learning rate {_SAME_OPTIONS}"
        return explanation, [f"training.learning_rate={f'{rate / 2:.3g}' if rate else 'RATE'}"]
    if outcome is Outcome.NO_RESTORE:
        return (
            "restore an intact commit and continue, or discard all steps and start over "
            f"{_SAME_OPTIONS}",
            [],
        )
    if outcome is Outcome.ROLLED_BACK:
        return (
            "restore the newer commits and continue, or continue from the older one "
            f"{_SAME_OPTIONS}",
            [],
        )
    hint = one_line(refusal.get("hint") or "")
    return f"fix the failure{f' ({hint})' if hint else ''} and run again {_SAME_OPTIONS}", []


def _round_up(value: float, placeholder: str) -> str:
    """Round a positive number up to two significant digits.

    Return `placeholder` for any other value.
    """
    if not math.isfinite(value) or value <= 0:
        return placeholder
    exact = Decimal(str(value))
    return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), ROUND_CEILING).normalize():f}"


def _decisive(report: RunReport) -> JsonObject:
    return {
        row["key"]: row["value"] for row in report.configuration if row["key"].startswith(_DECISIVE)
    }


def _attempts(report: RunReport) -> list[list[str]]:
    """Render the attempts on AWS Batch or Slurm, if there are any."""
    sections = []
    attempts = (report.money.get("attempts") or [])[-_LISTED_ATTEMPTS:]
    if attempts:
        sections.append(
            format_table(figure_text.format_attempt_rows(attempts), figure_text.ATTEMPT_HEADER)
        )
        placed = map(": ".join, figure_text.format_placement_rows(attempts))
        sections.append(["where each attempt was placed, and why:", *_wrapped([*placed])])
    slurm_jobs = (report.money.get("slurm_jobs") or [])[-_LISTED_ATTEMPTS:]
    if slurm_jobs:
        sections.append(format_table(format_slurm_rows(slurm_jobs), SLURM_HEADER))
        reasons = [f"{job_id}: {why}" for job_id, why in list_reasons(slurm_jobs)]
        if reasons:
            sections.append(["why each Slurm job got its partition:", *_wrapped(reasons)])
    return sections


def _generations(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the newest generations as a table.

    Names of culprits are shortened to fit on one line.
    """
    more = len(rows) - _LISTED_GENERATIONS
    *names, last = figure_text.GENERATION_HEADER
    shown = rows[-_LISTED_GENERATIONS:]
    lines = format_table(
        [[*row[:-2], figure_text.shorten(row[-2], _LONGEST_END)] for row in shown], names
    )
    left = WIDTH - 2 - len(lines[0]) - 2
    culprits = [last, "─" * left, *(figure_text.shorten(row[-1], left) for row in shown)]
    table = [f"{line}  {culprit}" for line, culprit in zip(lines, culprits, strict=True)]
    return table + ([f"… and {more} earlier ones"] if more > 0 else [])


def _wrapped(lines: Sequence[str]) -> list[str]:
    pieces = []
    for line in lines:
        wrapped = textwrap.wrap(
            line, WIDTH - 4, initial_indent="· ", subsequent_indent="  ", break_on_hyphens=False
        )
        pieces.extend(wrapped or ["·"])
    return pieces


def _cells(row: dict[str, Any], decimals: int) -> tuple[str, ...]:
    return (
        figure_text.shorten(row["job"], _LONGEST_NAME),
        row["outcome"],
        figure_text.shorten(row["pool"], _LONGEST_NAME),
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
    """Return the share of all paid rank-seconds that was spent in useful steps; None if nothing was
    paid.
    """
    lines = []
    for report in reports:
        lines += [line for line in report.ledger if line.ledger_class == LedgerClass.USEFUL_STEP]
    paid = sum(report.paid_microseconds for report in reports)
    if paid:
        return sum(line.rank_microseconds for line in lines) / paid
    return None
