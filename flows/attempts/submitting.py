"""Beside Metaflow in the process that submits an attempt to AWS Batch and waits for it: notes the job's id, ends a job
that waits too long for capacity, and passes SIGTERM on as "save and leave".

It listens at the AWS SDK, where every request passes, so that it needs nothing of Metaflow's inside.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from flows.attempts.stopping import make_stoppable
from flows.capacity import SUBMIT_VARIABLE
from flows.job import Job
from flows.remote import RUNNABLE_VARIABLE

_WAITING = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING")
_LOOK_SECONDS = 5.0
_REQUEST_SECONDS = 15.0
_LEAVE_SECONDS = 50.0  # less than the launcher waits


class Submission:
    """The one job that this process submits. asked: what the scheduler said about it, {} for a light step."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self._asked = asked
        self._job_id = ""

    def listen(self) -> None:
        """From now on, in every client of the SDK that this process makes."""
        from botocore import handlers

        handlers.BUILTIN_HANDLERS.append(("before-parameter-build.batch.SubmitJob", make_stoppable))
        handlers.BUILTIN_HANDLERS.append(("after-call.batch.SubmitJob", self._submitted))
        signal.signal(signal.SIGTERM, self._leave)

    def _submitted(self, parsed: dict[str, Any], **_: Any) -> None:
        """Called by the SDK with each answer to SubmitJob. Never raises: the job runs already."""
        job_id = parsed.get("jobId")
        if not job_id:
            return
        self._job_id = str(job_id)
        for work in (self._note, self._watch):
            threading.Thread(target=_told, args=(work, str(parsed.get("jobName"))), daemon=True).start()

    def _note(self, job_name: str) -> None:
        """Into the events, so that the job is billed whatever becomes of it and of this process."""
        from infra.config.schema import RunConfig
        from infra.errors import StoreError
        from infra.event_log import EventLog
        from infra.events import BATCH_SUBMITTED, Origin

        asked = self._asked
        if not asked:
            return
        config = RunConfig(store=asked["store"])
        job = Job(name=asked["job"], run=asked["run"], config=config, request_seconds=_REQUEST_SECONDS)
        origin = Origin(
            job=job.name,
            run=job.run,
            attempt=asked["attempt"],
            process=f"submit-{asked['step']}-{asked['task']}-{asked['attempt']}",
        )
        with EventLog(job.store, origin) as log:
            told = {"step": asked["step"], "task": asked["task"]}
            log.emit(BATCH_SUBMITTED, job_id=self._job_id, job_name=job_name, **told)
            while True:  # as long as this process lives: a store that is away keeps what it was not told
                try:
                    return log.flush()
                except StoreError as error:
                    _say(f"job {self._job_id} is not in the events yet: {error}")

    def _watch(self, job_name: str) -> None:
        """End the job when it has not begun in time: Metaflow then tries again, and it is placed elsewhere."""
        from infra.batch import batch_client, cancel_job, describe_attempts
        from infra.errors import InfraError

        seconds = float(self._asked.get("runnable_seconds") or os.environ.get(RUNNABLE_VARIABLE) or 0)
        if not seconds:
            return
        client = batch_client(self._asked.get("region"))
        limit = time.monotonic() + seconds
        while True:
            time.sleep(max(0.2, min(_LOOK_SECONDS, limit - time.monotonic())))
            try:
                found = describe_attempts([self._job_id], client).get(self._job_id)
                if found is not None and found.status not in _WAITING:
                    return
                if time.monotonic() < limit:
                    continue
                waited = f"{seconds / 60:.1f} minutes in {found.queue if found else 'its queue'}"
                why = f" ({found.reason})" if found and found.reason else ""
                _say(f"{job_name} waited {waited} for capacity{why}: ended, to be placed elsewhere")
                cancel_job(self._job_id, f"waited {waited} for capacity", client)
                return
            except InfraError as error:
                _say(f"AWS Batch cannot be asked whether {job_name} has begun: {error}")
                time.sleep(_LOOK_SECONDS)

    def _leave(self, number: int, frame: object) -> None:
        """The launcher was told to leave: the job saves and leaves, which Batch tells it by SIGTERM."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _told(self._end, self._job_id)
        sys.exit(128 + number)

    def _end(self, job_id: str) -> None:
        from infra.batch import batch_client, cancel_job, describe_attempts

        if not job_id:
            return
        client = batch_client(self._asked.get("region"))
        limit = time.monotonic() + _LEAVE_SECONDS
        cancel_job(job_id, "the launcher was told to leave", client, started=True)
        while time.monotonic() < limit:
            found = describe_attempts([job_id], client).get(job_id)
            if found is None or found.finished:
                return
            time.sleep(0.5)
        _say(f"job {job_id} has not ended within {_LEAVE_SECONDS:g} s of being told to")


def submission() -> Submission:
    """Of this process, by what the scheduler left in its environment."""
    return Submission(json.loads(os.environ.get(SUBMIT_VARIABLE) or "{}"))


def _told(work: Any, *args: Any) -> None:
    try:
        work(*args)
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")


def _say(text: str) -> None:
    print(f"batch: {text}", file=sys.stderr, flush=True)
