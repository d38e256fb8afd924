"""From a node's paid time and its price to dollars by class: shares that sum to what the node cost, whatever it did."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from ebbflow.cost.ledger.price_curve import PriceCurve
from ebbflow.cost.ledger.timeline import MICRO, NodeTime, RankTime, Span
from ebbflow.infra.ledger_classes import LedgerClass


def node_usd(node: NodeTime, curve: PriceCurve) -> Decimal:
    """What the node cost: its paid time at the price of each moment."""
    start = wall_micros(node)
    return curve.usd(start, start + node.paid_micros)


def rank_charges(node: NodeTime, rank: RankTime, curve: PriceCurve) -> dict[LedgerClass, Decimal]:
    """Dollars of one rank by class; they sum to the rank's share of `node_usd`.

    With one price they are in proportion to the seconds. When the price changed, each span of the rank's time is
    charged at the mean price while it lasted, and what no span covers at that of the gaps.
    """
    start = wall_micros(node)
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


def wall_micros(node: NodeTime) -> int:
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
