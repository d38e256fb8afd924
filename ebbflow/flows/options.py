"""The options of `run` and `resume`, checked before Metaflow is imported so that errors appear at
once.
"""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from ebbflow.core.config import LoadedConfig, load_config
from ebbflow.core.config.rule_base import count_ranks
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, JobNotInStore, Outcome
from ebbflow.core.events import read_events
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.layout import KnownJob, check_job_name, job_prefix, known_job
from ebbflow.core.program import DEFAULT_CONFIG, IMPORT_ROOT, PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.store.identity import adopt_if_it_answers
from ebbflow.cost.jobs import list_known_jobs
from ebbflow.flows.checks import check_before_launch
from ebbflow.flows.command_line import RUN_OPTIONS, CommandLine, option_values
from ebbflow.flows.job import RUNS
from ebbflow.flows.job_names import new_job_name
from ebbflow.flows.remote import requested_backend
from ebbflow.infra.checks.gpu import visible_gpus
from ebbflow.training.attach.script_folder import pack_script
from ebbflow.training.checkpoint.lineage import FROM_SCRATCH
from ebbflow.training.checkpoint.rollback import add_permits, record_permits, requested_permits
from ebbflow.training.rehearse import Fault

_REQUEST_SECONDS = 10.0
_MOST_ASKED = 8  # jobs that are searched for a run
# Settings that cannot change once a job has commits: the model, and the numbering of samples.
_FIXED_FOR_A_JOB = ("script", "workload", "workload_options", "model", "data", "training.seed")


@dataclass(frozen=True)
class CheckedOptions:
    """Checked options of `run` or `resume`."""

    arguments: list[str]  # for Metaflow's command
    job: str = ""  # "" if the job to resume is unknown
    config: RunConfig | None = None  # None if the job to resume is unknown
    permits: Sequence[str] = ()  # the launcher records them after it has claimed the job


def check_run_options(line: CommandLine) -> CheckedOptions:
    """Check the options of `run`, and merge --config and --set into one configuration as JSON.

    The returned arguments do not contain --from-scratch and --accept-rollback. Exits with 2 for a
    bad configuration, fault or job name, and with 3 if a quick check forbids the run.
    """
    known, rest = _parse_run_options(line.arguments)
    permits = requested_permits(known)
    try:
        loaded = _load(known, line)
        _check_fault(known.rehearse, loaded.config)
        if known.job:
            check_job_name(known.job)
    except InfraError as error:
        _refuse(str(error), error.outcome)
    path = _config_path(known.config)
    _check_before_launch(loaded.config, path, known.job or None, line)
    if permits and not known.job:
        _refuse(
            "--from-scratch and --accept-rollback need an existing job; fix: name it with --job",
            Outcome.CONFIG,
        )
    if known.job:
        _check_place(known.job, loaded.config.store)
    job = known.job or new_job_name(loaded.config.script or path, loaded.config.store)
    marker = adopt_job_store(job, loaded.config.store, permits)
    if known.job:
        _check_existing_job(known.job, loaded.config)
    settings = _flow_settings(loaded, path, line) | {"store_marker": marker}
    arguments = ["--config", json.dumps(settings), "--rehearse", known.rehearse]
    return CheckedOptions(
        arguments=[*arguments, "--job", job, *rest],
        job=job,
        config=RunConfig.model_validate_json(json.dumps(settings["config"])),
        permits=permits,
    )


def check_resume(line: CommandLine) -> CheckedOptions:
    """Find the job to resume, set Metaflow's environment variables for it, and run the same quick
    checks as `run`.

    If this machine does not know the job, or its store does not answer, prints a message. The
    returned arguments do not contain --from-scratch and --accept-rollback.

    Exits with 2 if options of `run` are given, since `resume` keeps the settings of the resumed
    run. Exits with 3 if a check forbids the run.
    """
    names = [word.partition("=")[0] for word in line.argv]
    given = [name for name in names if name in RUN_OPTIONS]
    if given:
        _refuse(
            f"resume takes no {' or '.join(dict.fromkeys(given))}: it keeps the settings of the "
            "resumed run\n  hint: run --job NAME --set KEY=VALUE continues a job with changed "
            "settings",
            Outcome.CONFIG,
        )
    permits, arguments = _parse_permits(line.arguments)
    resumed = _find_resumed_job(line)
    if resumed is None:
        if permits:
            _refuse(
                "resume: unknown job on this machine, so the permit has no effect; fix: run "
                "--job NAME",
                Outcome.CONFIG,
            )
        return CheckedOptions(arguments)
    _check_before_launch(resumed.config, resumed.config_path, resumed.name, line)
    before = known_job(RUNS / resumed.name)
    marker = adopt_job_store(resumed.name, resumed.config.store, permits)
    if before is not None and before.marker not in ("", marker) and requested_backend(line.argv):
        _refuse(
            f"resume: the store of job {resumed.name} has another marker ({marker}) than the run "
            f"that is resumed ({before.marker}), which other machines would expect; fix: run --job "
            f"{resumed.name}",
            Outcome.CONFIG,
        )
    return CheckedOptions(arguments, resumed.name, resumed.config, permits)


def adopt_job_store(job: str, store: str, permits: Sequence[str]) -> str:
    """Let this process and its children accept only the job's store, and return the id of its
    marker.

    Return "" if the store does not answer. Exits with 3 if the job is known to be in another store
    of this address.
    """
    try:
        return adopt_if_it_answers(store, job, RUNS, from_scratch=FROM_SCRATCH in permits)
    except JobNotInStore as error:
        _refuse(str(error), error.outcome)


def give_permits(permits: Sequence[str], job: str, store: str) -> None:
    """Record in the job's store that the user permits the job to continue despite lost commits.

    Call this only after this process has claimed the job, because a launcher without the claim must
    not change the job. Raises InfraError.
    """
    if permits:
        record_permits(
            Store.open(store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job)),
            *permits,
        )


def parse_json_option(given: str) -> str | list[Json] | JsonObject:
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
        return [f"{key}={json.dumps(setting)}" for key, setting in value.items()]
    if isinstance(value, list):
        return [str(override) for override in value]
    return [value]


def _parse_run_options(options: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse Ebbflow's options of `run`, and return them and all other options.

    Each of the result's `overrides` is one "key=value". Its `config` is the path of a file, the
    JSON of a configuration, or None for a script without a file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=None)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--rehearse", default="")
    parser.add_argument("--job", default="")
    add_permits(parser)
    known, rest = parser.parse_known_args(options)
    known.overrides = [override for given in known.overrides for override in parse_overrides(given)]
    if known.config is None and not any(text.startswith("script=") for text in known.overrides):
        known.config = str(DEFAULT_CONFIG)
    if known.config is not None:
        config = parse_json_option(known.config)
        if isinstance(config, str):
            known.config = config
        else:
            known.config = json.dumps(config, indent=1)
    return known, rest


def _parse_permits(options: list[str]) -> tuple[list[str], list[str]]:
    """Return the permissions that the user gave with the options of `add_permits`, and all other
    options.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_permits(parser)
    known, rest = parser.parse_known_args(options)
    return requested_permits(known), rest


def _load(known: argparse.Namespace, line: CommandLine) -> LoadedConfig:
    """Load the run's configuration, fitted to the backend or to the GPUs of this machine.

    The backend that `--with` names becomes cluster.plan_for. Raises ConfigError.
    """
    load = partial(load_config, known.config, project_root=PROJECT_ROOT, cwd=Path.cwd())
    loaded = load(known.overrides)
    backend = requested_backend(line.argv, loaded.config.cluster.plan_for)
    if backend is None:
        fitted = _fit_to_local_gpus(loaded)
        if not fitted:
            return loaded
        overrides = [f"{key}={value}" for key, value in fitted.items()]
        print(f"{', '.join(overrides)}: one rank on each GPU of this machine", flush=True)
        sources = dict.fromkeys(fitted, "the GPUs of this machine")
        loaded = load([*known.overrides, *overrides])
        return replace(loaded, sources=loaded.sources | sources)
    if loaded.config.cluster.plan_for == backend:
        return loaded
    loaded = load([*known.overrides, f"cluster.plan_for={backend}"])
    return replace(loaded, sources={**loaded.sources, "cluster.plan_for": f"--with {backend}"})


def _fit_to_local_gpus(loaded: LoadedConfig) -> dict[str, int]:
    """Return settings that fit a local run to this machine's GPUs, or {} to keep the configuration.

    The default numbers of nodes and ranks are replaced if they need more GPUs than there are. Nodes
    that the user wrote are kept: the ranks then train on the CPU, with a note.
    """
    config = loaded.config
    ranks = count_ranks(config)
    gpus = visible_gpus()
    source = loaded.sources.get("cluster.nodes", "default")
    of_project = loaded.path.resolve() == DEFAULT_CONFIG.resolve() and ".yaml:" in source
    if source != "default" and not of_project:
        return {}
    if config.cluster.device == "cpu" or ranks is None or not 0 < gpus < ranks or config.script:
        return {}
    parts = config.training.gradient_accumulation_steps
    batch = config.training.batch_size
    fitting = next((count for count in range(gpus, 0, -1) if batch % (parts * count) == 0), None)
    if fitting is None or config.cluster.min_nodes is not None:
        return {}
    return {"cluster.nodes": 1, "cluster.processes_per_node": fitting}


def _config_path(config: str | None) -> str:
    """Return the path of the configuration file, or "" if the configuration is not in a file."""
    if config is None or config.startswith("{"):
        return ""
    return config


def _check_fault(text: str, config: RunConfig) -> None:
    """Check that the fault to rehearse can occur in this job. Raises InfraError."""
    if not text:
        return
    fault = Fault.parse(text)
    nodes = config.cluster.nodes
    processes = config.cluster.processes_per_node
    if not isinstance(nodes, int) or not isinstance(processes, int):
        return
    if config.script:
        max_steps = sys.maxsize  # the steps of a script are not known yet
    else:
        max_steps = config.training.max_steps
    fault.check(max_steps=max_steps, nodes=nodes, world_size=nodes * processes)


def _check_before_launch(
    config: RunConfig, config_path: str, job: str | None, line: CommandLine
) -> None:
    """Exit with 3 if the run must not start."""
    refusal = check_before_launch(config, config_path, job=job, words=line.argv)
    if refusal is not None:
        _refuse(refusal, Outcome.PREFLIGHT)


def _check_existing_job(job: str, config: RunConfig) -> None:
    """Exit with 2 if the job exists and cannot continue with this configuration.

    Exit with 3 if its store does not answer.
    """
    try:
        _check_continuation(job, config)
    except InfraError as error:
        _refuse(f"--job {job}: {error}", Outcome.PREFLIGHT)


def _flow_settings(loaded: LoadedConfig, path: str, line: CommandLine) -> JsonObject:
    """Return the value of the flow's parameter `config`.

    The script of a run on other machines is packed into the store.
    """
    config = loaded.config
    if config.script is None:
        return {
            "path": path,
            "config": config.model_dump(mode="json"),
            "sources": loaded.sources,
        }
    script_sha256 = None
    if requested_backend(line.argv, config.cluster.plan_for) is not None:
        try:
            script_sha256 = pack_script(config, Store.open(config.store))
        except InfraError as error:
            _refuse(str(error), error.outcome)
    return {
        "path": path,
        "config": loaded.script_settings(),
        "sources": loaded.sources,
        "script_sha256": script_sha256,
    }


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
    changed = []
    for path in _FIXED_FOR_A_JOB:
        value_before = _value_at(before, path)
        value_now = _value_at(now, path)
        if value_before != value_now:
            changed.append(
                f"  {path}: {json.dumps(value_before)} before, {json.dumps(value_now)} now"
            )
    if changed:
        _refuse(
            f"job {job} exists in {config.store} and cannot continue with another model or other "
            "data:\n"
            + "\n".join(changed)
            + "\n  hint: choose another --job, or restore the former values",
            Outcome.CONFIG,
        )


def _value_at(config: dict, path: str) -> object:
    value: object = config
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def _refuse(text: str, outcome: Outcome) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(outcome.exit_code)


@dataclass(frozen=True)
class _ResumedJob:
    name: str
    config_path: str  # "" if the configuration was not in a file
    config: RunConfig


def _find_resumed_job(line: CommandLine) -> _ResumedJob | None:
    """Return the job to resume, or None if it is unknown."""
    runs = option_values(line.argv, "--origin-run-id")
    run = runs[-1] if runs else ""
    try:
        if run:
            job = known_job(RUNS / run) or _find_job_of_run(run)
            wanted = f"run {run}"
        else:
            job = known_job(RUNS / "latest")
            wanted = "an earlier run"
        if job is None:
            _say(f"{RUNS} has no job of {wanted}")
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
        config = RunConfig.model_validate_json(json.dumps(document["config"]))
        return _ResumedJob(job.name, document["path"], config)
    except (InfraError, ValueError, KeyError) as error:
        _say(f"the settings of the job cannot be read: {error}")
        return None


def _find_job_of_run(run: str) -> KnownJob | None:
    """Search the newest jobs of this machine for the job of a Metaflow run.

    Return None if there is none.
    """
    newest = list_known_jobs(RUNS)[-_MOST_ASKED:]
    folders = [RUNS / "latest", *(RUNS / name for name in reversed(newest))]
    asked = set()
    for folder in folders:
        job = known_job(folder)
        if job is None or job in asked:
            continue
        asked.add(job)
        if _is_run_of(job, run):
            return job
    return None


def _is_run_of(job: KnownJob, run: str) -> bool:
    try:
        return any(event.run == run for event in read_events(_store(job)))
    except InfraError:  # the run may belong to another job
        return False


def _store(job: KnownJob) -> Store:
    return Store.open(job.store, request_timeout_seconds=_REQUEST_SECONDS).sub(job_prefix(job.name))


def _say(why: str) -> None:
    print(f"resume: no checks, and Metaflow's own settings apply: {why}", flush=True)
