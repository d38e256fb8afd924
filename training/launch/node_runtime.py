"""The state of a node's agent over all generations: event log, notices, standby, keeper and ranks.

One generation of a node ends at the very moment at which its next one begins, so that all of an agent's life is paid
for in exactly one generation, and nothing twice.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ebbflow.infra.config.schema import ClusterConfig, SurvivalConfig
from ebbflow.infra.events import EndReason
from ebbflow.infra.keeper import Keeper
from ebbflow.infra.layout import job_prefix
from ebbflow.infra.process import AwakeClock
from ebbflow.infra.store import Store
from ebbflow.training.errors import AgentFailure, describe_exception, describe_traceback
from ebbflow.training.launch.devices import NodeGpuCheck
from ebbflow.training.launch.evidence import parse_traceback
from ebbflow.training.launch.generation import NodeGeneration, NodeLog
from ebbflow.training.launch.logs import print_line
from ebbflow.training.launch.membership import Peers
from ebbflow.training.launch.messages import GangSpec, GenerationEnd, GenerationStart, RankOrder
from ebbflow.training.launch.preemption import Drain
from ebbflow.training.launch.transport import StartSecret
from ebbflow.training.launch.watch import GpuCounters
from ebbflow.training.launch.workers import Standby
from ebbflow.training.retry import run_while

LOOP_SECONDS = 180.0  # that an agent's loop may stand still; all that it waits for ends sooner
_JOIN_SECONDS = 5.0  # for a node that comes late to find the others, who wait for it as long as a start may take
_REQUESTS_PER_START = 4  # that may hang one after the other before a start is given up


class LoopWatchdog:
    """Kills this process when its agent's loop has not turned for `limit_seconds`: no other process may be left to
    notice, and the launcher, or the scheduler, starts a killed task again. A thread of its own, until `close`.

    Time in which the process did not run does not count. turns: how often the loop has turned so far.
    """

    def __init__(
        self,
        turns: Callable[[], int],
        limit_seconds: float = LOOP_SECONDS,
        *,
        end: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._turns, self._limit, self._end = turns, limit_seconds, end
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        clock, seen, since = AwakeClock(longest_turn_seconds=2.0), -1, 0.0
        while not self._done.wait(min(1.0, self._limit / 4)):
            awake, turns = clock.tick(), self._turns()
            if turns != seen:
                seen, since = turns, awake
            elif awake - since > self._limit:
                try:
                    print_line(
                        f"this node's agent stood still for {awake - since:.0f} s: it is killed, to be started again"
                    )
                finally:
                    self._end()
                return


class NodeRuntime:
    """Nothing that it started is alive after `close`."""

    def __init__(self, spec: GangSpec) -> None:
        self.spec = spec
        cluster = ClusterConfig(**spec.config["cluster"])
        self.start_seconds = cluster.start_deadline_seconds
        self._gpu_check = NodeGpuCheck(cluster.device, promised=spec.promised_gpus)
        limit = max(1.0, min(60.0, self.start_seconds / _REQUESTS_PER_START))
        self.job_store = Store.open(spec.store_uri, request_timeout_seconds=limit).sub(job_prefix(spec.job))
        self.secret = StartSecret(self.job_store, spec.run, spec.attempt)
        self.host = socket.gethostname()
        self.log = NodeLog(self.job_store, self.host)
        self.drain = Drain(spec)
        self._watchdog = LoopWatchdog(lambda: self.log.turns)
        self._gpus = GpuCounters()
        self._keeper: Keeper | None = None
        self._standby: Standby | None = None
        self._kept: Path | None = None  # folder of the first generation
        self._pushed: set[int] = set()  # numbers that this node has had: its metrics stand under each

    def standing(self) -> RankOrder | None:
        """What is to be waited out before anything is begun here. Without it the standby begins to import what ranks
        need, while the nodes still find each other."""
        standing = self.drain.standing(self.start_seconds - _JOIN_SECONDS)
        if standing is None:
            self._warm()
        return standing

    def fetch_secret(self) -> bytes | None:
        """By which node 0 knows this node; None while there is none. Raises StoreError."""
        return run_while(self.secret.fetch, self.is_leaving)

    def wait_out_notices(self, meanwhile: Callable[[float], str]) -> str:
        """Wait out what stands, which is paid for and on record: "" when this node may start, else why not."""

        def look(seconds: float) -> str:
            self.log.beat()
            if self.log.is_open:
                self.drain.record_pending(self.log.emit)
            return meanwhile(seconds)

        why = self.drain.wait_out_notices(look)
        if not why:
            self._warm()
        return why

    def run_ranks(self, spec: GangSpec, start: GenerationStart, peers: Peers) -> GenerationEnd:
        self._pushed.add(spec.node)
        if self._keeper is not None and self._keeper.lost:
            print_line(f"node {spec.node}: the process that keeps the ranks was lost; another one takes its place")
            self._keeper.close()
            self._keeper = None
        if self._standby is not None and self._standby.lost:
            self._standby.close()
            self._standby = None
        self._warm()
        generation = NodeGeneration(
            spec, start, peers, self.drain, self.log, self.job_store, gpus=self._gpus, gpu_check=self._gpu_check
        )
        self._kept = self._kept or generation.folder
        return generation.run(self._standby, self._kept, self._keeper)

    def spec_among(self, nodes: list[int]) -> GangSpec:
        """This node's spec among the nodes that take part, which get their ranks in this order."""
        return replace(self.spec, node=nodes.index(self.spec.node), nodes=len(nodes))

    def is_leaving(self) -> bool:
        """What is asked all along while this node waits for others, in which time it is paid for as well."""
        self.log.beat()
        return self.drain.leaving

    def stopped(self) -> GenerationEnd:
        """Of this node, where nothing else is known."""
        culprit = f"node {self.spec.node} ({self.host}): the agent was stopped"
        return GenerationEnd(culprit=culprit, reason=EndReason.AGENT_STOPPED)

    def close(self) -> None:
        self._watchdog.close()
        if self._standby is not None:
            self._standby.close()
        if self._keeper is not None:
            self._keeper.close()
        self._gpus.close()
        self.drain.close()
        self._withdraw_metrics()

    def _warm(self) -> None:
        if self._keeper is None and sys.platform.startswith("linux"):
            with contextlib.suppress(OSError):  # no more processes or memory: ranks are this process's own children
                folder = Path(self.spec.log_folder)
                folder.mkdir(parents=True, exist_ok=True)
                self._keeper = Keeper(folder / f"keeper-node-{self.spec.node}.log")
        if self._standby is None and SurvivalConfig(**self.spec.config.get("survival", {})).standby:
            with contextlib.suppress(OSError):  # ranks are started cold then, or say why they cannot be
                self._standby = self._new_standby()

    def _new_standby(self) -> Standby:
        spec = self.spec
        here = spec.world_size if spec.main_address == "127.0.0.1" else spec.processes_per_node
        return Standby(
            Path(spec.log_folder) / f"standby-node-{spec.node}.log", colocated_ranks=here, keeper=self._keeper
        )

    def _withdraw_metrics(self) -> None:
        """A pushed group never expires, and a rank that was killed cannot delete its own."""
        url = self.spec.config.get("metrics", {}).get("push_url")
        if url is not None:
            from ebbflow.infra.metrics import PushGroup, delete_group

            for node in self._pushed:
                delete_group(PushGroup(url, self.spec.job, node), say=print_line)


def end_from_agent_error(error: Exception, node: int) -> GenerationEnd:
    """The end of a gang one of whose agents raised: a failure of the program, which a new attempt may cure."""
    text = describe_traceback(error)
    print_line(text)
    place = parse_traceback(text)
    kind = f"{AgentFailure.__name__} ({type(error).__name__})"
    return GenerationEnd(
        culprit=f"the agent of node {node} failed: {describe_exception(error)}{f' in {place}' if place else ''}",
        reason=EndReason.AGENT_FAILED,
        error=AgentFailure.__name__,
        fingerprint=f"{kind} at {place}" if place else kind,
        at=(time.time(), time.monotonic()),
        user_code=True,
    )
