"""Build one rank's trainer and restore it from a commit.

The trainer has data, model, optimizer, saver, limits and progress.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbflow.core.config.schema import CheckpointConfig, RunConfig
from ebbflow.core.errors import StoreUnavailable
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import INITIAL_WEIGHTS, PEAK, RESTORE, Origin
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.training.checkpoint import (
    Checkpointer,
    RejectedCommit,
    RestoreResult,
    RetentionPolicy,
    read_generation,
)
from ebbflow.training.checkpoint.hugging_face import check_settings
from ebbflow.training.engine.guards.guards import apply_overrides, fit_micro_batch, make_guards
from ebbflow.training.engine.guards.overrides import Overrides
from ebbflow.training.engine.inductor import open_compile_cache
from ebbflow.training.engine.optimizer import Muon, keep_average, make_optimizer
from ebbflow.training.engine.parallel import DTYPES, report_compilation, spread_model
from ebbflow.training.engine.profiler import make_profiler, record_memory
from ebbflow.training.engine.trainer import Rehearsal, Trainer
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.gang import Gang, time_waits
from ebbflow.training.launch.heartbeat import Heartbeat
from ebbflow.training.launch.messages import OrderRecord, WorkerSpec
from ebbflow.training.limits import Limits, Position
from ebbflow.training.progress import Progress, live_metrics, peak_flops_per_second
from ebbflow.training.rehearse import Fault
from ebbflow.training.reporter import Clock, Reporter
from ebbflow.training.retry import retry_until_deadline
from ebbflow.training.save_controller import SaveSchedule, prior_hazard
from ebbflow.training.weights.files import describe_files
from ebbflow.training.weights.load import load_weights
from ebbflow.training.workload import Workload
from ebbflow.training.workload_loader import (
    make_workload,
    user_code,
    workload_context,
    wrap_user_workload,
)

_RECORD_SECONDS = 30.0  # to read the generation's record, with retries


def build_trainer(
    spec: WorkerSpec, gang: Gang, *, nodes: int, reporter: Reporter, saver: Checkpointer
) -> Trainer:
    """Build the trainer of one rank.

    Raises WorkloadError or ParallelError if this gang cannot train it. Collective.
    """
    config = apply_overrides(spec.config, Overrides.from_json(spec.overrides))
    clock = reporter.clock
    limits = make_limits(spec, gang, config, reporter.clock)
    store = Store.open(spec.store_uri)
    # Each module, and each part of a download, is a sign of life: the phase's limit is one for
    # them, not for all.
    alive = partial(reporter.enter, "init", 0)
    working = gang.announce(alive)
    context = workload_context(config, gang, store=store, prepared=spec.prepared, alive=working)
    workload = make_workload(config, context)
    if config.workload is not None:
        workload = wrap_user_workload(workload, config.workload)
    meet_others(gang, config, alive, "opening the data")
    overwritten = bool(spec.candidates or config.training.initial_weights)
    if not gang.alone and gang.device.type == "cpu":  # a GPU's host does not wait
        time_waits(clock.exclude)
    spread = spread_model(workload, config, gang, overwritten=overwritten, progress=alive)
    reporter.on_close(report_compilation(lambda: reporter.enter_temporarily("compile")))
    on_step = [open_compile_cache(config, gang, store)]
    optimizer = _optimizer(workload, spread.module, config)
    if config.training.ema is not None:
        keep_average(optimizer, config.training.ema)
    guards = make_guards(spec, config, gang, copies=spread.copies, emit=reporter.emit)
    guards.keep_snapshot = record_memory(spec, config, gang, reporter)
    profiler = make_profiler(spec, config, gang, reporter)
    if profiler is not None:
        on_step.append(profiler.reach)
    guards.config = config = fit_micro_batch(guards, workload, spread, optimizer)
    trainer = Trainer(
        config=config,
        gang=gang,
        workload=workload,
        spread=spread,
        optimizer=optimizer,
        saver=saver,
        limits=limits,
        reporter=reporter,
        extra={
            "seed": config.training.seed,
            "data_fingerprint": spec.prepared["fingerprint"],
            "batch_size": config.training.batch_size,
            "schedule": config.training.scheduler.model_dump(mode="json"),
        },
        progress=_progress(spec, gang, config, limits.terms, reporter),
        save_schedule=make_save_schedule(spec, config, limits.terms) if gang.rank == 0 else None,
        rehearsal=make_rehearsal(spec, nodes),
        on_step=on_step,
        guards=guards,
    )
    saver.prepare(spread.module, trainer.optimizer)
    clock.emit_phases()
    return trainer


def meet_others(gang: Gang, config: RunConfig, alive: Callable[[], object], stage: str) -> None:
    """Wait until all ranks have done work that takes longer the more bytes it reads.

    Raises RendezvousError.
    """
    gang.await_ranks(
        stage,
        max(config.cluster.start_deadline_seconds, config.cluster.step_deadline_seconds),
        alive,
    )


def make_limits(spec: WorkerSpec, gang: Gang, config: RunConfig, clock: Clock) -> Limits:
    """Return when this rank must stop (budget, deadline, notice, SIGTERM).

    Install its signal handlers.
    """
    limits = Limits(
        spec.terms,
        world_size=gang.world_size,
        elapsed_seconds=lambda: clock.elapsed_seconds,
        stop_seconds=config.checkpoint.stop_seconds,
        control=OrderRecord(Path(spec.control_path)) if spec.control_path else None,
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


def open_saver(spec: WorkerSpec, gang: Gang, reporter: Reporter) -> Checkpointer:
    """Open the saver of this rank for the gang's generation.

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


def restore(trainer: Trainer, saver: Checkpointer, candidates: list[str]) -> Position:
    """Load the newest undamaged commit of `candidates`, and return the position at which training
    continues.

    `candidates` are keys of commits, newest first. If there are none, the job starts from its
    beginning. Raises DataError if the commit comes from other data or another seed, CheckpointError
    if no candidate can be restored. Collective.
    """
    if candidates:
        trainer.enter("restore", 0)
    begun = time.monotonic()
    alive = partial(trainer.enter, "restore", 0)
    meet = partial(meet_others, trainer.gang, trainer.config, alive)
    working = trainer.gang.announce(alive)
    restored = saver.restore(
        candidates, trainer.spread.module, trainer.optimizer, progress=working, meet=meet
    )
    if restored is None:
        return begin(trainer)
    for key in ("seed", "data_fingerprint"):
        # Imported weights lack both keys
        if restored.extra.get(key, trainer.extra[key]) != trainer.extra[key]:
            raise DataError(
                f"commit {restored.key} was trained with {key} {restored.extra[key]}, this run "
                f"has {trainer.extra[key]}: sample {restored.extra['cursor']} would be another; "
                "fix: bring back the former data, workload_options, seed and tokenizers package, "
                "or start a new job"
            )
    if trainer.save_schedule is not None:
        trainer.save_schedule.remember(restored.extra.get("exposed_seconds", 0.0))
    if trainer.gang.rank == 0:
        report_restore(trainer.reporter, restored, time.monotonic() - begun)
    trainer.reporter.clock.emit_phases()
    return trainer.guards.resume(Position(restored.step, restored.extra["cursor"]), restored.extra)


def report_restore(reporter: Reporter, restored: RestoreResult, seconds: float) -> None:
    """Emit the `restore` event, and print the progress that was lost if a commit was damaged.

    Rank 0 calls this.
    """
    rejected = [_rejected(one, restored) for one in restored.rejected]
    for one in rejected[:1]:  # the newest; the others are older
        print(
            f"restored step {restored.step} instead of a damaged commit; lost: {one['lost']}",
            flush=True,
        )
    split = asdict(restored.split)
    reporter.emit(
        RESTORE,
        step=restored.step,
        key=restored.key,
        seconds=seconds,
        split=split,
        rejected=rejected,
    )


def begin(trainer: Trainer) -> Position:
    """Load the initial weights of a new job, if any, and return its first position.

    Raises WorkloadError.
    """
    path = trainer.config.training.initial_weights
    if path is not None:
        trainer.enter("restore", 0)
        begun = time.monotonic()
        if trainer.config.workload is None:
            check_settings(trainer.config.model, path)
        translate = getattr(trainer.workload, "translate_weights", None)
        alive = partial(trainer.enter, "restore", 0)
        working = trainer.gang.announce(alive)
        tensors = load_weights(path, trainer.spread.module, translate, progress=working)
        meet_others(trainer.gang, trainer.config, alive, f"reading {path}")
        if trainer.gang.rank == 0:
            seconds = time.monotonic() - begun
            trainer.reporter.emit(
                INITIAL_WEIGHTS, tensors=tensors, seconds=seconds, files=describe_files(path)
            )
            print(f"initial weights: {tensors} tensors of {path}", flush=True)
        trainer.reporter.clock.emit_phases()
    return trainer.guards.resume(Position(), {})


def _rejected(rejected: RejectedCommit, restored: RestoreResult) -> dict[str, Any]:
    """Return the data of a damaged commit for the `restore` event: key, reason, lost steps and lost
    dollars.
    """
    at_rejected, at_restored = (
        (extra or {}).get("spent_usd") for extra in (rejected.extra, restored.extra)
    )
    if at_rejected is None or at_restored is None:
        lost_usd = None
    else:
        lost_usd = at_rejected - at_restored
    loss = {"lost_steps": rejected.step - restored.step, "lost_usd": lost_usd}
    if lost_usd is None:
        paid = ""
    else:
        paid = f", ${lost_usd:.2f} paid for them"
    return {
        "key": rejected.key,
        "reason": rejected.reason,
        **loss,
        "lost": f"{loss['lost_steps']} steps{paid}",
    }


def _optimizer(workload: Workload, module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    own = getattr(workload, "optimizer", None)
    if own is None:
        halves = config.fsdp.compute_dtype == "bfloat16"
        return make_optimizer(
            module, config.training, muon_dtype=torch.bfloat16 if halves else torch.float32
        )
    with user_code(f"{config.workload}.optimizer"):
        made = own(module)
    if config.training.optimizer == "muon" and not isinstance(made, Muon):
        raise WorkloadError(
            f"training.optimizer muon: {config.workload}.optimizer makes {type(made).__name__}; "
            "fix: remove one of them"
        )
    return made


def _progress(
    spec: WorkerSpec, gang: Gang, config: RunConfig, terms: Terms | None, reporter: Reporter
) -> Progress | None:
    """Measure all devices' peak FLOP/s, for the MFU.

    On rank 0, return the printer of progress lines. Collective.
    """
    # Later ranks with the same local rank reuse the file. The number of ranks on the machine
    # changes the measurement.
    name = f"peak-{os.environ.get('LOCAL_RANK', '0')}-of-{spec.colocated_ranks}.json"
    if spec.kept_path:
        kept = Path(spec.kept_path) / name
    else:
        kept = None
    dtype = DTYPES[config.fsdp.compute_dtype]
    if gang.device.type == "cpu" and dtype is torch.float16:
        # Float16 is hundreds of times slower on a CPU, so that measuring it takes minutes
        dtype = torch.bfloat16
    own = peak_flops_per_second(gang.device, dtype, kept)
    reporter.emit(PEAK, flops_per_second=own, dtype=str(dtype).removeprefix("torch."))
    peak = sum(one for (one,) in gang.gather_numbers([own]))
    if gang.rank != 0:
        return None
    unit = str(spec.prepared.get("weight_unit", "tokens"))
    if unit == "tokens":
        unit = "tok"
    return Progress(
        max_steps=config.training.max_steps, peak_flops_per_second=peak, terms=terms, unit=unit
    )


def make_save_schedule(spec: WorkerSpec, config: RunConfig, terms: Terms | None) -> SaveSchedule:
    if terms is not None:
        planned = terms.hazard_per_hour
    else:
        planned = None
    return SaveSchedule(
        config.checkpoint, prior_hazard(planned, interruptions=max(0, spec.generation - 1))
    )


def make_rehearsal(spec: WorkerSpec, nodes: int) -> Rehearsal | None:
    if spec.rehearse is None:
        return None
    fault = Fault(**spec.rehearse)
    notice = spec.notice_path
    return Rehearsal(
        fault=fault, node=spec.node, nodes=nodes, agent_pid=spec.agent_pid, notice_path=notice
    )
