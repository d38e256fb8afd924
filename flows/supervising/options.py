"""The supervisor's own options; all others are the flow's and are handed on as they are."""

from __future__ import annotations

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

from ebbflow.flows.options import add_permits, requested_permits
from ebbflow.infra.config import load_config
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.layout import check_job_name

MAX_FAILURES = 3
PAUSE_SECONDS = 10.0
CAPACITY_PAUSE_SECONDS = 300.0
WAIT_HOURS = 24.0


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """job: the name that every run gets. words: options of `run`, --config and --job included. max_failures: in a row
    without a new commit. pause_seconds: after the first run that gained nothing. capacity_pause_seconds: before asking
    again for capacity that was not there. wait_hours: the longest wait for capacity or for the store. take_over: the
    job from a launcher that runs it. permits: what the job may give up, recorded once; the runs get none.
    """

    job: str
    config: RunConfig
    words: tuple[str, ...]
    max_failures: int = MAX_FAILURES
    pause_seconds: float = PAUSE_SECONDS
    capacity_pause_seconds: float = CAPACITY_PAUSE_SECONDS
    wait_hours: float = WAIT_HOURS
    take_over: bool = False
    permits: tuple[str, ...] = ()


def read_options(arguments: list[str], *, project_root: Path) -> SupervisorOptions:
    """Exits with 2 where the words make no sense. Raises ConfigError or LayoutError for a bad configuration or name."""
    parser = _parser()
    if arguments[:1] in (["-h"], ["--help"]):
        parser.print_help()
        parser.exit()
    if not arguments or arguments[0].startswith("-"):
        parser.error("the configuration comes first, such as configs/laptop.yaml")
    path = arguments[0]
    known, rest = parser.parse_known_args(arguments)
    _check(parser, known)
    loaded = load_config(path, known.overrides, project_root=project_root, cwd=Path.cwd())
    job = check_job_name(known.job or _job_name(Path(path)))
    settings = [word for override in known.overrides for word in ("--set", override)]
    return SupervisorOptions(
        job=job,
        config=loaded.config,
        words=("--config", path, "--job", job, *settings, *rest),
        max_failures=known.max_failures,
        pause_seconds=known.pause_seconds,
        capacity_pause_seconds=known.capacity_pause_seconds,
        wait_hours=known.wait_hours,
        take_over=known.take_over,
        permits=tuple(requested_permits(known)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/supervise.py",
        allow_abbrev=False,
        description="Run a job, and go on with it after interruptions, until it is done, or budget, deadline or a "
        "failure that comes back end it. All other options are handed to `flows/train_flow.py run`.",
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the job; it stands first")
    parser.add_argument("--job", default="", help="name of the job (default: of the file, without its ending)")
    add_permits(parser)
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="KEY=VALUE, as for run")
    parser.add_argument(
        "--max-failures",
        type=int,
        default=MAX_FAILURES,
        help="runs in a row that may fail without a new commit (%(default)s); interruptions do not count",
    )
    parser.add_argument(
        "--pause-seconds",
        type=float,
        default=PAUSE_SECONDS,
        help="after a run that failed or came no further (%(default)s), then twice as long each time, at most 600",
    )
    parser.add_argument(
        "--capacity-pause-seconds",
        type=float,
        default=CAPACITY_PAUSE_SECONDS,
        help="before asking again where there was no capacity (%(default)s)",
    )
    parser.add_argument(
        "--wait-hours",
        type=float,
        default=WAIT_HOURS,
        help="the longest wait for capacity, or for a store that does not answer (%(default)s)",
    )
    parser.add_argument(
        "--take-over", action="store_true", help="end the launcher that runs the job now, and go on from its last save"
    )
    return parser


def _check(parser: argparse.ArgumentParser, known: argparse.Namespace) -> None:
    for name in ("max_failures", "pause_seconds", "capacity_pause_seconds", "wait_hours"):
        value, least = getattr(known, name), 1 if name == "max_failures" else 0
        if not least <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')} {value:g}: it must be a number from {least} on")


def _job_name(path: Path) -> str:
    """The same file leads to the same job, without a note anywhere: a killed supervisor is started as it was."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100]
