"""The launch of one run: the launcher's claim on the job, and its handling of signals."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, JobIsRunning, Outcome, describe_error
from ebbflow.core.launchers import (
    RUN_CLAIM_VARIABLE,
    Claim,
    check_inherited_claim,
    claim_job,
    claim_of_parent,
)
from ebbflow.core.layout import job_prefix
from ebbflow.core.observer_process import shows_live_page
from ebbflow.core.process import children
from ebbflow.core.program import own_command
from ebbflow.core.store import Store
from ebbflow.core.terms import PriceWatch
from ebbflow.flows.command_line import FLAGS, CommandLine, reorder_words
from ebbflow.flows.live_page import RunObserver
from ebbflow.flows.price_watch import LauncherPrices
from ebbflow.flows.remote import requested_backend
from ebbflow.flows.team_budget import reserve_team_budget

if TYPE_CHECKING:
    from ebbflow.flows.console import RunView

PROGRAM = own_command()  # found before the launcher changes PATH
REPORT_REQUEST_SECONDS = 10.0  # short: the user waits for the report of a run that died
_DRAIN_SECONDS = 60.0
_LOOK_SECONDS = 0.05
_ASKED = "asked to leave: waiting for the last checkpoint (Ctrl-C again to leave at once)"


class Launch:
    """State of this launcher: its command line, its claim on the job, and its handling of SIGTERM,
    SIGHUP and Ctrl-C.

    Before Metaflow starts, a signal ends the process. While Metaflow runs, a signal makes the tasks
    save a checkpoint and exit. While the report is written, only a second Ctrl-C ends the process.

    Args:
        argv: the command line as the user typed it, with the program.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.typed_words = list(argv[1:])
        self.flags = frozenset(FLAGS.keys() & set(argv))
        words = [word for word in self.typed_words if word not in FLAGS]
        self.line = CommandLine.parse([argv[0], *reorder_words(words)])  # for Metaflow
        # Of this run, as far as they are known before Metaflow starts
        self.job = ""
        self.config: RunConfig | None = None
        self.asked = False  # a signal asked the run to exit
        self.claim: Claim | None = None
        self.view: RunView | None = None
        self.observer: RunObserver | None = None
        self.prices: LauncherPrices | None = None
        self._phase = _Phase.PREPARE
        self._hurried = False  # a second Ctrl-C asked to exit without the last checkpoint
        self._interrupts = 0  # Ctrl-C while the report is written

    @property
    def fenced(self) -> bool:
        """Whether another launcher has taken over the job."""
        return self.claim is not None and self.claim.is_taken_over

    @property
    def has_claim(self) -> bool:
        """Whether this launcher or the supervisor above it has claimed the job."""
        return self.claim is not None or claim_of_parent() is not None

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Nohup ignores it
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._leave)

    def claim_job(
        self, job: str, config: RunConfig, command: str, permits: Sequence[str] = ()
    ) -> None:
        """Claim the job, then record the user's permissions (`permits`) to continue despite lost
        commits.

        If the store does not answer, the launcher prints a message and continues without a claim.
        Exits with 3 if another launcher runs the job, or if the permissions cannot be recorded.
        """
        self.job = job
        self.config = config
        try:
            store = _open_job_store(config, job)
            inherited = claim_of_parent()
            if inherited is not None:
                check_inherited_claim(store, job, inherited)
                os.environ[RUN_CLAIM_VARIABLE] = inherited
            else:
                self.claim = claim_job(
                    store,
                    job,
                    command,
                    take_over="--take-over" in self.flags,
                    on_fenced=_signal_main_thread,
                )
                os.environ[RUN_CLAIM_VARIABLE] = self.claim.launcher.id
        except JobIsRunning as error:
            print(describe_error(error), file=sys.stderr)
            sys.exit(error.outcome.exit_code)
        except InfraError as error:
            print(f"job {job} is not protected from a second launcher: {error}", file=sys.stderr)
        pays = requested_backend(self.line.argv, config.cluster.plan_for) is not None
        if pays and config.cost.team_file is not None:
            self._reserve_budget(config, job)
        if permits:
            self._give_permits(permits, job, config.store)

    def _reserve_budget(self, config: RunConfig, job: str) -> None:
        """Reserve the job's dollars in the team's budget.

        Exits with 3 if they do not fit, or if the store has no valid answer, so that no job
        starts without a reservation.
        """
        from ebbflow.cost.errors import CostError

        try:
            root = Store.open(config.store, request_timeout_seconds=REPORT_REQUEST_SECONDS)
            refusal = reserve_team_budget(root, job, config)
        except (CostError, InfraError) as error:
            refusal = f"team budget: {error}"
        if not refusal:
            return
        print(refusal, file=sys.stderr)
        self.release()
        sys.exit(Outcome.PREFLIGHT.exit_code)

    def _give_permits(self, permits: Sequence[str], job: str, store: str) -> None:
        # Late, since importing the options imports the checks of all packages
        from ebbflow.flows.options import give_permits

        try:
            give_permits(permits, job, store)
        except InfraError as error:
            print(f"job {job}: its permit cannot be recorded: {error}", file=sys.stderr)
            self.release()
            sys.exit(Outcome.PREFLIGHT.exit_code)

    def run(self, flow_class: type, run_id_file: Path) -> int:
        """Run Metaflow and return its exit code, or 75 if a signal asked the run to exit."""
        if self.config is not None:
            if self.view is None:
                tell = print
            else:
                tell = self.view.observed
                self.view.is_observed = shows_live_page()
            self.observer = RunObserver(
                flow_class.__name__, self.job, self.config, run_id_file, tell
            )
            if PriceWatch.of(self.config).seconds:
                self.prices = LauncherPrices(self.job, self.config, run_id_file, tell)
        try:
            if self.observer is not None:
                self.observer.start()
            if self.prices is not None:
                self.prices.start()
            self._phase = _Phase.RUN
            code = _run_metaflow(flow_class)
            self._phase = _Phase.REPORT
        except KeyboardInterrupt:  # a signal between two of these lines
            self._phase = _Phase.REPORT
            code = Outcome.INTERRUPTED.exit_code
        if self.prices is not None:
            self.prices.end()
        if self.observer is not None:
            self.observer.end()
        if self.asked:
            return Outcome.INTERRUPTED.exit_code
        return code

    def release(self) -> None:
        if self.claim is not None:
            self.claim.release()

    def _leave(self, number: int, _frame: object) -> None:
        """Handle a signal. While Metaflow runs, wait until the tasks have saved and ended."""
        if self._phase is _Phase.PREPARE:
            self._leave_at_once(self._why_leaving() or "interrupted")
        if self._phase is _Phase.REPORT:
            self._interrupt_report(number)
            return
        if self.asked:
            if number == signal.SIGINT:
                self._hurried = True
            return
        self.asked = True
        self._say(self._why_leaving() or _ASKED)
        for child in children(os.getpid()):
            os.kill(child, signal.SIGTERM)
        drain_seconds = _DRAIN_SECONDS
        if self.config is not None:
            drain_seconds = self.config.checkpoint.drain_seconds
        limit = time.monotonic() + drain_seconds
        while children(os.getpid()) and time.monotonic() < limit and not self._hurried:
            time.sleep(_LOOK_SECONDS)
        raise KeyboardInterrupt

    def _interrupt_report(self, number: int) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts > 1:
            self._leave_at_once("interrupted: the report was not written")
        if self._interrupts == 1:
            write_to_stderr("the report is being written (Ctrl-C again to leave without it)")

    def _say(self, text: str) -> None:
        if self.view is None or not self.view.fancy:
            write_to_stderr(text)
        else:  # the bar would overwrite it
            self.view.say(f"! {text}")

    def _why_leaving(self) -> str:
        if self.claim is None or self.claim.fenced_by is None:
            return ""
        loss = self.claim.describe_loss()
        return f"{loss}: this run saves a checkpoint and ends (exit code 75)"

    def _leave_at_once(self, text: str) -> NoReturn:
        write_to_stderr(text)
        self.release()
        os._exit(Outcome.INTERRUPTED.exit_code)


def write_to_stderr(text: str) -> None:
    """Write a line to stderr without Python's buffers, which is safe in a signal handler."""
    with contextlib.suppress(OSError):
        os.write(2, f"{text}\n".encode())


class _Phase(enum.Enum):
    """Phase of the launch, which decides how a signal is handled."""

    PREPARE = enum.auto()
    RUN = enum.auto()
    REPORT = enum.auto()


def _open_job_store(config: RunConfig, job: str) -> Store:
    root = Store.open(config.store, request_timeout_seconds=REPORT_REQUEST_SECONDS)
    return root.sub(job_prefix(job))


def _signal_main_thread() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _run_metaflow(flow_class: type) -> int:
    """Run Metaflow's command line, and return its exit code."""
    try:
        flow_class()
    except SystemExit as exit_:
        if isinstance(exit_.code, int):
            return exit_.code
        return int(exit_.code is not None)
    except KeyboardInterrupt:
        return Outcome.INTERRUPTED.exit_code
    return 0
