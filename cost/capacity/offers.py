"""Which pools of a plan the account's queues can run: a pool without a queue is a price and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost.capacity.placement import pool_id, short_name
from cost.catalogue import Catalogue, load_catalogue
from cost.plan.pools import Candidate
from infra.batch.machines import BATCHS_CHOICE

if TYPE_CHECKING:
    from infra.batch.queues import QueueState


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One pool as Batch can run it: the cheapest of the plan's places for the type, since Batch chooses the zone."""

    candidate: Candidate
    queue: str

    @property
    def id(self) -> str:
        return pool_id(self.queue, self.candidate.instance_type, self.candidate.nodes)

    @property
    def is_spot(self) -> bool:
        return self.candidate.market == "spot"

    @property
    def work_hours(self) -> float:
        return self.candidate.case.work_hours


def offers(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> tuple[Offer, ...]:
    """In the plan's order, each type, size and queue once. region: where the queues are; None: not known."""
    kinds = load_catalogue() if catalogue is None else catalogue
    found: dict[str, Offer] = {}
    for one in ranked:
        if region is not None and one.region not in (None, region):
            continue
        for name, queue in queues.items():
            if _lacks(queue, one, kinds) is None:
                offer = Offer(candidate=one, queue=name)
                found.setdefault(offer.id, offer)
    return tuple(found.values())


def lacking(
    ranked: Sequence[Candidate],
    queues: Mapping[str, QueueState],
    *,
    region: str | None = None,
    catalogue: Catalogue | None = None,
) -> str:
    """What each queue lacks to run the cheapest pool that is nearest to it."""
    if not queues:
        return "the account has no queue that training may go to"
    here = [one for one in ranked if region is None or one.region in (None, region)]
    if not here:
        return f"the plan has no pool in {region}, where the queues are; fix: name it in cost.regions"
    kinds = load_catalogue() if catalogue is None else catalogue
    lines = []
    for name, queue in queues.items():
        near = [one for one in here if one.market == queue.market] or here
        wanted = next((one for one in near if _takes(queue.instance_types, one.instance_type)), near[0])
        lines.append(f"{short_name(name)}: {_lacks(queue, wanted, kinds)}")
    return "; ".join(lines)


def _lacks(queue: QueueState, wanted: Candidate, catalogue: Catalogue) -> str | None:
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
    if not _takes(queue.instance_types, wanted.instance_type):
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
    able = [one for one in queue.compute_environments if one.usable and _takes(one.instance_types, instance_type)]
    limits = [one.max_vcpus for one in able] or [queue.max_vcpus]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def _takes(listed: Sequence[str], instance_type: str) -> bool:
    """Whether the type is listed, or its family (g5), or the beginning of its name within the family (p4d.24); what
    Batch chooses itself ("optimal") is none of the catalogue, whose types all have GPUs. Nothing listed: any."""
    return not listed or any(
        instance_type == one or instance_type.startswith(f"{one}.") or ("." in one and _begins(one, instance_type))
        for one in listed
    )


def _begins(listed: str, instance_type: str) -> bool:
    return instance_type.startswith(listed.removesuffix("*"))
