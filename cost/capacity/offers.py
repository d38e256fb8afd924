"""Which pools of a plan the account's queues can run: a pool without a queue is a price and no more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cost.capacity.placement import pool_id
from cost.catalogue import Catalogue, load_catalogue
from cost.plan.pools import Candidate
from cost.plan.queues import lack_of, short_name, takes

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
            if lack_of(queue, one, kinds) is None:
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
        wanted = next((one for one in near if takes(queue.instance_types, one.instance_type)), near[0])
        lines.append(f"{short_name(name)}: {lack_of(queue, wanted, kinds)}")
    return "; ".join(lines)
