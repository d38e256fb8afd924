"""What a node's agent writes into the job's event log: the node's paid time, generation after generation.

One generation of a node ends at the very moment at which its next one begins, so that all of an agent's life is paid
for in exactly one generation, and nothing twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ebbflow.infra.event_log import EventLog
from ebbflow.infra.events import NODE_ENDED, NODE_HEARTBEAT, NODE_STARTED, Origin
from ebbflow.infra.instance import identify
from ebbflow.infra.store import Store
from ebbflow.training.launch.echo import say
from ebbflow.training.launch.spec import GangSpec

_BEAT_SECONDS = 1.0
_CLOSE_SECONDS = 6.0


class NodeLog:
    """The node is paid for from the agent's first moment, which is when this is made, not from its first generation."""

    def __init__(self, job_store: Store, host: str) -> None:
        self._job_store, self._host = job_store, host
        self._since = (time.time(), time.monotonic())
        self._log: EventLog | None = None
        self._machine: dict | None = None
        self._last_beat = 0.0
        self.turns = 0  # of the agent's loop
        self._closing: list[threading.Thread] = []

    @property
    def seconds(self) -> float:
        """Of this node in the generation that is open, or until the first one is."""
        return time.monotonic() - self._since[1]

    @property
    def since(self) -> float:
        """time.monotonic() at which this node's part of the generation began."""
        return self._since[1]

    def open(self, spec: GangSpec, generation: int, *, left_for: str = "") -> None:
        """Begin a generation, unless it has begun; the one before, if there was one, ends now, for the reason given."""
        if self._log is not None and self._log.origin.generation == generation:
            return
        if self._log is not None:
            now = (time.time(), time.monotonic())
            self.emit(NODE_ENDED, at=now, seconds=now[1] - self._since[1], reason=left_for)
            self._since = now
            self._close_behind(self._log)
        origin = Origin(
            job=spec.job, run=spec.run, attempt=spec.attempt, generation=generation, node=spec.node, process="agent"
        )
        self._log = EventLog(self._job_store, origin)
        self.emit(NODE_STARTED, at=self._since, ranks=list(spec.ranks), host=self._host, **self._known(spec.node))

    @property
    def is_open(self) -> bool:
        """Whether a generation has begun and not ended."""
        return self._log is not None

    def emit(self, name: str, **data: object) -> None:
        if self._log:
            self._log.emit(name, **data)

    def beat(self, sample: Callable[[], dict] = dict) -> None:
        """sample: what is seen of the node besides, asked for when a heartbeat is due."""
        self.turns += 1
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = now
            self.emit(NODE_HEARTBEAT, seconds=self.seconds, **sample())

    def close(self, reason: str) -> None:
        """The end of this node's part of the job, and of its last generation."""
        self.emit(NODE_ENDED, seconds=self.seconds, reason=reason)
        if self._log:
            self._log.close()
            self._log = None
        limit = time.monotonic() + _CLOSE_SECONDS
        for thread in self._closing:
            thread.join(max(0.0, limit - time.monotonic()))

    def _close_behind(self, log: EventLog) -> None:
        """What is left of a generation is put while the next one starts; its deadline is the log's own."""
        self._closing = [thread for thread in self._closing if thread.is_alive()]
        thread = threading.Thread(target=log.close, name="events-close", daemon=True)
        thread.start()
        self._closing.append(thread)

    def _known(self, node: int) -> dict:
        if self._machine is None:
            machine = identify()
            if machine.problem:
                say(f"node {node}: which instance this is stays unknown: {machine.problem}")
            self._machine = machine.to_json()
        return self._machine
