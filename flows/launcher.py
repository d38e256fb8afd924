"""What surrounds Metaflow when a user types `run` or `resume`: the environment before, the exit code after.

Metaflow turns every failure into exit code 1, so the launching process maps the job's outcome to the exit code itself.
It also checks the configuration first: an error message should not have to wait for a scheduler.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from flows.checks import run_all_checks
from flows.job import PROJECT_ROOT, RUNS, Job, local_folder
from infra.layout import check_job_name
from infra.outcome import Outcome

_RUN_ID_PREFIX = "ebbflow-run-id-"
_DEFAULT_CONFIG = PROJECT_ROOT / "configs" / "laptop.yaml"


def prepare(module_name: str) -> None:
    """Set the environment that Metaflow reads at import; for `run`, replace the user's options by the checked job.

    Exits with 2 for a bad configuration and with 3 when a quick check forbids the run, before anything is written.
    Does nothing when the flow file is imported and not run.
    """
    if module_name != "__main__":
        return
    _set_environment()
    at = _command_index(sys.argv)
    if at is None or "--help" in sys.argv:
        return
    if sys.argv[at] == "run":
        sys.argv[at + 1 :] = _checked_options(sys.argv[at + 1 :])
    if "--run-id-file" not in sys.argv:
        descriptor, path = tempfile.mkstemp(prefix=_RUN_ID_PREFIX)
        os.close(descriptor)
        sys.argv[at + 1 : at + 1] = ["--run-id-file", path]


def run(flow_class: type) -> None:
    """Run Metaflow's command line; after `run` or `resume`, tell the outcome and exit with its code."""
    at = _command_index(sys.argv)
    if at is None or "--help" in sys.argv:
        flow_class()
        return
    started = time.time()
    code = _metaflow(flow_class)
    job = _job_of(flow_class.__name__, _read_run_id(Path(sys.argv[sys.argv.index("--run-id-file") + 1])))
    if job is None:
        sys.exit(code)  # Metaflow itself refused, and has said why
    sys.exit(_tell(job, code, started))


def _set_environment() -> None:
    # Local @parallel starts the other nodes as the bare word `python`: it must be this interpreter.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    # One place for Metaflow's records, so that resume works from any directory.
    os.environ.setdefault("METAFLOW_DATASTORE_SYSROOT_LOCAL", str(PROJECT_ROOT))
    # Metaflow refuses to work for root, which is who runs in a bare container.
    user = getpass.getuser()
    os.environ.setdefault("METAFLOW_USER", "ebbflow" if user == "root" else user)


def _command_index(argv: list[str]) -> int | None:
    """Where `run` or `resume` stands, or None when Metaflow was called for something else (a task, a card)."""
    return next((at for at, word in enumerate(argv) if at and word in ("run", "resume")), None)


def _checked_options(options: list[str]) -> list[str]:
    """The options of `run` with --config and --set replaced by the one checked configuration, as JSON."""
    from infra.config import ConfigError, load_config
    from infra.errors import InfraError

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=str(_DEFAULT_CONFIG))
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--rehearse", default="")
    parser.add_argument("--job", default="")
    known, rest = parser.parse_known_args(options)
    try:
        loaded = load_config(known.config, known.overrides, project_root=PROJECT_ROOT, cwd=Path.cwd())
        if known.job:
            check_job_name(known.job)
        if known.rehearse:
            _check_rehearsal(known.rehearse, loaded.config)
    except ConfigError as error:
        _refuse(str(error), Outcome.CONFIG)
    except InfraError as error:
        _refuse(str(error), error.outcome)
    _quick_checks(loaded.config, known.config)
    settings = {"path": known.config, "config": loaded.config.model_dump(mode="json"), "sources": loaded.sources}
    return ["--config", json.dumps(settings), "--rehearse", known.rehearse, "--job", known.job, *rest]


def _check_rehearsal(text: str, config: Any) -> None:
    from training.rehearse import Fault

    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    if isinstance(nodes, int) and isinstance(processes, int):
        Fault.parse(text).check(max_steps=config.training.max_steps, nodes=nodes, world_size=nodes * processes)
    else:
        Fault.parse(text)


def _quick_checks(config: Any, path: str) -> None:
    from infra.preflight import blocking, render_results

    failed = blocking(run_all_checks(config, path, quick_only=True))
    if failed:
        _refuse(render_results(failed), Outcome.PREFLIGHT)


def _refuse(text: str, outcome: Outcome) -> None:
    print(text, file=sys.stderr)
    sys.exit(outcome.exit_code)


def _metaflow(flow_class: type) -> int:
    try:
        flow_class()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def _read_run_id(file: Path) -> str:
    """The run id that Metaflow wrote, or "" when it did not get that far."""
    run_id = file.read_text().strip() if file.exists() else ""
    if file.name.startswith(_RUN_ID_PREFIX):
        file.unlink(missing_ok=True)
    return run_id


def _job_of(flow_name: str, run_id: str) -> Job | None:
    """The job that this run belonged to, from the artifacts of its start step."""
    from metaflow import Run, namespace

    if not run_id:
        return None
    namespace(None)
    try:
        data = Run(f"{flow_name}/{run_id}")["start"].task.data
        return Job(name=data.job, run=run_id, config=_config(data.settings))
    except Exception as error:  # the client raises many kinds; without a start step there is nothing to tell
        print(f"no report: the run's start step cannot be read: {error}", file=sys.stderr)
        return None


def _config(settings: dict) -> Any:
    from infra.config.schema import RunConfig

    return RunConfig.model_validate_json(json.dumps(settings["config"]))


def _tell(job: Job, code: int, started: float) -> int:
    """Print the report, which is rebuilt from the event log when the run died before writing it."""
    from cost.render_text import render
    from cost.report import RunReport
    from flows.reporting import write_report

    path = local_folder(job.name, job.config.store) / "report.json"
    if path.exists() and path.stat().st_mtime >= started:
        report = RunReport.from_json(json.loads(path.read_text()))
    else:
        report = write_report(job)
    print(render(report))
    print(f"\nreport: {RUNS / job.name / 'report.html'}")
    if report.outcome != Outcome.COMPLETED:
        print(f"to go on: python flows/train_flow.py resume train --origin-run-id {job.run}")
    outcome = Outcome(report.outcome)
    return outcome.exit_code if outcome.exit_code or not code else code
