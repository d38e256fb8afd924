"""Rules for whether a gang continues after a generation, and without which nodes; used on node 0."""

from collections.abc import Collection
from dataclasses import replace

from ebbflow.core.errors import Outcome
from ebbflow.core.events import EndReason
from ebbflow.training.launch.messages import RETURNED, SIGTERM, GenerationEnd, RankOrder


class Continuation:
    """Rules that decide whether a gang starts another generation in this attempt.

    Nodes have the numbers of `GangSpec.node`. A gang with enough nodes left continues without the
    others. A gang with too few waits for replacements if the scheduler replaces lost nodes.

    Args:
        min_nodes: number of nodes that are enough; None if all are needed.
        replacements: number of lost nodes that the scheduler replaces within this attempt.
    """

    def __init__(self, min_nodes: int | None, replacements: int) -> None:
        self._min_nodes = min_nodes
        self.replacements = replacements
        # Nodes that take no part in later generations, although they may be connected
        self.left_out: set[int] = set()
        self._leave_orders: list[RankOrder] = []

    @property
    def leave_cause(self) -> str:
        """Cause of the first order for which the gang must exit; "" if there is none."""
        if self._leave_orders:
            return self._leave_orders[0].cause
        return ""

    def add_order(self, order: RankOrder) -> None:
        """Store an order if the gang must exit because of it."""
        if order.leave and order.node not in self.left_out and order.cause != RETURNED:
            self._leave_orders.append(order)

    def is_enough(self, nodes: Collection[int]) -> bool:
        return self._min_nodes is not None and len(nodes) >= self._min_nodes

    def is_replaced(self, lost: Collection[int]) -> bool:
        """Return whether the scheduler will replace all of the lost nodes."""
        return 0 < len(lost) <= self.replacements and 0 not in lost

    def after_results(
        self, end: GenerationEnd, connected: Collection[int], *, growing: bool
    ) -> GenerationEnd:
        """Return the result of a generation whose ranks have all finished, and whether another one
        follows.

        Args:
            end: end of the generation, as the ranks' results show it.
            connected: nodes that could take part in the next generation.
            growing: whether the ranks were asked to leave so that a node can return.
        """
        end = self._leave_out_noticed(end, connected)
        left = end.outcome is not None and end.outcome.outcome == Outcome.INTERRUPTED
        if growing and left and not self._leave_orders:
            return replace(end, again=True)
        return end

    def after_failure(
        self, end: GenerationEnd, started: Collection[int], connected: Collection[int]
    ) -> GenerationEnd:
        """Return the result of a failed generation, and whether another generation follows.

        `started` are the nodes of the failed generation.
        """
        end = self._leave_out_noticed(end, connected)
        if end.reason != EndReason.NODE_LOST:
            return end
        lost = set(started) - set(connected)
        # If all nodes are to leave, no generation follows: `CoordinatorPeers.regroup` ends the gang
        if self.is_enough(connected) or self.is_replaced(lost) or self.leave_cause:
            return replace(end, again=True)
        return end

    def leave_out_reader(
        self, end: GenerationEnd, reader: int, connected: Collection[int]
    ) -> GenerationEnd:
        """Return the result of a generation in which node `reader` read damaged data from a commit.

        The gang continues without this node, unless it is node 0 or too few other nodes remain.
        """
        if reader == 0 or not self.is_enough(set(connected) - {reader}):
            return end
        self.left_out.add(reader)
        return replace(end, left_out=[reader], fingerprint="")

    def _leave_out_noticed(self, end: GenerationEnd, connected: Collection[int]) -> GenerationEnd:
        """Return a result after which the gang continues without the nodes that received a notice.

        Return `end` unchanged if the gang cannot continue or if too few other nodes remain. SIGTERM
        does not count as a notice, since its sender may be about to signal all nodes.
        """
        leaving = {order.node for order in self._leave_orders}
        noticed = {order.node for order in self._leave_orders if order.cause != SIGTERM}
        if not noticed or noticed != leaving or 0 in noticed:
            return end
        if not self.is_enough(set(connected) - noticed):
            return end
        if end.outcome is None:
            may_continue = end.again or end.reason == EndReason.NODE_LOST
        else:
            may_continue = end.outcome.outcome == Outcome.INTERRUPTED
        if not may_continue:
            return end
        self.left_out |= noticed
        self._leave_orders.clear()
        return replace(end, again=True, left_out=sorted(noticed))
