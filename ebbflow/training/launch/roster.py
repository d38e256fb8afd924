"""Followers that have joined a gang, as node 0 knows them."""

import time
from collections.abc import Callable, Sequence

from ebbflow.training.launch.messages import RankOrder
from ebbflow.training.launch.transport import Connection, Message, RollCallServer

WAIT_REPORT_SECONDS = 1.0  # between two messages that tell other nodes to wait


class StickyFlag:
    """Flag that holds for `seconds` after each mark."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marked_at = float("-inf")

    def mark(self) -> None:
        self._marked_at = time.monotonic()

    @property
    def holds(self) -> bool:
        return time.monotonic() - self._marked_at < self._seconds


class Roster:
    """Followers that have joined, and node 0's connection to each of them.

    Nodes have the numbers of `GangSpec.node`. A follower whose connection was lost stays in the
    roster, so that messages can name its host and the cause.
    """

    def __init__(self, host: str) -> None:
        self._host = host  # of node 0
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, Message] = {}
        self._opened_generation = 0  # announced to followers that join; 0 for none
        self._wait_announced = StickyFlag(WAIT_REPORT_SECONDS)
        self.notice_waits = NoticeWaits()

    @property
    def followers(self) -> list[int]:
        return list(self._connections)

    @property
    def connected(self) -> set[int]:
        return {node for node in self._connections if not self.loss_of(node)}

    def loss_of(self, node: int) -> str:
        """Return why the connection to a follower was lost; "" if it was not."""
        return self._connections[node].closed

    def host_of(self, node: int) -> str:
        if node == 0:
            return self._host
        return self._hellos[node]["host"]

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self.host_of(node) for node in nodes]

    def add_joined(self, server: RollCallServer) -> None:
        """Add the followers that have joined at `server` since the last call."""
        for node, (connection, hello) in server.joined.items():
            before = self._connections.get(node)
            if before is connection:
                continue
            # The node's handshake timed out at its end, and it has joined again
            if before is not None:
                before.close()
                self.notice_waits.forget(node)
            self._connections[node] = connection
            self._hellos[node] = hello
            if "notice" in hello:
                self.notice_waits.record(node, RankOrder.from_json(hello["notice"]))
            if self._opened_generation:
                connection.send({"kind": "generation", "generation": self._opened_generation})

    def drop(self, node: int, reason: str) -> None:
        connection = self._connections[node]
        connection.refuse(reason)
        connection.close()

    def receive(self, node: int, act: Callable[[int, Message], object]) -> None:
        """Call `act` with each message that has arrived from a follower.

        If `act` raises because a message is malformed, the connection to the follower is lost.
        """
        connection = self._connections[node]
        connection.keep_alive()
        for message in connection.receive():
            try:
                act(node, message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                connection.refuse(f"it sent a malformed message: {type(error).__name__}: {error}")

    def broadcast(self, message: Message) -> None:
        for connection in self._connections.values():
            connection.send(message)

    def announce_generation(self, number: int) -> None:
        """Send the number of the next generation to all followers, also to those that join later."""
        self._opened_generation = number
        self.broadcast({"kind": "generation", "generation": number})

    def forget_generation(self) -> None:
        """Announce no generation to followers that join from now on."""
        self._opened_generation = 0

    def announce_wait(self, seconds: float) -> None:
        """Tell all followers that the start is at least `seconds` away.

        Sends at most one message per second.
        """
        if not self._wait_announced.holds:
            self._wait_announced.mark()
            self.broadcast({"kind": "notice_wait", "seconds": max(seconds, 0.0)})

    def keep_alive(self) -> None:
        for connection in self._connections.values():
            connection.keep_alive()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class NoticeWaits:
    """Followers that wait for their interruption notices to expire before their ranks start."""

    def __init__(self) -> None:
        self._orders: dict[int, RankOrder] = {}
        self._ends: dict[int, float] = {}  # time.monotonic() at which the notice expires

    def record(self, node: int, order: RankOrder) -> None:
        """Record that a node waits for another `order.seconds`; 0 or less ends its wait."""
        if order.seconds > 0:
            self._orders[node] = order
            self._ends[node] = time.monotonic() + order.seconds
        else:
            self.forget(node)

    def forget(self, node: int) -> None:
        self._orders.pop(node, None)
        self._ends.pop(node, None)

    @property
    def orders(self) -> dict[int, RankOrder]:
        """The order for the pending notice of each waiting node."""
        return dict(self._orders)

    @property
    def longest_seconds(self) -> float:
        return max(self._ends.values(), default=0.0) - time.monotonic()
