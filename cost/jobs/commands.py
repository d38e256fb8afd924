"""`python -m cost report [RUN …] [--json | --csv]`: one job in full, or several side by side."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from typing import Any

from cost.errors import CostError, ReportError
from cost.jobs.find import known_job_names, read_job
from cost.jobs.table import COLUMNS, as_row, render_table
from cost.report.report import RunReport, build_report
from infra.errors import InfraError


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
            found.append(build_report(read_job(job, store)))
        except (CostError, InfraError) as error:
            if all_must:
                raise
            print(f"{job} is left out: {' '.join(str(error).split())}", file=sys.stderr)
    if not found:
        raise ReportError("none of the jobs that this machine knows can be read")
    return found


def _print_one(report: RunReport, *, configuration: bool) -> None:
    from cost.report.render_text import render
    from infra.config.sources import render_sources

    if configuration:
        print(render_sources(report.configuration) or "the configuration of this job was not recorded")
    else:
        print(render(report))
