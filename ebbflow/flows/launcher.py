"""The launcher: the process of `run` and `resume`, which prepares and runs Metaflow.

The launcher exits with the job's exit code. Metaflow alone would exit with 1 after every failure.
"""

# Metaflow's stubs neither re-export its public names nor know the attributes that it adds at run time.
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false

import argparse
import atexit
import contextlib
import getpass
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TypeGuard

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, JobIsRunning, Outcome, describe_error
from ebbflow.core.launchers import (
    RUN_CLAIM_VARIABLE,
    Claim,
    check_inherited_claim,
    check_run_claim,
    claim_job,
    claim_of_parent,
)
from ebbflow.core.layout import METAFLOW_FOLDER, job_prefix, records_root
from ebbflow.core.process import (
    children,
    die_with_parent,
    end_with_descendants,
    ignore_lost_readers,
)
from ebbflow.core.program import PROJECT_ROOT, own_command
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.flows import remote
from ebbflow.flows.job import RUNS, Job
from ebbflow.observe.console import FLAGS, RunView, describe_flags, open_view
from ebbflow.observe.live_page import LivePageWriter, finish_page, task_with_card

# Options that this project adds to Metaflow's `run`.
_RUN_FLAGS = frozenset({"--from-scratch", "--accept-rollback"})  # `resume` takes them as well
RUN_OPTIONS = frozenset({"--config", "--set", "--job", "--rehearse", "--certify"})
_RUN_ID_PREFIX = "ebbflow-run-id-"
_PARENT_VARIABLE = "EBBFLOW_PARENT_PID"
_DRAIN_SECONDS = 60.0
_RUN_ID_SECONDS = 0.2
_PROGRAM = own_command()  # found before this launcher changes PATH
_ASKED = "asked to leave: waiting for the last checkpoint (Ctrl-C again to leave at once)"
_REPORT_REQUEST_SECONDS = 10.0  # short: the user waits for the report of a run that died
_NO_SCHEDULER = (
    "{name} cannot run this flow, whose training repeats a step, branches and starts nodes while "
    "it runs; fix: schedule a launcher: infra/kubernetes/cronjob.yaml, or in AWS the head job "
    "(docs/aws.md, Schedule)"
)
_SCHEDULERS = {
    "argo-workflows": "Argo Workflows",
    "step-functions": "AWS Step Functions",
    "airflow": "Airflow",
}
# Metaflow's commands, used to find the command among the words of the command line.
_COMMANDS = frozenset(
    {
        "run",
        "resume",
        "step",
        "spin",
        "card",
        "show",
        "check",
        "dump",
        "logs",
        "tag",
        "batch",
        "kubernetes",
        "package",
        "init",
        "code",
    }
)


class _Launch:
    """State of this launcher: its claim on the job, and its handling of SIGTERM, SIGHUP and Ctrl-C.

    Before Metaflow starts, a signal ends the process. While Metaflow runs, a signal makes the tasks
    save a checkpoint and exit. While the report is written, only a second Ctrl-C ends the process.
    """

    def __init__(self) -> None:
        self.asked = False  # a signal asked the run to exit
        self.claim: Claim | None = None
        self._doing = "prepare"
        self._hurried = False
        self._interrupts = 0  # Ctrl-C while the report is written
        self.flags: frozenset[str] = frozenset()  # those of `FLAGS` that are given
        self.words: list[str] = []  # the command line as the user typed it
        # Of this run, as far as it is known before Metaflow starts; so is the configuration
        self.job = ""
        self.config: RunConfig | None = None
        self.view: RunView | None = None
        self._unnamed: RunConfig | None = None  # configuration of a job that is named after its run
        self.page: LivePageWriter | None = None
        self._ended = threading.Event()

    @property
    def fenced(self) -> bool:
        return self.claim is not None and self.claim.fenced_by is not None

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Nohup ignores it
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._leave)

    def claim_job(
        self, job: str, config: RunConfig, command: str, permits: Sequence[str] = ()
    ) -> None:
        """Claim the job, then record the user's permissions to continue although commits are lost
        (`permits`).

        A job without a name ("") is claimed later, once its run has an id. If the store does not
        answer, the launcher prints a message and continues without a claim. Exits with 3 if another
        launcher runs the job, or if the permissions cannot be recorded.
        """
        self.job = job
        self.config = config
        if not job:
            self._unnamed = config
            return
        try:
            store = Store.open(config.store, request_timeout_seconds=_REPORT_REQUEST_SECONDS).sub(
                job_prefix(job)
            )
            if inherited := claim_of_parent():
                check_inherited_claim(store, job, inherited)
                os.environ[RUN_CLAIM_VARIABLE] = inherited
            else:
                self.claim = claim_job(
                    store,
                    job,
                    command,
                    take_over="--take-over" in self.flags,
                    on_fenced=_tell_main_thread,
                )
                os.environ[RUN_CLAIM_VARIABLE] = self.claim.launcher.id
        except JobIsRunning as error:
            print(describe_error(error), file=sys.stderr)
            sys.exit(error.outcome.exit_code)
        except InfraError as error:
            print(f"job {job} is not protected from a second launcher: {error}", file=sys.stderr)
        if permits:
            self._give_permits(permits, job, config.store)

    def _give_permits(self, permits: Sequence[str], job: str, store: str) -> None:
        from ebbflow.flows.options import give_permits

        try:
            give_permits(permits, job, store)
        except InfraError as error:
            print(f"job {job}: its permit cannot be recorded: {error}", file=sys.stderr)
            self.release()
            sys.exit(Outcome.PREFLIGHT.exit_code)

    def run(self, flow_class: type, run_id_file: Path) -> int:
        """Run Metaflow and return its exit code, or 75 if a signal asked the run to exit."""
        if self._unnamed is not None and claim_of_parent() is None:
            threading.Thread(target=self._claim_by_run, args=(run_id_file,), daemon=True).start()
        if self.config is not None:
            if self.view is None:
                tell = print
            else:
                tell = self.view.say
            self.page = LivePageWriter(
                flow_class.__name__, self.job, self.config, run_id_file, tell
            )
        try:
            if self.page is not None:
                self.page.start()
            self._doing = "run"
            code = _metaflow(flow_class)
            self._doing = "report"
        except KeyboardInterrupt:  # a signal between two of these lines
            self._doing = "report"
            code = Outcome.INTERRUPTED.exit_code
        if self.page is not None:
            self.page.end()
        if self.asked:
            return Outcome.INTERRUPTED.exit_code
        return code

    def release(self) -> None:
        self._ended.set()
        if self.claim is not None:
            self.claim.release()

    def _claim_by_run(self, run_id_file: Path) -> None:
        """Wait until the run has an id, and claim the job named after the run.

        No other launcher has this job.
        """
        assert self._unnamed is not None
        while not self._ended.wait(_RUN_ID_SECONDS):
            if run_id_file.is_file() and (run := run_id_file.read_text().strip()):
                with contextlib.suppress(InfraError):
                    store = Store.open(
                        self._unnamed.store, request_timeout_seconds=_REPORT_REQUEST_SECONDS
                    )
                    self.claim = claim_job(
                        store.sub(job_prefix(run)), run, "run", on_fenced=_tell_main_thread
                    )
                    os.environ[RUN_CLAIM_VARIABLE] = self.claim.launcher.id
                return

    def _leave(self, number: int, frame: object) -> None:
        if self._doing == "prepare":
            self._leave_at_once(self._why_leaving() or "interrupted")
        if self._doing == "report":
            self._interrupts += number == signal.SIGINT
            if self._interrupts > 1:
                self._leave_at_once("interrupted: the report was not written")
            if self._interrupts == 1:
                write_to_stderr("the report is being written (Ctrl-C again to leave without it)")
            return
        if self.asked:
            self._hurried = self._hurried or number == signal.SIGINT
            return
        self.asked = True
        self._tell(self._why_leaving() or _ASKED)
        for child in children(os.getpid()):
            os.kill(child, signal.SIGTERM)
        limit = time.monotonic() + _DRAIN_SECONDS
        while children(os.getpid()) and time.monotonic() < limit and not self._hurried:
            time.sleep(0.05)
        raise KeyboardInterrupt

    def _tell(self, text: str) -> None:
        if self.view is None or not self.view.fancy:
            write_to_stderr(text)
        else:  # the bar would overwrite it
            self.view.say(f"! {text}")

    def _why_leaving(self) -> str:
        if self.claim is None or self.claim.fenced_by is None:
            return ""
        return (
            f"job taken over by {self.claim.fenced_by.describe()}: this run saves a checkpoint "
            "and ends (exit code 75)"
        )

    def _leave_at_once(self, words: str) -> NoReturn:
        write_to_stderr(words)
        self.release()
        os._exit(Outcome.INTERRUPTED.exit_code)


_launch = _Launch()


def prepare(module_name: str) -> None:
    """Prepare this process for Metaflow, before Metaflow is imported.

    `module_name` is the flow file's `__name__`.

    Sets the environment variables that Metaflow reads at import. For `run`, replaces the user's
    options with one checked configuration. For `run` and `resume`, claims the job. Does nothing if
    the flow file is imported instead of run.

    Exits with 2 for a bad configuration, and with 3 if a quick check fails or another launcher runs
    the job. Until then, the launcher has written nothing but the claim to the store.
    """
    if module_name != "__main__":
        return
    for word in sys.argv[1 : _command_index(sys.argv)]:
        if word in _SCHEDULERS:
            print(_NO_SCHEDULER.format(name=_SCHEDULERS[word]), file=sys.stderr)
            sys.exit(Outcome.CONFIG.exit_code)
    _launch.words = sys.argv[1:]
    _launch.flags = frozenset(FLAGS.keys() & set(sys.argv))
    sys.argv[1:] = reorder_words([word for word in sys.argv[1:] if word not in FLAGS])
    at = _command_index(sys.argv)
    if _is_launch(at):
        ignore_lost_readers()
    guard_terminal(keep_colours=at is None or "step" not in sys.argv[at : at + 2])
    if at is not None and sys.argv[at] == "step":
        if _tie_to_parent(signal.SIGKILL):  # the launcher handles a terminal's Ctrl-C and SIGHUP
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, end_with_descendants)
    elif at is not None and sys.argv[at + 1 : at + 2] == ["step"]:
        # `batch step` first terminates its Batch job
        _tie_to_parent(signal.SIGTERM)
    _set_environment()
    root = os.environ.get("METAFLOW_DATASTORE_SYSROOT_LOCAL")
    if (
        at is not None
        and sys.argv[at] == "card"
        and root
        and not Path(root, METAFLOW_FOLDER).is_dir()
    ):
        print(
            f"no run is recorded in {Path(root, METAFLOW_FOLDER)}; fix: {sys.argv[0]} run",
            file=sys.stderr,
        )
        sys.exit(Outcome.CONFIG.exit_code)  # Metaflow would print a traceback
    if at is not None and sys.argv[at] == "card" and root:
        sys.argv[at:] = [
            task_with_card(word, Path(root, METAFLOW_FOLDER)) for word in sys.argv[at:]
        ]
    if not _is_launch(at):
        _join_in(sys.argv[at:] if at is not None else [])
        return
    os.environ.pop(RUN_CLAIM_VARIABLE, None)  # set if a task of another job starts this launcher
    _launch.listen()
    if sys.argv[at] == "run":
        from ebbflow.flows.options import check_run_options, parse_checked_options, parse_permits

        permits, _ = parse_permits(sys.argv[at + 1 :])
        sys.argv[at + 1 :] = check_run_options(sys.argv[at + 1 :])
        _launch.claim_job(*parse_checked_options(sys.argv[at + 1 :]), "run", permits)
    else:
        from ebbflow.flows.options import check_resume

        known = check_resume(sys.argv)
        if known is not None:
            job, config, permits = known
            _launch.claim_job(job, config, "resume", permits)
    given = _run_id_file(sys.argv[at + 1 :])
    if given is not None:
        if Path(given).is_file():  # it names an earlier run until Metaflow writes to it
            with contextlib.suppress(OSError):  # Metaflow reports it when it writes
                os.truncate(given, 0)
    else:
        descriptor, path = tempfile.mkstemp(prefix=_RUN_ID_PREFIX)
        os.close(descriptor)
        sys.argv[at + 1 : at + 1] = ["--run-id-file", path]


def run(flow_class: type) -> None:
    """Run Metaflow's command line.

    After `run` or `resume`, print the report and exit with the job's exit code.
    """
    at = _command_index(sys.argv)
    if not _is_launch(at):
        if at is not None and sys.argv[at] in ("run", "resume"):
            ignore_lost_readers()
            atexit.register(print, describe_flags())  # below Metaflow's help
        flow_class()
        return
    from ebbflow.flows.gang import end_stopped_tasks
    from ebbflow.flows.metaflow_fixes import drop_interrupt_advice, keep_terminal_from_tasks

    started = time.time()
    os.environ[_PARENT_VARIABLE] = str(os.getpid())
    drop_interrupt_advice()
    keep_terminal_from_tasks()
    _launch.listen()
    threading.Thread(
        target=end_stopped_tasks, args=(os.getpid(),), name="stopped tasks", daemon=True
    ).start()
    run_id_file = Path(_run_id_file(sys.argv[at + 1 :]) or "")
    origin = remote.option_values(sys.argv, "--origin-run-id")
    unknown = (
        sys.argv[at] == "resume" and origin and _launch.claim is None and claim_of_parent() is None
    )
    if unknown and (job := _job_of(flow_class.__name__, origin[-1], without="no claim on the job")):
        _launch.claim_job(job.name, job.config, "resume")
    try:
        _launch.view = view = open_view(flow_class, _launch.job, _launch.config, _launch.flags)
    except KeyboardInterrupt:  # the user does not want to pay
        _launch.release()
        sys.exit(Outcome.INTERRUPTED.exit_code)
    code = _launch.run(flow_class, run_id_file)
    if view is not None:
        began = run_id_file.is_file() and bool(run_id_file.read_text().strip())
        view.close(explained=began and code != Outcome.FAILED.exit_code)
    try:
        run_id = _read_run_id(run_id_file)
        if _launch.fenced or not run_id:
            job = None
        else:
            job = _job_of(flow_class.__name__, run_id)
        if job is not None:
            code = finish_job(
                job, code, started, asked=_launch.asked, width=view.closing_width if view else None
            )
            if _launch.page is not None:
                _launch.page.save_card()
            if "--compare" in _launch.flags and code == 0:
                code = _run_reference(job)
        elif _launch.asked and not _launch.fenced:
            write_to_stderr("interrupted before anything was recorded")
    finally:  # if there is no job, Metaflow has refused to start and printed why
        _launch.release()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the defaults apply while the interpreter ends
    sys.exit(code)


_NOT_OF_REFERENCE = ("--rehearse", "--job", "--run-id-file")


def _run_reference(job: Job) -> int:
    """Run the job once more without its rehearsal, and compare the weights of both.

    Return the exit code.
    """
    from ebbflow.cost.report.render_text import describe_rehearsal
    from ebbflow.cost.report.report import RunReport
    from ebbflow.observe.watch import read_earlier_reports

    words = []
    rest = list(_launch.words)
    while rest:
        word = rest.pop(0)
        if word in _NOT_OF_REFERENCE:
            rest[:1] = []
        elif word != "--compare" and not word.startswith(
            tuple(f"{option}=" for option in _NOT_OF_REFERENCE)
        ):
            words.append(word)
    _launch.release()
    print(f"\n--compare: the same job without the rehearsal, as job {job.name}-quiet")
    command = [sys.executable, sys.argv[0], *words, "--job", f"{job.name}-quiet"]
    child = subprocess.Popen(command, preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    report = RunReport.from_json(json.loads((RUNS / job.name / "report.json").read_text()))
    print("\n".join(describe_rehearsal(report, read_earlier_reports(job.name))))
    return code


def _tell_main_thread() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def write_to_stderr(text: str) -> None:
    """Write a line to stderr without Python's buffers, which is safe in a signal handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


def reorder_words(words: Sequence[str]) -> list[str]:
    """Return the command line with options of `run` moved after Metaflow's command, where Metaflow
    accepts them.

    If there are such options but no command, print the fix and exit with 2.
    """
    before: list[str] = []
    moved: list[str] = []
    rest = list(words)
    while rest and rest[0] not in _COMMANDS:
        word = rest.pop(0)
        if word in _RUN_FLAGS:
            moved.append(word)
            continue
        if word.partition("=")[0] not in RUN_OPTIONS:
            before.append(word)
            if word == "--with" and rest:  # its value may be the name of a command: --with batch
                before.append(rest.pop(0))
            continue
        moved.append(word)
        if "=" not in word and rest:
            moved.append(rest.pop(0))
    if moved and not rest:
        option = moved[0].partition("=")[0]
        print(
            f"{option} is an option of run; fix: {sys.argv[0]} run {shlex.join(words)}",
            file=sys.stderr,
        )
        sys.exit(Outcome.CONFIG.exit_code)
    return [*before, *rest[:1], *moved, *rest[1:]]


def _tie_to_parent(by: signal.Signals) -> bool:
    """Make the kernel send this task `by` when its parent dies.

    Return False if the parent is on another machine.

    The parent is the launcher or, for the other nodes of a local run, Metaflow's control task.
    """
    parent = os.environ.get(_PARENT_VARIABLE)  # set on the launching machine only
    if parent:
        die_with_parent(int(parent), by=by)
        os.environ[_PARENT_VARIABLE] = str(os.getpid())
    return bool(parent)


def _join_in(words: list[str]) -> None:
    """Install signal handlers and Metaflow fixes in a process that Metaflow started.

    Such a process either submits an attempt to a backend or is a task in a container. `words` is
    the command line, starting with Metaflow's command.
    """
    from ebbflow.flows import metaflow_fixes

    mended = metaflow_fixes.needs_fixes(sys.argv)
    if words[:2] == ["batch", "step"]:
        from ebbflow.flows.attempts.submission import open_submission

        open_submission().listen()
        if mended:
            metaflow_fixes.fix_submitter()
        elif metaflow_fixes.is_known_release():
            metaflow_fixes.fix_batch_requests()
    elif words[:2] == ["kubernetes", "step"]:
        from ebbflow.flows.attempts.pod_submission import open_pod_submission
        from ebbflow.flows.pods import exit_when_asked, set_grace_period

        exit_when_asked()
        set_grace_period()
        open_pod_submission().listen()
        if mended:
            from metaflow.plugins.kubernetes import kubernetes_cli

            metaflow_fixes.pass_over_missing_metadata(kubernetes_cli)
    elif words[:1] == ["step"] and remote.in_container():
        from ebbflow.flows.attempts.submission import listen_for_stop

        listen_for_stop()
        if mended:
            metaflow_fixes.fix_task()


def use_records() -> None:
    """Let Metaflow's Client API and `Runner` in this process find this project's runs.

    This works in any folder, and also for the user root, whom Metaflow otherwise refuses. Call it
    before Metaflow is imported, because Metaflow reads its settings at import; otherwise it raises
    RuntimeError.
    """
    if "metaflow" in sys.modules and "METAFLOW_DATASTORE_SYSROOT_LOCAL" not in os.environ:
        raise RuntimeError(
            "metaflow is imported already; fix: restart the kernel and call "
            "ebbflow.use_records() first"
        )
    _set_environment()


def _set_environment() -> None:
    # Local @parallel starts the other nodes as `python`, which must be this interpreter.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    )
    # One place for Metaflow's records and cards, so that resume and card work from any directory. A
    # container's records must be in Metaflow's default folder.
    if not remote.in_container():
        root = os.environ.setdefault(
            "METAFLOW_DATASTORE_SYSROOT_LOCAL", str(records_root(PROJECT_ROOT, METAFLOW_FOLDER))
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


def _command_index(argv: list[str]) -> int | None:
    """Return the index of Metaflow's command in the command line, or None.

    The value of `--with` is not a command.
    """
    return next(
        (
            at
            for at, word in enumerate(argv)
            if at and word in _COMMANDS and argv[at - 1] != "--with"
        ),
        None,
    )


def _is_launch(at: int | None) -> TypeGuard[int]:
    return at is not None and sys.argv[at] in ("run", "resume") and "--help" not in sys.argv


def _run_id_file(options: list[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run-id-file")
    return parser.parse_known_args(options)[0].run_id_file


def _metaflow(flow_class: type) -> int:
    try:
        flow_class()
    except SystemExit as exit_:
        if isinstance(exit_.code, int):
            return exit_.code
        return int(exit_.code is not None)
    except KeyboardInterrupt:
        return Outcome.INTERRUPTED.exit_code
    return 0


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


def _job_of(flow_name: str, run_id: str, *, without: str = "no report") -> Job | None:
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
        return Job(
            name=data.job, run=run_id, config=config, request_seconds=_REPORT_REQUEST_SECONDS
        )
    except Exception as error:  # Metaflow's client raises many kinds of errors
        print(f"{without}: the run's start step cannot be read: {error}", file=sys.stderr)
        return None


def finish_job(
    job: Job, code: int, started: float, *, asked: bool, width: int | None = None
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
    """
    from ebbflow.cost.errors import CostError, ReportError
    from ebbflow.cost.report.render_text import describe_rehearsal, render, render_closing
    from ebbflow.cost.report.report import RunReport
    from ebbflow.flows.reporting import write_report
    from ebbflow.observe.watch import read_earlier_reports

    job.remember()  # `start` may have run on another machine
    path = job.folder / "report.json"
    try:
        if not _is_new(path, started):
            check_run_claim(job.store, job.name)
            write_report(job)
    except JobIsRunning as error:  # the other launcher writes the report
        print(describe_error(error), file=sys.stderr)
        return Outcome.INTERRUPTED.exit_code
    except (InfraError, CostError) as error:
        if asked and isinstance(error, ReportError):
            write_to_stderr("interrupted before anything was recorded")
            return code
        # If nothing was recorded, Metaflow's exit code is more specific than the error's.
        if not (asked or (code and isinstance(error, ReportError))):
            code = error.outcome.exit_code or code
        if not _is_new(path, started):
            print(f"no report: {error}", file=sys.stderr)
            return code
        print(f"the report is on this machine only: {error}", file=sys.stderr)
    finish_page(path.parent)
    report = RunReport.from_json(json.loads(path.read_text()))
    page = RUNS / job.name / "report.html"
    if width:
        comparing = "--compare" in _launch.flags and code == 0  # which ends with these lines
        if comparing:
            notes = []
        else:
            notes = describe_rehearsal(report, read_earlier_reports(job.name))
        print(
            render_closing(
                report, os.path.relpath(page), program=_PROGRAM, notes=notes, width=width
            )
        )
    else:
        print(render(report, program=_PROGRAM))
        print(f"\nreport: {page}")
    if asked and not _completed_since(job, started):
        return code
    refused = report.events.get("refused") or {}
    if refused.get("run") == job.run:  # a completed job stays complete, and this run did nothing
        return Outcome(refused["outcome"]).exit_code
    return report.exit_code or code


def _completed_since(job: Job, started: float) -> bool:
    """Return whether the job's last recorded outcome is a completion at or after `started` (Unix
    time).
    """
    from ebbflow.core.events import read_events
    from ebbflow.cost.ledger.generations import find_final_outcome

    outcome = find_final_outcome(read_events(job.store))
    return (
        outcome is not None
        and outcome.t_wall >= started
        and outcome.data["outcome"] == Outcome.COMPLETED
    )


def _is_new(path: Path, started: float) -> bool:
    return path.exists() and path.stat().st_mtime >= started
