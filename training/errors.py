"""The exceptions of training. Each maps to an outcome of the public contract."""

from __future__ import annotations

import traceback

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason

# Of an exception's text and of its traceback, in characters: a control message takes 16 MiB, a terminal far less.
LONGEST_MESSAGE = 32 * 1024
LONGEST_TRACEBACK = 256 * 1024


class TrainingError(Exception):
    """Anything training could not do. `outcome` says how a job that dies of it ends.

    curable: a new attempt may cure it. Where it is False, the same start would fail in the same way again.
    end_reason: how a gang that ends by it is recorded.
    """

    outcome: Outcome = Outcome.FAILED
    curable: bool = True
    end_reason: EndReason = EndReason.RANK_FAILED


class CheckpointError(TrainingError):
    """A save, commit or restore that did not happen. Names the rank, the key and the cause."""


class NoRoom(CheckpointError):
    """The store is full, or a quota used up, and there was nothing left that may be deleted."""

    curable = False


class CorruptCommit(CheckpointError):
    """Stored bytes are not the bytes that were saved: flipped, truncated, swapped or missing.

    object_key, chunk: the data object that this reader found damaged, and which of its chunks (None: all of it is
    missing or has another size). Without an object it is the manifest, or a record.
    """

    def __init__(self, message: str, *, object_key: str = "", chunk: int | None = None) -> None:
        super().__init__(message)
        self.object_key, self.chunk = object_key, chunk


class CorruptOverride(CorruptCommit):
    """A record of what a guard ordered cannot be read, so that a start would train on other samples than before."""

    curable = False
    end_reason = EndReason.STORE


class UnreliableReader(CheckpointError):
    """This process reads a commit wrongly that a second process or node reads as it was saved. Names node and rank."""

    end_reason = EndReason.STORE


class NothingToRestore(CheckpointError):
    """The job has commits and none of them can be restored. A start from nothing would lose them: a person decides."""

    outcome = Outcome.NO_RESTORE
    curable = False
    end_reason = EndReason.STORE


class RefusedCommit(CheckpointError):
    """A commit without the signature that this job's commits must have. It says nothing of damage."""


class NoSigningKey(CheckpointError):
    """The variable that should hold the signing key is missing, empty or too short. Names it, never its value."""

    outcome = Outcome.CONFIG
    curable = False


class MisplacedCommit(CorruptCommit):
    """A sound manifest under the key of another step or generation; where it belongs it may well be in use."""


class RolledBack(CheckpointError):
    """The store has older commits than the job's events know. Going on loses the steps between: a person decides."""

    outcome = Outcome.ROLLED_BACK
    curable = False
    end_reason = EndReason.STORE


class CommitMismatch(CheckpointError):
    """A sound commit that belongs to another model or optimizer than the one it is loaded into."""

    outcome = Outcome.CONFIG
    curable = False


class DamagedLineage(CheckpointError):
    """The generation records do not make one chain, so that nobody can say which commit is the newest."""

    curable = False


class TwoLaunchers(DamagedLineage):
    """Two launchers opened the same generation of one job. Names both records."""

    curable = False


class GenerationSuperseded(CheckpointError):
    """A newer generation of the job was opened: this gang is a zombie and its later commits would never be used."""

    curable = False


class DataError(TrainingError):
    """Text that is missing, too little or not what it was. Names the path and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class WorkloadError(TrainingError):
    """A model or workload that the engine cannot train as it is. Names the module and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class ParallelError(TrainingError):
    """A way to spread the model that this gang or machine cannot do. Names the key, the arithmetic and the fix."""

    outcome = Outcome.CONFIG
    curable = False


class RendezvousError(TrainingError):
    """Not all ranks came within the deadline. Names the missing."""


class DivergenceError(TrainingError):
    """Ranks that should be at the same place are not. Names them and where they are."""


class RankNotStarted(TrainingError):
    """A node could not start its ranks: no room for their files, no more processes. Names the node and the cause."""

    end_reason = EndReason.ROLL_CALL


class DeviceUnavailable(TrainingError):
    """A machine with GPUs, or a placement that has some, on which ranks cannot use them. Names the reason and the fix.

    The next start on the same image would fail in the same way, and training on the CPU would be paid at a GPU's price.
    """

    outcome = Outcome.CONFIG
    curable = False
    end_reason = EndReason.ROLL_CALL


class AgentFailure(TrainingError):
    """A node's agent raised while it watched its ranks. Names the node, the exception and its place."""

    end_reason = EndReason.AGENT_FAILED


class StartAnew(TrainingError):
    """The gang ends on purpose, and its next start goes on otherwise, by the order in the job's store
    (`training/guards/overrides.py`)."""


class Rewind(StartAnew):
    """The last steps went wrong: back to an older commit, and past the samples that were read since."""

    end_reason = EndReason.REWIND


class MicroBatchTooLarge(StartAnew):
    """A micro-batch does not fit into memory. Names the rank and the number of micro-batches to go on with."""

    end_reason = EndReason.SPLIT


class MemoryGrowth(StartAnew):
    """Memory would have run out. All is saved, and the processes are replaced."""

    end_reason = EndReason.RENEWAL


class BatchCannotBeSplit(TrainingError):
    """Not even one sample at a time fits into memory. Names the arithmetic and what else saves memory."""

    outcome = Outcome.CONFIG
    curable = False


class TooManyRewinds(TrainingError):
    """The job has gone back as often as it may, and still goes wrong."""

    curable = False


class GangError(TrainingError):
    """A gang that ended before its work was done. Names the culprit.

    user_code: it ended by an exception of the program and not by the loss of a process or machine.
    curable, outcome: those of the exception that ended it, where there was one.
    """

    def __init__(
        self, culprit: str, *, user_code: bool = False, curable: bool = True, outcome: Outcome = Outcome.FAILED
    ) -> None:
        super().__init__(culprit)
        self.user_code = user_code
        self.curable = curable
        self.outcome = outcome


def error_class(name: str) -> type[TrainingError]:
    """The class of training of that name; GangError for every other exception."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, TrainingError) else GangError


def describe_exception(error: BaseException) -> str:
    """`error` as "Type: text", whatever its `__str__` does, within `LONGEST_MESSAGE`."""
    if isinstance(error, SystemExit):
        return f"SystemExit: the program called sys.exit({_text_of(error)}) before the training was done"
    return bounded_text(f"{type(error).__name__}: {_text_of(error)}")


def describe_traceback(error: BaseException) -> str:
    """The traceback of `error` within `LONGEST_TRACEBACK`; only its places where its text cannot be made."""
    try:
        lines = traceback.format_exception(error)
    except Exception:
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(error.__traceback__)]
        lines.append(describe_exception(error) + "\n")
    return bounded_text("".join(lines), LONGEST_TRACEBACK)


def bounded_text(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """`text` as UTF-8 can carry it, and of a longer one its first three quarters of `limit` characters and its end."""
    if len(text) > limit:
        first, last = limit * 3 // 4, limit // 4
        text = f"{text[:first]}\n[{len(text) - first - last} characters left out]\n{text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _text_of(error: BaseException) -> str:
    try:
        return bounded_text(str(error))
    except BaseException as second:  # a __str__ may raise anything, sys.exit included
        return f"(its text cannot be made: __str__ raised {type(second).__name__})"
