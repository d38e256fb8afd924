"""The options of `run` and `resume`, checked before Metaflow is imported so that errors appear at
once.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from ebbflow.core.config import LoadedConfig, load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.events import read_events
from ebbflow.core.layout import KnownJob, check_job_name, job_prefix, known_job
from ebbflow.core.program import DEFAULT_CONFIG, IMPORT_ROOT, PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.cost.jobs import list_known_jobs
from ebbflow.flows.checks import check_before_launch
from ebbflow.flows.job import RUNS
from ebbflow.flows.remote import option_values, requested_backend
from ebbflow.training.attach.script_folder import pack_script
from ebbflow.training.checkpoint.rollback import add_permits, record_permits, requested_permits
from ebbflow.training.rehearse import Fault

_REQUEST_SECONDS = 10.0
# Settings that cannot change once a job has commits: the model, and the numbering of samples.
_FIXED_FOR_A_JOB = ("script", "workload", "workload_options", "model", "data", "training.seed")


def check_run_options(options: list[str]) -> list[str]:
    """Check the options of `run`, and return them with --config and --set merged into one
    configuration as JSON.

    The result does not contain --from-scratch and --accept-rollback. The launcher records these
    permissions after it has claimed the job (`parse_permits`, `give_permits`). Exits with 2 for a
    bad configuration, fault or job name, and with 3 if a quick check forbids the run.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=None)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--rehearse", default="")
    parser.add_argument("--job", default="")
    add_permits(parser)
    known, rest = parser.parse_known_args(options)
    known.overrides = [override for given in known.overrides for override in parse_overrides(given)]
    if known.config is None and not any(one.startswith("script=") for one in known.overrides):
        known.config = str(DEFAULT_CONFIG)
    if known.config is not None:
        config = parse_json_option(known.config)
        if isinstance(config, str):
            known.config = config
        else:
            known.config = json.dumps(config, indent=1)
    try:
        loaded = _loaded(known)
        cluster = loaded.config.cluster
        steps = loaded.config.training.max_steps
        if known.rehearse and (fault := Fault.parse(known.rehearse)):
            nodes = cluster.nodes
            processes = cluster.processes_per_node
            if isinstance(nodes, int) and isinstance(processes, int):
                if loaded.config.script:
                    steps = sys.maxsize  # the steps of a script are not known yet
                fault.check(max_steps=steps, nodes=nodes, world_size=nodes * processes)
        if known.job:
            check_job_name(known.job)
    except InfraError as error:
        _refuse(str(error), error.outcome)
    if known.config is None or known.config.startswith("{"):
        path = ""
    else:
        path = known.config
    if refusal := check_before_launch(loaded.config, path, job=known.job or None, words=sys.argv):
        _refuse(refusal, Outcome.PREFLIGHT)
    if requested_permits(known) and not known.job:
        _refuse(
            "--from-scratch and --accept-rollback need an existing job; fix: name it with --job",
            Outcome.CONFIG,
        )
    if known.job:
        _check_place(known.job, loaded.config.store)
        try:
            _check_continuation(known.job, loaded.config)
        except InfraError as error:
            _refuse(f"--job {known.job}: {error}", Outcome.PREFLIGHT)
    settings = {
        "path": path,
        "config": loaded.config.model_dump(mode="json"),
        "sources": loaded.sources,
    }
    if loaded.config.script is not None:
        settings["config"] = loaded.script_settings()
        settings["script_sha256"] = None
        if requested_backend(sys.argv, loaded.config.cluster.plan_for) is not None:
            try:
                settings["script_sha256"] = pack_script(
                    loaded.config, Store.open(loaded.config.store)
                )
            except InfraError as error:
                _refuse(str(error), error.outcome)
    return [
        "--config",
        json.dumps(settings),
        "--rehearse",
        known.rehearse,
        "--job",
        known.job,
        *rest,
    ]


def parse_json_option(given: str) -> Any:
    """Return an option's value, decoded if it is a string, list or dictionary in JSON.

    Metaflow's `Runner` passes such values as JSON.
    """
    with contextlib.suppress(ValueError):
        value = json.loads(given)
        if isinstance(value, str | list | dict):
            return value
    return given


def parse_overrides(given: str) -> list[str]:
    """Return the overrides ("key=value") in one --set option.

    Metaflow's `Runner` passes several of them as JSON.
    """
    value = parse_json_option(given)
    if isinstance(value, dict):
        return [f"{key}={json.dumps(one)}" for key, one in value.items()]
    if isinstance(value, list):
        return [str(one) for one in value]
    return [value]


def parse_permits(options: list[str]) -> tuple[list[str], list[str]]:
    """Return the permissions that the user gave with the options of `add_permits`, and all other
    options.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_permits(parser)
    known, rest = parser.parse_known_args(options)
    return requested_permits(known), rest


def give_permits(permits: Sequence[str], job: str, store: str) -> None:
    """Record in the job's store that the user permits the job to continue although commits are
    lost.

    Call this only after this process has claimed the job, because a launcher without the claim must
    not change the job. Raises InfraError.
    """
    if permits:
        record_permits(
            Store.open(store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job)),
            *permits,
        )


def parse_checked_options(words: list[str]) -> tuple[str, RunConfig]:
    """Return the job's name ("" if it has none) and its configuration, given the result of
    `check_run_options`.
    """
    values = dict(zip(words[0:6:2], words[1:6:2], strict=True))
    return values["--job"], RunConfig.model_validate_json(
        json.dumps(json.loads(values["--config"])["config"])
    )


def _loaded(known: argparse.Namespace) -> LoadedConfig:
    """Load the configuration.

    The backend that `--with` names becomes cluster.plan_for. Raises ConfigError.
    """
    load = partial(load_config, known.config, project_root=PROJECT_ROOT, cwd=Path.cwd())
    loaded = load(known.overrides)
    backend = requested_backend(sys.argv, loaded.config.cluster.plan_for)
    if backend is None or loaded.config.cluster.plan_for == backend:
        return loaded
    loaded = load([*known.overrides, f"cluster.plan_for={backend}"])
    return replace(loaded, sources={**loaded.sources, "cluster.plan_for": f"--with {backend}"})


def _check_place(job: str, store: str) -> None:
    """Exit with 2 if runs/<job> on this machine belongs to a job of the same name in another store.

    The same holds for a new job in PROJECT_ROOT/runs, if an earlier version left a job of that name
    in the checkout.
    """
    place = job_prefix(job)
    former = IMPORT_ROOT / "runs"
    if (
        store == str(PROJECT_ROOT / "runs")
        and (former / place).is_dir()
        and not Path(store, place).is_dir()
    ):
        hint = f"hint: continue it with EBBFLOW_PROJECT={IMPORT_ROOT}, or choose another --job"
        _refuse(
            f"--job {job}: {former} has a job of that name, and {store} has none\n  {hint}",
            Outcome.CONFIG,
        )
    known = known_job(RUNS / job)
    if known is not None and known.store != store:
        _refuse(
            f"--job {job}: {RUNS / job} belongs to the job of that name in {known.store}, not in "
            f"{store}\n  hint: choose another --job, or set store to {known.store}; if the job "
            f"was moved, delete {RUNS / job}",
            Outcome.CONFIG,
        )


def _check_continuation(job: str, config: RunConfig) -> None:
    store = Store.open(config.store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job))
    if store.head("config.json") is None:
        return
    try:
        document = json.loads(store.get("config.json"))
        before = document.get("config", document)
        # If another version wrote it, compare it as it is
        with contextlib.suppress(ValidationError):
            before = RunConfig.model_validate_json(json.dumps(before)).model_dump(mode="json")
    except (ValueError, AttributeError) as error:
        _refuse(
            f"--job {job}: {store.uri}/config.json is no JSON object ({error}); the job's "
            "commits are not affected\n  hint: delete that file; the next run writes it from its "
            "own configuration",
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
            f"job {job} exists in {config.store} and cannot continue with another model or other "
            "data:\n"
            + "\n".join(changed)
            + "\n  hint: choose another --job, or restore the former values",
            Outcome.CONFIG,
        )


def _at(config: dict, path: str) -> object:
    value: object = config
    for key in path.split("."):
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = None
    return value


def _refuse(text: str, outcome: Outcome) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(outcome.exit_code)


_MOST_ASKED = 8


def check_resume(words: list[str]) -> tuple[str, RunConfig, list[str]] | None:
    """Find the job to resume, set Metaflow's environment variables for it, and run the same quick
    checks as `run`.

    Returns (job name, configuration, requested permissions). If this machine does not know the job,
    or its store does not answer, prints a message and returns None. Removes --from-scratch and
    --accept-rollback from `words`.

    Exits with 2 if options of `run` are given, since `resume` keeps the settings of the resumed
    run. Exits with 3 if a check forbids the run.
    """
    from ebbflow.flows.launcher import RUN_OPTIONS

    if given := [word.partition("=")[0] for word in words if word.partition("=")[0] in RUN_OPTIONS]:
        _refuse(
            f"resume takes no {' or '.join(dict.fromkeys(given))}: it keeps the settings of the "
            "resumed run\n  hint: run --job NAME --set KEY=VALUE continues a job with changed "
            "settings",
            Outcome.CONFIG,
        )
    permits, words[1:] = parse_permits(words[1:])
    found = _job_of(words)
    if found is None:
        if permits:
            unknown = (
                "resume: unknown job on this machine, so the permit has no effect; fix: run "
                "--job NAME"
            )
            _refuse(unknown, Outcome.CONFIG)
        return None
    name, path, config = found
    if refusal := check_before_launch(config, path, job=name, words=words):
        _refuse(refusal, Outcome.PREFLIGHT)
    return name, config, permits


def _job_of(words: Sequence[str]) -> tuple[str, str, RunConfig] | None:
    """Return (name, path of the configuration file, configuration) of the job to resume, or None if
    it is unknown.
    """
    run = (option_values(words, "--origin-run-id") or [""])[-1]
    try:
        if run:
            job = known_job(RUNS / run) or _find_job_of_run(run)
        else:
            job = known_job(RUNS / "latest")
        if job is None:
            _say(f"{RUNS} has no job of {f'run {run}' if run else 'an earlier run'}")
            return None
        folder = job.uri.removeprefix("file://")
        if "://" not in folder and not Path(folder).is_dir():
            _refuse(
                f"resume: job {job.name} was in {folder}, which does not exist\n  hint: if the "
                f"project was moved, delete {RUNS / job.name} and continue with: run --job "
                f"{job.name}",
                Outcome.CONFIG,
            )
        document = json.loads(_store(job).get("config.json"))
        return (
            job.name,
            document["path"],
            RunConfig.model_validate_json(json.dumps(document["config"])),
        )
    except (InfraError, ValueError, KeyError) as error:
        _say(f"the settings of the job cannot be read: {error}")
        return None


def _find_job_of_run(run: str) -> KnownJob | None:
    """Search the newest jobs of this machine for the job of a Metaflow run.

    Return None if there is none.
    """
    folders = [
        RUNS / "latest",
        *(RUNS / name for name in list_known_jobs(RUNS)[-_MOST_ASKED:][::-1]),
    ]
    jobs = dict.fromkeys(job for folder in folders if (job := known_job(folder)) is not None)
    return next((job for job in jobs if _is_run_of(job, run)), None)


def _is_run_of(job: KnownJob, run: str) -> bool:
    try:
        return any(event.run == run for event in read_events(_store(job)))
    except InfraError:  # the run may belong to another job
        return False


def _store(job: KnownJob) -> Store:
    return Store.open(job.store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job.name))


def _say(why: str) -> None:
    print(f"resume: no checks, and Metaflow's own settings apply: {why}", flush=True)
