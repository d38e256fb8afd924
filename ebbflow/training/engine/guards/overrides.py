"""Overrides: changes of settings that a guard orders for later starts of the job.

This module does not import torch.

Each override is a small record in the job's store, which is durable before the gang ends and never
changes. Every later start reads all records, even on another launcher or after a start that made no
commit.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ebbflow.core.events import GuardAction
from ebbflow.core.layout import override_key
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import lineage
from ebbflow.training.checkpoint.verified_io import fetch_verified
from ebbflow.training.errors import CorruptOverride

_EVERY_RECORD = {"action", "generation"}


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """Settings that replace configured settings, because guards of earlier starts ordered the
    change.
    """

    # Micro-batches per step; None for the configured number
    gradient_accumulation_steps: int | None = None
    # The first sample that may still be read; a start from an earlier position skips to it
    first_sample: int = 0
    rewinds: int = 0  # the number of the job's rewinds because of bad losses or gradients

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the overrides in `data`, ignoring unknown keys."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


def record_split(job_store: Store, *, generation: int, rank: int, accumulation: int) -> None:
    """Record that all later starts split a step into `accumulation` micro-batches.

    Raises StoreError.
    """
    _put(job_store, GuardAction.SPLIT, generation, rank, accumulation=accumulation)


def record_rewind(
    job_store: Store, *, generation: int, rank: int, limit: int, first_sample: int, sound: bool
) -> None:
    """Record that the next start must restore a commit up to step `limit` and skip samples before
    `first_sample`.

    `sound` says whether the weights in commits after `limit` are correct. If so, such a commit may
    be restored when there is no commit up to `limit`. If not, these commits are never used again.
    """
    order = {"limit": limit, "first_sample": first_sample, "sound": int(sound)}
    _put(job_store, GuardAction.REWIND, generation, rank, **order)


def read_overrides(job_store: Store) -> Overrides:
    """Return the overrides for the job's next start.

    Raises StoreError, or CorruptOverride for an unreadable record.
    """
    records = _records(job_store)
    splits = [record["accumulation"] for record in records if record["action"] == GuardAction.SPLIT]
    rewinds = [record for record in records if record["action"] == GuardAction.REWIND]
    return Overrides(
        gradient_accumulation_steps=max(splits, default=None),
        first_sample=max((record["first_sample"] for record in rewinds), default=0),
        rewinds=sum(record["first_sample"] > 0 for record in rewinds),
    )


def rewind_parent(job_store: Store) -> str | None:
    """Return the key of the commit that the next generation must restore because of a rewind; None
    without a rewind.

    Call this before the next generation is opened: a rewind applies only to the first generation
    after it.

    The result is the newest readable commit up to the rewind's limit. If there is no such commit,
    the result depends on whether the rewind's record says that later commits are sound. If they
    are, it is the oldest readable commit after the limit. If not, it is `NO_PARENT`, and training
    starts from scratch.
    """
    rewinds = [record for record in _records(job_store) if record["action"] == GuardAction.REWIND]
    newest = max(rewinds, key=lambda record: record["generation"], default=None)
    if (
        newest is None
        or lineage.newest_generation_number(job_store, near=newest["generation"])
        > newest["generation"]
    ):
        return None  # a start has followed the rewind already
    commits = lineage.reachable_commits(job_store)
    above = [commit for commit in commits if commit.step > newest["limit"]]
    below = [commit for commit in commits if commit.step <= newest["limit"]]
    if newest["sound"]:
        later = list(reversed(above))
    else:
        later = []
    for commit in below + later:
        if lineage.is_readable_commit(job_store, commit):
            return commit.key
    if above and not newest["sound"]:
        return lineage.NO_PARENT
    return None


def _put(job_store: Store, action: GuardAction, generation: int, rank: int, **order: int) -> None:
    record = {"action": str(action), "generation": generation, "rank": rank, **order}
    name = "-".join(map(str, (action, *order.values())))
    job_store.put(override_key(generation, rank, name), json.dumps(record, sort_keys=True).encode())


def _records(job_store: Store) -> list[dict[str, Any]]:
    def parse(data: bytes, what: str) -> dict[str, Any]:
        try:
            record = json.loads(data)
        except ValueError:
            record = None
        if not isinstance(record, dict) or _EVERY_RECORD - record.keys():
            fix = "put it back as it was, or delete it, and what it ordered is not done"
            raise CorruptOverride(
                f"{what}: is no record of what a guard ordered ({len(data)} bytes); fix: {fix}"
            )
        return record

    keys = [meta.key for meta in job_store.list("overrides")]
    return [fetch_verified(job_store, key, parse, f"{job_store.uri}/{key}") for key in keys]
