"""The parts that processes play: launcher, rank, reader.

Each tells what it did, one JSON line at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks.soak.schedules.state import build, differing, fill
from ebbflow.core.errors import InfraError, StoreError
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint import (
    FROM_SCRATCH,
    Checkpointer,
    RetentionPolicy,
    open_generation,
    reachable_commits,
    read_generation,
    record_permits,
    trace_lineage,
)
from ebbflow.training.checkpoint.reader import read_manifest, verify_commit
from ebbflow.training.checkpoint.retention import Retention
from ebbflow.training.errors import (
    CheckpointError,
    GenerationSuperseded,
    NothingToRestore,
    TrainingError,
    TwoLaunchers,
)

Report = Callable[..., None]
_REQUEST_SECONDS = 2.0
_GROUP_SECONDS = 30.0
_CHUNK_BYTES = 5 * 2**19  # so that parts have 5 MiB, the least that S3 takes
_SWEEP_SECONDS = 10.0


def launch(report: Report, uri: str, attempt: int, rewind: int) -> None:
    """Open a generation as an agent does. Reports opened, two_launchers or refused."""
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    try:
        if rewind:
            refs = reachable_commits(store)
        else:
            refs = []
        back = min(rewind, len(refs) - 1)
        if refs:
            parent = refs[back].key
        else:
            parent = None
        try:
            generation = open_generation(store, run="soak", attempt=attempt, parent=parent)
        except NothingToRestore:  # every commit was damaged; a person looks, and begins anew
            record_permits(store, FROM_SCRATCH)
            generation = open_generation(store, run="soak", attempt=attempt, parent=parent)
        candidates = [ref.key for ref in reachable_commits(store)]
    except TwoLaunchers as error:
        report("two_launchers", message=str(error))
        return
    except (TrainingError, InfraError) as error:
        report("refused", kind=type(error).__name__, message=str(error))
        return
    about = {
        "number": generation.number,
        "id": generation.id,
        "name": generation.name,
        "parent": generation.parent,
    }
    report(
        "opened",
        **about,
        rewound=parent is not None,
        back=back if refs else 0,
        candidates=candidates,
    )


def give_up(report: Report, uri: str, names: list[str]) -> None:
    """What an operator does on the hint of TwoLaunchers: of two records of one number, delete the
    one to give up.

    names: of the generations that have ranks. A launcher that withdraws, and dies or is refused,
        leaves its record.
    """
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    listed = [
        meta.key.rsplit("/", 1)[-1].removesuffix(".json") for meta in store.list("generations")
    ]
    numbers = [name.partition("-")[0] for name in listed]
    for name in (
        name for name in listed if numbers.count(name.partition("-")[0]) > 1 and name not in names
    ):
        store.delete(f"generations/{name}.json")
        numbers.remove(name.partition("-")[0])
        report("gave_up", name=name)


def work(
    report: Report, uri: str, opened: dict[str, Any], place: dict[str, Any], plan: dict[str, Any]
) -> None:
    """One rank: join, restore, then save step after step. place: rank, world_size, meeting (a
    file).
    """
    rank = place["rank"]
    world_size = place["world_size"]
    if world_size > 1:
        meeting = f"file://{place['meeting']}"
        limit = timedelta(seconds=_GROUP_SECONDS)
        dist.init_process_group(
            "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=limit
        )
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    generation = _patiently(lambda: read_generation(store, opened["number"], opened["id"]))
    model, optimizer = build(world_size, large=plan["large"])
    deadline = plan["deadline_seconds"]
    with Checkpointer(
        uri,
        generation=generation,
        rank=rank,
        world_size=world_size,
        deadline_seconds=deadline,
        retention=RetentionPolicy(keep_last=plan["keep_last"]),
        chunk_bytes=_CHUNK_BYTES,
        request_seconds=_REQUEST_SECONDS,
    ) as saver:
        report("hello", uploader=saver.uploader_pid)
        restored = saver.restore(opened["candidates"], model, optimizer)
        if restored is not None:
            origin = _patiently(lambda: read_manifest(store, restored.key)).save.generation
            wrong = differing(model, optimizer, origin, restored.step)
            if restored.extra != {"generation": origin, "step": restored.step}:
                wrong.append(f"extra is {restored.extra}")
            rejected = [(one.key, one.reason) for one in restored.rejected]
            resized = restored.world_size != world_size
            report("restored", key=restored.key, wrong=wrong, rejected=rejected, resized=resized)
        else:
            report("afresh")
        steps = [(restored.step if restored else 0) + after for after in plan["saves"]]
        for step, pause, wait in zip(steps, plan["pauses"], plan["waits"], strict=True):
            time.sleep(pause)
            fill(model, optimizer, generation.name, step)
            _save(
                report,
                saver,
                step,
                model,
                optimizer,
                generation.name,
                awaited=wait or step == steps[-1],
            )
    report("done")


def _save(
    report: Report,
    saver: Checkpointer,
    step: int,
    model: Any,
    optimizer: Any,
    generation: str,
    *,
    awaited: bool,
) -> None:
    """Reports committed, failed or superseded.

    As in training, one failed save is survived, the next ends the rank.
    """
    began = time.monotonic()
    try:
        saver.save(step, model, optimizer, {"generation": generation, "step": step})
        report("saving", step=step, uploader=saver.uploader_pid)
        # Until here it may have waited for the save before, which has a deadline of its own
        began = time.monotonic()
        if awaited:
            commit = saver.wait()
        else:
            commit = saver.last_commit
        if commit is not None:
            report("committed", key=commit.key)
        if awaited:
            report("settled", step=step, seconds=time.monotonic() - began)
    except GenerationSuperseded as error:
        report("superseded", step=step, message=str(error))
        raise
    except CheckpointError as error:
        report("failed", step=step, seconds=time.monotonic() - began, message=str(error))
        if "in a row have failed" in str(error):
            raise


def sweep(report: Report, uri: str, keep_last: int) -> None:
    """All gangs are over: retention, with orphans and unfinished uploads that may go at any age."""
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
    deleted = Retention(RetentionPolicy(keep_last=keep_last, orphan_seconds=0.001)).prune(store)
    uploads = open_sink(uri, Throttle()).sweep(
        "data/", older_than_seconds=-2.0, seconds=_SWEEP_SECONDS
    )
    report("swept", deleted=[ref.key for ref in deleted], uploads=uploads)


def read(report: Report, uri: str) -> None:
    """Everything that a reader can find out about a job: every commit, whether it counts, and what
    is wrong with it.
    """
    store = Store.open(uri, request_timeout_seconds=_REQUEST_SECONDS)
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


def _patiently(operation: Callable[[], Any]) -> Any:
    """A rank has several tries at the little that it asks of the store beside the checkpointer."""
    for remaining in reversed(range(5)):
        try:
            return operation()
        except StoreError:
            if not remaining:
                raise
            time.sleep(0.1)
