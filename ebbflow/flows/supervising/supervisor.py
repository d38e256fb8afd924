"""The supervisor of a job, and its command line.

The supervisor starts the flow, judges each run by the job's record in the store, and starts another
run or stops.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ebbflow.core.errors import Outcome, StoreError, StoreUnavailable
from ebbflow.core.events import OUTCOME, SUPERVISED
from ebbflow.core.launchers import CLAIM_VARIABLE, Claim, claim_job
from ebbflow.core.process import ignore_lost_readers, run_command
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.untrusted_text import guard_terminal
from ebbflow.cost.amounts import format_count
from ebbflow.flows.attempts.settlement import end_leftovers
from ebbflow.flows.job import Job
from ebbflow.flows.options import adopt_job_store, give_permits
from ebbflow.flows.reporting import write_report
from ebbflow.flows.supervising.child import LEAVE_SECONDS, FlowProcess
from ebbflow.flows.supervising.options import SupervisorOptions, read_options
from ebbflow.flows.supervising.record import (
    LONGEST_PAUSE_SECONDS,
    JobRecord,
    RunVerdict,
    SupervisedRun,
    count_failures,
    count_in_a_row,
    judge_run,
    pause_seconds,
    read_record,
    waited_seconds,
)

_FLOW = Path(__file__).resolve().parents[1] / "train_flow.py"
_STORE_PAUSE_SECONDS = 30.0
_REQUEST_SECONDS = 30.0
_REPORT_SECONDS = 120.0  # of a launcher that has drained
# Verdicts whose cause may pass by itself. If it lasts too long, the job stops with this outcome and
# this wording.
_WAITS = {
    RunVerdict.NO_CAPACITY: (Outcome.NO_CAPACITY, "none"),
    RunVerdict.NOT_READY: (Outcome.PREFLIGHT, "refused by preflight"),
}


class Supervisor:
    """Supervisor of one job. It repeatedly runs the flow file `flow` with the command `run`."""

    def __init__(
        self, options: SupervisorOptions, say: Callable[[str], None], *, flow: Path = _FLOW
    ) -> None:
        self._options = options
        self._say = say
        self._flow = flow
        drain_seconds = options.config.checkpoint.drain_seconds
        self._child = FlowProcess(leave_seconds=max(LEAVE_SECONDS, drain_seconds + _REPORT_SECONDS))
        self._job = Job(
            name=options.job, run="", config=options.config, request_seconds=_REQUEST_SECONDS
        )
        self._unwritten: list[SupervisedRun] = []
        self._claim: Claim | None = None

    def supervise(self) -> int:
        """Start runs until the job is over, and return the exit code.

        Raises JobIsRunning or StoreError.
        """
        self._child.listen()
        try:
            return self._supervise()
        finally:
            if self._claim is not None:
                self._claim.release()

    def _supervise(self) -> int:
        options = self._options
        adopt_job_store(options.job, options.config.store, options.permits)
        # Before the claim, Batch jobs of another launcher may be running
        before = self._read(end_leftovers_too=False)
        if before is None:
            return Outcome.INTERRUPTED.exit_code
        job = f"job {self._options.job} in {self._options.config.store}"
        self._say(f"{job} {_describe_start(before)}")
        if not before.finished or before.unsettled:
            self._claim_job()
            give_permits(self._options.permits, self._options.job, self._options.config.store)
            before = self._read()  # the former launcher may have saved or completed the job
            if before is None:
                return Outcome.INTERRUPTED.exit_code
        if before.finished:
            done = f"is complete already, and {before.cost()}; use another --job to start anew"
            self._say(f"job {self._options.job} {done}")
            return 0
        if before.final is not None and not options.permits and not options.again:
            return self._refuse_to_repeat(before.final, before)
        no_progress = before.no_progress or before.exceeded_bound
        if no_progress and not options.again:
            return self._end_as_crash_loop(no_progress, before)
        return self._run_until_over(before)

    def _refuse_to_repeat(self, outcome: Outcome, record: JobRecord) -> int:
        """Print how the job ended, and return its exit code, without starting a run.

        A scheduler may have started this supervisor again, and each run would start a paid gang.
        """
        self._say(
            f"job {self._options.job} has ended already, {outcome.value} (exit code "
            f"{outcome.exit_code}): {' '.join(record.final_message.split()) or 'no message'}; "
            f"{record.cost()}; nothing was started; after a fix outside its settings: --again"
        )
        return outcome.exit_code

    def _run_until_over(self, before: JobRecord) -> int:
        """Start one run after another until the job is over, and return the exit code."""
        while True:
            started = time.monotonic()
            code = self._child.run([sys.executable, str(self._flow), "run", *self._options.words])
            after = self._read()
            if after is None:
                return Outcome.INTERRUPTED.exit_code
            verdict = judge_run(code, before, after)
            if verdict is RunVerdict.FAILURE:
                failures = count_failures(before, after)
            else:
                failures = 0
            # An earlier run's stop ended that run alone
            stopped = after.operator_stop != before.operator_stop and after.operator_stop
            before = self._write(verdict, code, time.monotonic() - started, after, failures)
            end = self._end(verdict, code, before)
            if end is not None:
                return end
            if stopped:
                self._say(
                    f"stopped, interrupted: {stopped}; {before.cost()}; the same command continues "
                    "it"
                )
                return Outcome.INTERRUPTED.exit_code
            self._pause(verdict, code, before)
            if self._child.asked_to_leave:
                return self._leave(before)

    def _claim_job(self) -> None:
        """Claim the job, for the supervisor and all its runs together."""
        options = self._options
        try:
            self._claim = claim_job(
                self._job.store,
                options.job,
                "supervise",
                take_over=options.take_over,
                on_fenced=lambda: os.kill(os.getpid(), signal.SIGTERM),
                say=self._say,
            )
            self._child.environment[CLAIM_VARIABLE] = self._claim.launcher.id
        except StoreError as error:
            self._say(f"job {options.job} is not protected from a second launcher: {error}")

    def _end(self, verdict: RunVerdict, code: int, record: JobRecord) -> int | None:
        """If the job is over, print why and return the exit code. Otherwise return None."""
        if verdict is RunVerdict.COMPLETED:
            self._say(f"completed after {self._tally(record)}; {record.cost()}")
            return 0
        if self._claim is not None and self._claim.fenced_by is not None:
            return self._leave(record)
        if verdict is RunVerdict.FINAL:
            outcome = next(outcome for outcome in Outcome if outcome.exit_code == code)
            self._say(f"stopped, {outcome.value} (exit code {code}): {self._why(record, outcome)}")
            self._say(f"after {self._tally(record)}; {record.cost()}")
            return code
        if self._child.asked_to_leave:
            return self._leave(record)
        loop = self._find_crash_loop(verdict, code, record)
        if loop:
            return self._end_as_crash_loop(loop, record)
        return self._waited_too_long(verdict, record)

    def _waited_too_long(self, verdict: RunVerdict, record: JobRecord) -> int | None:
        if verdict not in _WAITS:
            return None
        now = time.time()
        pause = max(LONGEST_PAUSE_SECONDS, self._options.capacity_pause_seconds)
        waited = waited_seconds(record, verdict, now, usual_pause_seconds=pause)
        if waited > self._options.wait_hours * 3600:
            outcome, what = _WAITS[verdict]
            self._say(
                f"stopped, {outcome.value}: {what} for {waited / 3600:.1f} h (--wait-hours); "
                f"{record.cost()}"
            )
            return outcome.exit_code
        if (
            verdict is RunVerdict.NOT_READY
            and record.deadline_utc is not None
            and now > record.deadline_utc
        ):
            late = (now - record.deadline_utc) / 3600
            self._say(
                f"stopped, deadline: it passed {late:.1f} h ago, while preflight refused to go "
                f"on; {record.cost()}"
            )
            return Outcome.DEADLINE.exit_code
        return None

    def _find_crash_loop(self, verdict: RunVerdict, code: int, record: JobRecord) -> str:
        """Return why the job counts as a crash loop, or "" if it does not.

        Agents miss a crash loop if each failure ends them together with the run.
        """
        if verdict is RunVerdict.FAILURE:
            count = count_in_a_row(record, verdict)
            if count >= self._options.max_failures:
                return (
                    f"crash loop: {count} failures with no new commit in between, the last run "
                    f"with exit code {code}: {self._why(record, Outcome.FAILED)}"
                )
            return record.exceeded_bound
        if verdict is RunVerdict.INTERRUPTION:
            return record.no_progress or record.exceeded_bound
        return ""

    def _end_as_crash_loop(self, message: str, record: JobRecord) -> int:
        """Record that a crash loop ended the job, and return the exit code."""
        self._say(f"stopped, {message}")
        self._say(
            f"after {self._tally(record)}; {record.cost()}; fix it, then start the supervisor again with --again"
        )
        if record.begun:
            with self._job_of(record).events("supervisor") as events:
                events.emit(OUTCOME, outcome=Outcome.CRASH_LOOP.value, message=message)
            try:
                self._job.folder.mkdir(parents=True, exist_ok=True)
                write_report(self._job_of(record))
            except Exception as error:  # the events contain the outcome
                self._say(f"the report could not be rewritten: {error}")
        return Outcome.CRASH_LOOP.exit_code

    def _why(self, record: JobRecord, outcome: Outcome) -> str:
        """Return the job's own message about the last run's outcome, or a reference to the run's
        output.
        """
        if record.report is not None and record.report.outcome is outcome:
            events = record.report.events
            culprits = [failure.get("culprit") for failure in events["failures"][-1:]]
            if own_message := events.get("message") or next(iter(culprits), None):
                return " ".join(str(own_message).split())
        return "see the run's output above"

    def _pause(self, verdict: RunVerdict, code: int, record: JobRecord) -> None:
        seconds = self._options.capacity_pause_seconds
        if verdict is not RunVerdict.NO_CAPACITY:
            seconds = pause_seconds(record, verdict, self._options.pause_seconds)
        if seconds:
            when = f"again in {seconds:g} s"
        else:
            when = "going on"
        if verdict is RunVerdict.FAILURE:
            count = (
                f"failure {count_in_a_row(record, verdict)} of {self._options.max_failures} "
                "without a new commit"
            )
            words = f"{count} (exit code {code}): {self._why(record, Outcome.FAILED)}"
        elif verdict is RunVerdict.NO_CAPACITY:
            words = "no capacity"
        elif verdict is RunVerdict.NOT_READY:
            count = count_in_a_row(record, verdict)
            words = (
                f"preflight refused {format_count(count, 'time')} in a row what it passed before"
            )
        else:
            words = f"interrupted (exit code {code}), {self._tally(record)}"
        self._say(f"{words}; {record.cost()}; {when}")
        self._child.pause(seconds)

    def _leave(self, record: JobRecord) -> int:
        if self._claim is not None and self._claim.fenced_by is not None:
            self._say(f"{self._claim.describe_loss()}; {record.cost()}")
        else:
            self._say(f"asked to leave; {record.cost()}; the same command continues it")
        return Outcome.INTERRUPTED.exit_code

    def _tally(self, record: JobRecord) -> str:
        counts = [(len(record.runs), "run")]
        if record.report is not None:
            report = record.report
            counts += [(report.interruptions, "interruption"), (report.failures, "failure")]
            counts += [(report.redone_steps, "redone step")]
        return ", ".join(format_count(count, noun) for count, noun in counts)

    def _job_of(self, record: JobRecord) -> Job:
        return Job(
            name=self._job.name,
            run=record.run,
            config=self._job.config,
            request_seconds=_REQUEST_SECONDS,
        )

    def _write(
        self, verdict: RunVerdict, code: int, seconds: float, record: JobRecord, failures: int
    ) -> JobRecord:
        """Record how a run ended, and return the new record of the job.

        The run is recorded in the job's events. If the job has no events yet, the record of the run
        is only in this process's memory.
        """
        recorded = {"verdict": verdict.value, "commit": record.commit, "failures": failures}
        past_run = SupervisedRun(**recorded, ended_utc=time.time(), seconds=seconds)
        if record.begun:
            with self._job_of(record).events("supervisor") as events:
                events.emit(SUPERVISED, exit_code=code, seconds=seconds, **recorded)
        else:
            self._unwritten.append(past_run)
        return record.with_runs(past_run)

    def _read(self, *, end_leftovers_too: bool = True) -> JobRecord | None:
        """Read the job's record, and terminate Batch jobs that an earlier run left behind.

        If another launcher has taken over the job, no Batch job is terminated. While the store does
        not answer, the read is repeated every 30 s. Returns None if a signal asks the supervisor to
        exit meanwhile. Raises StoreUnavailable after --wait-hours.
        """
        limit = time.monotonic() + self._options.wait_hours * 3600
        while True:
            try:
                record = read_record(self._job.store, self._options.config)
                if (
                    end_leftovers_too
                    and record.unsettled
                    and (self._claim is None or self._claim.successor() is None)
                ):
                    end_leftovers(self._job_of(record), self._say)
                    record = read_record(self._job.store, self._options.config)
                return record.with_runs(*self._unwritten)
            except StoreUnavailable as error:
                if self._child.asked_to_leave:
                    self._say(
                        "asked to leave while the store did not answer; the same command "
                        "continues the job"
                    )
                    return None
                if time.monotonic() > limit:
                    raise
                self._say(
                    f"the store does not answer, again in {_STORE_PAUSE_SECONDS:g} s: {error}"
                )
                self._child.pause(_STORE_PAUSE_SECONDS)


def main(arguments: list[str]) -> int:
    ignore_lost_readers()
    guard_terminal()
    return run_command(
        lambda: Supervisor(read_options(arguments, project_root=PROJECT_ROOT), _say).supervise()
    )


def _describe_start(record: JobRecord) -> str:
    if not record.begun:
        return "begins"
    if record.runs:
        runs = f", {format_count(len(record.runs), 'run')} so far"
    else:
        runs = ""
    return f"goes on{runs}; {record.cost()}"


def _say(text: str) -> None:
    print(f"supervise: {text}", flush=True)
