"""How the agents of a gang agree, as the other nodes' agents see it: they report to node 0 and do what it says."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

from ebbflow.infra.events import EndReason
from ebbflow.training.launch.channel import Message, join
from ebbflow.training.launch.control import Order
from ebbflow.training.launch.heard import Heard
from ebbflow.training.launch.recently import Recently
from ebbflow.training.launch.spec import GangSpec
from ebbflow.training.launch.verdict import Start, Verdict, told_to_leave
from ebbflow.training.launch.watch import WorkerFailure

_STANDING_SECONDS = 1.0  # between two words that a notice is waited out here


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
