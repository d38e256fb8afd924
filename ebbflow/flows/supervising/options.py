"""Command-line options of the supervisor. All other options are passed to the flow."""

import argparse
import math
import re
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.config import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.layout import check_job_name
from ebbflow.training.checkpoint.rollback import add_permits, requested_permits

MAX_FAILURES = 3
PAUSE_SECONDS = 10.0
CAPACITY_PAUSE_SECONDS = 300.0
WAIT_HOURS = 24.0
_LIMITS = {
    "max_failures": (
        MAX_FAILURES,
        "runs in a row that may fail without a new commit (%(default)s); interruptions do not "
        "count",
    ),
    "pause_seconds": (
        PAUSE_SECONDS,
        "after a run without progress (%(default)s), then twice as long each time, at most 600",
    ),
    "capacity_pause_seconds": (
        CAPACITY_PAUSE_SECONDS,
        "before the next request for missing capacity (%(default)s)",
    ),
    "wait_hours": (
        WAIT_HOURS,
        "longest wait for capacity, or for a store that does not answer (%(default)s)",
    ),
}


@dataclass(frozen=True, kw_only=True)
class SupervisorOptions:
    """Parsed command line of the supervisor."""

    job: str  # name that every run gets with --job
    config: RunConfig
    words: tuple[str, ...]  # options of `run` for every run, including --config and --job
    # Number of failures in a row, without a new commit, that end the job
    max_failures: int = MAX_FAILURES
    pause_seconds: float = PAUSE_SECONDS  # pause after the first run without progress
    # Pause before capacity is requested again
    capacity_pause_seconds: float = CAPACITY_PAUSE_SECONDS
    wait_hours: float = WAIT_HOURS  # longest wait for capacity, or for a store that does not answer
    take_over: bool = False  # take the job from a launcher that runs it now
    again: bool = False  # start although the job has ended for good under these settings
    permits: tuple[
        str, ...
    ] = ()  # to give up commits (--from-scratch, --accept-rollback); recorded once


def read_options(arguments: list[str], *, project_root: Path) -> SupervisorOptions:
    """Parse the supervisor's command line.

    Exits with 2 if it is invalid. Raises ConfigError or LayoutError.
    """
    parser = _parser()
    if arguments[:1] in (["-h"], ["--help"]):
        parser.print_help()
        parser.exit()
    if not arguments or arguments[0].startswith("-"):
        parser.error("the first argument must be the configuration, such as configs/laptop.yaml")
    path = arguments[0]
    known, rest = parser.parse_known_args(arguments)
    _check(parser, known)
    loaded = load_config(path, known.overrides, project_root=project_root, cwd=Path.cwd())
    job = check_job_name(known.job or _job_name(Path(path)))
    settings = []
    for override in known.overrides:
        settings.extend(("--set", override))
    return SupervisorOptions(
        job=job,
        config=loaded.config,
        words=("--config", path, "--job", job, *settings, *rest),
        max_failures=known.max_failures,
        pause_seconds=known.pause_seconds,
        capacity_pause_seconds=known.capacity_pause_seconds,
        wait_hours=known.wait_hours,
        take_over=known.take_over,
        again=known.again,
        permits=tuple(requested_permits(known)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python flows/supervise.py",
        allow_abbrev=False,
        description=(
            "Run a job and continue it after interruptions until it is done, or until budget, "
            "deadline or a repeated failure ends it. All other options are passed to "
            "`flows/train_flow.py run`."
        ),
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file of the job; the first argument")
    parser.add_argument(
        "--job", default="", help="name of the job (default: the file's name without its suffix)"
    )
    add_permits(parser)
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", help="KEY=VALUE, as for run"
    )
    for name, (default, text) in _LIMITS.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=type(default), default=default, help=text)
    resume = "end the launcher that runs the job now, and continue from its last commit"
    parser.add_argument(
        "--again",
        action="store_true",
        help="start a job that has ended with a final outcome under the same settings",
    )
    parser.add_argument("--take-over", action="store_true", help=resume)
    return parser


def _check(parser: argparse.ArgumentParser, known: argparse.Namespace) -> None:
    for name in _LIMITS:
        value = getattr(known, name)
        if name == "max_failures":
            least = 1
        else:
            least = 0
        if not least <= value < math.inf:
            parser.error(
                f"--{name.replace('_', '-')} {value:g}: must be a number of at least {least}"
            )


def _job_name(path: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100]
