"""The exceptions of training. Each maps to an outcome of the public contract."""

from __future__ import annotations

import traceback

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason

# Of an exception's text and of its traceback, in characters: a control message takes 16 MiB, a terminal far less.
LONGEST_MESSAGE = 32 * 1024
LONGEST_TRACEBACK = 256 * 1024


class TrainingError(Exception):
    """A failure of training.

    Attributes:
        outcome: the outcome of a job that ends by it.
        curable: whether a new attempt may cure it; if not, the same start would fail in the same way again.
        end_reason: the reason recorded for the gang's end.
    """

    outcome: Outcome = Outcome.FAILED
    curable: bool = True
    end_reason: EndReason = EndReason.RANK_FAILED


class CheckpointError(TrainingError):
    """A save, commit or restore that failed. Names the rank, the key and the cause."""


class NoRoom(CheckpointError):
    """The store is full or over its quota, and no commit may be deleted."""

    curable = False


class CorruptCommit(CheckpointError):
    """Stored bytes differ from the bytes that were saved: flipped, truncated, swapped or missing.

    Attributes:
        object_key: the damaged data object; "" if the manifest or a record is damaged.
        chunk: the damaged chunk of it; None: the whole object is missing or has another size.
    """

    def __init__(self, message: str, *, object_key: str = "", chunk: int | None = None) -> None:
        super().__init__(message)
        self.object_key, self.chunk = object_key, chunk


class CorruptOverride(CorruptCommit):
    """A record of what a guard ordered cannot be read, so that a start would train on other samples than before."""

    curable = False
    end_reason = EndReason.STORE


class UnreliableReader(CheckpointError):
    """This process read a commit wrongly that a second process or node read correctly. Names node and rank."""

    end_reason = EndReason.STORE


class NothingToRestore(CheckpointError):
    """The job has commits, and none can be restored.

    A person decides whether to start from scratch, which loses them.
    """

    outcome = Outcome.NO_RESTORE
    curable = False
    end_reason = EndReason.STORE


class RefusedCommit(CheckpointError):
    """A commit without the signature that this job's commits must have. It may be undamaged."""


class NoSigningKey(CheckpointError):
    """The variable of the signing key is missing, empty or too short. Names the variable, never its value."""

    outcome = Outcome.CONFIG
    curable = False


class MisplacedCommit(CorruptCommit):
    """A sound manifest under the key of another step or generation; in its own place it may be in use."""


class RolledBack(CheckpointError):
    """The store has older commits than the job's events record. A person decides whether to lose the steps between."""

    outcome = Outcome.ROLLED_BACK
    curable = False
    end_reason = EndReason.STORE


class CommitMismatch(CheckpointError):
    """A sound commit of another model or optimizer than the one it is loaded into."""

    outcome = Outcome.CONFIG
    curable = False


class DamagedLineage(CheckpointError):
    """Generation records that do not form one chain, so that the newest commit is undefined."""

    curable = False


class TwoLaunchers(DamagedLineage):
    """Two launchers opened the same generation of one job. Names both records."""

    curable = False


class GenerationSuperseded(CheckpointError):
    """A newer generation of the job exists: this gang is a zombie, and its later commits would never be used."""

    curable = False


class DataError(TrainingError):
    """Training data that is missing, too small or changed. Names the path and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class WorkloadError(TrainingError):
    """A model or workload that the engine cannot train as it is. Names the module and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class ParallelError(TrainingError):
    """A parallel mode that this gang or machine does not support. Names the key, the arithmetic and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class RendezvousError(TrainingError):
    """Ranks that did not join within the deadline. Names the missing ranks."""


class DivergenceError(TrainingError):
    """Ranks that should have equal state and do not. Names the ranks and where they differ."""


class RankNotStarted(TrainingError):
    """A node could not start its ranks, for lack of disk space or processes. Names the node and the cause."""

    end_reason = EndReason.ROLL_CALL


class DeviceUnavailable(TrainingError):
    """A machine or placement with GPUs that the ranks cannot use. Names the reason and the fix.

    The next start on the same image would fail in the same way, and training on the CPU would cost a GPU's price.
    """

    outcome = Outcome.CONFIG
    curable = False
    end_reason = EndReason.ROLL_CALL


class AgentFailure(TrainingError):
    """A node's agent raised while it watched its ranks. Names the node, the exception and its location."""

    end_reason = EndReason.AGENT_FAILED


class StartAnew(TrainingError):
    """The gang ends on purpose.

    Its next start follows the order in the job's store (`training/guards/overrides.py`).
    """


class Rewind(StartAnew):
    """The last steps went wrong: the job goes back to an older commit and skips the samples read since."""

    end_reason = EndReason.REWIND


class MicroBatchTooLarge(StartAnew):
    """A micro-batch does not fit into memory. Names the rank and the number of micro-batches of the next start."""

    end_reason = EndReason.SPLIT


class MemoryGrowth(StartAnew):
    """Memory was about to run out. The state is saved, and the processes are replaced."""

    end_reason = EndReason.RENEWAL


class BatchCannotBeSplit(TrainingError):
    """A single sample does not fit into memory. Names the arithmetic and what else saves memory."""

    outcome = Outcome.CONFIG
    curable = False


class TooManyRewinds(TrainingError):
    """The job has used all its rewinds and still goes wrong."""

    curable = False


class GangError(TrainingError):
    """A gang that ended before its work was done. Names the culprit.

    Attributes:
        user_code: whether an exception of the program ended it, not the loss of a process or machine.
        curable, outcome: those of the exception that ended it, if there was one.
    """

    def __init__(
        self, culprit: str, *, user_code: bool = False, curable: bool = True, outcome: Outcome = Outcome.FAILED
    ) -> None:
        super().__init__(culprit)
        self.user_code = user_code
        self.curable = curable
        self.outcome = outcome


def error_class(name: str) -> type[TrainingError]:
    """Return the training exception of that name, or GangError for any other name."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, TrainingError) else GangError


def describe_exception(error: BaseException) -> str:
    """Return `error` as "Type: text", at most `LONGEST_MESSAGE` characters, even if its `__str__` fails."""
    if isinstance(error, SystemExit):
        return f"SystemExit: the program called sys.exit({_text_of(error)}) before the training was done"
    return bounded_text(f"{type(error).__name__}: {_text_of(error)}")


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, at most `LONGEST_TRACEBACK` characters; without its text if `__str__` fails."""
    try:
        lines = traceback.format_exception(error)
    except Exception:
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
        lines.append(describe_exception(error) + "\n")
    return bounded_text("".join(lines), LONGEST_TRACEBACK)


def bounded_text(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Return `text` as valid UTF-8; of a longer one the first three quarters of `limit` characters and the end."""
    if len(text) > limit:
        first, last = limit * 3 // 4, limit // 4
        text = f"{text[:first]}\n[{len(text) - first - last} characters left out]\n{text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text_of(error: BaseException) -> str:
    try:
        return bounded_text(str(error))
    except BaseException as second:  # a __str__ may raise anything, sys.exit included
        return f"(its text cannot be made: __str__ raised {type(second).__name__})"
