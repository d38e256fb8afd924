"""Communication of an agent with the agents of the other nodes.

`CoordinatorPeers` is node 0's side: it admits the followers, collects their reports and decides how
a generation ended. `FollowerPeers` is the side of every other node: it reports to node 0 and
receives node 0's decisions.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ebbflow.core.errors import Outcome
from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError, UnreliableReader
from ebbflow.training.launch import messages
from ebbflow.training.launch.blame import (
    Culprit,
    LoneCall,
    detect_mismatch,
    detect_stall,
    settle_seconds,
)
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.transport import Connection, Message, RollCallServer, join_gang

# Waits are reported once per second; the rest is for ranks to continue after the wait
STORE_WAIT_SECONDS = 3.0


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


def in_jobset() -> bool:
    return "METAFLOW_KUBERNETES_JOBSET_NAME" in os.environ


def replacements_of(config: Mapping[str, Any]) -> int:
    """Return how many lost nodes the cluster's scheduler replaces within an attempt: 0 outside of a
    JobSet.
    """
    if in_jobset():
        return int((config.get("kubernetes") or {}).get("node_replacements") or 0)
    return 0


_WAIT_REPORT_SECONDS = 1.0  # between two messages that a node waits for its notice to expire
_LOOK_SECONDS = 0.02
_WITNESS_SECONDS = 10.0  # older positions of ranks say nothing about the failure


class _Peers:
    def __init__(self) -> None:
        self._orders: list[messages.RankOrder] = []
        self._witnesses_wanted = False
        self._store_wait = StickyFlag(STORE_WAIT_SECONDS)
        # A newly found rank for which all others wait, although it is idle
        self.stall: Culprit | None = None

    def orders(self) -> list[messages.RankOrder]:
        orders = self._orders
        self._orders = []
        return orders

    def take_witness_request(self) -> bool:
        """Return whether the coordinator has requested the positions of the ranks since the last
        call.
        """
        wanted = self._witnesses_wanted
        self._witnesses_wanted = False
        return wanted

    @property
    def store_wait_active(self) -> bool:
        return self._store_wait.holds


class CoordinatorPeers(_Peers):
    """Node 0's connections to the followers.

    It combines their reports and decides the result of each generation.
    """

    def __init__(self, spec: messages.GangSpec, host: str, secret: bytes) -> None:
        super().__init__()
        self._spec = spec
        self._host = host
        self._secret = secret
        # Lost nodes that the scheduler replaces within this attempt (Kubernetes, in a JobSet).
        self._replacements = replacements_of(spec.config)
        self._members: dict[int, Connection] = {}  # nodes that have joined
        self._hellos: dict[int, Message] = {}  # their first messages
        self._server: RollCallServer | None = None  # until all nodes have joined
        self._returns: RollCallServer | None = None  # of a smaller gang: lost nodes that are back
        # The ranks were asked to leave, so that a node that has come back takes part
        self._growing = False
        if spec.nodes > 1:
            self._server = self._open_server()
        self._number = 0
        # node: (time.monotonic() of the wait's end, its notice)
        self._waits: dict[int, tuple[float, messages.RankOrder]] = {}
        self._wait_announced = StickyFlag(_WAIT_REPORT_SECONDS)
        self._failures: list[WorkerFailure] = []
        self._witnesses: dict[int, tuple[float, WorkerFailure]] = {}
        self._first_failure = float("inf")
        self._lone_call = LoneCall()
        self._finished: dict[int, dict[int, dict]] = {}
        self._ready: set[int] = set()
        self._started: messages.GenerationStart | None = None
        self._leave_orders: list[messages.RankOrder] = []
        self._left_out: set[int] = set()

    def _open_server(self) -> RollCallServer:
        spec = self._spec
        return RollCallServer(
            spec.main_address, spec.candidate_ports, spec.token, self._secret, spec.silence_seconds
        )

    @property
    def nodes(self) -> list[int]:
        """Numbers (`GangSpec.node`) of the connected nodes, which take part in the next generation."""
        connected = {node for node, connection in self._members.items() if not connection.closed}
        return [0, *sorted(connected - self._left_out)]

    @property
    def leave_cause(self) -> str:
        if self._leave_orders:
            return self._leave_orders[0].cause
        return ""

    @property
    def _start(self) -> messages.GenerationStart:
        assert self._started is not None, "no generation has started"
        return self._started

    def keep_in_touch(self) -> None:
        """Exchange pings with the followers while node 0 is busy.

        All other received messages stay queued.
        """
        for connection in self._members.values():
            connection.keep_alive()
        self._send_wait(0.0)

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return [self._host if node == 0 else self._hellos[node]["host"] for node in nodes]

    def announce_generation(self, number: int) -> None:
        """Send the number of the generation that is about to start to all followers, also to those
        that join later.
        """
        self._number = number
        self._broadcast({"kind": "generation", "generation": number})

    def admit_nodes(self) -> None:
        if self._server is not None:
            self._server.admit(self._spec.nodes)
            self._add_joined()
        self._receive_all()

    def announce_wait(self, seconds: float) -> str:
        """Tell the followers that node 0 needs at least `seconds` to start.

        Return why the gang must exit, or "".
        """
        self.admit_nodes()
        self._send_wait(seconds)
        return self.leave_cause

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait until all followers have joined, and until every node's pending notice of an
        interruption has expired.

        If all followers have already joined, return at once. Raises GangError if a node was asked
        to stop, if a waiting follower is lost, or if a follower has not joined or still waits at
        the deadline.
        """

        def should_stop() -> bool:
            self._add_joined()
            self._receive_all()
            return stopped() or bool(self.leave_cause)

        if self._server is None:
            return
        try:
            self._server.roll_call(self._spec.nodes, deadline_seconds, should_stop)
        finally:  # nodes that have joined receive the result even if others are missing
            self._add_joined()
            self._server.close()
            self._server = None
        limit = time.monotonic() + deadline_seconds
        while self._waits:
            if should_stop():
                raise GangError("roll-call: this agent was asked to stop")
            self._check_waits(deadline_seconds, limit)
            now = time.monotonic()
            self._send_wait(max((until - now for until, _ in self._waits.values()), default=0.0))
            time.sleep(_LOOK_SECONDS)

    def _send_wait(self, seconds: float) -> None:
        """Tell all followers that the start is at least `seconds` away.

        Sends at most one message per second.
        """
        if not self._wait_announced.holds:
            self._wait_announced.mark()
            self._broadcast({"kind": "notice_wait", "seconds": max(seconds, 0.0)})

    def _record_wait(self, node: int, order: messages.RankOrder) -> None:
        """Record that a node waits `order.seconds` for its notice to expire. 0 seconds mean that
        its wait is over.
        """
        self._waits[node] = (time.monotonic() + order.seconds, order)
        if order.seconds <= 0:
            del self._waits[node]

    def _add_joined(self, server: RollCallServer | None = None) -> None:
        server = server or self._server
        for node, (connection, hello) in server.joined.items() if server is not None else ():
            before = self._members.get(node)
            if before is connection:
                continue
            # The node's handshake timed out at its end, and it has joined again
            if before is not None:
                before.close()
                self._waits.pop(node, None)
            self._members[node] = connection
            self._hellos[node] = hello
            if "notice" in hello:
                self._record_wait(node, messages.RankOrder.from_json(hello["notice"]))
            if self._number:
                connection.send({"kind": "generation", "generation": self._number})

    def _check_waits(self, deadline_seconds: float, limit: float) -> None:
        for node, (_, order) in self._waits.items():
            name = f"node {node} ({self._hellos[node]['host']})"
            if closed := self._members[node].closed:
                self._leave_orders.append(order)  # its machine was reclaimed
                raise GangError(
                    f"roll-call: {name} was lost while it waited out its {order.cause}: {closed}"
                )
            if time.monotonic() > limit:
                raise GangError(
                    f"roll-call: {name} still waits out its {order.cause}, {deadline_seconds:g} "
                    "s after all joined"
                )

    def start(self, start: messages.GenerationStart) -> None:
        self._started = start
        self._failures = []
        self._witnesses = {}
        self._finished = {}
        self._ready = set()
        self._first_failure = float("inf")
        self._witnesses_wanted = False
        self._growing = False
        self._orders = [order for order in self._orders if order.cause != messages.RETURNED]
        self._broadcast({"kind": "start", **asdict(start)})
        absent = set(range(self._spec.nodes)) - set(start.nodes) - self._left_out
        if not absent or not self._replacements:
            self._close_returns()
        elif self._returns is None:
            self._returns = self._open_server()

    def _look_for_returned(self) -> None:
        """If a lost node has returned, order the ranks to save and exit.

        The next generation includes that node.
        """
        if self._returns is None:
            return
        self._returns.admit(self._spec.nodes)
        back = [one for one, _ in self._returns.joined.values() if not one.closed]
        for connection in back:
            connection.receive()
        if back and not self._wait_announced.holds:  # their deadline for the start moves
            self._wait_announced.mark()
            for connection in back:
                connection.send({"kind": "notice_wait", "seconds": 0.0})
        if (
            back
            and not self._growing
            and not self._finished
            and self._first_failure == float("inf")
        ):
            self._growing = True
            self.order(
                messages.RankOrder(
                    seconds=self._spec.config["checkpoint"]["stop_seconds"],
                    cause=messages.RETURNED,
                    node=0,
                )
            )

    def _close_returns(self) -> None:
        if self._returns is not None:
            self._returns.close()
            self._returns = None

    def regroup(
        self,
        deadline_seconds: float,
        stopped: Callable[[], bool],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[int] | messages.GenerationEnd:
        """Wait until every node's ranks have ended, and return the nodes for the next generation.

        A node whose ranks end too late counts as lost. If the scheduler replaces lost nodes, wait
        for the replacements too. If too few nodes are left, or if a node was asked to stop, return
        the gang's result instead.
        """
        limit = time.monotonic() + deadline_seconds
        while True:
            for node in self.nodes[1:]:
                self._receive(node, self._members[node])
            # Nodes that are not ready stay connected and receive the result later
            if stopped() or self.leave_cause:
                return messages.end_from_stop_request(self.leave_cause or "this node")
            late = set(self.nodes) - self._ready - {0}
            if not late or time.monotonic() >= limit:
                break
            time.sleep(0.01)
        for node in late:
            connection = self._members[node]
            connection.closed = (
                connection.closed or f"its ranks did not end within {deadline_seconds:g} s"
            )
            connection.close()
        if self._returns is not None and self._returns.joined:
            self._number = 0  # the ended generation is not theirs
            self._add_joined(self._returns)
            self._replacements -= len(self._returns.joined)
            self._close_returns()
        nodes = self.nodes
        lost = [node for node in self._start.nodes if node not in nodes]
        if (
            lost
            and not self._is_enough(nodes)
            and not self._await_replacements(lost, stopped, meanwhile)
        ):
            culprit = "; ".join(self._describe_loss(node) for node in lost)
            return messages.GenerationEnd(culprit=culprit, reason=EndReason.NODE_LOST)
        return self.nodes

    def _await_replacements(
        self, lost: Sequence[int], stopped: Callable[[], bool], meanwhile: Callable[[], object]
    ) -> bool:
        """Wait for the replacements of all lost nodes. Return whether all have joined in time."""
        if not self._is_replaced(lost):
            return False
        cluster = self._spec.config["cluster"]
        limit = (
            time.monotonic() + cluster["expected_start_seconds"] + cluster["start_deadline_seconds"]
        )
        self._number = 0  # the ended generation is not theirs
        self._close_returns()
        self._server = server = self._open_server()
        try:
            while any(node not in server.joined for node in lost):
                if stopped() or self.leave_cause or time.monotonic() > limit:
                    return False
                # Another node was lost meanwhile
                if not set(self._start.nodes) - set(lost) <= set(self.nodes):
                    return False
                self.admit_nodes()
                self._send_wait(limit - time.monotonic())
                meanwhile()
                time.sleep(_LOOK_SECONDS)
            self._add_joined()
        finally:
            server.close()
            self._server = None
        self._replacements -= len(lost)
        return True

    def _is_replaced(self, lost: Collection[int]) -> bool:
        return 0 < len(lost) <= self._replacements and 0 not in lost

    def give_up(self, end: messages.GenerationEnd) -> messages.GenerationEnd:
        """Tell all followers that the generation or the gang ends with the result `end`, and return
        `end`.
        """
        self._broadcast({"kind": "verdict", **asdict(end)})
        return end

    def report(self, failure: WorkerFailure) -> None:
        now = time.monotonic()
        if failure.witness:
            self._witnesses[failure.rank] = (now, failure)
            evidence = self._evidence()
            complete = (
                len({one.rank for one in evidence})
                == len(self._start.nodes) * self._spec.processes_per_node
            )
            # Either is proof, although no rank has failed yet.
            trouble = detect_mismatch(evidence) is not None or (
                complete and self._lone_call.lasts(evidence, now)
            )
            if complete and not trouble and not self._failures:
                self.stall = detect_stall(evidence)
        else:
            self._failures.append(failure)
            trouble = True
        if trouble and self._first_failure == float("inf"):
            self._first_failure = now
            self._witnesses_wanted = True
            self._broadcast({"kind": "witnesses"})

    def report_results(self, results: dict[int, dict]) -> None:
        self._finished[0] = results

    def order(self, order: messages.RankOrder) -> None:
        self._orders.append(order)
        if order.leave and order.node not in self._left_out and order.cause != messages.RETURNED:
            self._leave_orders.append(order)
        self._broadcast({"kind": "order", **order.to_json()})

    def waiting(self) -> None:
        self._store_wait.mark()
        self._broadcast({"kind": "waiting"})

    def poll(self) -> messages.GenerationEnd | None:
        for node in self._start.nodes[1:]:
            self._receive(node, self._members[node])
            self._detect_loss(node)
        if self._first_failure < float("inf"):
            known = {one.rank for one in self._evidence()}
            all_known = len(known) == len(self._start.nodes) * self._spec.processes_per_node
            if time.monotonic() >= self._first_failure + settle_seconds(
                self._failures, all_heard=all_known
            ):
                return self.give_up(self._decide_end())
        if len(self._finished) == len(self._start.nodes):
            end = self._go_on_without_noticed(
                messages.end_from_results(self._finished, self._start.generation)
            )
            left = end.outcome is not None and end.outcome.outcome == Outcome.INTERRUPTED
            return self.give_up(
                replace(end, again=True)
                if self._growing and left and not self._leave_orders
                else end
            )
        self._look_for_returned()
        return None

    def close(self) -> None:
        for connection in self._members.values():
            connection.close()
        self._close_returns()
        if self._server is not None:
            self._server.close()

    def _receive_all(self) -> None:
        for node, connection in self._members.items():
            self._receive(node, connection)

    def _receive(self, node: int, connection: Connection) -> None:
        connection.keep_alive()
        for message in connection.receive():
            try:
                self._act_on(node, message)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                connection.refuse(f"it sent a malformed message: {type(error).__name__}: {error}")

    def _act_on(self, node: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "order":
            self.order(messages.RankOrder.from_json(message))
        elif kind == "notice_wait":
            self._record_wait(node, messages.RankOrder.from_json(message))
        elif self._started is None or message["generation"] != self._started.generation:
            return  # the message is about a generation that has ended
        elif kind == "failed":
            self.report(WorkerFailure(**message["failure"]))
        elif kind == "finished":
            self._finished[node] = {
                int(rank): result for rank, result in message["results"].items()
            }
        elif kind == "ready":
            self._ready.add(node)
        elif kind == "waiting":
            self.waiting()

    def _detect_loss(self, node: int) -> None:
        lost = self._members[node].closed and node not in self._finished
        if lost and not any(failure.killed_by == f"node {node}" for failure in self._failures):
            number = self._start.nodes.index(node)
            first = number * self._spec.processes_per_node
            text = self._describe_loss(node)
            # The loss of a node explains the loss of its ranks: timestamp 0 puts it first.
            self.report(
                WorkerFailure(rank=first, node=number, message=text, killed_by=f"node {node}")
            )

    def _describe_loss(self, node: int) -> str:
        number = self._start.nodes.index(node)
        host = self._hellos[node]["host"]
        return f"node {number} ({host}) was lost: {self._members[node].closed}"

    def _decide_end(self) -> messages.GenerationEnd:
        end = self._go_on_without_noticed(messages.end_from_failures(self._evidence()))
        if end.error == UnreliableReader.__name__ and not end.left_out:
            return self._go_on_without_reader(end)
        enough = self._is_enough(self.nodes) or self._is_replaced(
            set(self._start.nodes) - set(self.nodes)
        )
        if end.reason == EndReason.NODE_LOST and (enough or self.leave_cause):
            return replace(end, again=True)  # if all are to leave, `regroup` ends the gang
        return end

    def _go_on_without_noticed(self, end: messages.GenerationEnd) -> messages.GenerationEnd:
        """Return a result with which the gang continues without the nodes that received a notice.

        Return `end` unchanged if the gang cannot continue or if too few other nodes remain. SIGTERM
        does not count as a notice, since its sender may be about to signal all nodes.
        """
        noticed = {order.node for order in self._leave_orders if order.cause != messages.SIGTERM}
        if (
            not noticed
            or 0 in noticed
            or len(noticed) < len({order.node for order in self._leave_orders})
        ):
            return end
        if not self._is_enough(set(self.nodes) - noticed):
            return end
        if end.outcome is not None and end.outcome.outcome != Outcome.INTERRUPTED:
            return end
        if end.outcome is None and not (end.again or end.reason == EndReason.NODE_LOST):
            return end
        self._left_out |= noticed
        self._leave_orders.clear()
        return replace(end, again=True, left_out=sorted(noticed))

    def _go_on_without_reader(self, end: messages.GenerationEnd) -> messages.GenerationEnd:
        """Return a result with which the gang continues without the node that read damaged data
        from a commit.

        Return `end` unchanged if this is node 0 or if too few other nodes remain.
        """
        node = self._start.nodes[end.ranks[0] // self._spec.processes_per_node]
        if node == 0 or not self._is_enough(set(self.nodes) - {node}):
            return end
        self._left_out.add(node)
        return replace(end, left_out=[node], fingerprint="")

    def _evidence(self) -> list[WorkerFailure]:
        oldest = time.monotonic() - _WITNESS_SECONDS
        return self._failures + [
            witness for at, witness in self._witnesses.values() if at >= oldest
        ]

    def _is_enough(self, nodes: Collection[int]) -> bool:
        least = self._spec.config["cluster"].get("min_nodes")
        return least is not None and len(nodes) >= least

    def _broadcast(self, message: Message) -> None:
        for connection in self._members.values():
            connection.send(message)


class FollowerPeers(_Peers):
    def __init__(
        self,
        spec: messages.GangSpec,
        host: str,
        deadline_seconds: float,
        stopped: Callable[[], bool],
        *,
        secret: Callable[[], bytes | None],
        pending_notice: messages.RankOrder | None = None,
        opened: Callable[[int], object] = lambda number: None,
    ) -> None:
        """Join the gang. Raises GangError if node 0 cannot be reached before the deadline.

        `secret` is the same as in `join_gang`. `pending_notice` is a Spot notice for this machine;
        the ranks start only if the machine still exists when the notice expires. As soon as node 0
        announces the next generation, `opened` is called with the generation's number.
        """
        super().__init__()
        hello: Message = {"node": spec.node, "host": host}
        if pending_notice is not None:
            hello["notice"] = pending_notice.to_json()
        target = (spec.main_address, spec.candidate_ports, spec.token)
        self._connection = join_gang(
            *target, hello, deadline_seconds, stopped, spec.silence_seconds, secret=secret
        )
        self._stopped = stopped
        self._opened = opened
        self._asked_to_wait_until = 0.0
        self._generation = 0
        self._inbox: deque[Message] = deque()
        self._wait_reported = StickyFlag(_WAIT_REPORT_SECONDS)

    def await_start(
        self, deadline_seconds: float
    ) -> messages.GenerationStart | messages.GenerationEnd:
        """Wait until the next generation starts or the gang ends.

        A wait that node 0 announces extends the deadline.
        """
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < max(limit, self._asked_to_wait_until + deadline_seconds):
            message = self._next("start", "verdict")
            if message is not None:
                if message.pop("kind") == "verdict":
                    return messages.GenerationEnd.from_message(message)
                start = messages.GenerationStart(**message)
                self._orders = [order for order in self._orders if order.cause != messages.RETURNED]
                self._generation = start.generation
                self._witnesses_wanted = False
                return start
            if self._connection.closed or self._stopped():
                break
            time.sleep(0.01)
        if self._stopped():
            return messages.end_from_stop_request("this node")
        cause = self._connection.closed or f"no start within {deadline_seconds:g} s"
        return messages.GenerationEnd(
            culprit=f"node 0 was lost before the start: {cause}", reason=EndReason.NODE_LOST
        )

    def report_wait(self, order: messages.RankOrder) -> messages.GenerationEnd | None:
        """Tell node 0, at most once per second, that this node cannot start for another
        `order.seconds`.

        Until then, a notice for this machine is pending. Return the result of the gang if it has
        ended, else None.
        """
        if not self._wait_reported.holds:
            self._wait_reported.mark()
            self._connection.send({"kind": "notice_wait", **order.to_json()})
        return self.poll()

    def report_wait_over(self) -> None:
        """Tell node 0 that this node's notice has expired, so that its ranks can start."""
        self._connection.send(
            {"kind": "notice_wait", **messages.RankOrder(seconds=0.0, cause="", node=0).to_json()}
        )

    def ready(self) -> None:
        self._send("ready")

    def report(self, failure: WorkerFailure) -> None:
        self._send("failed", failure=asdict(failure))

    def report_results(self, results: dict[int, dict]) -> None:
        self._send("finished", results=results)

    def order(self, order: messages.RankOrder) -> None:
        self._connection.send({"kind": "order", **order.to_json()})

    def waiting(self) -> None:
        self._store_wait.mark()
        self._send("waiting")

    def poll(self) -> messages.GenerationEnd | None:
        message = self._next("verdict")
        if message is not None:
            del message["kind"]
            return messages.GenerationEnd.from_message(message)
        if self._connection.closed:
            return messages.GenerationEnd(
                culprit=f"node 0 was lost: {self._connection.closed}", reason=EndReason.NODE_LOST
            )
        return None

    def keep_in_touch(self) -> None:
        self._connection.keep_alive()

    def close(self) -> None:
        self._connection.close()

    def _next(self, *kinds: str) -> Message | None:
        """Process received messages in order.

        Return the first one whose kind is in `kinds`, or None.
        """
        self._connection.keep_alive()
        self._inbox.extend(self._connection.receive())
        while self._inbox:
            message = self._inbox.popleft()
            if message["kind"] == "order":
                self._orders.append(messages.RankOrder.from_json(message))
            elif message["kind"] == "waiting":
                self._store_wait.mark()
            elif message["kind"] == "witnesses":
                self._witnesses_wanted = True
            elif message["kind"] == "generation":
                self._opened(message["generation"])
            elif message["kind"] == "notice_wait":
                self._asked_to_wait_until = time.monotonic() + message["seconds"]
            elif message["kind"] in kinds:
                return message
        return None

    def _send(self, kind: str, **content: object) -> None:
        self._connection.send({"kind": kind, "generation": self._generation, **content})


Peers = CoordinatorPeers | FollowerPeers
