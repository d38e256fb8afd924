"""The runner of symptoms that are made for real; `tests.support.injected` has them.

`python -m tests.support.injections NAME SEED FOLDER RANK` is one rank; `inject` runs all ranks of
one symptom and returns what they wrote. The faulty rank and the step are drawn from the seed.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.support.gangs import free_port
from tests.support.warm import start_warm


@dataclass(frozen=True)
class Injection:
    """How a symptom is made.

    gone: ranks that are never started. answers: other ids that name the failure as well. alike: all
    ranks have the trouble, so there is no faulty one.
    """

    symptom: str
    run: Callable[[Injected], Any]
    ranks: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    answers: tuple[str, ...] = ()
    alike: bool = False


@dataclass
class Injected:
    """What a symptom's code may use: its rank, the faulty rank and step, and a folder."""

    rank: int
    guilty: int
    step: int
    folder: Path
    seed: int

    def connect(self, seconds: float = 4.0) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))

    @property
    def is_guilty(self) -> bool:
        return self.rank == self.guilty

    def steps(self, model: nn.Module | None = None) -> Any:
        """Yield step numbers around real steps of a small model, with printed losses."""
        model = model or nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(self.step + 4):
            yield step
            loss = model(torch.randn(8, 4)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if self.rank == 0 and step < 3:
                print(f"step {step} loss {loss.item():.4f} lr 0.01", flush=True)


INJECTIONS: dict[str, Injection] = {}


def injects(
    symptom: str, **options: Any
) -> Callable[[Callable[[Injected], Any]], Callable[[Injected], Any]]:
    def register(function: Callable[[Injected], Any]) -> Callable[[Injected], Any]:
        INJECTIONS[function.__name__] = Injection(symptom, function, **options)
        return function

    return register


def inject(
    name: str, folder: Path, seed: int = 0, *, seconds: float = 60
) -> tuple[list[Path], int, float]:
    """Run all ranks of an injection.

    Returns their logs, the faulty rank, and the seconds to the first failure.
    """
    made = INJECTIONS[name]
    port = free_port()
    environment = dict(
        os.environ,
        WORLD_SIZE=str(made.ranks),
        LOCAL_WORLD_SIZE=str(made.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    environment.update(made.environment)
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank-{rank}.log" for rank in range(made.ranks) if rank not in made.gone]
    started = time.monotonic()
    processes = []
    for rank in range(made.ranks):
        if rank not in made.gone:
            if environment.get("RANK") == "none":
                own = environment
            else:
                own = environment | {"RANK": str(rank)}
            words = [name, str(seed), str(folder), str(rank)]
            log = folder / f"rank-{rank}.log"
            own = {key: value for key, value in own.items() if value != "none"} | {
                "LOCAL_RANK": str(rank)
            }
            processes.append(
                start_warm("tests.support.injections", words, environment=own, output=log)
            )
    first = 0.0
    try:
        while (
            any(process.poll() is None for process in processes)
            and time.monotonic() < started + seconds
        ):
            if not first and any(process.poll() not in (None, 0) for process in processes):
                first = time.monotonic() - started
            time.sleep(0.02)
    finally:
        for process in processes:
            process.kill()
    return logs, faulty_rank(name, seed), first or time.monotonic() - started


def faulty_rank(name: str, seed: int) -> int:
    return random.Random(f"{name} {seed}").randrange(INJECTIONS[name].ranks)


def run_rank(name: str, seed: int, folder: Path, rank: int) -> None:
    step = random.Random(f"{name} {seed} step").randrange(1, 6)
    INJECTIONS[name].run(Injected(rank, faulty_rank(name, seed), step, folder, seed))


if __name__ == "__main__":
    from tests.support import injected

    injected.run_rank(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
