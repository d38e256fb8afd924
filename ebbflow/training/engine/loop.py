"""Run the training loop.

The `Trainer` does everything that concerns the model, prices or the store.

One step: next_batch → split → forward and backward → step sync → guards → clip → optimizer step →
heartbeat
"""

from contextlib import nullcontext

import torch
from torch import Tensor

from ebbflow.core.errors import Outcome
from ebbflow.training.engine.guards.guards import Action, Judgement
from ebbflow.training.engine.guards.silent_faults import RepeatedStep
from ebbflow.training.engine.optimizer import (
    learning_rate,
    scale_and_clip,
    set_learning_rate,
    skip_if_non_finite,
)
from ebbflow.training.engine.trainer import Trainer
from ebbflow.training.gang import at_end_of_backward
from ebbflow.training.limits import LoopResult, Position, Stop
from ebbflow.training.step_sync import StepSync
from ebbflow.training.workload import Batch, Loss


def train(trainer: Trainer) -> LoopResult:
    """Train until the last step, a limit, or a non-finite loss that ends the job. Collective.

    Returns:
        The result of the loop, equal on all ranks.
    """
    training = trainer.config.training
    optimizer = trainer.optimizer
    spread = trainer.spread
    guards = trainer.session.guards
    at = trainer.start
    stop = trainer.stop_before_first_step()
    while at.step < training.max_steps and stop is Stop.NONE:
        step = at.step + 1
        for reach in trainer.on_step:
            reach(step)
        trainer.enter(getattr(trainer.workload, "batch_phase", "data"), step)
        trainer.seed_random_numbers(step)
        batch = trainer.workload.next_batch(spread.model, trainer.share(at))

        repeated = trainer.begin_repeated_step(step)
        loss = forward_backward(trainer, batch, step, repeated)

        gradients = spread.gradient_tensors()
        if guards.loss_scale is not None:
            torch._foreach_mul_(gradients, 1 / guards.loss_scale.value)  # pyright: ignore[reportPrivateImportUsage]
        sync, scale, norm = trainer.sync_step(at, batch, loss, gradients)
        judgement = trainer.judge(sync)
        if judgement.action is Action.STOP:
            return end_non_finite(trainer, sync, judgement)

        trainer.enter("optimizer", step)
        set_learning_rate(optimizer, learning_rate(training, step))
        if judgement.action is Action.STEP:
            update(trainer, gradients, scale, norm, step)
            repeat_step(trainer, repeated, batch, loss, scale, norm, step)
        optimizer.zero_grad()

        at = at.next(training.batch_size)
        trainer.record_step(sync, judgement)
        trainer.rehearse_fault(step)
        last = step == training.max_steps or sync.stop is not Stop.NONE
        evaluated = not last and step % training.evaluation_interval_steps == 0
        if last or evaluated or sync.save_due or sync.renew:
            newer = trainer.read_step(sync)
            if newer.rows:
                sync = newer
                judgement = trainer.judge(sync)
                if judgement.action is Action.STOP:
                    return end_non_finite(trainer, sync, judgement)
                trainer.record_step(sync, judgement)
        stop = sync.stop
        last = last or stop is not Stop.NONE
        # Before the save, so that the commit carries its own metrics
        stop = evaluate_if_due(trainer, at, stop, due=evaluated)
        trainer.session.save_if_due(at, sync, last=last)
        trainer.renew_if_due(at, sync, last=last)

    if stop is Stop.NONE and at == trainer.start:
        stop = trainer.evaluate(at)  # the former start was interrupted in its last evaluation
    if stop is not Stop.NONE:
        return trainer.end(at, stop.outcome, trainer.session.limits.describe(stop))
    return trainer.end(at, Outcome.COMPLETED)


def evaluate_if_due(trainer: Trainer, at: Position, stop: Stop, *, due: bool) -> Stop:
    """Evaluate if `due` or after the last step, but not if the loop already stops. Collective.

    Returns:
        Why the loop stops, which can be a notice that came during the last evaluation.
    """
    if stop is not Stop.NONE:
        return stop
    if at.step == trainer.config.training.max_steps:
        return trainer.evaluate(at)
    if due:
        trainer.evaluate(at)
    return Stop.NONE


def end_non_finite(trainer: Trainer, sync: StepSync, judgement: Judgement) -> LoopResult:
    reason = f"step {sync.at.step + 1}: {judgement.reason}{trainer.find_non_finite_module(sync.at)}"
    return trainer.end(sync.at, Outcome.NON_FINITE, f"{reason}; the last commit stands")


def update(
    trainer: Trainer,
    gradients: list[Tensor],
    scale: float | Tensor,
    norm: float | Tensor,
    step: int,
) -> None:
    """Take the optimizer step with the scaled and clipped gradients."""
    limit = trainer.config.training.gradient_clip_norm
    with trainer.session.guards.catch_out_of_memory(step):
        scale_and_clip(gradients, scale=scale, norm=norm, limit=limit)
        trainer.session.saver.before_step()
        skip_if_non_finite(trainer.optimizer, norm)
        trainer.optimizer.step()
    if trainer.resting_state is not None:
        trainer.resting_state.remember()


def repeat_step(
    trainer: Trainer,
    repeated: RepeatedStep | None,
    batch: Batch,
    first_loss: Loss,
    scale: float | Tensor,
    norm: float | Tensor,
    step: int,
) -> None:
    """Compute the step again from the state before it, and compare each bit. Collective.

    Without `repeated`, do nothing. The gradient's scale and norm are those of the first computation.

    Raises:
        DivergenceError: a rank computed something else.
    """
    if repeated is None:
        return
    repeated.end_pass(first_loss)
    repeated.restore()
    trainer.optimizer.zero_grad()
    loss = forward_backward(trainer, batch, step, repeated)
    trainer.enter("optimizer", step)
    set_learning_rate(trainer.optimizer, learning_rate(trainer.config.training, step))
    update(trainer, trainer.spread.gradient_tensors(), scale, norm, step)
    repeated.end_pass(loss)
    trainer.session.guards.compare_passes(step, repeated.compare())


def forward_backward(
    trainer: Trainer, batch: Batch, step: int, repeated: RepeatedStep | None = None
) -> Loss:
    """Run forward and backward on all micro-batches of `batch`.

    Return the sums of their losses and of their weights.

    The gradients are sums too. The step sync computes the total weight of all ranks, by which the
    gradients are divided later.
    """
    parts = batch.split(trainer.config.training.gradient_accumulation_steps)
    sums = torch.zeros((), device=trainer.session.gang.device)
    weight = 0.0
    guards = trainer.session.guards
    if repeated is None:
        watch = nullcontext()
    else:
        watch = repeated.watch_gradients(compiled=trainer.config.parallel.compile)
    with guards.catch_out_of_memory(step), watch:
        for number, part in enumerate(parts, start=1):
            with trainer.spread.gradients(last=number == len(parts)):
                trainer.enter("forward", step)
                loss = trainer.workload.loss(trainer.spread.model, part)
                trainer.enter("backward", step)
                scaled = loss.sum
                if guards.loss_scale is not None:
                    scaled = loss.sum * guards.loss_scale.value
                at_end_of_backward(scaled, trainer.end_own)
                scaled.backward()
            sums += loss.sum.detach()
            weight += loss.weight
    return Loss(sums, weight)
