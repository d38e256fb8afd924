"""Order: the instruction from Metaflow's scheduler to one attempt of a training step.

The scheduler writes the order into the job's store under the attempt's name, because an AWS Batch
job inherits no environment from its submitter. Each node reads the order by this name and does not
list the store, because a listing may not show a new object yet.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ebbflow.core.layout import order_key
from ebbflow.core.store import Store

# JSON for the submitting process (`ebbflow.flows.attempts.submission`).
SUBMIT_VARIABLE = "EBBFLOW_SUBMIT"
# Why an attempt has no placement. Its step then runs on the scheduler's machine and fails with this
# message.
UNPLACED_VARIABLE = "EBBFLOW_UNPLACED"
TRAIN: Does = "train"
Does = Literal["train", "gang", "again", "stop"]


@dataclass(frozen=True, kw_only=True)
class AttemptName:
    """Name that identifies one attempt in Metaflow: run, step, task and retry count."""

    run: str
    step: str
    task: str
    attempt: int

    @property
    def key(self) -> str:
        return order_key(self.run, self.step, self.task, self.attempt)


@dataclass(frozen=True, kw_only=True)
class AttemptOrder:
    """Instruction to one attempt of a training step: where and how to train, or to end without
    training.
    """

    # "train", or one of three ways to end without training: "gang" (the flow continues with a gang
    # of `nodes` nodes), "again" (`train_node` starts another round) or "stop" (the job ends)
    does: Does = TRAIN
    nodes: int = 1
    processes_per_node: int = 1  # number of ranks on each node
    # `cost.capacity.Placement` as JSON; None unless the attempt trains
    placement: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None  # plan of this attempt as JSON; None: the run's plan applies
    outcome: str = ""  # outcome of the job, for "stop"
    message: str = ""  # why the job ends, for "stop"

    def put(self, job_store: Store, name: AttemptName) -> None:
        job_store.put(name.key, json.dumps(asdict(self), allow_nan=False).encode())

    @classmethod
    def get(cls, job_store: Store, name: AttemptName) -> AttemptOrder | None:
        """Return the attempt's order, or None if the scheduler wrote no order.

        Raises StoreError.
        """
        if job_store.head(name.key) is None:
            return None
        known = json.loads(job_store.get(name.key))
        return cls(**{key: known[key] for key in cls.__dataclass_fields__ if key in known})
