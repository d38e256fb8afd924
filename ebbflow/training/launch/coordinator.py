"""Coordinator, which is the agent of node 0.

It waits for all nodes, opens one generation after another, and decides after each generation
whether the gang continues.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

import ebbflow.core.events as ev
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.events import EndReason, Event, read_events
from ebbflow.core.store import Store
from ebbflow.core.terms import BUDGET_THRESHOLDS, RankPrice, Terms
from ebbflow.training.checkpoint.lineage import (
    CANDIDATES,
    Generation,
    GenerationOpening,
    newest_commits,
    open_generation,
    reachable_commits,
)
from ebbflow.training.checkpoint.rollback import (
    MissingCommits,
    check_rollback,
    newest_generation_in_events,
)
from ebbflow.training.engine.guards.overrides import read_overrides, rewind_parent
from ebbflow.training.errors import CrashLoop, GangError, TrainingError
from ebbflow.training.launch import messages
from ebbflow.training.launch.crash_loop import (
    SAME_LIMIT,
    FailedGeneration,
    ProgressBound,
    describe_crash_loop,
    exceeded_bound,
    find_crash_loop,
    read_failed_generations,
    since_last_verdict,
)
from ebbflow.training.launch.keys_folder import KeysFolder
from ebbflow.training.launch.logs import print_line
from ebbflow.training.launch.membership import CoordinatorPeers
from ebbflow.training.launch.node_runtime import NodeRuntime, end_from_agent_error
from ebbflow.training.launch.price_follower import PriceFollower, PriceLookup
from ebbflow.training.launch.replacements import replacements_of
from ebbflow.training.launch.transport import SECRET_BYTES, is_loopback, rendezvous_port
from ebbflow.training.rehearse import Fault
from ebbflow.training.retry import is_transient, retry_until_deadline, run_while

T = TypeVar("T")
# Outcomes that the coordinator records, because no rank can.
_RECORDED_HERE = (Outcome.CRASH_LOOP, Outcome.NO_RESTORE, Outcome.ROLLED_BACK)
REGROUP_SECONDS = 30.0  # deadline for all nodes to end their ranks before the next generation
_SECRET_SECONDS = 5.0  # for the store to delete the start's secret when the agent exits


class Coordinator:
    """Agent of node 0, which runs one attempt of a gang, generation after generation."""

    def __init__(self, own: NodeRuntime, prices: PriceLookup | None = None) -> None:
        self._own = own
        self._log = own.log
        self._drain = own.drain
        self._pending_notice = own.find_pending_notice()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._secret_thread: threading.Thread | None = None
        self._ranks_started = False  # in the running generation
        self._restarting = False  # an earlier generation of this attempt started ranks
        self._peers = CoordinatorPeers(own.spec, own.host, self._secret)
        self._planner = GenerationPlanner(own.spec, own.job_store, born=own.log.since)
        self._prices: PriceFollower | None = None
        terms = own.spec.terms
        if prices is not None and terms is not None and terms.price_look_seconds:
            self._prices = PriceFollower(prices, terms.price_look_seconds)

    def run(self) -> messages.GenerationEnd:
        """Run generations until the gang ends, and return the gang's result.

        Raises if the first cannot be opened.
        """
        spec = self._own.spec
        nodes = list(range(self._own.spec.nodes))
        last = self._own.end_if_stopped()
        try:
            generation = self._open_first()
            while isinstance(generation, Generation):
                self._log.open(spec, generation.number, left_for=last.reason)
                ended = last = self._own.end_if_stopped()
                try:
                    ended = self._run_generation(generation, spec, nodes)
                    self._drain.forget_nodes(ended.left_out)
                    following = self._open_next(ended, generation.number)
                    if isinstance(following, tuple):
                        last = ended
                    else:
                        last = following
                except (TrainingError, InfraError):
                    raise
                except Exception as error:
                    # A bug of the agent counts as a failure, and so towards a crash loop
                    ended = end_from_agent_error(error, spec.node)
                    last = ended
                    with contextlib.suppress(TrainingError, InfraError):
                        seconds = self._log.seconds
                        loop = self._planner.check_crash_loop(ended, generation.number, seconds)
                        last = loop or ended
                    following = last
                    self._peers.announce_end(last)
                finally:
                    self._record_end(ended, last)
                if isinstance(following, messages.GenerationEnd):
                    return following
                generation, nodes = following
                spec = self._own.spec_among(nodes)
            last = generation
            return generation
        finally:
            forget = self._own.secret.withdraw
            # A replacement may come late
            if last.outcome is not None and replacements_of(spec.config.kubernetes):
                late = GangError(
                    "the gang ended before this node joined", outcome=Outcome(last.outcome.outcome)
                )
                forget = partial(self._own.secret.refuse, late)
            self._update_secret(forget)
            self._peers.close()
            if self._prices is not None:
                self._prices.close()
            self._drain.record_notices(self._log.emit)
            self._log.close(last.reason)
            if self._secret_thread is not None:
                self._secret_thread.join(_SECRET_SECONDS)

    def _open_first(self) -> Generation | messages.GenerationEnd:
        """Open the first generation, or return the gang's result if this node was asked to stop."""

        def publish_and_open() -> Generation:
            if self._own.spec.nodes > 1:
                self._own.secret.publish(self._secret)
            return self._planner.open()

        try:
            generation = self._retry_store(publish_and_open, lambda: self._peers.announce_wait(0.0))
        except (TrainingError, InfraError) as error:
            if self._drain.leaving:
                return self._peers.announce_end(messages.end_from_stop_request(self._drain.cause))
            self._peers.announce_end(end_from_open_error(error))
            if isinstance(error, TrainingError) and not error.curable:
                self._update_secret(partial(self._own.secret.refuse, error))
            raise
        self._peers.announce_generation(generation.number)
        return generation

    def _retry_store(self, work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
        """Run `work` in a thread and return its result.

        Retry failed store requests until the start deadline.

        Ending the attempt would not help, because a new attempt would use the same store.
        """

        def wait() -> None:
            meanwhile()
            self._log.beat()

        def curable(error: Exception) -> bool:
            return is_transient(error) and not self._drain.leaving

        return run_while(
            partial(retry_until_deadline, work, self._own.start_seconds, curable=curable), wait
        )

    def _run_generation(
        self, generation: Generation, spec: messages.GangSpec, nodes: list[int]
    ) -> messages.GenerationEnd:
        peers = self._peers
        planner = self._planner
        self._restarting = self._restarting or self._ranks_started
        self._ranks_started = False
        self._log.emit(
            ev.GENERATION_STARTED,
            parent=generation.parent,
            parent_step=generation.parent_step,
            nodes=spec.nodes,
            processes_per_node=spec.processes_per_node,
        )
        if planner.rolled_back is not None:
            self._log.emit(
                ev.ROLLBACK, step=planner.rolled_back.known.step, **planner.rolled_back.to_json()
            )
            planner.rolled_back = None
        try:
            notice = self._pending_notice
            self._pending_notice = None
            if notice is not None:
                why = self._own.wait_out_notices(peers.announce_wait)
                if why:
                    raise GangError(why, outcome=Outcome.INTERRUPTED)
            peers.roll_call(self._own.start_seconds, self._own.is_leaving)
            # Replacements of lost nodes need the secret too
            if not replacements_of(spec.config.kubernetes):
                self._update_secret(self._own.secret.withdraw)
            self._take_new_terms()
            start = self._retry_store(
                lambda: planner.plan(generation, nodes, peers.hosts(nodes), peers.joined_at()),
                peers.keep_in_touch,
            )
            refusal = messages.end_if_unaffordable(
                start,
                generation.parent_step,
                max_steps=spec.config.training.max_steps,
                restart=self._restarting,
            )
            if refusal:
                print_line(refusal.message)
                self._log.emit(ev.OUTCOME, **asdict(refusal))
                end = messages.GenerationEnd(
                    outcome=refusal, reason=refusal.outcome, generation=generation.number
                )
                return peers.announce_end(end)
            self._ranks_started = True
            peers.start(start)
            end = self._own.run_ranks(spec, start, peers, self._take_new_terms)
        except (TrainingError, InfraError) as error:
            end = peers.announce_end(
                replace(self._end_before_start(error), generation=generation.number)
            )
        if end.culprit:
            self._log.emit(
                ev.FAULT_DETECTED,
                at=tuple(end.at) or None,
                **end.details
                | {"culprit": end.culprit, "reason": end.reason, "fingerprint": end.fingerprint},
                **run_while(
                    lambda: planner.measure_lost_work(self._log.since),
                    self._keep_in_touch,
                ),
            )
        return end

    def _take_new_terms(self) -> Terms | None:
        """Return the cost terms at the current price if the price has changed since the last call,
        else None.
        """
        price = None if self._prices is None else self._prices.take_new()
        if price is None:
            return None
        return self._planner.follow_price(price)

    def _update_secret(self, update: Callable[[], object]) -> None:
        """Run `update`, which deletes or replaces this start's secret, in a thread.

        Later calls do nothing.
        """
        if self._secret_thread is None and self._own.spec.nodes > 1:
            self._secret_thread = threading.Thread(target=update, name="secret", daemon=True)
            self._secret_thread.start()

    def _end_before_start(self, error: TrainingError | InfraError) -> messages.GenerationEnd:
        if error.outcome is Outcome.INTERRUPTED:
            return messages.end_from_stop_request(str(error))
        if self._drain.leaving:
            cause = self._drain.cause
        else:
            cause = self._peers.leave_cause
        if cause:
            return messages.end_from_stop_request(cause)
        if isinstance(error, GangError):
            reason = EndReason.ROLL_CALL
        else:
            reason = EndReason.STORE
        return replace(end_from_open_error(error), reason=reason)

    def _open_next(
        self, ended: messages.GenerationEnd, number: int
    ) -> tuple[Generation, list[int]] | messages.GenerationEnd:
        """Wait until every node's ranks have ended.

        Return the next generation and its nodes, or the gang's result.
        """
        if not ended.again:
            return ended
        nodes = self._peers.regroup(REGROUP_SECONDS, self._own.is_leaving, self._log.beat)
        if isinstance(nodes, messages.GenerationEnd):
            return self._peers.announce_end(nodes)

        def open_next() -> Generation | messages.GenerationEnd:
            loop = self._planner.check_crash_loop(ended, number, self._log.seconds)
            return loop or self._planner.open()

        try:
            following = self._retry_store(open_next, self._peers.keep_in_touch)
        except (TrainingError, InfraError) as error:
            leaving = self._drain.leaving
            if leaving:
                following = messages.end_from_stop_request(self._drain.cause)
            else:
                following = end_from_open_error(error)
        if isinstance(following, messages.GenerationEnd):
            return self._peers.announce_end(following)
        return following, nodes

    def _keep_in_touch(self) -> None:
        self._peers.keep_in_touch()
        self._log.beat()

    def _record_end(self, ended: messages.GenerationEnd, last: messages.GenerationEnd) -> None:
        absent: dict[str, bool | int] = {}
        if not self._ranks_started:
            absent["ranks_started"] = False
        if ended.known_cause:
            absent["known_cause"] = True
        if ended.same_limit != SAME_LIMIT:
            absent["same_limit"] = ended.same_limit
        self._log.emit(
            ev.GENERATION_ENDED,
            reason=ended.reason,
            culprit=ended.culprit,
            user_code=ended.user_code,
            fingerprint=ended.fingerprint,
            **absent,
        )
        incurable = last.outcome is None and not last.curable and last.failed_as == Outcome.FAILED
        if incurable or last.failed_as in _RECORDED_HERE:
            print_line(last.culprit)
            self._log.emit(ev.OUTCOME, outcome=last.failed_as, message=last.culprit)


class GenerationPlanner:
    """Planner of the generations of one attempt.

    `born` is the time on the clock `now` at which the attempt's paid time began.
    """

    def __init__(
        self,
        spec: messages.GangSpec,
        job_store: Store,
        born: float,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._job_store = job_store
        self._now = now
        self._terms = spec.terms
        # Price per rank-second, and the ranks that are paid for since a time on the clock `now`
        self._price = RankPrice(spec.terms.usd_per_rank_second if spec.terms is not None else 0.0)
        self._paid = [_PaidRanks(since=born, ranks=spec.world_size)]
        self._world_size = spec.world_size
        self._failed: list[FailedGeneration] = []
        self._number = 0
        # Missing commits that a user accepted; None once recorded
        self.rolled_back: MissingCommits | None = None
        self._opening = GenerationOpening()
        self._keys = KeysFolder(spec.log_folder)

    def open(self) -> Generation:
        """Open the next generation from the newest commit, or from an older commit if a guard has
        ordered a rewind.
        """
        if not self._number:
            events = read_events(self._job_store)
            self._read_failures(events)
            self.rolled_back = check_rollback(self._job_store, events)
            # A store restored from a snapshot may lack generations: their numbers are not used
            # again.
            self._opening.number = max(self._opening.number, newest_generation_in_events(events))
        generation = open_generation(
            self._job_store,
            run=self._spec.run,
            attempt=self._spec.attempt,
            parent=rewind_parent(self._job_store),
            opening=self._opening,
        )
        self._opening = GenerationOpening()
        self._number += 1
        return generation

    def plan(
        self,
        generation: Generation,
        nodes: Sequence[int],
        hosts: Sequence[str],
        joined: Mapping[int, float] | None = None,
    ) -> messages.GenerationStart:
        """Return what the nodes need to start a generation, including the money that is left.

        Args:
            joined: time at which each follower of the first generation joined, on the clock `now`:
                before, nobody pays for it.
        """
        spec = self._spec
        now = self._now()
        if len(self._paid) == 1 and joined:
            self._paid = _paid_while_joining(self._paid[0].since, joined, spec.processes_per_node)
        fault = self._spec.rehearse
        if fault is not None and any(
            event.name == ev.FAULT_INJECTED for event in read_events(self._job_store)
        ):
            fault = None
        if spec.main_address == "127.0.0.1":
            address = "127.0.0.1"
        else:
            address = ""
        keys_path = ""
        if is_loopback(spec.main_address):
            keys_path = str(self._keys.make(generation.name) / "store")
        start = messages.GenerationStart(
            keys_path=keys_path,
            generation=generation.number,
            generation_id=generation.id,
            candidates=[
                commit.key for commit in reachable_commits(self._job_store, limit=CANDIDATES)
            ],
            rendezvous_port=rendezvous_port(address, f"{spec.run}/{generation.id}", spec.attempt),
            terms=self._terms_at(now),
            rehearse=None if fault is None else asdict(Fault.parse(fault)),
            hosts=list(hosts),
            nodes=list(nodes),
            overrides=read_overrides(self._job_store).to_json(),
            node_0=messages.describe_node(spec),
        )
        self._world_size = len(nodes) * spec.processes_per_node
        self._paid.append(_PaidRanks(since=now, ranks=self._world_size))
        return start

    def follow_price(self, price: RankPrice) -> Terms | None:
        """Store a new price of the machines, and return the cost terms at that price."""
        self._price = price
        return self._terms_at(self._now())

    def check_crash_loop(
        self, ended: messages.GenerationEnd, generation: int, seconds: float
    ) -> messages.GenerationEnd | None:
        """Return the gang's result if it must not start again for lack of progress, else None.

        Either this generation, which took `seconds`, completes a crash loop, or the job spent too
        much without a new commit.
        """
        lost = self.measure_lost_work(time.monotonic() - seconds)
        lost_node = ended.reason == EndReason.NODE_LOST and not ended.known_cause
        failed = FailedGeneration(
            generation=generation,
            fingerprint=ended.fingerprint,
            rank_seconds=self._rank_seconds(seconds),
            counts=bool(ended.fingerprint) or (lost_node and not ended.left_out),
            run=self._spec.run,
            why=ended.culprit,
            idle_seconds=lost["lost_rank_seconds"] / self._world_size,
            ranks=self._world_size,
            same_limit=ended.same_limit,
        )
        others = [failure for failure in self._failed if failure.generation != generation]
        self._failed = [*others, failed]
        culprit = self._find_no_progress(ended.culprit, restarts=failed.counts)
        if not culprit:
            return None
        return messages.GenerationEnd(
            culprit=culprit,
            reason=ended.reason,
            user_code=ended.user_code,
            curable=False,
            failed_as=Outcome.CRASH_LOOP.value,
        )

    def _rank_seconds(self, seconds: float) -> float:
        """Return the rank-seconds that were paid for in the last `seconds`."""
        now = self._now()
        begin = now - seconds
        return sum(
            paid.ranks * max(end - max(paid.since, begin), 0.0)
            for paid, end in self._paid_until(now)
        )

    def _paid_until(self, now: float) -> Iterator[tuple["_PaidRanks", float]]:
        """Yield the numbers of paid ranks, each with the time at which the next one began."""
        ends = [*(paid.since for paid in self._paid[1:]), now]
        return zip(self._paid, ends, strict=True)

    def _read_failures(self, events: Sequence[Event]) -> None:
        """Read the starts of earlier attempts.

        Raises CrashLoop if those of this run made no progress, and no agent saw it because each
        took its whole node with it. After another run, a person or a supervisor has decided to
        start again.
        """
        recent = read_failed_generations(since_last_verdict(events))
        self._failed = []
        for failure in recent:
            counts = failure.counts
            if not failure.fingerprint:
                counts = counts and failure.run == self._spec.run
            self._failed.append(replace(failure, counts=counts))
        if recent and recent[-1].run == self._spec.run:
            last = recent[-1]
            culprit = self._find_no_progress(last.why, restarts=last.counts)
            if culprit:
                raise CrashLoop(culprit)

    def _find_no_progress(self, culprit: str, *, restarts: bool) -> str:
        """Return why the job must not start again, or "".

        Args:
            restarts: the last start counts towards a crash loop.
        """
        newest = next(newest_commits(self._job_store), None)
        newest_generation = 0 if newest is None else newest.generation
        usd = None if self._terms is None else self._terms.usd_per_rank_second
        loop = find_crash_loop(self._failed, newest_generation)
        if loop and restarts:
            return describe_crash_loop(loop, culprit, usd_per_rank_second=usd)
        bound = ProgressBound.of(self._spec.config)
        return exceeded_bound(self._failed, newest_generation, bound, usd_per_rank_second=usd)

    def measure_lost_work(self, since: float) -> dict[str, float]:
        """Return the rank-seconds and dollars spent since `since` or since the newest commit,
        whichever is later.
        """
        seconds = time.monotonic() - since
        with contextlib.suppress(TrainingError, InfraError):
            newest = next(newest_commits(self._job_store), None)
            if newest:
                meta = self._job_store.head(newest.key)
            else:
                meta = None
            if meta is not None:
                seconds = min(seconds, max(time.time() - meta.modified, 0.0))
        lost = {"lost_rank_seconds": self._rank_seconds(seconds)}
        if self._terms is not None:
            lost["usd_lost"] = lost["lost_rank_seconds"] * self._terms.usd_per_rank_second
        return lost

    def _terms_at(self, now: float) -> Terms | None:
        """Return the job's budget, price and spending at a time on the clock `now`.

        The spending includes the cost of the time between generations, which the ranks do not
        record.
        """
        if self._terms is None:
            return None
        behind = time.time() - now
        price = self._price.shifted(behind)
        spent = self._terms.spent_usd
        for paid, end in self._paid_until(now):
            spent += price.cost(paid.since, end) * paid.ranks
        terms = self._terms.at_price(price.price_at(now), spent_usd=spent)
        # Ranks of earlier generations have reported the thresholds that they reached
        if self._number <= 1:
            return terms
        reached = [share for share in terms.reached(spent) if share < BUDGET_THRESHOLDS[-1]]
        notified = max([terms.last_notified_threshold, *reached])
        return replace(terms, last_notified_threshold=notified)


def end_from_open_error(error: TrainingError | InfraError) -> messages.GenerationEnd:
    curable = isinstance(error, InfraError) or error.curable
    outcome = error.outcome.value
    return messages.GenerationEnd(
        culprit=str(error), reason=EndReason.STORE, curable=curable, failed_as=outcome
    )


@dataclass(frozen=True, kw_only=True)
class _PaidRanks:
    """The number of ranks that are paid for from a time on, on the planner's clock."""

    since: float
    ranks: int


def _paid_while_joining(
    born: float, joined: Mapping[int, float], processes_per_node: int
) -> list[_PaidRanks]:
    """Return how the number of paid ranks grows while followers join node 0."""
    paid = [_PaidRanks(since=born, ranks=processes_per_node)]
    for at in sorted(joined.values()):
        ranks = paid[-1].ranks + processes_per_node
        paid.append(_PaidRanks(since=max(born, at), ranks=ranks))
    return paid
