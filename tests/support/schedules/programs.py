"""The programs of the processes of a schedule: launcher, operator, rank, retention and reader.

Each reports what it did, one JSON line per event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ebbflow.core.errors import InfraError, StoreError
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint import (
    FROM_SCRATCH,
    Checkpointer,
    Generation,
    RetentionPolicy,
    open_generation,
    reachable_commits,
    read_generation,
    record_permits,
    trace_lineage,
    verify_commit,
)
from ebbflow.training.checkpoint.reader import read_manifest
from ebbflow.training.checkpoint.retention import Retention
from ebbflow.training.errors import (
    CheckpointError,
    GenerationSuperseded,
    NoRoom,
    NothingToRestore,
    TrainingError,
    TwoLaunchers,
)
from tests.support.schedules.plan import Act, Schedule
from tests.support.schedules.state import build, fill, list_differences

Report = Callable[..., None]
T = TypeVar("T")
_REQUEST_SECONDS = 2.0
_GROUP_SECONDS = 30.0
_CHUNK_BYTES = 5 * 2**19  # so that parts have 5 MiB, the least that S3 takes
_SWEEP_SECONDS = 10.0
_TRIES = 5


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank's place in its gang.

    Attributes:
        meeting: The file over which the ranks find each other.
    """

    rank: int
    world_size: int
    meeting: str


def launch(report: Report, uri: str, attempt: int, rewind: int) -> None:
    """Open a generation as an agent does. Reports opened, two_launchers or refused."""
    store = _open_store(uri)
    back = 0
    parent = None
    try:
        if rewind:
            refs = reachable_commits(store)
            if refs:
                back = min(rewind, len(refs) - 1)
                parent = refs[back].key
        try:
            generation = open_generation(store, run="soak", attempt=attempt, parent=parent)
        except NothingToRestore:  # all commits are damaged: a person permits a start from scratch
            record_permits(store, FROM_SCRATCH)
            generation = open_generation(store, run="soak", attempt=attempt, parent=parent)
        candidates = [ref.key for ref in reachable_commits(store)]
    except TwoLaunchers as error:
        report("two_launchers", message=str(error))
        return
    except (TrainingError, InfraError) as error:
        report("refused", kind=type(error).__name__, message=str(error))
        return
    report(
        "opened",
        number=generation.number,
        id=generation.id,
        name=generation.name,
        parent=generation.parent,
        rewound=parent is not None,
        back=back,
        candidates=candidates,
    )


def delete_rival_records(report: Report, uri: str, started: list[str]) -> None:
    """Delete one of two records of one generation number, as the hint of TwoLaunchers says.

    A launcher that withdraws, and dies or is refused meanwhile, leaves its record.

    Args:
        started: Names of the generations that have ranks, whose records are kept.
    """
    store = _open_store(uri)
    names = []
    for meta in store.list("generations"):
        names.append(meta.key.rsplit("/", 1)[-1].removesuffix(".json"))
    records = Counter(name.partition("-")[0] for name in names)
    for name in names:
        number = name.partition("-")[0]
        if records[number] > 1 and name not in started:
            store.delete(f"generations/{name}.json")
            records[number] -= 1
            report("deleted", name=name)


def work(
    report: Report, uri: str, opened: dict[str, Any], place: Place, act: Act, schedule: Schedule
) -> None:
    """Join the gang as one rank, restore, then save step after step.

    Args:
        opened: The launcher's report.
    """
    if place.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{place.meeting}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=_GROUP_SECONDS),
        )
    store = _open_store(uri)
    generation = _retry(lambda: read_generation(store, opened["number"], opened["id"]))
    model, optimizer = build(place.world_size, large=schedule.large)
    with Checkpointer(
        uri,
        generation=generation,
        rank=place.rank,
        world_size=place.world_size,
        deadline_seconds=schedule.deadline_seconds,
        retention=RetentionPolicy(keep_last=schedule.keep_last),
        chunk_bytes=_CHUNK_BYTES,
        request_seconds=_REQUEST_SECONDS,
    ) as checkpointer:
        report("hello", uploader=checkpointer.uploader_pid)
        saver = _Saver(report, checkpointer, model, optimizer, generation)
        start = saver.restore(store, opened["candidates"], place.world_size)
        last = start + act.saves[-1]
        for after, pause, wait in zip(act.saves, act.pauses, act.waits, strict=True):
            time.sleep(pause)
            step = start + after
            saver.save(step, awaited=wait or step == last)
    report("done")


def sweep(report: Report, uri: str, keep_last: int) -> None:
    """Apply retention after the end of all gangs.

    Orphans and unfinished uploads are deleted at any age.
    """
    store = _open_store(uri)
    policy = RetentionPolicy(keep_last=keep_last, orphan_seconds=0.001)
    deleted = Retention(policy).prune(store)
    uploads = open_sink(uri, Throttle()).sweep(
        "data/", older_than_seconds=-2.0, seconds=_SWEEP_SECONDS
    )
    report("swept", deleted=[ref.key for ref in deleted], uploads=uploads)


def read(report: Report, uri: str) -> None:
    """Report every commit of a job, whether it counts, and its damage; then all objects."""
    store = _open_store(uri)
    for traced in trace_lineage(store):
        report(
            "commit",
            key=traced.ref.key,
            step=traced.ref.step,
            generation=traced.ref.generation,
            unreachable=traced.unreachable_because,
            problems=verify_commit(store, traced.ref.key),
        )
    for folder in ("data", "index", "tombstones", "quarantine"):
        report("objects", folder=folder, keys=[meta.key for meta in store.list(folder)])
    report("done")


@dataclass(frozen=True)
class _Saver:
    """What a rank restores into and saves from."""

    report: Report
    checkpointer: Checkpointer
    model: nn.Module
    optimizer: Optimizer
    generation: Generation

    def restore(self, store: Store, candidates: list[str], world_size: int) -> int:
        """Restore and compare bit for bit. Return the step to go on from.

        Reports restored, afresh or none_verified.
        """
        try:
            restored = self.checkpointer.restore(candidates, self.model, self.optimizer)
        except CheckpointError as error:
            # Only the text tells this error from that of a store which could not be read
            if "commits verifies" in str(error):
                self.report("none_verified", message=str(error))
            raise
        if restored is None:
            self.report("afresh")
            return 0
        origin = _retry(lambda: read_manifest(store, restored.key)).save.generation
        wrong = list_differences(self.model, self.optimizer, origin, restored.step)
        if restored.extra != {"generation": origin, "step": restored.step}:
            wrong.append(f"extra is {restored.extra}")
        self.report(
            "restored",
            key=restored.key,
            wrong=wrong,
            rejected=[(commit.key, commit.reason) for commit in restored.rejected],
            resized=restored.world_size != world_size,
        )
        return restored.step

    def save(self, step: int, *, awaited: bool) -> None:
        """Save a step. Reports saving, committed, settled, failed or superseded.

        As in training, one failed save does not end the rank, and the second in a row does.
        """
        extra = {"generation": self.generation.name, "step": step}
        fill(self.model, self.optimizer, self.generation.name, step)
        began = time.monotonic()
        try:
            self.checkpointer.save(step, self.model, self.optimizer, extra)
        except (GenerationSuperseded, NoRoom) as error:
            self._record_failure(step, began, error)
            return
        except CheckpointError as error:  # two saves in a row have failed
            self._record_failure(step, began, error)
            raise
        self.report("saving", step=step, uploader=self.checkpointer.uploader_pid)
        # The time until here includes a wait for the save before, which has its own deadline
        began = time.monotonic()
        try:
            if awaited:
                commit = self.checkpointer.wait()
            else:
                commit = self.checkpointer.last_commit
        except CheckpointError as error:
            self._record_failure(step, began, error)
            return
        if commit is not None:
            self.report("committed", key=commit.key)
        if awaited:
            self.report("settled", step=step, seconds=time.monotonic() - began)

    def _record_failure(self, step: int, began: float, error: CheckpointError) -> None:
        """Report a failed save. A superseded rank ends."""
        if isinstance(error, GenerationSuperseded):
            self.report("superseded", step=step, message=str(error))
            raise error
        seconds = time.monotonic() - began
        self.report("failed", step=step, seconds=seconds, message=str(error))


def _open_store(uri: str) -> Store:
    return Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)


def _retry(operation: Callable[[], T]) -> T:
    """Try a request that a rank sends beside the checkpointer several times."""
    for _ in range(_TRIES - 1):
        try:
            return operation()
        except StoreError:
            time.sleep(0.1)
    return operation()
