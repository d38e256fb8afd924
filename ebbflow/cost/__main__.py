"""Commands of the cost package, such as `ebbflow plan CONFIG`, `report` and `prices`.

They run without Metaflow.
"""

from __future__ import annotations

if __name__ == "__main__":  # before imports of installed packages
    from ebbflow.core.program import begin_program

    begin_program()
    from ebbflow.core.process import exit_when_interrupted

    exit_when_interrupted()

import argparse
import csv
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ebbflow.core.errors import InfraError
from ebbflow.core.process import run_command
from ebbflow.core.program import DEFAULT_CONFIG, PROJECT_ROOT
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.cost.catalogue_refresh import add_commands as add_catalogue_commands
from ebbflow.cost.errors import CostError, ReportError
from ebbflow.cost.finance.reconcile import add_command as add_reconcile
from ebbflow.cost.finance.replay import add_command as add_replay
from ebbflow.cost.job_list import add_command as add_jobs
from ebbflow.cost.jobs import find_running_launcher, list_jobs, read_job_log
from ebbflow.cost.prices.source import add_commands
from ebbflow.cost.report.render_text import JOB_COLUMNS, build_job_row, render_table
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.observe.watch import add_command as add_watch

if TYPE_CHECKING:
    from ebbflow.core.config.load import LoadedConfig
    from ebbflow.core.config.schema import RunConfig
    from ebbflow.core.footprint import ModelShape
    from ebbflow.cost.job_history import JobHistory

_REQUEST_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    guard_terminal()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    return run_command(lambda: arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ebbflow", description="What a job should cost, and what it did cost."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser(
        "plan", help="rank the capacity pools that could run a configuration"
    )
    plan.add_argument(
        "config", nargs="?", type=Path, default=DEFAULT_CONFIG, metavar="CONFIG", help="a YAML file"
    )
    plan.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key; repeatable",
    )
    plan.add_argument("--json", action="store_true", help="the whole plan as JSON")
    plan.add_argument(
        "--job", default=None, metavar="JOB", help="continue this job: plan only the remaining work"
    )
    front = "dollars against time to finish, over pools, markets, nodes and checkpoint intervals"
    plan.add_argument("--frontier", action="store_true", help=front)
    plan.add_argument(
        "--html",
        type=Path,
        default=None,
        metavar="FILE",
        help="with --frontier: also write it as a page",
    )
    plan.set_defaults(run=_plan)
    add_report(commands)
    add_jobs(commands)
    add_watch(commands)
    add_reconcile(commands)
    add_replay(commands)
    add_commands(commands, PROJECT_ROOT)
    commands.add_parser(
        "bench", help="measure plans and policies, simulate intervals", add_help=False
    )
    add_catalogue_commands(commands)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    from ebbflow.core.config.load import load_config
    from ebbflow.core.footprint import causal_lm_shape
    from ebbflow.cost.catalogue import load_catalogue
    from ebbflow.cost.frontier import find_frontier, render_frontier, render_frontier_page
    from ebbflow.cost.job_history import summarize_job
    from ebbflow.cost.jobs import read_job
    from ebbflow.cost.plan.candidates import NO_PROGRESS, PlanInputs, read_progress
    from ebbflow.cost.plan.plan import make_plan
    from ebbflow.cost.plan.plan_text import render_plan
    from ebbflow.cost.prices.reservations import open_evidence
    from ebbflow.cost.prices.source import open_prices
    from ebbflow.infra.batch import limit_to_queue_region, queues_to_plan

    loaded = load_config(arguments.config, arguments.set, project_root=PROJECT_ROOT)
    now = time.time()
    config = loaded.config
    if config.cluster.plan_for == "slurm" and not arguments.frontier:
        return _plan_on_slurm(loaded, arguments.job, as_json=arguments.json)
    queues = None
    if config.cluster.plan_for == "batch" and (config.batch.queues or config.cost.prices == "live"):
        config = limit_to_queue_region(config)
        queues = queues_to_plan(
            config.batch,
            ask=config.cost.prices == "live",
            notify=lambda text: print(text, file=sys.stderr),
        )
    prices = open_prices(config, now, project_root=PROJECT_ROOT)
    history = _job_history(loaded.config)
    shape = _measured_shape(loaded.config)
    progress = NO_PROGRESS
    if arguments.job is not None:
        events = read_job(arguments.job)
        progress = read_progress(events)
        history = history.adding(summarize_job(events))
    known = {
        "history": history,
        "progress": progress,
        "evidence": open_evidence(config),
        "queues": queues,
    }
    plan = make_plan(config, now_utc=now, prices=prices, shape=shape, compare_keys=True, **known)
    plan = plan.with_sources(loaded.sources)
    if arguments.frontier:
        sources = PlanInputs(
            catalogue=load_catalogue(),
            shape=shape or causal_lm_shape(config.model),
            prices=prices,
            now_utc=now,
            **known,
        )
        front = find_frontier(config, sources)
        if arguments.html is not None:
            try:
                arguments.html.write_text(render_frontier_page(front, plan), encoding="utf-8")
            except OSError as error:
                raise ReportError(
                    f"{arguments.html}: cannot be written: {error.strerror}"
                ) from error
        found = [point.to_json() for point in front]
        print(
            json.dumps(found, indent=1, allow_nan=False)
            if arguments.json
            else render_frontier(front, plan)
        )
    else:
        print(
            json.dumps(plan.to_json(), indent=1, allow_nan=False)
            if arguments.json
            else render_plan(plan)
        )
    if plan.refusal is None:
        return 0
    return plan.refusal.outcome.exit_code


def _plan_on_slurm(loaded: LoadedConfig, job: str | None, *, as_json: bool) -> int:
    from ebbflow.cost.jobs import read_job
    from ebbflow.cost.plan.candidates import read_progress
    from ebbflow.cost.plan.partitions import (
        explain_ignored_budget,
        make_partition_plan,
        read_evidence,
    )
    from ebbflow.cost.plan.plan_text import render_plan

    config = loaded.config
    events = [] if job is None else read_job(job)
    plan = make_partition_plan(
        config,
        events,
        now_utc=time.time(),
        progress=read_progress(events),
        evidence=read_evidence(config),
        shape=_measured_shape(config),
    ).with_sources(loaded.sources)
    if as_json:
        print(json.dumps(plan.to_json(), indent=1, allow_nan=False))
    else:
        ignored = explain_ignored_budget(config)
        print("\n".join(filter(None, [ignored, render_plan(plan)])))
    return 0 if plan.refusal is None else plan.refusal.outcome.exit_code


def add_report(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report", help="a job's report from its events, or several jobs side by side"
    )
    parser.add_argument(
        "job",
        nargs="*",
        metavar="RUN",
        help=(
            "names of jobs, 'latest', folders or s3:// URIs; none: all of --store, else of this "
            "machine"
        ),
    )
    parser.add_argument("--store", default=None, metavar="URI", help="the store of the jobs")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--json", action="store_true", help="the report as JSON; of several jobs a list of them"
    )
    shape.add_argument("--csv", action="store_true", help="one line for each job")
    shape.add_argument(
        "--configuration",
        action="store_true",
        help="each key's value and where it came from instead",
    )
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    jobs = arguments.job or list_jobs(arguments.store)
    if not jobs:
        raise ReportError(
            "no job in "
            f"{arguments.store or 'the list of this machine; fix: name one, or give --store'}"
        )
    reports = _reports(jobs, arguments.store, strict=bool(arguments.job))
    if arguments.csv:
        writer = csv.DictWriter(sys.stdout, JOB_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(build_job_row(report) for report in reports)
    elif arguments.json:
        found = [report.to_json() for report in reports]
        print(json.dumps(found[0] if len(arguments.job) == 1 else found, indent=1, allow_nan=False))
    elif len(arguments.job) == 1:
        _print_one(reports[0], configuration=arguments.configuration)
    else:
        print(render_table(reports))
    return 0


def _reports(jobs: list[str], store: str | None, *, strict: bool) -> list[RunReport]:
    """Build the report of each job.

    For an unreadable job, raise the error if `strict`; else print it and continue.
    """
    found = []
    for job in jobs:
        try:
            content = read_job_log(job, store)
            running = find_running_launcher(job, content.events, store)
            found.append(build_report(content.events, running=running, damage=content.damage))
        except (CostError, InfraError) as error:
            if strict:
                raise
            print(f"{job} is left out: {' '.join(str(error).split())}", file=sys.stderr)
    if not found:
        raise ReportError("none of the jobs known to this machine can be read")
    return found


def _print_one(report: RunReport, *, configuration: bool) -> None:
    from ebbflow.core.config.load import render_sources
    from ebbflow.cost.report.render_text import render

    if configuration:
        print(
            render_sources(report.configuration) or "the configuration of this job was not recorded"
        )
    else:
        print(render(report))


def _job_history(config: RunConfig) -> JobHistory:
    from ebbflow.core.store import Store
    from ebbflow.cost.job_history import load_job_history, load_or_use_priors

    store = partial(
        Store.open, config.store, request_timeout_seconds=_REQUEST_SECONDS, create=False
    )
    return load_or_use_priors(lambda: load_job_history(store()), partial(print, file=sys.stderr))


def _measured_shape(config: RunConfig) -> ModelShape | None:
    """Prepare the data of the user's own workload, measure its model and return the `ModelShape`.

    Returns None for the built-in model.
    """
    if config.user_code is None:
        return None
    from ebbflow.tryout.examine import examine

    return examine(config, prepare=True).shape


if __name__ == "__main__":
    sys.exit(main())
