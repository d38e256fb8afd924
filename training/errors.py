"""The exceptions of training. Each has the outcome of a job that ends with it."""

from __future__ import annotations

import traceback

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason

# Limits for an exception's text and its traceback, in characters. A control message can have 16 MiB.
LONGEST_MESSAGE = 32 * 1024
LONGEST_TRACEBACK = 256 * 1024


class TrainingError(Exception):
    """A failure of training."""

    outcome: Outcome = Outcome.FAILED  # the outcome of a job that ends with this error
    curable: bool = True  # whether a new attempt may succeed. If False, the next start would fail in the same way
    end_reason: EndReason = EndReason.RANK_FAILED  # the reason recorded for the end of the gang


class CheckpointError(TrainingError):
    """A failed save, commit or restore. The message names the rank, the key and the cause."""


class AttachError(TrainingError):
    """A script that `ebbflow.attach` cannot serve as it is. The message has the fix."""

    outcome = Outcome.CONFIG
    curable = False


class NoRoom(CheckpointError):
    """A store that is full or over its quota, and from which no commit may be deleted."""

    curable = False


class CorruptCommit(CheckpointError):
    """A commit whose stored bytes differ from the bytes that were saved: flipped, truncated, swapped or missing.

    `object_key` is the key of the damaged data object, "" for another record; `chunk` is the index of its damaged
    chunk.
    """

    def __init__(self, message: str, *, object_key: str = "", chunk: int | None = None) -> None:
        super().__init__(message)
        self.object_key, self.chunk = object_key, chunk


class CorruptOverride(CorruptCommit):
    """An unreadable override: without this instruction of a guard, the next start would train on excluded samples."""

    curable = False
    end_reason = EndReason.STORE


class UnreliableReader(CheckpointError):
    """A process that read damaged bytes from a commit that another process or node read correctly."""

    end_reason = EndReason.STORE


class NothingToRestore(CheckpointError):
    """A job whose commits all fail to restore. Starting from scratch would lose them, so the user has to ask for it."""

    outcome = Outcome.NO_RESTORE
    curable = False
    end_reason = EndReason.STORE


class RefusedCommit(CheckpointError):
    """A commit without the signature that the job's configuration requires. Its data may be undamaged."""


class NoSigningKey(CheckpointError):
    """A signing key whose environment variable, which the message names, is missing, empty or too short."""

    outcome = Outcome.CONFIG
    curable = False


class MisplacedCommit(CorruptCommit):
    """A sound manifest that is stored under the key of another step or generation."""


class RolledBack(CheckpointError):
    """A store whose newest commit is older than the newest commit in the job's events."""

    outcome = Outcome.ROLLED_BACK
    curable = False
    end_reason = EndReason.STORE


class CommitMismatch(CheckpointError):
    """A sound commit that was saved from a different model or optimizer than the one that loads it."""

    outcome = Outcome.CONFIG
    curable = False


class DamagedLineage(CheckpointError):
    """Generation records that do not form one chain, so it is unclear which commit is the newest."""

    curable = False


class TwoLaunchers(DamagedLineage):
    """Two launchers that opened the same generation of a job. The message names both records."""

    curable = False


class GenerationSuperseded(CheckpointError):
    """A gang that still runs although the job has started a newer generation. Its later commits would never be used."""

    curable = False


class DataError(TrainingError):
    """Training data that is missing, too small or changed. The message names the path and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class WorkloadError(TrainingError):
    """A model or workload that cannot be trained as it is. The message names the module and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class ParallelError(TrainingError):
    """A parallel mode that this gang or machine does not support. The message has the key, the reason and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class RendezvousError(TrainingError):
    """A gang whose ranks did not all join within the deadline. The message names the missing ranks."""


class DivergenceError(TrainingError):
    """Ranks that should have equal state and do not. The message names them and the difference."""


class RankNotStarted(TrainingError):
    """A node that could not start its ranks because disk space or processes ran out."""

    end_reason = EndReason.ROLL_CALL


class DeviceUnavailable(TrainingError):
    """GPUs that should be available on this machine but that the ranks cannot use."""

    outcome = Outcome.CONFIG
    curable = False
    end_reason = EndReason.ROLL_CALL


class AgentFailure(TrainingError):
    """An exception in a node's agent while it watched its ranks."""

    end_reason = EndReason.AGENT_FAILED


class StartAnew(TrainingError):
    """The deliberate end of a gang, to start the ranks again with an override (see `training/guards/overrides.py`)."""


class Rewind(StartAnew):
    """The end of a gang because steps went wrong: the next start restores an older commit and skips samples."""

    end_reason = EndReason.REWIND


class MicroBatchTooLarge(StartAnew):
    """The end of a gang because a micro-batch does not fit into memory: the next start splits a step further."""

    end_reason = EndReason.SPLIT


class MemoryGrowth(StartAnew):
    """The end of a gang, after a save, because a rank's memory would soon have run out: new processes continue."""

    end_reason = EndReason.RENEWAL


class BatchCannotBeSplit(TrainingError):
    """A batch that runs out of memory and cannot be split further, as when each micro-batch is one sample."""

    outcome = Outcome.CONFIG
    curable = False


class TooManyRewinds(TrainingError):
    """A job that has used up `guards.max_rewinds` and whose steps still go wrong."""

    curable = False


class GangError(TrainingError):
    """A gang that ended before its work was done. The message names the culprit.

    `user_code` means that an exception in the user's code ended it, not the loss of a process or machine.
    """

    def __init__(
        self, culprit: str, *, user_code: bool = False, curable: bool = True, outcome: Outcome = Outcome.FAILED
    ) -> None:
        super().__init__(culprit)
        self.user_code = user_code
        self.curable = curable
        self.outcome = outcome


def error_class(name: str) -> type[TrainingError]:
    """Return the exception class of this module with the given name, or GangError if there is none."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, TrainingError) else GangError


def describe_exception(error: BaseException) -> str:
    """Return `error` as "Type: text", shortened; works even if its `__str__` raises."""
    if isinstance(error, SystemExit):
        return f"SystemExit: the program called sys.exit({_text_of(error)}) before the training was done"
    return bounded_text(f"{type(error).__name__}: {_text_of(error)}")


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, shortened; works even if its `__str__` raises."""
    try:
        lines = traceback.format_exception(error)
    except Exception:
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
        lines.append(describe_exception(error) + "\n")
    return bounded_text("".join(lines), LONGEST_TRACEBACK)


def bounded_text(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Return `text` as valid UTF-8. If it has more than `limit` characters, a note replaces its middle."""
    if len(text) > limit:
        first, last = limit * 3 // 4, limit // 4
        text = f"{text[:first]}\n[{len(text) - first - last} characters left out]\n{text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text_of(error: BaseException) -> str:
    try:
        return bounded_text(str(error))
    except BaseException as second:  # a __str__ may raise anything, sys.exit included
        return f"(its text cannot be made: __str__ raised {type(second).__name__})"
