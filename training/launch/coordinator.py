"""Node 0's agent: gather the nodes, open one generation after another, and decide whether to go on."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.events import (
    FAULT_DETECTED,
    FAULT_INJECTED,
    GENERATION_ENDED,
    GENERATION_STARTED,
    NODE_ENDED,
    NODE_STARTED,
    OUTCOME,
    ROLLBACK,
    EndReason,
    Event,
    read_events,
)
from ebbflow.infra.store import Store
from ebbflow.infra.terms import BUDGET_THRESHOLDS, Terms
from ebbflow.training.checkpoint.lineage import (
    CANDIDATES,
    Generation,
    GenerationOpening,
    newest_commits,
    open_generation,
    reachable_commits,
)
from ebbflow.training.checkpoint.rollback import MissingCommits, check_rollback, newest_generation_in_events
from ebbflow.training.errors import GangError, TrainingError
from ebbflow.training.guards.overrides import read_overrides, rewind_parent
from ebbflow.training.launch.logs import print_line
from ebbflow.training.launch.membership import CoordinatorPeers
from ebbflow.training.launch.messages import (
    GangSpec,
    GenerationEnd,
    GenerationStart,
    end_from_stop_request,
    end_if_unaffordable,
)
from ebbflow.training.launch.node_runtime import NodeRuntime, end_from_agent_error
from ebbflow.training.launch.transport import SECRET_BYTES, rendezvous_port
from ebbflow.training.rehearse import Fault
from ebbflow.training.retry import retry_until_deadline, run_while

T = TypeVar("T")
# Outcomes that no rank has told in an event of its own.
_TOLD_BY_THE_LEAD = (Outcome.CRASH_LOOP, Outcome.NO_RESTORE, Outcome.ROLLED_BACK)
# For all nodes to have ended their ranks and closed their logs, after a verdict that the gang goes on.
REGROUP_SECONDS = 30.0
_WITHDRAW_SECONDS = 5.0  # for the store to delete the secret of the start, at the end of the agent


class Coordinator:
    """One attempt, over all its generations."""

    def __init__(self, own: NodeRuntime) -> None:
        self._own, self._log, self._drain = own, own.log, own.drain
        self._standing = own.standing()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._withdrawal: threading.Thread | None = None
        self._peers = CoordinatorPeers(own.spec, own.host, self._secret)
        self._planner = GenerationPlanner(own.spec, own.job_store, born=own.log.since)

    def run(self) -> GenerationEnd:
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
                    self._drain.forget_nodes(ended.left_out)
                    following = self._after(ended, generation.number, spec.world_size)
                    last = ended if isinstance(following, tuple) else following
                except (TrainingError, InfraError):
                    raise
                except Exception as error:  # the agent's own: on record as a failure, so that it cannot come for ever
                    following = ended = last = end_from_agent_error(error, spec.node)
                    with contextlib.suppress(TrainingError, InfraError):
                        seconds = self._log.seconds * spec.world_size
                        following = last = self._planner.check_crash_loop(ended, generation.number, seconds) or ended
                    self._peers.give_up(last)
                finally:
                    self._record_end(ended, last)
                if isinstance(following, GenerationEnd):
                    return following
                generation, nodes = following
                spec = self._own.spec_among(nodes)
            last = generation
            return generation
        finally:
            self._withdraw_secret()
            self._peers.close()
            self._drain.record(self._log.emit)
            self._log.close(last.reason)
            if self._withdrawal is not None:
                self._withdrawal.join(_WITHDRAW_SECONDS)

    def _open_first(self) -> Generation | GenerationEnd:
        """Before a notice is waited out: that time has to be on record too."""
        try:
            generation = self._retry_store(self._publish_and_open, lambda: self._peers.announce_wait(0.0))
        except (TrainingError, InfraError) as error:
            if self._drain.leaving:
                return self._peers.give_up(end_from_stop_request(self._drain.cause))
            self._peers.give_up(end_from_open_error(error, EndReason.STORE))
            if isinstance(error, TrainingError) and not error.curable:
                self._refuse(error)
            raise
        self._peers.announce_generation(generation.number)
        return generation

    def _publish_and_open(self) -> Generation:
        if self._own.spec.nodes > 1:
            self._own.secret.publish(self._secret)
        return self._planner.open()

    def _retry_store(self, work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
        """What asks the store: again and again as long as a start may take, since one that is in trouble may be well in
        a moment, and another attempt would find it no better."""

        def patiently() -> T:
            return retry_until_deadline(work, self._own.start_seconds, given_up=lambda: self._drain.leaving)

        def waiting() -> None:
            meanwhile()
            self._log.beat()

        return run_while(patiently, waiting)

    def _generation(self, generation: Generation, spec: GangSpec, nodes: list[int]) -> GenerationEnd:
        """From the roll-call, or from the generation before, to the verdict."""
        lead, leader = self._peers, self._planner
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
            self._wait_out_notices()
            lead.roll_call(self._own.start_seconds, self._own.is_leaving)
            self._withdraw_secret()
            start = self._retry_store(lambda: leader.plan(generation, nodes, lead.hosts(nodes)), lead.keep_in_touch)
            if broke := end_if_unaffordable(start, generation.parent_step):
                print_line(broke.outcome.message)
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
                **run_while(lambda: leader.lost(self._log.since, spec.world_size), self._keep_in_touch),
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

    def _wait_out_notices(self) -> None:
        """Once: this node's own notice, from before the start. Raises GangError where that is no time to start."""
        standing, self._standing = self._standing, None
        if standing is not None and (why := self._own.wait_out_notices(self._peers.announce_wait)):
            raise GangError(why, outcome=Outcome.INTERRUPTED)

    def _failed(self, error: TrainingError | InfraError) -> GenerationEnd:
        """The end of a generation whose ranks were never started."""
        if error.outcome is Outcome.INTERRUPTED:
            return end_from_stop_request(str(error))
        if cause := self._drain.cause if self._drain.leaving else self._peers.leave_cause:
            return end_from_stop_request(cause)
        return GenerationEnd(
            culprit=str(error), reason=EndReason.ROLL_CALL if isinstance(error, GangError) else EndReason.STORE
        )

    def _after(
        self, ended: GenerationEnd, number: int, world_size: int
    ) -> tuple[Generation, list[int]] | GenerationEnd:
        """The generation to go on with and its nodes, or the gang's last word."""
        if not ended.again:
            return ended
        last = nodes = self._peers.regroup(REGROUP_SECONDS, self._own.is_leaving)
        if isinstance(nodes, list):

            def open_next() -> Generation | GenerationEnd:
                loop = self._planner.check_crash_loop(ended, number, self._log.seconds * world_size)
                return loop or self._planner.open()

            try:
                last = self._retry_store(open_next, self._peers.keep_in_touch)
            except (TrainingError, InfraError) as error:
                leaving = self._drain.leaving
                last = (
                    end_from_stop_request(self._drain.cause) if leaving else end_from_open_error(error, EndReason.STORE)
                )
        if isinstance(last, GenerationEnd):
            return self._peers.give_up(last)
        return last, nodes

    def _keep_in_touch(self) -> None:
        """What goes on while the store is asked."""
        self._peers.keep_in_touch()
        self._log.beat()

    def _record_end(self, ended: GenerationEnd, last: GenerationEnd) -> None:
        self._log.emit(
            GENERATION_ENDED,
            reason=ended.reason,
            culprit=ended.culprit,
            user_code=ended.user_code,
            fingerprint=ended.fingerprint,
        )
        incurable = last.outcome is None and not last.curable and last.failed_as == Outcome.FAILED
        if incurable or last.failed_as in _TOLD_BY_THE_LEAD:
            print_line(last.culprit)
            self._log.emit(OUTCOME, outcome=last.failed_as, message=last.culprit)


class GenerationPlanner:
    """Over all generations of one attempt. born: since when the gang is paid for, by the clock `now`."""

    def __init__(
        self, spec: GangSpec, job_store: Store, born: float, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec, self._job_store, self._now = spec, job_store, now
        self._paid_until, self._spent_usd = born, 0.0
        self._world_size = spec.world_size
        self._failed: list[FailedGeneration] = []
        self._number = 0
        self.rolled_back: MissingCommits | None = None  # by permission, before the first generation
        self._opening = GenerationOpening()

    def open(self) -> Generation:
        """The next generation: from the newest commit, or from where a guard has ordered it to start."""
        if not self._number:  # what failed in earlier attempts; the first start of a job has none
            events = read_events(self._job_store)
            self._failed = read_failed_generations(events)
            self.rolled_back = check_rollback(self._job_store, events)
            # A store that was restored from a snapshot has lost generations too: their numbers are not given twice.
            self._opening.number = max(self._opening.number, newest_generation_in_events(events))
        parent = rewind_parent(self._job_store)
        spec = self._spec
        generation = open_generation(
            self._job_store, run=spec.run, attempt=spec.attempt, parent=parent, opening=self._opening
        )
        self._opening = GenerationOpening()
        self._number += 1
        return generation

    def plan(self, generation: Generation, nodes: Sequence[int], hosts: Sequence[str]) -> GenerationStart:
        spec = self._spec
        address = "127.0.0.1" if spec.main_address == "127.0.0.1" else ""
        start = GenerationStart(
            generation=generation.number,
            generation_id=generation.id,
            candidates=[commit.key for commit in reachable_commits(self._job_store, limit=CANDIDATES)],
            rendezvous_port=rendezvous_port(address, f"{spec.run}/{generation.id}", spec.attempt),
            terms=self._terms_now(),
            rehearse=self._fault_still_due(),
            hosts=list(hosts),
            nodes=list(nodes),
            overrides=read_overrides(self._job_store).to_json(),
        )
        self._world_size = len(nodes) * spec.processes_per_node
        return start

    def check_crash_loop(self, ended: GenerationEnd, generation: int, rank_seconds: float) -> GenerationEnd | None:
        """The last word when this end makes a crash loop; None: another generation may do better."""
        if not ended.fingerprint:
            return None
        failed = FailedGeneration(generation=generation, fingerprint=ended.fingerprint, rank_seconds=rank_seconds)
        self._failed = [*(one for one in self._failed if one.generation != generation), failed]
        newest = next(newest_commits(self._job_store), None)
        loop = find_crash_loop(self._failed, 0 if newest is None else newest.generation)
        if not loop:
            return None
        terms = self._spec.terms
        usd = None if terms is None else Terms.from_json(terms).usd_per_rank_second
        return GenerationEnd(
            culprit=describe_crash_loop(loop, ended.culprit, usd_per_rank_second=usd),
            reason=ended.reason,
            user_code=ended.user_code,
            curable=False,
            failed_as=Outcome.CRASH_LOOP.value,
        )

    def lost(self, since: float, world_size: int) -> dict[str, float]:
        """What the failure of a generation threw away, for its event: all ranks' time since the newest commit, or since
        the generation began (time.monotonic()) where that is later."""
        seconds = time.monotonic() - since
        with contextlib.suppress(TrainingError, InfraError):
            newest = next(newest_commits(self._job_store), None)
            meta = self._job_store.head(newest.key) if newest else None
            if meta is not None:
                seconds = min(seconds, max(time.time() - meta.modified, 0.0))
        lost = {"lost_rank_seconds": seconds * world_size}
        if self._spec.terms is not None:
            lost["usd_lost"] = lost["lost_rank_seconds"] * Terms.from_json(self._spec.terms).usd_per_rank_second
        return lost

    def _terms_now(self) -> dict | None:
        """The ranks count their own time only; what this gang has cost since it began, by waiting for its nodes and by
        generations that ended, is added. Thresholds that this reaches were told by the ranks that reached them."""
        now = self._now()
        waited, self._paid_until = now - self._paid_until, now
        if self._spec.terms is None:
            return None
        terms = Terms.from_json(self._spec.terms)
        self._spent_usd += waited * terms.usd_per_rank_second * self._world_size
        spent = terms.spent_usd + self._spent_usd
        told = terms.last_notified_threshold
        if self._number > 1:
            told = max([told, *(share for share in terms.reached(spent) if share < BUDGET_THRESHOLDS[-1])])
        return replace(terms, spent_usd=spent, last_notified_threshold=told).to_json()

    def _fault_still_due(self) -> dict | None:
        """A rehearsed fault fires once per job, whatever the number of attempts and generations."""
        if self._spec.rehearse is None:
            return None
        if any(event.name == FAULT_INJECTED for event in read_events(self._job_store)):
            return None
        return Fault.parse(self._spec.rehearse).to_json()


def end_from_open_error(error: TrainingError | InfraError, reason: str) -> GenerationEnd:
    """The last word of a gang that cannot begin its next generation."""
    return GenerationEnd(
        culprit=str(error),
        reason=reason,
        curable=isinstance(error, InfraError) or error.curable,
        failed_as=error.outcome.value,
    )


SAME_LIMIT = 3
ANY_LIMIT = 10  # failures of whatever kind: a job that never gets as far as a commit does not get anywhere


@dataclass(frozen=True, kw_only=True)
class FailedGeneration:
    """A generation that failed. rank_seconds: paid for it."""

    generation: int
    fingerprint: str
    rank_seconds: float


def read_failed_generations(events: Iterable[Event]) -> list[FailedGeneration]:
    """Of all attempts of the job, oldest first."""
    ended: dict[int, str] = {}
    seconds: dict[int, float] = {}
    ranks: dict[tuple[str, int, int, int], int] = {}
    for event in events:
        node = event.run, event.attempt, event.generation, event.node
        if event.name == NODE_STARTED:
            ranks[node] = len(event.data.get("ranks") or [])
        elif event.name == NODE_ENDED:
            paid = float(event.data.get("seconds") or 0.0) * ranks.get(node, 0)
            seconds[event.generation] = seconds.get(event.generation, 0.0) + paid
        elif event.name == GENERATION_ENDED and event.data.get("fingerprint"):
            ended[event.generation] = event.data["fingerprint"]
    return [
        FailedGeneration(generation=number, fingerprint=ended[number], rank_seconds=seconds.get(number, 0.0))
        for number in sorted(ended)
    ]


def find_crash_loop(failures: Sequence[FailedGeneration], newest_commit_generation: int) -> list[FailedGeneration]:
    """The failures that make a loop, the last one being the newest; none when another generation may do better.

    newest_commit_generation: which generation wrote the newest commit, 0 without one. What failed before that
    generation is forgiven: the job has come further since.
    """
    since = [failure for failure in failures if failure.generation >= newest_commit_generation]
    if not since:
        return []
    same = [failure for failure in since if failure.fingerprint == since[-1].fingerprint]
    if len(same) >= SAME_LIMIT:
        return same
    return since if len(since) >= ANY_LIMIT else []


def describe_crash_loop(loop: Sequence[FailedGeneration], culprit: str, *, usd_per_rank_second: float | None) -> str:
    """The message of the outcome: which trouble, how often, and what it has cost."""
    seconds = sum(failure.rank_seconds for failure in loop)
    cost = f"{seconds:.0f} rank-seconds"
    if usd_per_rank_second is not None:
        cost += f", ${seconds * usd_per_rank_second:.4f} at the planned price"
    numbers = ", ".join(str(failure.generation) for failure in loop)
    kinds = {failure.fingerprint for failure in loop}
    what = (
        f"the same failure {len(loop)} times ({loop[-1].fingerprint})" if len(kinds) == 1 else f"{len(loop)} failures"
    )
    return (
        f"crash loop: {what} with no new commit in between, in generations {numbers}, which cost {cost}; "
        f"the last one: {' '.join(culprit.split())[:300]}"
    )
