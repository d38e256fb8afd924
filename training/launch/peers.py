"""How the agents of a gang agree: node 0 leads (`Lead`), the others follow (`Member`). Both look alike to an agent."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from infra.events import EndReason
from infra.outcome import Outcome
from infra.terms import Terms
from training import errors
from training.launch.channel import Connection, Lobby, Message, join
from training.launch.control import Order
from training.launch.spec import GangOutcome, GangSpec
from training.launch.watch.failure import WorkerFailure

# After the first sign of trouble the others' news is awaited this long, so that a cascade is not taken for the cause.
SETTLE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Start:
    """What node 0 tells everybody: the generation, what to restore, where torch's store will listen, which fault."""

    generation: int
    generation_id: str
    candidates: list[str]
    rendezvous_port: int
    terms: dict | None
    rehearse: dict | None
    hosts: list[str]
    overrides: dict = field(default_factory=dict)

    def colocated_nodes(self, node: int) -> int:
        return self.hosts.count(self.hosts[node])


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of a generation: an `outcome` that the ranks agreed on, or a `culprit` that ended it.

    curable: a new attempt may end better. failed_as: the job's outcome when it does not.
    """

    outcome: GangOutcome | None = None
    culprit: str = ""
    reason: str = ""
    user_code: bool = False
    curable: bool = True
    failed_as: str = Outcome.FAILED.value


class Peers(Protocol):
    """The other nodes, as an agent sees them."""

    def report(self, failure: WorkerFailure) -> None: ...
    def finished(self, results: dict[int, dict]) -> None: ...
    def order(self, order: Order) -> None:
        """Have all nodes told to leave, or to save, this one among them."""

    def orders(self) -> list[Order]:
        """What the lead has told all nodes since the last call."""

    def poll(self) -> Verdict | None: ...
    def close(self) -> None: ...


class Lead:
    """Node 0's view: everybody's news, and the verdict."""

    def __init__(self, spec: GangSpec) -> None:
        self._spec = spec
        self._lobby = Lobby(spec.main_address, spec.candidate_ports, token(spec)) if spec.nodes > 1 else None
        self._members: dict[int, Connection] = {}
        self._hellos: dict[int, Message] = {}
        self._failures: list[WorkerFailure] = []
        self._first_failure: float | None = None
        self._finished: dict[int, dict[int, dict]] = {}
        self._start: Start | None = None
        self._orders: list[Order] = []

    def roll_call(self, deadline_seconds: float, stopped: Callable[[], bool]) -> None:
        if self._lobby is None:
            return
        joined = self._lobby.roll_call(self._spec.nodes, deadline_seconds, stopped)
        self._members = {node: connection for node, (connection, _) in joined.items()}
        self._hellos = {node: hello for node, (_, hello) in joined.items()}

    def hosts(self, own: str) -> list[str]:
        return [own, *(self._hellos[node]["host"] for node in range(1, self._spec.nodes))]

    def start(self, start: Start) -> None:
        self._start = start
        self._broadcast({"kind": "start", **asdict(start)})

    def give_up(self, verdict: Verdict) -> Verdict:
        """There will be no start, or no further word: everybody is told why."""
        return self._announce(verdict)

    def report(self, failure: WorkerFailure) -> None:
        self._failures.append(failure)
        self._first_failure = self._first_failure or time.monotonic()

    def finished(self, results: dict[int, dict]) -> None:
        self._finished[0] = results

    def order(self, order: Order) -> None:
        self._orders.append(order)
        self._broadcast({"kind": "order", **order.to_json()})

    def orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def poll(self) -> Verdict | None:
        for node, connection in self._members.items():
            self._hear(node, connection)
        if self._first_failure and time.monotonic() - self._first_failure >= SETTLE_SECONDS:
            return self._announce(self._guilty())
        if len(self._finished) == self._spec.nodes:
            return self._announce(self._agreed())
        return None

    def close(self) -> None:
        for connection in self._members.values():
            connection.close()
        if self._lobby:
            self._lobby.close()

    def _hear(self, node: int, connection: Connection) -> None:
        connection.keep_alive()
        for message in connection.receive():
            if message["kind"] == "failed":
                self.report(WorkerFailure(**message["failure"]))
            elif message["kind"] == "finished":
                self._finished[node] = {int(rank): result for rank, result in message["results"].items()}
            elif message["kind"] == "order":
                self.order(Order.from_json(message))
        lost = connection.closed and node not in self._finished
        if lost and not any(failure.killed_by == f"node {node}" for failure in self._failures):
            first = node * self._spec.processes_per_node
            text = f"node {node} ({self._hellos[node]['host']}) was lost: {connection.closed}"
            # A lost node takes its ranks along, so it is guiltier than any rank: timestamp 0 puts it first.
            self.report(WorkerFailure(rank=first, message=text, killed_by=f"node {node}"))

    def _guilty(self) -> Verdict:
        worst = min(self._failures, key=lambda failure: failure.priority)
        lost_node = (worst.killed_by or "").startswith("node ")
        kind = getattr(errors, worst.error, errors.GangError)
        if lost_node:
            reason = EndReason.NODE_LOST
        elif worst.killed_by:
            reason = EndReason.RANK_KILLED
        elif worst.hung:
            reason = EndReason.HANG
        elif kind is errors.GenerationSuperseded:
            reason = EndReason.SUPERSEDED
        else:
            reason = EndReason.RANK_FAILED
        return Verdict(
            culprit=worst.message if lost_node else f"rank {worst.rank}: {worst.message}",
            reason=reason,
            user_code=reason is EndReason.RANK_FAILED and not worst.cascade,
            curable=kind.curable,
            failed_as=kind.outcome.value,
        )

    def _agreed(self) -> Verdict:
        results = {rank: result for node in self._finished.values() for rank, result in node.items()}
        first = results[0]
        strays = [rank for rank, result in sorted(results.items()) if _ending(result) != _ending(first)]
        if strays:
            culprit = (
                f"ranks did not end alike: rank 0 {_ending(first)}, rank {strays[0]} {_ending(results[strays[0]])}"
            )
            return Verdict(culprit=culprit, reason=EndReason.RANK_FAILED)
        outcome = GangOutcome(
            outcome=Outcome(first["outcome"]).value,
            step=int(first["step"]),
            generation=self._start.generation if self._start else 0,
            weights_sha256=first.get("weights_sha256"),
            message=first.get("message", ""),
        )
        return Verdict(outcome=outcome, reason=outcome.outcome)

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
        self._lead = join(spec.main_address, spec.candidate_ports, token(spec), hello, deadline_seconds, stopped)
        self._stopped = stopped
        self._orders: list[Order] = []

    def await_start(self, deadline_seconds: float) -> Start | Verdict:
        """The start, or the verdict that there will be none."""
        limit = time.monotonic() + deadline_seconds
        while time.monotonic() < limit:
            for message in self._lead.receive():
                kind = message.pop("kind")
                if kind == "start":
                    return Start(**message)
                if kind == "verdict":
                    return _verdict(message)
            if self._lead.closed or self._stopped():
                break
            self._lead.keep_alive()
            time.sleep(0.02)
        if self._stopped():
            return Verdict(culprit="this node was told to leave before the start", reason=EndReason.AGENT_STOPPED)
        cause = self._lead.closed or f"no start within {deadline_seconds:g} s"
        return Verdict(culprit=f"node 0 was lost before the start: {cause}", reason=EndReason.NODE_LOST)

    def report(self, failure: WorkerFailure) -> None:
        self._lead.send({"kind": "failed", "failure": asdict(failure)})

    def finished(self, results: dict[int, dict]) -> None:
        self._lead.send({"kind": "finished", "results": results})

    def order(self, order: Order) -> None:
        self._lead.send({"kind": "order", **order.to_json()})

    def orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def poll(self) -> Verdict | None:
        self._lead.keep_alive()
        for message in self._lead.receive():
            kind = message.pop("kind")
            if kind == "verdict":
                return _verdict(message)
            if kind == "order":
                self._orders.append(Order.from_json(message))
        if self._lead.closed:
            return Verdict(culprit=f"node 0 was lost: {self._lead.closed}", reason=EndReason.NODE_LOST)
        return None

    def close(self) -> None:
        self._lead.close()


def unaffordable(start: Start, step: int) -> Verdict | None:
    """The end of a gang whose ranks must not start, since nothing is left but the price of a last save; None: they may.

    step: of the commit that stands.
    """
    message = "" if start.terms is None else Terms.from_json(start.terms).out_of_money()
    if not message:
        return None
    outcome = GangOutcome(outcome=Outcome.BUDGET.value, step=step, generation=start.generation, message=message)
    return Verdict(outcome=outcome, reason=outcome.outcome)


def token(spec: GangSpec) -> str:
    """Tells agents of this start from anybody else who happens to listen on the same port."""
    return f"{spec.job}/{spec.run}/{spec.attempt}/{spec.nodes}x{spec.processes_per_node}"


def _ending(result: dict) -> tuple[str, int, str | None]:
    return result["outcome"], int(result["step"]), result.get("weights_sha256")


def _verdict(message: dict[str, Any]) -> Verdict:
    outcome = message.pop("outcome", None)
    return Verdict(outcome=GangOutcome(**outcome) if outcome else None, **message)
