"""`python -m training soak schedules`: many seeds, on as many processes as there are cores, or one alone."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from training.soak.schedules.plan import draw
from training.soak.server import FailingS3


@dataclass
class Outcome:
    """Of one seed. problems: what did not hold. log: where its processes' output lies, when it failed."""

    seed: int
    storm: str
    store: str
    seconds: float
    problems: list[str]
    tally: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    log: str | None = None


def play_seed(seed: int, folder: Path, server: FailingS3) -> Outcome:
    """Play one schedule in `folder`. The calling process must have one thread and must not have opened a store."""
    from training.soak.schedules.director import Director
    from training.soak.schedules.stage import Stage

    began = time.monotonic()
    schedule = draw(seed)
    place = folder / f"seed-{seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    stage = Stage(schedule, place, server)
    try:
        director = Director(schedule, stage)
        problems = director.play()
        told = stage.told()
    finally:
        stage.close()
    return Outcome(
        seed=seed,
        storm=schedule.storm,
        store=schedule.store,
        seconds=time.monotonic() - began,
        problems=problems,
        tally=director.tally,
        faults=told["met"],
        requests=sum(told["requests"].values()),
        log=str(stage.log) if problems else None,
    )


def play_seeds(seeds: list[int], folder: str) -> list[Outcome]:
    """In a process of its own: one server for all of these seeds, one after the other."""
    import torch

    torch.set_num_threads(1)  # before any is made: what is forked from here must not miss them
    server = FailingS3()
    try:
        outcomes = []
        for seed in seeds:
            outcome = play_seed(seed, Path(folder), server)
            outcomes.append(outcome)
            if not outcome.problems:
                shutil.rmtree(Path(folder) / f"seed-{seed}", ignore_errors=True)
            for problem in outcome.problems:
                print(f"seed {seed}: {problem}", flush=True)
        return outcomes
    finally:
        server.close()


def play_all(seeds: list[int], folder: str, workers: int) -> list[Outcome]:
    """All seeds, in small lots, so that no worker waits for another's last one."""
    lots = [seeds[start : start + 10] for start in range(0, len(seeds), 10)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=10) as pool:
        found = pool.map(play_seeds, lots, [folder] * len(lots))
        outcomes: list[Outcome] = []
        for lot in found:
            outcomes += lot
            failed = sum(bool(outcome.problems) for outcome in outcomes)
            print(f"{len(outcomes)} of {len(seeds)} schedules, {failed} failed", flush=True)
    return outcomes


def main(arguments: list[str]) -> int:
    """0 when everything held in every schedule."""
    parser = argparse.ArgumentParser(prog="python -m training soak schedules", description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--seed", type=int, help="play this one alone, and keep what it leaves")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="default: one per core")
    parser.add_argument("--folder", help="for stores and logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there as well")
    given = parser.parse_args(arguments)
    folder = given.folder or tempfile.mkdtemp(prefix="ebbflow-schedules-")
    seeds = [given.seed] if given.seed is not None else list(range(given.first, given.first + given.count))
    if given.seed is not None:
        print(json.dumps(describe(given.seed), indent=2))
    began = time.monotonic()
    outcomes = play_all(seeds, folder, min(given.workers, len(seeds)))
    print(text(outcomes, time.monotonic() - began))
    failed = [outcome for outcome in outcomes if outcome.problems]
    if given.json:
        given.json.write_text(json.dumps([outcome.__dict__ for outcome in outcomes], indent=2))
    if not failed and given.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    for outcome in failed:
        print(f"again alone: python -m training soak schedules --seed {outcome.seed}    (output: {outcome.log})")
    return 1 if failed else 0


def describe(seed: int) -> dict[str, Any]:
    """The schedule as JSON."""
    from dataclasses import asdict

    return asdict(draw(seed))


def text(outcomes: list[Outcome], seconds: float) -> str:
    """What the schedules went through, added up."""
    tally: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for outcome in outcomes:
        tally.update(outcome.tally)
        faults.update(outcome.faults)
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    requests = sum(outcome.requests for outcome in outcomes)
    lines = [
        f"{len(outcomes)} schedules in {seconds:.0f} s, {failed} failed; {requests:,} requests to the failing store",
        "went through: " + ", ".join(f"{count} {name}" for name, count in sorted(tally.items())),
        "faults met: " + (", ".join(f"{count} {name}" for name, count in sorted(faults.items())) or "none"),
    ]
    return "\n".join(lines)
