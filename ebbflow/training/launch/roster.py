"""Followers that have joined a gang, as node 0 knows them."""

import time
from collections.abc import Sequence

from ebbflow.training.launch.agent_messages import (
    AgentMessage,
    NextGeneration,
    NoticeWait,
    decode,
    decode_hello,
    encode,
)
from ebbflow.training.launch.messages import RankOrder
from ebbflow.training.launch.transport import Connection, RollCallServer

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
        self._hosts: dict[int, str] = {}
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
        return self._hosts[node]

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self.host_of(node) for node in nodes]

    def joined_at(self) -> dict[int, float]:
        """Return when each follower connected (time.monotonic())."""
        return {node: connection.opened_at for node, connection in self._connections.items()}

    def add_joined(self, server: RollCallServer) -> None:
        """Add the followers that have joined at `server` since the last call."""
        for node, (connection, document) in server.joined.items():
            before = self._connections.get(node)
            if before is connection:
                continue
            # The node's handshake timed out at its end, and it has joined again
            if before is not None:
                before.close()
                self.notice_waits.forget(node)
            hello = decode_hello(document)
            self._connections[node] = connection
            self._hosts[node] = hello.host
            if hello.notice is not None:
                self.notice_waits.record(node, hello.notice)
            if self._opened_generation:
                connection.send(encode(NextGeneration(generation=self._opened_generation)))

    def drop(self, node: int, reason: str) -> None:
        connection = self._connections[node]
        connection.refuse(reason)
        connection.close()

    def receive(self, node: int) -> list[AgentMessage]:
        """Return the messages that have arrived from a follower.

        If one is malformed, the connection to the follower is lost.
        """
        connection = self._connections[node]
        connection.keep_alive()
        received: list[AgentMessage] = []
        for document in connection.receive():
            try:
                message = decode(document)
            except ValueError as error:
                connection.refuse(f"it sent a malformed message: {type(error).__name__}: {error}")
                continue
            if message is not None:
                received.append(message)
        return received

    def broadcast(self, message: AgentMessage) -> None:
        document = encode(message)
        for connection in self._connections.values():
            connection.send(document)

    def announce_generation(self, number: int) -> None:
        """Send the number of the next generation to all followers, also to those that join later."""
        self._opened_generation = number
        self.broadcast(NextGeneration(generation=number))

    def forget_generation(self) -> None:
        """Stop announcing the opened generation to followers that join."""
        self._opened_generation = 0

    def announce_wait(self, seconds: float) -> None:
        """Tell all followers that the start is at least `seconds` away.

        Sends at most one message per second.
        """
        if not self._wait_announced.holds:
            self._wait_announced.mark()
            self.broadcast(NoticeWait(seconds=max(seconds, 0.0)))

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
        """The orders that the waiting nodes' interruption notices caused, by node."""
        return dict(self._orders)

    @property
    def longest_seconds(self) -> float:
        return max(self._ends.values(), default=0.0) - time.monotonic()
