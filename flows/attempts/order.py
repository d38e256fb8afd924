"""What one attempt of a training step is told: whether to train and in which shape, or where the job goes instead.

Whoever places the attempt leaves it in the job's store under the attempt's own name, since a job of AWS Batch gets
nothing of its submitter's environment. Each node reads it by that name: a listing may lag, a read after a put does not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ebbflow.infra.layout import order_key
from ebbflow.infra.store import Store

# What the process that submits needs besides its command line (`ebbflow.flows.attempts.submission`).
SUBMIT_VARIABLE = "EBBFLOW_SUBMIT"
# Why an attempt is placed nowhere: set for a step that therefore runs beside the scheduler, and fails.
UNPLACED_VARIABLE = "EBBFLOW_UNPLACED"
TRAIN: Does = "train"
Does = Literal["train", "gang", "again", "stop"]


@dataclass(frozen=True, kw_only=True)
class AttemptName:
    """One try of one task: what Metaflow calls run, step, task and retry count."""

    run: str
    step: str
    task: str
    attempt: int

    @property
    def key(self) -> str:
        """In the job's store."""
        return order_key(self.run, self.step, self.task, self.attempt)


@dataclass(frozen=True, kw_only=True)
class AttemptOrder:
    """does: train; or, without training, go on as a gang of `nodes`, go round again, or stop with `outcome`.

    nodes, processes_per_node: of the gang. placement: `cost.capacity.Placement` as JSON. plan: the fresh plan as JSON,
    with the placed pool as the chosen one; None: nobody made one, and the plan of the run holds.
    outcome, message: of a job that is to stop.
    """

    does: Does = TRAIN
    nodes: int = 1
    processes_per_node: int = 1
    placement: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    outcome: str = ""
    message: str = ""

    def put(self, job_store: Store, name: AttemptName) -> None:
        """Raises StoreError."""
        job_store.put(name.key, json.dumps(asdict(self), allow_nan=False).encode())

    @classmethod
    def get(cls, job_store: Store, name: AttemptName) -> AttemptOrder | None:
        """None where nobody has placed the attempt. Raises StoreError."""
        if job_store.head(name.key) is None:
            return None
        known = json.loads(job_store.get(name.key))
        return cls(**{key: known[key] for key in cls.__dataclass_fields__ if key in known})
