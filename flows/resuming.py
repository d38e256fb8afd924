"""What a `resume` is held against before Metaflow is imported: it repeats no check of the run that it goes on with."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from ebbflow.cost.jobs import known_job_names
from ebbflow.flows.checks import refused_at_once
from ebbflow.flows.job import RUNS
from ebbflow.flows.options import add_permits, permits_asked
from ebbflow.flows.remote import values_of
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import InfraError
from ebbflow.infra.events import read_events
from ebbflow.infra.known_jobs import KnownJob, known_job
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.store import Store

_REQUEST_SECONDS = 10.0
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
        if permits_asked(known):
            print("resume: the job is unknown here, so nothing of it is given up; fix: run --job NAME", file=sys.stderr)
            sys.exit(Outcome.CONFIG.exit_code)
        return None
    name, path, config = found
    if said := refused_at_once(config, path, job=name, words=words):
        print(said, file=sys.stderr)
        sys.exit(Outcome.PREFLIGHT.exit_code)
    return name, config, permits_asked(known)


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
    run = (values_of(words, "--origin-run-id") or [""])[-1]
    try:
        job = known_job(RUNS / run) or _with_a_name_of_its_own(run) if run else known_job(RUNS / "latest")
        if job is None:
            _say(f"{RUNS} knows no job of {f'run {run}' if run else 'an earlier run'}")
            return None
        document = json.loads(_store(job).get("config.json"))
        return job.name, document["path"], RunConfig.model_validate_json(json.dumps(document["config"]))
    except (InfraError, ValueError, KeyError) as error:
        _say(f"the settings of the job cannot be read: {error}")
        return None


def _with_a_name_of_its_own(run: str) -> KnownJob | None:
    """The job that the run was one of, by the events of the jobs that this machine has started last."""
    folders = [RUNS / "latest", *(RUNS / name for name in known_job_names(RUNS)[-_MOST_ASKED:][::-1])]
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
