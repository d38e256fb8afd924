"""One rank's part in a job, from the restore of a commit to the outcome.

`JobSession` has what the ranks do together between two steps: exchange figures (step sync), judge
them, save, restore and end. The engine's loop (`training/engine/trainer.py`) and users' own loops
(`ebbflow.attach`) use it alike. Its parts are opened by the functions of this module.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from ebbflow.core.config.schema import CheckpointConfig, RunConfig
from ebbflow.core.errors import Outcome, StoreError, StoreUnavailable
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import FAULT_INJECTED, NOTICE, OUTCOME, RESTORE, Origin
from ebbflow.core.json_values import JsonObject
from ebbflow.core.layout import job_prefix
from ebbflow.core.remarks import record_remarks
from ebbflow.core.store import Store
from ebbflow.training.checkpoint import (
    Checkpointer,
    RejectedCommit,
    RestoreResult,
    RetentionPolicy,
    read_generation,
)
from ebbflow.training.checkpoint.restore import Place
from ebbflow.training.engine.guards.guards import Guards, Judgement
from ebbflow.training.errors import TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import OrderRecord, WorkerSpec
from ebbflow.training.limits import Limits, LoopResult, Position
from ebbflow.training.progress import live_metrics
from ebbflow.training.rehearse import NON_FINITE, Fault
from ebbflow.training.rehearse import NOTICE as NOTICE_KIND
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.retry import retry_until_deadline
from ebbflow.training.save_controller import SaveController
from ebbflow.training.step_sync import Row, StepSync, exchange

_RECORD_SECONDS = 30.0  # to read the generation's record, with retries
_DRAIN_SECONDS = 2.0  # less than any hang threshold


@dataclass(kw_only=True)
class Rehearsal:
    fault: Fault  # the fault
    node: int  # the number of this rank's node
    nodes: int  # the number of nodes
    agent_pid: int | None  # the process id of this node's agent; None without an agent
    # The file in which the agent looks for a notice; None without an agent
    notice_path: str | None = None
    spoils_loss: bool = False  # whether this rank reports a non-finite loss in the next step
    was_due: bool = False  # whether the step of the fault has been reached

    def inject(
        self, step: int, *, max_steps: int, gang: Gang, reporter: Reporter, limits: Limits
    ) -> None:
        """Inject the fault if it is due on this rank.

        Call this before `step` is saved, so that the step is lost.
        """
        fault = self.fault
        # A script's number of steps may grow, and so a share of it
        if self.was_due or step != fault.due_step(max_steps):
            return
        self.was_due = True
        if not fault.targets(
            node=self.node, rank=gang.rank, nodes=self.nodes, world_size=gang.world_size
        ):
            return
        try:
            reporter.emit(FAULT_INJECTED, step=step, flush=True, kind=fault.kind, target=str(fault))
        except StoreError as error:  # without its record the fault would fire in every attempt
            message = (
                f"rehearsed fault {fault} was skipped at step {step}: its record failed: {error}"
            )
            print(message, flush=True)
            reporter.emit(NOTICE, step=step, message=message)
            return
        fault.strike(self.agent_pid, self.notice_path)
        self.spoils_loss = fault.kind == NON_FINITE
        if fault.kind == NOTICE_KIND:
            reporter.enter("checkpoint", step)
            # Short steps could end the job before the agent has the notice
            limits.wait_for_drain(_DRAIN_SECONDS)

    def take_spoiled_loss(self) -> bool:
        """Return whether the fault makes the next loss non-finite; only once per fault."""
        spoils = self.spoils_loss
        self.spoils_loss = False
        return spoils


@dataclass(frozen=True, kw_only=True)
class JobSession:
    """The operations that a rank performs together with all other ranks between two steps of a job."""

    config: RunConfig
    gang: Gang
    reporter: Reporter
    limits: Limits
    saver: Checkpointer
    saves: SaveController  # when and how this rank saves
    guards: Guards
    rehearsal: Rehearsal | None = None  # a fault to inject; None if there is none

    def sync(self, row: Row) -> StepSync:
        """Exchange this rank's row with all ranks, and return the rows of all. Collective."""
        sync = exchange(self.gang, row)
        self.abandon_failed_save(sync)
        return sync

    def with_save_request(self, row: Row, *, save_owed: bool = False) -> Row:
        """Return `row` with this rank's vote for a save, its last saves, and the time it has left.

        Args:
            save_owed: whether a save was due earlier and could not be made.
        """
        return row._replace(
            save_due=self.saves.due(int(row.step)) or save_owed,
            saving=self.saver.busy,
            save_seconds=self.saves.last_save_seconds,
            save_limit_seconds=self.saver.limit_seconds,
            failed_save=self.saver.failed_step or 0,
            stop_seconds=self.limits.stop_seconds,
        )

    def abandon_failed_save(self, sync: StepSync) -> None:
        """Give up the save that failed on any rank, since it can no longer become a commit."""
        if sync.failed_save:
            self.saver.abandon(sync.failed_save)

    def judge(self, at: Position, sync: StepSync) -> Judgement:
        """Judge the step after position `at` from the figures of all ranks; all ranks judge alike.

        Raises Rewind or TooManyRewinds if the job must go back to an older commit, and
        DivergenceError if the weights of replicas differ.
        """

        def settle() -> None:
            self.reporter.enter("checkpoint", at.step)
            self.saver.wait()

        return self.guards.judge(at, sync, settle)

    def save_if_due(self, at: Position, sync: StepSync, *, last: bool) -> None:
        """Save, skip a save or do nothing, as the ranks agreed in `sync`. Collective."""
        self.saves.save_if_due(at, sync, last=last)

    def restore(
        self,
        candidates: list[str],
        *,
        place: Place | None = None,
        check: Callable[[RestoreResult], object] | None = None,
    ) -> RestoreResult | None:
        """Restore the newest undamaged commit of `candidates`; return None if there are none.

        Args:
            candidates: keys of commits, newest first.
            place: chooses where the tensors of a commit are read to.
            check: raises if the commit does not belong to this job.

        Raises CheckpointError if no candidate can be restored. Collective.
        """
        alive = partial(self.reporter.enter, "restore", 0)
        if candidates:
            alive()
        began = time.monotonic()
        restored = self.saver.restore(
            candidates,
            self.saves.spread.module,
            self.saves.optimizer,
            place=place,
            progress=self.gang.announce(alive),
            meet=partial(meet_others, self.gang, self.config, alive),
        )
        if restored is None:
            return None
        if check is not None:
            check(restored)
        if self.saves.save_schedule is not None:
            self.saves.save_schedule.remember(restored.extra.get("exposed_seconds", 0.0))
        if self.gang.rank == 0:
            report_restore(self.reporter, restored, time.monotonic() - began)
        return restored

    def rehearse_fault(self, step: int, max_steps: int) -> None:
        """Inject the rehearsed fault if it is due on this rank after `step`."""
        if self.rehearsal is not None:
            self.rehearsal.inject(
                step,
                max_steps=max_steps,
                gang=self.gang,
                reporter=self.reporter,
                limits=self.limits,
            )

    def take_spoiled_loss(self) -> bool:
        """Return whether a rehearsed fault makes the loss of this step non-finite."""
        return self.rehearsal is not None and self.rehearsal.take_spoiled_loss()

    def finish_saves(self, message: str, *, fatal: type[TrainingError] | None) -> str:
        """Wait until the last save is a commit, and return `message`.

        If the save fails, raise its error if that is a `fatal` one; otherwise return the message
        with the error added.
        """
        try:
            self.saves.finish()
        except TrainingError as error:
            if fatal is not None and isinstance(error, fatal):
                raise
            return f"{message}; the last save did not become a commit: {error}"
        return message

    def end(
        self, at: Position, outcome: Outcome, message: str = "", sha256: str | None = None
    ) -> LoopResult:
        """Record the outcome of the job, on rank 0, and return the result of this rank's loop.

        Args:
            sha256: hash of the final weights; None if it was not computed.
        """
        if self.gang.rank == 0:
            self.reporter.emit(
                OUTCOME,
                step=at.step,
                flush=True,
                outcome=str(outcome),
                weights_sha256=sha256,
                message=message,
            )
        return LoopResult(outcome, at.step, message, sha256)


def meet_others(gang: Gang, config: RunConfig, alive: Callable[[], object], stage: str) -> None:
    """Wait until all ranks have finished the work that is named `stage` (`Gang.await_ranks`).

    Raises RendezvousError.
    """
    gang.await_ranks(
        stage,
        max(config.cluster.start_deadline_seconds, config.cluster.step_deadline_seconds),
        alive,
    )


def make_limits(spec: WorkerSpec, gang: Gang, config: RunConfig, clock: Clock) -> Limits:
    """Return the limits at which this rank must stop (budget, deadline, notice, SIGTERM), and
    install their signal handlers.
    """
    control = OrderRecord(Path(spec.control_path)) if spec.control_path else None
    limits = Limits(
        spec.terms,
        world_size=gang.world_size,
        elapsed_seconds=lambda: clock.elapsed_seconds,
        stop_seconds=config.checkpoint.stop_seconds,
        control=control,
    )
    limits.watch_signals()
    return limits


@contextlib.contextmanager
def open_reporter(spec: WorkerSpec, gang: Gang) -> Iterator[tuple[Reporter, EventLog]]:
    """Open events, live metrics and ledger clock of this rank, and close them afterwards."""
    origin = Origin(
        job=spec.job,
        run=spec.run,
        attempt=spec.attempt,
        generation=spec.generation,
        node=spec.node,
        rank=gang.rank,
    )
    with (
        EventLog(Store.open(spec.store_uri).sub(job_prefix(spec.job)), origin) as log,
        live_metrics(spec, rank=gang.rank, world_size=gang.world_size, emit=log.emit) as emit,
        record_remarks(emit),
    ):
        reporter = Reporter(Clock(emit), emit)
        if spec.heartbeat_path:
            heartbeat = Heartbeat(Path(spec.heartbeat_path))
            reporter = replace(reporter, beat=heartbeat.beat, mark_trained=heartbeat.mark_trained)
        try:
            reporter.enter("init", 0)
            yield reporter, log
        finally:
            reporter.close()
            reporter.clock.emit_phases()


def open_saver(
    spec: WorkerSpec, gang: Gang, reporter: Reporter, *, starts_uploader: bool = True
) -> Checkpointer:
    """Open the saver of this rank for the gang's generation.

    Args:
        starts_uploader: see `Checkpointer`.

    Raises DamagedLineage or StoreError.
    """
    checkpoint = spec.config.checkpoint
    job_store = Store.open(spec.store_uri).sub(job_prefix(spec.job))
    rate = checkpoint.upload_mib_per_second
    # The generation's parent need not be the first candidate: the launcher may have passed over an
    # unreadable commit. Retries keep a short outage of the store from failing the start.
    generation = retry_until_deadline(
        lambda: read_generation(job_store, spec.generation, spec.generation_id),
        _RECORD_SECONDS,
        curable=lambda error: isinstance(error, StoreUnavailable),
    )
    return Checkpointer(
        job_store.uri,
        generation=generation,
        rank=gang.rank,
        world_size=gang.world_size,
        node=spec.node,
        deadline_seconds=checkpoint.deadline_seconds,
        retention=retention_policy(checkpoint),
        upload_bytes_per_second=rate and rate * 2**20,
        emit=reporter.emit,
        waiting=lambda: reporter.enter_temporarily("store"),
        starts_uploader=starts_uploader,
    )


def retention_policy(checkpoint: CheckpointConfig) -> RetentionPolicy:
    cap = checkpoint.max_total_gib
    return RetentionPolicy(
        keep_last=checkpoint.keep_last,
        keep_every_steps=checkpoint.keep_every_steps,
        keep_best=checkpoint.keep_best.count,
        best_metric=checkpoint.keep_best.metric or "held_out_loss",
        best_mode=checkpoint.keep_best.mode,
        max_total_bytes=None if cap is None else int(cap * 2**30),
        # A save in flight must not be taken for an orphan, and it may take as long as its deadline.
        orphan_seconds=max(3600.0 * checkpoint.orphan_hours, 2 * checkpoint.deadline_seconds),
    )


def make_rehearsal(spec: WorkerSpec, gang: Gang) -> Rehearsal | None:
    if spec.rehearse is None:
        return None
    nodes = gang.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) or 1
    return Rehearsal(
        fault=Fault(**spec.rehearse),
        node=spec.node,
        nodes=nodes,
        agent_pid=spec.agent_pid,
        notice_path=spec.notice_path,
    )


def report_restore(reporter: Reporter, restored: RestoreResult, seconds: float) -> None:
    """Emit the `restore` event.

    If a commit was damaged, also print the progress that was lost. Rank 0 calls this.
    """
    rejected = [_describe_rejected(commit, restored) for commit in restored.rejected]
    if rejected:  # the newest; the others are older
        print(
            f"restored step {restored.step} instead of a damaged commit; lost: "
            f"{rejected[0]['lost']}",
            flush=True,
        )
    reporter.emit(
        RESTORE,
        step=restored.step,
        key=restored.key,
        seconds=seconds,
        split=asdict(restored.split),
        rejected=rejected,
    )


def _describe_rejected(rejected: RejectedCommit, restored: RestoreResult) -> JsonObject:
    """Return the data of a damaged commit for the `restore` event: key, reason, lost steps and lost
    dollars.
    """
    spent_at_rejected = (rejected.extra or {}).get("spent_usd")
    spent_at_restored = (restored.extra or {}).get("spent_usd")
    lost_steps = rejected.step - restored.step
    if spent_at_rejected is None or spent_at_restored is None:
        lost_usd = None
        paid = ""
    else:
        lost_usd = spent_at_rejected - spent_at_restored
        paid = f", ${lost_usd:.2f} paid for them"
    return {
        "key": rejected.key,
        "reason": rejected.reason,
        "lost_steps": lost_steps,
        "lost_usd": lost_usd,
        "lost": f"{lost_steps} steps{paid}",
    }
