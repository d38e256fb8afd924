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
    """A job that another launcher runs or has taken over. Nothing was changed."""

    outcome = Outcome.PREFLIGHT


class StoreError(InfraError):
    """A failed operation on the object store, or one that missed its deadline. The message has store, key and cause."""


class ObjectNotFound(StoreError):
    """A request for a key without an object."""


class StoreUnavailable(StoreError):
    """A store that cannot be reached, timed out, or reports an internal error. A retry may succeed."""


class StoreTimeout(StoreUnavailable):
    """An operation on a folder that missed its deadline. It was abandoned, and may still finish later."""


class StoreForbidden(StoreError):
    """A store that denied access: credentials are missing, wrong, expired, or lack a right."""


class StoreFull(StoreError):
    """A store without space or quota: nothing can be written until something is deleted."""


class StoreMisconfigured(StoreError):
    """A store that does not exist: an unknown kind, no such bucket, or a bucket of another region."""

    outcome = Outcome.CONFIG


class CloudError(InfraError):
    """A failed request to AWS, or one that missed its deadline. The message has action, region and cause."""


class CloudUnavailable(CloudError):
    """A request to AWS that could not be sent, timed out, or was throttled. A retry may succeed."""


class CloudForbidden(CloudError):
    """A request that AWS denied: credentials are missing, wrong, expired, or lack a right."""


class CloudRefused(CloudError):
    """A request that AWS rejected. `code` is AWS's error code; "" if the request was not sent."""

    outcome = Outcome.CONFIG

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
