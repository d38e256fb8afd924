"""What only node 0's agent does: it opens generations, says how they start, and whether another one is worth it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from ebbflow.infra.errors import InfraError, Outcome
from ebbflow.infra.events import FAULT_INJECTED, read_events
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
from ebbflow.training.errors import TrainingError
from ebbflow.training.guards.overrides import read_overrides, rewind_parent
from ebbflow.training.launch.crash_loop import Failed, crash_loop, describe, failures_on_record
from ebbflow.training.launch.ports import rendezvous_port
from ebbflow.training.launch.spec import GangSpec
from ebbflow.training.launch.verdict import Start, Verdict
from ebbflow.training.rehearse import Fault


class Leader:
    """Over all generations of one attempt. born: since when the gang is paid for, by the clock `now`."""

    def __init__(
        self, spec: GangSpec, job_store: Store, born: float, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec, self._job_store, self._now = spec, job_store, now
        self._paid_until, self._spent_usd = born, 0.0
        self._world_size = spec.world_size
        self._failed: list[Failed] = []
        self._number = 0
        self.rolled_back: MissingCommits | None = None  # by permission, before the first generation
        self._opening = GenerationOpening()

    def open(self) -> Generation:
        """The next generation: from the newest commit, or from where a guard has ordered it to start."""
        if not self._number:  # what failed in earlier attempts; the first start of a job has none
            events = read_events(self._job_store)
            self._failed = failures_on_record(events)
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

    def plan(self, generation: Generation, nodes: Sequence[int], hosts: Sequence[str]) -> Start:
        spec = self._spec
        address = "127.0.0.1" if spec.main_address == "127.0.0.1" else ""
        start = Start(
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

    def loop_after(self, ended: Verdict, generation: int, rank_seconds: float) -> Verdict | None:
        """The last word when this end makes a crash loop; None: another generation may do better."""
        if not ended.fingerprint:
            return None
        failed = Failed(generation=generation, fingerprint=ended.fingerprint, rank_seconds=rank_seconds)
        self._failed = [*(one for one in self._failed if one.generation != generation), failed]
        newest = next(newest_commits(self._job_store), None)
        loop = crash_loop(self._failed, 0 if newest is None else newest.generation)
        if not loop:
            return None
        terms = self._spec.terms
        usd = None if terms is None else Terms.from_json(terms).usd_per_rank_second
        return Verdict(
            culprit=describe(loop, ended.culprit, usd_per_rank_second=usd),
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
        told = terms.told_threshold
        if self._number > 1:
            told = max([told, *(share for share in terms.reached(spent) if share < BUDGET_THRESHOLDS[-1])])
        return replace(terms, spent_usd=spent, told_threshold=told).to_json()

    def _fault_still_due(self) -> dict | None:
        """A rehearsed fault fires once per job, whatever the number of attempts and generations."""
        if self._spec.rehearse is None:
            return None
        if any(event.name == FAULT_INJECTED for event in read_events(self._job_store)):
            return None
        return Fault.parse(self._spec.rehearse).to_json()


def failed_to_open(error: TrainingError | InfraError, reason: str) -> Verdict:
    """The last word of a gang that cannot begin its next generation."""
    return Verdict(
        culprit=str(error),
        reason=reason,
        curable=isinstance(error, InfraError) or error.curable,
        failed_as=error.outcome.value,
    )
