"""`ebbflow report [RUN …] [--json | --csv]`: one job in full, or several side by side."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from typing import Any

from ebbflow.cost.errors import CostError, ReportError
from ebbflow.cost.jobs.load import known_job_names, read_job_log, read_running
from ebbflow.cost.report.figures import number, percent, plain, pool_text, usd, usd_decimals
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger_classes import LedgerClass

# Of a CSV: plain numbers and words, dollars to six decimals.
COLUMNS = (
    "job", "owner", "project", "outcome", "pool", "price_kind", "forecast_usd", "total_usd", "savings_usd",
    "hindsight_usd", "regret_usd", "forecast_hours", "wall_hours", "paid_rank_seconds", "goodput", "interruptions",
    "failures", "redone_steps", "steps", "tokens_per_second", "final_loss",
)  # fmt: skip
HEADER = ("job", "outcome", "pool", "forecast", "paid", "savings", "regret", "hours", "goodput", "interr.", "loss")
_LONGEST = 34


def as_row(report: RunReport) -> dict[str, Any]:
    """One job by `COLUMNS`; None for what is not known."""
    money, actual = report.money, report.actual
    forecast, found = money.get("forecast") or {}, money.get("hindsight") or {}
    known = {
        "job": plain(report.job),
        "owner": plain(money.get("owner") or ""),
        "project": plain(money.get("project") or ""),
        "outcome": report.state,
        "pool": plain(pool_text(report.plan)),
        "price_kind": plain(actual.get("price_kind") or ""),
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
    return {name: known.get(name, actual.get(name)) for name in COLUMNS}


def table_rows(reports: Sequence[RunReport]) -> list[tuple[str, ...]]:
    """`HEADER` of each job and, of several, a last row with the sums of what can be summed."""
    decimals = usd_decimals(max((report.total_usd for report in reports), default=0))
    rows = [_cells(as_row(report), decimals) for report in reports]
    if len(reports) > 1:
        total = sum(report.total_usd for report in reports)
        saved = [report.savings_usd for report in reports]
        savings = None if None in saved else sum(usd for usd in saved if usd is not None)
        rows.append(
            ("total", "", "", "", usd(total, decimals), usd(savings, decimals), "", "", percent(_goodput(reports)),
             str(sum(report.interruptions for report in reports)), "")
        )  # fmt: skip
    return rows


def render_table(reports: Sequence[RunReport]) -> str:
    """For the terminal, as wide as it must be, with what the dollars are."""
    table = [HEADER, *table_rows(reports)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
    lines.insert(1, "─" * len(lines[0]))
    return "\n".join([*lines, kinds_text(reports), *_damaged(reports)])


def _damaged(reports: Sequence[RunReport]) -> list[str]:
    """Jobs whose figures are folded from a damaged event log."""
    places = [(plain(report.job), len(report.events.get("damage") or [])) for report in reports]
    return [
        f"{job}: the event log is damaged in {found} places: ebbflow report {job}" for job, found in places if found
    ]


def kinds_text(reports: Sequence[RunReport]) -> str:
    """How the dollars of the table are to be read."""
    kinds = sorted({plain(report.actual.get("price_kind") or "unpriced") for report in reports})
    estimated = "forecast (compute alone, as what is paid), savings, regret: estimated"
    return f"paid: measured time at prices that are {'; '.join(kinds)}. {estimated}"


def _cells(row: dict[str, Any], decimals: int) -> tuple[str, ...]:
    return (
        _short(row["job"]),
        row["outcome"],
        _short(row["pool"]),
        usd(row["forecast_usd"], decimals),
        usd(row["total_usd"], decimals),
        usd(row["savings_usd"], decimals),
        usd(row["regret_usd"], decimals),
        number(row["wall_hours"], 3),
        percent(row["goodput"]),
        str(row["interruptions"]),
        number(row["final_loss"]),
    )


def _goodput(reports: Sequence[RunReport]) -> float | None:
    """Useful steps' share of the rank-seconds that all jobs paid for; None when they paid for none."""
    lines = [line for report in reports for line in report.ledger if line.ledger_class == LedgerClass.USEFUL_STEP]
    paid = sum(report.paid_microseconds for report in reports)
    return sum(line.rank_microseconds for line in lines) / paid if paid else None


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def add_command(commands: Any) -> None:
    parser = commands.add_parser("report", help="a job's report from its events, or several jobs side by side")
    parser.add_argument(
        "job",
        nargs="*",
        metavar="RUN",
        help="names of jobs, 'latest', folders or s3:// URIs; none: all of this machine",
    )
    parser.add_argument("--store", default=None, metavar="URI", help="where the jobs lie, if not as this machine knows")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="the report as JSON; of several jobs a list of them")
    shape.add_argument("--csv", action="store_true", help="one line for each job")
    shape.add_argument("--configuration", action="store_true", help="each key's value and where it came from instead")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    jobs = arguments.job or known_job_names()
    if not jobs:
        raise ReportError("no job is known to this machine; name one, or say where with --store")
    reports = _reports(jobs, arguments.store, all_must=bool(arguments.job))
    if arguments.csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(as_row(report) for report in reports)
    elif arguments.json:
        found = [report.to_json() for report in reports]
        print(json.dumps(found[0] if len(arguments.job) == 1 else found, indent=1, allow_nan=False))
    elif len(arguments.job) == 1:
        _print_one(reports[0], configuration=arguments.configuration)
    else:
        print(render_table(reports))
    return 0


def _reports(jobs: list[str], store: str | None, *, all_must: bool) -> list[RunReport]:
    """all_must: a job that cannot be read is an error; else it is named, and the others are reported."""
    found = []
    for job in jobs:
        try:
            content = read_job_log(job, store)
            running = read_running(job, content.events, store)
            found.append(build_report(content.events, running=running, damage=content.damage))
        except (CostError, InfraError) as error:
            if all_must:
                raise
            print(f"{job} is left out: {' '.join(str(error).split())}", file=sys.stderr)
    if not found:
        raise ReportError("none of the jobs that this machine knows can be read")
    return found


def _print_one(report: RunReport, *, configuration: bool) -> None:
    from ebbflow.cost.report.render_text import render
    from ebbflow.infra.config.sources import render_sources

    if configuration:
        print(render_sources(report.configuration) or "the configuration of this job was not recorded")
    else:
        print(render(report))
