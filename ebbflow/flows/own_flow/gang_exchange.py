"""Messages between the nodes of a gang through the job's store: how to start, and the result."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from ebbflow.core.errors import ObjectNotFound
from ebbflow.core.launchers import running_launcher
from ebbflow.core.layout import gang_key
from ebbflow.core.store import Store
from ebbflow.flows.own_flow.step_checks import OwnFlowError

_START = "start"
_END = "end"
_POLL_SECONDS = {"folder": 0.2, "bucket": 2.0}


@dataclass(frozen=True, kw_only=True)
class GangMessage:
    """A message of node 0 to the other nodes.

    Attributes:
        spec: The start as the JSON text of a `GangSpec`; "" if there is nothing to start.
        model: The result as the JSON of a `TrainedModel`; None before the end.
        problem: Why node 0 has failed; "" if it has not.
    """

    spec: str = ""
    model: dict[str, Any] | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class GangExchange:
    """Exchange of an attempt's messages: node 0 writes each once, and the others wait for it."""

    store: Store  # the job's part of the store
    job: str
    run: str
    attempt: int
    start_seconds: float  # time in which node 0 must have claimed the job

    def publish_start(self, message: GangMessage) -> None:
        self._publish(_START, message)

    def publish_end(self, message: GangMessage) -> None:
        self._publish(_END, message)

    def await_start(self) -> GangMessage:
        """Wait for node 0's start message. Raises OwnFlowError if node 0 failed or has gone."""
        return self._await(_START)

    def await_end(self) -> GangMessage:
        """Wait for node 0's result. Raises OwnFlowError if node 0 failed or has gone."""
        return self._await(_END)

    def _publish(self, kind: str, message: GangMessage) -> None:
        self.store.put(self._key(kind), json.dumps(asdict(message)).encode())

    def _await(self, kind: str) -> GangMessage:
        is_folder = self.store.local_path("") is not None
        pause = _POLL_SECONDS["folder" if is_folder else "bucket"]
        limit = time.monotonic() + self.start_seconds
        while True:
            message = self._read(kind)
            if message is None and time.monotonic() > limit:
                # Preparing data may take hours, in which node 0 holds the job
                if running_launcher(self.store) is None:
                    message = self._read(kind) or GangMessage(problem="it has not answered")
                limit = time.monotonic() + pause
            if message is not None and message.problem:
                raise OwnFlowError(f"job {self.job}: node 0: {message.problem}")
            if message is not None:
                return message
            time.sleep(pause)

    def _read(self, kind: str) -> GangMessage | None:
        try:
            return GangMessage(**json.loads(self.store.get(self._key(kind))))
        except ObjectNotFound:
            return None

    def _key(self, kind: str) -> str:
        return gang_key(self.run, self.attempt, kind)
