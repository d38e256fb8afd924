"""Pushing to a Pushgateway, for networks in which Prometheus cannot reach the nodes.

A push replaces its whole group, and a group never expires: so each node has a group of its own, {job, node}, and it is
deleted, by exactly that key, at every end that some process of the node lives to see.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, delete_from_gateway, push_to_gateway

TIMEOUT_SECONDS = 3.0


@dataclass(frozen=True)
class Group:
    """The grouping key."""

    url: str
    job: str
    node: int


class Pusher:
    """Pushes each `interval_seconds` from a thread of its own. A gateway that is away costs one line, and no more.

    say: takes one line of notice.
    """

    def __init__(
        self, group: Group, registry: CollectorRegistry, *, interval_seconds: float, say: Callable[[str], object]
    ) -> None:
        self._group, self._registry, self._interval_seconds, self._say = group, registry, interval_seconds, say
        self._ended = threading.Event()
        self._away = False
        self._thread = threading.Thread(target=self._push_forever, name="push", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End pushing; the group stays. Waits for a push under way, at most its time-out. Never raises."""
        self._ended.set()
        self._thread.join(TIMEOUT_SECONDS + 1)

    def _push_forever(self) -> None:
        while not self._ended.is_set():
            self._push()
            self._ended.wait(self._interval_seconds)

    def _push(self) -> None:
        group = self._group
        try:
            push_to_gateway(
                group.url,
                job=group.job,
                registry=self._registry,
                grouping_key={"node": str(group.node)},
                timeout=TIMEOUT_SECONDS,
            )
        except Exception as error:  # urllib and http.client raise many kinds, and none may end the training
            if not self._away:
                self._say(f"metrics: WARNING: {group.url} takes no push, trying on: {error}")
            self._away = True
        else:
            if self._away:
                self._say(f"metrics: {group.url} takes pushes again")
            self._away = False


def delete_group(group: Group, *, say: Callable[[str], object]) -> None:
    """Delete what this node pushed; a group that is not there is no error. Never raises, and ends within 4 s."""
    failed = [f"no answer within {TIMEOUT_SECONDS + 1:g} s"]

    def delete() -> None:
        try:
            key = {"node": str(group.node)}
            delete_from_gateway(group.url, job=group.job, grouping_key=key, timeout=TIMEOUT_SECONDS)
            failed.clear()
        except Exception as error:  # as above
            failed[:] = [str(error)]

    # In a thread: a name server that is away holds a request up beyond its own time-out.
    thread = threading.Thread(target=delete, name="push", daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS + 1)
    for reason in list(failed):
        key = f"job={group.job}, node={group.node}"
        say(f"metrics: WARNING: {group.url} may still have the group {key}, which never expires by itself: {reason}")
