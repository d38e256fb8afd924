"""The nodes of a gang, as the agents of node 0 and of the other nodes see them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import EndReason
from ebbflow.training.errors import GangError, UnreliableReader
from ebbflow.training.launch.blame import detect_mismatch, settle_seconds
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.messages import (
    SIGTERM,
    GangSpec,
    GenerationEnd,
    GenerationStart,
    RankOrder,
    end_from_failures,
    end_from_results,
    end_from_stop_request,
)
from ebbflow.training.launch.transport import Connection, Message, RollCallServer, join_gang

STORE_WAIT_SECONDS = 3.0  # it is told each second; and those who waited along have a moment to go on when it is over


class StickyFlag:
    """Whether `mark` was called within the last `seconds`."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._now = seconds, now
        self._marked = float("-inf")

    def mark(self) -> None:
        self._marked = self._now()

    @property
    def seconds_since(self) -> float:
        return self._now() - self._marked

    @property
    def holds(self) -> bool:
        return self.seconds_since < self._seconds


class Inbox:
    """The part of `ebbflow.training.launch.membership.Peers` that is the same for the lead and for a member."""

    def __init__(self) -> None:
        self._orders: list[RankOrder] = []
        self._witnesses_wanted = False
        self._store_wait = StickyFlag(STORE_WAIT_SECONDS)

    def orders(self) -> list[RankOrder]:
        orders, self._orders = self._orders, []
        return orders

    def take_witness_request(self) -> bool:
        wanted, self._witnesses_wanted = self._witnesses_wanted, False
        return wanted

    @property
    def store_wait_active(self) -> bool:
        return self._store_wait.holds


_STANDING_SECONDS = 1.0  # between two words that somebody waits out a notice
_LOOK_SECONDS = 0.02


class RollCall:
    """Once for each attempt: those who have joined stay for all its generations.

    members, hellos: of those who came, by their numbers. lost: what took a node that was waiting out a notice.
    """

    def __init__(self, spec: GangSpec, secret: bytes) -> None:
        self._spec = spec
        self.members: dict[int, Connection] = {}
        self.hellos: dict[int, Message] = {}
        self.lost: RankOrder | None = None
        self._lobby: RollCallServer | None = None
        if spec.nodes > 1:
            self._lobby = RollCallServer(
                spec.main_address, spec.candidate_ports, spec.token, secret, spec.silence_seconds
            )
        self._number = 0
        self._standing: dict[int, tuple[float, RankOrder]] = {}  # (time.monotonic() until when, why) by node
        self._wait_announced = StickyFlag(_STANDING_SECONDS)

    def announce_generation(self, number: int) -> None:
        """The number of the generation, told to all who have come and come yet: they are paid for from now on."""
        self._number = number
        for connection in self.members.values():
            connection.send({"kind": "generation", "generation": number})

    def admit_nodes(self) -> None:
        """Let in whoever has come, while node 0 is still busy with something else."""
        if self._lobby is not None:
            self._lobby.admit(self._spec.nodes)
            self._add_joined()

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Until all have come, and then until nobody waits out a notice any more, for as long again.

        Raises GangError naming who is missing, and what keeps them.
        """
        if self._lobby is None:
            return

        def looked() -> bool:
            self._add_joined()
            return stopped()

        try:
            self._lobby.roll_call(self._spec.nodes, deadline_seconds, looked)
        finally:  # who came is told, also when others did not
            self._add_joined()
            self._lobby.close()
            self._lobby = None
        limit = time.monotonic() + deadline_seconds
        while self._standing:
            if stopped():
                raise GangError("roll-call: this agent was told to leave")
            self._check_standing(deadline_seconds, limit)
            now = time.monotonic()
            self.announce_wait(max((until - now for until, _ in self._standing.values()), default=0.0))
            for connection in self.members.values():
                connection.keep_alive()
            time.sleep(_LOOK_SECONDS)

    def announce_wait(self, seconds: float) -> None:
        """All are told, once a second, that the start is at least so many seconds away, so that they wait for it."""
        if not self._wait_announced.holds:
            self._wait_announced.mark()
            for connection in self.members.values():
                connection.send({"kind": "standing", "seconds": max(seconds, 0.0)})

    def record_wait(self, node: int, order: RankOrder) -> None:
        """What a node says of the notice that it waits out; no seconds: that is over."""
        self._standing[node] = (time.monotonic() + order.seconds, order)
        if order.seconds <= 0:
            del self._standing[node]

    def close(self) -> None:
        for connection in self.members.values():
            connection.close()
        if self._lobby is not None:
            self._lobby.close()

    def _add_joined(self) -> None:
        for node, (connection, hello) in self._lobby.joined.items() if self._lobby is not None else ():
            if (before := self.members.get(node)) is connection:
                continue
            if before is not None:  # it had no answer in time, and has come again
                before.close()
                self._standing.pop(node, None)
            self.members[node], self.hellos[node] = connection, hello
            if "standing" in hello:
                self.record_wait(node, RankOrder.from_json(hello["standing"]))
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


_WITNESS_SECONDS = 10.0  # where a rank stood longer ago says nothing of what happens now


class Peers(Protocol):
    """The other nodes, as an agent sees them."""

    def report(self, failure: WorkerFailure) -> None: ...
    def report_results(self, results: dict[int, dict]) -> None: ...
    def order(self, order: RankOrder) -> None:
        """Have all nodes told to leave, or to save, this one among them."""

    def orders(self) -> list[RankOrder]:
        """What the lead has told all nodes since the last call."""

    def take_witness_request(self) -> bool:
        """Whether the lead has asked, since the last call, where the ranks of this node stand."""

    def waiting(self) -> None:
        """A rank of this node waits for the store; all nodes are to know."""

    @property
    def store_wait_active(self) -> bool:
        """Whether a rank of any node waited for the store a moment ago."""

    def poll(self) -> GenerationEnd | None: ...
    def keep_in_touch(self) -> None:
        """Stay in touch while this node does something else; nothing that arrives is lost."""

    def close(self) -> None: ...


class CoordinatorPeers(Inbox):
    """Node 0's view: everybody's news, and the verdict. One for all generations of an attempt."""

    def __init__(self, spec: GangSpec, host: str, secret: bytes) -> None:
        super().__init__()
        self._spec, self._host = spec, host
        self._gathering = RollCall(spec, secret)
        self._members, self._hellos = self._gathering.members, self._gathering.hellos
        self._failures: list[WorkerFailure] = []
        self._witnesses: dict[int, tuple[float, WorkerFailure]] = {}
        self._first_failure = float("inf")
        self._finished: dict[int, dict[int, dict]] = {}
        self._ready: set[int] = set()
        self._start: GenerationStart | None = None
        self._to_leave: list[RankOrder] = []  # those of them that tell all to leave
        self._left_out: set[int] = set()

    @property
    def nodes(self) -> list[int]:
        """Whose agents are there and take part, by the numbers that they joined with."""
        there = {node for node, connection in self._members.items() if not connection.closed}
        return [0, *sorted(there - self._left_out)]

    @property
    def leave_cause(self) -> str:
        """Why all were told to leave first, by whichever node."""
        return self._to_leave[0].cause if self._to_leave else ""

    def keep_in_touch(self) -> None:
        """Stay in touch with the others, who wait for a start, while this node is busy otherwise."""
        for connection in self._members.values():
            connection.keep_alive()
        self._gathering.announce_wait(0.0)

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self._host if node == 0 else self._hellos[node]["host"] for node in nodes]

    def announce_generation(self, number: int) -> None:
        """All who have come, and come yet, are told the number of the generation, and can say what they cost."""
        self._gathering.announce_generation(number)

    def admit_nodes(self) -> None:
        """Let in whoever has come, and hear them, while node 0 is not ready for the roll-call."""
        self._gathering.admit_nodes()
        self._receive_all()

    def announce_wait(self, seconds: float) -> str:
        """While node 0 waits so many seconds for the end of a notice: why to leave instead, or nothing."""
        self.admit_nodes()
        self._gathering.announce_wait(seconds)
        return self.leave_cause

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Before the first start: until all have come and can start. Raises GangError naming who is missing."""

        def told() -> bool:
            self._receive_all()
            return stopped() or bool(self.leave_cause)

        if self._start is not None:  # those who joined stay for all generations
            return
        try:
            self._gathering.roll_call(deadline_seconds, told)
        finally:
            if self._gathering.lost is not None:  # its machine was to go
                self._to_leave.append(self._gathering.lost)

    def start(self, start: GenerationStart) -> None:
        self._start = start
        self._failures, self._witnesses, self._finished, self._ready = [], {}, {}, set()
        self._first_failure, self._witnesses_wanted = float("inf"), False
        self._broadcast({"kind": "start", **asdict(start)})

    def regroup(self, deadline_seconds: float, stopped: Callable[[], bool]) -> list[int] | GenerationEnd:
        """Wait until every node has ended its ranks: the nodes that go on, or the last word when too few are left."""
        limit = time.monotonic() + deadline_seconds
        while True:
            for node in self.nodes[1:]:
                self._receive(node, self._members[node])
            if stopped() or self.leave_cause:  # who is not ready is not cut off: it finds the last word when it is
                return end_from_stop_request(self.leave_cause or "this node")
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
        if lost and not self._enough_nodes_left():
            return GenerationEnd(culprit="; ".join(self._lost(node) for node in lost), reason=EndReason.NODE_LOST)
        return there

    def give_up(self, verdict: GenerationEnd) -> GenerationEnd:
        """There will be no start, or no further word: everybody is told why."""
        return self._announce(verdict)

    def report(self, failure: WorkerFailure) -> None:
        now = time.monotonic()
        if failure.witness:
            self._witnesses[failure.rank] = (now, failure)
            trouble = detect_mismatch(self._evidence()) is not None  # proof enough, though nobody has failed yet
        else:
            self._failures.append(failure)
            trouble = True
        if trouble and self._first_failure == float("inf"):
            self._first_failure, self._witnesses_wanted = now, True
            self._broadcast({"kind": "witnesses"})

    def report_results(self, results: dict[int, dict]) -> None:
        self._finished[0] = results

    def order(self, order: RankOrder) -> None:
        self._orders.append(order)
        if order.leave and order.node not in self._left_out:
            self._to_leave.append(order)
        self._broadcast({"kind": "order", **order.to_json()})

    def waiting(self) -> None:
        self._store_wait.mark()
        self._broadcast({"kind": "waiting"})

    def poll(self) -> GenerationEnd | None:
        for node in self._start.nodes[1:]:
            self._receive(node, self._members[node])
            self._detect_loss(node)
        if self._first_failure < float("inf") and self._evidence_complete():
            return self._announce(self._decide_end())
        if len(self._finished) == len(self._start.nodes):
            return self._announce(self._go_on_without_noticed(end_from_results(self._finished, self._start.generation)))
        return None

    def close(self) -> None:
        self._gathering.close()

    def _receive_all(self) -> None:
        for node, connection in self._members.items():
            self._receive(node, connection)

    def _receive(self, node: int, connection: Connection) -> None:
        connection.keep_alive()
        for message in connection.receive():
            try:
                self._act_on(node, message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                connection.refuse(f"it sent a message that cannot be understood: {type(error).__name__}: {error}")

    def _act_on(self, node: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "order":
            self.order(RankOrder.from_json(message))
        elif kind == "standing":
            self._gathering.record_wait(node, RankOrder.from_json(message))
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

    def _detect_loss(self, node: int) -> None:
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

    def _decide_end(self) -> GenerationEnd:
        verdict = self._go_on_without_noticed(end_from_failures(self._evidence()))
        if verdict.error == UnreliableReader.__name__ and not verdict.left_out:
            return self._go_on_without_reader(verdict)
        if verdict.reason == EndReason.NODE_LOST and (self._enough_nodes_left() or self.leave_cause):
            return replace(verdict, again=True)  # when all are to leave, the regrouping says that it ends
        return verdict

    def _go_on_without_noticed(self, verdict: GenerationEnd) -> GenerationEnd:
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

    def _go_on_without_reader(self, verdict: GenerationEnd) -> GenerationEnd:
        """A node that reads commits wrongly goes on no more where enough others are left. Else all of it starts again,
        so that new processes read: node 0 is never left out, since its agent coordinates."""
        node = self._start.nodes[verdict.ranks[0] // self._spec.processes_per_node]
        least = self._spec.config["cluster"].get("min_nodes")
        if node == 0 or least is None or len(self.nodes) - 1 < least:
            return verdict
        self._left_out.add(node)
        return replace(verdict, left_out=[node], fingerprint="")

    def _evidence_complete(self) -> bool:
        heard = {one.rank for one in self._evidence()}
        all_heard = len(heard) == len(self._start.nodes) * self._spec.processes_per_node
        return time.monotonic() >= self._first_failure + settle_seconds(self._failures, all_heard=all_heard)

    def _evidence(self) -> list[WorkerFailure]:
        """What failed, and where the others stand, as far as that is news."""
        oldest = time.monotonic() - _WITNESS_SECONDS
        return self._failures + [witness for at, witness in self._witnesses.values() if at >= oldest]

    def _enough_nodes_left(self) -> bool:
        """Whether the nodes that are left may go on without the lost ones."""
        least = self._spec.config["cluster"].get("min_nodes")
        return least is not None and len(self.nodes) >= least

    def _announce(self, verdict: GenerationEnd) -> GenerationEnd:
        self._broadcast({"kind": "verdict", **asdict(verdict)})
        return verdict

    def _broadcast(self, message: Message) -> None:
        for connection in self._members.values():
            connection.send(message)


class FollowerPeers(Inbox):
    """Any other node's view: it reports to node 0 and does what node 0 says."""

    def __init__(
        self,
        spec: GangSpec,
        host: str,
        deadline_seconds: float,
        stopped: Callable[[], bool],
        *,
        secret: Callable[[], bytes | None],
        standing: RankOrder | None = None,
        opened: Callable[[int], object] = lambda number: None,
    ) -> None:
        """secret: reads the secret of this start. standing: what this node waits out before it can start. opened: is
        called with the number of the generation that the gang gathers for, as soon as node 0 tells it."""
        super().__init__()
        hello: Message = {"node": spec.node, "host": host}
        if standing is not None:
            hello["standing"] = standing.to_json()
        door = (spec.main_address, spec.candidate_ports, spec.token)
        self._connection = join_gang(*door, hello, deadline_seconds, stopped, spec.silence_seconds, secret=secret)
        self._stopped, self._opened = stopped, opened
        self._asked_to_wait_until = 0.0
        self._generation = 0
        self._inbox: deque[Message] = deque()
        self._wait_announced = StickyFlag(_STANDING_SECONDS)

    def await_start(self, deadline_seconds: float) -> GenerationStart | GenerationEnd:
        """The start, or the verdict that there will be none. A node that waits out a notice is waited for besides."""
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < max(limit, self._asked_to_wait_until + deadline_seconds):
            if (message := self._next("start", "verdict")) is not None:
                if message.pop("kind") == "verdict":
                    return GenerationEnd.from_message(message)
                start = GenerationStart(**message)
                self._generation, self._witnesses_wanted = start.generation, False
                return start
            if self._connection.closed or self._stopped():
                break
            time.sleep(0.01)
        if self._stopped():
            return end_from_stop_request("this node")
        cause = self._connection.closed or f"no start within {deadline_seconds:g} s"
        return GenerationEnd(culprit=f"node 0 was lost before the start: {cause}", reason=EndReason.NODE_LOST)

    def report_wait(self, standing: RankOrder) -> GenerationEnd | None:
        """What this node still waits out, told to node 0; the verdict where there is one meanwhile."""
        if not self._wait_announced.holds:
            self._wait_announced.mark()
            self._connection.send({"kind": "standing", **standing.to_json()})
        return self.poll()

    def report_wait_over(self) -> None:
        """What this node waited out is over."""
        self._connection.send({"kind": "standing", **RankOrder(seconds=0.0, cause="", node=0).to_json()})

    def ready(self) -> None:
        """This node's ranks of the generation that failed are gone."""
        self._send("ready")

    def report(self, failure: WorkerFailure) -> None:
        self._send("failed", failure=asdict(failure))

    def report_results(self, results: dict[int, dict]) -> None:
        self._send("finished", results=results)

    def order(self, order: RankOrder) -> None:
        self._connection.send({"kind": "order", **order.to_json()})

    def waiting(self) -> None:
        self._store_wait.mark()
        self._send("waiting")

    def poll(self) -> GenerationEnd | None:
        if (message := self._next("verdict")) is not None:
            del message["kind"]
            return GenerationEnd.from_message(message)
        if self._connection.closed:
            return GenerationEnd(culprit=f"node 0 was lost: {self._connection.closed}", reason=EndReason.NODE_LOST)
        return None

    def keep_in_touch(self) -> None:
        """Stay in touch with node 0 while this node is busy otherwise; what it says is kept."""
        self._connection.keep_alive()

    def close(self) -> None:
        self._connection.close()

    def _next(self, *kinds: str) -> Message | None:
        """The next message of these kinds; orders are put aside, what comes after it is left for later."""
        self._connection.keep_alive()
        self._inbox.extend(self._connection.receive())
        while self._inbox:
            message = self._inbox.popleft()
            if message["kind"] == "order":
                self._orders.append(RankOrder.from_json(message))
            elif message["kind"] == "waiting":
                self._store_wait.mark()
            elif message["kind"] == "witnesses":
                self._witnesses_wanted = True
            elif message["kind"] == "generation":
                self._opened(message["generation"])
            elif message["kind"] == "standing":
                self._asked_to_wait_until = time.monotonic() + message["seconds"]
            elif message["kind"] in kinds:
                return message
        return None

    def _send(self, kind: str, **content: object) -> None:
        self._connection.send({"kind": kind, "generation": self._generation, **content})
