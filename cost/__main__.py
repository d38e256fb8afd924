"""`python -m cost plan CONFIG`, `… report JOB` and `… prices record|show`: the money without Metaflow."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cost.bench.commands import add_commands as add_bench_commands
from cost.errors import CostError, ReportError
from cost.prices.commands import add_commands
from infra.errors import InfraError
from infra.outcome import Outcome
from infra.process import reader_has_left

if TYPE_CHECKING:
    from infra.config.schema import RunConfig
    from infra.model_shape import ModelShape

_PROJECT_ROOT = Path(__file__).resolve().parents[1]
_REQUEST_SECONDS = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except (CostError, InfraError) as error:
        print(error, file=sys.stderr)
        return error.outcome.exit_code
    except BrokenPipeError:
        return reader_has_left()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cost", description="What a job should cost, and what it did cost.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plan = commands.add_parser("plan", help="rank the capacity pools that could run a configuration")
    plan.add_argument("config", type=Path, metavar="CONFIG", help="a YAML file such as configs/laptop.yaml")
    plan.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable")
    plan.add_argument("--json", action="store_true", help="the whole plan as JSON")
    plan.set_defaults(run=_plan)
    report = commands.add_parser("report", help="rebuild a job's report from its events")
    report.add_argument("job", metavar="JOB_OR_URI", help="a job's name, 'latest', or the folder or s3:// URI of a job")
    report.add_argument("--store", default=None, metavar="URI", help="where the job lies, if not as this machine knows")
    report.add_argument("--json", action="store_true", help="the report as JSON")
    report.add_argument("--configuration", action="store_true", help="each key's value and where it came from instead")
    report.set_defaults(run=_report)
    add_commands(commands, _PROJECT_ROOT)
    add_bench_commands(commands)
    return parser


def _plan(arguments: argparse.Namespace) -> int:
    from cost.plan import make_plan
    from cost.plan_text import render_plan
    from cost.prices.source import open_prices
    from infra.config.load import load_config
    from infra.config.problems import ConfigError

    try:
        loaded = load_config(arguments.config, arguments.set, project_root=_PROJECT_ROOT)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return Outcome.CONFIG.exit_code
    now = time.time()
    prices = open_prices(loaded.config, now, project_root=_PROJECT_ROOT)
    plan = make_plan(loaded.config, now_utc=now, prices=prices, shape=_measured_shape(loaded.config))
    print(json.dumps(plan.to_json(), indent=1, allow_nan=False) if arguments.json else render_plan(plan))
    return 0 if plan.refusal is None else plan.refusal.outcome.exit_code


def _measured_shape(config: RunConfig) -> ModelShape | None:
    """Of a workload of one's own, whose data are prepared for it; exits with what is wrong with it."""
    if config.workload is None:
        return None
    from training.errors import TrainingError
    from training.workloads.examine import examine

    try:
        return examine(config, prepare=True).shape
    except TrainingError as error:
        print(error, file=sys.stderr)
        sys.exit(error.outcome.exit_code)


def _report(arguments: argparse.Namespace) -> int:
    from cost.render_text import render
    from cost.report import build_report
    from infra.events import read_events
    from infra.store import Store

    uri = _job_uri(arguments.job, arguments.store)
    events = read_events(Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS))
    if not events:
        raise ReportError(f"no events of job {arguments.job!r} in {uri}")
    report = build_report(events)
    if arguments.configuration:
        from infra.config.sources import render_sources

        print(render_sources(report.configuration) or "the configuration of this job was not recorded")
        return 0
    print(json.dumps(report.to_json(), indent=1, allow_nan=False) if arguments.json else render(report))
    return 0


def _job_uri(job: str, store: str | None) -> str:
    """Where the job's events are: a URI as given, a folder that holds them, or a job of the store.

    Without a store: the one in which the job lies, if it was started from this machine.
    """
    from infra.known_jobs import known_job, runs_folder
    from infra.layout import job_prefix

    if "://" in job:
        return job
    if store is not None and "://" in store:
        return f"{store.rstrip('/')}/{job_prefix(job)}"
    root = runs_folder(_PROJECT_ROOT) if store is None else Path(store)
    places = [Path(job), root / job_prefix(job), root / job]
    known = known_job(root / job) or known_job(Path(job))
    if store is None and known is not None:
        if "://" in known.uri:
            return known.uri
        places.append(Path(known.uri))
    for place in places:
        if (place / "events").is_dir():
            return str(place)
    listed = "\n".join(f"  {place}/events" for place in places)
    raise ReportError(f"no events of job {job!r}; looked for\n{listed}")


if __name__ == "__main__":
    sys.exit(main())
