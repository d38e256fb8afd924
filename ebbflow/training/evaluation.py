"""Evaluate the model on all ranks, which can end an evaluation early, but only all together.

After a drain request, all ranks leave a running evaluation together. A rank must not leave alone,
because other ranks may wait for it in a collective. The ranks cannot use a collective to agree
either, because it would mix with the collectives of the user's code. So a rank with a drain request
votes through the gang's key-value store before its next forward pass, and waits for the votes of
the other ranks. If not all ranks vote in time, the evaluation continues.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ebbflow.training.compat import PrefixStore, Store
from ebbflow.training.engine.parallel import Spread
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Limits
from ebbflow.training.workload import Workload, as_numbers

VOTE_SECONDS = 2.0
_LONGEST_VOTE_SECONDS = 30.0
_VOTES = 5  # votes per evaluation; after them it runs to its end
_LOOK_SECONDS = 0.01
_LEAVE = "leave"


class Evaluation:
    """Runner of this rank's part of each evaluation.

    The ranks can vote to end an evaluation early, all together.

    A rank waits for the other ranks' votes for `vote_seconds`, or for as long as the longest
    forward pass took if that is longer.
    """

    def __init__(self, gang: Gang, limits: Limits, *, vote_seconds: float = VOTE_SECONDS) -> None:
        self._gang = gang
        self._limits = limits
        self._vote_seconds = vote_seconds
        self._evaluations = 0
        self._votes = 0
        self._pass_seconds = 0.0
        self._looked_at = math.inf

    def run(self, workload: Workload[Any], spread: Spread) -> Mapping[str, float] | None:
        """Evaluate.

        Return the metrics by name, or None if all ranks left the evaluation early to drain.
        Collective.
        """
        self._evaluations = self._evaluations + 1
        self._votes = 0
        self._pass_seconds = 0.0
        self._looked_at = math.inf
        with spread.evaluating() as model:
            # Run this hook before a sharded model's own, whose effects would have to be undone.
            look = model.register_forward_pre_hook(self._look, prepend=True)
            try:
                return as_numbers(workload.evaluate(model))
            except _Left:
                return None
            finally:
                look.remove()

    def _look(self, *_: object) -> None:
        self._pass_seconds = max(self._pass_seconds, time.monotonic() - self._looked_at)
        if self._limits.drain_requested and self._agreed():
            raise _Left
        self._looked_at = time.monotonic()

    def _agreed(self) -> bool:
        if self._gang.alone:
            return True
        store = self._gang.store
        if store is None or self._votes >= _VOTES:
            return False
        self._votes += 1
        try:
            return self._vote(PrefixStore(f"evaluation-{self._evaluations}", store))
        except (dist.DistError, RuntimeError):
            # Rank 0 or the network is gone, which is reported elsewhere
            self._votes = _VOTES
            return False

    def _vote(self, store: Store) -> bool:
        """Vote for leaving the evaluation, and return whether all ranks leave.

        Ballots are numbered. The first value written to the key `word-<ballot>` decides the ballot:
        the last rank to vote writes "leave", and a rank that has waited too long writes a refusal.
        """
        ballot = store.add("ballots", 0)
        if store.add(f"votes-{ballot}", 1) == self._gang.world_size:
            return store.compare_set(f"word-{ballot}", "", _LEAVE).decode() == _LEAVE
        limit = time.monotonic() + max(
            self._vote_seconds, min(self._pass_seconds, _LONGEST_VOTE_SECONDS)
        )
        while time.monotonic() < limit and not store.check([f"word-{ballot}"]):
            time.sleep(_LOOK_SECONDS)
        refusal = f"refused by rank {self._gang.rank}"
        word = store.compare_set(f"word-{ballot}", "", refusal).decode()
        if word == refusal:
            store.add("ballots", 1)
        return word == _LEAVE


class _Left(BaseException):
    """Raised to end an evaluation early.

    It is not a subclass of `Exception`, which the user's code might catch.
    """
