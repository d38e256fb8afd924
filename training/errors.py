"""The exceptions of training. Each has the outcome of a job that ends with it."""

from __future__ import annotations

import traceback

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason

# Limits for an exception's text and its traceback, in characters. A control message can have 16 MiB.
LONGEST_MESSAGE = 32 * 1024
LONGEST_TRACEBACK = 256 * 1024


class TrainingError(Exception):
    """A failure of training.

    Attributes:
        outcome: the outcome of a job that ends with this error.
        curable: whether a new attempt may succeed. If False, the next start would fail in the same way.
        end_reason: the reason recorded for the end of the gang.
    """

    outcome: Outcome = Outcome.FAILED
    curable: bool = True
    end_reason: EndReason = EndReason.RANK_FAILED


class CheckpointError(TrainingError):
    """A failed save, commit or restore. The message names the rank, the key and the cause."""


class NoRoom(CheckpointError):
    """A store that is full or over its quota, and from which no commit may be deleted."""

    curable = False


class CorruptCommit(CheckpointError):
    """A commit whose stored bytes differ from the bytes that were saved: flipped, truncated, swapped or missing.

    Attributes:
        object_key: the key of the damaged data object; "" if the manifest or another record is damaged.
        chunk: the index of the damaged chunk in that object; None if the whole object is missing or has a wrong size.
    """

    def __init__(self, message: str, *, object_key: str = "", chunk: int | None = None) -> None:
        super().__init__(message)
        self.object_key, self.chunk = object_key, chunk


class CorruptOverride(CorruptCommit):
    """An unreadable override: a guard's instruction to later starts, such as to skip samples.

    Without it, the next start would train on samples that the guard excluded.
    """

    curable = False
    end_reason = EndReason.STORE


class UnreliableReader(CheckpointError):
    """A process that read damaged bytes from a commit that another process or node read correctly.

    The message names the node and the rank.
    """

    end_reason = EndReason.STORE


class NothingToRestore(CheckpointError):
    """A job whose commits all fail to restore.

    Starting from scratch would lose them, so the user has to ask for it.
    """

    outcome = Outcome.NO_RESTORE
    curable = False
    end_reason = EndReason.STORE


class RefusedCommit(CheckpointError):
    """A commit without the signature that the job's configuration requires. Its data may be undamaged."""


class NoSigningKey(CheckpointError):
    """A signing key whose environment variable is missing, empty or too short.

    The message names the variable, never its value.
    """

    outcome = Outcome.CONFIG
    curable = False


class MisplacedCommit(CorruptCommit):
    """A sound manifest that is stored under the key of another step or generation.

    The same manifest may also be stored under its own key and be in use there.
    """


class RolledBack(CheckpointError):
    """A store whose newest commit is older than the newest commit in the job's events.

    Continuing would lose the steps between the two, so the user has to accept that.
    """

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
    """A gang that still runs although the job has started a newer generation.

    Commits that it makes from then on would never be used.
    """

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
    """A parallel mode that this gang or machine does not support.

    The message names the configuration key, the arithmetic and the fix.
    """

    outcome = Outcome.CONFIG
    curable = False


class RendezvousError(TrainingError):
    """A gang whose ranks did not all join within the deadline. The message names the missing ranks."""


class DivergenceError(TrainingError):
    """Ranks that should have equal state and do not. The message names them and the difference."""


class RankNotStarted(TrainingError):
    """A node that could not start its ranks because disk space or processes ran out.

    The message names the node and the cause.
    """

    end_reason = EndReason.ROLL_CALL


class DeviceUnavailable(TrainingError):
    """GPUs that should be available on this machine but that the ranks cannot use.

    The message names the reason and the fix. A new attempt on the same image would fail in the same way. Training on
    the CPU instead would still be billed as a machine with GPUs.
    """

    outcome = Outcome.CONFIG
    curable = False
    end_reason = EndReason.ROLL_CALL


class AgentFailure(TrainingError):
    """An exception in a node's agent while it watched its ranks.

    The message names the node, the exception and its location.
    """

    end_reason = EndReason.AGENT_FAILED


class StartAnew(TrainingError):
    """The deliberate end of a gang, to start the ranks again with an instruction from a guard.

    The instruction is an override in the job's store; see `training/guards/overrides.py`.
    """


class Rewind(StartAnew):
    """The end of a gang because the last steps went wrong.

    The next start restores an older commit and skips the samples that were read after it.
    """

    end_reason = EndReason.REWIND


class MicroBatchTooLarge(StartAnew):
    """The end of a gang because a micro-batch does not fit into memory.

    The next start uses more micro-batches per step. The message names the rank and the new number.
    """

    end_reason = EndReason.SPLIT


class MemoryGrowth(StartAnew):
    """The end of a gang because a rank's memory would soon have run out.

    The state was saved before. The next start continues from it in new processes.
    """

    end_reason = EndReason.RENEWAL


class BatchCannotBeSplit(TrainingError):
    """A batch that runs out of memory and cannot be split further, for example because each micro-batch is one sample.

    The message has the arithmetic and other settings that save memory.
    """

    outcome = Outcome.CONFIG
    curable = False


class TooManyRewinds(TrainingError):
    """A job that has used up `guards.max_rewinds` and whose steps still go wrong."""

    curable = False


class GangError(TrainingError):
    """A gang that ended before its work was done. The message names the culprit.

    Attributes:
        user_code: True if an exception in the user's code ended the gang; False if a process or machine was lost.
        curable: `curable` of the exception that ended the gang; True if there was none.
        outcome: `outcome` of the exception that ended the gang; FAILED if there was none.
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
    """Return `error` as "Type: text", shortened to about `LONGEST_MESSAGE` characters.

    Works even if its `__str__` raises.
    """
    if isinstance(error, SystemExit):
        return f"SystemExit: the program called sys.exit({_text_of(error)}) before the training was done"
    return bounded_text(f"{type(error).__name__}: {_text_of(error)}")


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, shortened to about `LONGEST_TRACEBACK` characters.

    Works even if its `__str__` raises.
    """
    try:
        lines = traceback.format_exception(error)
    except Exception:
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
        lines.append(describe_exception(error) + "\n")
    return bounded_text("".join(lines), LONGEST_TRACEBACK)


def bounded_text(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Return `text` as valid UTF-8, shortened in the middle if it has more than `limit` characters.

    A shortened text has its first 3/4 × `limit` characters, a note, and its last 1/4 × `limit` characters.
    """
    if len(text) > limit:
        first, last = limit * 3 // 4, limit // 4
        text = f"{text[:first]}\n[{len(text) - first - last} characters left out]\n{text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text_of(error: BaseException) -> str:
    try:
        return bounded_text(str(error))
    except BaseException as second:  # a __str__ may raise anything, sys.exit included
        return f"(its text cannot be made: __str__ raised {type(second).__name__})"
