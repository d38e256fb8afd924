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
from ebbflow.training.launch.blame import mismatch_of, settle_seconds
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.messages import SIGTERM, GangSpec, Order, Start, Verdict, agreed, guilty, told_to_leave
from ebbflow.training.launch.transport import Connection, Lobby, Message, join

STORE_WAIT_SECONDS = 3.0  # it is told each second; and those who waited along have a moment to go on when it is over


class Recently:
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


class Heard:
    """The part of `ebbflow.training.launch.membership.Peers` that is the same for the lead and for a member."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._witnesses_wanted = False
        self._store_wait = Recently(STORE_WAIT_SECONDS)

    def orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def witnesses_wanted(self) -> bool:
        wanted, self._witnesses_wanted = self._witnesses_wanted, False
        return wanted

    @property
    def somebody_waits(self) -> bool:
        return self._store_wait.holds


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


class Member(Heard):
    """Any other node's view: it reports to node 0 and does what node 0 says."""

    def __init__(
        self,
        spec: GangSpec,
        host: str,
        deadline_seconds: float,
        stopped: Callable[[], bool],
        *,
        secret: Callable[[], bytes | None],
        standing: Order | None = None,
        opened: Callable[[int], object] = lambda number: None,
    ) -> None:
        """secret: reads the secret of this start. standing: what this node waits out before it can start. opened: is
        called with the number of the generation that the gang gathers for, as soon as node 0 tells it."""
        super().__init__()
        hello: Message = {"node": spec.node, "host": host}
        if standing is not None:
            hello["standing"] = standing.to_json()
        door = (spec.main_address, spec.candidate_ports, spec.token)
        self._lead = join(*door, hello, deadline_seconds, stopped, spec.silence_seconds, secret=secret)
        self._stopped, self._opened = stopped, opened
        self._asked_to_wait_until = 0.0
        self._generation = 0
        self._inbox: deque[Message] = deque()
        self._told_standing = Recently(_STANDING_SECONDS)

    def await_start(self, deadline_seconds: float) -> Start | Verdict:
        """The start, or the verdict that there will be none. A node that waits out a notice is waited for besides."""
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < max(limit, self._asked_to_wait_until + deadline_seconds):
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

    def stands_by(self, standing: Order) -> Verdict | None:
        """What this node still waits out, told to node 0; the verdict where there is one meanwhile."""
        if not self._told_standing.holds:
            self._told_standing.mark()
            self._lead.send({"kind": "standing", **standing.to_json()})
        return self.poll()

    def can_start(self) -> None:
        """What this node waited out is over."""
        self._lead.send({"kind": "standing", **Order(seconds=0.0, cause="", node=0).to_json()})

    def ready(self) -> None:
        """This node's ranks of the generation that failed are gone."""
        self._send("ready")

    def report(self, failure: WorkerFailure) -> None:
        self._send("failed", failure=asdict(failure))

    def finished(self, results: dict[int, dict]) -> None:
        self._send("finished", results=results)

    def order(self, order: Order) -> None:
        self._lead.send({"kind": "order", **order.to_json()})

    def waiting(self) -> None:
        self._store_wait.mark()
        self._send("waiting")

    def poll(self) -> Verdict | None:
        if (message := self._next("verdict")) is not None:
            del message["kind"]
            return Verdict.from_message(message)
        if self._lead.closed:
            return Verdict(culprit=f"node 0 was lost: {self._lead.closed}", reason=EndReason.NODE_LOST)
        return None

    def hold(self) -> None:
        """Stay in touch with node 0 while this node is busy otherwise; what it says is kept."""
        self._lead.hold()

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
        self._lead.send({"kind": kind, "generation": self._generation, **content})
