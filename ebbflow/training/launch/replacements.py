"""Lost nodes that the cluster's scheduler replaces while a gang runs, as in a JobSet on Kubernetes."""

import os
from collections.abc import Callable, Collection

from ebbflow.core.config.schema import KubernetesConfig
from ebbflow.training.launch.agent_messages import NoticeWait, encode
from ebbflow.training.launch.roster import WAIT_REPORT_SECONDS, StickyFlag
from ebbflow.training.launch.transport import RollCallServer


class ReturningNodes:
    """Lost nodes, or their replacements, that join again while a smaller gang runs without them.

    They take part from the next generation on.
    """

    def __init__(self, nodes: int, open_server: Callable[[], RollCallServer]) -> None:
        self._nodes = nodes
        self._open_server = open_server
        self._server: RollCallServer | None = None
        self._wait_announced = StickyFlag(WAIT_REPORT_SECONDS)

    @property
    def server(self) -> RollCallServer | None:
        """The server at which replacement nodes join; None while none is expected."""
        return self._server

    def expect(self, absent: Collection[int]) -> None:
        """Let the nodes in `absent` join; if there are none, close the port."""
        if not absent:
            self.close()
        elif self._server is None:
            self._server = self._open_server()

    def admit(self) -> bool:
        """Accept nodes into the gang, and tell them to wait for the next start.

        Return whether at least one node is back.
        """
        if self._server is None:
            return False
        self._server.admit(self._nodes)
        joined = [connection for connection, _ in self._server.joined.values()]
        waiting = [connection for connection in joined if not connection.closed]
        for connection in waiting:
            connection.receive()
        if waiting and not self._wait_announced.holds:
            self._wait_announced.mark()
            for connection in waiting:
                connection.send(encode(NoticeWait(seconds=0.0)))
        return bool(waiting)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


def in_jobset() -> bool:
    return "METAFLOW_KUBERNETES_JOBSET_NAME" in os.environ


def replacements_of(config: KubernetesConfig) -> int:
    """Return how many lost nodes a JobSet on Kubernetes replaces in one attempt; 0 without a
    JobSet.
    """
    if in_jobset():
        return config.node_replacements
    return 0
