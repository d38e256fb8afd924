"""Compute the cost of each node: its paid time at the price of each moment, shared by the nodes of one instance.

Kubernetes packs pods onto one machine, and two nodes of a gang may be such pods. At each moment the price is divided by
the nodes of the job that are alive on the instance. What other jobs run there is not known to these events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.instances import (
    BatchJob,
    ExtraTime,
    find_batch_extras,
    find_instance_extras,
    find_unreported_nodes,
    group_by_instance,
    group_nodes_by_job,
    read_batch_jobs,
)
from ebbflow.cost.ledger.pricing import SIMULATED, NodePrice, PriceCurve, Pricing
from ebbflow.cost.ledger.timeline import MICRO, NodeTime, RankTime, Span, read_paid_nodes
from ebbflow.infra.events import Event, LedgerClass


def compute_node_usd(node: NodeTime, curve: PriceCurve) -> Decimal:
    """What the node cost: its paid time at the price of each moment."""
    start = start_micros(node)
    return curve.usd(start, start + node.paid_micros)


def compute_rank_charges(node: NodeTime, rank: RankTime, curve: PriceCurve) -> dict[LedgerClass, Decimal]:
    """Dollars of one rank by class; they sum to the rank's share of `compute_node_usd`.

    With one price they are in proportion to the seconds. When the price changed, each span of the rank's time is
    charged at the mean price while it lasted, and what no span covers at that of the gaps.
    """
    start = start_micros(node)
    share = curve.usd(start, start + rank.paid) / len(node.ranks)
    if rank.paid <= 0:
        return {}
    if curve.constant(start, start + rank.paid):
        return {kind: share * spent / rank.paid for kind, spent in rank.classes.items()}
    weights = _weights(rank, curve, start)
    whole = sum(weights.values())
    if not whole:  # every moment was free
        return dict.fromkeys(rank.classes, Decimal(0))
    return {kind: share * weight / whole for kind, weight in weights.items()}


def start_micros(node: NodeTime) -> int:
    return round(node.started_wall * MICRO)


def _weights(rank: RankTime, curve: PriceCurve, start: int) -> dict[LedgerClass, Decimal]:
    spent: dict[LedgerClass, Decimal] = {}
    seconds: dict[LedgerClass, int] = {}
    for span in [*rank.spans, *_gaps(rank)]:
        price = _mean(curve, start + span.start, start + span.end)
        for kind, micros in span.classes.items():
            spent[kind] = spent.get(kind, Decimal(0)) + price * micros
            seconds[kind] = seconds.get(kind, 0) + micros
    whole = _mean(curve, start, start + rank.paid)
    return {
        kind: spent[kind] / seconds[kind] * micros if seconds.get(kind) else whole * micros
        for kind, micros in rank.classes.items()
    }


def _gaps(rank: RankTime) -> Iterator[Span]:
    """Where no span lies."""
    reached = 0
    for span in sorted(rank.spans, key=lambda span: span.start):
        if span.start > reached:
            yield Span(reached, span.start, {LedgerClass.UNATTRIBUTED: span.start - reached})
        reached = max(reached, span.end)
    if reached < rank.paid:
        yield Span(reached, rank.paid, {LedgerClass.UNATTRIBUTED: rank.paid - reached})


def _mean(curve: PriceCurve, start: int, end: int) -> Decimal:
    """Per hour; of a moment, the price at it."""
    if end <= start:
        return curve.at(start / MICRO)
    return curve.usd(start, end) * 3600 * MICRO / (end - start)


# (Unix microseconds since when, how many nodes pay), in the order of time.
SharerCounts = tuple[tuple[int, int], ...]


def count_sharers(nodes: Sequence[NodeTime]) -> dict[int, SharerCounts]:
    """By the node's `id`, of nodes that were not alone on their instance all the time: how many paid since when."""
    found: dict[int, SharerCounts] = {}
    for lived in group_by_instance(nodes).values():
        lives = [(start_micros(node), start_micros(node) + node.paid_micros) for node in lived]
        moments = sorted({moment for life in lives for moment in life})
        alive = [(at, sum(start <= at < end for start, end in lives)) for at in moments]
        for node, (start, end) in zip(lived, lives, strict=True):
            mine = tuple((at, number) for at, number in alive if start <= at < end)
            if any(number > 1 for _, number in mine):
                found[id(node)] = mine
    return found


def divide_price(curve: PriceCurve, parts: SharerCounts) -> PriceCurve:
    """The curve with each moment's price over the number that pays it; before the first of `parts`, as it is."""
    if not parts:
        return curve
    moments = sorted({at for at, _ in curve.changes} | {at for at, _ in parts})
    changes, price, number, numbers, prices = [], curve.first, 1, dict(parts), dict(curve.changes)
    for at in moments:
        price, number = prices.get(at, price), numbers.get(at, number)
        changes.append((at, price / number))
    return PriceCurve(curve.first, tuple(changes))


def covered_seconds(nodes: Sequence[NodeTime]) -> float:
    """Seconds in which at least one of the nodes was alive."""
    total, reached = 0, 0
    for start, end in sorted((start_micros(node), start_micros(node) + node.paid_micros) for node in nodes):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1_000_000


_ENDS_THAT_BATCH_TELLS = ("reclaimed", "terminated")


@dataclass(frozen=True, kw_only=True)
class NodeBill:
    """One node of one generation: its paid time, its price and what it cost, to full precision.

    parts: how many nodes paid for its instance since when, where it was not alone there (`cost.ledger.bills`).
    extras: what its instance cost beyond that (`cost.ledger.instances`, `cost.ledger.instances`); usd includes it.
    job: of AWS Batch that it was part of, as far as Batch has told of it.
    """

    node: NodeTime
    price: NodePrice
    parts: SharerCounts
    extras: tuple[ExtraTime, ...]
    usd: Decimal
    job: BatchJob | None = None

    @property
    def curve(self) -> PriceCurve:
        """What the node pays per hour: its part of the price of its instance."""
        return divide_price(self.price.curve, self.parts)

    @property
    def on_demand_curve(self) -> PriceCurve | None:
        """The same at the on-demand price; None: not on record."""
        usd = self.price.on_demand_usd_per_hour
        return None if usd is None else divide_price(PriceCurve(usd), self.parts)

    @property
    def rank_microseconds(self) -> int:
        return (self.node.paid_micros + sum(extra.micros for extra in self.extras)) * len(self.node.ranks)

    def extra_usd(self, extra: ExtraTime) -> Decimal:
        start = round(extra.start * MICRO)
        return self.price.curve.usd(start, start + extra.micros)


@dataclass(frozen=True, kw_only=True)
class UnreportedBill:
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
    silent: tuple[UnreportedBill, ...]

    @property
    def usd(self) -> Decimal:
        return sum((bill.usd for bill in (*self.nodes, *self.silent)), Decimal(0))


def compute_bills(events: Sequence[Event], generations: Mapping[int, RecordedGeneration]) -> Bills:
    """Of all that was paid for. events: by time."""
    nodes = read_paid_nodes(events)
    jobs = read_batch_jobs(events)
    heard = group_nodes_by_job(nodes, jobs)
    job_of = {id(node): jobs[job_id] for job_id, mine in heard.items() for node in mine}
    # "Multi-node parallel job nodes are single-tenant", whatever their metadata service calls their instances:
    # https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html
    shared = count_sharers([node for node in nodes if id(node) not in job_of or job_of[id(node)].nodes == 1])
    pricing = Pricing.of(events)
    stays = {id(node): job_of[id(node)].stay(node.node) for node in nodes if id(node) in job_of}
    beyond = [*find_batch_extras(heard, jobs, generations), *find_instance_extras(nodes, stays)]
    return Bills(
        nodes=tuple(_node_bill(node, pricing, shared, beyond, job_of.get(id(node))) for node in nodes),
        silent=tuple(_silent_bill(job, node, pricing) for job, node in find_unreported_nodes(heard, jobs)),
    )


def merge_batch_status(
    generations: Mapping[int, RecordedGeneration], bills: Sequence[NodeBill]
) -> dict[int, RecordedGeneration]:
    """The generations, those that ended without a word with what Batch told of the end of their job."""
    told = {bill.node.generation: bill.job.cause for bill in bills if bill.job is not None}
    return {
        number: replace(one, reason=told[number])
        if one.reason is None and told.get(number) in _ENDS_THAT_BATCH_TELLS
        else one
        for number, one in generations.items()
    }


def count_machines(bills: Sequence[NodeBill]) -> int:
    """How many machines are paid for the nodes of one generation: of those that share an instance, one."""
    return len({bill.node.instance_id if bill.parts else id(bill) for bill in bills})


def _node_bill(
    node: NodeTime,
    pricing: Pricing,
    shared: Mapping[int, SharerCounts],
    beyond: Sequence[ExtraTime],
    job: BatchJob | None,
) -> NodeBill:
    price = pricing.node(node, job)
    # A simulated run is priced as if each of its nodes had a machine of the plan's, whatever this one is.
    real = price.kind != SIMULATED
    parts = shared.get(id(node), ()) if real else ()
    mine = tuple(extra for extra in beyond if extra.node is node and real)
    bill = NodeBill(node=node, price=price, parts=parts, extras=mine, usd=Decimal(0), job=job)
    usd = sum((bill.extra_usd(extra) for extra in mine), compute_node_usd(node, bill.curve))
    return NodeBill(node=node, price=price, parts=parts, extras=mine, usd=usd, job=job)


def _silent_bill(job: BatchJob, node: int, pricing: Pricing) -> UnreportedBill:
    price, stay = pricing.job(job), job.stay(node)
    start = round(stay.started * MICRO)
    return UnreportedBill(job=job, node=node, price=price, usd=price.curve.usd(start, start + stay.micros))
