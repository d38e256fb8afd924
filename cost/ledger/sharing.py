"""Nodes that share an instance: the provider bills it once, so that each pays its part while they are there together.

Kubernetes packs pods onto one machine, and two nodes of a gang may be such pods. At each moment the price is divided by
the nodes of the job that are alive on the instance. What other jobs run there is not known to these events.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.cost.ledger.charges import wall_micros
from ebbflow.cost.ledger.instances import by_instance
from ebbflow.cost.ledger.price_curve import PriceCurve
from ebbflow.cost.ledger.timeline import NodeTime

# (Unix microseconds since when, how many nodes pay), in the order of time.
Parts = tuple[tuple[int, int], ...]


def sharing(nodes: Sequence[NodeTime]) -> dict[int, Parts]:
    """By the node's `id`, of nodes that were not alone on their instance all the time: how many paid since when."""
    found: dict[int, Parts] = {}
    for lived in by_instance(nodes).values():
        lives = [(wall_micros(node), wall_micros(node) + node.paid_micros) for node in lived]
        moments = sorted({moment for life in lives for moment in life})
        alive = [(at, sum(start <= at < end for start, end in lives)) for at in moments]
        for node, (start, end) in zip(lived, lives, strict=True):
            mine = tuple((at, number) for at, number in alive if start <= at < end)
            if any(number > 1 for _, number in mine):
                found[id(node)] = mine
    return found


def divided(curve: PriceCurve, parts: Parts) -> PriceCurve:
    """The curve with each moment's price over the number that pays it; before the first of `parts`, as it is."""
    if not parts:
        return curve
    moments = sorted({at for at, _ in curve.changes} | {at for at, _ in parts})
    changes, price, number, numbers, prices = [], curve.first, 1, dict(parts), dict(curve.changes)
    for at in moments:
        price, number = prices.get(at, price), numbers.get(at, number)
        changes.append((at, price / number))
    return PriceCurve(curve.first, tuple(changes))


def seconds_together(nodes: Sequence[NodeTime]) -> float:
    """Seconds in which at least one of the nodes was alive."""
    total, reached = 0, 0
    for start, end in sorted((wall_micros(node), wall_micros(node) + node.paid_micros) for node in nodes):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total / 1_000_000
