"""The trainer of one rank: the parts that the training loop uses, and the tasks around each step."""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.events import BUDGET, GPU_MEMORY, NOTICE, STEP, LedgerClass
from ebbflow.training.engine.guards.guards import Action, Judgement
from ebbflow.training.engine.guards.memory import GpuPeaks
from ebbflow.training.engine.guards.silent_faults import RepeatedStep, RestingState
from ebbflow.training.engine.optimizer import averaged_weights, can_skip_step, learning_rate
from ebbflow.training.engine.parallel import Spread
from ebbflow.training.errors import GenerationSuperseded, MemoryGrowth, TrainingError
from ebbflow.training.evaluation import Evaluation
from ebbflow.training.limits import LoopResult, Position, Stop
from ebbflow.training.metric_values import MetricGate, emit_evaluation
from ebbflow.training.progress import Progress, Status
from ebbflow.training.session import JobSession
from ebbflow.training.step_sync import DeviceExchange, Row, StepSync, find_slowest
from ebbflow.training.weights.load import weights_sha256
from ebbflow.training.workload import (
    Batch,
    Cursor,
    Loss,
    Workload,
    check_best_metric,
    draw_pictures,
)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    config: RunConfig
    workload: Workload
    spread: Spread
    optimizer: torch.optim.Optimizer
    session: JobSession  # this rank's part in the job: exchanges, saves, limits, events
    start: Position = field(default_factory=Position)  # the position at which the loop begins
    # The printer of progress lines, on rank 0; None on other ranks
    progress: Progress | None = None
    on_step: Sequence[Callable[[int], object]] = ()  # called before each step with its number

    def enter(self, phase: str, step: int) -> None:
        self.session.reporter.enter(phase, step)
        if self.device_exchange is not None and phase == "forward":
            self.device_exchange.begin_own()

    def end_own(self) -> None:
        """Mark the end of this rank's own backward computation.

        The rest counts as waiting for other ranks.
        """
        self.session.reporter.clock.end_own()
        if self.device_exchange is not None:
            self.device_exchange.end_own()

    @cached_property
    def metric_gate(self) -> MetricGate:
        return MetricGate(self._record_notice)

    @cached_property
    def device_exchange(self) -> DeviceExchange | None:
        """The step sync on GPUs, which is read one step late; None if each sync is read in its own
        step.

        A sync is read in its own step on a CPU, with CPU offload or float16 loss scaling, and if a
        guard may skip steps.
        """
        guards = self.config.guards
        may_skip = "skip" in (guards.non_finite, guards.spike)
        scales_loss = self.session.guards.loss_scale is not None
        reads_same_step = self.config.fsdp.cpu_offload or may_skip or scales_loss
        if self.session.gang.device.type != "cuda" or reads_same_step:
            return None
        return DeviceExchange(self.session.gang)

    @cached_property
    def gpu_peaks(self) -> GpuPeaks | None:
        if self.session.gang.device.type != "cuda":
            return None
        return GpuPeaks(self.session.gang.device)

    @cached_property
    def resting_state(self) -> RestingState | None:
        """Detector of bits that flip between two optimizer steps; None if it is not configured."""
        if not self.config.guards.check_at_rest:
            return None
        return RestingState(self.spread.module, self.optimizer)

    def begin_repeated_step(self, step: int) -> RepeatedStep | None:
        """Return a copy of this rank's state if `step` is to be computed twice, else None."""
        interval = self.config.guards.repeat_interval_steps
        if interval is None or step % interval:
            return None
        return RepeatedStep(self.spread.module, self.optimizer)

    def seed_random_numbers(self, step: int) -> None:
        """Seed torch with a hash of seed, step and rank, so that a resumed run draws the same
        random numbers.

        The ranks of a tensor group draw equal numbers, because they compute the same layers.
        """
        gang = self.session.gang
        group = gang.rank // self.config.parallel.tensor_size
        text = f"{self.config.training.seed}\n{step}\n{group}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        # Torch.manual_seed also seeds other devices: 0.1 to 0.3 ms a step
        if gang.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def share(self, at: Position) -> Cursor:
        """Return this rank's samples of the step after `at`."""
        # All ranks of a tensor group have the same samples
        group_size = self.config.parallel.tensor_size
        group = self.session.gang.rank // group_size
        groups = self.session.gang.world_size // group_size
        return Cursor(at.cursor, self.config.training.batch_size).share(group, groups)

    def stop_before_first_step(self) -> Stop:
        """Return INTERRUPTED if any rank was asked to drain during start-up, else NONE.

        Collective.
        """
        asked = self.session.gang.gather_numbers([self.session.limits.drain_requested])
        if any(rank for (rank,) in asked):
            return Stop.INTERRUPTED
        return Stop.NONE

    def sync_step(
        self, at: Position, batch: Batch, loss: Loss, gradients: Sequence[Tensor]
    ) -> tuple[StepSync, float | Tensor, float | Tensor]:
        """Exchange this step's figures with all ranks.

        Return a sync, and this step's gradient scale and gradient norm.

        The returned sync belongs to this step. On a GPU, where a sync is read one step late, it
        belongs to the step before.
        """
        row = self._make_row(at, batch, loss)
        spoiled = self.session.take_spoiled_loss()
        square_sum = self.spread.square_sum(gradients)
        late = self.device_exchange
        if late is None:
            row = row._replace(
                loss_sum=math.nan if spoiled else float(loss.sum),
                square_sum=float(square_sum),
                # Read once the device has computed both sums, for which the host has waited
                compute_seconds=self.session.reporter.clock.booked_seconds(LedgerClass.USEFUL_STEP),
            )
            sync = self.session.sync(row)
            return sync, sync.scale, sync.gradient_norm
        # The device adds both sums to the row, so that the host does not wait for them
        loss_sum = torch.full_like(loss.sum, math.nan) if spoiled else loss.sum
        scale, norm = late.send(row, loss_sum, square_sum)
        sync = late.read() if late.unread > 1 else StepSync([])
        self.session.abandon_failed_save(sync)
        return sync, scale, norm

    def _make_row(self, at: Position, batch: Batch, loss: Loss) -> Row:
        """Return this rank's row of the step sync, without the sums of loss and gradients."""
        session = self.session
        clock = session.reporter.clock
        steps_left = self.config.training.max_steps - at.step
        steps_taken = at.step - self.start.step
        seconds_left = clock.elapsed_seconds / steps_taken * steps_left if steps_taken else 0.0
        data_seconds = clock.booked_seconds(LedgerClass.DATA_WAIT)
        own_seconds = clock.take_own()
        if self.device_exchange is not None:
            own_seconds = data_seconds + self.device_exchange.own_seconds
        row = Row(
            step=at.step + 1,
            cursor=at.cursor,
            loss_sum=0.0,
            weight=loss.weight,
            square_sum=0.0,
            flops=self.workload.flops(batch) / self.config.parallel.tensor_size,
            compute_seconds=clock.booked_seconds(LedgerClass.USEFUL_STEP),
            data_seconds=data_seconds,
            stop=session.limits.stop(steps_left - 1),
            own_seconds=own_seconds,
            weights_checksum=session.guards.weights_checksum(at.step, self.spread.module),
            renew=session.guards.is_memory_running_out(seconds_left),
            changed_at_rest=self.resting_state is not None and self.resting_state.has_changed(),
        )
        return session.with_save_request(row)

    def read_step(self, sync: StepSync) -> StepSync:
        """Read this step's sync, and return it with the requests of the previous step's `sync`
        added.

        If this step's sync was already read, as on a CPU, return a sync without rows.
        """
        late = self.device_exchange
        if late is not None and late.unread:
            return late.read().merge(sync)
        return StepSync([])

    def judge(self, sync: StepSync) -> Judgement:
        if not sync.rows:
            return Judgement(Action.STEP)
        judgement = self.session.judge(sync.at, sync)
        if judgement.action is Action.SKIP:
            self.spread.reset_compression()
        return judgement

    def record_step(self, sync: StepSync, judgement: Judgement) -> None:
        """Emit the step's event with the seconds since the previous step, and print a progress line
        if one is due.
        """
        if not sync.rows:
            return
        session = self.session
        at = sync.at.next(self.config.training.batch_size)
        seconds = session.reporter.clock.take()
        # The ranks of a tensor group have the same tokens
        tokens = sync.weight / self.config.parallel.tensor_size
        data: dict[str, Any] = {
            "loss": sync.loss,
            "tokens": tokens,
            "learning_rate": learning_rate(self.config.training, at.step),
            "gradient_norm": sync.gradient_norm,
            "seconds": seconds,
        }
        if judgement.action is Action.SKIP:
            data["skipped"] = judgement.reason
        data["own_seconds"] = sync.own_seconds[session.gang.rank]
        if session.gang.rank == 0:
            session.guards.record_pace(at.step, sync, session.limits.usd_per_second)
        data |= session.saves.record_step_time(seconds, saving=bool(sync.saving))
        if self.progress is not None:
            flops = sum(row.flops for row in sync.rows)
            slowest = find_slowest(sync.own_seconds)
            data["flops"] = flops
            data["slowest_rank"] = slowest.rank
            data["slowest_ratio"] = slowest.ratio
            data["slowest_seconds"] = slowest.lost_seconds
            commit = session.saver.last_commit
            status = Status(
                step=at.step,
                loss=sync.loss,
                tokens=tokens,
                flops=flops,
                spent_usd=session.limits.spent_usd,
                last_commit_step=commit.step if commit else None,
                at_risk_usd=data.get("at_risk_usd"),
                drag=session.guards.pace.now,
            )
            self.progress.step(status)
        session.reporter.mark_trained(at.step)
        session.reporter.emit(STEP, step=at.step, **data)
        peaks = None if self.gpu_peaks is None else self.gpu_peaks.take()
        if peaks is not None:
            session.reporter.emit(GPU_MEMORY, step=at.step, **peaks)
        if session.gang.rank == 0:
            self._report_budget(at.step, sync.stop)

    def _report_budget(self, step: int, stop: Stop) -> None:
        """Report the shares of the budget that were reached in this step."""
        for reached in self.session.limits.new_budget_thresholds(stop):
            self.session.reporter.emit(BUDGET, step=step, **reached)
            share = f"{reached['threshold']:.0%} of the budget ${reached['budget_usd']:.4f}"
            spent = f"${reached['spent_usd']:.4f} spent, ${reached['reserve_usd']:.4f} kept"
            print(f"step {step}: {share} is reached: {spent}", flush=True)

    def rehearse_fault(self, step: int) -> None:
        """Inject the rehearsed fault if it is due on this rank."""
        self.session.rehearse_fault(step, self.config.training.max_steps)

    def renew_if_due(self, at: Position, sync: StepSync, *, last: bool) -> None:
        """Wait for the save and raise MemoryGrowth if any rank's memory is about to run out.

        Do nothing after the `last` step.
        """
        if sync.renew and not last:
            self.session.saver.wait()
            ranks = ", ".join(map(str, sync.renew))
            raise MemoryGrowth(
                f"memory of rank {ranks} would have run out; saved at step {at.step}, to go on anew"
            )

    @cached_property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.session.gang, self.session.limits)

    def evaluate(self, at: Position) -> Stop:
        """Evaluate the model and emit the metrics.

        Return INTERRUPTED if all ranks left early to drain. Collective.
        """
        session = self.session
        self.enter("evaluation", at.step)
        if self.config.training.ema is not None:
            averaged = averaged_weights(self.optimizer)
        else:
            averaged = nullcontext()
        with averaged:
            metrics = self.evaluation.run(self.workload, self.spread)
        if metrics is None:
            why = session.limits.describe(Stop.INTERRUPTED)
            self._record_notice(f"step {at.step}: the evaluation is abandoned: {why}")
            return Stop.INTERRUPTED
        values = self.metric_gate.read(metrics)
        # Saved with this commit; retention compares them
        session.saves.extra["metrics"] = {**values.finite, "step": at.step}
        check_best_metric(self.config, metrics)
        if session.gang.rank == 0:
            emit_evaluation(session.reporter, at.step, values, draw_pictures(self.workload))
        return Stop.NONE

    def end(self, at: Position, outcome: Outcome, message: str = "") -> LoopResult:
        """End the loop: wait until the last save is a commit, then emit the outcome. Collective.

        If the outcome is INTERRUPTED, a failed save is not raised as an error; the outcome's
        message mentions the failure.
        """
        session = self.session
        self.enter("checkpoint", at.step)
        interrupted = outcome is Outcome.INTERRUPTED
        fatal = GenerationSuperseded if interrupted else TrainingError
        message = session.finish_saves(message, fatal=fatal)
        if interrupted:
            message = f"{message}; {session.saves.describe_resume_point(at)}"
        if outcome in (Outcome.COMPLETED, Outcome.BUDGET, Outcome.DEADLINE):
            # The last commit has these weights
            session.guards.compare_at_end(at, self.spread.module)
        self.enter("done", at.step)
        sha256 = None
        # After a drain request there is no time to hash all weights; a later attempt will complete
        # the job.
        if not interrupted:
            alive = partial(self.enter, "done", at.step)
            sha256 = weights_sha256(self.spread.module, progress=alive)
        return session.end(at, outcome, message, sha256)

    def find_non_finite_module(self, at: Position) -> str:
        """Repeat the forward pass of the step after `at`, which changed no weights. Collective.

        Return which module made the first non-finite output, as text. Return "" if no module did,
        since the loss itself or its gradient is not finite, or if the optimizer changed the weights
        before the host read the step sync.
        """
        # Rollouts cost too much to draw them again
        draws_rollouts = getattr(self.workload, "batch_phase", "data") != "data"
        reads_late = self.device_exchange is not None
        has_changed_weights = reads_late and not can_skip_step(self.optimizer)
        if draws_rollouts or has_changed_weights:
            return ""
        number = self._number_of_first_non_finite_module(at)
        rows = self.session.gang.gather_numbers([number])
        ranks = [rank for rank, (number,) in enumerate(rows) if number]
        if not ranks:
            return ""
        name, module = list(self.spread.module.named_modules())[int(rows[ranks[0]][0])]
        return (
            f"; the first such output is that of {name} ({type(module).__name__}) "
            f"on rank {ranks[0]}"
        )

    def _number_of_first_non_finite_module(self, at: Position) -> int:
        """Return the number of the first module with a non-finite output on this rank; 0 if there
        is none.

        Modules are numbered in the order of `modules()`, in which 0 is the whole model.
        """
        numbers = list[int]()

        def look(number: int, _module: nn.Module, _inputs: object, output: object) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            if not numbers and not all(bool(tensor.isfinite().all()) for tensor in tensors):
                numbers.append(number)

        model = self.spread.module
        hooks = [
            module.register_forward_hook(partial(look, number))
            for number, module in enumerate(model.modules())
        ]
        self.seed_random_numbers(at.step + 1)
        with torch.no_grad(), suppress(Exception):
            batch = self.workload.next_batch(model, self.share(at))
            for part in batch.split(self.config.training.gradient_accumulation_steps):
                self.workload.loss(model, part)
        for hook in hooks:
            hook.remove()
        return numbers[0] if numbers else 0

    def _record_notice(self, message: str) -> None:
        """On rank 0, print a message and record it as an event."""
        if self.session.gang.rank == 0:
            print(message, flush=True)
            self.session.reporter.emit(NOTICE, message=message)
