"""What guards leave behind for the next start of the gang: small records in the job's store. Torch-free.

A record is durable before its gang ends, and is never changed. So it holds over attempts, over launchers and over a
start that died before its first commit: every later start of the job reckons the same from the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ebbflow.infra.events import GuardAction
from ebbflow.infra.layout import override_key
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.lineage import (
    NO_PARENT,
    is_readable_commit,
    newest_generation_number,
    reachable_commits,
)
from ebbflow.training.checkpoint.verified_io import fetch_verified
from ebbflow.training.errors import CorruptOverride

_EVERY_RECORD = {"action", "generation"}


@dataclass(frozen=True, kw_only=True)
class Overrides:
    """What a start is to do otherwise than the configuration says.

    gradient_accumulation_steps: None: as configured. first_sample: no sample below this one is read any more; a start
    from a commit that has not come so far jumps to it. rewinds: of the job so far, for
    numbers that went wrong.
    """

    gradient_accumulation_steps: int | None = None
    first_sample: int = 0
    rewinds: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Overrides:
        """Names that are not its own are left to others."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__ if name in data})


def record_split(job_store: Store, *, generation: int, rank: int, accumulation: int) -> None:
    """From the next start on so many micro-batches make a step. Raises StoreError."""
    _put(job_store, GuardAction.SPLIT, generation, rank, accumulation=accumulation)


def record_rewind(job_store: Store, *, generation: int, rank: int, limit: int, first_sample: int, sound: bool) -> None:
    """The next start goes back to the newest commit not above step `limit`, and on from sample `first_sample`.

    sound: where there is none, a later one will do; else those are never to be read again. Raises StoreError.
    """
    order = {"limit": limit, "first_sample": first_sample, "sound": int(sound)}
    _put(job_store, GuardAction.REWIND, generation, rank, **order)


def read_overrides(job_store: Store) -> Overrides:
    """Of the job's next start. Raises StoreError, CorruptOverride."""
    records = _records(job_store)
    splits = [record["accumulation"] for record in records if record["action"] == GuardAction.SPLIT]
    rewinds = [record for record in records if record["action"] == GuardAction.REWIND]
    return Overrides(
        gradient_accumulation_steps=max(splits, default=None),
        first_sample=max((record["first_sample"] for record in rewinds), default=0),
        rewinds=sum(record["first_sample"] > 0 for record in rewinds),
    )


def rewind_parent(job_store: Store) -> str | None:
    """The commit that the next generation is to start from, where a rewind waits for it; None: the newest.

    The newest that is not above the rewind's limit and reads well. Where there is none, the oldest above it; unless the
    weights in those may differ between ranks, then `NO_PARENT`. To be asked before the generation is opened.
    """
    rewinds = [record for record in _records(job_store) if record["action"] == GuardAction.REWIND]
    newest = max(rewinds, key=lambda record: record["generation"], default=None)
    if newest is None or newest_generation_number(job_store, near=newest["generation"]) > newest["generation"]:
        return None  # some start has followed it already
    commits = reachable_commits(job_store)
    above = [commit for commit in commits if commit.step > newest["limit"]]
    below = [commit for commit in commits if commit.step <= newest["limit"]]
    for commit in below + (above[::-1] if newest["sound"] else []):
        if is_readable_commit(job_store, commit):
            return commit.key
    return NO_PARENT if above and not newest["sound"] else None


def _put(job_store: Store, action: GuardAction, generation: int, rank: int, **order: int) -> None:
    record = {"action": str(action), "generation": generation, "rank": rank, **order}
    name = "-".join(map(str, (action, *order.values())))
    job_store.put(override_key(generation, rank, name), json.dumps(record, sort_keys=True).encode())


def _records(job_store: Store) -> list[dict[str, Any]]:
    """Raises StoreError, and CorruptOverride for one that cannot be read: without it a start would go on otherwise."""

    def parse(data: bytes, what: str) -> dict[str, Any]:
        try:
            record = json.loads(data)
        except ValueError:
            record = None
        if not isinstance(record, dict) or _EVERY_RECORD - record.keys():
            fix = "put it back as it was, or delete it, and what it ordered is not done"
            raise CorruptOverride(f"{what}: is no record of what a guard ordered ({len(data)} bytes); fix: {fix}")
        return record

    keys = [meta.key for meta in job_store.list("overrides")]
    return [fetch_verified(job_store, key, parse, f"{job_store.uri}/{key}") for key in keys]
