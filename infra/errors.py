"""Exit outcomes of a job with their exit codes, and the exceptions of this room."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The end of a job. The exit codes are part of the public contract and never change meaning."""

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
    """Anything the ground could not do. `outcome` says how a job that dies of it ends."""

    outcome = Outcome.FAILED


class LayoutError(InfraError):
    """A name that cannot stand in the layout of a store."""

    outcome = Outcome.CONFIG


class JobIsRunning(InfraError):
    """Another launcher runs the job, or has taken it over. Nothing was changed."""

    outcome = Outcome.PREFLIGHT


class StoreError(InfraError):
    """The object store did not do what was asked, within its deadline. Names store, key, operation and cause."""


class ObjectNotFound(StoreError):
    """There is no object under that key."""


class StoreUnavailable(StoreError):
    """Nobody answers, the answer comes too late, or the store is in trouble itself: a later try may do better."""


class StoreTimeout(StoreUnavailable):
    """An operation on a folder did not come back in time and was abandoned. It may still finish, at any later time."""


class StoreForbidden(StoreError):
    """The store is there and refuses: no credentials, wrong ones, expired ones, or ones without this right."""


class StoreFull(StoreError):
    """No room, or a quota is used up: nothing can be written until something is deleted."""


class StoreMisconfigured(StoreError):
    """There is no such store: an unknown kind, no such bucket, or a bucket of another region."""

    outcome = Outcome.CONFIG


class CloudError(InfraError):
    """AWS did not do what was asked within its deadline. Names the action, the region and the cause."""


class CloudUnavailable(CloudError):
    """Nobody answers, the answer comes too late, or requests are throttled: a later try may do better."""


class CloudForbidden(CloudError):
    """No credentials, wrong or expired ones, or ones without this right."""


class CloudRefused(CloudError):
    """AWS finds the request wrong. code: its word for it, "" where the request did not even leave."""

    outcome = Outcome.CONFIG

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
