"""Outcomes of a job with their exit codes, and the exceptions that `ebbflow.infra` raises."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Final outcome of a job. Exit codes are a public interface, and their meaning never changes."""

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
    """A name that cannot be used in a store, such as an invalid job name."""

    outcome = Outcome.CONFIG


class JobIsRunning(InfraError):
    """A job that this process must not run, because another launcher runs it or has taken it over."""

    outcome = Outcome.PREFLIGHT


class StoreError(InfraError):
    """A store operation that failed or missed its deadline. The message contains store, key and cause."""


class ObjectNotFound(StoreError):
    """A key without an object in the store."""


class StoreUnavailable(StoreError):
    """A store that cannot be reached, timed out, or reported an internal error. A retry may succeed."""


class StoreTimeout(StoreUnavailable):
    """A file operation in a folder store that missed its deadline. It was abandoned, but may still complete later."""


class StoreForbidden(StoreError):
    """A store that denied access: credentials are missing, wrong or expired, or lack a permission."""


class StoreFull(StoreError):
    """A store that is full or has reached its quota: nothing can be written until something is deleted."""


class StoreMisconfigured(StoreError):
    """A wrong store setting: an unknown kind of store, a bucket that does not exist, or the wrong region."""

    outcome = Outcome.CONFIG


class CloudError(InfraError):
    """An AWS request that failed or missed its deadline. The message contains action, region and cause."""


class CloudUnavailable(CloudError):
    """An AWS request that could not be sent, timed out, or was throttled. A retry may succeed."""


class CloudForbidden(CloudError):
    """An AWS request that was denied: credentials are missing, wrong or expired, or lack a permission."""


class CloudRefused(CloudError):
    """An invalid AWS request. `code` is AWS's error code, or "" if AWS did not reject the request itself."""

    outcome = Outcome.CONFIG

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
