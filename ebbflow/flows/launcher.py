"""The launcher: the process of `run` and `resume`, which prepares and runs Metaflow.

The launcher exits with the job's exit code. Metaflow alone would exit with 1 after every failure.
"""

import atexit
import contextlib
import getpass
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ebbflow.core.errors import Outcome
from ebbflow.core.launchers import RUN_CLAIM_VARIABLE
from ebbflow.core.layout import METAFLOW_FOLDER, find_records, records_root
from ebbflow.core.process import die_with_parent, end_with_descendants, ignore_lost_readers
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.flows import remote
from ebbflow.flows.command_line import CommandLine, describe_flags, option_values
from ebbflow.flows.console import open_view
from ebbflow.flows.launch import Launch, write_to_stderr
from ebbflow.flows.live_page import task_with_card

_RUN_ID_PREFIX = "ebbflow-run-id-"
_PARENT_VARIABLE = "EBBFLOW_PARENT_PID"
_RECORDS_VARIABLE = "METAFLOW_DATASTORE_SYSROOT_LOCAL"
_NO_SCHEDULER = (
    "{name} cannot run this flow, whose training repeats a step, branches and starts nodes while "
    "it runs; fix: flows/scheduled_flow.py, whose one step supervises it, or in AWS the head job "
    "(docs/metaflow.md, Schedules)"
)
_SCHEDULERS = {
    "argo-workflows": "Argo Workflows",
    "step-functions": "AWS Step Functions",
    "airflow": "Airflow",
}


def prepare(argv: Sequence[str]) -> Launch:
    """Prepare this process for Metaflow, before Metaflow is imported.

    Sets the environment variables that Metaflow reads at import. For `run` and `resume`, checks the
    user's options and claims the job. In a process that Metaflow started, installs signal handlers.
    Returns the launch, whose `line` is the command line for Metaflow.

    Exits with 2 for a bad configuration, and with 3 if a quick check fails or another launcher runs
    the job. Until then, the launcher has written nothing but the claim to the store.
    """
    _refuse_schedulers(argv)
    launch = Launch(argv)
    if launch.line.starts_run:
        ignore_lost_readers()
    is_task = "step" in (launch.line.command, *launch.line.arguments[:1])
    guard_terminal(keep_colours=not is_task)
    _end_with_parent(launch.line)
    if launch.line.command == "card":
        os.environ.setdefault(_RECORDS_VARIABLE, str(find_records(PROJECT_ROOT)))
    _set_environment()
    if launch.line.starts_run:
        _prepare_run(launch)
    elif launch.line.command == "card":
        launch.line = _select_card(launch.line)
    else:
        _install_handlers(launch.line)
    return launch


def run(flow_class: type, launch: Launch) -> None:
    """Run Metaflow's command line.

    After `run` or `resume`, print the report and exit with the job's exit code.
    """
    if not launch.line.starts_run:
        if launch.line.command in ("run", "resume"):
            ignore_lost_readers()
            atexit.register(print, describe_flags())  # below Metaflow's help
        flow_class()
        return
    started = time.time()
    _prepare_scheduler()
    launch.listen()
    _claim_resumed_job(flow_class, launch)
    try:
        launch.view = open_view(flow_class, launch.job, launch.config, launch.flags, launch.line)
    except KeyboardInterrupt:  # the user does not want to pay
        launch.release()
        sys.exit(Outcome.INTERRUPTED.exit_code)
    run_id_file = Path(launch.line.run_id_file or "")
    code = launch.run(flow_class, run_id_file)
    run_id = _read_run_id(run_id_file)
    if launch.view is not None:
        launch.view.close(explained=bool(run_id) and code != Outcome.FAILED.exit_code)
    try:
        code = _finish(flow_class, launch, run_id, code, started)
    finally:
        launch.release()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the defaults apply while the interpreter ends
    sys.exit(code)


def use_records() -> None:
    """Let Metaflow's Client API and `Runner` in this process find this project's runs.

    This works in any folder, and also for the user root, whom Metaflow otherwise refuses. Call it
    before Metaflow is imported, because Metaflow reads its settings at import; otherwise it raises
    RuntimeError.
    """
    if "metaflow" in sys.modules and _RECORDS_VARIABLE not in os.environ:
        raise RuntimeError(
            "metaflow is imported already; fix: restart the kernel and call "
            "ebbflow.use_records() first"
        )
    os.environ.setdefault(_RECORDS_VARIABLE, str(find_records(PROJECT_ROOT)))
    _set_environment()


def _refuse_schedulers(argv: Sequence[str]) -> None:
    """Exit with 2 if the command deploys the flow to a scheduler that cannot run it."""
    for word in CommandLine.parse(argv).options:
        if word in _SCHEDULERS:
            print(_NO_SCHEDULER.format(name=_SCHEDULERS[word]), file=sys.stderr)
            sys.exit(Outcome.CONFIG.exit_code)


def _prepare_run(launch: Launch) -> None:
    """Check the options of `run` or `resume`, claim the job, and choose the file for the run's
    id.
    """
    # Late, since importing the options imports the checks of all packages
    from ebbflow.flows.options import check_resume, check_run_options

    # Set if a task of another job starts this launcher
    for name in (RUN_CLAIM_VARIABLE, remote.CLOUD_VARIABLE):
        os.environ.pop(name, None)
    launch.listen()
    if launch.line.command == "run":
        checked = check_run_options(launch.line)
    else:
        checked = check_resume(launch.line)
    if checked.config is not None:
        launch.claim_job(checked.job, checked.config, launch.line.command, checked.permits)
    line = launch.line.with_arguments(checked.arguments)
    launch.line = _with_run_id_file(remote.without_slurm(line))


def _with_run_id_file(line: CommandLine) -> CommandLine:
    """Return the command line with an empty file for --run-id-file, which Metaflow fills."""
    given = line.run_id_file
    if given is None:
        descriptor, path = tempfile.mkstemp(prefix=_RUN_ID_PREFIX)
        os.close(descriptor)
        return line.with_arguments(["--run-id-file", path, *line.arguments])
    if Path(given).is_file():  # it names an earlier run until Metaflow writes to it
        with contextlib.suppress(OSError):  # Metaflow reports it when it writes
            os.truncate(given, 0)
    return line


def _read_run_id(file: Path) -> str:
    """Return the run id that Metaflow wrote to `file`, or "".

    Delete the file if the launcher created it.
    """
    if file.is_file():
        run_id = file.read_text().strip()
    else:
        run_id = ""
    if file.name.startswith(_RUN_ID_PREFIX):
        file.unlink(missing_ok=True)
    return run_id


def _select_card(line: CommandLine) -> CommandLine:
    """Return the command line of `card`, in which tasks without a card are replaced by tasks with
    one.

    Exit with 2 if no run is recorded on this machine, where Metaflow would print a traceback.
    """
    root = os.environ.get(_RECORDS_VARIABLE)
    if not root:
        return line
    records = Path(root, METAFLOW_FOLDER)
    if not records.is_dir():
        print(f"no run is recorded in {records}; fix: {line.program} run", file=sys.stderr)
        sys.exit(Outcome.CONFIG.exit_code)
    return line.with_arguments([task_with_card(word, records) for word in line.arguments])


def _end_with_parent(line: CommandLine) -> None:
    """Make a task, or a process that submits an attempt, end when its launcher dies."""
    if line.command == "step":
        if _tie_to_parent(signal.SIGKILL):  # the launcher handles a terminal's Ctrl-C and SIGHUP
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, end_with_descendants)
    elif line.arguments[:1] == ["step"]:
        # `batch step` first terminates its Batch job
        _tie_to_parent(signal.SIGTERM)


def _tie_to_parent(by: signal.Signals) -> bool:
    """Make the kernel send the signal `by` to this process when its parent dies.

    Return False if the parent is on another machine.

    The parent is the launcher or, for the other nodes of a local run, Metaflow's control task.
    """
    parent = os.environ.get(_PARENT_VARIABLE)  # set on the launching machine only
    if parent:
        die_with_parent(int(parent), by=by)
        os.environ[_PARENT_VARIABLE] = str(os.getpid())
    return bool(parent)


def _install_handlers(line: CommandLine) -> None:
    """Install signal handlers and Metaflow fixes in a process that Metaflow started.

    Such a process either submits an attempt to a backend or is a task in a container.
    """
    from ebbflow.flows import metaflow_fixes

    if line.is_step_of("batch"):
        from ebbflow.flows.attempts.submission import open_submission

        open_submission().listen()
    elif line.is_step_of("kubernetes"):
        from ebbflow.flows.attempts.pod_submission import open_pod_submission
        from ebbflow.flows.pods import exit_when_asked, set_grace_period

        exit_when_asked()
        set_grace_period()
        open_pod_submission().listen()
        if metaflow_fixes.needs_fixes(line.argv):
            from metaflow.plugins.kubernetes import kubernetes_cli

            metaflow_fixes.pass_over_missing_metadata(kubernetes_cli)
    elif line.command == "step" and remote.in_container():
        from ebbflow.flows.attempts.submission import listen_for_stop

        listen_for_stop()
    metaflow_fixes.fix_process_of_batch(line)


def _set_environment() -> None:
    # Local @parallel starts the other nodes as `python`, which must be this interpreter.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    # One place for Metaflow's records and cards, so that resume and card work from any directory. A
    # container's records must be in Metaflow's default folder.
    if not remote.in_container():
        root = os.environ.setdefault(
            _RECORDS_VARIABLE, str(records_root(PROJECT_ROOT, METAFLOW_FOLDER))
        )
        os.environ.setdefault(
            "METAFLOW_CARD_LOCALROOT", str(Path(root, METAFLOW_FOLDER, "mf.cards").absolute())
        )
        # If this launcher runs inside a job of AWS Batch, Metaflow would take local steps for steps
        # that it sent there.
        os.environ.pop("AWS_BATCH_JOB_ID", None)
    # Metaflow refuses to work for root, the user of a bare container.
    if not os.environ.get("METAFLOW_USER"):  # a container's user may have no name
        user = getpass.getuser()
        if user == "root":
            os.environ["METAFLOW_USER"] = "ebbflow"
        else:
            os.environ["METAFLOW_USER"] = user


def _prepare_scheduler() -> None:
    """Prepare Metaflow's scheduler, which runs in this process, and the tasks that it starts."""
    from ebbflow.flows.gang import end_stopped_tasks
    from ebbflow.flows.metaflow_fixes import drop_interrupt_advice, keep_terminal_from_tasks

    os.environ[_PARENT_VARIABLE] = str(os.getpid())
    drop_interrupt_advice()
    keep_terminal_from_tasks()
    threading.Thread(
        target=end_stopped_tasks, args=(os.getpid(),), name="stopped tasks", daemon=True
    ).start()


def _claim_resumed_job(flow_class: type, launch: Launch) -> None:
    """Claim the job of the run to resume, if this launcher has no claim yet.

    It has none if this machine did not know the job by its name.
    """
    origins = option_values(launch.line.argv, "--origin-run-id")
    if launch.line.command != "resume" or not origins or launch.has_claim:
        return
    from ebbflow.flows.finish import job_of_run

    job = job_of_run(flow_class.__name__, origins[-1], without="no claim on the job")
    if job is not None:
        launch.claim_job(job.name, job.config, "resume")


def _finish(flow_class: type, launch: Launch, run_id: str, code: int, started: float) -> int:
    """Print the job's report, and return the exit code.

    Without a run id, Metaflow has refused to start and printed why.
    """
    # Late, since every task imports this module
    from ebbflow.flows.finish import finish_job, job_of_run, run_reference

    job = None
    if run_id and not launch.fenced:
        job = job_of_run(flow_class.__name__, run_id)
    if job is None:
        if launch.asked and not launch.fenced:
            write_to_stderr("interrupted before anything was recorded")
        return code
    compares = "--compare" in launch.flags
    code = finish_job(
        job,
        code,
        started,
        asked=launch.asked,
        width=None if launch.view is None else launch.view.closing_width,
        compares=compares,
    )
    if launch.observer is not None:
        launch.observer.save_card()
    if compares and code == 0:
        launch.release()  # the reference is another job, and this process only waits for it
        return run_reference(job, launch.line.program, launch.typed_words)
    return code
