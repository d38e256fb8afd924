"""Node 0's agent: it gathers the others, opens generation after generation, and has the last word of each."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TypeVar

from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.events import FAULT_DETECTED, GENERATION_ENDED, GENERATION_STARTED, OUTCOME, ROLLBACK, EndReason
from ebbflow.training.checkpoint.lineage import Generation
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.launch.echo import say
from ebbflow.training.launch.handshake import SECRET_BYTES
from ebbflow.training.launch.leader import Leader, failed_to_open
from ebbflow.training.launch.own_node import OwnNode
from ebbflow.training.launch.patience import do_meanwhile, try_again
from ebbflow.training.launch.peers import Lead
from ebbflow.training.launch.spec import GangSpec
from ebbflow.training.launch.verdict import Verdict, agent_failed, told_to_leave, unaffordable

T = TypeVar("T")
# Outcomes that no rank has told in an event of its own.
_TOLD_BY_THE_LEAD = (Outcome.CRASH_LOOP, Outcome.NO_RESTORE, Outcome.ROLLED_BACK)
# For all nodes to have ended their ranks and closed their logs, after a verdict that the gang goes on.
REGROUP_SECONDS = 30.0
_WITHDRAW_SECONDS = 5.0  # for the store to delete the secret of the start, at the end of the agent


class Leading:
    """One attempt, over all its generations."""

    def __init__(self, own: OwnNode) -> None:
        self._own, self._log, self._drain = own, own.log, own.drain
        self._standing = own.standing()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._withdrawal: threading.Thread | None = None
        self._lead = Lead(own.spec, own.host, self._secret)
        self._leader = Leader(own.spec, own.job_store, born=own.log.since)

    def run(self) -> Verdict:
        """Generation after generation, until one ends with the gang's last word.

        Raises InfraError or TrainingError where not even the first one can be opened.
        """
        spec, nodes, last = self._own.spec, list(range(self._own.spec.nodes)), self._own.stopped()
        try:
            generation = self._open_first()
            while isinstance(generation, Generation):
                self._log.open(spec, generation.number, left_for=last.reason)
                ended = last = self._own.stopped()
                try:
                    ended = self._generation(generation, spec, nodes)
                    self._drain.settle(ended.left_out)
                    following = self._after(ended, generation.number, spec.world_size)
                    last = ended if isinstance(following, tuple) else following
                except (TrainingError, InfraError):
                    raise
                except Exception as error:  # the agent's own: on record as a failure, so that it cannot come for ever
                    following = ended = last = agent_failed(error, spec.node)
                    with contextlib.suppress(TrainingError, InfraError):
                        seconds = self._log.seconds * spec.world_size
                        following = last = self._leader.loop_after(ended, generation.number, seconds) or ended
                    self._lead.give_up(last)
                finally:
                    self._tell_end(ended, last)
                if isinstance(following, Verdict):
                    return following
                generation, nodes = following
                spec = self._own.in_place(nodes)
            last = generation
            return generation
        finally:
            self._withdraw_secret()
            self._lead.close()
            self._drain.record(self._log.emit)
            self._log.close(last.reason)
            if self._withdrawal is not None:
                self._withdrawal.join(_WITHDRAW_SECONDS)

    def _open_first(self) -> Generation | Verdict:
        """Before a notice is waited out: that time has to be on record too."""
        try:
            generation = self._asked_patiently(self._publish_and_open, lambda: self._lead.stand_by(0.0))
        except (TrainingError, InfraError) as error:
            if self._drain.leaving:
                return self._lead.give_up(told_to_leave(self._drain.cause))
            self._lead.give_up(failed_to_open(error, EndReason.STORE))
            if isinstance(error, TrainingError) and not error.curable:
                self._refuse(error)
            raise
        self._lead.gather_for(generation.number)
        return generation

    def _publish_and_open(self) -> Generation:
        if self._own.spec.nodes > 1:
            self._own.secret.publish(self._secret)
        return self._leader.open()

    def _asked_patiently(self, work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
        """What asks the store: again and again as long as a start may take, since one that is in trouble may be well in
        a moment, and another attempt would find it no better."""

        def patiently() -> T:
            return try_again(work, self._own.start_seconds, given_up=lambda: self._drain.leaving)

        def waiting() -> None:
            meanwhile()
            self._log.beat()

        return do_meanwhile(patiently, waiting)

    def _generation(self, generation: Generation, spec: GangSpec, nodes: list[int]) -> Verdict:
        """From the roll-call, or from the generation before, to the verdict."""
        lead, leader = self._lead, self._leader
        self._log.emit(
            GENERATION_STARTED,
            parent=generation.parent,
            parent_step=generation.parent_step,
            nodes=spec.nodes,
            processes_per_node=spec.processes_per_node,
        )
        if leader.rolled_back is not None:
            self._log.emit(ROLLBACK, step=leader.rolled_back.known.step, **leader.rolled_back.to_json())
            leader.rolled_back = None
        try:
            self._outlive()
            lead.roll_call(self._own.start_seconds, self._own.told_to_leave)
            self._withdraw_secret()
            start = self._asked_patiently(lambda: leader.plan(generation, nodes, lead.hosts(nodes)), lead.hold)
            if broke := unaffordable(start, generation.parent_step):
                say(broke.outcome.message)
                self._log.emit(OUTCOME, **asdict(broke.outcome))
                return lead.give_up(replace(broke, generation=generation.number))
            lead.start(start)
            verdict = self._own.run_ranks(spec, start, lead)
        except (TrainingError, InfraError) as error:
            verdict = lead.give_up(replace(self._failed(error), generation=generation.number))
        if verdict.culprit:
            self._log.emit(
                FAULT_DETECTED,
                at=tuple(verdict.at) or None,
                **verdict.details
                | {"culprit": verdict.culprit, "reason": verdict.reason, "fingerprint": verdict.fingerprint},
                **do_meanwhile(lambda: leader.lost(self._log.since, spec.world_size), self._hold),
            )
        return verdict

    def _withdraw_secret(self) -> None:
        """Once: as soon as all have come, or it is clear that they will not. Nobody waits for the store's answer."""
        if self._withdrawal is None and self._own.spec.nodes > 1:
            self._withdrawal = threading.Thread(target=self._own.secret.withdraw, name="secret", daemon=True)
            self._withdrawal.start()

    def _refuse(self, error: TrainingError) -> None:
        """Tell the nodes that have not joined yet as well: no attempt of theirs can cure it."""
        if self._withdrawal is None and self._own.spec.nodes > 1:
            self._withdrawal = threading.Thread(
                target=self._own.secret.refuse, args=(error,), name="secret", daemon=True
            )
            self._withdrawal.start()

    def _outlive(self) -> None:
        """Once: this node's own notice, from before the start. Raises GangError where that is no time to start."""
        standing, self._standing = self._standing, None
        if standing is not None and (why := self._own.outlive(self._lead.stand_by)):
            raise GangError(why, outcome=Outcome.INTERRUPTED)

    def _failed(self, error: TrainingError | InfraError) -> Verdict:
        """The end of a generation whose ranks were never started."""
        if error.outcome is Outcome.INTERRUPTED:
            return told_to_leave(str(error))
        if cause := self._drain.cause if self._drain.leaving else self._lead.left_for:
            return told_to_leave(cause)
        return Verdict(
            culprit=str(error), reason=EndReason.ROLL_CALL if isinstance(error, GangError) else EndReason.STORE
        )

    def _after(self, ended: Verdict, number: int, world_size: int) -> tuple[Generation, list[int]] | Verdict:
        """The generation to go on with and its nodes, or the gang's last word."""
        if not ended.again:
            return ended
        last = nodes = self._lead.regroup(REGROUP_SECONDS, self._own.told_to_leave)
        if isinstance(nodes, list):

            def open_next() -> Generation | Verdict:
                loop = self._leader.loop_after(ended, number, self._log.seconds * world_size)
                return loop or self._leader.open()

            try:
                last = self._asked_patiently(open_next, self._lead.hold)
            except (TrainingError, InfraError) as error:
                leaving = self._drain.leaving
                last = told_to_leave(self._drain.cause) if leaving else failed_to_open(error, EndReason.STORE)
        if isinstance(last, Verdict):
            return self._lead.give_up(last)
        return last, nodes

    def _hold(self) -> None:
        """What goes on while the store is asked."""
        self._lead.hold()
        self._log.beat()

    def _tell_end(self, ended: Verdict, last: Verdict) -> None:
        self._log.emit(
            GENERATION_ENDED,
            reason=ended.reason,
            culprit=ended.culprit,
            user_code=ended.user_code,
            fingerprint=ended.fingerprint,
        )
        if last.failed_as in _TOLD_BY_THE_LEAD:
            say(last.culprit)
            self._log.emit(OUTCOME, outcome=last.failed_as, message=last.culprit)
