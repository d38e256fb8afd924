"""Play schedules: one in this process, or many in processes of their own."""

from __future__ import annotations

import gc
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from ebbflow.core.process import die_with_parent
from tests.support.s3.fixture import FailingServer, run_failing_s3
from tests.support.schedules.plan import Schedule, draw
from tests.support.schedules.runner import ScheduleRunner
from tests.support.schedules.store import ScheduleStore

_LOT = 5  # seeds of one worker's server: as few as the server's start allows


@dataclass
class Outcome:
    """What happened in one schedule.

    Attributes:
        problems: What did not hold, one line each.
        tally: How often things happened, such as kills and restores.
        faults: How often the store failed, by kind of fault.
        folder: The output of the schedule's processes, and its store if it is a folder.
    """

    seed: int
    folder: Path
    problems: list[str] = field(default_factory=list)
    tally: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)


def add_up(counts: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return total


def list_problems(outcomes: list[Outcome]) -> list[str]:
    """List what did not hold, with the seed and the folder that has the output."""
    lines = []
    for outcome in outcomes:
        for problem in outcome.problems:
            lines.append(f"seed {outcome.seed} ({outcome.folder}): {problem}")
    return lines


def preload() -> None:
    """Prepare this process for forks. It must not have used torch or a store before."""
    import torch._dynamo  # a forked rank would need 0.6 s for this import

    torch.set_num_threads(1)  # a forked child would miss the threads
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of this process


def play(schedule: Schedule, folder: Path, server: FailingServer) -> Outcome:
    """Play a schedule in a new folder inside `folder`.

    The calling process must have one thread, have called `preload`, and never have opened a store.
    """
    place = folder / f"seed-{schedule.seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    outcome = Outcome(schedule.seed, place)
    store = ScheduleStore(schedule, place, server)
    runner = ScheduleRunner(schedule, place, store)
    try:
        outcome.problems = runner.run()
        outcome.tally = dict(runner.tally)
        outcome.faults = store.told()["met"]
    except Exception as error:  # of the runner, not of what it runs: the other seeds go on
        outcome.problems = [f"the schedule was not judged: {error!r}"]
    finally:
        store.close()
    return outcome


def play_seeds(seeds: list[int], folder: Path) -> list[Outcome]:
    """Play seeds one after the other, on one server, in a process that does nothing else."""
    die_with_parent(os.getppid())
    preload()
    outcomes = []
    with run_failing_s3() as server:
        for seed in seeds:
            outcome = play(draw(seed), folder, server)
            outcomes.append(outcome)
            if not outcome.problems:
                shutil.rmtree(outcome.folder, ignore_errors=True)
    return outcomes


def play_all(seeds: list[int], folder: Path, workers: int) -> list[Outcome]:
    """Play all seeds in small lots, so that no worker waits long for the last lot of another."""
    lots = [seeds[start : start + _LOT] for start in range(0, len(seeds), _LOT)]
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for lot in pool.map(play_seeds, lots, [folder] * len(lots)):
            outcomes += lot
            failed = sum(bool(outcome.problems) for outcome in outcomes)
            print(f"{len(outcomes)} of {len(seeds)} schedules, {failed} failed", flush=True)
    return outcomes
