"""`ebbflow logs JOB`: find a job's logs, on this machine and in its store, and print what is asked for."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ebbflow.infra.errors import InfraError, StoreError
from ebbflow.infra.known_jobs import known_job, runs_folder
from ebbflow.infra.layout import check_job_name, job_prefix
from ebbflow.infra.logs.reading import Logs, LogsError, Wanted, describe, read_logs, select
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.store import Store

_STEP = "step:"
_REQUEST_SECONDS = 30.0


def add_logs_command(commands: argparse._SubParsersAction, project_root: Path) -> None:
    """`logs` and its options. project_root: where runs/ lies, unless EBBFLOW_RUNS says otherwise."""
    command = commands.add_parser("logs", help="what the ranks of a job printed, merged by time")
    command.add_argument("job", metavar="JOB", help="a job's name, or latest")
    command.add_argument("--rank", type=int, metavar="R", help="of this rank only")
    command.add_argument("--node", type=int, metavar="N", help="of this node only")
    command.add_argument("--generation", type=int, metavar="G", help="of this start of the gang only")
    command.add_argument("--around", type=_step, metavar="step:N", help="the lines nearest to that step")
    command.add_argument("--lines", type=_count, metavar="K", help="the last K; with --around K before and after (10)")
    command.add_argument("--json", action="store_true", help="the records as they are, one per line")
    command.add_argument("--store", metavar="URI", help="where the job lies, when this machine does not know it")
    command.set_defaults(command=lambda options: show_logs(options, project_root))


def show_logs(options: argparse.Namespace, project_root: Path) -> int:
    """Exit code 0, 1 when no line matches, 2 for a job that is not there."""
    wanted = Wanted(
        rank=options.rank,
        node=options.node,
        generation=options.generation,
        around_step=options.around,
        lines=options.lines,
    )
    try:
        logs = _find(options.job, options.store, project_root)
    except InfraError as error:
        print(f"logs: {error}", file=sys.stderr)
        return error.outcome.exit_code
    for notice in logs.notices:
        print(f"logs: {notice}", file=sys.stderr)
    chosen = select(logs.lines, wanted)
    if not chosen:
        print(f"logs: no line matches; job {options.job} has {describe(logs.lines)}", file=sys.stderr)
        return Outcome.FAILED.exit_code
    return _print([line.to_json() if options.json else line.render() for line in chosen])


def _find(job: str, store_uri: str | None, project_root: Path) -> Logs:
    """What this machine and the job's store hold; a store that does not answer is a notice when this machine has logs.

    Raises LogsError for a job that is not there, LayoutError for a name that no job can have,
    and StoreError for a store that does not answer.
    """
    runs = runs_folder(project_root)
    place = runs / job
    name = place.resolve().name if place.exists() else check_job_name(job)
    known = known_job(place)  # else the default store
    uri = (store_uri or (str(runs) if known is None else known.store)).removeprefix("file://")
    in_store = [] if "://" in uri else [Path(uri).resolve() / job_prefix(name)]
    folders = [folder for folder in dict.fromkeys([place.resolve(), *in_store]) if folder.is_dir()]
    try:
        store = _open_job(uri, name)
        if store is not None:
            return read_logs(folders, [store])
    except StoreError as error:
        logs = read_logs(folders, [])
        if not logs.lines:
            raise
        logs.notices.append(f"shown is what this machine has, the job's store does not answer: {error}")
        return logs
    if not folders:
        hint = f"{_jobs_there(runs)}, or name its store: --store URI"
        looked = f"  {place}\n  {uri}/{job_prefix(name)}/logs"
        raise LogsError(f"no job {job!r} to be found; looked at\n{looked}\n  hint: {hint}")
    return read_logs(folders, [])


def _open_job(uri: str, name: str) -> Store | None:
    """The job's part of a store, None when it has no logs. A folder that is not there is not made by looking."""
    if "://" not in uri and not Path(uri).is_dir():
        return None
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(name))
    return store if store.list("logs", limit=1) else None


def _jobs_there(runs: Path) -> str:
    found = [path for path in runs.glob("*") if (path / "logs").is_dir() and path.name != "latest"]
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:5]
    return f"{runs} has {', '.join(path.name for path in newest)}" if newest else f"{runs} has no job with logs"


def _print(lines: list[str]) -> int:
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return Outcome.COMPLETED.exit_code


def _step(text: str) -> int:
    number = text.removeprefix(_STEP)
    if not text.startswith(_STEP) or not number.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not step:N, such as step:120")
    return int(number)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines, 1 or more")
    return int(text)
