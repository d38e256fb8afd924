"""The process that submits an attempt to AWS Batch and waits for it.

A container is stopped by SIGTERM to its first process, by SIGKILL to all of it some time later (30 s on Batch), and by
the end of the first process. That one is the shell of Metaflow's command, below an image's init or in its place. A
shell that waits for a command dies of SIGTERM at once, and everything with it; as process 1 it never hears of it.
Either way the task would not be told to save and leave. So the command is run by a shell that hands the signal on to
the task and to nobody else (its logs pass through processes that must live as long as it), and stays until the command
has ended by itself.

It listens at the AWS SDK, where every request passes, so that it needs nothing of Metaflow's inside.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ebbflow.flows.attempts.order import SUBMIT_VARIABLE
from ebbflow.flows.attempts.submit_retry import SUBMIT_SECONDS, LostAnswers, SubmitRetry
from ebbflow.flows.job import Job
from ebbflow.flows.remote import RUNNABLE_VARIABLE

if TYPE_CHECKING:
    from ebbflow.infra.event_log import EventLog


# Where the task writes its process id, for the shell around it.
_TASK_VARIABLE = "EBBFLOW_TASK_FILE"
# $1: the command. What is below it ignores SIGTERM, so that a signal to all of a process group leaves shell and logs
# alone; the task itself listens again (`listen_for_stop`). Without a task there is nothing to save.
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


def wrap_command(command: list[str]) -> list[str]:
    """The command of a container, the shell around it; one that is no `bash -c TEXT` stays as it is.

    TEXT stays the last word.
    """
    return (
        ["bash", "-c", _SHELL, "bash", command[2]] if len(command) == 3 and command[:2] == ["bash", "-c"] else command
    )


def wrap_job_commands(params: dict[str, Any], **_: Any) -> None:
    """Called by the AWS SDK with each request SubmitJob, before it is made. Changes its commands in place."""
    for overrides in _overrides(params):
        if command := overrides.get("command"):
            overrides["command"] = wrap_command(command)


def _overrides(params: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    nodes = (params.get("nodeOverrides") or {}).get("nodePropertyOverrides") or []
    every = [params.get("containerOverrides"), *(node.get("containerOverrides") for node in nodes)]
    return [one for one in every if one]


def listen_for_stop() -> None:
    """In a task's process: from now on SIGTERM is meant for it. Does nothing outside of such a container."""
    path = os.environ.get(_TASK_VARIABLE)
    if path:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Path(path).write_text(str(os.getpid()))


# Where a job has no machine yet, and costs nothing. From STARTING on it has, while its image is pulled.
_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
STARTING_SECONDS = 2700.0
_STARTING = "STARTING"
_LOOK_SECONDS = 5.0
_REQUEST_SECONDS = 15.0
_LEAVE_SECONDS = 50.0  # less than the launcher waits


class _StartLimits:
    """How long a job may wait for capacity, from its submit, and then be starting, from when it was first seen so; and
    until when (Unix time, None: no matter) it has to run at the latest, however it spends the time."""

    def __init__(self, *, runnable_seconds: float, starting_seconds: float, start_by_utc: float | None) -> None:
        self._runnable_seconds, self._starting_seconds = runnable_seconds, starting_seconds
        self._submitted = time.monotonic()
        self._start_by = math.inf if start_by_utc is None else self._submitted + start_by_utc - time.time()
        self._starting: float | None = None

    def left(self) -> float:
        """Seconds until one of the limits, as far as is known now."""
        limit = self._submitted + self._runnable_seconds
        if self._starting is not None:
            limit = self._starting + self._starting_seconds
        return min(limit, self._start_by) - time.monotonic()

    def exhausted(self, status: str | None) -> tuple[str, str] | None:
        """(what the reason begins with, what was waited for) of a job whose time is up; None: it has some left.

        status: Batch's; None: it did not tell of the job this time, which then is taken to be as it was before.
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
            return NEVER_STARTED, f"was starting for {minutes:.1f} minutes, and its deadline bears no more"
        return NOT_MADE, (
            f"had capacity, and no container after {minutes:.1f} minutes of starting (an image too large or out of "
            "reach, or an instance that does not come up)"
        )


class Submission:
    """The one job that this process submits. asked: what the scheduler said about it, {} for a light step; with limits
    of this process's own: runnable_seconds, starting_seconds, start_by_utc, submit_seconds; look_seconds: how often its
    job is looked at."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = asked
        self._job_id = ""
        self._submits = False  # the answer to a submit is awaited
        self._told_to_leave = 0  # by which signal
        self._lost = LostAnswers(asked.get("region"), _say, self._note_unwanted)

    def listen(self) -> None:
        """From now on, in every client of the SDK that this process makes."""
        from botocore import handlers

        seconds = self._limit("submit_seconds", SUBMIT_SECONDS)
        self._lost.listen()
        SubmitRetry(seconds, _say, self._lost, wanted=lambda: not self._told_to_leave).listen()
        handlers.BUILTIN_HANDLERS.append(("before-call.batch.SubmitJob", self._begun))
        handlers.BUILTIN_HANDLERS.append(("before-parameter-build.batch.SubmitJob", wrap_job_commands))
        handlers.BUILTIN_HANDLERS.append(("after-call.batch.SubmitJob", self._submitted))
        handlers.BUILTIN_HANDLERS.append(("after-call-error.batch.SubmitJob", self._not_submitted))
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's comes to all: the launcher passes it on as SIGTERM

    def _begun(self, **_: Any) -> None:
        self._submits = True

    def _not_submitted(self, **_: Any) -> None:
        """No answer came, or none with a job: what the request may have made nobody would wait for."""
        _report_errors(self._lost.end, "")
        self._submits = False
        if self._told_to_leave:
            sys.exit(128 + self._told_to_leave)

    def _submitted(self, parsed: dict[str, Any], **_: Any) -> None:
        """Called by the SDK with each answer to SubmitJob. Never raises, since the job runs already; ends this process
        where it was told to leave meanwhile.
        """
        job_id = parsed.get("jobId")
        if not job_id:
            if why := refusal_reason(parsed):
                _report_errors(self._note_refusal, why)
            return self._not_submitted()
        self._submits = False
        self._job_id = str(job_id)
        name = str(parsed.get("jobName"))
        for work, about in ((self._note, name), (self._watch, name), (self._lost.end_twins, self._job_id)):
            _start_thread(work, about)
        if self._told_to_leave:
            self._go(self._told_to_leave)

    def _note_refusal(self, why: str) -> None:
        """Into the events: Metaflow ends the run then, and its report is to say what ended it."""
        from ebbflow.infra.errors import Outcome
        from ebbflow.infra.events import OUTCOME

        if self._asked:
            with self._events() as log:
                message = f"AWS Batch refused the submit of {self._asked['step']}: {why}"
                log.emit(OUTCOME, flush=True, outcome=Outcome.FAILED.value, message=message)

    def _note_unwanted(self, job_name: str, job_id: str) -> None:
        """Gives a store that is away some time and no more: who calls may be about to leave."""
        _start_thread(self._note, job_name, job_id).join(_REQUEST_SECONDS)

    def _note(self, job_name: str, unwanted: str = "") -> None:
        """Into the events, so that the job is billed whatever becomes of it and of this process. unwanted: another job
        that the same submit has made.
        """
        from ebbflow.infra.errors import StoreError
        from ebbflow.infra.events import BATCH_SUBMITTED

        asked = self._asked
        if not asked:
            return
        with self._events() as log:
            told = {"step": asked["step"], "task": asked["task"]}
            told |= {"twin_of": self._job_id or None} if unwanted else {}
            log.emit(BATCH_SUBMITTED, job_id=unwanted or self._job_id, job_name=job_name, **told)
            while True:  # as long as this process lives: a store that is away keeps what it was not told
                try:
                    return log.flush()
                except StoreError as error:
                    _say(f"job {unwanted or self._job_id} is not in the events yet: {error}")

    def _events(self) -> EventLog:
        """Those of the job that this attempt belongs to."""
        from ebbflow.infra.config.schema import RunConfig
        from ebbflow.infra.event_log import EventLog
        from ebbflow.infra.events import Origin

        asked = self._asked
        config = RunConfig(store=asked["store"])
        job = Job(name=asked["job"], run=asked["run"], config=config, request_seconds=_REQUEST_SECONDS)
        origin = Origin(
            job=job.name,
            run=job.run,
            attempt=asked["attempt"],
            process=f"submit-{asked['step']}-{asked['task']}-{asked['attempt']}",
        )
        return EventLog(job.store, origin)

    def _limit(self, name: str, usual: float) -> float:
        return float(self._asked.get(name) or usual)

    def _watch(self, job_name: str) -> None:
        """End the job when it does not run in time: Metaflow then tries again, and it is placed elsewhere."""
        from ebbflow.infra.batch import batch_client, cancel_job, describe_attempts
        from ebbflow.infra.errors import InfraError

        client = batch_client(self._asked.get("region"))
        patience = _StartLimits(
            runnable_seconds=self._limit("runnable_seconds", float(os.environ.get(RUNNABLE_VARIABLE) or math.inf)),
            starting_seconds=self._limit("starting_seconds", STARTING_SECONDS),
            start_by_utc=self._asked.get("start_by_utc"),
        )
        while True:
            time.sleep(max(0.2, min(self._limit("look_seconds", _LOOK_SECONDS), patience.left())))
            try:
                found = describe_attempts([self._job_id], client).get(self._job_id)
                if found is not None and found.status not in (*_WAITING, _STARTING):
                    return
                waited = patience.exhausted(None if found is None else found.status)
                if waited is None:
                    continue
                words, why = waited
                queue = f"queue {found.queue}" if found else "its queue"
                reason = f" ({found.reason})" if found and found.reason else ""
                _say(f"{job_name} {why} in {queue}{reason}: ended, to be placed anew")
                cancel_job(self._job_id, f"{why} in {queue}", client, words=words)
                return
            except InfraError as error:
                _say(f"AWS Batch cannot be asked whether {job_name} has begun: {error}")
                time.sleep(_LOOK_SECONDS)

    def _leave(self, number: int, frame: object) -> None:
        """The launcher was told to leave, or is gone: the job saves and leaves, which Batch tells it by SIGTERM. One
        whose id is not known yet could not be told.
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
        client = batch_client(self._asked.get("region"))
        limit = time.monotonic() + _LEAVE_SECONDS
        cancel_job(job_id, "the launcher was told to leave", client, words=TERMINATED)
        while time.monotonic() < limit:
            found = describe_attempts([job_id], client).get(job_id)
            if found is None or found.finished:
                return
            time.sleep(0.5)
        _say(f"job {job_id} has not ended within {_LEAVE_SECONDS:g} s of being told to")


def refusal_reason(answer: dict[str, Any]) -> str | None:
    """What Batch says of a request that it will not take the next time either; None: it may, or took it."""
    from ebbflow.infra.aws.calls import is_throttled

    error = answer.get("Error") or {}
    status, code = int((answer.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0), str(error.get("Code", ""))
    if not 400 <= status < 500 or is_throttled(status, code):
        return None
    return f"{error.get('Message') or 'no reason given'} ({code or status})"


def open_submission() -> Submission:
    """Of this process, by what the scheduler left in its environment."""
    return Submission(json.loads(os.environ.get(SUBMIT_VARIABLE) or "{}"))


def _start_thread(work: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=_report_errors, args=(work, *args), daemon=True)
    thread.start()
    return thread


def _report_errors(work: Any, *args: Any) -> None:
    try:
        work(*args)
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(f"batch: {text}", file=sys.stderr, flush=True)
