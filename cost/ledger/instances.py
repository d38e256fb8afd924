"""What the provider bills beyond the nodes' own time: instances that wait between generations, and starts too short.

Instances are known by their ids. EC2 bills Linux by the second from the start of an instance to its end, a minute at
the least (https://aws.amazon.com/ec2/pricing/on-demand/). A launch that never became a node costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ebbflow.cost.ledger.timeline import MICRO, NodeTime
from ebbflow.infra.ledger_classes import LedgerClass

MINIMUM_SECONDS = 60.0
# A longer pause of the same instance may have been another job's: it is left to the reconciliation with the bill.
LONGEST_IDLE_SECONDS = 600.0


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Paid time of an instance besides its nodes'. node: whose ranks and price it counts by; start: Unix seconds."""

    node: NodeTime
    ledger_class: LedgerClass
    start: float
    seconds: float

    @property
    def micros(self) -> int:
        return round(self.seconds * MICRO)


def by_instance(nodes: Sequence[NodeTime]) -> dict[str, list[NodeTime]]:
    """Nodes whose instance is known, by its id, in the order in which they ran."""
    grouped: dict[str, list[NodeTime]] = {}
    for node in sorted(nodes, key=lambda node: node.started_wall):
        if node.instance_id:
            grouped.setdefault(node.instance_id, []).append(node)
    return grouped


class Stay(Protocol):
    """Unix seconds in which an instance was paid for in any case, as a job of AWS Batch on it, and what ended it."""

    @property
    def started(self) -> float: ...
    @property
    def stopped(self) -> float: ...
    @property
    def cause(self) -> str: ...


def extras(nodes: Sequence[NodeTime], stays: Mapping[int, Stay] | None = None) -> list[Extra]:
    """What the instances were billed beyond their nodes' time. Machines without an id, such as this one, have none.

    stays: by the node's `id`, of nodes that were part of a longer stay that is paid whole, whoever pays it.
    """
    found = []
    known = stays or {}

    def span(node: NodeTime) -> tuple[float, float]:
        stay = known.get(id(node))
        return (node.started_wall, node.ended_wall) if stay is None else (stay.started, stay.stopped)

    def taken(node: NodeTime) -> bool:
        stay = known.get(id(node))
        return stay is not None and stay.cause == "reclaimed"

    for lived in by_instance(nodes).values():
        lived.sort(key=lambda node: span(node)[0])
        (reached, _), paid = span(lived[0]), 0.0
        previous = lived[0]
        for node in lived:
            start, end = span(node)
            pause = start - reached
            if 0 < pause <= LONGEST_IDLE_SECONDS and not taken(previous):  # nobody pays for one that was taken away
                found.append(Extra(node=previous, ledger_class=LedgerClass.IDLE, start=reached, seconds=pause))
                paid += pause
            paid += max(0.0, end - max(start, reached))  # of two at once, once
            if end >= reached:
                reached, previous = end, node
        before = max(0.0, lived[0].started_wall - span(lived[0])[0])
        booted = max(0.0, float(lived[0].machine.get("uptime_seconds") or 0.0) - before)
        missing = MINIMUM_SECONDS - booted - paid
        if missing > 0:
            last = LedgerClass.MINIMUM_CHARGE
            found.append(Extra(node=previous, ledger_class=last, start=reached, seconds=missing))
    return found
