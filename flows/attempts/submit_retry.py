"""Retries of a submit to AWS Batch, and jobs whose submit was not answered.

AWS Batch takes no token that would make one of them. So each submit bears a mark, and before it is made again after a
lost answer the job with that mark is looked for: what is found is the answer. A job that appears later is ended.

Metaflow takes a submit that was refused for one that never will be accepted, and ends the run. Accounts have a limit of
submits per second for all that run in them, so that "too many requests" may last for minutes, and is nobody's failure.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from ebbflow.infra.errors import CloudError, CloudUnavailable

_LOOK_SECONDS = 5.0
_IN_TROUBLE = (500, 502, 503, 504)  # answers of what stands between, or of Batch after it has made the job
# A request that nobody waited for any more may still be carried out, and a list may lag: looked after so long.
_TWINS_SECONDS, _FIRST_TWINS_PAUSE_SECONDS = 120.0, 1.0


class LookupUnavailable(Exception):
    """Whether the job was made cannot be asked now, so that it is not submitted again yet."""


class LostAnswers:
    """Of the one job that this process submits. region: of Batch, None: as every AWS tool finds it.

    note: is called with name and id of each job that was ended, which may have cost something. lost: an answer to the
    submit was. Its methods are called by the SDK in the order of a submit's events, or by the submitter.
    """

    def __init__(self, region: str | None, say: Callable[[str], None], note: Callable[[str, str], None]) -> None:
        self._region, self._say, self._note = region, say, note
        self._mark = self._queue = self._name = ""
        self._ended: set[str] = set()
        self._denied = False
        self.lost = False

    def listen(self) -> None:
        from botocore import handlers

        handlers.BUILTIN_HANDLERS.append(("before-parameter-build.batch.SubmitJob", self.mark))
        handlers.BUILTIN_HANDLERS.append(("before-send.batch.SubmitJob", self.answer))

    def mark(self, params: dict[str, Any], **_: Any) -> None:
        """A new submit begins. Changes its parameters in place."""
        from ebbflow.infra.batch import MARK

        self._mark, self.lost = uuid.uuid4().hex, False
        self._queue, self._name = str(params.get("jobQueue")), str(params.get("jobName"))
        params["parameters"] = {**(params.get("parameters") or {}), MARK: self._mark}

    def may_have_made(self, status: int, error: BaseException | None) -> bool:
        """Whether a try of the submit may have led to a job though its answer, if any, does not say so."""
        from botocore.exceptions import HTTPClientError

        if status in _IN_TROUBLE or isinstance(error, HTTPClientError):
            self.lost = True
        return isinstance(error, LookupUnavailable) or (self.lost and (status >= 500 or error is not None))

    def answer(self, request: Any, **_: Any) -> Any:
        """Before each try: what Batch would have answered, where an earlier one has made the job; None: it is to be
        sent. Raises CannotLook.
        """
        if not self.lost or self._denied:
            return None
        try:
            found = self._find()
        except CloudUnavailable as error:
            raise LookupUnavailable(f"whether the job was made cannot be asked: {error}") from error
        except CloudError as error:
            self._denied = True
            self._say(f"submitted again without looking for the job that an unanswered submit may have made: {error}")
            return None
        if not found:
            return None
        self._say(f"an unanswered submit has made job {found[0]}: that one is waited for, and no other is made")
        return _response(request.url, {"jobId": found[0], "jobName": self._name})

    def end(self, waited_for: str) -> None:
        """End all jobs that this submit has made but that one ("": none is waited for), where an answer was lost. Where
        Batch does not answer, that is said.
        """
        from ebbflow.infra.batch import TERMINATED, batch_client, cancel_job

        if not self.lost or self._denied:
            return
        why = f"since {waited_for} is waited for" if waited_for else "since nobody waits for it"
        try:
            for job in self._find():
                if job == waited_for or job in self._ended:
                    continue
                cancel_job(job, why, batch_client(self._region), words=TERMINATED)
                self._ended.add(job)
                self._say(f"job {job} of {self._name} was made by an unanswered submit: ended, {why}")
                self._note(self._name, job)
        except CloudError as error:
            other = f"another job than {waited_for}" if waited_for else "a job"
            self._say(f"whether an unanswered submit of {self._name} has made {other} is not known: {error}")

    def end_twins(self, waited_for: str) -> None:
        """Of the job that is waited for, for as long as one may still appear."""
        limit, pause = time.monotonic() + _TWINS_SECONDS, _FIRST_TWINS_PAUSE_SECONDS
        while self.lost and not self._denied:
            self.end(waited_for)
            if time.monotonic() > limit:
                return
            time.sleep(pause)
            pause *= 2

    def _find(self) -> list[str]:
        """Ids of the jobs that this submit has made, the first one first. Raises CloudError."""
        from ebbflow.infra.batch import batch_client, find_marked_jobs

        client = batch_client(self._region)
        return find_marked_jobs(self._queue, self._name, self._mark, client, deadline_seconds=_LOOK_SECONDS)


def _response(url: str, told: dict[str, str]) -> Any:
    from botocore.awsrequest import AWSResponse

    body = SimpleNamespace(stream=lambda: [json.dumps(told).encode()])
    return AWSResponse(url, 200, {"Content-Type": "application/json"}, body)


SUBMIT_SECONDS = 900.0
# Of one submit, as Metaflow makes it.
OPERATIONS = (
    *("SubmitJob", "RegisterJobDefinition", "DescribeJobDefinitions"),
    *("DescribeJobQueues", "DescribeComputeEnvironments"),
)
_SAY_SECONDS = 60.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 20.0


class SubmitRetry:
    """Answers the SDK's question, after each try, whether and when to try again. Of one process, which submits one job.

    seconds: for all requests of the submit together, from the first try that failed. lost: where a submit goes that was
    not answered. wanted: whether the submit still is; one that is not ends with the next answer.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[str], None],
        lost: LostAnswers,
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._seconds, self._say, self._lost, self._wanted = seconds, say, lost, wanted
        self._began: float | None = None
        self._told = 0.0

    def listen(self) -> None:
        """From now on, in every client of the SDK that this process makes.

        The SDK takes the first answer, and asks who listens to one operation before who listens to a service.
        """
        from botocore import handlers

        names = [f"needs-retry.batch.{operation}" for operation in OPERATIONS]
        handlers.BUILTIN_HANDLERS.extend((name, self.pause) for name in names)

    def pause(
        self, response: Any, operation: Any, attempts: int, caught_exception: BaseException | None, **_: Any
    ) -> float | bool | None:
        """Seconds until the next try, False for none; None: the SDK is to decide. Called by the SDK, never raises."""
        status = 0 if response is None else getattr(response[0], "status_code", 0)
        unanswered = operation.name == "SubmitJob" and self._lost.may_have_made(status, caught_exception)
        if not self._wanted():
            return False
        why = _retry_reason(response, caught_exception)
        if why is None and unanswered:
            told = f"HTTP {status}" if caught_exception is None else " ".join(str(caught_exception).split()).rstrip(".")
            why = f"no answer, so that the job may be made ({told})"
        now = time.monotonic()
        if why is None:
            return None
        if self._began is None:
            self._began, self._told = now, now
            self._say(f"{operation.name}: {why}; asked again for {_duration(self._seconds)} at most")
        passed = now - self._began
        if passed > self._seconds:
            self._say(
                f"{operation.name}: {why} for {_duration(passed)}, {attempts} tries: given up. Nothing of the job is "
                f"lost: the same command with --job goes on from its last commit; fix: {_fix(unanswered)}"
            )
            return False
        if now - self._told >= _SAY_SECONDS:
            self._told = now
            self._say(f"{operation.name}: {why}, for {_duration(passed)} of {_duration(self._seconds)}; asked again")
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 10), _LONGEST_PAUSE_SECONDS)
        return min(pause * random.uniform(0.5, 1.0), max(0.1, self._seconds - passed))


def _retry_reason(response: Any, error: BaseException | None) -> str | None:
    """What went wrong, where it passes by itself; else None. Whether it may have led to a job `LostAnswers` tells."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    from ebbflow.infra.aws.calls import is_throttled

    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        return "AWS Batch cannot be reached"
    if response is None:
        return None
    status, told = getattr(response[0], "status_code", 0), response[1]
    code = str((told.get("Error") or {}).get("Code", "")) if isinstance(told, Mapping) else ""
    if status >= 400 and is_throttled(status, code):
        return f"throttled ({code or status})"
    return f"AWS Batch is not available ({status} {code})" if status == 503 else None


def _fix(unanswered: bool) -> str:
    if unanswered:
        return "see whether AWS Batch can be reached from here"
    return "fewer submits at once in this account, or ask AWS for a higher limit of batch:SubmitJob"


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
