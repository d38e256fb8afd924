"""Compute the cost of each node: its price per hour, integrated over its paid time.

Nodes of one gang may share an instance, such as pods that Kubernetes packs onto one machine. At
each moment the price is then divided by the number of this job's nodes on the instance. The event
log does not show other jobs on the same instance, so these do not reduce the job's share.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import chain

from ebbflow.core.events import Event, LedgerClass
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.instances import (
    BatchJob,
    ExtraTime,
    find_batch_extras,
    find_boots,
    find_instance_extras,
    find_unreported_nodes,
    group_by_instance,
    group_nodes_by_job,
    read_batch_jobs,
    read_live_slurm_jobs,
    read_slurm_jobs,
    read_submission_times,
)
from ebbflow.cost.ledger.pricing import SIMULATED, NodePrice, PriceCurve, Pricing
from ebbflow.cost.ledger.timeline import MICRO, NodeTime, RankTime, Span, read_paid_nodes

# (Unix microseconds, number of nodes that share the price from then on), ordered by time.
SharerCounts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class NodeBill:
    """Cost of one node in one generation.

    Attributes:
        sharers: Number of the job's nodes on the instance over time; empty if this node was always
            the only one.
        extras: Paid time of the instance that this node's agent did not record
            (`cost.ledger.instances`).
        usd: Exact dollars, including the extras and the root volume.
        job: The Batch job that the node was part of, if Batch reported it.
    """

    node: NodeTime
    price: NodePrice
    sharers: SharerCounts
    extras: tuple[ExtraTime, ...]
    job: BatchJob | None = None

    @property
    def usd(self) -> Decimal:
        start = start_micros(self.node)
        own = self.node_curve.cost(start, start + self.node.paid_micros)
        extras = (self.extra_usd(extra) + self.extra_volume_usd(extra) for extra in self.extras)
        return sum(extras, own)

    @property
    def curve(self) -> PriceCurve:
        """The node's share of the hourly price of its instance, over time."""
        return divide_price(self.price.curve, self.sharers)

    @property
    def volume_curve(self) -> PriceCurve:
        """The node's share of the hourly price of the instance's root volume, over time."""
        return divide_price(self.price.volume_curve, self.sharers)

    @property
    def node_curve(self) -> PriceCurve:
        """The node's share of both prices, over time."""
        return divide_price(self.price.node_curve, self.sharers)

    @property
    def on_demand_curve(self) -> PriceCurve | None:
        """The node's share of the on-demand price of its instance; None if that price is unknown."""
        usd = self.price.on_demand_usd_per_hour
        if usd is None:
            return None
        return divide_price(PriceCurve(usd), self.sharers)

    @property
    def rank_microseconds(self) -> int:
        return (self.node.paid_micros + sum(extra.micros for extra in self.extras)) * len(
            self.node.ranks
        )

    def extra_usd(self, extra: ExtraTime) -> Decimal:
        """Return the dollars of the instance alone."""
        start = round(extra.start * MICRO)
        return self.price.curve.cost(start, start + extra.micros)

    def extra_volume_usd(self, extra: ExtraTime) -> Decimal:
        """Return the dollars of the root volume, which exists as long as its instance.

        EBS bills a volume by the second and for a minute at least, as EC2 bills its instance
        (https://aws.amazon.com/ebs/pricing/).
        """
        return self.price.volume_curve.cost(0, extra.micros)


@dataclass(frozen=True, kw_only=True)
class UnreportedBill:
    """Cost of a node that belonged to a Batch job but recorded no event.

    All of the node's time counts as start-up.
    """

    job: BatchJob
    node: int
    price: NodePrice

    @property
    def usd(self) -> Decimal:
        """Dollars of the machine and its root volume."""
        return self.machine_usd + self.volume_usd

    @property
    def machine_usd(self) -> Decimal:
        stay = self.job.stay(self.node)
        start = round(stay.started * MICRO)
        return self.price.curve.cost(start, start + stay.micros)

    @property
    def volume_usd(self) -> Decimal:
        micros = self.job.stay(self.node).micros
        return self.price.volume_curve.cost(0, micros)

    @property
    def rank_microseconds(self) -> int:
        return self.job.stay(self.node).micros * self.job.ranks


@dataclass(frozen=True, kw_only=True)
class Bills:
    """Costs of a job's nodes.

    The nodes in `nodes` recorded events; those in `unreported` belonged to Batch jobs and recorded
    none.
    """

    nodes: tuple[NodeBill, ...]
    unreported: tuple[UnreportedBill, ...]


def compute_bills(events: Sequence[Event], generations: Mapping[int, RecordedGeneration]) -> Bills:
    """Compute the cost of every node of a job from its events, which must be ordered by time."""
    nodes = read_paid_nodes(events)
    jobs = {**read_batch_jobs(events), **read_slurm_jobs(events)}
    # A node of the live job, whose paid time is not known yet, may be near the end of another one
    by_job = group_nodes_by_job(nodes, {**jobs, **read_live_slurm_jobs(events)})
    reported = {job_id: by_job[job_id] for job_id in jobs}
    job_of: dict[int, BatchJob] = {}
    for job_id, mine in reported.items():
        job_of.update((id(node), jobs[job_id]) for node in mine)
    # "Multi-node parallel job nodes are single-tenant", whatever instance id their metadata service
    # reports: https://docs.aws.amazon.com/batch/latest/userguide/multi-node-parallel-jobs.html
    sharers = count_sharers(
        [node for node in nodes if id(node) not in job_of or job_of[id(node)].nodes == 1]
    )
    pricing = Pricing.of(events)
    stays = {id(node): job_of[id(node)].stay(node.node) for node in nodes if id(node) in job_of}
    # A node-hour of Slurm begins and ends with the Slurm job, whatever its machine costs the site
    rented = [node for node in nodes if id(node) not in job_of or not job_of[id(node)].by_slurm]
    extras = [
        *find_boots(rented, stays, read_submission_times(events)),
        *find_batch_extras(reported, jobs, generations),
        *find_instance_extras(rented, stays),
    ]

    def make_bill(node: NodeTime) -> NodeBill:
        job = job_of.get(id(node))
        price = pricing.price_node(node, job)
        # A simulated run is priced as if each node had a machine of its own, of the planned type.
        if price.kind == SIMULATED:
            return NodeBill(node=node, price=price, sharers=(), extras=(), job=job)
        mine = tuple(extra for extra in extras if extra.node is node)
        return NodeBill(
            node=node, price=price, sharers=sharers.get(id(node), ()), extras=mine, job=job
        )

    return Bills(
        nodes=tuple(make_bill(node) for node in nodes),
        unreported=tuple(
            UnreportedBill(job=job, node=node, price=pricing.price_job(job))
            for job, node in find_unreported_nodes(reported, jobs)
        ),
    )


def merge_batch_status(
    generations: Mapping[int, RecordedGeneration], bills: Sequence[NodeBill]
) -> dict[int, RecordedGeneration]:
    """Return the generations, with missing end reasons taken from AWS Batch.

    A reason is missing if no event records why the generation ended. AWS Batch's reason is used
    only if it is "reclaimed" or "terminated".
    """
    causes = {bill.node.generation: bill.job.cause for bill in bills if bill.job is not None}
    return {
        number: replace(generation, reason=causes[number])
        if generation.reason is None and causes.get(number) in ("reclaimed", "terminated")
        else generation
        for number, generation in generations.items()
    }


def count_machines(bills: Sequence[NodeBill]) -> int:
    """Count the machines that were paid for in one generation.

    Nodes that share an instance count once.
    """
    return len({bill.node.instance_id if bill.sharers else id(bill) for bill in bills})


def compute_rank_charges(
    node: NodeTime, rank: RankTime, curve: PriceCurve
) -> dict[LedgerClass, Decimal]:
    """Divide a rank's cost among the classes of its time (`LedgerClass`). Return dollars by class.

    All ranks of a node have the same share of the node's cost. With a constant price, a rank's
    dollars are proportional to its seconds. If the price changed, each recorded span of the rank's
    time is charged at its own mean price. Time between the recorded spans is charged at the mean
    price of these gaps. If all these charges are zero, the rank's dollars are divided in proportion
    to its seconds.
    """
    start = start_micros(node)
    share = curve.cost(start, start + rank.paid) / len(node.ranks)
    if rank.paid <= 0:
        return {}
    if not curve.is_constant(start, start + rank.paid):
        weights = _weigh_classes(rank, curve, start)
        whole = sum(weights.values())
        if whole:
            return {kind: share * weight / whole for kind, weight in weights.items()}
    return {kind: share * spent / rank.paid for kind, spent in rank.classes.items()}


def start_micros(node: NodeTime) -> int:
    """Return the Unix microseconds at which the node started."""
    return round(node.started_wall * MICRO)


def count_sharers(nodes: Sequence[NodeTime]) -> dict[int, SharerCounts]:
    """Count the job's nodes on each instance over time.

    Returns:
        A dictionary from the `id()` of a `NodeTime` to the counts. Nodes that were always alone on
        their instance are left out.
    """
    found: dict[int, SharerCounts] = {}
    for mine in group_by_instance(nodes).values():
        intervals = {
            id(node): (start_micros(node), start_micros(node) + node.paid_micros) for node in mine
        }
        moments = sorted(set(chain.from_iterable(intervals.values())))
        alive = [
            (at, sum(start <= at < end for start, end in intervals.values())) for at in moments
        ]
        for node_id, (start, end) in intervals.items():
            counts = tuple((at, number) for at, number in alive if start <= at < end)
            if any(number > 1 for _, number in counts):
                found[node_id] = counts
    return found


def divide_price(curve: PriceCurve, sharers: SharerCounts) -> PriceCurve:
    """Divide the price at each moment by the number of nodes that share the instance at that
    moment.

    Before the first time in `sharers` the price is not divided.
    """
    if not sharers:
        return curve
    moments = sorted({at for at, _ in curve.changes} | {at for at, _ in sharers})
    changes = []
    price = curve.first
    number = 1
    numbers = dict(sharers)
    prices = dict(curve.changes)
    for at in moments:
        price = prices.get(at, price)
        number = numbers.get(at, number)
        changes.append((at, price / number))
    return PriceCurve(curve.first, tuple(changes))


def _weigh_classes(rank: RankTime, curve: PriceCurve, start: int) -> dict[LedgerClass, Decimal]:
    """Return the weight of each ledger class in a rank's cost.

    The weight is the class's time, multiplied by the mean price of the spans that contain it.
    """
    spent: dict[LedgerClass, Decimal] = {}
    micros: dict[LedgerClass, int] = {}
    lasting = [span for span in (*rank.spans, *_find_gaps(rank)) if span.start < span.end]
    for span in lasting:
        usd = curve.cost(start + span.start, start + span.end)
        for kind, duration in span.classes.items():
            spent[kind] = spent.get(kind, Decimal(0)) + usd * duration / (span.end - span.start)
            micros[kind] = micros.get(kind, 0) + duration
    whole = curve.cost(start, start + rank.paid)
    return {
        kind: spent[kind] * duration / micros[kind]
        if micros.get(kind)
        else whole * duration / rank.paid
        for kind, duration in rank.classes.items()
    }


def _find_gaps(rank: RankTime) -> Iterator[Span]:
    """Yield the gaps between a rank's spans as spans of unattributed time."""
    reached = 0
    for span in sorted(rank.spans, key=lambda span: span.start):
        yield _make_gap(reached, span.start)
        reached = max(reached, span.end)
    yield _make_gap(reached, rank.paid)


def _make_gap(start: int, end: int) -> Span:
    """Make a span of unattributed time. It has no duration if `end` is not after `start`."""
    return Span(start, end, {LedgerClass.UNATTRIBUTED: end - start})
