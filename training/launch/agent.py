"""One agent per node owns its ranks; node 0's agent leads. `run_gang` is all that anybody else needs.

An agent imports no torch and never waits without a deadline. It ends its gang as soon as one rank or node is gone, and
says which one came first: that is the culprit, the others only followed.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.config.schema import ClusterConfig
from infra.events import (
    FAULT_DETECTED,
    FAULT_INJECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    EventLog,
    Origin,
    read_events,
)
from infra.layout import generation_name, job_prefix
from infra.store import Store
from training.checkpoint.lineage import Generation, open_generation, reachable_commits
from training.errors import GangError
from training.launch.peers import Lead, Member, Peers, Start, Verdict
from training.launch.ports import free_port
from training.launch.spec import GangOutcome, GangSpec, WorkerSpec
from training.launch.workers import WorkerFailure, WorkerGroup
from training.rehearse import Fault

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_END_GRACE_SECONDS = 3.0


def run_gang(spec: GangSpec) -> GangOutcome:
    """Run this node's ranks as part of a gang, from roll-call to the end. Call it on every node, in the main thread.

    Returns the outcome that all ranks agreed on, the same on every node. Raises GangError, naming the culprit, for
    everything that a new attempt may cure: a rank or node that died, hung or never came. No process that it started is
    alive when it returns or raises.
    """
    return _Agent(spec).run()


class _Agent:
    def __init__(self, spec: GangSpec) -> None:
        self._spec = spec
        self._born = (time.time(), time.monotonic())
        self._cluster = ClusterConfig(**spec.config["cluster"])
        self._job_store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
        self._host = socket.gethostname()
        self._log: EventLog | None = None
        self._echoed = 0
        self._muted = False
        self._last_beat = 0.0
        self._asked_to_stop = False

    def run(self) -> GangOutcome:
        with self._signals():
            if self._spec.node == 0:
                return self._lead()
            return self._follow()

    def _lead(self) -> GangOutcome:
        spec = self._spec
        generation = open_generation(self._job_store, run=spec.run, attempt=spec.attempt)
        self._open_log(generation.number)
        self._emit(
            GENERATION_STARTED,
            parent=generation.parent,
            parent_step=generation.parent_step,
            nodes=spec.nodes,
            processes_per_node=spec.processes_per_node,
        )
        lead = Lead(spec)
        verdict = Verdict(culprit=f"node 0 ({self._host}): the agent was stopped", reason="agent_stopped")
        try:
            lead.roll_call(self._cluster.start_deadline_seconds)
            start = self._plan_start(lead, generation)
            lead.start(start)
            verdict = self._run_ranks(start, lead)
        except GangError as error:
            verdict = Verdict(culprit=str(error), reason="roll_call")
            raise
        finally:
            if verdict.culprit:
                self._emit(FAULT_DETECTED, culprit=verdict.culprit)
            self._emit(GENERATION_ENDED, reason=verdict.reason, culprit=verdict.culprit, user_code=verdict.user_code)
            self._close_log(verdict)
            lead.close()
        return self._conclude(verdict)

    def _follow(self) -> GangOutcome:
        member = Member(self._spec, self._host, self._cluster.start_deadline_seconds)
        try:
            start = member.await_start(self._cluster.start_deadline_seconds)
            if isinstance(start, Verdict):
                return self._conclude(start)
            self._open_log(start.generation)
            verdict = Verdict(
                culprit=f"node {self._spec.node} ({self._host}): the agent was stopped", reason="agent_stopped"
            )
            try:
                verdict = self._run_ranks(start, member)
            finally:
                self._close_log(verdict)
        finally:
            member.close()
        return self._conclude(verdict)

    def _plan_start(self, lead: Lead, generation: Generation) -> Start:
        return Start(
            generation=generation.number,
            generation_id=generation.id,
            candidates=[commit.key for commit in reachable_commits(self._job_store)],
            rendezvous_port=free_port("127.0.0.1" if self._spec.main_address == "127.0.0.1" else ""),
            rehearse=self._fault_still_due(),
            hosts=lead.hosts(self._host),
        )

    def _fault_still_due(self) -> dict | None:
        """A rehearsed fault fires once per job, whatever the number of attempts."""
        if self._spec.rehearse is None:
            return None
        if any(event.name == FAULT_INJECTED for event in read_events(self._job_store)):
            return None
        return Fault.parse(self._spec.rehearse).to_json()

    def _run_ranks(self, start: Start, peers: Peers) -> Verdict:
        spec = self._spec
        name = generation_name(start.generation, start.generation_id)
        folder = Path(spec.log_folder) / name
        folder.mkdir(parents=True, exist_ok=True)
        worker_spec = WorkerSpec(
            job=spec.job,
            run=spec.run,
            attempt=spec.attempt,
            node=spec.node,
            generation=start.generation,
            generation_id=start.generation_id,
            candidates=start.candidates,
            config=spec.config,
            store_uri=spec.store_uri,
            tokens=spec.tokens,
            terms=spec.terms,
            rehearse=start.rehearse,
            colocated_ranks=start.colocated_nodes(spec.node) * spec.processes_per_node,
            agent_pid=os.getpid(),
        )
        group = WorkerGroup(
            spec.ranks, spec.world_size, folder, worker_spec, (spec.main_address, start.rendezvous_port)
        )
        try:
            return self._watch(group, peers)
        finally:
            group.end(_END_GRACE_SECONDS)
            self._echo(group)

    def _watch(self, group: WorkerGroup, peers: Peers) -> Verdict:
        """Until the gang's verdict: report this node's news, hear the others'."""
        reported: dict[int, WorkerFailure] = {}
        finished = stopping = False
        limits = {"init": self._cluster.start_deadline_seconds, "restore": self._cluster.start_deadline_seconds}
        while (verdict := peers.poll()) is None:
            failures = group.failures()
            if stuck := group.stuck(limits, self._cluster.step_deadline_seconds):
                failures.append(stuck)
            for failure in failures:
                if failure.rank not in reported:
                    reported[failure.rank] = failure
                    self._print(f"node {self._spec.node}: rank {failure.rank}: {failure.headline}")
                    peers.report(failure)
            if not finished and not failures and group.all_exited():
                finished = True
                peers.finished(group.results())
            if self._asked_to_stop and not stopping:
                stopping = True
                group.terminate()
            self._beat()
            self._echo(group)
            time.sleep(_POLL_SECONDS)
        if verdict.culprit:
            self._show_logs(group, [rank for rank, failure in reported.items() if not failure.cascade])
        return verdict

    def _conclude(self, verdict: Verdict) -> GangOutcome:
        if verdict.outcome is None:
            raise GangError(verdict.culprit, user_code=verdict.user_code)
        return verdict.outcome

    def _open_log(self, generation: int) -> None:
        spec = self._spec
        origin = Origin(
            job=spec.job, run=spec.run, attempt=spec.attempt, generation=generation, node=spec.node, process="agent"
        )
        self._log = EventLog(self._job_store, origin, flush_seconds=_BEAT_SECONDS)
        # The node is paid for from the agent's first moment, not from when the generation had its number.
        self._log.emit(NODE_STARTED, at=self._born, ranks=list(spec.ranks), host=self._host, flush=True)

    def _close_log(self, verdict: Verdict) -> None:
        self._emit(NODE_ENDED, seconds=self._seconds(), reason=verdict.reason)
        if self._log:
            self._log.close()

    def _emit(self, name: str, **data: object) -> None:
        if self._log:
            self._log.emit(name, **data)

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._last_beat >= _BEAT_SECONDS:
            self._last_beat = now
            self._emit(NODE_HEARTBEAT, seconds=self._seconds())

    def _seconds(self) -> float:
        return time.monotonic() - self._born[1]

    def _echo(self, group: WorkerGroup) -> None:
        """Pass rank 0's whole lines on to our own output, which is what the user watches.

        Up to a traceback: whether that is the cause or only follows from it, the verdict will say.
        """
        first = group.workers[0]
        if first.rank != 0:
            return
        with open(first.log_path, "rb") as log:
            log.seek(self._echoed)
            data = log.read()
        whole = data[: data.rfind(b"\n") + 1]
        if whole:
            self._echoed += len(whole)
            text, traceback, _ = whole.decode(errors="replace").partition("Traceback (most recent call last)")
            if not self._muted:
                sys.stdout.write(text)
                sys.stdout.flush()
            self._muted = self._muted or bool(traceback)

    def _show_logs(self, group: WorkerGroup, ranks: list[int]) -> None:
        for worker in group.workers:
            if worker.rank in ranks:
                self._print(f"last lines of rank {worker.rank} ({worker.log_path}):")
                self._print("\n".join(f"| {line}" for line in worker.log_tail().splitlines()))

    def _print(self, text: str) -> None:
        print(text, flush=True)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM means: save, leave, and let the attempt be repeated elsewhere."""

        def ask(*_: object) -> None:
            self._asked_to_stop = True

        before = signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)
