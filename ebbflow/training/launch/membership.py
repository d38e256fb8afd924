"""Communication of an agent with the agents of the other nodes.

`CoordinatorPeers` is node 0's side: it admits the followers, collects their reports and announces
how a generation ended. `FollowerPeers` is the side of every other node: it reports to node 0 and
receives node 0's decisions.

Node 0's side has one part for each of its tasks: `Roster` knows who has joined, `EvidenceCollector`
collects evidence of failures, `Continuation` has the rules for the next generation, and
`ReturningNodes` lets lost nodes join again.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ebbflow.core.events import EndReason
from ebbflow.training.errors import GangError, UnreliableReader
from ebbflow.training.launch import messages
from ebbflow.training.launch.agent_messages import (
    AgentMessage,
    FailureReport,
    Hello,
    NextGeneration,
    NoticeWait,
    Ready,
    ResultsReport,
    StoreWait,
    WitnessRequest,
    decode,
    encode,
    encode_hello,
)
from ebbflow.training.launch.blame import Culprit
from ebbflow.training.launch.continuation import Continuation
from ebbflow.training.launch.evidence import WorkerFailure
from ebbflow.training.launch.evidence_collector import EvidenceCollector
from ebbflow.training.launch.messages import (
    GenerationEnd,
    GenerationStart,
    RankOrder,
    RankResult,
)
from ebbflow.training.launch.replacements import ReturningNodes, replacements_of
from ebbflow.training.launch.roster import WAIT_REPORT_SECONDS, Roster, StickyFlag
from ebbflow.training.launch.transport import RollCallServer, join_gang

# Waits are reported once per second; the rest is for ranks to continue after the wait
STORE_WAIT_SECONDS = 3.0
_LOOK_SECONDS = 0.02
_REGROUP_LOOK_SECONDS = 0.01


class _Peers:
    def __init__(self) -> None:
        self._orders: list[RankOrder] = []
        self._witnesses_wanted = False
        self._store_wait = StickyFlag(STORE_WAIT_SECONDS)
        # A newly found rank for which all others wait, although it is idle
        self.stall: Culprit | None = None

    def orders(self) -> list[RankOrder]:
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

    def _forget_return_orders(self) -> None:
        """Drop the orders to exit that made room for a returned node, which now takes part."""
        self._orders = [order for order in self._orders if order.cause != messages.RETURNED]


class CoordinatorPeers(_Peers):
    """Node 0's side: connections to the followers, and decisions for the whole gang."""

    def __init__(self, spec: messages.GangSpec, host: str, secret: bytes) -> None:
        super().__init__()
        self._spec = spec
        self._secret = secret
        self._roster = Roster(host)
        self._continuation = Continuation(
            spec.config.cluster.min_nodes, replacements_of(spec.config.kubernetes)
        )
        self._returning = ReturningNodes(spec.nodes, self._open_server)
        # Server of the first roll-call; None once all nodes have joined
        self._server: RollCallServer | None = None
        if spec.nodes > 1:
            self._server = self._open_server()
        self._started: GenerationStart | None = None
        # Of the running generation:
        self._evidence = EvidenceCollector(spec.world_size)
        self._lost: set[int] = set()  # nodes whose loss is in the evidence
        # node: results of its ranks
        self._finished: dict[int, Mapping[int, RankResult]] = {}
        self._ready: set[int] = set()  # nodes whose ranks have ended
        self._growing = False  # the ranks were asked to leave, so that a node can return

    @property
    def nodes(self) -> list[int]:
        """Numbers (`GangSpec.node`) of the connected nodes, which take part in the next generation."""
        return [0, *sorted(self._roster.connected - self._continuation.left_out)]

    @property
    def leave_cause(self) -> str:
        return self._continuation.leave_cause

    def hosts(self, nodes: Sequence[int]) -> list[str]:
        return self._roster.hosts(nodes)

    def joined_at(self) -> dict[int, float]:
        """Return when each follower connected (time.monotonic())."""
        return self._roster.joined_at()

    # Before a generation

    def announce_generation(self, number: int) -> None:
        """Send the number of the generation that is about to start to all followers, also to those
        that join later.
        """
        self._roster.announce_generation(number)

    def admit_nodes(self) -> None:
        if self._server is not None:
            self._server.admit(self._spec.nodes)
            self._roster.add_joined(self._server)
        self._receive_all()

    def announce_wait(self, seconds: float) -> str:
        """Tell the followers that node 0 needs at least `seconds` to start.

        Return why the gang must exit, or "".
        """
        self.admit_nodes()
        self._roster.announce_wait(seconds)
        return self.leave_cause

    def keep_in_touch(self) -> None:
        """Exchange pings with the followers while node 0 is busy.

        All other received messages stay queued.
        """
        self._roster.keep_alive()
        self._roster.announce_wait(0.0)

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        """Wait until all followers have joined, and until every node's pending notice of an
        interruption has expired.

        If all followers have already joined, return at once. Raises GangError if a node was asked
        to stop, if a waiting follower is lost, or if a follower has not joined or still waits at
        the deadline.
        """
        server = self._server
        if server is None:
            return

        def should_stop() -> bool:
            self._roster.add_joined(server)
            self._receive_all()
            return stopped() or bool(self.leave_cause)

        try:
            server.roll_call(self._spec.nodes, deadline_seconds, should_stop)
        finally:  # nodes that have joined receive the result even if others are missing
            self._roster.add_joined(server)
            server.close()
            self._server = None
        self._await_notices(deadline_seconds, should_stop)

    def _await_notices(self, deadline_seconds: float, should_stop: Callable[[], bool]) -> None:
        """Wait until the pending notices of all followers have expired."""
        limit = time.monotonic() + deadline_seconds
        waits = self._roster.notice_waits
        while waits.orders:
            if should_stop():
                raise GangError("roll-call: this agent was asked to stop")
            for node, order in waits.orders.items():
                name = f"roll-call: node {node} ({self._roster.host_of(node)})"
                loss = self._roster.loss_of(node)
                if loss:
                    self._continuation.add_order(order)  # its machine was reclaimed
                    raise GangError(
                        f"{name} was lost while it waited out its {order.cause}: {loss}"
                    )
                if time.monotonic() > limit:
                    raise GangError(
                        f"{name} still waits out its {order.cause}, {deadline_seconds:g} s after "
                        "all joined"
                    )
            self._roster.announce_wait(waits.longest_seconds)
            time.sleep(_LOOK_SECONDS)

    # During a generation

    def start(self, start: GenerationStart) -> None:
        self._started = start
        self._evidence = EvidenceCollector(len(start.nodes) * self._spec.processes_per_node)
        self._lost = set()
        self._finished = {}
        self._ready = set()
        self._growing = False
        self._witnesses_wanted = False
        self._forget_return_orders()
        self._roster.broadcast(start)
        absent = set(range(self._spec.nodes)) - set(start.nodes) - self._continuation.left_out
        if self._continuation.replacements:
            self._returning.expect(absent)
        else:
            self._returning.close()

    def report(self, failure: WorkerFailure) -> None:
        now = time.monotonic()
        known = self._evidence.shows_failure
        self._evidence.add(failure, now)
        if failure.witness:
            self.stall = self._evidence.find_stall(now)
        if self._evidence.shows_failure and not known:
            self._witnesses_wanted = True
            self._roster.broadcast(WitnessRequest())

    def report_results(self, results: Mapping[int, RankResult]) -> None:
        self._finished[0] = results

    def order(self, order: RankOrder) -> None:
        self._orders.append(order)
        self._continuation.add_order(order)
        self._roster.broadcast(order)

    def waiting(self) -> None:
        self._store_wait.mark()
        self._roster.broadcast(StoreWait(generation=self._running.generation))

    def poll(self) -> GenerationEnd | None:
        start = self._running
        for node in start.nodes[1:]:
            self._receive(node)
            self._detect_loss(node)
        if self._evidence.is_settled(time.monotonic()):
            return self.announce_end(self._end_from_failures())
        if len(self._finished) == len(start.nodes):
            end = messages.end_from_results(self._finished, start.generation)
            end = self._continuation.after_results(end, self.nodes, growing=self._growing)
            return self.announce_end(end)
        self._take_back_returned()
        return None

    def announce_end(self, end: GenerationEnd) -> GenerationEnd:
        """Tell all followers that the generation or the gang ends with the result `end`, and return
        `end`.
        """
        self._roster.broadcast(end)
        return end

    def close(self) -> None:
        self._roster.close()
        self._returning.close()
        if self._server is not None:
            self._server.close()

    def _end_from_failures(self) -> GenerationEnd:
        start = self._running
        evidence = self._evidence.evidence(time.monotonic())
        ranks = len(start.nodes) * self._spec.processes_per_node
        end = messages.end_from_failures(evidence, ranks)
        end = self._continuation.after_failure(end, start.nodes, self.nodes)
        if end.error == UnreliableReader.__name__ and not end.left_out:
            reader = start.nodes[end.ranks[0] // self._spec.processes_per_node]
            return self._continuation.leave_out_reader(end, reader, self.nodes)
        return end

    def _take_back_returned(self) -> None:
        """If a lost node has returned, order the ranks to save and exit.

        The next generation includes that node.
        """
        back = self._returning.admit()
        ends_anyway = bool(self._finished) or self._evidence.shows_failure
        if back and not ends_anyway and not self._growing:
            self._growing = True
            stop_seconds = self._spec.config.checkpoint.stop_seconds
            self.order(RankOrder(seconds=stop_seconds, cause=messages.RETURNED, node=0))

    # Between two generations

    def regroup(
        self,
        deadline_seconds: float,
        stopped: Callable[[], bool],
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[int] | GenerationEnd:
        """Wait until every node's ranks have ended, and return the nodes for the next generation.

        A node whose ranks end too late counts as lost. If the scheduler replaces lost nodes, wait
        for the replacements too. If too few nodes are left, or if a node was asked to stop, return
        the gang's result instead.
        """
        cause = self._await_readiness(deadline_seconds, stopped)
        if cause:
            return messages.end_from_stop_request(cause)
        self._admit_returned()
        lost = [node for node in self._running.nodes if node not in self.nodes]
        if not lost or self._continuation.is_enough(self.nodes):
            return self.nodes
        if self._await_replacements(lost, stopped, meanwhile):
            return self.nodes
        culprit = "; ".join(self._describe_loss(node) for node in lost)
        return GenerationEnd(culprit=culprit, reason=EndReason.NODE_LOST)

    def _await_readiness(self, deadline_seconds: float, stopped: Callable[[], bool]) -> str:
        """Wait until the ranks of all connected nodes have ended, and drop nodes whose ranks end too
        late.

        Return why the gang must exit, or "".
        """
        limit = time.monotonic() + deadline_seconds
        while True:
            for node in self.nodes[1:]:
                self._receive(node)
            # Nodes that are not ready stay connected and receive the result later
            if stopped() or self.leave_cause:
                return self.leave_cause or "this node"
            late = set(self.nodes[1:]) - self._ready
            if not late or time.monotonic() >= limit:
                break
            time.sleep(_REGROUP_LOOK_SECONDS)
        for node in late:
            self._roster.drop(node, f"its ranks did not end within {deadline_seconds:g} s")
        return ""

    def _admit_returned(self) -> None:
        """Add the lost nodes that have joined again during the generation."""
        server = self._returning.server
        if server is not None and server.joined:
            self._roster.forget_generation()  # the ended generation is not theirs
            self._roster.add_joined(server)
            self._continuation.replacements -= len(server.joined)
            self._returning.close()

    def _await_replacements(
        self, lost: Sequence[int], stopped: Callable[[], bool], meanwhile: Callable[[], object]
    ) -> bool:
        """Wait for the replacements of all lost nodes. Return whether all have joined in time."""
        if not self._continuation.is_replaced(lost):
            return False
        limit = time.monotonic() + self._spec.config.cluster.replacement_deadline_seconds
        others = set(self._running.nodes) - set(lost)
        self._roster.forget_generation()  # the ended generation is not theirs
        self._returning.close()
        self._server = server = self._open_server()
        try:
            while not server.joined.keys() >= set(lost):
                if stopped() or self.leave_cause or time.monotonic() > limit:
                    return False
                if not others.issubset(self.nodes):  # another node was lost meanwhile
                    return False
                self.admit_nodes()
                self._roster.announce_wait(limit - time.monotonic())
                meanwhile()
                time.sleep(_LOOK_SECONDS)
            self._roster.add_joined(server)
        finally:
            server.close()
            self._server = None
        self._continuation.replacements -= len(lost)
        return True

    # Messages and connections

    @property
    def _running(self) -> GenerationStart:
        assert self._started is not None, "no generation has started"
        return self._started

    def _open_server(self) -> RollCallServer:
        spec = self._spec
        return RollCallServer(
            spec.main_address, spec.candidate_ports, spec.token, self._secret, spec.silence_seconds
        )

    def _receive_all(self) -> None:
        for node in self._roster.followers:
            self._receive(node)

    def _receive(self, node: int) -> None:
        for message in self._roster.receive(node):
            match message:
                case RankOrder():
                    self.order(message)
                case NoticeWait():
                    order = RankOrder(
                        seconds=message.seconds, cause=message.cause, node=message.node
                    )
                    self._roster.notice_waits.record(node, order)
                case FailureReport() | ResultsReport() | Ready() | StoreWait():
                    # Messages about a generation that has ended are ignored
                    if self._started and message.generation == self._started.generation:
                        self._act_on_report(node, message)

    def _act_on_report(
        self, node: int, report: FailureReport | ResultsReport | Ready | StoreWait
    ) -> None:
        match report:
            case FailureReport():
                self.report(report.failure)
            case ResultsReport():
                self._finished[node] = report.results
            case Ready():
                self._ready.add(node)
            case StoreWait():
                self.waiting()

    def _detect_loss(self, node: int) -> None:
        """Report the loss of a node as a failure of its first rank."""
        if node in self._finished or node in self._lost or not self._roster.loss_of(node):
            return
        self._lost.add(node)
        number = self._running.nodes.index(node)
        # The loss of a node explains the loss of its ranks: timestamp 0 puts it first.
        self.report(
            WorkerFailure(
                rank=number * self._spec.processes_per_node,
                node=number,
                message=self._describe_loss(node),
                lost_node=node,
            )
        )

    def _describe_loss(self, node: int) -> str:
        number = self._running.nodes.index(node)
        return (
            f"node {number} ({self._roster.host_of(node)}) was lost: {self._roster.loss_of(node)}"
        )


class FollowerPeers(_Peers):
    def __init__(
        self,
        spec: messages.GangSpec,
        host: str,
        deadline_seconds: float,
        stopped: Callable[[], bool],
        *,
        secret: Callable[[], bytes | None],
        pending_notice: RankOrder | None = None,
        opened: Callable[[int], object] = lambda _number: None,
    ) -> None:
        """Join the gang. Raises GangError if node 0 cannot be reached before the deadline.

        `secret` is the same as in `join_gang`. `pending_notice` is a Spot notice for this machine;
        the ranks start only if the machine still exists when the notice expires. As soon as node 0
        announces the next generation, `opened` is called with the generation's number.
        """
        super().__init__()
        hello = Hello(node=spec.node, host=host, notice=pending_notice)
        self._connection = join_gang(
            spec.main_address,
            spec.candidate_ports,
            spec.token,
            encode_hello(hello),
            deadline_seconds,
            stopped,
            spec.silence_seconds,
            secret=secret,
        )
        self._stopped = stopped
        self._opened = opened
        self._asked_to_wait_until = 0.0
        self._generation = 0
        # Received, and not acted on yet
        self._inbox: deque[AgentMessage] = deque()
        self._wait_reported = StickyFlag(WAIT_REPORT_SECONDS)

    def await_start(self, deadline_seconds: float) -> GenerationStart | GenerationEnd:
        """Wait until the next generation starts or the gang ends.

        A wait that node 0 announces extends the deadline.
        """
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < max(limit, self._asked_to_wait_until + deadline_seconds):
            message = self._receive(until=(GenerationStart, GenerationEnd))
            if isinstance(message, GenerationEnd):
                return message
            if isinstance(message, GenerationStart):
                self._forget_return_orders()
                self._generation = message.generation
                self._witnesses_wanted = False
                return message
            if self._connection.closed or self._stopped():
                break
            time.sleep(_REGROUP_LOOK_SECONDS)
        if self._stopped():
            return messages.end_from_stop_request("this node")
        cause = self._connection.closed or f"no start within {deadline_seconds:g} s"
        return GenerationEnd(
            culprit=f"node 0 was lost before the start: {cause}", reason=EndReason.NODE_LOST
        )

    def report_wait(self, order: RankOrder) -> GenerationEnd | None:
        """Tell node 0, at most once per second, that this node cannot start for another
        `order.seconds`.

        Until then, a notice for this machine is pending. Return the result of the gang if it has
        ended, else None.
        """
        if not self._wait_reported.holds:
            self._wait_reported.mark()
            self._send(NoticeWait(seconds=order.seconds, cause=order.cause, node=order.node))
        return self.poll()

    def report_wait_over(self) -> None:
        """Tell node 0 that this node's notice has expired, so that its ranks can start."""
        self._send(NoticeWait(seconds=0.0))

    def ready(self) -> None:
        self._send(Ready(generation=self._generation))

    def report(self, failure: WorkerFailure) -> None:
        self._send(FailureReport(generation=self._generation, failure=failure))

    def report_results(self, results: Mapping[int, RankResult]) -> None:
        self._send(ResultsReport(generation=self._generation, results=dict(results)))

    def order(self, order: RankOrder) -> None:
        self._send(order)

    def waiting(self) -> None:
        self._store_wait.mark()
        self._send(StoreWait(generation=self._generation))

    def poll(self) -> GenerationEnd | None:
        end = self._receive(until=(GenerationEnd,))
        if isinstance(end, GenerationEnd):
            return end
        if self._connection.closed:
            return GenerationEnd(
                culprit=f"node 0 was lost: {self._connection.closed}", reason=EndReason.NODE_LOST
            )
        return None

    def keep_in_touch(self) -> None:
        self._connection.keep_alive()

    def close(self) -> None:
        self._connection.close()

    def _receive(self, until: tuple[type[AgentMessage], ...]) -> AgentMessage | None:
        """Act on received messages in order, and stop at the first message of a type in `until`.

        Return that message, or None if none arrived.
        """
        self._connection.keep_alive()
        for document in self._connection.receive():
            message = decode(document)
            if message is not None:
                self._inbox.append(message)
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, until):
                return message
            self._act_on(message)
        return None

    def _act_on(self, message: AgentMessage) -> None:
        match message:
            case RankOrder():
                self._orders.append(message)
            case StoreWait():
                self._store_wait.mark()
            case WitnessRequest():
                self._witnesses_wanted = True
            case NextGeneration():
                self._opened(message.generation)
            case NoticeWait():
                self._asked_to_wait_until = time.monotonic() + message.seconds

    def _send(self, message: AgentMessage) -> None:
        self._connection.send(encode(message))


Peers = CoordinatorPeers | FollowerPeers
