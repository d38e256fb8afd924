"""How the agents of a gang agree: node 0 leads (`Lead`), the others follow (`Member`). Both look alike to an agent."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from infra.events import EndReason
from training.launch.channel import Connection, Lobby, Message, join
from training.launch.control import Order
from training.launch.spec import GangSpec
from training.launch.verdict import Start, Verdict, agreed, guilty, told_to_leave
from training.launch.watch import WorkerFailure, mismatch_of, settle_seconds

_WITNESS_SECONDS = 10.0  # where a rank stood longer ago says nothing of what happens now


class Peers(Protocol):
    """The other nodes, as an agent sees them."""

    def report(self, failure: WorkerFailure) -> None: ...
    def finished(self, results: dict[int, dict]) -> None: ...
    def order(self, order: Order) -> None:
        """Have all nodes told to leave, or to save, this one among them."""

    def orders(self) -> list[Order]:
        """What the lead has told all nodes since the last call."""

    def witnesses_wanted(self) -> bool:
        """Whether the lead has asked, since the last call, where the ranks of this node stand."""

    def poll(self) -> Verdict | None: ...
    def close(self) -> None: ...


class Lead:
    """Node 0's view: everybody's news, and the verdict. One for all generations of an attempt."""

    def __init__(self, spec: GangSpec, host: str) -> None:
        self._spec, self._host = spec, host
        self._lobby: Lobby | None = None
        if spec.nodes > 1:
            self._lobby = Lobby(spec.main_address, spec.candidate_ports, spec.token, spec.silence_seconds)
        self._members: dict[int, Connection] = {}
        self._hellos: dict[int, Message] = {}
        self._failures: list[WorkerFailure] = []
        self._witnesses: dict[int, tuple[float, WorkerFailure]] = {}
        self._first_failure = float("inf")
        self._witnesses_wanted = False
        self._finished: dict[int, dict[int, dict]] = {}
        self._ready: set[int] = set()
        self._start: Start | None = None
        self._orders: list[Order] = []
        self.left_for = ""  # why all were told to leave first, by whichever node

    @property
    def nodes(self) -> list[int]:
        """Whose agents are there, by the numbers that they joined with."""
        return [0, *sorted(node for node, connection in self._members.items() if not connection.closed)]

    def hold(self) -> None:
        """Stay in touch with the others while this node is busy otherwise."""
        for connection in self._members.values():
            connection.hold()

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self._host if node == 0 else self._hellos[node]["host"] for node in nodes]

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Once: those who joined stay for all generations."""
        if (lobby := self._lobby) is None or self._members:
            return

        def told() -> bool:
            for node, (connection, _) in lobby.joined.items():
                self._hear(node, connection)
            return stopped() or bool(self.left_for)

        try:
            lobby.roll_call(self._spec.nodes, deadline_seconds, told)
        finally:  # who came is told, also when others did not
            self._members = {node: connection for node, (connection, _) in lobby.joined.items()}
            self._hellos = {node: hello for node, (_, hello) in lobby.joined.items()}

    def start(self, start: Start) -> None:
        self._start = start
        self._failures, self._witnesses, self._finished, self._ready = [], {}, {}, set()
        self._first_failure, self._witnesses_wanted = float("inf"), False
        self._broadcast({"kind": "start", **asdict(start)})

    def regroup(self, deadline_seconds: float, stopped: Callable[[], bool]) -> list[int] | Verdict:
        """Wait until every node has ended its ranks: the nodes that go on, or the last word when too few are left."""
        limit = time.monotonic() + deadline_seconds
        while True:
            for node in self.nodes[1:]:
                self._hear(node, self._members[node])
            if stopped() or self.left_for:  # who is not ready is not cut off: it finds the last word when it is
                return told_to_leave(self.left_for or "this node")
            late = set(self.nodes) - self._ready - {0}
            if not late or time.monotonic() >= limit:
                break
            time.sleep(0.01)
        for node in late:
            connection = self._members[node]
            connection.closed = connection.closed or f"its ranks did not end within {deadline_seconds:g} s"
            connection.close()
        there = self.nodes
        lost = [node for node in self._start.nodes if node not in there]
        if lost and not self._enough():
            return Verdict(culprit="; ".join(self._lost(node) for node in lost), reason=EndReason.NODE_LOST)
        return there

    def give_up(self, verdict: Verdict) -> Verdict:
        """There will be no start, or no further word: everybody is told why."""
        return self._announce(verdict)

    def report(self, failure: WorkerFailure) -> None:
        now = time.monotonic()
        if failure.witness:
            self._witnesses[failure.rank] = (now, failure)
            trouble = mismatch_of(self._evidence()) is not None  # proof enough, though nobody has failed yet
        else:
            self._failures.append(failure)
            trouble = True
        if trouble and self._first_failure == float("inf"):
            self._first_failure, self._witnesses_wanted = now, True
            self._broadcast({"kind": "witnesses"})

    def finished(self, results: dict[int, dict]) -> None:
        self._finished[0] = results

    def order(self, order: Order) -> None:
        self._orders.append(order)
        self.left_for = self.left_for or (order.cause if order.leave else "")
        self._broadcast({"kind": "order", **order.to_json()})

    def orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def witnesses_wanted(self) -> bool:
        wanted, self._witnesses_wanted = self._witnesses_wanted, False
        return wanted

    def poll(self) -> Verdict | None:
        for node in self._start.nodes[1:]:
            self._hear(node, self._members[node])
            self._notice_loss(node)
        if self._first_failure < float("inf") and self._settled():
            return self._announce(self._guilty())
        if len(self._finished) == len(self._start.nodes):
            return self._announce(agreed(self._finished, self._start.generation))
        return None

    def close(self) -> None:
        for connection in self._members.values():
            connection.close()
        if self._lobby:
            self._lobby.close()

    def _hear(self, node: int, connection: Connection) -> None:
        connection.keep_alive()
        for message in connection.receive():
            kind = message["kind"]
            if kind == "order":
                self.order(Order.from_json(message))
            elif self._start is None or message["generation"] != self._start.generation:
                continue  # of a generation that has ended: its end is known
            elif kind == "failed":
                self.report(WorkerFailure(**message["failure"]))
            elif kind == "finished":
                self._finished[node] = {int(rank): result for rank, result in message["results"].items()}
            elif kind == "ready":
                self._ready.add(node)

    def _notice_loss(self, node: int) -> None:
        lost = self._members[node].closed and node not in self._finished
        if lost and not any(failure.killed_by == f"node {node}" for failure in self._failures):
            first = self._start.nodes.index(node) * self._spec.processes_per_node
            # A lost node takes its ranks along, so it is guiltier than any rank: timestamp 0 puts it first.
            self.report(WorkerFailure(rank=first, node=node, message=self._lost(node), killed_by=f"node {node}"))

    def _lost(self, node: int) -> str:
        return f"node {node} ({self._hellos[node]['host']}) was lost: {self._members[node].closed}"

    def _guilty(self) -> Verdict:
        verdict = guilty(self._evidence())
        if verdict.reason == EndReason.NODE_LOST and (self._enough() or self.left_for):
            return replace(verdict, again=True)  # when all are to leave, the regrouping says that it ends
        return verdict

    def _settled(self) -> bool:
        heard = {one.rank for one in self._evidence()}
        all_heard = len(heard) == len(self._start.nodes) * self._spec.processes_per_node
        return time.monotonic() >= self._first_failure + settle_seconds(self._failures, all_heard=all_heard)

    def _evidence(self) -> list[WorkerFailure]:
        """What failed, and where the others stand, as far as that is news."""
        oldest = time.monotonic() - _WITNESS_SECONDS
        return self._failures + [witness for at, witness in self._witnesses.values() if at >= oldest]

    def _enough(self) -> bool:
        """Whether the nodes that are left may go on without the lost ones."""
        least = self._spec.config["cluster"].get("min_nodes")
        return least is not None and len(self.nodes) >= least

    def _announce(self, verdict: Verdict) -> Verdict:
        self._broadcast({"kind": "verdict", **asdict(verdict)})
        return verdict

    def _broadcast(self, message: Message) -> None:
        for connection in self._members.values():
            connection.send(message)


class Member:
    """Any other node's view: it reports to node 0 and does what node 0 says."""

    def __init__(self, spec: GangSpec, host: str, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        hello: Message = {"node": spec.node, "host": host}
        door = (spec.main_address, spec.candidate_ports, spec.token)
        self._lead = join(*door, hello, deadline_seconds, stopped, spec.silence_seconds)
        self._stopped = stopped
        self._generation = 0
        self._inbox: deque[Message] = deque()
        self._orders: list[Order] = []
        self._witnesses_wanted = False

    def await_start(self, deadline_seconds: float) -> Start | Verdict:
        """The start, or the verdict that there will be none."""
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < limit:
            if (message := self._next("start", "verdict")) is not None:
                if message.pop("kind") == "verdict":
                    return Verdict.from_message(message)
                start = Start(**message)
                self._generation, self._witnesses_wanted = start.generation, False
                return start
            if self._lead.closed or self._stopped():
                break
            time.sleep(0.01)
        if self._stopped():
            return told_to_leave("this node")
        cause = self._lead.closed or f"no start within {deadline_seconds:g} s"
        return Verdict(culprit=f"node 0 was lost before the start: {cause}", reason=EndReason.NODE_LOST)

    def ready(self) -> None:
        """This node's ranks of the generation that failed are gone."""
        self._send("ready")

    def report(self, failure: WorkerFailure) -> None:
        self._send("failed", failure=asdict(failure))

    def finished(self, results: dict[int, dict]) -> None:
        self._send("finished", results=results)

    def order(self, order: Order) -> None:
        self._lead.send({"kind": "order", **order.to_json()})

    def orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def witnesses_wanted(self) -> bool:
        wanted, self._witnesses_wanted = self._witnesses_wanted, False
        return wanted

    def poll(self) -> Verdict | None:
        if (message := self._next("verdict")) is not None:
            del message["kind"]
            return Verdict.from_message(message)
        if self._lead.closed:
            return Verdict(culprit=f"node 0 was lost: {self._lead.closed}", reason=EndReason.NODE_LOST)
        return None

    def close(self) -> None:
        self._lead.close()

    def _next(self, *kinds: str) -> Message | None:
        """The next message of these kinds; orders are put aside, what comes after it is left for later."""
        self._lead.keep_alive()
        self._inbox.extend(self._lead.receive())
        while self._inbox:
            message = self._inbox.popleft()
            if message["kind"] == "order":
                self._orders.append(Order.from_json(message))
            elif message["kind"] == "witnesses":
                self._witnesses_wanted = True
            elif message["kind"] in kinds:
                return message
        return None

    def _send(self, kind: str, **content: object) -> None:
        self._lead.send({"kind": kind, "generation": self._generation, **content})
