"""Ours: a job of two generations, one commit of each, restored as a start does it and verified by
the command.
"""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

from benchmarks.training.mutations.contestant import STEPS, Answer, Outcome, model, same, tensors
from ebbflow.core.errors import InfraError
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import Checkpointer, open_generation, reachable_commits
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.reader import find_problem
from ebbflow.training.checkpoint.restore import restore_newest
from ebbflow.training.errors import TrainingError

_WORLD_SIZE = 2


class Commits:
    """named: `checkpoints verify` of the whole job says that something is bad, or names it."""

    @staticmethod
    def store(folder: Path) -> None:
        store = Store.open(str(folder))
        for attempt, step in enumerate(STEPS):
            gang = {
                "generation": open_generation(store, run="mutations", attempt=attempt),
                "world_size": _WORLD_SIZE,
            }
            with (
                Checkpointer(store.uri, rank=0, **gang) as first,
                Checkpointer(store.uri, rank=1, **gang) as second,
            ):
                for saver in (second, first):
                    saver.save(step, model(step), None, {"cursor": step})
                if first.wait() is None or second.wait() is None:
                    raise RuntimeError(f"step {step} was not committed")

    def __init__(self, folder: Path) -> None:
        self._store = Store.open(str(folder))
        self._stored = {step: tensors(step) for step in STEPS}

    def ask(self) -> Answer:
        said = io.StringIO()
        with redirect_stderr(said):
            outcome = self._restore(said)
        with redirect_stdout(said), redirect_stderr(said):
            named = self._verify()
        return Answer(outcome, named, said.getvalue())

    def _restore(self, said: io.StringIO) -> Outcome:
        fresh = model(0)
        try:
            candidates = [commit.key for commit in reachable_commits(self._store)]
            restored = restore_newest(
                self._store,
                candidates,
                fresh,
                None,
                0,
                1,
                read_again=partial(find_problem, self._store),
            )
        except (TrainingError, InfraError) as error:
            said.write(f"{error}\n")
            return Outcome.REFUSED
        if restored is None:
            return Outcome.WRONG  # a start from nothing, though there are commits
        if restored.extra != {"cursor": restored.step} or not same(
            dict(fresh.named_parameters()), self._stored[restored.step]
        ):
            return Outcome.WRONG
        if restored.step == STEPS[-1]:
            return Outcome.SAME
        if restored.rejected:
            return Outcome.FELL_BACK
        return Outcome.UNTOLD

    def _verify(self) -> bool:
        out = io.StringIO()
        with redirect_stdout(out):
            code = checkpoints(["verify", self._store.uri, "--json"])
        print(out.getvalue())
        return code == 1 or any(row["problems"] for row in json.loads(out.getvalue()))
