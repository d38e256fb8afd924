"""Restore the newest commit that every rank can verify; quarantine and report damaged commits.

One reader's report of damage is not enough to reject a commit. A rank of another node reads the
damaged part again, or, if there is only one node, a new process does. If the second read is sound,
the commit is treated as sound, and the first reader fails with `UnreliableReader`.
"""

import functools
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ebbflow.core.errors import InfraError, StoreError, StoreTimeout, StoreUnavailable
from ebbflow.core.layout import quarantine_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.dcp_reader import CommitReader
from ebbflow.training.checkpoint.lineage import (
    CommitRef,
    nothing_to_restore_error,
    reachable_commits,
)
from ebbflow.training.checkpoint.manifest import VERSION, TensorEntry
from ebbflow.training.checkpoint.reader import find_problem_in_new_process, read_manifest
from ebbflow.training.checkpoint.state import (
    SHARED_PREFIX,
    FurtherState,
    apply_settings,
    prepare_for_loading,
    reseed_rng,
    restore_rng,
    rng_name,
)
from ebbflow.training.checkpoint.verified_io import seal
from ebbflow.training.errors import (
    CheckpointError,
    CommitMismatch,
    CorruptCommit,
    MisplacedCommit,
    RefusedCommit,
    UnreliableReader,
)

_VERDICT_BYTES = 4096
_REASON_CHARACTERS = 250
_HOST_CHARACTERS = 64
_MOST_NAMED = 5  # ranks in one message
_MOST_SECOND_READINGS = 4  # per commit, each for another node
_SUSPECT_FIRST_SECONDS = 20.0  # the failing reader exits first, so that its agent blames it alone
_SOUND = "sound"
_CORRUPT = "corrupt"
_MISPLACED = "misplaced"
_MISMATCH = "mismatch"
_ERROR = "error"
_REFUSED = "refused"  # its signature is missing or wrong
_AWAY = "away"  # the store is unreachable for at least one rank
_UNRELIABLE = "unreliable"  # the reader fails, not the commit
# (commit key, data object or "", chunk or None) → the problem that another process finds, "" for
# none
ReadAgain = Callable[[str, str, int | None], str]
# Returns the tensor into which a tensor of the commit is read; None if it is not wanted.
Place = Callable[[str, TensorEntry], Tensor | None]
# (name of the work) → waits until all ranks have done this work
Meet = Callable[[str], object]
# Pauses before a commit is read again after a store error. Failing at once would waste a
# generation, and three failures for the same reason would look like a crash loop.
_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, kw_only=True)
class RejectedCommit:
    """A commit that a restore skipped because it is damaged or its signature was refused."""

    key: str
    reason: str
    extra: dict[str, Any] | None = None  # the `extra` that is stored in it; None if unreadable

    @property
    def step(self) -> int:
        return CommitRef.from_key(self.key).step


@dataclass(frozen=True, kw_only=True)
class RestoreSeconds:
    """Durations of the activities of one rank's restore, in seconds.

    They add up to `RestoreResult.seconds`.
    """

    list: float  # reading manifests, and failed attempts
    # reading bytes from the store. Threads download, verify and load at the same time; wall-clock
    # time is divided in proportion to the seconds that all threads spent on each
    download: float
    verify: float  # comparing checksums
    load: float  # copying into model and optimizer
    agree: float  # waiting until the ranks agree that the commit is intact


@dataclass(frozen=True, kw_only=True)
class RestoreResult:
    """The outcome of a restore.

    All ranks have equal values, except for `bytes_read`, `seconds` and `split`.
    """

    step: int
    extra: dict[str, Any]  # what was stored in the commit beside the tensors
    key: str
    # "restored" if the random states were restored bit for bit; "reseeded from the commit" if the
    # commit has none for this world size
    rng: str
    world_size: int  # number of ranks that saved the commit
    bytes_read: int
    seconds: float  # duration of the restore
    split: RestoreSeconds  # the same seconds by activity
    rejected: list[RejectedCommit] = field(default_factory=list)  # skipped commits, newest first
    # Tensors besides model, optimizer and random states
    further: FurtherState = field(default_factory=FurtherState)


# Collective with one caller, whose further arguments have defaults
def restore_newest(  # noqa: PLR0913
    store: Store,
    candidates: list[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    rank: int,
    world_size: int,
    *,
    node: int = 0,
    place: Place | None = None,
    read_again: ReadAgain | None = None,
    progress: Callable[[], object] = lambda: None,
    meet: Meet = lambda _stage: None,
) -> RestoreResult | None:
    """Try the candidates in order until all ranks have verified one; return None if there are no
    candidates.

    Model and optimizer are filled in place; after an exception their content is undefined.

    Args:
        candidates: commit keys, newest first.
        node: number of this rank's node.
        place: returns the destination for a tensor of `FurtherState.shared`, or None to skip that
            tensor. By default, all are skipped.
        read_again: reads a possibly damaged part again in another process; default: a new process
            on this machine.
        progress: called after each 512 MiB, since a large state takes minutes.
        meet: called before the ranks exchange their verdicts in a collective, whose deadline is
            that of a step: one rank may read for much longer than another.

    Raises:
        UnreliableReader: some ranks found damage that a second read did not confirm. Those ranks
            raise it 20 s before the others, so that the failure is attributed to them.
        CommitMismatch: the commit belongs to another model.
        NothingToRestore: no commit of the job is left.
        CheckpointError: a candidate could not be read, or all candidates are damaged and the job
            has older commits.
    """
    began = time.monotonic()
    rejected: list[RejectedCommit] = []
    again = read_again or functools.partial(find_problem_in_new_process, store.uri)
    reader = _Reader(
        rank, world_size, node, again, place or (lambda _name, _entry: None), progress, meet
    )
    for key in candidates:
        attempted, loaded, verdict, agree = _attempt_with_retries(
            store, key, model, optimizer, reader
        )
        kind = verdict.kind
        reason = verdict.reason
        if kind == _UNRELIABLE:
            if rank not in verdict.suspects:
                time.sleep(_SUSPECT_FIRST_SECONDS)
            raise UnreliableReader(reason)
        if kind in (_CORRUPT, _MISPLACED, _REFUSED):
            rejected.append(RejectedCommit(key=key, reason=reason, extra=_read_extra(store, key)))
            if rank == 0:
                _report_rejected(store, key, reason, kind)
            continue
        if kind == _MISMATCH:
            raise CommitMismatch(f"{key}: {reason}")
        if kind != _SOUND:
            raise CheckpointError(
                f"{key} could not be read, which says nothing about the commit itself: {reason}"
            )
        assert loaded is not None, "all ranks have loaded a sound commit"
        rng = _finish(loaded, key, model, optimizer, rank)
        if rejected and rank == 0:
            lost = rejected[0].step
            left = CommitRef.from_key(key).step
            text = f"checkpoint: {lost - left} committed steps are lost: from {lost} back to {left}"
            print(text, file=sys.stderr)
        manifest = loaded.reader.manifest
        total = time.monotonic() - began
        return RestoreResult(
            step=manifest.save.step,
            extra=manifest.common["extra"],
            key=key,
            rng=rng,
            world_size=manifest.save.world_size,
            bytes_read=loaded.reader.figures.bytes,
            seconds=total,
            split=_divide_seconds(loaded, before=attempted - began, agree=agree, total=total),
            rejected=rejected,
            further=FurtherState(
                {name.removeprefix(rng_name(rank)): tensor for name, tensor in loaded.rng.items()},
                loaded.shared,
            ),
        )
    if not rejected:
        return None
    reasons = "; ".join(f"{bad.key}: {bad.reason}" for bad in rejected)
    none = f"none of {len(rejected)} commits verifies"
    if {ref.key for ref in reachable_commits(store)} <= {bad.key for bad in rejected}:
        raise nothing_to_restore_error(store, f"{none}: {reasons}")
    raise CheckpointError(f"{store.uri}: {none}; there are older ones: {reasons}")


def assign_second_readers(nodes: Sequence[int], doubting: Sequence[bool]) -> list[tuple[int, int]]:
    """Choose second readers for data that a rank found damaged.

    Return pairs of (doubting rank, second reader).

    A doubting rank is a rank that found the commit damaged. The first doubting rank of each node
    gets a second reader, up to four in total. The second reader is on another node, and is a rank
    without doubts if there is one. With only one node, the doubting rank is its own second reader
    and starts a new process for it.

    Args:
        nodes: the node of each rank.
        doubting: for each rank, whether it is a doubting rank.
    """
    tasks: list[tuple[int, int]] = []
    seen: set[int] = set()
    for rank, node in enumerate(nodes):
        if not doubting[rank] or node in seen or len(tasks) == _MOST_SECOND_READINGS:
            continue
        seen.add(node)
        others = [other for other, at in enumerate(nodes) if at != node]
        confident = [other for other in others if not doubting[other]]
        choice = confident or others or [rank]
        tasks.append((rank, choice[len(tasks) % len(choice)]))
    return tasks


@dataclass
class _Loaded:
    reader: CommitReader
    rng: dict[str, Tensor]
    shared: dict[str, Tensor]
    manifest_seconds: float
    read_seconds: float


@dataclass(frozen=True)
class _Reader:
    rank: int
    world_size: int
    node: int
    read_again: ReadAgain
    place: Place
    progress: Callable[[], object]
    meet: Meet


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """The result of loading a commit, either for one rank or for all ranks together."""

    kind: str
    reason: str = ""
    node: int = 0
    host: str = ""
    object_key: str = ""  # the damaged data object, as in CorruptCommit
    chunk: int | None = None  # number of the damaged chunk, as in CorruptCommit
    suspects: tuple[int, ...] = ()  # ranks whose readings disagree with a second reader's

    @property
    def doubts(self) -> bool:
        return self.kind in (_CORRUPT, _MISPLACED)


def _attempt_with_retries(
    store: Store, key: str, model: nn.Module, optimizer: Optimizer | None, reader: _Reader
) -> tuple[float, _Loaded | None, _Verdict, float]:
    """Attempt to restore one commit; try again while the store is unavailable.

    Return the start of the last try (`time.monotonic()`), the data that this rank loaded, the
    common verdict of all ranks, and the seconds that the ranks needed to agree on this verdict.
    """
    pauses = iter(_AGAIN_SECONDS)
    number = 0
    while True:
        number += 1
        attempted = time.monotonic()
        loaded, own = _attempt(store, key, model, optimizer, reader)
        judged = time.monotonic()
        reader.meet(f"reading {key}, try {number}")
        verdict = _agree_on_verdict(own, key, reader)
        pause = next(pauses, None) if verdict.kind == _AWAY else None
        if pause is None:
            return attempted, loaded, verdict, time.monotonic() - judged
        time.sleep(pause)  # equal on all ranks


def _attempt(
    store: Store, key: str, model: nn.Module, optimizer: Optimizer | None, own: _Reader
) -> tuple[_Loaded | None, _Verdict]:
    """Load this rank's part of a commit, and return it with a verdict.

    Every exception becomes a verdict, because the other ranks would otherwise wait for the verdict
    of a rank that raised an exception.
    """
    try:
        return _load(store, key, model, optimizer, own), _Verdict(kind=_SOUND, node=own.node)
    except CorruptCommit as error:
        if isinstance(error, MisplacedCommit):
            kind = _MISPLACED
        else:
            kind = _CORRUPT
        about = {"object_key": error.object_key, "chunk": error.chunk}
        return None, _Verdict(kind=kind, reason=str(error), node=own.node, **about)
    except Exception as error:
        # A hung read cannot be retried in this process.
        away = isinstance(error, StoreUnavailable) and not isinstance(error, StoreTimeout)
        if isinstance(error, CommitMismatch):
            kind = _MISMATCH
        elif away:
            kind = _AWAY
        else:
            kind = _ERROR
        if isinstance(error, RefusedCommit):
            kind = _REFUSED
        if isinstance(error, CheckpointError | InfraError):
            reason = str(error)
        else:
            reason = repr(error)
        return None, _Verdict(kind=kind, reason=reason)


def _load(
    store: Store, key: str, model: nn.Module, optimizer: Optimizer | None, own: _Reader
) -> _Loaded:
    rank = own.rank
    world_size = own.world_size
    began = time.monotonic()
    reader = CommitReader(store, key, progress=own.progress)
    manifest_seconds = time.monotonic() - began
    targets = prepare_for_loading(reader.manifest, model, optimizer)
    rng = {}
    if reader.manifest.save.world_size == world_size:
        for name, entry in reader.manifest.tensors.items():
            if name.startswith(rng_name(rank)):
                rng[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    shared = {}
    for name, entry in reader.manifest.tensors.items():
        if name.startswith(SHARED_PREFIX):
            target = own.place(name, entry)
            if target is not None:
                shared[name] = target
    began = time.monotonic()
    reader.read_into({**targets, **rng, **shared})
    return _Loaded(reader, rng, shared, manifest_seconds, time.monotonic() - began)


def _agree_on_verdict(own: _Verdict, key: str, reader: _Reader) -> _Verdict:
    """Exchange verdicts in small all-gathers. Return the worst verdict, the same on all ranks.

    The reason in it names the rank whose verdict it is. If a rank finds the commit damaged, a
    second reader reads the damaged part again. If that reader confirms the damage, the commit is
    rejected; otherwise the rank that reported it becomes a suspect.
    """
    row = {"kind": own.kind, "reason": _shorten(own.reason), "node": own.node}
    row |= {
        "host": socket.gethostname()[:_HOST_CHARACTERS],
        "object_key": own.object_key,
        "chunk": own.chunk,
    }
    verdicts = [_Verdict(**given) for given in _gather(row, reader.world_size)]

    def first_of(*kinds: str) -> _Verdict | None:
        for kind in kinds:
            for rank, verdict in enumerate(verdicts):
                if verdict.kind == kind:
                    return _Verdict(kind=kind, reason=_with_rank(rank, verdict.reason, reader))
        return None

    # Errors come first: they say nothing about the commit, so they must not lead to a quarantine.
    found = first_of(_ERROR, _AWAY)
    if found is not None:
        return found
    if disagreement := _signature_disagreement(verdicts):
        return _Verdict(kind=_ERROR, reason=disagreement)
    found = first_of(_REFUSED, _MISMATCH)
    if found is not None:
        return found
    if not any(verdict.doubts for verdict in verdicts):
        return _Verdict(kind=_SOUND)
    return _settle_doubts(verdicts, key, reader)


def _signature_disagreement(verdicts: Sequence[_Verdict]) -> str:
    """Describe which ranks refuse a signature that others accept; return "" if the ranks agree.

    All ranks read the same signature, so a disagreement means that some ranks have a wrong key or
    misread it.
    """
    refusing = [rank for rank, verdict in enumerate(verdicts) if verdict.kind == _REFUSED]
    accepting = [
        rank for rank, verdict in enumerate(verdicts) if verdict.kind in (_SOUND, _MISMATCH)
    ]
    if not refusing or not accepting:
        return ""
    named = ", ".join(f"rank {rank} on {verdicts[rank].host}" for rank in refusing[:_MOST_NAMED])
    if len(refusing) > _MOST_NAMED:
        more = f" and {len(refusing) - _MOST_NAMED} more"
    else:
        more = ""
    if len(refusing) == 1:
        verb = "refuses"
    else:
        verb = "refuse"
    first = verdicts[refusing[0]].reason
    return (
        f"{named}{more} {verb} what the others accept: another key there? fix: give all nodes "
        f"the same key; {first}"
    )


def _settle_doubts(verdicts: Sequence[_Verdict], key: str, reader: _Reader) -> _Verdict:
    tasks = assign_second_readers(
        [verdict.node for verdict in verdicts], [verdict.doubts for verdict in verdicts]
    )
    found: dict[str, list[str]] = {}
    for doubting, second in tasks:
        if second == reader.rank:
            doubt = verdicts[doubting]
            try:
                problem = reader.read_again(key, doubt.object_key, doubt.chunk)
                found[str(doubting)] = [_CORRUPT if problem else _SOUND, _shorten(problem)]
            except (StoreError, CheckpointError) as error:
                found[str(doubting)] = [_AWAY, _shorten(str(error))]
    described = {
        second: "(a new process)"
        if doubting == second
        else f"(rank {second} on node {verdicts[second].node})"
        for doubting, second in tasks
    }
    answers = {}
    for row in _gather(found, reader.world_size):
        answers |= {int(rank): answer for rank, answer in row.items()}
    for doubting, second in tasks:
        kind, _ = answers[doubting]
        if kind == _CORRUPT:
            doubt = verdicts[doubting]
            first = _with_rank(doubting, doubt.reason, reader)
            return _Verdict(
                kind=doubt.kind, reason=f"{first}; a second reader {described[second]} agrees"
            )
    for doubting, second in tasks:
        kind, reason = answers[doubting]
        if kind == _AWAY:
            return _Verdict(kind=_AWAY, reason=_with_rank(second, reason, reader))
    doubting, second = tasks[0]
    first = verdicts[doubting]
    doubting_nodes = {verdicts[rank].node for rank, _ in tasks}
    nodes = ", ".join(map(str, sorted(doubting_nodes)))
    reason = (
        f"node {nodes} reads wrongly (rank {doubting}): {first.reason}; a second reader "
        f"{described[second]} finds {first.object_key or key} as saved, so the "
        "commit is sound; fix: check that machine's memory, disk and network"
    )
    return _Verdict(kind=_UNRELIABLE, reason=reason, suspects=tuple(rank for rank, _ in tasks))


def _shorten(text: str) -> str:
    """Convert text to ASCII, and truncate it so that it fits into one row of an all-gather."""
    return " ".join(text.split()).encode("ascii", "replace").decode()[:_REASON_CHARACTERS]


def _with_rank(rank: int, reason: str, reader: _Reader) -> str:
    if reader.world_size == 1:
        return reason
    return f"rank {rank}: {reason}"


def _gather(row: dict[str, Any], world_size: int) -> list[dict[str, Any]]:
    """Exchange one row of JSON in a small all-gather, and return the rows of all ranks in rank
    order.
    """
    if not (dist.is_available() and dist.is_initialized()) or world_size == 1:
        return [row]
    text = json.dumps(row).encode()
    assert len(text) <= _VERDICT_BYTES, "reasons are cut so that a row fits"
    if dist.get_backend() == "nccl":
        device = torch.device("cuda")
    else:
        device = torch.device("cpu")
    mine = torch.zeros(_VERDICT_BYTES, dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(gathered, mine)
    return [json.loads(bytes(other.cpu().numpy()).rstrip(b"\0")) for other in gathered]


def _report_rejected(store: Store, key: str, reason: str, kind: str) -> None:
    """Print that a commit was rejected; quarantine it if it is damaged.

    A misplaced manifest, which belongs to another commit's key, is not quarantined: under its own
    key it is valid.
    """
    where = quarantine_key(CommitRef.from_key(key).sha256)
    quarantine = kind == _CORRUPT
    if kind == _REFUSED:
        standing = "refused"
    else:
        standing = "damaged"
    print(
        f"checkpoint: ERROR: {store.uri}/{key} is {standing} and will not be used: {reason}\n"
        f"checkpoint: {f'to be quarantined in {where}; ' if quarantine else ''}going back to the "
        "commit before it",
        file=sys.stderr,
    )
    if not quarantine:
        return
    try:
        store.put(
            where, seal({"version": VERSION, "key": key, "reason": reason, "t_wall": time.time()})
        )
    except InfraError as error:  # this rank must go on to the next commit like the others
        print(f"checkpoint: WARNING: {where} could not be written: {error}", file=sys.stderr)


def _read_extra(store: Store, key: str) -> dict[str, Any] | None:
    """Return the `extra` of a damaged commit if its manifest is readable; else None."""
    try:
        return read_manifest(store, key).common["extra"]
    except (CheckpointError, InfraError, KeyError):
        return None


def _finish(
    loaded: _Loaded, key: str, model: nn.Module, optimizer: Optimizer | None, rank: int
) -> str:
    """Apply the commit's optimizer settings, and restore or reseed the random states.

    Return `RestoreResult.rng`.
    """
    settings = loaded.reader.manifest.common["optimizer"]
    if optimizer is not None and settings is not None:
        apply_settings(settings, model, optimizer)
    if loaded.rng:
        restore_rng(rank, loaded.rng)
        return "restored"
    reseed_rng(CommitRef.from_key(key).sha256, rank)
    return "reseeded from the commit"


def _divide_seconds(
    loaded: _Loaded, *, before: float, agree: float, total: float
) -> RestoreSeconds:
    """Split the duration of a restore into activities.

    Time that belongs to no other activity counts as `load`.

    `before` is the time from the start of the restore to the start of the attempt that succeeded.
    `agree` is the time in which the ranks then agreed that the commit is intact.
    """
    figures = loaded.reader.figures
    threads = figures.download_seconds + figures.verify_seconds + figures.place_seconds
    if threads:
        share = loaded.read_seconds / threads
    else:
        share = 0.0
    listing = before + loaded.manifest_seconds
    download = share * figures.download_seconds
    verify = share * figures.verify_seconds
    load = total - listing - download - verify - agree
    return RestoreSeconds(list=listing, download=download, verify=verify, load=load, agree=agree)
