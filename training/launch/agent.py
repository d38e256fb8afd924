"""One agent per node owns its ranks; node 0's agent leads. `run_gang` is all that anybody else needs.

An agent imports no torch and never waits without a deadline. It ends its gang as soon as one rank or node is gone, and
says which one came first: that is the culprit, the others only followed. What the agents that are there can cure, they
cure at once: the next generation of the gang begins where this one ends, with the newest commit, in the same attempt.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from infra.config.schema import ClusterConfig, SurvivalConfig
from infra.errors import InfraError
from infra.events import (
    FAULT_DETECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    OUTCOME,
    EndReason,
)
from infra.layout import job_prefix
from infra.outcome import Outcome
from infra.store import Store
from training.checkpoint.generations import Generation
from training.errors import GangError, TrainingError
from training.launch.drain import Drain
from training.launch.echo import say
from training.launch.generation import NodeGeneration
from training.launch.leader import Leader, failed_to_open
from training.launch.member import Member
from training.launch.node_log import NodeLog
from training.launch.patience import do_meanwhile, try_again
from training.launch.peers import Lead, Peers
from training.launch.spec import GangOutcome, GangSpec
from training.launch.standby import Standby
from training.launch.verdict import Start, Verdict, left_out, told_to_leave, unaffordable

# For all nodes to have ended their ranks and closed their logs, after a verdict that the gang goes on.
REGROUP_SECONDS = 30.0
_JOIN_SECONDS = 5.0  # for a node that comes late to find the others, who wait for it as long as a start may take


def run_gang(spec: GangSpec) -> GangOutcome:
    """Run this node's ranks as part of a gang, from roll-call to the end. Call it on every node, in the main thread.

    Returns the outcome that all ranks agreed on, the same on every node but one that the others go on without.
    Raises GangError, naming the culprit, for all that no further generation with these agents can cure; its `curable`
    says whether a new attempt may end better (a node that died or never came) or not (another model than the commit's,
    a crash loop). No process that it started is alive when it returns or raises.
    """
    return _Agent(spec).run()


class _Agent:
    def __init__(self, spec: GangSpec) -> None:
        self._spec = spec
        self._cluster = ClusterConfig(**spec.config["cluster"])
        self._job_store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
        self._host = socket.gethostname()
        self._log = NodeLog(self._job_store, self._host)
        self._drain = Drain(spec)
        self._standby: Standby | None = None
        self._kept: Path | None = None  # folder of the first generation
        self._pushed: set[int] = set()  # numbers that this node has had: its metrics stand under each

    def run(self) -> GangOutcome:
        try:
            with self._signals():
                verdict = self._unless_doomed()
        finally:
            self._drain.close()
            self._withdraw_metrics()
        return self._conclude(verdict)

    def _unless_doomed(self) -> Verdict:
        """The gang's last word; no gang is begun on a machine that is going away as this starts."""
        if why := self._drain.outlive_standing(self._cluster.start_deadline_seconds - _JOIN_SECONDS):
            return told_to_leave(why)
        with self._warm():
            return self._lead() if self._spec.node == 0 else self._follow()

    def _lead(self) -> Verdict:
        """Generation after generation, until one ends with the gang's last word."""
        lead, leader = Lead(self._spec, self._host), Leader(self._spec, self._job_store, born=self._log.since)
        spec, nodes, last = self._spec, list(range(self._spec.nodes)), self._stopped()
        try:
            generation = leader.open()
            while True:
                self._log.open(spec, generation.number, left_for=last.reason)
                ended = last = self._stopped()
                try:
                    ended = self._lead_generation(lead, leader, generation, spec, nodes)
                    self._drain.settle(ended.left_out)
                    following = self._after(lead, leader, ended, generation.number, spec.world_size)
                    last = ended if isinstance(following, tuple) else following
                finally:
                    self._tell_end(ended, last)
                if isinstance(following, Verdict):
                    return following
                generation, nodes = following
                spec = self._in_place(nodes)
        finally:
            lead.close()
            self._drain.record(self._log.emit)
            self._log.close(last.reason)

    def _lead_generation(
        self, lead: Lead, leader: Leader, generation: Generation, spec: GangSpec, nodes: list[int]
    ) -> Verdict:
        """From the roll-call, or from the generation before, to the verdict."""
        self._log.emit(
            GENERATION_STARTED,
            parent=generation.parent,
            parent_step=generation.parent_step,
            nodes=spec.nodes,
            processes_per_node=spec.processes_per_node,
        )
        try:
            lead.roll_call(self._cluster.start_deadline_seconds, self._told_to_leave)
            start = do_meanwhile(lambda: leader.plan(generation, nodes, lead.hosts(nodes)), self._wait(lead))
            if broke := unaffordable(start, generation.parent_step):
                say(broke.outcome.message)
                self._log.emit(OUTCOME, **asdict(broke.outcome))
                return lead.give_up(replace(broke, generation=generation.number))
            lead.start(start)
            verdict = self._run_ranks(spec, start, lead)
        except (TrainingError, InfraError) as error:
            reason = EndReason.ROLL_CALL if isinstance(error, GangError) else EndReason.STORE
            verdict = Verdict(culprit=str(error), reason=reason)
            if cause := self._drain.cause if self._drain.leaving else lead.left_for:
                verdict = told_to_leave(cause)
            verdict = lead.give_up(replace(verdict, generation=generation.number))
        if verdict.culprit:
            self._log.emit(
                FAULT_DETECTED,
                at=tuple(verdict.at) or None,
                **verdict.details
                | {"culprit": verdict.culprit, "reason": verdict.reason, "fingerprint": verdict.fingerprint},
                **do_meanwhile(lambda: leader.lost(self._log.since, spec.world_size), self._wait(lead)),
            )
        return verdict

    def _after(
        self, lead: Lead, leader: Leader, ended: Verdict, number: int, world_size: int
    ) -> tuple[Generation, list[int]] | Verdict:
        """The generation to go on with and its nodes, or the gang's last word."""
        if not ended.again:
            return ended
        last = nodes = lead.regroup(REGROUP_SECONDS, self._told_to_leave)
        if isinstance(nodes, list):

            def open_next() -> Generation | Verdict:
                return leader.loop_after(ended, number, self._log.seconds * world_size) or leader.open()

            def patiently() -> Generation | Verdict:
                return try_again(open_next, self._cluster.start_deadline_seconds, lambda: self._drain.leaving)

            try:
                last = do_meanwhile(patiently, self._wait(lead))
            except (TrainingError, InfraError) as error:
                leaving = self._drain.leaving
                last = told_to_leave(self._drain.cause) if leaving else failed_to_open(error, EndReason.STORE)
        if isinstance(last, Verdict):
            return lead.give_up(last)
        return last, nodes

    def _tell_end(self, ended: Verdict, last: Verdict) -> None:
        self._log.emit(
            GENERATION_ENDED,
            reason=ended.reason,
            culprit=ended.culprit,
            user_code=ended.user_code,
            fingerprint=ended.fingerprint,
        )
        if last.failed_as == Outcome.CRASH_LOOP:
            say(last.culprit)
            self._log.emit(OUTCOME, outcome=last.failed_as, message=last.culprit)

    def _follow(self) -> Verdict:
        deadline = self._cluster.start_deadline_seconds
        try:
            member = Member(self._spec, self._host, deadline, self._told_to_leave)
        except GangError:
            if self._drain.leaving:
                return told_to_leave(self._drain.cause)
            raise
        last = self._stopped()
        try:
            word = member.await_start(deadline)
            while isinstance(word, Start):
                spec = self._in_place(word.nodes)
                self._log.open(spec, word.generation, left_for=last.reason)
                last = self._stopped()
                last = self._run_ranks(spec, word, member)
                if not last.again:
                    return last
                if self._spec.node in last.left_out:
                    return (last := left_out(last, self._drain.cause))
                self._drain.settle(last.left_out)
                member.ready()
                word = member.await_start(deadline + REGROUP_SECONDS)
            if word.generation and not self._log.is_open:  # it waited for a gang that never started, and is paid for
                self._log.open(self._spec, word.generation)
            last = word
            return word
        finally:
            for order in self._drain.record(self._log.emit):  # heard while it waited for the lead, which must know why
                member.order(order)
            member.close()
            self._log.close(last.reason)

    def _run_ranks(self, spec: GangSpec, start: Start, peers: Peers) -> Verdict:
        self._pushed.add(spec.node)
        if self._standby is not None and self._standby.lost:
            self._standby.close()
            self._standby = self._new_standby()
        generation = NodeGeneration(spec, start, peers, self._drain, self._log, self._job_store)
        self._kept = self._kept or generation.folder
        return generation.run(self._standby, self._kept)

    def _in_place(self, nodes: list[int]) -> GangSpec:
        """This node's spec among the nodes that take part, which get their ranks in this order."""
        return replace(self._spec, node=nodes.index(self._spec.node), nodes=len(nodes))

    def _told_to_leave(self) -> bool:
        """What is asked all along while this node waits for others, in which time it is paid for as well."""
        self._log.beat()
        return self._drain.leaving

    def _wait(self, lead: Lead) -> Callable[[], None]:
        """What goes on while the store is asked."""

        def meanwhile() -> None:
            lead.hold()
            self._log.beat()

        return meanwhile

    def _stopped(self) -> Verdict:
        culprit = f"node {self._spec.node} ({self._host}): the agent was stopped"
        return Verdict(culprit=culprit, reason=EndReason.AGENT_STOPPED)

    def _new_standby(self) -> Standby:
        spec = self._spec
        here = spec.world_size if spec.main_address == "127.0.0.1" else spec.processes_per_node
        return Standby(Path(spec.log_folder) / f"standby-node-{spec.node}.log", colocated_ranks=here)

    @contextmanager
    def _warm(self) -> Iterator[None]:
        """The standby imports what ranks need while the nodes still find each other, and is gone with the agent."""
        if SurvivalConfig(**self._spec.config.get("survival", {})).standby:
            self._standby = self._new_standby()
        try:
            yield
        finally:
            if self._standby is not None:
                self._standby.close()

    def _withdraw_metrics(self) -> None:
        """A pushed group never expires, and a rank that was killed cannot delete its own."""
        url = self._spec.config.get("metrics", {}).get("push_url")
        if url is not None:
            from infra.metrics.push import Group, delete_group

            for node in self._pushed:
                delete_group(Group(url, self._spec.job, node), say=say)

    def _conclude(self, verdict: Verdict) -> GangOutcome:
        if verdict.outcome is None:
            raise GangError(
                verdict.culprit,
                user_code=verdict.user_code,
                curable=verdict.curable,
                outcome=Outcome(verdict.failed_as),
            )
        return verdict.outcome

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
