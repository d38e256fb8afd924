"""`ebbflow soak schedules`: many seeds, on two processes for each core, or one alone."""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.soak.schedules.plan import Schedule, draw
from benchmarks.soak.schedules.summary import Outcome, text
from benchmarks.soak.server import FailingS3
from ebbflow.core.process import die_with_parent

_LOT = 5  # seeds that a worker takes at once: as few as the start of their server allows


def play(schedule: Schedule, folder: Path, server: FailingS3) -> Outcome:
    """In a folder of its own in `folder`. The calling process must have one thread, have called
    `preload`, and must not have opened a store."""
    from benchmarks.soak.schedules.director import Director
    from benchmarks.soak.schedules.stage import Stage

    outcome = Outcome(schedule.seed, schedule.storm, schedule.store)
    began = time.monotonic()
    place = folder / f"seed-{schedule.seed}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    stage = Stage(schedule, place, server)
    try:
        director = Director(schedule, stage)
        outcome.problems = director.play()
        told = stage.told()
        outcome.tally = director.tally
        requests = sum(told["requests"].values())
        outcome.faults = told["met"]
        outcome.requests = requests
    except Exception as error:  # in the play, not in what is played: the other seeds go on
        outcome.problems = [f"the play itself: {error!r}"]
    finally:
        stage.close()
    outcome.seconds = time.monotonic() - began
    if outcome.problems:
        outcome.log = str(stage.log)
    else:
        outcome.log = None
    return outcome


def play_seeds(seeds: list[int], folder: str) -> list[Outcome]:
    """In a process of its own: one server for all of these seeds, one after the other."""
    die_with_parent(os.getppid())
    preload()
    server = FailingS3()
    try:
        outcomes = []
        for seed in seeds:
            outcome = play(draw(seed), Path(folder), server)
            outcomes.append(outcome)
            if not outcome.problems:
                shutil.rmtree(Path(folder) / f"seed-{seed}", ignore_errors=True)
            for problem in outcome.problems:
                print(f"seed {seed}: {problem}", flush=True)
        return outcomes
    finally:
        server.close()


def preload() -> None:
    """What all ranks import, once: what is forked from here has it. dynamo costs each of them 0.6 s
    otherwise.
    """
    import torch
    import torch._dynamo

    from benchmarks.soak.schedules import director  # noqa: F401

    torch.set_num_threads(1)  # before any is made: what is forked from here must not miss them
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page of this


def play_all(seeds: list[int], folder: str, workers: int) -> list[Outcome]:
    """All seeds, in small lots, so that no worker waits for another's last one."""
    lots = [seeds[start : start + _LOT] for start in range(0, len(seeds), _LOT)]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        found = pool.map(play_seeds, lots, [folder] * len(lots))
        outcomes: list[Outcome] = []
        for lot in found:
            outcomes += lot
            failed = sum(bool(outcome.problems) for outcome in outcomes)
            print(f"{len(outcomes)} of {len(seeds)} schedules, {failed} failed", flush=True)
    return outcomes


def main(arguments: list[str]) -> int:
    """0 when everything held in every schedule."""
    parser = argparse.ArgumentParser(
        prog="ebbflow soak schedules", description=" ".join(__doc__.split("\n\n")[0].split())
    )
    parser.add_argument("--count", type=int, default=1000, help="how many seeds (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--seed", type=int, help="play this one alone, and keep what it leaves")
    parser.add_argument("--workers", type=int, default=_workers(), help="default: two per core")
    parser.add_argument("--folder", help="for stores and logs (default: a temporary one)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the outcomes there as well"
    )
    given = parser.parse_args(arguments)
    folder = given.folder or tempfile.mkdtemp(prefix="ebbflow-schedules-")
    if given.seed is not None:
        seeds = [given.seed]
    else:
        seeds = list(range(given.first, given.first + given.count))
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
        print(
            f"again alone: ebbflow soak schedules --seed {outcome.seed}    (output: {outcome.log})"
        )
    if failed:
        return 1
    return 0


def _workers() -> int:
    """Schedules mostly wait: for victims, deadlines and a store that stalls."""
    return 2 * (os.cpu_count() or 1)


def describe(seed: int) -> dict[str, Any]:
    """The schedule as JSON."""
    from dataclasses import asdict

    return asdict(draw(seed))
