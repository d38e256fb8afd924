"""Define the exceptions of training. Each class sets the outcome of a job that ends with it."""

import os
import traceback
from types import TracebackType

from ebbflow.core.errors import EbbflowError, EndReason, Outcome

# Limits for an exception's text and its traceback, in characters. A control message can have 16
# MiB.
LONGEST_MESSAGE = 32 * 1024
LONGEST_TRACEBACK = 256 * 1024


class TrainingError(EbbflowError):
    """Base class of the errors of training."""

    # Whether a new attempt may succeed. If False, the next start would fail in the same way
    curable: bool = True
    end_reason: EndReason = EndReason.RANK_FAILED  # the reason recorded for the end of the gang

    def __init_subclass__(
        cls,
        *,
        outcome: Outcome | None = None,
        curable: bool | None = None,
        end_reason: EndReason | None = None,
    ) -> None:
        super().__init_subclass__(outcome=outcome)
        cls.end_reason = end_reason or cls.end_reason
        if curable is not None:
            cls.curable = curable


class CheckpointError(TrainingError):
    """A save, commit or restore failed. The message names the rank, the key and the cause."""


class AttachError(TrainingError, outcome=Outcome.CONFIG, curable=False):
    """A script or its arguments cannot be used with `ebbflow.attach`. The message has the fix."""


class NoRoom(CheckpointError, curable=False):
    """The store is full or over its quota, and no commit may be deleted from it; or a limit of the
    process leaves no room for the staging buffer.
    """


class CorruptCommit(CheckpointError):
    """The stored bytes of a commit differ from the saved ones: flipped, truncated, swapped or
    missing.

    `object_key` is the key of the damaged data object, or "" if another object is damaged; `chunk`
    is the number of its damaged chunk.
    """

    def __init__(self, message: str, *, object_key: str = "", chunk: int | None = None) -> None:
        super().__init__(message)
        self.object_key = object_key
        self.chunk = chunk


class CorruptOverride(CorruptCommit, curable=False, end_reason=EndReason.STORE):
    """An override, a guard's instruction to the next start, is unreadable.

    Without it, the next start would train on samples that the guard excluded.
    """


class UnreliableReader(CheckpointError, end_reason=EndReason.STORE):
    """This process read damaged bytes from a commit that another process or node read correctly."""


class NothingToRestore(
    CheckpointError, outcome=Outcome.NO_RESTORE, curable=False, end_reason=EndReason.STORE
):
    """No commit of the job can be restored.

    A start from scratch would lose all commits, so a user must ask for it.
    """


class RefusedCommit(CheckpointError):
    """A commit has no valid signature, although the job's configuration requires one.

    Its data may be undamaged.
    """


class NoSigningKey(CheckpointError, outcome=Outcome.CONFIG, curable=False):
    """The environment variable with the signing key is missing, empty or too short.

    The message names it.
    """


class MisplacedCommit(CorruptCommit):
    """A sound manifest is stored under the key of another step or generation."""


class RolledBack(
    CheckpointError, outcome=Outcome.ROLLED_BACK, curable=False, end_reason=EndReason.STORE
):
    """The newest commit in the store is older than the newest commit in the job's event log."""


class CommitMismatch(CheckpointError, outcome=Outcome.CONFIG, curable=False):
    """A sound commit was saved from a different model or optimizer than the one that loads it."""


class DamagedLineage(CheckpointError, curable=False):
    """The generation records do not form one chain, so it is unclear which commit is the newest."""


class TwoLaunchers(DamagedLineage, curable=False):
    """Two launchers opened the same generation of a job.

    The message names the records of both launchers.
    """


class GenerationSuperseded(CheckpointError, curable=False):
    """The job has started a newer generation while this gang still runs.

    This gang's later commits would be useless.
    """


class DataError(TrainingError, outcome=Outcome.CONFIG, curable=False):
    """Training data is missing, too small or changed. The message names the path and the fix."""


class WorkloadError(TrainingError, outcome=Outcome.CONFIG, curable=False):
    """A model or workload cannot be trained as it is. The message names the module and the fix."""


class ParallelError(TrainingError, outcome=Outcome.CONFIG, curable=False):
    """This gang or machine does not support the parallel mode.

    The message has the key, the reason and the fix.
    """


class RendezvousError(TrainingError):
    """Some ranks did not join the gang before the deadline. The message names them."""


class DivergenceError(TrainingError):
    """Ranks that should have equal state differ. The message names them and the difference."""


class RankNotStarted(TrainingError, end_reason=EndReason.ROLL_CALL):
    """A node could not start its ranks because it ran out of disk space or processes."""


class DeviceUnavailable(
    TrainingError, outcome=Outcome.CONFIG, curable=False, end_reason=EndReason.ROLL_CALL
):
    """The ranks cannot use GPUs that this machine should have."""


class UnsupportedTorch(
    TrainingError, outcome=Outcome.CONFIG, curable=False, end_reason=EndReason.ROLL_CALL
):
    """This release of torch lacks names that Ebbflow needs."""


class NoKeysFolder(
    TrainingError, outcome=Outcome.CONFIG, curable=False, end_reason=EndReason.ROLL_CALL
):
    """This machine has no folder for the file through which the ranks of a local gang find each
    other.
    """


class NodesDiffer(
    TrainingError, outcome=Outcome.CONFIG, curable=False, end_reason=EndReason.ROLL_CALL
):
    """A node's versions or settings differ from node 0's, so its ranks would compute something
    else.
    """


class AgentFailure(TrainingError, end_reason=EndReason.AGENT_FAILED):
    """A node's agent raised an exception while it watched its ranks."""


class CrashLoop(TrainingError, outcome=Outcome.CRASH_LOOP, curable=False):
    """The job has started again and again without a new commit."""


class StartAnew(TrainingError):
    """Raised to end a gang and start its ranks again with an override, a guard's instruction to the
    next start.
    """


class Rewind(StartAnew, end_reason=EndReason.REWIND):
    """Raised to end a gang after steps went wrong.

    The next start restores an older commit and skips samples.
    """


class MicroBatchTooLarge(StartAnew, end_reason=EndReason.SPLIT):
    """Raised to end a gang whose micro-batch does not fit into memory.

    The next start uses smaller micro-batches.
    """


class MemoryGrowth(StartAnew, end_reason=EndReason.RENEWAL):
    """Raised to end a gang, after a save, before a rank runs out of memory.

    New processes continue the job.
    """


class BatchCannotBeSplit(TrainingError, outcome=Outcome.CONFIG, curable=False):
    """A batch does not fit into memory and cannot be split, for example because each micro-batch is
    one sample.
    """


class TooManyRewinds(TrainingError, curable=False):
    """A job has used all `guards.max_rewinds` rewinds, and its steps still go wrong."""


class GangError(TrainingError):
    """A gang ended before its work was done. The message names the culprit.

    `user_code` is True if an exception in the user's code ended it, and not the loss of a process
    or machine.
    """

    def __init__(
        self,
        culprit: str,
        *,
        user_code: bool = False,
        curable: bool = True,
        outcome: Outcome = Outcome.FAILED,
    ) -> None:
        super().__init__(culprit)
        self.user_code = user_code
        self.curable = curable
        self.outcome = outcome


def error_class(name: str) -> type[TrainingError]:
    """Return this module's exception class of the given name, or GangError if there is none."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, TrainingError):
        return found
    return GangError


def describe_exception(error: BaseException) -> str:
    """Return `error` as "Type: text; its notes", truncated. This works even if its `__str__` raises."""
    if isinstance(error, SystemExit):
        return (
            f"SystemExit: the program called sys.exit({_text_of(error)}) before the training was "
            "done"
        )
    parts = [f"{type(error).__name__}: {_text_of(error)}"]
    notes = vars(error).get("__notes__")  # no `__getattr__` of the class answers for it
    if isinstance(notes, list):
        parts += [note for note in notes if isinstance(note, str)]
    return bounded_text("; ".join(parts))


def describe_traceback(error: BaseException) -> str:
    """Return the traceback of `error`, truncated. This works even if its `__str__` raises.

    The traceback of a script begins in the script, without the frames that have started it.
    """
    frames = _skip_starter(error.__traceback__)
    try:
        lines = traceback.format_exception(type(error), error, frames)
    except Exception:
        lines = ["Traceback (most recent call last):\n", *traceback.format_tb(frames)]
        lines.append(describe_exception(error) + "\n")
    return bounded_text("".join(lines), LONGEST_TRACEBACK)


def bounded_text(text: str, limit: int = LONGEST_MESSAGE) -> str:
    """Return `text` as valid UTF-8.

    If it is longer than `limit` characters, replace its middle by a note.
    """
    if len(text) > limit:
        first = limit * 3 // 4
        last = limit // 4
        text = f"{text[:first]}\n[{len(text) - first - last} characters left out]\n{text[-last:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def redact_secrets(text: str) -> str:
    """Return the text of an error without the secrets of this process's environment.

    It becomes events, reports and notifications, which leave this machine.
    """
    # Late: its patterns are not needed to start, and ranks start again within hundredths of a second
    try:
        from ebbflow.diagnose.bundle import redact, secret_values
    except (ImportError, OSError) as error:  # such as "too many open files", the error itself
        return f"not shown, since its secrets could not be redacted: {error}"
    return redact(text, secret_values(dict(os.environ)))[0]


def _skip_starter(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback without its frames up to the last one of the standard library's `runpy`."""
    started = False
    frame = frames
    while frame is not None:
        is_starter = frame.tb_frame.f_globals.get("__name__") == "runpy"
        if started and not is_starter:
            return frame
        started = started or is_starter
        frame = frame.tb_next
    return frames


def _text_of(error: BaseException) -> str:
    try:
        return bounded_text(str(error))
    except BaseException as second:  # a __str__ may raise anything, sys.exit included
        return f"(its text cannot be made: __str__ raised {type(second).__name__})"
