"""What the plan of a job that is about to run is made from, besides its configuration and prices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ebbflow.flows.backends import training_backend
from ebbflow.flows.job import Job
from ebbflow.infra.errors import InfraError
from ebbflow.infra.events import read_events

if TYPE_CHECKING:
    from ebbflow.cost.experience import Experience
    from ebbflow.cost.plan.pools import Progress
    from ebbflow.infra.batch import QueueState
    from ebbflow.infra.config.schema import RunConfig


def stays_here(flow: Any) -> bool:
    """Whether the ranks run on this machine, where no pool of the plan is paid for."""
    return training_backend(flow) is None


def where_it_runs(flow: Any, config: RunConfig) -> RunConfig:
    """On AWS Batch the region of the queues is the only one whose prices mean anything."""
    from ebbflow.infra.batch import in_queues_region

    there = in_queues_region(config) if training_backend(flow) == "batch" else config
    if there.cost.regions != config.cost.regions:
        named = ", ".join(config.cost.regions)
        print(f"prices of {there.cost.regions[0]}, where the queues are; cost.regions has {named}", flush=True)
    return there


def queues_there(flow: Any, config: RunConfig) -> dict[str, QueueState] | None:
    """On AWS Batch, what training may choose from, whether or not it takes jobs at this moment; as the configuration
    has it where Batch does not say, such as to a container. None: nobody knows it, or the job goes elsewhere.
    """
    from ebbflow.infra.batch import batch_client, declared_queues, training_queues

    if training_backend(flow) != "batch":
        return None
    try:
        found = training_queues(config.batch, batch_client(config.batch.region))
    except InfraError as error:
        found = declared_queues(config.batch)
        known = "batch.queues alone" if found else "all instance types, whatever queues there are"
        print(f"the plan goes by {known}, since AWS Batch cannot be asked for its queues: {error}", flush=True)
    return {name: replace(queue, usable=True) for name, queue in found.items() if queue.market is not None} or None


def experience(job: Job) -> Experience:
    """What jobs of the store have shown; nothing, and said so, where it does not answer: a plan does without."""
    from ebbflow.cost.experience import Experience, recall

    try:
        return recall(job.root_store)
    except InfraError as error:
        print(f"what own jobs have shown of pools and speeds is not known: {error}", flush=True)
        return Experience()


def progress(job: Job) -> Progress:
    """How far the job has come, so that only the rest is planned; the whole where no account of it can be made."""
    from ebbflow.cost.errors import CostError
    from ebbflow.cost.plan.pools import FROM_THE_START, progress_of

    try:
        return progress_of(read_events(job.store))
    except CostError as error:
        print(f"how far the job has come is unknown, so all of it is planned: {error}", flush=True)
        return FROM_THE_START
