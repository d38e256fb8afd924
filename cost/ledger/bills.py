"""What each node of a job cost: those whose agents spoke, and those of AWS Batch's jobs that never did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from ebbflow.cost.ledger.batch_jobs import BatchJob, batch_jobs, nodes_by_job, silent_nodes, unheard_extras
from ebbflow.cost.ledger.charges import node_usd
from ebbflow.cost.ledger.generations import Generation
from ebbflow.cost.ledger.instances import Extra, extras
from ebbflow.cost.ledger.price_curve import PriceCurve
from ebbflow.cost.ledger.pricing import SIMULATED, NodePrice, Pricing
from ebbflow.cost.ledger.sharing import Parts, divided, sharing
from ebbflow.cost.ledger.timeline import MICRO, NodeTime, paid_nodes
from ebbflow.infra.events import Event

_ENDS_THAT_BATCH_TELLS = ("reclaimed", "terminated")


@dataclass(frozen=True, kw_only=True)
class NodeBill:
    """One node of one generation: its paid time, its price and what it cost, to full precision.

    parts: how many nodes paid for its instance since when, where it was not alone there (`cost.ledger.sharing`).
    extras: what its instance cost beyond that (`cost.ledger.instances`, `cost.ledger.batch_jobs`); usd includes it.
    job: of AWS Batch that it was part of, as far as Batch has told of it.
    """

    node: NodeTime
    price: NodePrice
    parts: Parts
    extras: tuple[Extra, ...]
    usd: Decimal
    job: BatchJob | None = None

    @property
    def curve(self) -> PriceCurve:
        """What the node pays per hour: its part of the price of its instance."""
        return divided(self.price.curve, self.parts)

    @property
    def on_demand_curve(self) -> PriceCurve | None:
        """The same at the on-demand price; None: not on record."""
        usd = self.price.on_demand_usd_per_hour
        return None if usd is None else divided(PriceCurve(usd), self.parts)

    @property
    def rank_microseconds(self) -> int:
        return (self.node.paid_micros + sum(extra.micros for extra in self.extras)) * len(self.node.ranks)

    def extra_usd(self, extra: Extra) -> Decimal:
        start = round(extra.start * MICRO)
        return self.price.curve.usd(start, start + extra.micros)


@dataclass(frozen=True, kw_only=True)
class SilentBill:
    """A node of a Batch job that never said a word: paid from its start to its stop, all of it start-up."""

    job: BatchJob
    node: int
    price: NodePrice
    usd: Decimal

    @property
    def rank_microseconds(self) -> int:
        return self.job.stay(self.node).micros * self.job.ranks


@dataclass(frozen=True, kw_only=True)
class Bills:
    """nodes: by generation and node. silent: by job and node."""

    nodes: tuple[NodeBill, ...]
    silent: tuple[SilentBill, ...]

    @property
    def usd(self) -> Decimal:
        return sum((bill.usd for bill in (*self.nodes, *self.silent)), Decimal(0))


def bills_of(events: Sequence[Event], generations: Mapping[int, Generation]) -> Bills:
    """Of all that was paid for. events: by time."""
    nodes = paid_nodes(events)
    jobs = batch_jobs(events)
    heard = nodes_by_job(nodes, jobs)
    job_of = {id(node): jobs[job_id] for job_id, mine in heard.items() for node in mine}
    # "Multi-node parallel job nodes are single-tenant", whatever their metadata service calls their instances:
    # https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html
    shared = sharing([node for node in nodes if id(node) not in job_of or job_of[id(node)].nodes == 1])
    pricing = Pricing.of(events)
    stays = {id(node): job_of[id(node)].stay(node.node) for node in nodes if id(node) in job_of}
    beyond = [*unheard_extras(heard, jobs, generations), *extras(nodes, stays)]
    return Bills(
        nodes=tuple(_node_bill(node, pricing, shared, beyond, job_of.get(id(node))) for node in nodes),
        silent=tuple(_silent_bill(job, node, pricing) for job, node in silent_nodes(heard, jobs)),
    )


def with_batchs_word(generations: Mapping[int, Generation], bills: Sequence[NodeBill]) -> dict[int, Generation]:
    """The generations, those that ended without a word with what Batch told of the end of their job."""
    told = {bill.node.generation: bill.job.cause for bill in bills if bill.job is not None}
    return {
        number: replace(one, reason=told[number])
        if one.reason is None and told.get(number) in _ENDS_THAT_BATCH_TELLS
        else one
        for number, one in generations.items()
    }


def machines(bills: Sequence[NodeBill]) -> int:
    """How many machines are paid for the nodes of one generation: of those that share an instance, one."""
    return len({bill.node.instance_id if bill.parts else id(bill) for bill in bills})


def _node_bill(
    node: NodeTime, pricing: Pricing, shared: Mapping[int, Parts], beyond: Sequence[Extra], job: BatchJob | None
) -> NodeBill:
    price = pricing.node(node, job)
    # A simulated run is priced as if each of its nodes had a machine of the plan's, whatever this one is.
    real = price.kind != SIMULATED
    parts = shared.get(id(node), ()) if real else ()
    mine = tuple(extra for extra in beyond if extra.node is node and real)
    bill = NodeBill(node=node, price=price, parts=parts, extras=mine, usd=Decimal(0), job=job)
    usd = sum((bill.extra_usd(extra) for extra in mine), node_usd(node, bill.curve))
    return NodeBill(node=node, price=price, parts=parts, extras=mine, usd=usd, job=job)


def _silent_bill(job: BatchJob, node: int, pricing: Pricing) -> SilentBill:
    price, stay = pricing.job(job), job.stay(node)
    start = round(stay.started * MICRO)
    return SilentBill(job=job, node=node, price=price, usd=price.curve.usd(start, start + stay.micros))
