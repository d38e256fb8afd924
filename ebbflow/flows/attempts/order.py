"""Instructions (orders) from Metaflow's scheduler about one attempt: to the step that trains, and
to the process that submits the attempt.

The scheduler writes the step's order into the job's store under the attempt's name, because an AWS
Batch job inherits no environment from its submitter. Each node reads the order by this name and
does not list the store, because a listing may not show a new object yet. The submitting process
runs on the scheduler's machine and gets its order in an environment variable.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    InstanceOf,
    PlainSerializer,
    field_validator,
)

from ebbflow.core.errors import Outcome
from ebbflow.core.json_values import JsonObject
from ebbflow.core.layout import order_key
from ebbflow.core.retry import call_within
from ebbflow.core.store import Store
from ebbflow.cost.capacity import Placement
from ebbflow.cost.plan.plan import Plan

if TYPE_CHECKING:
    from metaflow.metadata_provider.metadata import MetadataProvider

# `SubmitOrder` as JSON, for the submitting process.
SUBMIT_VARIABLE = "EBBFLOW_SUBMIT"
# Name of an attempt's order in the metadata of its task
_CLIENT_FIELD = "attempt_order"
_CLIENT_SECONDS = 10.0  # a hook that waits longer would hold up the run's other tasks


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


def _read_placement(value: object) -> object:
    if isinstance(value, dict):
        return Placement.from_json(value)
    return value


# Placement and plan define their JSON themselves.
PlacementField = Annotated[
    InstanceOf[Placement], BeforeValidator(_read_placement), PlainSerializer(Placement.to_json)
]


def _read_plan(value: object) -> object:
    if isinstance(value, dict):
        return Plan.from_json(value)
    return value


PlanField = Annotated[InstanceOf[Plan], BeforeValidator(_read_plan), PlainSerializer(Plan.to_json)]


class AttemptOrder(BaseModel):
    """Instruction to one attempt of a training step: where and how to train, or to end without
    training.
    """

    # Infinite numbers must raise an error, and not become null
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    # "train", or one of two ways to end without training: "next" (the flow places the next attempt
    # anew: a gang of `nodes` nodes, or `train_node` once more) or "stop" (the job ends)
    does: Literal["train", "next", "stop"] = "train"
    nodes: int = 1
    processes_per_node: int = 1  # number of ranks on each node
    placement: PlacementField | None = None  # None unless the attempt trains
    plan: PlanField | None = None  # plan of this attempt; None: the run's plan applies
    outcome: Outcome | Literal[""] = ""  # outcome of the job, for "stop"
    message: str = ""  # why the attempt does not train

    @field_validator("does", mode="before")
    @classmethod
    def _rename_old_verbs(cls, value: object) -> object:
        """Accept orders of older versions, which wrote "gang" or "again" instead of "next"."""
        if value in ("gang", "again"):
            return "next"
        return value

    @classmethod
    def stop(cls, outcome: Outcome, message: str) -> AttemptOrder:
        return cls(does="stop", outcome=outcome, message=message)

    @classmethod
    def hand_on(cls, placed: Placement, message: str) -> AttemptOrder:
        """Return an order that leaves the training to the flow's next attempt."""
        return cls(
            does="next",
            nodes=placed.nodes,
            processes_per_node=placed.processes_per_node,
            message=message,
        )

    @classmethod
    def get(cls, job_store: Store, name: AttemptName) -> AttemptOrder | None:
        """Return the attempt's order, or None if the scheduler wrote no order.

        Raises StoreError.
        """
        if job_store.head(name.key) is None:
            return None
        return cls.model_validate_json(job_store.get(name.key))

    def brief(self) -> JsonObject:
        """Return the order without its plan, for `try_to_show_in_client`."""
        order: JsonObject = {"does": self.does, "nodes": self.nodes, "reason": self.message}
        placed = self.placement
        if placed is None:
            return order
        return {
            **order,
            "pool": str(placed),
            "queue": placed.queue,
            "market": placed.market,
            "instance_type": placed.instance_type,
            "processes_per_node": self.processes_per_node,
            "limits": {
                "wall_seconds": placed.wall_seconds,
                "runnable_seconds": placed.runnable_seconds,
                "start_by_utc": placed.start_by_utc,
            },
            "reason": placed.reason,
        }

    def put(self, job_store: Store, name: AttemptName) -> None:
        document = self.model_dump(mode="json")
        job_store.put(name.key, json.dumps(document, allow_nan=False).encode())


class SubmitLimits(BaseModel):
    """Time limits of a submitted attempt, in seconds."""

    model_config = ConfigDict(frozen=True)

    # Longest wait for capacity. None: the limit of the steps around training
    runnable_seconds: float | None = None
    start_by_utc: float | None = None  # Unix time by which the attempt must run; None: no limit
    starting_seconds: float = 2700.0  # longest time with capacity and without a container
    image_seconds: float = 300.0  # longest time of failed pulls of a pod's image
    submit_seconds: float = 900.0  # for which a throttled submit is repeated
    look_seconds: float = 5.0  # between two looks at the state
    # Longest wait for the job's end after the launcher was asked to leave
    leave_seconds: float = 50.0


class StopOrder(BaseModel):
    """Instruction to end the job instead of submitting an attempt."""

    model_config = ConfigDict(frozen=True)

    outcome: Outcome
    message: str


class SubmitOrder(SubmitLimits):
    """Instruction to the process that submits one attempt of a training step."""

    job: str
    store: str  # address of the store that holds all jobs
    region: str | None = None  # region of the queue; None: that of the AWS SDK
    # Name of the attempt
    run: str
    step: str
    task: str
    attempt: int
    stop: StopOrder | None = None  # end the job instead of submitting the attempt
    # Only on Kubernetes
    placement: PlacementField | None = None
    last: bool = False  # Metaflow allows no further attempt
    kueue: str | None = None  # Kueue's queue for the pods
    node_replacements: int = 0  # pods that a JobSet's workers may replace
    roll_call_seconds: float | None = None  # for which the gang waits for all nodes; None: no limit

    @classmethod
    def of_environment(cls) -> SubmitOrder | None:
        """Read this process's order from its environment, or return None for a step that does not
        train.
        """
        text = os.environ.get(SUBMIT_VARIABLE)
        if not text:
            return None
        return cls.model_validate_json(text)


def try_to_show_in_client(metadata: MetadataProvider, name: AttemptName, order: JsonObject) -> str:
    """Write an attempt's order into the metadata of its task, as JSON. Return "", or the reason if
    this fails.

    Metaflow's Client then lists it in `Task(…).metadata`, for each attempt. An artifact would be
    missing after an attempt that was killed.
    """
    from metaflow.metadata_provider.metadata import MetaDatum

    datum = MetaDatum(
        field=_CLIENT_FIELD,
        value=json.dumps({"attempt": name.attempt, **order}),
        type=_CLIENT_FIELD,
        tags=[f"attempt_id:{name.attempt}"],  # by which the Client finds an attempt's own
    )
    try:
        call_within(
            _CLIENT_SECONDS,
            lambda: metadata.register_metadata(name.run, name.step, name.task, [datum]),
            "metadata",
            lambda: TimeoutError(f"no answer within {_CLIENT_SECONDS:g} s"),
        )
    except Exception as error:  # the order is in the job's store, and the attempt needs no other
        return f"the order is not in Metaflow's metadata: {type(error).__name__}: {error}"
    return ""
