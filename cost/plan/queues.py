"""Which pools the queues of AWS Batch take: a pool without a queue is a price and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cost.catalogue import Catalogue
from cost.plan.pools import Pool
from infra.batch.queues import BATCHS_CHOICE

if TYPE_CHECKING:
    from infra.batch.queues import QueueState


def without_queue(queues: Mapping[str, QueueState], wanted: Pool, catalogue: Catalogue) -> str | None:
    """Why none of them takes the pool, by the queue that is nearest to it; None: one does."""
    lacks = {name: lack_of(queue, wanted, catalogue) for name, queue in queues.items()}
    if None in lacks.values():
        return None
    near = next((name for name, queue in queues.items() if queue.market == wanted.market), None)
    if near is None:
        return f"no queue is {wanted.market.replace('_', '-')}"
    return f"{short_name(near)}: {lacks[near]}"


def short_name(queue: str) -> str:
    """A queue's name without the rest of its ARN."""
    return queue.rpartition("/")[2]


def lack_of(queue: QueueState, wanted: Pool, catalogue: Catalogue) -> str | None:
    """Why the queue cannot run the pool; None: it can."""
    if not queue.usable:
        return queue.problem or "not usable"
    if queue.fargate:
        return "Fargate, which has no GPUs"
    if queue.market != wanted.market:
        return f"{str(queue.market).replace('_', '-')}, of which the plan has no pool; its best is {wanted}"
    if wanted.nodes > 1 and wanted.market == "spot" and not queue.multi_node:
        return f"AWS Batch runs no job of several nodes on Spot, and {wanted} is one"
    if wanted.nodes > 1 and not queue.multi_node:
        return f"takes no job of several nodes, and {wanted} is one"
    if not takes(queue.instance_types, wanted.instance_type):
        listed = ", ".join(queue.instance_types)
        if any(one in BATCHS_CHOICE for one in queue.instance_types):
            family = wanted.instance_type.partition(".")[0]
            return (
                f"has {listed}: what AWS Batch chooses itself has no GPUs, and {wanted} is one of {family}, not listed"
            )
        return f"has {listed}, and {wanted} is none of them"
    most, needed = _most_vcpus(queue, wanted.instance_type), wanted.nodes * catalogue[wanted.instance_type].vcpu
    if most is not None and needed > most:
        return f"may have {most} vCPUs (maxvCpus of its compute environment), and {wanted} has {needed}"
    return None


def _most_vcpus(queue: QueueState, instance_type: str) -> int | None:
    """Of the largest compute environment that takes the type, since a job runs in one of them: beyond it a job waits in
    RUNNABLE for ever. None: no limit is known.
    """
    able = [one for one in queue.compute_environments if one.usable and takes(one.instance_types, instance_type)]
    limits = [one.max_vcpus for one in able] or [queue.max_vcpus]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def takes(listed: Sequence[str], instance_type: str) -> bool:
    """Whether the type is listed, or its family (g5), or the beginning of its name within the family (p4d.24); what
    Batch chooses itself ("optimal") is none of the catalogue, whose types all have GPUs. Nothing listed: any."""
    return not listed or any(
        instance_type == one or instance_type.startswith(f"{one}.") or ("." in one and _begins(one, instance_type))
        for one in listed
    )


def _begins(listed: str, instance_type: str) -> bool:
    return instance_type.startswith(listed.removesuffix("*"))
