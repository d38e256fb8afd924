"""AWS Batch asked again for as long as a submit may take, where the SDK gives up after some tries.

Metaflow takes a submit that was refused for one that never will be accepted, and ends the run. Accounts have a limit of
submits per second for all that run in them, so that "too many requests" may last for minutes, and is nobody's failure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from ebbflow.flows.attempts.lost_answers import LostAnswers

SUBMIT_SECONDS = 900.0
# Of one submit, as Metaflow makes it.
OPERATIONS = (
    *("SubmitJob", "RegisterJobDefinition", "DescribeJobDefinitions"),
    *("DescribeJobQueues", "DescribeComputeEnvironments"),
)
_SAY_SECONDS = 60.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 20.0


class AskingAgain:
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
        why = _curable(response, caught_exception)
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


def _curable(response: Any, error: BaseException | None) -> str | None:
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
