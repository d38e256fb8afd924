"""End of a run in the launcher: write and print the job's report, and choose the exit code."""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, JobIsRunning, Outcome, describe_error
from ebbflow.core.events import read_events
from ebbflow.core.launchers import check_run_claim
from ebbflow.core.process import die_with_parent
from ebbflow.cost.errors import CostError, ReportError
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.cost.report.render_text import describe_rehearsal, render, render_closing
from ebbflow.cost.report.report import RunReport
from ebbflow.flows import reporting
from ebbflow.flows.job import RUNS, Job
from ebbflow.flows.launch import PROGRAM, REPORT_REQUEST_SECONDS, write_to_stderr
from ebbflow.observe.job_report import replace_live_page
from ebbflow.observe.watch import read_earlier_reports

_NOT_OF_REFERENCE = ("--rehearse", "--job", "--run-id-file")


def job_of_run(flow_name: str, run_id: str, *, without: str = "no report") -> Job | None:
    """Return a run's job, read from the artifacts of its start step.

    If this fails, print why and return None.

    The printed message begins with `without`, a text about the consequence of the failure, such as
    "no report".
    """
    from metaflow import Run, namespace

    namespace(None)
    try:
        data = Run(f"{flow_name}/{run_id}")["start"].task.data
        config = RunConfig.model_validate_json(json.dumps(data.settings["config"]))
        return Job(name=data.job, run=run_id, config=config, request_seconds=REPORT_REQUEST_SECONDS)
    except Exception as error:  # Metaflow's client raises many kinds of errors
        print(f"{without}: the run's start step cannot be read: {error}", file=sys.stderr)
        return None


def finish_job(
    job: Job,
    code: int,
    started: float,
    *,
    asked: bool,
    width: int | None = None,
    compares: bool = False,
) -> int:
    """Print the job's report and return the exit code.

    If the run died before writing a report, write the report first.

    Args:
        code: Metaflow's exit code.
        started: Unix time at which the run began.
        asked: whether a signal asked the run to exit. If so, return `code`, unless the job
            completed in this run.
        width: width in columns of a short summary to print instead of the whole report; None: print
            the report.
        compares: whether `run_reference` follows, which prints the notes on the rehearsal itself.
    """
    job.remember()  # `start` may have run on another machine
    path = job.folder / "report.json"
    try:
        if not _is_new(path, started):
            check_run_claim(job.store, job.name)
            reporting.write_report(job)
    except JobIsRunning as error:  # the other launcher writes the report
        print(describe_error(error), file=sys.stderr)
        return Outcome.INTERRUPTED.exit_code
    except (InfraError, CostError) as error:
        nothing_recorded = isinstance(error, ReportError)
        if asked and nothing_recorded:
            write_to_stderr("interrupted before anything was recorded")
            return code
        # If nothing was recorded, Metaflow's exit code is more specific than the error's.
        if not asked and not (code and nothing_recorded):
            code = error.outcome.exit_code or code
        if not _is_new(path, started):
            print(f"no report: {error}", file=sys.stderr)
            return code
        print(f"the report is on this machine only: {error}", file=sys.stderr)
    replace_live_page(path.parent)
    report = RunReport.from_json(json.loads(path.read_text()))
    _print_report(report, job, width, with_notes=not (compares and code == 0))
    if asked:
        # Metaflow's code is 75 then, also where the request came after the last step
        return Outcome.COMPLETED.exit_code if _completed_since(job, started) else code
    refused = report.events.get("refused") or {}
    if refused.get("run") == job.run:  # a completed job stays complete, and this run did nothing
        return Outcome(refused["outcome"]).exit_code
    return report.exit_code or code


def run_reference(job: Job, program: str, typed_words: list[str]) -> int:
    """Run the job again without its rehearsal (injected fault), and compare the weights of both
    jobs.

    Return the exit code.

    Args:
        program: the flow file.
        typed_words: the command line of the rehearsal, as the user typed it.
    """
    quiet_job = f"{job.name}-quiet"
    print(f"\n--compare: the same job without the rehearsal, as job {quiet_job}")
    words = _without_rehearsal(typed_words)
    command = [sys.executable, program, *words, "--job", quiet_job]
    child = subprocess.Popen(command, preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    report = RunReport.from_json(json.loads((RUNS / job.name / "report.json").read_text()))
    print("\n".join(describe_rehearsal(report, read_earlier_reports(job.name))))
    return code


def _print_report(report: RunReport, job: Job, width: int | None, *, with_notes: bool) -> None:
    page = RUNS / job.name / "report.html"
    if not width:
        print(render(report, program=PROGRAM))
        print(f"\nreport: {page}")
        return
    notes: list[str] = []
    if with_notes:
        notes = describe_rehearsal(report, read_earlier_reports(job.name))
    print(render_closing(report, os.path.relpath(page), program=PROGRAM, notes=notes, width=width))


def _without_rehearsal(typed_words: list[str]) -> list[str]:
    words = []
    rest = list(typed_words)
    while rest:
        word = rest.pop(0)
        if word in _NOT_OF_REFERENCE:
            rest[:1] = []  # its value
        elif word != "--compare" and word.partition("=")[0] not in _NOT_OF_REFERENCE:
            words.append(word)
    return words


def _completed_since(job: Job, started: float) -> bool:
    """Return whether the job's last recorded outcome is a completion at or after `started` (Unix
    time).
    """
    outcome = find_final_outcome(read_events(job.store))
    return (
        outcome is not None
        and outcome.t_wall >= started
        and outcome.payload.outcome is Outcome.COMPLETED
    )


def _is_new(path: Path, started: float) -> bool:
    return path.exists() and path.stat().st_mtime >= started
