"""Retry SubmitJob requests to AWS Batch, and find the job of a request that got no response.

Metaflow ends the run if the request is refused. AWS limits the requests per second of a whole
account, so it may answer "too many requests" for minutes. This module retries such requests for
longer than the AWS SDK does.

A request that gets no response may still have created a job. Since Batch has no idempotency token,
a retry could create a duplicate, which costs money too. Each request therefore carries a random
mark. Before a retry, this module searches for a job with the mark. If the job exists, it becomes
the response to the request. If a duplicate appears later, this module terminates it.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING

from ebbflow.core.errors import CloudError, CloudUnavailable
from ebbflow.infra.aws.answers import SubmitRequest

if TYPE_CHECKING:
    from botocore.awsrequest import AWSPreparedRequest, AWSResponse
    from botocore.model import OperationModel

_LOOK_SECONDS = 5.0
_IN_TROUBLE = (500, 502, 503, 504)  # HTTP status of a proxy, or of Batch after it created the job
# How long a duplicate may appear: Batch may carry out an abandoned request later, and its listings
# lag.
_TWINS_SECONDS = 120.0
_FIRST_TWINS_PAUSE_SECONDS = 1.0

# All operations of AWS Batch that Metaflow calls for one submit.
OPERATIONS = (
    *("SubmitJob", "RegisterJobDefinition", "DescribeJobDefinitions"),
    *("DescribeJobQueues", "DescribeComputeEnvironments"),
)
_SAY_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 20.0


class LookupUnavailable(Exception):
    """Error: AWS Batch did not answer, so it is unknown whether the job exists, and SubmitJob must
    not be retried yet.
    """


class LostAnswers:
    """Search for the job of a SubmitJob request that got no response.

    Each submitting process has one instance.

    Args:
        note: Function that is called with the name and id of each terminated duplicate, which may
            have cost money.
    """

    def __init__(
        self, region: str | None, say: Callable[[str], None], note: Callable[[str, str], None]
    ) -> None:
        self._region = region
        self._say = say
        self._note = note
        self._mark = self._queue = self._name = ""
        self._ended: set[str] = set()
        self._denied = False
        self.lost = False  # the answer to the last request was lost, so that a job may exist

    def listen(self) -> None:
        from botocore import handlers

        handlers.BUILTIN_HANDLERS.append(("before-parameter-build.batch.SubmitJob", self.mark))
        handlers.BUILTIN_HANDLERS.append(("before-send.batch.SubmitJob", self.answer))

    def mark(self, params: SubmitRequest, **_: object) -> None:
        """Add a new random mark to the parameters of a SubmitJob request, in place.

        The AWS SDK calls this.
        """
        from ebbflow.infra.batch import MARK

        self._mark = uuid.uuid4().hex
        self.lost = False
        self._queue = str(params.get("jobQueue"))
        self._name = str(params.get("jobName"))
        params["parameters"] = {**(params.get("parameters") or {}), MARK: self._mark}

    def may_have_made(self, status: int, error: BaseException | None) -> bool:
        """Return whether a failed request may have created a job.

        Args:
            status: The HTTP status; 0 if no response arrived.
            error: The exception if no response arrived.
        """
        from botocore.exceptions import HTTPClientError

        if status in _IN_TROUBLE or isinstance(error, HTTPClientError):
            self.lost = True
        return isinstance(error, LookupUnavailable) or (
            self.lost and (status >= 500 or error is not None)
        )

    def answer(self, request: AWSPreparedRequest, **_: object) -> AWSResponse | None:
        """Return a response with the job that an earlier request created, or None if the SDK must
        send this request.

        The AWS SDK calls this before it sends a SubmitJob request. This method searches for the job
        only if an earlier request got no response. Raises LookupUnavailable if AWS Batch does not
        answer the search.
        """
        if not self.lost or self._denied:
            return None
        try:
            found = self._find()
        except CloudUnavailable as error:
            raise LookupUnavailable(f"cannot check whether the job exists: {error}") from error
        except CloudError as error:
            self._denied = True
            self._say(
                f"submitted again without a search for a job of the unanswered submit: {error}"
            )
            return None
        if not found:
            return None
        self._say(
            f"an unanswered submit created job {found[0]}: waiting for it instead of a second one"
        )
        return _response(request.url, {"jobId": found[0], "jobName": self._name})

    def end(self, waited_for: str) -> None:
        """Terminate the jobs of SubmitJob requests without a response, except the job with the id
        `waited_for`.
        """
        from ebbflow.infra.batch import TERMINATED, batch_client, cancel_job

        if not self.lost or self._denied:
            return
        if waited_for:
            why = f"since {waited_for} is used"
        else:
            why = "since no process waits for it"
        try:
            for job in self._find():
                if job == waited_for or job in self._ended:
                    continue
                cancel_job(job, why, batch_client(self._region), words=TERMINATED)
                self._ended.add(job)
                self._say(
                    f"job {job} of {self._name} was created by an unanswered submit: terminated, "
                    f"{why}"
                )
                self._note(self._name, job)
        except CloudError as error:
            if waited_for:
                other = f"another job than {waited_for}"
            else:
                other = "a job"
            self._say(
                f"cannot check whether an unanswered submit of {self._name} created {other}: "
                f"{error}"
            )

    def end_twins(self, waited_for: str) -> None:
        """For two minutes, search for duplicates of the job with the id `waited_for` and terminate
        them.
        """
        limit = time.monotonic() + _TWINS_SECONDS
        pause = _FIRST_TWINS_PAUSE_SECONDS
        while self.lost and not self._denied:
            self.end(waited_for)
            if time.monotonic() > limit:
                return
            time.sleep(pause)
            pause *= 2

    def _find(self) -> list[str]:
        """Return the ids of the jobs with this request's mark, oldest first. Raises CloudError."""
        from ebbflow.infra.batch import batch_client, find_marked_jobs

        client = batch_client(self._region)
        return find_marked_jobs(
            self._queue, self._name, self._mark, client, deadline_seconds=_LOOK_SECONDS
        )


class SubmitRetry:
    """Retry policy for the SubmitJob requests of one submission.

    After each failed request, it decides whether and when to try again.

    Args:
        seconds: Time limit for all requests together, counted from the first failed request.
        wanted: Function that returns whether the job is still wanted. If not, no further request is
            sent.
    """

    def __init__(
        self,
        seconds: float,
        say: Callable[[str], None],
        lost: LostAnswers,
        *,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._seconds = seconds
        self._say = say
        self._lost = lost
        self._wanted = wanted
        self._began: float | None = None
        self._told = 0.0

    def listen(self) -> None:
        """Register `pause` as the retry handler of all AWS Batch clients that this process creates
        later.

        `pause` is registered for each operation. The SDK calls an operation's handlers before its
        own handler for the whole service, and uses the first result that is not None.
        """
        from botocore import handlers

        names = [f"needs-retry.batch.{operation}" for operation in OPERATIONS]
        handlers.BUILTIN_HANDLERS.extend((name, self.pause) for name in names)

    def pause(
        self,
        response: tuple[AWSResponse, dict] | None,
        operation: OperationModel,
        attempts: int,
        caught_exception: BaseException | None,
        **_: object,
    ) -> float | bool | None:
        """Decide whether the AWS SDK repeats a failed request.

        The SDK calls this after each request.

        Returns:
            Seconds until the next try; False to stop retrying; None to let the SDK decide.
        """
        if response is None:
            status = 0
        else:
            status = getattr(response[0], "status_code", 0)
        unanswered = operation.name == "SubmitJob" and self._lost.may_have_made(
            status, caught_exception
        )
        if not self._wanted():
            return False
        why = _retry_reason(response, caught_exception)
        if why is None and unanswered:
            if caught_exception is None:
                problem = f"HTTP {status}"
            else:
                problem = " ".join(str(caught_exception).split()).rstrip(".")
            why = f"no answer, so the job may exist ({problem})"
        now = time.monotonic()
        if why is None:
            return None
        if self._began is None:
            self._began = now
            self._told = now
            self._say(f"{operation.name}: {why}; retrying for at most {_duration(self._seconds)}")
        passed = now - self._began
        if passed > self._seconds:
            self._say(
                f"{operation.name}: {why} for {_duration(passed)}, {attempts} tries: given up. "
                "Nothing of the job is lost: the same command with --job goes on from its last "
                f"commit; fix: {_fix(unanswered)}"
            )
            return False
        if now - self._told >= _SAY_SECONDS:
            self._told = now
            self._say(
                f"{operation.name}: {why}, for {_duration(passed)} of "
                f"{_duration(self._seconds)}; retrying"
            )
        pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 10), _LONGEST_PAUSE_SECONDS)
        return min(pause * random.uniform(0.5, 1.0), max(0.1, self._seconds - passed))


def _response(url: str, document: dict[str, str]) -> AWSResponse:
    from botocore.awsrequest import AWSResponse

    body = SimpleNamespace(stream=lambda: [json.dumps(document).encode()])
    return AWSResponse(url, 200, {"Content-Type": "application/json"}, body)


def _retry_reason(
    response: tuple[AWSResponse, dict] | None, error: BaseException | None
) -> str | None:
    """Return a description of a temporary problem that a retry may solve, else None."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    from ebbflow.infra.aws.calls import is_throttled

    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        return "AWS Batch is unreachable"
    if response is None:
        return None
    status = getattr(response[0], "status_code", 0)
    document = response[1]
    if isinstance(document, Mapping):
        code = str((document.get("Error") or {}).get("Code", ""))
    else:
        code = ""
    if status >= 400 and is_throttled(status, code):
        return f"throttled ({code or status})"
    if status == 503:
        return f"AWS Batch is not available ({status} {code})"
    return None


def _fix(unanswered: bool) -> str:
    if unanswered:
        return "check whether this machine reaches AWS Batch"
    return "fewer submits at once in this account, or ask AWS for a higher limit of batch:SubmitJob"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min"
