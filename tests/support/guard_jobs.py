"""Jobs in which numbers, weights or memory go wrong at samples of one's choosing, run by an agent
as any job is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import Event, read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.messages import GangOutcome, GangSpec
from ebbflow.training.limits import LoopResult
from ebbflow.training.workload import Cursor, Loss
from tests.support.alone import run_alone
from tests.support.workload_cases import Points, Sound


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 1)
        self.branch = nn.Linear(4, 1)

    def forward(self, x: Tensor, *, branch: bool) -> Tensor:
        if branch:
            return self.trunk(x) + self.branch(x)
        return self.trunk(x)


class OneSided(Sound):
    """On rank 1, the model's branch is left out from the sample `unused_from` on."""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return Branching()

    def units(self, model: Any) -> list[nn.Module]:
        return [model.trunk, model.branch]

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        self.branch = self.context.rank != 1 or cursor.first < self.context.options["unused_from"]
        return super().next_batch(model, cursor)

    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        return (model(batch.x, branch=self.branch)[:, 0] - batch.x.sum(dim=1)).square()


class Troubled(Sound):
    """Options: losses of samples from bad_first to before bad_end are multiplied by bad_factor (a
    text, as "nan"), and those from late_first to before late_end by late_factor. largest: samples
    that fit into memory. strange_rank, strange_sample: there a weight of that rank changes, once,
    which the file strange_once remembers. leak_mib: kept of every step."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        nothing = {
            "bad_first": -1,
            "late_first": -1,
            "largest": 10**9,
            "strange_rank": -1,
            "leak_mib": 0,
        }
        self.options = {**nothing, **context.options}
        self.leaked: list[bytes] = []

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        options = self.options
        strange = (
            self.context.rank == options["strange_rank"]
            and cursor.first == options["strange_sample"]
        )
        if strange and not Path(options["strange_once"]).exists():
            Path(options["strange_once"]).touch()
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1e-6
        self.leaked.append(b"x" * (2**20 * options["leak_mib"]))
        self.factor = 1.0
        for kind in ("bad", "late"):
            if 0 <= options[f"{kind}_first"] <= cursor.first < options[f"{kind}_end"]:
                self.factor = float(options[f"{kind}_factor"])
        return super().next_batch(model, cursor)

    def loss(self, model: nn.Module, batch: Points) -> Loss:
        if len(batch.x) > self.options["largest"]:
            raise torch.OutOfMemoryError(
                f"planted: {len(batch.x)} samples, {self.options['largest']} fit"
            )
        loss = super().loss(model, batch)
        return Loss(loss.sum * self.factor, loss.weight)


@dataclass
class Job:
    """One job, started as often as `run` or `run_alone` is called, by an agent with two ranks, or
    in this process.
    """

    folder: Path
    config: dict[str, Any]
    terms: Terms | None = None  # of GangSpec

    @classmethod
    def make(
        cls,
        folder: Path,
        *,
        steps: int = 12,
        options: dict[str, Any] | None = None,
        workload: str = "Troubled",
        **sections: Any,
    ) -> Job:
        folder.mkdir()
        training = {
            "batch_size": 8,
            "max_steps": steps,
            "scheduler": {"type": "constant", "warmup_steps": 0},
            "evaluation_interval_steps": 1000,
        }
        settings = {
            "store": str(folder / "store"),
            "workload": workload if ":" in workload else f"tests.support.guard_jobs:{workload}",
            "workload_options": options or {},
            "training": training | sections.pop("training", {}),
            "parallel": {"mode": "ddp"},
            "checkpoint": {"interval_steps": 4, "keep_last": 100},
            "cluster": {"nodes": 1, "processes_per_node": 2},
            **sections,
        }
        return cls(folder, settings)

    def run_alone(self, **training: Any) -> LoopResult:
        """training: keys of that section, otherwise than at first. Raises what a rank raises."""
        return run_alone(self._config(training), "job")

    def run(self, **training: Any) -> GangOutcome:
        """As `run_alone`, but raises GangError as `run_gang` does."""
        attempt = len(list(self.folder.glob("attempt-*")))
        spec = GangSpec(
            job="job",
            run="run",
            attempt=attempt,
            node=0,
            nodes=1,
            processes_per_node=2,
            main_address="127.0.0.1",
            config=self._config(training),
            store_uri=self.config["store"],
            prepared={"fingerprint": "points", "weight_unit": "points"},
            terms=self.terms,
            log_folder=str(self.folder / "logs"),
        )
        return LocalGang(
            spec, self.folder / f"attempt-{attempt}", self.folder / f"output-{attempt}.log"
        ).wait(240)

    def _config(self, training: dict[str, Any]) -> RunConfig:
        return RunConfig.model_validate(
            {**self.config, "training": {**self.config["training"], **training}}
        )

    @property
    def store(self) -> Store:
        return Store.open(self.config["store"]).sub(job_prefix("job"))

    def events(self, name: str) -> list[Event]:
        """Of the job and that name, by time."""
        return [event for event in read_events(self.store) if event.name == name]

    def losses(self) -> dict[int, float]:
        """By step, of the last time that it was taken."""
        return {event.step: event.data["loss"] for event in self.events("step") if event.rank == 0}
