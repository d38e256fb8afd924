"""The runs that a certificate compares: a small copy of the job, uninterrupted and under each interruption."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.events import RESTORE, STEP, Event, read_events
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.store import Store
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.local import LocalGang
from ebbflow.training.launch.spec import GangOutcome, GangSpec
from ebbflow.training.workload import Batch, Cursor, WorkloadContext
from ebbflow.training.workloads.loader import make_workload, prepare_data

RECORDED = "ebbflow.training.certify.runs:Recorded"
WORKLOAD_OPTION = "certified_workload"
FOLDER_OPTION = "certified_records"
DEFAULT_STEPS = 24
_SAVES = 6


def small_config(config: RunConfig, *, store: Path, steps: int) -> RunConfig:
    """The same model, data, batch, optimizer and mode; fewer steps, with a commit after each sixth of them.

    Ranks: as configured, as far as this machine has cores for them; two nodes where there are several, and never fewer
    after a loss, since other ranks add up otherwise. Figures that would reach others (metrics) are off.
    """
    nodes, processes = gang_size(config)
    sections = {
        "training": {"max_steps": steps, "evaluation_interval_steps": max(1, steps // 2)},
        "checkpoint": {
            "interval": "steps",
            "interval_steps": max(1, steps // _SAVES),
            "when_busy": "wait",
            "upload_mib_per_second": None,
        },
        "cluster": {"nodes": nodes, "processes_per_node": processes, "min_nodes": None},
        "metrics": {"port": None, "push_url": None},
    }
    changed = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update={**changed, "store": str(store)})


def recorded(config: RunConfig, folder: Path) -> RunConfig:
    """The same with the workload behind its witness, whose records go to `folder`."""
    options = {**config.workload_options, WORKLOAD_OPTION: config.workload or "", FOLDER_OPTION: str(folder)}
    return config.model_copy(update={"workload": RECORDED, "workload_options": options})


def gang_size(config: RunConfig) -> tuple[int, int]:
    """(nodes, ranks of each) for this machine."""
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    nodes = 2 if nodes == "auto" else min(nodes, 2)
    processes = 1 if processes == "auto" else processes
    cores = len(os.sched_getaffinity(0))
    return nodes, max(1, min(processes, cores // nodes))


class Recorded:
    """Options: those of the workload itself, its name, and the folder for the records; the latter two it never sees."""

    def __init__(self, context: WorkloadContext) -> None:
        self._workload: Any = make_workload(own_config(context.config), _own_context(context))
        self._name = str(context.options[WORKLOAD_OPTION] or "the built-in one")
        self._path = Path(str(context.options[FOLDER_OPTION])) / f"rank-{context.rank}.jsonl"

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        """What the workload itself prepares."""
        return prepare_data(own_config(context.config), _own_context(context))

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Batch:
        batch = self._workload.next_batch(model, cursor)
        record = {"first": cursor.first, "count": cursor.count, "sha256": content_sha256(batch)}
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._workload, name)


def own_config(config: RunConfig) -> RunConfig:
    """The configuration as the workload itself is to see it."""
    assert config.workload == RECORDED
    options = dict(config.workload_options)
    options.pop(FOLDER_OPTION)
    return config.model_copy(update={"workload": options.pop(WORKLOAD_OPTION) or None, "workload_options": options})


def _own_context(context: WorkloadContext) -> WorkloadContext:
    return dataclasses.replace(context, config=own_config(context.config))


def content_sha256(batch: Any) -> str:
    """Of every tensor and number that a batch holds, in the order of its fields."""
    digest = hashlib.sha256()
    for part in _parts(batch):
        digest.update(part)
    return digest.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, torch.Tensor):
        array = value.detach().cpu().contiguous()
        yield f"{array.dtype}{tuple(array.shape)}".encode()
        yield array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode() + np.ascontiguousarray(value).tobytes()
    elif isinstance(value, dict):
        for key in value:
            yield str(key).encode()
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _parts(item)
    elif hasattr(value, "__dict__") and not callable(value):
        yield from _parts(vars(value))
    else:
        yield repr(value).encode()


_SECONDS = 900.0  # for one start of the gang
_MOST_STARTS = 4
_NUMBERS = ("loss", "gradient_norm", "tokens", "learning_rate")
# By name: what is rehearsed at which share of the steps. Off the commits, so that work is lost or saved just in time.
PEACE, NODE_LOST = "none", "a node is lost"
INTERRUPTIONS = {
    "a rank is killed": "rank-kill@55%",
    NODE_LOST: "node-loss@70%",
    "a notice": "notice@40%",
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run left behind.

    steps: (step, its numbers), as often as each was taken. samples: (rank, first sample, hash of the batch), likewise.
    generations: how many. resumed: the steps that were restored.
    """

    interruption: str
    outcome: GangOutcome
    steps: list[tuple[int, dict[str, Any]]]
    samples: list[tuple[int, int, str]]
    starts: int
    generations: int
    resumed: list[int]


def certified_run(config: RunConfig, prepared: dict, folder: Path, interruption: str) -> Run:
    """Run the job to its end under one of INTERRUPTIONS or in PEACE, started as often as it needs."""
    job = interruption.replace(" ", "-")
    records, logs = folder / job / "records", folder / job / "logs"
    records.mkdir(parents=True)
    config = recorded(config, records)
    nodes, processes = config.cluster.nodes, config.cluster.processes_per_node
    assert isinstance(nodes, int) and isinstance(processes, int)
    spec = GangSpec(
        job=job,
        run=job,
        attempt=0,
        node=0,
        nodes=nodes,
        processes_per_node=processes,
        main_address="127.0.0.1",
        config=config.model_dump(mode="json"),
        store_uri=config.store,
        prepared=prepared,
        log_folder=str(logs),
        rehearse=INTERRUPTIONS.get(interruption),
    )
    outcome, starts = _to_the_end(spec, folder / job)
    events = read_events(Store.open(config.store).sub(job_prefix(job)))
    return Run(
        interruption=interruption,
        outcome=outcome,
        steps=[(event.step or 0, _numbers(event)) for event in events if event.name == STEP and event.rank == 0],
        samples=_samples(records),
        starts=starts,
        generations=len({event.generation for event in events if event.name == STEP}),
        resumed=[event.step or 0 for event in events if event.name == RESTORE],
    )


def _to_the_end(spec: GangSpec, folder: Path) -> tuple[GangOutcome, int]:
    for attempt in range(_MOST_STARTS):
        gang = LocalGang(replace(spec, attempt=attempt), folder / f"start-{attempt}", folder / "output.log")
        try:
            outcome = gang.wait(_SECONDS)
        except GangError as error:
            if not error.curable:
                raise
            last = str(error)
            continue
        finally:
            gang.kill()
        if outcome.outcome != Outcome.INTERRUPTED:
            return outcome, attempt + 1
        last = outcome.message
    raise TrainingError(f"certify: {spec.job}: {_MOST_STARTS} starts did not bring the job to its end; last: {last}")


def _numbers(event: Event) -> dict[str, Any]:
    return {name: event.data.get(name) for name in _NUMBERS}


def _samples(folder: Path) -> list[tuple[int, int, str]]:
    """A last line that a kill tore apart is passed over."""
    found = []
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            found.append((rank, record["first"], record["sha256"]))
    return found
