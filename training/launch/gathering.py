"""How a gang gathers, as node 0 sees it: who has come, what they gather for, and who cannot start yet."""

from __future__ import annotations

import time
from collections.abc import Callable

from ebbflow.training.errors import GangError
from ebbflow.training.launch.channel import Connection, Lobby, Message
from ebbflow.training.launch.control import Order
from ebbflow.training.launch.recently import Recently
from ebbflow.training.launch.spec import GangSpec

_STANDING_SECONDS = 1.0  # between two words that somebody waits out a notice
_LOOK_SECONDS = 0.02


class Gathering:
    """Once for each attempt: those who have joined stay for all its generations.

    members, hellos: of those who came, by their numbers. lost: what took a node that was waiting out a notice.
    """

    def __init__(self, spec: GangSpec, secret: bytes) -> None:
        self._spec = spec
        self.members: dict[int, Connection] = {}
        self.hellos: dict[int, Message] = {}
        self.lost: Order | None = None
        self._lobby: Lobby | None = None
        if spec.nodes > 1:
            self._lobby = Lobby(spec.main_address, spec.candidate_ports, spec.token, secret, spec.silence_seconds)
        self._number = 0
        self._standing: dict[int, tuple[float, Order]] = {}  # (time.monotonic() until when, why) by node
        self._told_standing = Recently(_STANDING_SECONDS)

    def gather_for(self, number: int) -> None:
        """The number of the generation, told to all who have come and come yet: they are paid for from now on."""
        self._number = number
        for connection in self.members.values():
            connection.send({"kind": "generation", "generation": number})

    def greet(self) -> None:
        """Let in whoever has come, while node 0 is still busy with something else."""
        if self._lobby is not None:
            self._lobby.admit(self._spec.nodes)
            self._take_in()

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Until all have come, and then until nobody waits out a notice any more, for as long again.

        Raises GangError naming who is missing, and what keeps them.
        """
        if self._lobby is None:
            return

        def looked() -> bool:
            self._take_in()
            return stopped()

        try:
            self._lobby.roll_call(self._spec.nodes, deadline_seconds, looked)
        finally:  # who came is told, also when others did not
            self._take_in()
            self._lobby.close()
            self._lobby = None
        limit = time.monotonic() + deadline_seconds
        while self._standing:
            if stopped():
                raise GangError("roll-call: this agent was told to leave")
            self._check_standing(deadline_seconds, limit)
            now = time.monotonic()
            self.stand_by(max((until - now for until, _ in self._standing.values()), default=0.0))
            for connection in self.members.values():
                connection.hold()
            time.sleep(_LOOK_SECONDS)

    def stand_by(self, seconds: float) -> None:
        """All are told, once a second, that the start is at least so many seconds away, so that they wait for it."""
        if not self._told_standing.holds:
            self._told_standing.mark()
            for connection in self.members.values():
                connection.send({"kind": "standing", "seconds": max(seconds, 0.0)})

    def stands(self, node: int, order: Order) -> None:
        """What a node says of the notice that it waits out; no seconds: that is over."""
        self._standing[node] = (time.monotonic() + order.seconds, order)
        if order.seconds <= 0:
            del self._standing[node]

    def close(self) -> None:
        for connection in self.members.values():
            connection.close()
        if self._lobby is not None:
            self._lobby.close()

    def _take_in(self) -> None:
        for node, (connection, hello) in self._lobby.joined.items() if self._lobby is not None else ():
            if (before := self.members.get(node)) is connection:
                continue
            if before is not None:  # it had no answer in time, and has come again
                before.close()
                self._standing.pop(node, None)
            self.members[node], self.hellos[node] = connection, hello
            if "standing" in hello:
                self.stands(node, Order.from_json(hello["standing"]))
            if self._number:
                connection.send({"kind": "generation", "generation": self._number})

    def _check_standing(self, deadline_seconds: float, limit: float) -> None:
        for node, (_, order) in self._standing.items():
            name = f"node {node} ({self.hellos[node]['host']})"
            if closed := self.members[node].closed:
                self.lost = order
                raise GangError(f"roll-call: {name} was lost while it waited out its {order.cause}: {closed}")
            if time.monotonic() > limit:
                raise GangError(
                    f"roll-call: {name} still waits out its {order.cause}, {deadline_seconds:g} s after all had come"
                )
