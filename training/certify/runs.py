"""The runs that a certificate rests on: one in peace, and the same job under each interruption."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from infra.config.schema import RunConfig
from infra.events import RESTORE, STEP, Event, read_events
from infra.layout import job_prefix
from infra.outcome import Outcome
from infra.store import Store
from training.certify.small import recorded
from training.errors import GangError, TrainingError
from training.launch.local import LocalGang
from training.launch.spec import GangOutcome, GangSpec

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
