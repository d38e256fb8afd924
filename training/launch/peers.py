"""How the agents of a gang agree: node 0 leads (`Lead`), the others follow (`training.launch.member`). Both look alike
to an agent (`Peers`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason
from ebbflow.training.errors import UnreliableReader
from ebbflow.training.launch.channel import Connection, Message
from ebbflow.training.launch.control import SIGTERM, Order
from ebbflow.training.launch.gathering import Gathering
from ebbflow.training.launch.heard import Heard
from ebbflow.training.launch.spec import GangSpec
from ebbflow.training.launch.verdict import Start, Verdict, agreed, guilty, told_to_leave
from ebbflow.training.launch.watch import WorkerFailure, mismatch_of, settle_seconds

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

    def waiting(self) -> None:
        """A rank of this node waits for the store; all nodes are to know."""

    @property
    def somebody_waits(self) -> bool:
        """Whether a rank of any node waited for the store a moment ago."""

    def poll(self) -> Verdict | None: ...
    def hold(self) -> None:
        """Stay in touch while this node does something else; nothing that arrives is lost."""

    def close(self) -> None: ...


class Lead(Heard):
    """Node 0's view: everybody's news, and the verdict. One for all generations of an attempt."""

    def __init__(self, spec: GangSpec, host: str, secret: bytes) -> None:
        super().__init__()
        self._spec, self._host = spec, host
        self._gathering = Gathering(spec, secret)
        self._members, self._hellos = self._gathering.members, self._gathering.hellos
        self._failures: list[WorkerFailure] = []
        self._witnesses: dict[int, tuple[float, WorkerFailure]] = {}
        self._first_failure = float("inf")
        self._finished: dict[int, dict[int, dict]] = {}
        self._ready: set[int] = set()
        self._start: Start | None = None
        self._to_leave: list[Order] = []  # those of them that tell all to leave
        self._left_out: set[int] = set()

    @property
    def nodes(self) -> list[int]:
        """Whose agents are there and take part, by the numbers that they joined with."""
        there = {node for node, connection in self._members.items() if not connection.closed}
        return [0, *sorted(there - self._left_out)]

    @property
    def left_for(self) -> str:
        """Why all were told to leave first, by whichever node."""
        return self._to_leave[0].cause if self._to_leave else ""

    def hold(self) -> None:
        """Stay in touch with the others, who wait for a start, while this node is busy otherwise."""
        for connection in self._members.values():
            connection.hold()
        self._gathering.stand_by(0.0)

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self._host if node == 0 else self._hellos[node]["host"] for node in nodes]

    def gather_for(self, number: int) -> None:
        """All who have come, and come yet, are told the number of the generation, and can say what they cost."""
        self._gathering.gather_for(number)

    def greet(self) -> None:
        """Let in whoever has come, and hear them, while node 0 is not ready for the roll-call."""
        self._gathering.greet()
        self._hear_all()

    def stand_by(self, seconds: float) -> str:
        """While node 0 waits so many seconds for the end of a notice: why to leave instead, or nothing."""
        self.greet()
        self._gathering.stand_by(seconds)
        return self.left_for

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Before the first start: until all have come and can start. Raises GangError naming who is missing."""

        def told() -> bool:
            self._hear_all()
            return stopped() or bool(self.left_for)

        if self._start is not None:  # those who joined stay for all generations
            return
        try:
            self._gathering.roll_call(deadline_seconds, told)
        finally:
            if self._gathering.lost is not None:  # its machine was to go
                self._to_leave.append(self._gathering.lost)

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
        if order.leave and order.node not in self._left_out:
            self._to_leave.append(order)
        self._broadcast({"kind": "order", **order.to_json()})

    def waiting(self) -> None:
        self._store_wait.mark()
        self._broadcast({"kind": "waiting"})

    def poll(self) -> Verdict | None:
        for node in self._start.nodes[1:]:
            self._hear(node, self._members[node])
            self._notice_loss(node)
        if self._first_failure < float("inf") and self._settled():
            return self._announce(self._guilty())
        if len(self._finished) == len(self._start.nodes):
            return self._announce(self._without_noticed(agreed(self._finished, self._start.generation)))
        return None

    def close(self) -> None:
        self._gathering.close()

    def _hear_all(self) -> None:
        for node, connection in self._members.items():
            self._hear(node, connection)

    def _hear(self, node: int, connection: Connection) -> None:
        connection.keep_alive()
        for message in connection.receive():
            try:
                self._act_on(node, message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                connection.refuse(f"it sent a message that cannot be understood: {type(error).__name__}: {error}")

    def _act_on(self, node: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "order":
            self.order(Order.from_json(message))
        elif kind == "standing":
            self._gathering.stands(node, Order.from_json(message))
        elif self._start is None or message["generation"] != self._start.generation:
            return  # of a generation that has ended: its end is known
        elif kind == "failed":
            self.report(WorkerFailure(**message["failure"]))
        elif kind == "finished":
            self._finished[node] = {int(rank): result for rank, result in message["results"].items()}
        elif kind == "ready":
            self._ready.add(node)
        elif kind == "waiting":
            self.waiting()

    def _notice_loss(self, node: int) -> None:
        lost = self._members[node].closed and node not in self._finished
        if lost and not any(failure.killed_by == f"node {node}" for failure in self._failures):
            number = self._start.nodes.index(node)
            first, text = number * self._spec.processes_per_node, self._lost(node)
            # A lost node takes its ranks along, so it is guiltier than any rank: timestamp 0 puts it first.
            self.report(WorkerFailure(rank=first, node=number, message=text, killed_by=f"node {node}"))

    def _lost(self, node: int) -> str:
        """By the number that it had in this generation, which is that of its events and logs."""
        number, host = self._start.nodes.index(node), self._hellos[node]["host"]
        return f"node {number} ({host}) was lost: {self._members[node].closed}"

    def _guilty(self) -> Verdict:
        verdict = self._without_noticed(guilty(self._evidence()))
        if verdict.error == UnreliableReader.__name__ and not verdict.left_out:
            return self._without_reader(verdict)
        if verdict.reason == EndReason.NODE_LOST and (self._enough() or self.left_for):
            return replace(verdict, again=True)  # when all are to leave, the regrouping says that it ends
        return verdict

    def _without_noticed(self, verdict: Verdict) -> Verdict:
        """Where only machines of other nodes had notices, and enough nodes are left without those, these go on.

        All have left after the same step, and saved it where there was time: the next generation redoes nothing then.
        SIGTERM is different: whoever sends it to one agent may be about to send it to all.
        """
        noticed = {order.node for order in self._to_leave if order.cause != SIGTERM}
        least = self._spec.config["cluster"].get("min_nodes")
        if not noticed or 0 in noticed or len(noticed) < len({order.node for order in self._to_leave}):
            return verdict
        if least is None or len(set(self.nodes) - noticed) < least:
            return verdict
        if verdict.outcome is not None and verdict.outcome.outcome != Outcome.INTERRUPTED:
            return verdict
        if verdict.outcome is None and not (verdict.again or verdict.reason == EndReason.NODE_LOST):
            return verdict
        self._left_out |= noticed
        self._to_leave.clear()
        return replace(verdict, again=True, left_out=sorted(noticed))

    def _without_reader(self, verdict: Verdict) -> Verdict:
        """A node that reads commits wrongly goes on no more where enough others are left. Else all of it starts again,
        so that new processes read: node 0 is never left out, since its agent coordinates."""
        node = self._start.nodes[verdict.ranks[0] // self._spec.processes_per_node]
        least = self._spec.config["cluster"].get("min_nodes")
        if node == 0 or least is None or len(self.nodes) - 1 < least:
            return verdict
        self._left_out.add(node)
        return replace(verdict, left_out=[node], fingerprint="")

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
