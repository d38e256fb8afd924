"""An evaluation that all ranks leave together, between two batches, when they are told to leave.

A rank cannot leave by itself: others may stand in a collective that waits for it, of a sharded model or of the user's
own. And a collective in which they agreed would be out of place among the user's. So they agree beside all collectives,
through the gang's key-value store: a rank that was told to leave gives its vote before a forward pass and waits a
moment. With the last rank's vote all leave; a vote that is not answered in time is taken back for good, and the pass is
made. That is the case while somebody has not heard yet, or stands in a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from ebbflow.training.gang import Gang
from ebbflow.training.limits import Limits
from ebbflow.training.parallel import Spread
from ebbflow.training.workload import Workload, as_numbers

VOTE_SECONDS = 2.0
_LONGEST_VOTE_SECONDS = 30.0
_VOTES = 5  # in one evaluation: then it goes on to its end
_LOOK_SECONDS = 0.01
_LEAVE = "leave"


class _Left(BaseException):
    """No Exception, which the user's code might catch."""


class Evaluation:
    """One rank's, over all its evaluations. vote_seconds: that a vote waits for the others' at least; as long as the
    longest pass took where that is more, since ranks that are in no collective together look at different times."""

    def __init__(self, gang: Gang, limits: Limits, *, vote_seconds: float = VOTE_SECONDS) -> None:
        self._gang, self._limits, self._vote_seconds = gang, limits, vote_seconds
        self._evaluations = self._votes = 0
        self._pass_seconds, self._looked_at = 0.0, math.inf

    def run(self, workload: Workload[Any], spread: Spread) -> Mapping[str, float] | None:
        """The metrics, or None when all ranks were told to leave and have left it. Collective.

        Only passes of the whole model are looked between; an evaluation that makes none is as long as it is.
        """
        self._evaluations, self._votes = self._evaluations + 1, 0
        self._pass_seconds, self._looked_at = 0.0, math.inf
        with spread.evaluating() as model:
            # Before what a sharded model does at its root, which would have to be undone.
            look = model.register_forward_pre_hook(self._look, prepend=True)
            try:
                return as_numbers(workload.evaluate(model))
            except _Left:
                return None
            finally:
                look.remove()

    def _look(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._pass_seconds = max(self._pass_seconds, time.monotonic() - self._looked_at)
        if self._limits.asked_to_leave and self._agreed():
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
            return self._vote(dist.PrefixStore(f"evaluation-{self._evaluations}", store))
        except (dist.DistError, RuntimeError):  # rank 0 is gone, or the network: others have to tell of it
            self._votes = _VOTES
            return False

    def _vote(self, store: dist.Store) -> bool:
        """Whether all ranks leave. Of a ballot one word holds, the first: the last voter's, or a refusal."""
        ballot = store.add("ballots", 0)
        if store.add(f"votes-{ballot}", 1) == self._gang.world_size:
            return self._word(store, ballot, _LEAVE) == _LEAVE
        limit = time.monotonic() + max(self._vote_seconds, min(self._pass_seconds, _LONGEST_VOTE_SECONDS))
        while time.monotonic() < limit and not store.check([f"word-{ballot}"]):
            time.sleep(_LOOK_SECONDS)
        refusal = f"refused by rank {self._gang.rank}"
        word = self._word(store, ballot, refusal)
        if word == refusal:
            store.add("ballots", 1)
        return word == _LEAVE

    @staticmethod
    def _word(store: dist.Store, ballot: int, word: str) -> str:
        return store.compare_set(f"word-{ballot}", "", word).decode()
