"""The order that an attempt of a training step receives: train in a given shape, or continue elsewhere.

The scheduler puts the order into the job's store under the attempt's name, because a job of AWS Batch gets nothing of
its submitter's environment. Each node reads it by name: a listing may lag, a read after a put does not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ebbflow.infra.layout import order_key
from ebbflow.infra.store import Store

# JSON for the submitting process (`ebbflow.flows.attempts.submission`).
SUBMIT_VARIABLE = "EBBFLOW_SUBMIT"
# Why an attempt has no placement: its step then runs beside the scheduler and fails.
UNPLACED_VARIABLE = "EBBFLOW_UNPLACED"
TRAIN: Does = "train"
Does = Literal["train", "gang", "again", "stop"]


@dataclass(frozen=True, kw_only=True)
class AttemptName:
    """Metaflow's name of one attempt: run, step, task and retry count."""

    run: str
    step: str
    task: str
    attempt: int

    @property
    def key(self) -> str:
        """The order's key in the job's store."""
        return order_key(self.run, self.step, self.task, self.attempt)


@dataclass(frozen=True, kw_only=True)
class AttemptOrder:
    """What an attempt does.

    Attributes:
        does: "train"; or without training "gang" (go on as a gang of `nodes`), "again" (another round), or "stop".
        nodes: of the gang.
        processes_per_node: of the gang.
        placement: `cost.capacity.Placement` as JSON.
        plan: the fresh plan as JSON, with the placed pool as the chosen one; None: the plan of the run holds.
        outcome: of a job that stops.
        message: of a job that stops.
    """

    does: Does = TRAIN
    nodes: int = 1
    processes_per_node: int = 1
    placement: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    outcome: str = ""
    message: str = ""

    def put(self, job_store: Store, name: AttemptName) -> None:
        """Write the order into the job's store. Raises StoreError."""
        job_store.put(name.key, json.dumps(asdict(self), allow_nan=False).encode())

    @classmethod
    def get(cls, job_store: Store, name: AttemptName) -> AttemptOrder | None:
        """Read an order, or None if the attempt was not placed. Raises StoreError."""
        if job_store.head(name.key) is None:
            return None
        known = json.loads(job_store.get(name.key))
        return cls(**{key: known[key] for key in cls.__dataclass_fields__ if key in known})
