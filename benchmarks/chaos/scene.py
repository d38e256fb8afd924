"""The gang that faults are injected into: its processes, the progress of its ranks, its starts."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.chaos.orders import Orders
from benchmarks.chaos.proxy import FaultProxy
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import children
from ebbflow.core.store import Store
from ebbflow.training.errors import GangError
from ebbflow.training.launch.agent import LocalGang
from ebbflow.training.launch.heartbeat import Heartbeat, HeartbeatReading
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.launch.transport import control_ports

Alter = Callable[[GangSpec], GangSpec | None]


class Scene:
    """One job on this machine, started as often as needed; its ranks run
    `benchmarks.chaos.workload`.

    With more than one node, node 1 talks to node 0 through `proxy`.
    """

    def __init__(self, spec: GangSpec, folder: Path, orders: Orders) -> None:
        self.spec = spec
        self.folder = folder
        self.orders = orders
        self.store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
        self.output = folder / "output.log"
        self.starts = 0
        self.proxy: FaultProxy | None = None
        self.gang: LocalGang | None = None
        self.burners: list[subprocess.Popen[bytes]] = []  # that keep the cores busy
        self._alter_next: Alter | None = None

    def tamper(self, alter: Alter) -> None:
        """Alter each node's spec at the next start only; a node with None is not started."""
        self._alter_next = alter

    def start(self) -> None:
        """Start the next attempt, as a scheduler would."""
        spec = replace(self.spec, attempt=self.starts)
        alter_next = self._alter_next
        self._alter_next = None

        def alter(node_spec: GangSpec) -> GangSpec | None:
            proxied = self._through_proxy(node_spec)
            return alter_next(proxied) if alter_next else proxied

        if spec.nodes > 1:
            ports = control_ports(f"{spec.job}/{spec.run}", spec.attempt)
            self._close_proxy()
            self.proxy = FaultProxy([("127.0.0.1", port) for port in ports])
        self.starts += 1
        self.gang = LocalGang(
            spec,
            self.folder / f"start-{spec.attempt}",
            self.output,
            alter=alter,
        )

    def _through_proxy(self, spec: GangSpec) -> GangSpec:
        if spec.node == 0 or self.proxy is None:
            return spec
        return replace(spec, candidate_ports=[self.proxy.port])

    @property
    def running(self) -> bool:
        """Whether any agent is alive."""
        return self.gang is not None and any(agent.poll() is None for agent in self.gang.agents)

    def beats(self) -> dict[int, HeartbeatReading]:
        """Return the heartbeat of each rank of the newest generation."""
        logs = Path(self.spec.log_folder)
        folders = sorted(
            (path for path in logs.glob("*") if any(path.glob("*.heartbeat"))), reverse=True
        )
        if not folders:
            return {}
        found = {}
        for path in folders[0].glob("rank-*.heartbeat"):
            if path.stat().st_size:
                found[int(path.stem.removeprefix("rank-"))] = Heartbeat(path).read()
        return found

    def rank_pid(self, rank: int) -> int:
        """Return the process of a rank. Raises GangError if it has no heartbeat yet."""
        beat = self.beats().get(rank)
        if beat is None or not beat.pid:
            raise GangError(f"rank {rank} of {self.spec.job} has no process yet")
        return beat.pid

    def agent_pid(self, node: int) -> int:
        if self.gang is None or node not in self.gang.agents_by_node:
            raise GangError(f"node {node} of {self.spec.job} was not started")
        return self.gang.agents_by_node[node].pid

    def uploader_pid(self, rank: int) -> int:
        """Return the first child of a rank. Raises GangError if it has none."""
        found = children(self.rank_pid(rank))
        if not found:
            raise GangError(f"rank {rank} of {self.spec.job} has no uploader yet")
        return found[0]

    def newest_commit(self) -> str:
        """Return its key, "" before the first. Keys of later steps sort first."""
        return next((meta.key for meta in self.store.list("commits")), "")

    def await_end(self, timeout_seconds: float) -> bool:
        """Wait for all agents. Return whether they exited within that time."""
        limit = time.monotonic() + timeout_seconds
        while self.running and time.monotonic() < limit:
            time.sleep(0.02)
        return not self.running

    def close(self) -> None:
        """End all processes of the gang."""
        if self.gang is not None:
            self.gang.kill()
        self._close_proxy()

    def _close_proxy(self) -> None:
        if self.proxy is not None:
            self.proxy.close()
            self.proxy = None
