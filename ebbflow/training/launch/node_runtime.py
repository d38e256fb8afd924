"""State that a node's agent keeps across generations: event log, notices, standby and keeper."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ebbflow.core.events import EndReason
from ebbflow.core.footprint import HostGang
from ebbflow.core.keeper import Keeper
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import AwakeClock
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.infra.checks.gpu import gpus_hidden, try_gpus
from ebbflow.training.errors import AgentFailure, describe_exception, describe_traceback
from ebbflow.training.launch.devices import NodeGpuCheck
from ebbflow.training.launch.evidence import parse_traceback
from ebbflow.training.launch.generation import NodeGeneration, NodeLog
from ebbflow.training.launch.gpus import GpuMonitor
from ebbflow.training.launch.logs import print_line
from ebbflow.training.launch.membership import Peers
from ebbflow.training.launch.messages import GangSpec, GenerationEnd, GenerationStart, RankOrder
from ebbflow.training.launch.preemption import Drain
from ebbflow.training.launch.replacements import in_jobset
from ebbflow.training.launch.transport import StartSecret
from ebbflow.training.launch.workers import Standby
from ebbflow.training.retry import run_while

# Longest turn of the agent's loop; every wait in the loop has a shorter deadline
LOOP_SECONDS = 180.0
_JOIN_SECONDS = 5.0  # part of the start deadline that is kept for joining the gang after a wait
_REQUESTS_PER_START = 4  # requests that may time out one after the other within a start deadline


class LoopWatchdog:
    """Watchdog thread, which calls `end` to kill the agent's process if the agent's main loop is
    stuck.

    The loop counts as stuck if its number of iterations, `turns`, has not changed for
    `limit_seconds`. Time during which the process was suspended does not count. After the kill, the
    scheduler starts the process again.
    """

    def __init__(
        self,
        turns: Callable[[], int],
        limit_seconds: float = LOOP_SECONDS,
        *,
        end: Callable[[], object] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._turns = turns
        self._limit = limit_seconds
        self._end = end
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        clock = AwakeClock(longest_turn_seconds=2.0)
        seen = -1
        since = 0.0
        while not self._done.wait(min(1.0, self._limit / 4)):
            awake = clock.tick()
            turns = self._turns()
            if turns != seen:
                seen = turns
                since = awake
            elif awake - since > self._limit:
                try:
                    print_line(
                        f"this node's agent made no progress for {awake - since:.0f} s: killing it "
                        "for a restart"
                    )
                finally:
                    self._end()
                return


class NodeRuntime:
    """State of a node's agent across generations.

    `close` ends every process that the agent started.
    """

    def __init__(self, spec: GangSpec) -> None:
        self.spec = spec
        cluster = spec.config.cluster
        self.start_seconds = cluster.start_deadline_seconds
        gang = HostGang(nodes=spec.nodes, processes_per_node=spec.processes_per_node)
        self._gpu_check = NodeGpuCheck(
            cluster.device,
            promised=spec.promised_gpus,
            ranks=spec.processes_per_node,
            check=partial(try_gpus, config=spec.config, gang=gang),
        )
        limit = max(1.0, min(60.0, self.start_seconds / _REQUESTS_PER_START))
        if in_jobset():  # its pods start as soon as each has a machine, which may have to boot
            self.start_seconds = cluster.replacement_deadline_seconds
        self.job_store = Store.open(spec.store_uri, request_timeout_seconds=limit).sub(
            job_prefix(spec.job)
        )
        self.secret = StartSecret(self.job_store, spec.run, spec.attempt)
        self.host = socket.gethostname()
        self.log = NodeLog(self.job_store, self.host)
        self.drain = Drain(spec)
        self._watchdog = LoopWatchdog(lambda: self.log.turns)
        # A job on the CPU does not depend on GPUs of this machine, which other jobs may use.
        if cluster.device == "cpu" or gpus_hidden():
            self._gpus = None
        else:
            self._gpus = GpuMonitor()
        if self._gpus is not None:
            self._gpus.sample()
        self._keeper: Keeper | None = None
        self._standby: Standby | None = None
        self._cache_folder: Path | None = None  # folder of the first generation
        # In all generations; its pushed metrics are grouped by them
        self._node_numbers: set[int] = set()

    def find_pending_notice(self) -> RankOrder | None:
        """Return the order for a notice that must expire before the ranks start; None if there is
        none.

        If there is no such notice, also start the keeper and the standby, so that they are ready
        when the ranks start.
        """
        notice = self.drain.find_pending(self.start_seconds - _JOIN_SECONDS)
        if notice is None:
            self._prepare_processes()
        return notice

    def fetch_secret(self) -> bytes | None:
        return run_while(self.secret.fetch, self.is_leaving)

    def wait_out_notices(self, meanwhile: Callable[[float], str]) -> str:
        """Wait until all pending notices to this node have expired, then start the keeper and the
        standby.

        Return "" if the ranks may start, else the reason why not. `Drain.wait_out_notices` explains
        `meanwhile`.
        """

        def look(seconds: float) -> str:
            self.log.beat()
            if self.log.is_open:
                self.drain.record_pending(self.log.emit)
            return meanwhile(seconds)

        why = self.drain.wait_out_notices(look)
        if not why:
            self._prepare_processes()
        return why

    def run_ranks(
        self,
        spec: GangSpec,
        start: GenerationStart,
        peers: Peers,
        take_new_terms: Callable[[], Terms | None] = lambda: None,
    ) -> GenerationEnd:
        """Run this node's ranks in one generation.

        `take_new_terms` returns new cost terms for the running ranks, or None if they have not
        changed.
        """
        self._node_numbers.add(spec.node)
        if self._keeper is not None and self._keeper.lost:
            print_line(f"node {spec.node}: the keeper process was lost; starting another one")
            self._keeper.close()
            self._keeper = None
        if self._standby is not None and self._standby.lost:
            self._standby.close()
            self._standby = None
        self._prepare_processes()
        generation = NodeGeneration(
            spec,
            start,
            peers,
            self.drain,
            self.log,
            self.job_store,
            gpus=self._gpus,
            gpu_check=self._gpu_check,
            take_new_terms=take_new_terms,
        )
        self._cache_folder = self._cache_folder or generation.folder
        return generation.run(self._standby, self._cache_folder, self._keeper)

    def spec_among(self, nodes: list[int]) -> GangSpec:
        """Return this node's spec for a generation in which only `nodes` (sorted node numbers) take
        part.
        """
        return replace(self.spec, node=nodes.index(self.spec.node), nodes=len(nodes))

    def is_leaving(self) -> bool:
        """Return whether this node must exit.

        Also record a heartbeat, because every wait calls this method.
        """
        self.log.beat()
        return self.drain.leaving

    def end_if_stopped(self) -> GenerationEnd:
        """Return the agent's result for the case that it is stopped before the coordinator sends a
        result.
        """
        culprit = f"node {self.spec.node} ({self.host}): the agent was stopped"
        return GenerationEnd(culprit=culprit, reason=EndReason.AGENT_STOPPED)

    def close(self) -> None:
        for process in (self._watchdog, self._standby, self._keeper, self._gpus, self.drain):
            if process is not None:
                process.close()
        url = self.spec.config.metrics.push_url
        if url is not None:  # pushed metrics do not expire, and a killed rank cannot delete them
            from ebbflow.core.metrics import PushGroup, delete_group

            for node in self._node_numbers:
                delete_group(PushGroup(url, self.spec.job, node), say=print_line)

    def _prepare_processes(self) -> None:
        """Start the keeper and the standby if they do not run.

        Ignore errors, since ranks can start without them.
        """
        spec = self.spec
        folder = Path(self.spec.log_folder)
        if self._keeper is None and sys.platform.startswith("linux"):
            # Without a keeper, ranks are children of this process
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                self._keeper = Keeper(folder / f"keeper-node-{spec.node}.log")
        if self._standby is None and spec.config.survival.standby:
            if spec.main_address == "127.0.0.1":
                local_ranks = spec.world_size
            else:
                local_ranks = spec.processes_per_node
            with contextlib.suppress(OSError):  # without a standby, ranks start cold
                log = folder / f"standby-node-{spec.node}.log"
                self._standby = Standby(log, colocated_ranks=local_ranks, keeper=self._keeper)


def end_from_agent_error(error: Exception, node: int) -> GenerationEnd:
    """Return the result of a gang in which an agent raised an unexpected exception.

    A new attempt may succeed.
    """
    text = describe_traceback(error)
    print_line(text)
    name = AgentFailure.__name__
    place = parse_traceback(text)
    return GenerationEnd(
        culprit=(
            f"the agent of node {node} failed: "
            f"{describe_exception(error)}{f' in {place}' if place else ''}"
        ),
        reason=EndReason.AGENT_FAILED,
        error=name,
        fingerprint=f"{name} ({type(error).__name__}){f' at {place}' if place else ''}",
        at=(time.time(), time.monotonic()),
        user_code=True,
    )
