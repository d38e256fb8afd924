"""Render the jobs of a team as one self-contained HTML page: states, dollars by day and owner,
failures by cause.
"""

from collections.abc import Mapping, Sequence
from decimal import Decimal

from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import NONE, format_count, format_percent, format_usd
from ebbflow.cost.ledger.pricing import SIMULATED
from ebbflow.cost.report.render_html import escape, fill_page, render_html_table
from ebbflow.cost.report.report import RunReport
from ebbflow.cost.report.verdict import describe_cause, describe_simulation

_HEADER = (
    "job",
    "project",
    "owner",
    "state",
    "progress",
    "spent",
    "forecast",
    "savings",
    "interruptions",
    "first failure",
)
_MOST_DAYS = 60


def render_jobs_page(
    rows: Sequence[tuple[str, str, str, str, float, float | None]],
    reports: Mapping[str, RunReport],
    charges: Sequence[Mapping[str, str]],
) -> str:
    """Render the page of a team's jobs.

    Args:
        rows: One row per job: name, project, owner, state, spent dollars and forecast dollars.
        reports: Reports by name of the job; a job that never started has none.
        charges: FOCUS rows of all jobs (`cost.finance.focus`).
    """
    spent = sum(row[4] for row in rows)
    states = [row[3] for row in rows]
    saved = [
        float(report.savings_usd) for report in reports.values() if report.savings_usd is not None
    ]
    running = states.count("running")
    verdict = f"{format_count(len(rows), 'job')}, {running:,} running; {format_usd(spent)} spent"
    verdict += f", {format_usd(sum(saved))} saved against the on-demand price of the useful work"
    simulated = sum(report.actual.get("price_kind") == SIMULATED for report in reports.values())
    if simulated:
        verdict += f"; prices of {format_count(simulated, 'job')} are simulated"
    table = render_html_table(_HEADER, [_cells(row, reports.get(row[0])) for row in rows])
    main = (
        f'<header id="header"><h1>Jobs</h1><p class="verdict">{escape(verdict)}</p></header>'
        f'<section id="jobs"><h2>Jobs</h2>{table}</section>{_by_day(charges)}{_by_cause(reports)}'
    )
    return fill_page(main, '{"figures":[]}', "Ebbflow jobs", running=False)


def _cells(
    row: tuple[str, str, str, str, float, float | None], report: RunReport | None
) -> tuple[str, ...]:
    job, project, owner, state, spent, forecast = row
    if report is None:
        found = {}
    else:
        found = report.progress
    done = found.get("step")
    total = found.get("steps")
    return (
        one_line(job),
        one_line(project),
        one_line(owner),
        one_line(state),
        NONE if not total else f"{format_percent((done or 0) / total, 0)} of {total:,}",
        f"{format_usd(spent)}{'' if report is None else describe_simulation(report)}",
        format_usd(forecast),
        format_usd(None if report is None else report.savings_usd),
        NONE if report is None else str(report.interruptions),
        "" if report is None else describe_cause(report),
    )


def _by_day(charges: Sequence[Mapping[str, str]]) -> str:
    """Render one row per UTC day, with the dollars of each owner and a bar for their sum.

    A charge for several days counts on its first day.
    """
    days: dict[str, dict[str, Decimal]] = {}
    for row in charges:
        day = days.setdefault(row["ChargePeriodStart"][:10], {})
        owner = one_line(row.get("x_Owner") or "no owner")
        day[owner] = day.get(owner, Decimal(0)) + Decimal(row["BilledCost"])
    if not days:
        return ""
    highest = max(sum(owners.values()) for owners in days.values()) or Decimal(1)
    bars = []
    for day, owners in sorted(days.items())[-_MOST_DAYS:]:
        total = sum(owners.values())
        names = ", ".join(
            f"{owner} {format_usd(usd)}"
            for owner, usd in sorted(owners.items(), key=lambda item: -item[1])
        )
        bars.append(
            f'<div class="cause"><span>{escape(day)} <small class="quiet">{escape(names)}</small></span>'
            f'<div class="meter"><i style="width:{float(100 * total / highest):.1f}%"></i></div>'
            f"<b>{escape(format_usd(total))}</b></div>"
        )
    return f'<section id="days"><h2>Dollars by day and owner</h2>{"".join(bars)}</section>'


def _by_cause(reports: Mapping[str, RunReport]) -> str:
    """Render one row per cause of interruptions, with the number of interrupted jobs and the total
    cost.
    """
    found: dict[str, tuple[int, float]] = {}
    for report in reports.values():
        for line in report.money.get("causes") or []:
            if str(line["cause"]).startswith("interruption"):
                cause = one_line(line["cause"]).removeprefix("interruption: ")
                jobs, usd = found.get(cause, (0, 0.0))
                found[cause] = jobs + 1, usd + line["usd"]
    rows = [
        (cause, str(jobs), format_usd(usd))
        for cause, (jobs, usd) in sorted(found.items(), key=lambda item: -item[1][1])
    ]
    table = render_html_table(("cause", "jobs", "cost of interruptions"), rows)
    if rows:
        return f'<section id="causes"><h2>Failures by cause</h2>{table}</section>'
    return ""
