"""The options of `run` and `resume`, checked before Metaflow is imported."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from ebbflow.cost.jobs import list_known_jobs
from ebbflow.flows.checks import check_before_launch
from ebbflow.flows.job import RUNS
from ebbflow.flows.remote import option_values, requested_backend
from ebbflow.infra.config import ConfigError, LoadedConfig, load_config
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.events import read_events
from ebbflow.infra.layout import KnownJob, check_job_name, job_prefix, known_job
from ebbflow.infra.program import DEFAULT_CONFIG, PROJECT_ROOT
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.rollback import PERMITS, record_permits
from ebbflow.training.rehearse import Fault

_REQUEST_SECONDS = 10.0
# What a commit can only be continued with: the model, and which sample has which number.
_FIXED_FOR_A_JOB = ("workload", "workload_options", "model", "data", "training.seed")


def check_run_options(options: list[str]) -> list[str]:
    """The options of `run` with --config and --set replaced by the one checked configuration, as JSON.

    Permits are left out: `give_permits` records them, once the launcher holds the job (see `parse_permits`).

    Exits with 2 for a bad configuration, fault or job name, and with 3 when a quick check forbids the run.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=str(DEFAULT_CONFIG))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--rehearse", default="")
    parser.add_argument("--job", default="")
    add_permits(parser)
    known, rest = parser.parse_known_args(options)
    try:
        loaded = _loaded(known, requested_backend(sys.argv))
        if known.rehearse:
            _check_rehearsal(known.rehearse, loaded.config)
        if known.job:
            check_job_name(known.job)
    except ConfigError as error:
        _refuse(str(error), Outcome.CONFIG)
    except InfraError as error:
        _refuse(str(error), error.outcome)
    if said := check_before_launch(loaded.config, known.config, job=known.job or None, words=sys.argv):
        _refuse(said, Outcome.PREFLIGHT)
    if requested_permits(known) and not known.job:
        _refuse(
            "--from-scratch and --accept-rollback are about a job that exists; fix: name it with --job", Outcome.CONFIG
        )
    if known.job:
        _check_place(known.job, loaded.config.store)
        try:
            _check_continuation(known.job, loaded.config)
        except InfraError as error:
            _refuse(f"--job {known.job}: {error}", Outcome.PREFLIGHT)
    settings = {"path": known.config, "config": loaded.config.model_dump(mode="json"), "sources": loaded.sources}
    return ["--config", json.dumps(settings), "--rehearse", known.rehearse, "--job", known.job, *rest]


def add_permits(parser: argparse.ArgumentParser) -> None:
    """The options that allow a start to give up commits; nothing that runs unattended may decide that."""
    parser.add_argument(
        "--from-scratch", action="store_true", help="begin anew if no commit of the job can be restored"
    )
    parser.add_argument(
        "--accept-rollback", action="store_true", help="go on where the store has older commits than the job's events"
    )


def requested_permits(known: argparse.Namespace) -> list[str]:
    return [what for option, what in PERMITS.items() if getattr(known, option)]


def parse_permits(options: list[str]) -> list[str]:
    """The permits that the options of `run` ask for."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_permits(parser)
    return requested_permits(parser.parse_known_args(options)[0])


def give_permits(permits: Sequence[str], job: str, store: str) -> None:
    """Record in the job's store what a person allows for what the job has now. Raises InfraError.

    Only under a claim on the job: a launcher that is refused must not change what the job may give up.
    """
    if permits:
        record_permits(Store.open(store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job)), *permits)


def parse_checked_options(words: list[str]) -> tuple[str, RunConfig]:
    """Job name ("" where none was given) and configuration in the words that `check_run_options` returned."""
    values = dict(zip(words[0:6:2], words[1:6:2], strict=True))
    return values["--job"], RunConfig.model_validate_json(json.dumps(json.loads(values["--config"])["config"]))


def _loaded(known: argparse.Namespace, backend: str | None) -> LoadedConfig:
    """The configuration, its plan made for where --with sends the run: of another backend it would offer what that one
    cannot run, such as several nodes on Spot. Raises ConfigError.
    """
    load = partial(load_config, known.config, project_root=PROJECT_ROOT, cwd=Path.cwd())
    loaded = load(known.overrides)
    if backend is None or loaded.config.cluster.plan_for == backend:
        return loaded
    loaded = load([*known.overrides, f"cluster.plan_for={backend}"])
    return replace(loaded, sources={**loaded.sources, "cluster.plan_for": f"--with {backend}"})


def _check_rehearsal(text: str, config: RunConfig) -> None:
    fault = Fault.parse(text)
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    if isinstance(nodes, int) and isinstance(processes, int):
        fault.check(max_steps=config.training.max_steps, nodes=nodes, world_size=nodes * processes)


def _check_place(job: str, store: str) -> None:
    """One job of a name on one machine: runs/<job> would mix the reports and logs of two."""
    known = known_job(RUNS / job)
    if known is not None and known.store != store:
        _refuse(
            f"--job {job}: {RUNS / job} is about the job of that name in {known.store}, not in {store}\n"
            f"  hint: choose another --job, or set store to {known.store}; if the job was moved, delete {RUNS / job}",
            Outcome.CONFIG,
        )


def _check_continuation(job: str, config: RunConfig) -> None:
    """A job that exists goes on with its own model and data, or not at all."""
    store = Store.open(config.store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job))
    if store.head("config.json") is None:
        return
    try:
        document = json.loads(store.get("config.json"))
        before = _with_defaults(document.get("config", document))
    except (ValueError, AttributeError) as error:
        _refuse(
            f"--job {job}: {store.uri}/config.json is no JSON object ({error}); the job's commits are not affected\n"
            "  hint: delete that file; the next run writes it from its own configuration",
            Outcome.CONFIG,
        )
    now = config.model_dump(mode="json")
    changed = [
        f"  {path}: {json.dumps(_at(before, path))} before, {json.dumps(_at(now, path))} now"
        for path in _FIXED_FOR_A_JOB
        if _at(before, path) != _at(now, path)
    ]
    if changed:
        _refuse(
            f"job {job} exists in {config.store} and cannot go on with another model or other data:\n"
            + "\n".join(changed)
            + "\n  hint: choose another --job, or bring back the former values",
            Outcome.CONFIG,
        )


def _with_defaults(config: dict) -> dict:
    """A job that was begun before a key existed has its default; what no longer fits the schema stays as it is."""
    try:
        return RunConfig.model_validate_json(json.dumps(config)).model_dump(mode="json")
    except ValueError:
        return config


def _at(config: dict, path: str) -> object:
    value: object = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _refuse(text: str, outcome: Outcome) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(outcome.exit_code)


_MOST_ASKED = 8


def check_resume(words: list[str]) -> tuple[str, RunConfig, list[str]] | None:
    """Make Metaflow's settings from those of the job, and hold these against the quick checks that `run` makes.

    Returns the job's name, its configuration and the permits asked for; None where this machine does not know the job.

    words: the command line, from which the options that are Ebbflow's own are taken. Exits with 3 where one of them
    forbids the run. Of a job that this machine does not know, or whose store does not tell, nothing is checked; that is
    said.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_permits(parser)
    known, words[1:] = parser.parse_known_args(words[1:])
    found = _job_of(words)
    if found is None:
        if requested_permits(known):
            print("resume: the job is unknown here, so nothing of it is given up; fix: run --job NAME", file=sys.stderr)
            sys.exit(Outcome.CONFIG.exit_code)
        return None
    name, path, config = found
    if said := check_before_launch(config, path, job=name, words=words):
        print(said, file=sys.stderr)
        sys.exit(Outcome.PREFLIGHT.exit_code)
    return name, config, requested_permits(known)


def refuse_settings(options: Sequence[str]) -> None:
    """Exit with 2 when a `resume` is given options of `run`: it takes the settings of the run that it goes on with."""
    from ebbflow.flows.launcher import RUN_OPTIONS

    given = [word.partition("=")[0] for word in options if word.partition("=")[0] in RUN_OPTIONS]
    if given:
        print(
            f"resume takes no {' or '.join(dict.fromkeys(given))}: it goes on with the settings of the run before\n"
            "  hint: run --job NAME --set KEY=VALUE goes on with a job under changed settings",
            file=sys.stderr,
        )
        sys.exit(Outcome.CONFIG.exit_code)


def _job_of(words: Sequence[str]) -> tuple[str, str, RunConfig] | None:
    """(name, path of the configuration's file, configuration) of the job whose run a `resume` goes on with."""
    run = (option_values(words, "--origin-run-id") or [""])[-1]
    try:
        job = known_job(RUNS / run) or _find_job_of_run(run) if run else known_job(RUNS / "latest")
        if job is None:
            _say(f"{RUNS} knows no job of {f'run {run}' if run else 'an earlier run'}")
            return None
        _refuse_moved(job)
        document = json.loads(_store(job).get("config.json"))
        return job.name, document["path"], RunConfig.model_validate_json(json.dumps(document["config"]))
    except (InfraError, ValueError, KeyError) as error:
        _say(f"the settings of the job cannot be read: {error}")
        return None


def _refuse_moved(job: KnownJob) -> None:
    """Exit with 2 where the folder of the job is gone, for example since the project was moved."""
    folder = Path(job.uri.removeprefix("file://"))
    if "://" not in job.uri.removeprefix("file://") and not folder.is_dir():
        print(
            f"resume: job {job.name} was in {folder}, which does not exist\n"
            f"  hint: if the project was moved, delete {RUNS / job.name} and continue with: run --job {job.name}",
            file=sys.stderr,
        )
        sys.exit(Outcome.CONFIG.exit_code)


def _find_job_of_run(run: str) -> KnownJob | None:
    """The job that the run was one of, by the events of the jobs that this machine has started last."""
    folders = [RUNS / "latest", *(RUNS / name for name in list_known_jobs(RUNS)[-_MOST_ASKED:][::-1])]
    jobs = dict.fromkeys(job for folder in folders if (job := known_job(folder)) is not None)
    return next((job for job in jobs if _is_run_of(job, run)), None)


def _is_run_of(job: KnownJob, run: str) -> bool:
    try:
        return any(event.run == run for event in read_events(_store(job)))
    except InfraError:  # of another job, perhaps
        return False


def _store(job: KnownJob) -> Store:
    return Store.open(job.store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job.name))


def _say(why: str) -> None:
    print(f"resume: nothing is checked, and Metaflow's own settings hold: {why}", flush=True)
