"""A submit whose answer is lost may have made a job, which another submit would make twice, and both would be paid for.

AWS Batch takes no token that would make one of them. So each submit bears a mark, and before it is made again after a
lost answer the job with that mark is looked for: what is found is the answer. A job that appears later is ended.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ebbflow.infra.errors import CloudAway, CloudError

_LOOK_SECONDS = 5.0
_IN_TROUBLE = (500, 502, 503, 504)  # answers of what stands between, or of Batch after it has made the job
# A request that nobody waited for any more may still be carried out, and a list may lag: looked after so long.
_TWINS_SECONDS, _FIRST_TWINS_PAUSE_SECONDS = 120.0, 1.0


class CannotLook(Exception):
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
        return isinstance(error, CannotLook) or (self.lost and (status >= 500 or error is not None))

    def answer(self, request: Any, **_: Any) -> Any:
        """Before each try: what Batch would have answered, where an earlier one has made the job; None: it is to be
        sent. Raises CannotLook.
        """
        if not self.lost or self._denied:
            return None
        try:
            found = self._find()
        except CloudAway as error:
            raise CannotLook(f"whether the job was made cannot be asked: {error}") from error
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
        from ebbflow.infra.batch import batch_client, marked_jobs

        client = batch_client(self._region)
        return marked_jobs(self._queue, self._name, self._mark, client, deadline_seconds=_LOOK_SECONDS)


def _response(url: str, told: dict[str, str]) -> Any:
    from botocore.awsrequest import AWSResponse

    body = SimpleNamespace(stream=lambda: [json.dumps(told).encode()])
    return AWSResponse(url, 200, {"Content-Type": "application/json"}, body)
