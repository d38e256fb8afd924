"""One agent per node owns its ranks; node 0's agent leads. `run_gang` is all that anybody else needs.

An agent imports no torch and never waits without a deadline. It ends its gang as soon as one rank or node is gone, and
says which one came first: that is the culprit, the others only followed.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from infra.config.schema import ClusterConfig
from infra.errors import InfraError
from infra.events import (
    FAULT_DETECTED,
    FAULT_INJECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_HEARTBEAT,
    NODE_STARTED,
    OUTCOME,
    EndReason,
    EventLog,
    Origin,
    read_events,
)
from infra.instance import identify
from infra.layout import generation_name, job_prefix
from infra.outcome import Outcome
from infra.store import Store
from infra.terms import Terms
from training.checkpoint.generations import Generation
from training.checkpoint.lineage import CANDIDATES, open_generation, reachable_commits
from training.errors import GangError, TrainingError
from training.guards.overrides import read_overrides, rewind_parent
from training.launch.drain import Drain
from training.launch.echo import say, show_last_lines
from training.launch.output import GangOutput
from training.launch.peers import Lead, Member, Peers, Start, Verdict, unaffordable
from training.launch.ports import rendezvous_port
from training.launch.spec import GangOutcome, GangSpec, WorkerSpec
from training.launch.watch.failure import WorkerFailure
from training.launch.workers import WorkerGroup
from training.rehearse import Fault

_POLL_SECONDS = 0.05
_BEAT_SECONDS = 1.0
_END_GRACE_SECONDS = 3.0
_START_MARGIN_SECONDS = 10.0


def run_gang(spec: GangSpec) -> GangOutcome:
    """Run this node's ranks as part of a gang, from roll-call to the end. Call it on every node, in the main thread.

    Returns the outcome that all ranks agreed on, the same on every node. Raises GangError, naming the culprit, for
    everything else; its `curable` says whether a new attempt may end better (a rank or node that died, hung or never
    came) or not (another model than the commit's). No process that it started is alive when it returns or raises.
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
        self._last_beat = 0.0
        self._drain = Drain(spec)

    def run(self) -> GangOutcome:
        try:
            with self._signals():
                if self._spec.node == 0:
                    return self._lead()
                return self._follow()
        finally:
            self._drain.close()

    def _lead(self) -> GangOutcome:
        lead = Lead(self._spec)
        try:
            generation = open_generation(self._job_store, run=self._spec.run, attempt=self._spec.attempt)
            self._open_log(generation.number)
            verdict = self._lead_generation(lead, generation)
        finally:
            lead.close()
        return self._conclude(verdict)

    def _lead_generation(self, lead: Lead, generation: Generation) -> Verdict:
        """From the roll-call to the verdict; however it ends, the log says how."""
        self._emit(
            GENERATION_STARTED,
            parent=generation.parent,
            parent_step=generation.parent_step,
            nodes=self._spec.nodes,
            processes_per_node=self._spec.processes_per_node,
        )
        verdict = self._stopped_verdict()
        try:
            lead.roll_call(self._cluster.start_deadline_seconds, lambda: self._drain.leaving)
            start = self._plan_start(lead, generation)
            if broke := unaffordable(start, generation.parent_step):
                say(broke.outcome.message)
                self._emit(OUTCOME, **asdict(broke.outcome))
                verdict = lead.give_up(broke)
            else:
                lead.start(start)
                verdict = self._run_ranks(start, lead)
        except (TrainingError, InfraError) as error:
            reason = EndReason.ROLL_CALL if isinstance(error, GangError) else EndReason.STORE
            verdict = lead.give_up(Verdict(culprit=str(error), reason=reason))
        finally:
            if verdict.culprit:
                self._emit(FAULT_DETECTED, culprit=verdict.culprit)
            self._emit(GENERATION_ENDED, reason=verdict.reason, culprit=verdict.culprit, user_code=verdict.user_code)
            self._close_log(verdict)
        return verdict

    def _follow(self) -> GangOutcome:
        deadline = self._cluster.start_deadline_seconds
        member = Member(self._spec, self._host, deadline, lambda: self._drain.leaving)
        try:
            start = member.await_start(deadline)
            if isinstance(start, Verdict):
                return self._conclude(start)
            self._open_log(start.generation)
            verdict = self._stopped_verdict()
            try:
                verdict = self._run_ranks(start, member)
            finally:
                self._close_log(verdict)
        finally:
            member.close()
        return self._conclude(verdict)

    def _stopped_verdict(self) -> Verdict:
        culprit = f"node {self._spec.node} ({self._host}): the agent was stopped"
        return Verdict(culprit=culprit, reason=EndReason.AGENT_STOPPED)

    def _plan_start(self, lead: Lead, generation: Generation) -> Start:
        spec = self._spec
        address = "127.0.0.1" if spec.main_address == "127.0.0.1" else ""
        return Start(
            generation=generation.number,
            generation_id=generation.id,
            candidates=[commit.key for commit in reachable_commits(self._job_store, limit=CANDIDATES)],
            rendezvous_port=rendezvous_port(address, spec.run, spec.attempt),
            terms=self._terms_now(),
            rehearse=self._fault_still_due(),
            hosts=lead.hosts(self._host),
            overrides=read_overrides(self._job_store).to_json(),
        )

    def _terms_now(self) -> dict | None:
        """The ranks count their own time only; what this gang has already cost by waiting for its nodes is added."""
        if self._spec.terms is None:
            return None
        terms = Terms.from_json(self._spec.terms)
        waited_usd = self._seconds() * terms.usd_per_rank_second * self._spec.world_size
        return replace(terms, spent_usd=terms.spent_usd + waited_usd).to_json()

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
            prepared=spec.prepared,
            terms=start.terms,
            rehearse=start.rehearse,
            overrides=start.overrides,
            colocated_ranks=start.colocated_nodes(spec.node) * spec.processes_per_node,
            control_path=str(self._drain.open_record(folder)),
            notice_path=str(self._drain.rehearsal_path),
            agent_pid=os.getpid(),
        )
        group = WorkerGroup(
            spec.ranks, spec.world_size, folder, worker_spec, (spec.main_address, start.rendezvous_port)
        )
        output = GangOutput(group, spec, start.generation, self._job_store)
        try:
            return self._watch(group, peers, output, start.generation)
        finally:
            group.end(_END_GRACE_SECONDS)
            output.close()
            self._withdraw_metrics()

    def _watch(self, group: WorkerGroup, peers: Peers, output: GangOutput, generation: int) -> Verdict:
        """Until the gang's verdict: report this node's news, hear the others'."""
        reported: dict[int, WorkerFailure] = {}
        finished = False
        # The ranks have the same deadline to find each other, and name the missing; the agent speaks after them.
        start_seconds = self._cluster.start_deadline_seconds + _START_MARGIN_SECONDS
        limits = {"init": start_seconds, "restore": start_seconds}
        while (verdict := peers.poll()) is None:
            failures = group.failures() + group.silent(limits, self._cluster.step_deadline_seconds)
            failures += self._drain.overstaying(group)
            for failure in failures:
                if failure.rank not in reported:
                    reported[failure.rank] = failure
                    say(f"node {self._spec.node}: rank {failure.rank}: {failure.headline}")
                    peers.report(failure)
            if not finished and not failures and group.all_exited():
                finished = True
                peers.finished(group.results())
            self._drain.attend(peers, self._emit)
            self._beat()
            output.follow()
            time.sleep(_POLL_SECONDS)
        if verdict.culprit:
            show_last_lines(group, list(reported.values()), job=self._spec.job, generation=generation)
        return verdict

    def _withdraw_metrics(self) -> None:
        """A pushed group never expires, and a rank that was killed cannot delete its own."""
        url = self._spec.config.get("metrics", {}).get("push_url")
        if url is not None:
            from infra.metrics.push import Group, delete_group

            delete_group(Group(url, self._spec.job, self._spec.node), say=say)

    def _conclude(self, verdict: Verdict) -> GangOutcome:
        if verdict.outcome is None:
            raise GangError(
                verdict.culprit,
                user_code=verdict.user_code,
                curable=verdict.curable,
                outcome=Outcome(verdict.failed_as),
            )
        return verdict.outcome

    def _open_log(self, generation: int) -> None:
        spec = self._spec
        origin = Origin(
            job=spec.job, run=spec.run, attempt=spec.attempt, generation=generation, node=spec.node, process="agent"
        )
        self._log = EventLog(self._job_store, origin)
        # The node is paid for from the agent's first moment, not from when the generation had its number.
        machine = identify()
        if machine.problem:
            say(f"node {spec.node}: which instance this is stays unknown: {machine.problem}")
        known = machine.to_json()
        self._log.emit(NODE_STARTED, at=self._born, ranks=list(spec.ranks), host=self._host, **known)

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

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C mean: save, leave, and let the job go on elsewhere. A second Ctrl-C means: now."""

        def ask(number: int, frame: object) -> None:
            if asked and number == signal.SIGINT:
                raise KeyboardInterrupt
            asked.append(number)
            self._drain.signalled()

        asked: list[int] = []
        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
