"""Outcomes of a job with their exit codes, and the exceptions of `ebbflow.infra`."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Final outcome of a job. Exit codes are part of the public interface and never change their meaning."""

    COMPLETED = "completed"
    FAILED = "failed"
    CONFIG = "config"
    PREFLIGHT = "preflight"
    BUDGET = "budget"
    NO_CAPACITY = "no_capacity"
    CRASH_LOOP = "crash_loop"
    NON_FINITE = "non_finite"
    DEADLINE = "deadline"
    NO_RESTORE = "no_restore"
    ROLLED_BACK = "rolled_back"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self]


_EXIT_CODES = {
    Outcome.COMPLETED: 0,
    Outcome.FAILED: 1,
    Outcome.CONFIG: 2,
    Outcome.PREFLIGHT: 3,
    Outcome.BUDGET: 4,
    Outcome.NO_CAPACITY: 5,
    Outcome.CRASH_LOOP: 6,
    Outcome.NON_FINITE: 7,
    Outcome.DEADLINE: 8,
    Outcome.NO_RESTORE: 9,
    Outcome.ROLLED_BACK: 10,
    Outcome.INTERRUPTED: 75,  # EX_TEMPFAIL: run the same job again
}


class InfraError(Exception):
    """Base class of the exceptions of `ebbflow.infra`. `outcome` is the outcome of a job that the exception ends."""

    outcome = Outcome.FAILED


class LayoutError(InfraError):
    """A name that is not valid in a store, such as that of a job."""

    outcome = Outcome.CONFIG


class JobIsRunning(InfraError):
    """Another launcher runs the job, or has taken it over. Nothing was changed."""

    outcome = Outcome.PREFLIGHT


class StoreError(InfraError):
    """An operation on the object store failed or missed its deadline. The message has store, key and cause."""


class ObjectNotFound(StoreError):
    """There is no object under that key."""


class StoreUnavailable(StoreError):
    """The store cannot be reached, timed out, or reports an internal error: a retry may succeed."""


class StoreTimeout(StoreUnavailable):
    """An operation on a folder missed its deadline and was abandoned. It may still finish at any later time."""


class StoreForbidden(StoreError):
    """The store denied access: credentials are missing, wrong, expired, or lack a right."""


class StoreFull(StoreError):
    """No space or quota is left: nothing can be written until something is deleted."""


class StoreMisconfigured(StoreError):
    """The store does not exist: an unknown kind, no such bucket, or a bucket of another region."""

    outcome = Outcome.CONFIG


class CloudError(InfraError):
    """A request to AWS failed or missed its deadline. The message has the action, the region and the cause."""


class CloudUnavailable(CloudError):
    """AWS cannot be reached, timed out, or throttles requests: a retry may succeed."""


class CloudForbidden(CloudError):
    """AWS denied access: credentials are missing, wrong, expired, or lack a right."""


class CloudRefused(CloudError):
    """AWS rejected the request. `code` is AWS's error code; "" if the request was not sent."""

    outcome = Outcome.CONFIG

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
