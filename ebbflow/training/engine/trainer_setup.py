"""Build one rank's trainer and restore it from a commit.

The trainer has data, model, optimizer, saver, limits and progress.
"""

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import INITIAL_WEIGHTS, PEAK
from ebbflow.core.store import Store
from ebbflow.core.terms import Terms
from ebbflow.training.checkpoint import Checkpointer, RestoreResult
from ebbflow.training.checkpoint.hugging_face import check_settings
from ebbflow.training.engine.guards.guards import apply_overrides, fit_micro_batch, make_guards
from ebbflow.training.engine.guards.overrides import Overrides
from ebbflow.training.engine.inductor import open_compile_cache
from ebbflow.training.engine.optimizer import Muon, keep_average, make_optimizer
from ebbflow.training.engine.parallel import DTYPES, report_compilation, spread_model
from ebbflow.training.engine.profiler import make_step_watches, record_memory
from ebbflow.training.engine.trainer import Trainer
from ebbflow.training.errors import WorkloadError
from ebbflow.training.gang import Gang, time_waits
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Position
from ebbflow.training.progress import Progress, peak_flops_per_second
from ebbflow.training.reporter import Reporter
from ebbflow.training.save_controller import SaveController, make_save_schedule
from ebbflow.training.session import (
    JobSession,
    make_limits,
    make_rehearsal,
    meet_others,
)
from ebbflow.training.start_check import check_same_data
from ebbflow.training.weights.files import describe_files
from ebbflow.training.weights.load import load_weights
from ebbflow.training.workload import Workload
from ebbflow.training.workload_loader import (
    make_workload,
    user_code,
    workload_context,
    wrap_user_workload,
)


def build_trainer(
    spec: WorkerSpec, gang: Gang, *, reporter: Reporter, saver: Checkpointer
) -> Trainer:
    """Build the trainer of one rank.

    Raises WorkloadError or ParallelError if this gang cannot train it. Collective.
    """
    config = apply_overrides(spec.config, Overrides.from_json(spec.overrides))
    clock = reporter.clock
    limits = make_limits(spec, gang, config, clock)
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
    on_step += make_step_watches(spec, config, gang, reporter)
    guards.config = config = fit_micro_batch(guards, workload, spread, optimizer)
    extra = {
        "seed": config.training.seed,
        "data_fingerprint": spec.prepared["fingerprint"],
        "batch_size": config.training.batch_size,
        "schedule": config.training.scheduler.model_dump(mode="json"),
    }
    progress = _progress(spec, gang, config, limits.terms, reporter)
    saves = SaveController(
        config=config.checkpoint,
        rank=gang.rank,
        spread=spread,
        optimizer=optimizer,
        saver=saver,
        limits=limits,
        reporter=reporter,
        extra=extra,
        carried=guards.commit_fields,
        save_schedule=make_save_schedule(spec, config, gang),
    )
    session = JobSession(
        config=config,
        gang=gang,
        reporter=reporter,
        limits=limits,
        saver=saver,
        saves=saves,
        guards=guards,
        rehearsal=make_rehearsal(spec, gang),
    )
    trainer = Trainer(
        config=config,
        workload=workload,
        spread=spread,
        optimizer=optimizer,
        session=session,
        progress=progress,
        on_step=on_step,
    )
    saver.prepare(spread.module, optimizer)
    clock.emit_phases()
    return trainer


def restore(trainer: Trainer, candidates: list[str]) -> Position:
    """Load the newest undamaged commit of `candidates`, and return the position at which training
    continues.

    `candidates` are keys of commits, newest first. If there are none, the job starts from its
    beginning. Raises DataError if the commit comes from other data or another seed, CheckpointError
    if no candidate can be restored. Collective.
    """
    session = trainer.session
    restored = session.restore(candidates, check=partial(_check_data, session.saves.extra))
    if restored is None:
        return begin(trainer)
    session.reporter.clock.emit_phases()
    return session.guards.resume(Position(restored.step, restored.extra["cursor"]), restored.extra)


def begin(trainer: Trainer) -> Position:
    """Load the initial weights of a new job, if any, and return its first position.

    Raises WorkloadError.
    """
    session = trainer.session
    path = trainer.config.training.initial_weights
    if path is not None:
        trainer.enter("restore", 0)
        begun = time.monotonic()
        if trainer.config.workload is None:
            check_settings(trainer.config.model, path)
        translate = getattr(trainer.workload, "translate_weights", None)
        alive = partial(trainer.enter, "restore", 0)
        working = session.gang.announce(alive)
        tensors = load_weights(path, trainer.spread.module, translate, progress=working)
        meet_others(session.gang, trainer.config, alive, f"reading {path}")
        if session.gang.rank == 0:
            seconds = time.monotonic() - begun
            session.reporter.emit(
                INITIAL_WEIGHTS, tensors=tensors, seconds=seconds, files=describe_files(path)
            )
            print(f"initial weights: {tensors} tensors of {path}", flush=True)
        session.reporter.clock.emit_phases()
    return session.guards.resume(Position(), {})


def _check_data(expected: dict[str, Any], restored: RestoreResult) -> None:
    """Raise DataError if the commit was trained with other data or another seed."""
    names = ("seed", "data_fingerprint")
    check_same_data(restored.key, {name: expected[name] for name in names}, restored.extra)


def _optimizer(workload: Workload, module: nn.Module, config: RunConfig) -> torch.optim.Optimizer:
    own = getattr(workload, "optimizer", None)
    if own is None:
        halves = config.fsdp.compute_dtype == "bfloat16"
        muon_dtype = torch.bfloat16 if halves else torch.float32
        return make_optimizer(module, config.training, muon_dtype=muon_dtype)
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
    """Measure the peak FLOP/s of all GPUs, for the MFU.

    A CPU has no MFU: its peak depends on what else the machine does, so that the share would rise
    when the machine slows down. On rank 0, return the printer of progress lines. Collective.
    """
    peak = 0.0
    if gang.device.type != "cpu":
        # Later ranks with the same local rank reuse the file. The number of ranks on the machine
        # changes the measurement.
        name = f"peak-{os.environ.get('LOCAL_RANK', '0')}-of-{spec.colocated_ranks}.json"
        kept = Path(spec.kept_path) / name if spec.kept_path else None
        dtype = DTYPES[config.fsdp.compute_dtype]
        own = peak_flops_per_second(gang.device, dtype, kept)
        reporter.emit(PEAK, flops_per_second=own, dtype=str(dtype).removeprefix("torch."))
        peak = sum(flops for (flops,) in gang.gather_numbers([own]))
    if gang.rank != 0:
        return None
    unit = str(spec.prepared.get("weight_unit", "tokens"))
    if unit == "tokens":
        unit = "tok"
    return Progress(
        max_steps=config.training.max_steps, peak_flops_per_second=peak, terms=terms, unit=unit
    )
