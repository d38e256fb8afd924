"""Submission of one attempt to AWS Batch, and the wait for the Batch job, in a process on the
launching machine.

Metaflow starts this process for each attempt (`batch step`). This module makes the process retry a
failed submit, record the job's id or the refusal, and terminate a job that waits too long for
capacity or for its container. On SIGTERM the process terminates the job, so that the job saves a
checkpoint and ends. All of this uses hooks of the AWS SDK and no internals of Metaflow.

To stop a container, Batch sends SIGTERM to its first process and, 30 s later, SIGKILL to all
processes. The first process is the shell of Metaflow's command. SIGTERM would kill that shell and
all its child processes. If the shell is process 1, SIGTERM would have no effect. `wrap_command`
therefore runs the command under another shell, the signal-passing shell. This shell passes SIGTERM
only to the task and waits until the command has ended. The processes that collect the task's logs
get no signal, because they must live as long as the task.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVarTuple

from ebbflow.flows.attempts.submit_retry import LostAnswers, SubmitRetry
from ebbflow.flows.job import Job
from ebbflow.flows.remote import RUNNABLE_VARIABLE
from ebbflow.infra.aws.answers import SubmitAnswer, SubmitRequest

if TYPE_CHECKING:
    from ebbflow.core.event_log import EventLog
    from ebbflow.flows.attempts.order import SubmitLimits, SubmitOrder

Arguments = TypeVarTuple("Arguments")

# Variable with the path of the file in which the task writes its process id for the signal-passing
# shell.
_TASK_VARIABLE = "EBBFLOW_TASK_FILE"
# $1: the command. Processes below ignore SIGTERM, so that a signal to the process group spares
# shell and logs; only the task listens again (`listen_for_stop`). Without a task there is nothing
# to save.
_SHELL = f"""
export {_TASK_VARIABLE}="$PWD/.ebbflow-task-$$"
leave() {{
  told=yes
  if [ -s "${_TASK_VARIABLE}" ]; then kill -TERM "$(cat "${_TASK_VARIABLE}")" 2>/dev/null; else kill -KILL "$child"; fi
}}
trap leave TERM
bash -c "trap '' TERM
$1" &
child=$!
while told=; wait "$child"; code=$?; [ -n "$told" ]; do :; done
rm -f "${_TASK_VARIABLE}"
exit "$code"
"""

# States in which a job has no machine and costs nothing. From STARTING on it has a machine.
_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
_STARTING = "STARTING"
_RETRY_SECONDS = 5.0  # after a failed look at a job
_REQUEST_SECONDS = 15.0


class StartLimits:
    """Time limits within which a submitted job must begin to run.

    `runnable_seconds` limits the wait for capacity, counted from the submit. `starting_seconds`
    limits the time in the state STARTING. `start_by_utc` is the Unix time by which the job must run
    (None: no limit).
    """

    def __init__(
        self, *, runnable_seconds: float, starting_seconds: float, start_by_utc: float | None
    ) -> None:
        self._runnable_seconds = runnable_seconds
        self._starting_seconds = starting_seconds
        self._submitted = time.monotonic()
        if start_by_utc is None:
            self._start_by = math.inf
        else:
            self._start_by = self._submitted + start_by_utc - time.time()
        self._starting: float | None = None

    def restart(self) -> None:
        """Restart the clock that measures the wait for capacity."""
        self._submitted = time.monotonic()
        self._starting = None

    def left(self) -> float:
        limit = self._submitted + self._runnable_seconds
        if self._starting is not None:
            limit = self._starting + self._starting_seconds
        return min(limit, self._start_by) - time.monotonic()

    def exhausted(self, status: str | None) -> tuple[str, str] | None:
        """Record the job's state, and check whether it exceeds a limit.

        Args:
            status: Current state of the Batch job; None if unknown. The last known state then
                applies.

        Returns:
            None if no limit is exceeded. Otherwise a tuple: the first words of the termination
            reason, from which the bill later derives the cause, and an explanation for the log.
        """
        from ebbflow.infra.batch import NEVER_STARTED, NOT_MADE

        now = time.monotonic()
        if status == _STARTING and self._starting is None:
            self._starting = now
        elif status in _WAITING:
            self._starting = None
        if self.left() > 0:
            return None
        if self._starting is None:
            minutes = min(now - self._submitted, self._runnable_seconds) / 60
            return NEVER_STARTED, f"waited {minutes:.1f} minutes for capacity"
        minutes = min(now - self._starting, self._starting_seconds) / 60
        if now < self._starting + self._starting_seconds:
            return (
                NEVER_STARTED,
                f"was starting for {minutes:.1f} minutes, and the job's deadline allows no more",
            )
        return NOT_MADE, (
            f"had capacity but no container after {minutes:.1f} minutes of starting (an image "
            "too large or out of reach, or an instance that does not come up)"
        )


class Submission:
    """Submission and observation of the only Batch job that this process creates.

    Args:
        order: The scheduler's order about this attempt; None for a step that does not train.
        limits: The time limits, which are part of an order.
    """

    def __init__(self, order: SubmitOrder | None, limits: SubmitLimits) -> None:
        self._order = order
        self._limits = limits
        self._region = None if order is None else order.region
        self._job_id = ""
        self._submits = False  # a submit is sent and has no answer yet
        self._told_to_leave = 0  # number of the signal, 0 without one
        self._lost = LostAnswers(self._region, _say, self._note_unwanted)

    def listen(self) -> None:
        """Register the handlers for SIGTERM and for the SubmitJob calls of all AWS SDK clients in
        this process.
        """
        from botocore import handlers

        seconds = self._limits.submit_seconds
        self._lost.listen()
        SubmitRetry(seconds, _say, self._lost, wanted=lambda: not self._told_to_leave).listen()
        steps = {"before-call": self._begun, "before-parameter-build": wrap_job_commands}
        steps |= {"after-call": self._submitted, "after-call-error": self._not_submitted}
        handlers.BUILTIN_HANDLERS.extend(
            (f"{name}.batch.SubmitJob", handler) for name, handler in steps.items()
        )
        signal.signal(signal.SIGTERM, self._leave)
        # The launcher passes a terminal's SIGINT on as SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _begun(self, **_: object) -> None:
        self._submits = True

    def _not_submitted(self, **_: object) -> None:
        """Terminate any job that a failed submit may have created, because no process would wait
        for it.
        """
        _report_errors(self._lost.end, "")
        self._submits = False
        if self._told_to_leave:
            sys.exit(128 + self._told_to_leave)

    def _submitted(self, parsed: SubmitAnswer, **_: object) -> None:
        """Start the threads that watch over the submitted job.

        The AWS SDK calls this with each SubmitJob response.

        This never raises, because the job already exists. If SIGTERM arrived during the submit,
        terminate the job and exit.
        """
        job_id = parsed.get("jobId")
        if not job_id:
            why = refusal_reason(parsed)
            if why:
                _report_errors(self._note_refusal, why)
            self._not_submitted()
            return
        self._submits = False
        self._job_id = str(job_id)
        name = str(parsed.get("jobName"))
        for work, about in (
            (self._note, name),
            (self._watch, name),
            (self._lost.end_twins, self._job_id),
        ):
            _start_thread(work, about)
        if self._told_to_leave:
            self._go(self._told_to_leave)

    def _note_refusal(self, why: str) -> None:
        """Record the refused submit as the job's outcome, because Metaflow then ends the run."""
        from ebbflow.core.errors import Outcome
        from ebbflow.core.events import OUTCOME

        if self._order is not None:
            with submit_events(self._order) as log:
                message = f"AWS Batch refused the submit of {self._order.step}: {why}"
                log.emit(OUTCOME, flush=True, outcome=Outcome.FAILED.value, message=message)

    def _note_unwanted(self, job_name: str, job_id: str) -> None:
        """Record a duplicate Batch job for the bill.

        Take at most 15 s, since the caller may exit next.
        """
        _start_thread(self._note, job_name, job_id).join(_REQUEST_SECONDS)

    def _note(self, job_name: str, unwanted: str = "") -> None:
        """Record the id of a Batch job in the job's events, so that the bill includes it even if
        this process dies.

        If the store fails, retry without limit.

        Args:
            unwanted: Id of a duplicate Batch job to record; "" to record the job of this process.
        """
        from ebbflow.core.errors import StoreError
        from ebbflow.core.events import BATCH_SUBMITTED

        order = self._order
        if order is None:
            return
        job_id = unwanted or self._job_id
        with submit_events(order) as log:
            if unwanted:
                log.emit(
                    BATCH_SUBMITTED,
                    step=order.step,
                    task=order.task,
                    job_id=job_id,
                    job_name=job_name,
                    twin_of=self._job_id or None,
                )
            else:
                log.emit(
                    BATCH_SUBMITTED,
                    step=order.step,
                    task=order.task,
                    job_id=job_id,
                    job_name=job_name,
                )
            while True:  # the store may come back
                try:
                    log.flush()
                    return
                except StoreError as error:
                    _say(f"job {job_id} is not in the events yet: {error}")

    def _watch(self, job_name: str) -> None:
        """Terminate the Batch job if it does not begin to run in time.

        Metaflow then retries with a new placement.
        """
        from ebbflow.core.errors import InfraError
        from ebbflow.infra.batch import batch_client, cancel_job, describe_attempts

        client = batch_client(self._region)
        limits = StartLimits(
            runnable_seconds=longest_wait_seconds(self._limits),
            starting_seconds=self._limits.starting_seconds,
            start_by_utc=self._limits.start_by_utc,
        )
        while True:
            time.sleep(max(0.2, min(self._limits.look_seconds, limits.left())))
            try:
                job = describe_attempts([self._job_id], client).get(self._job_id)
                if job is not None and job.status not in (*_WAITING, _STARTING):
                    return
                exceeded = limits.exhausted(None if job is None else job.status)
                if exceeded is None:
                    continue
                words, why = exceeded
                queue = "its queue"
                reason = ""
                if job is not None:
                    queue = f"queue {job.queue}"
                if job is not None and job.reason:
                    reason = f" ({job.reason})"
                _say(f"{job_name} {why} in {queue}{reason}: terminated, to be placed anew")
                cancel_job(self._job_id, f"{why} in {queue}", client, words=words)
                return
            except InfraError as error:
                _say(f"AWS Batch does not tell whether {job_name} has started: {error}")
                time.sleep(_RETRY_SECONDS)

    def _leave(self, number: int, _frame: object) -> None:
        """Handle SIGTERM: terminate the Batch job and exit.

        The job saves a checkpoint before it ends.

        While a SubmitJob request is pending, the job's id is unknown. This method then only stores
        the signal, and the handler of the response terminates the job and exits.
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._submits:
            self._told_to_leave = number
        else:
            self._go(number)

    def _go(self, number: int) -> None:
        _report_errors(self._end, self._job_id)
        _report_errors(self._lost.end, self._job_id)
        sys.exit(128 + number)

    def _end(self, job_id: str) -> None:
        from ebbflow.infra.batch import TERMINATED, batch_client, cancel_job, describe_attempts

        if not job_id:
            return
        client = batch_client(self._region)
        limit = time.monotonic() + self._limits.leave_seconds
        cancel_job(job_id, "the launcher was asked to leave", client, words=TERMINATED)
        while time.monotonic() < limit:
            found = describe_attempts([job_id], client).get(job_id)
            if found is None or found.finished:
                return
            time.sleep(0.5)
        seconds = self._limits.leave_seconds
        _say(f"job {job_id} has not ended within {seconds:g} s after its termination")


def wrap_command(command: list[str]) -> list[str]:
    """Wrap a command of the form `bash -c TEXT` in a shell that passes SIGTERM on to the task.

    Return any other command unchanged.
    """
    if len(command) == 3 and command[:2] == ["bash", "-c"]:
        return ["bash", "-c", _SHELL, "bash", command[2]]
    return command


def wrap_job_commands(params: SubmitRequest, **_: object) -> None:
    """Wrap each command of a SubmitJob request in the signal-passing shell (see `wrap_command`).

    The AWS SDK calls this.
    """
    nodes = (params.get("nodeOverrides") or {}).get("nodePropertyOverrides") or []
    for overrides in [
        params.get("containerOverrides"),
        *(node.get("containerOverrides") for node in nodes),
    ]:
        command = (overrides or {}).get("command")
        if overrides is not None and command:
            overrides["command"] = wrap_command(command)


def listen_for_stop() -> None:
    """Make SIGTERM end this task, and write the task's process id to the file that the surrounding
    shell reads.

    Do nothing if the task does not run under the signal-passing shell.
    """
    path = os.environ.get(_TASK_VARIABLE)
    if path:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Path(path).write_text(str(os.getpid()))


def longest_wait_seconds(limits: SubmitLimits) -> float:
    """Return the longest wait for capacity in seconds: from the order's limits or, by default, from
    the environment.
    """
    if limits.runnable_seconds:
        return limits.runnable_seconds
    return float(os.environ.get(RUNNABLE_VARIABLE) or math.inf)


def submit_events(order: SubmitOrder) -> EventLog:
    """Open the job's event log for the submitting process."""
    from ebbflow.core.config.schema import RunConfig
    from ebbflow.core.event_log import EventLog
    from ebbflow.core.events import Origin

    config = RunConfig.model_validate({"store": order.store})
    job = Job(name=order.job, run=order.run, config=config, request_seconds=_REQUEST_SECONDS)
    process = f"submit-{order.step}-{order.task}-{order.attempt}"
    return EventLog(
        job.store, Origin(job=job.name, run=job.run, attempt=order.attempt, process=process)
    )


def refusal_reason(answer: SubmitAnswer) -> str | None:
    """Return why Batch refused the request, or None if a retry may succeed."""
    from ebbflow.infra.aws.calls import is_throttled

    error = answer.get("Error") or {}
    status = int((answer.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
    code = str(error.get("Code", ""))
    if not 400 <= status < 500 or is_throttled(status, code):
        return None
    return f"{error.get('Message') or 'no reason given'} ({code or status})"


def open_submission() -> Submission:
    # Late, since every task imports this module
    from ebbflow.flows.attempts.order import SubmitLimits, SubmitOrder

    order = SubmitOrder.of_environment()
    return Submission(order, SubmitLimits() if order is None else order)


def _start_thread(work: Callable[[*Arguments], None], *arguments: *Arguments) -> threading.Thread:
    thread = threading.Thread(target=_report_errors, args=(work, *arguments), daemon=True)
    thread.start()
    return thread


def _report_errors(work: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
    try:
        work(*arguments)
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(f"batch: {text}", file=sys.stderr, flush=True)
