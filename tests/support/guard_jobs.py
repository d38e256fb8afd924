"""Jobs in which numbers, weights or memory go wrong at samples of one's choosing, run by an agent as any job is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from infra.config.schema import RunConfig
from infra.events import Event, read_events
from infra.layout import job_prefix
from infra.store import Store
from tests.support.workload_cases import Points, Sound
from training.launch import GangOutcome, GangSpec
from training.launch.local import LocalGang
from training.workload import Cursor, Loss


class Troubled(Sound):
    """Options: bad_first, bad_end and bad_factor: losses of these samples are multiplied (the factor as text: "nan");
    largest: samples that fit into memory; strange_rank, strange_sample:
    there a weight of that rank changes, once, which the file "strange_once" remembers."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.options = {"bad_first": -1, "bad_end": -1, "largest": 10**9, "strange_rank": -1, **context.options}

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        options = self.options
        strange = self.context.rank == options["strange_rank"] and cursor.first == options["strange_sample"]
        if strange and not Path(options["strange_once"]).exists():
            Path(options["strange_once"]).touch()
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-6
        self.bad = options["bad_first"] <= cursor.first < options["bad_end"]
        return super().next_batch(model, cursor)

    def loss(self, model: nn.Module, batch: Points) -> Loss:
        if len(batch.x) > self.options["largest"]:
            raise torch.OutOfMemoryError(f"planted: {len(batch.x)} samples, {self.options['largest']} fit")
        loss = super().loss(model, batch)
        return Loss(loss.sum * float(self.options["bad_factor"]), loss.weight) if self.bad else loss


@dataclass
class Job:
    """One job, started as often as `run` is called. Each of its gangs is one node with two ranks."""

    folder: Path
    config: dict[str, Any]

    @classmethod
    def make(cls, folder: Path, *, steps: int = 12, options: dict[str, Any] | None = None, **sections: Any) -> Job:
        folder.mkdir()
        settings = {
            "store": str(folder / "store"),
            "workload": "tests.support.guard_jobs:Troubled",
            "workload_options": options or {},
            "training": {
                "batch_size": 8,
                "max_steps": steps,
                "scheduler": {"type": "constant", "warmup_steps": 0},
                "evaluation_interval_steps": 1000,
                **sections.pop("training", {}),
            },
            "parallel": {"mode": "ddp"},
            "checkpoint": {"interval_steps": 4, "keep_last": 100},
            "cluster": {"nodes": 1, "processes_per_node": 2},
            **sections,
        }
        return cls(folder, settings)

    def run(self, **training: Any) -> GangOutcome:
        """Raises GangError as `run_gang` does. training: keys of that section, otherwise than at first."""
        settings = {**self.config, "training": {**self.config["training"], **training}}
        attempt = len(list(self.folder.glob("attempt-*")))
        spec = GangSpec(
            job="job",
            run="run",
            attempt=attempt,
            node=0,
            nodes=1,
            processes_per_node=2,
            main_address="127.0.0.1",
            config=RunConfig.model_validate(settings).model_dump(mode="json"),
            store_uri=settings["store"],
            prepared={"fingerprint": "points", "weight_unit": "points"},
            log_folder=str(self.folder / "logs"),
        )
        return LocalGang(spec, self.folder / f"attempt-{attempt}", self.folder / f"output-{attempt}.log").wait(90)

    @property
    def store(self) -> Store:
        return Store.open(self.config["store"]).sub(job_prefix("job"))

    def events(self, name: str) -> list[Event]:
        """Of the job and that name, by time."""
        return [event for event in read_events(self.store) if event.name == name]

    def losses(self) -> dict[int, float]:
        """By step, of the last time that it was taken."""
        return {event.step: event.data["loss"] for event in self.events("step") if event.rank == 0}
