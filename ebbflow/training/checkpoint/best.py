"""The best commit of a job: the one whose own evaluation has the best metric."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.store import Store
from ebbflow.training.checkpoint.lineage import TracedCommit
from ebbflow.training.checkpoint.reader import read_manifest
from ebbflow.training.checkpoint.retention import metric_at_step
from ebbflow.training.errors import CheckpointError

BEST = "best"  # the name of the best commit on the command line


@dataclass(frozen=True, kw_only=True)
class BestRule:
    """The metric that decides which commit is the best, and whether the highest value wins."""

    metric: str = "held_out_loss"
    highest: bool = False

    @classmethod
    def of_job(cls, store: Store) -> Self:
        """Return the rule in the job's configuration; by default, the lowest held-out loss is the
        best.
        """
        try:
            chosen = json.loads(store.get("config.json"))["config"]["checkpoint"]["keep_best"]
            return cls(metric=chosen["metric"] or cls.metric, highest=chosen["mode"] == "max")
        except (ObjectNotFound, ValueError, KeyError, TypeError):
            return cls()

    def choose(self, values: dict[str, float]) -> str | None:
        """Return the key of the best value, or None if there are no values.

        Of several equal values, the first counts.
        """
        if not values:
            return None
        pick = max if self.highest else min
        return pick(values, key=lambda key: values[key])


def find_best(store: Store, traced: Iterable[TracedCommit]) -> TracedCommit:
    """Return the reachable commit with the best metric; if several are equal, the newest of them.

    Raises CheckpointError if no reachable commit was evaluated.
    """
    rule = BestRule.of_job(store)
    reachable = {commit.ref.key: commit for commit in traced if commit.unreachable_because is None}
    values: dict[str, float] = {}
    for key, commit in reachable.items():
        extra = read_manifest(store, key).common.get("extra") or {}
        value = metric_at_step(extra, commit.ref.step, rule.metric)
        if value is not None:
            values[key] = value
    best = rule.choose(values)
    if best is None:
        raise CheckpointError(
            f"{store.uri}: none of {len(reachable)} commits has the metric {rule.metric}; hint: a "
            "commit has the metrics of an evaluation at its own step: make "
            "training.evaluation_interval_steps a multiple of checkpoint.interval_steps"
        )
    return reachable[best]
