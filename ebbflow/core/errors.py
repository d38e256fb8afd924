"""Outcomes of a job with their exit codes, and the exceptions that `ebbflow.infra` raises."""

from enum import StrEnum


class EndReason(StrEnum):
    """Reason for the unplanned end of a generation (one start of all ranks), or of a node's part in
    it.

    A planned end has an `Outcome` instead.
    """

    RANK_FAILED = "rank_failed"
    RANK_KILLED = "rank_killed"
    NODE_LOST = "node_lost"
    HANG = "hang"
    AGENT_FAILED = "agent_failed"  # an exception in the agent
    ROLL_CALL = "roll_call"  # not all nodes joined the start
    AGENT_STOPPED = "agent_stopped"  # asked to stop, by a notice or a signal
    SUPERSEDED = "superseded"  # a newer generation of the job has started
    STORE = "store"  # the store failed, or its content is damaged
    REWIND = "rewind"  # a guard went back to an older commit
    SPLIT = "split"  # a micro-batch did not fit into memory
    RENEWAL = "renewal"  # memory grew: processes were restarted before it ran out


class Outcome(StrEnum):
    """Final outcome of a job.

    Exit codes are a public interface, and their meaning never changes.
    """

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

    @property
    def is_final(self) -> bool:
        """Whether another start by the supervisor would end with this outcome again.

        A supervisor also exits with 1 or 75 if its own process or machine ended.
        """
        return self not in (Outcome.COMPLETED, Outcome.FAILED, Outcome.INTERRUPTED)


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

# The symptom that `ebbflow explain` prints for an error, by the error's class or its outcome.
_SYMPTOMS = {
    "WrongStore": "H02",
    "JobNotInStore": "H02",
    "StoreForbidden": "A19",
    "StoreFull": "H10",
    "StoreUnavailable": "H07",
    "StoreMisconfigured": "H07",
    "ObjectNotFound": "H02",
    "CloudForbidden": "A19",
    "CloudError": "N07",
    "TeamError": "I05",
    "PriceError": "I09",
    Outcome.FAILED: "O01",
    Outcome.CONFIG: "A05",
    Outcome.PREFLIGHT: "A05",
    Outcome.BUDGET: "I05",
    Outcome.NO_CAPACITY: "I04",
    Outcome.CRASH_LOOP: "I10",
    Outcome.NON_FINITE: "F01",
    Outcome.DEADLINE: "N08",
    Outcome.NO_RESTORE: "H02",
    Outcome.ROLLED_BACK: "H02",
    Outcome.INTERRUPTED: "I01",
}


class EbbflowError(Exception):
    """Base class of all exceptions of the project.

    If the exception ends a job, `outcome` is the job's outcome.
    """

    outcome: Outcome = Outcome.FAILED

    def __init_subclass__(cls, *, outcome: Outcome | None = None) -> None:
        cls.outcome = outcome or cls.outcome


class InfraError(EbbflowError):
    """Base class of the exceptions of `ebbflow.infra`."""


class LayoutError(InfraError, outcome=Outcome.CONFIG):
    """Error: a name, such as a job's name, cannot be used in a store."""


class JobIsRunning(InfraError, outcome=Outcome.PREFLIGHT):
    """Error: this process must not run the job, because another launcher runs it or has taken it
    over.
    """


class JobNotInStore(InfraError, outcome=Outcome.PREFLIGHT):
    """Error: the store at this address is not the one that this machine has recorded for the
    job.
    """


class StoreError(InfraError):
    """Error: a store operation failed or missed its deadline.

    The message contains store, key and cause.
    """


class ObjectNotFound(StoreError):
    """Error: the store has no object with this key."""


class StoreUnavailable(StoreError):
    """Error: the store cannot be reached, timed out, or reported an internal error.

    A retry may succeed.
    """


class StoreTimeout(StoreUnavailable):
    """Error: a file operation in a folder store missed its deadline.

    The operation may still complete later.
    """


class WrongStore(StoreUnavailable):
    """Error: the folder or bucket is not the store in which the job began.

    The store's disk is not mounted, or the store was renamed, emptied or replaced. It may come
    back.
    """


class StoreForbidden(StoreError):
    """Error: the store denied access.

    Credentials are missing, wrong or expired, or lack a permission.
    """


class StoreFull(StoreError):
    """Error: the store is full or has reached its quota.

    Nothing can be written until something is deleted.
    """


class StoreMisconfigured(StoreError, outcome=Outcome.CONFIG):
    """Error: a store setting is wrong: an unknown kind of store, a bucket that does not exist, or
    the wrong region.
    """


class CloudError(InfraError):
    """Error: an AWS request failed or missed its deadline.

    The message contains action, region and cause.
    """


class CloudUnavailable(CloudError):
    """Error: an AWS request could not be sent, timed out, or was throttled. A retry may succeed."""


class CloudForbidden(CloudError):
    """Error: an AWS request was denied.

    Credentials are missing, wrong or expired, or lack a permission.
    """


class CloudRefused(CloudError, outcome=Outcome.CONFIG):
    """Error: an AWS request is invalid.

    `code` is AWS's error code, or "" if AWS did not reject the request itself.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def describe_error(error: EbbflowError) -> str:
    """Return the text of an error, followed by the id of its symptom for `ebbflow explain`."""
    names = [*(each.__name__ for each in type(error).__mro__), error.outcome]
    symptom = next((_SYMPTOMS[name] for name in names if name in _SYMPTOMS), "O01")
    text = str(error).rstrip()
    return f"{text}{chr(10) if chr(10) in text else '; '}see: {symptom}"
