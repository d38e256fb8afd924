"""Trials: each makes one change, asks, undoes it, and is counted.

Any of them can be repeated alone by its number.
"""

from __future__ import annotations

import random
import resource
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from benchmarks.training.mutations.asking import Asked, store
from benchmarks.training.mutations.changes import Parts, changed, kinds
from benchmarks.training.mutations.places import parts_of
from ebbflow.training.errors import CheckpointError

NAMES = ("commits", "dcp")
_EXAMPLES = 20  # trials that are named one by one
_KIB = 1024  # ru_maxrss


@dataclass(frozen=True, kw_only=True)
class Trial:
    """outcome: an `Outcome`, as text. named: the change was named by the command that verifies.
    told: what it said.
    """

    number: int
    kind: str
    change: str
    outcome: str
    named: bool
    told: str
    resident_bytes: int


@dataclass
class Tally:
    """Counts alone, however many trials. crashes: causes. examples: trials that nobody was told of,
    or that crashed.
    """

    by_kind: dict[str, Counter[str]]
    crashes: Counter[str] = field(default_factory=Counter)
    examples: list[Trial] = field(default_factory=list)
    trials: int = 0
    resident_bytes: int = 0  # the most of any process that was asked, after an answer

    def add(self, trial: Trial) -> None:
        self.trials += 1
        tally = self.by_kind[trial.kind]
        tally.update(["changes", trial.outcome, *(["named"] if trial.named else [])])
        if trial.outcome == "same bits" and not trial.named:
            tally["unnamed"] += 1
        if trial.outcome == "crashed":
            self.crashes[_cause(trial.told)] += 1
        if trial.outcome in ("crashed", "wrong") and len(self.examples) < _EXAMPLES:
            self.examples.append(trial)
        self.resident_bytes = max(self.resident_bytes, trial.resident_bytes)

    def count(self, what: str) -> int:
        return sum(tally[what] for tally in self.by_kind.values())


class Bench:
    """One contestant: its checkpoints in `made`, unless they are there already, and copied to
    `work` for each process that is asked."""

    def __init__(self, name: str, made: Path, work: Path, seed: int) -> None:
        self._name = name
        self._made = made
        self._work_folder = work
        self._seed = seed
        if not made.exists():
            store(name, made)
        self._kinds = kinds(parts_of(name, made))

    def one(self, number: int) -> Trial:
        with self._asked(0) as (asked, parts):
            return self._trial(number, asked, parts)

    def all(self, count: int, processes: int, *, every_seconds: float) -> Tally:
        """Trials 0 to `count` - 1, by so many processes at once; a line of progress each
        `every_seconds`.

        Raises CheckpointError when what is not changed is not sound, before or after: the figures
        are void.
        """
        tally = Tally({kind: Counter() for kind in self._kinds})
        done: SimpleQueue[Trial] = SimpleQueue()
        began = told = time.monotonic()
        with ThreadPoolExecutor(processes, thread_name_prefix=self._name) as pool:
            workers = [
                pool.submit(self._work, range(w, count, processes), w, done)
                for w in range(processes)
            ]
            while tally.trials < count:
                try:
                    tally.add(done.get(timeout=1.0))
                except Empty:
                    if any(worker.done() and worker.exception() is not None for worker in workers):
                        break
                if time.monotonic() - told >= every_seconds:
                    told = time.monotonic()
                    print(_progress(self._name, tally, count, told - began), flush=True)
            for worker in workers:
                worker.result()
        print(_progress(self._name, tally, count, time.monotonic() - began), flush=True)
        return tally

    def _work(self, numbers: range, place: int, done: SimpleQueue[Trial]) -> None:
        with self._asked(place) as (asked, parts):
            for number in numbers:
                done.put(self._trial(number, asked, parts))

    @contextmanager
    def _asked(self, place: int) -> Iterator[tuple[Asked, Parts]]:
        """A process with a copy of its own, which is found sound before and after."""
        folder = self._work_folder / str(place)
        shutil.copytree(self._made, folder)
        with Asked(self._name, folder) as asked:
            _expect_sound(asked, self._name)
            yield asked, parts_of(self._name, folder)
            _expect_sound(asked, self._name)
        shutil.rmtree(folder)

    def _trial(self, number: int, asked: Asked, parts: Parts) -> Trial:
        kind = self._kinds[number % len(self._kinds)]
        chance = random.Random(f"{self._seed}/{self._name}/{number}")
        asked.warm()
        with changed(parts, kind, chance) as change:
            return Trial(number=number, kind=kind, change=change, **asked.ask())


def _expect_sound(asked: Asked, name: str) -> None:
    asked.warm()
    answer = asked.ask()
    if answer["outcome"] != "same bits" or answer["named"]:
        raise CheckpointError(
            f"{name}: what is not changed is {answer['outcome']}: void\n{answer['told']}"
        )


def _cause(told: str) -> str:
    first = told.partition("\n")[0]
    if first.startswith(("killed", "no answer", "ended", "closed")):
        return first
    return "out of memory"


def _progress(name: str, tally: Tally, count: int, seconds: float) -> str:
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
    return (
        f"{name}: {tally.trials:,} of {count:,} in {seconds:.0f} s, {tally.count('wrong'):,} "
        f"wrong, {tally.count('crashed'):,} crashed, memory {tally.resident_bytes / 1e6:.0f} MB "
        f"asked, {own / 1e6:.0f} MB here"
    )


def as_json(tally: Tally) -> dict[str, Any]:
    """Everything that was counted."""
    examples = [
        {"number": t.number, "change": t.change, "outcome": t.outcome} for t in tally.examples
    ]
    return {
        "by_kind": {kind: dict(counts) for kind, counts in tally.by_kind.items()},
        "crashes": dict(tally.crashes),
        "examples": examples,
        "most_resident_bytes": tally.resident_bytes,
    }
