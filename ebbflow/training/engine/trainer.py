"""The trainer of one rank: the parts that the training loop uses, and the tasks around each step.

After a drain request, all ranks leave a running evaluation together. A rank must not leave alone,
because other ranks may wait for it in a collective. The ranks cannot use a collective to agree
either, because it would mix with the collectives of the user's code. So a rank with a drain request
votes through the gang's key-value store before its next forward pass, and waits for the votes of
the other ranks. If not all ranks vote in time, the evaluation continues.
"""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome, StoreError
from ebbflow.core.events import (
    BUDGET,
    EVALUATION,
    FAULT_INJECTED,
    NOTICE,
    OUTCOME,
    STEP,
    LedgerClass,
)
from ebbflow.training.checkpoint import Checkpointer
from ebbflow.training.compat import PrefixStore, Store
from ebbflow.training.engine.guards.guards import Action, Guards, Judgement
from ebbflow.training.engine.optimizer import averaged_weights, learning_rate, skip_if_non_finite
from ebbflow.training.engine.parallel import Spread
from ebbflow.training.errors import CheckpointError, GenerationSuperseded, MemoryGrowth
from ebbflow.training.gang import Gang
from ebbflow.training.limits import Limits, LoopResult, Position, Stop
from ebbflow.training.progress import Progress, Status
from ebbflow.training.rehearse import NON_FINITE, Fault
from ebbflow.training.rehearse import NOTICE as NOTICE_KIND
from ebbflow.training.reporter import Reporter
from ebbflow.training.save_controller import SaveController, SaveSchedule
from ebbflow.training.step_sync import DeviceExchange, Row, StepSync, exchange, find_slowest
from ebbflow.training.weights.load import weights_sha256
from ebbflow.training.workload import (
    Batch,
    Cursor,
    Loss,
    Workload,
    as_numbers,
    check_best_metric,
    draw_pictures,
)

VOTE_SECONDS = 2.0
_LONGEST_VOTE_SECONDS = 30.0
_VOTES = 5  # votes per evaluation; after them it runs to its end
_LOOK_SECONDS = 0.01
_LEAVE = "leave"


class _Left(BaseException):
    """Raised to end an evaluation.

    It is not a subclass of `Exception`, which the user's code might catch.
    """


class Evaluation:
    """Runner of this rank's part of each evaluation.

    The ranks can vote to end an evaluation early, all together.

    A rank waits for the other ranks' votes for `vote_seconds`, or for as long as the longest
    forward pass took if that is longer.
    """

    def __init__(self, gang: Gang, limits: Limits, *, vote_seconds: float = VOTE_SECONDS) -> None:
        self._gang = gang
        self._limits = limits
        self._vote_seconds = vote_seconds
        self._evaluations = self._votes = 0
        self._pass_seconds = 0.0
        self._looked_at = math.inf

    def run(self, workload: Workload[Any], spread: Spread) -> Mapping[str, float] | None:
        """Evaluate.

        Return the metrics by name, or None if all ranks left the evaluation early to drain.
        Collective.
        """
        self._evaluations = self._evaluations + 1
        self._votes = 0
        self._pass_seconds = 0.0
        self._looked_at = math.inf
        with spread.evaluating() as model:
            # Run this hook before a sharded model's own, whose effects would have to be undone.
            look = model.register_forward_pre_hook(self._look, prepend=True)
            try:
                return as_numbers(workload.evaluate(model))
            except _Left:
                return None
            finally:
                look.remove()

    def _look(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._pass_seconds = max(self._pass_seconds, time.monotonic() - self._looked_at)
        if self._limits.drain_requested and self._agreed():
            raise _Left
        self._looked_at = time.monotonic()

    def _agreed(self) -> bool:
        if self._gang.alone:
            return True
        store = self._gang.store
        if store is None or self._votes >= _VOTES:
            return False
        self._votes += 1
        try:
            return self._vote(PrefixStore(f"evaluation-{self._evaluations}", store))
        except (dist.DistError, RuntimeError):
            # Rank 0 or the network is gone, which is reported elsewhere
            self._votes = _VOTES
            return False

    def _vote(self, store: Store) -> bool:
        """Vote for leaving the evaluation, and return whether all ranks leave.

        Ballots are numbered. The first value written to the key `word-<ballot>` decides the ballot:
        the last rank to vote writes "leave", and a rank that has waited too long writes a refusal.
        """
        ballot = store.add("ballots", 0)
        if store.add(f"votes-{ballot}", 1) == self._gang.world_size:
            return store.compare_set(f"word-{ballot}", "", _LEAVE).decode() == _LEAVE
        limit = time.monotonic() + max(
            self._vote_seconds, min(self._pass_seconds, _LONGEST_VOTE_SECONDS)
        )
        while time.monotonic() < limit and not store.check([f"word-{ballot}"]):
            time.sleep(_LOOK_SECONDS)
        refusal = f"refused by rank {self._gang.rank}"
        word = store.compare_set(f"word-{ballot}", "", refusal).decode()
        if word == refusal:
            store.add("ballots", 1)
        return word == _LEAVE


_WORD_SECONDS = 2.0  # less than any hang threshold


@dataclass(kw_only=True)
class Rehearsal:
    fault: Fault  # the fault
    node: int  # the number of this rank's node
    nodes: int  # the number of nodes
    agent_pid: int | None  # the process id of this node's agent; None without an agent
    # The file in which the agent looks for a notice; None without an agent
    notice_path: str | None = None
    spoils_loss: bool = False  # whether this rank reports a non-finite loss in the next step

    def inject(
        self, step: int, *, max_steps: int, gang: Gang, reporter: Reporter, limits: Limits
    ) -> None:
        """Inject the fault if it is due on this rank.

        Call this before `step` is saved, so that the step is lost.
        """
        fault = self.fault
        if step != fault.due_step(max_steps):
            return
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
            limits.wait_for_drain(_WORD_SECONDS)


@dataclass(frozen=True, kw_only=True)
class Trainer:
    config: RunConfig
    gang: Gang
    workload: Workload
    spread: Spread
    optimizer: torch.optim.Optimizer
    saver: Checkpointer
    limits: Limits
    reporter: Reporter
    guards: Guards
    extra: dict[str, Any]  # fields that every commit has, besides step, cursor and spent dollars
    start: Position = field(default_factory=Position)  # the position at which the loop begins
    # The printer of progress lines, on rank 0; None on other ranks
    progress: Progress | None = None
    # The rule for when to save, on rank 0; None on other ranks
    save_schedule: SaveSchedule | None = None
    rehearsal: Rehearsal | None = None  # a fault to inject; None if there is none
    on_step: Sequence[Callable[[int], object]] = ()  # called before each step with its number

    @cached_property
    def save_controller(self) -> SaveController:
        names = ("spread", "optimizer", "saver", "limits", "reporter", "extra", "save_schedule")
        parts: dict[str, Any] = {name: getattr(self, name) for name in names}
        carried = self.guards.commit_fields
        rank = self.gang.rank
        return SaveController(config=self.config.checkpoint, rank=rank, carried=carried, **parts)

    def enter(self, phase: str, step: int) -> None:
        self.reporter.enter(phase, step)
        if self.device_exchange is not None and phase == "forward":
            self.device_exchange.begin_own()

    def end_own(self) -> None:
        """Mark the end of this rank's own backward computation.

        The rest counts as waiting for other ranks.
        """
        self.reporter.clock.end_own()
        if self.device_exchange is not None:
            self.device_exchange.end_own()

    @cached_property
    def device_exchange(self) -> DeviceExchange | None:
        """The step sync on GPUs, which is read one step late; None if each step reads its own sync.

        Each step reads its own sync on a CPU, with CPU offload or float16 loss scaling, and if a
        guard may skip steps.
        """
        guards = self.config.guards
        at_once = self.config.fsdp.cpu_offload or "skip" in (guards.non_finite, guards.spike)
        at_once = at_once or self.guards.loss_scale is not None
        if self.gang.device.type != "cuda" or at_once:
            return None
        return DeviceExchange(self.gang)

    def seed_random_numbers(self, step: int) -> None:
        """Seed torch with a hash of seed, step and rank, so that a resumed run draws the same
        random numbers.

        The ranks of a tensor group draw equal numbers, because they compute the same layers.
        """
        text = f"{self.config.training.seed}\n{step}\n{self.gang.rank // self.config.parallel.tensor_size}"
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        # Torch.manual_seed also seeds other devices: 0.1 to 0.3 ms a step
        if self.gang.device.type == "cpu":
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def find_non_finite_module(self, at: Position) -> str:
        """Repeat the forward pass of the step after `at`, which changed no weights. Collective.

        Return which module made the first non-finite output, as text. Return "" if no module did,
        since the loss itself or its gradient is not finite, or if the optimizer changed the weights
        before the host read the step sync.
        """
        # Rollouts cost too much to draw them again
        drawn = getattr(self.workload, "batch_phase", "data") != "data"
        if drawn or (
            self.device_exchange is not None and not skip_if_non_finite(self.optimizer, 0.0)
        ):
            return ""
        module = self.spread.module
        found = list[int]()

        def look(number: int, _: nn.Module, inputs: Any, output: Any) -> None:
            tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            if not found and not all(bool(tensor.isfinite().all()) for tensor in tensors):
                found.append(number)

        hooks = [
            part.register_forward_hook(partial(look, number))
            for number, part in enumerate(module.modules())
        ]
        self.seed_random_numbers(at.step + 1)
        with torch.no_grad(), suppress(Exception):
            batch = self.workload.next_batch(module, self.share(at))
            for part in batch.split(self.config.training.gradient_accumulation_steps):
                self.workload.loss(module, part)
        for hook in hooks:
            hook.remove()
        rows = self.gang.gather_numbers([float(found[0] if found else 0)])
        rank, number = next(
            ((rank, int(row[0])) for rank, row in enumerate(rows) if row[0]), (0, 0)
        )
        name, part = list(module.named_modules())[number]
        if number:
            return (
                f"; the first such output is that of {name} ({type(part).__name__}) on rank {rank}"
            )
        return ""

    def share(self, at: Position) -> Cursor:
        group = self.config.parallel.tensor_size  # all its ranks have the same samples
        rank = self.gang.rank // group
        ranks = self.gang.world_size // group
        return Cursor(at.cursor, self.config.training.batch_size).share(rank, ranks)

    def stop_before_first_step(self) -> Stop:
        """Return INTERRUPTED if any rank was asked to drain during start-up, else NONE.

        Collective.
        """
        asked = self.gang.gather_numbers([self.limits.drain_requested])
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
        late = self.device_exchange
        clock = self.reporter.clock
        taken = at.step - self.start.step
        to_go = self.config.training.max_steps - at.step
        if taken:
            seconds_to_go = clock.elapsed_seconds / taken * to_go
        else:
            seconds_to_go = 0.0
        spoiled = self.rehearsal is not None and self.rehearsal.spoils_loss
        if self.rehearsal is not None:
            self.rehearsal.spoils_loss = False
        data_seconds = clock.booked_seconds(LedgerClass.DATA_WAIT)
        own = clock.take_own()
        row = Row(
            step=at.step + 1,
            cursor=at.cursor,
            loss_sum=0.0 if late else math.nan if spoiled else float(loss.sum),
            weight=loss.weight,
            square_sum=0.0 if late else float(self.spread.square_sum(gradients)),
            flops=self.workload.flops(batch) / self.config.parallel.tensor_size,
            compute_seconds=clock.booked_seconds(LedgerClass.USEFUL_STEP),
            data_seconds=data_seconds,
            stop=self.limits.stop(self.config.training.max_steps - at.step - 1),
            stop_seconds=self.limits.stop_seconds,
            own_seconds=data_seconds + late.own_seconds if late else own,
            weights_checksum=self.guards.weights_checksum(at.step, self.spread.module),
            renew=self.guards.is_memory_running_out(seconds_to_go),
            **self.save_controller.row_fields(at.step + 1),
        )
        if late is None:
            sync = exchange(self.gang, row)
            scale = sync.scale
            norm = sync.gradient_norm
        else:
            if spoiled:
                loss_sum = torch.full_like(loss.sum, math.nan)
            else:
                loss_sum = loss.sum
            scale, norm = late.send(row, loss_sum, self.spread.square_sum(gradients))
            if late.unread > 1:
                sync = late.read()
            else:
                sync = StepSync([])
        if sync.failed_save:
            self.saver.abandon(sync.failed_save)
        return sync, scale, norm

    def read_step(self, sync: StepSync) -> StepSync:
        """Read this step's sync, and add the requests of `sync`, which is the previous step's sync.

        Return no rows if this step's sync was already read, as on a CPU.
        """
        late = self.device_exchange
        if late is not None and late.unread:
            return late.read().merge(sync)
        return StepSync([])

    def judge(self, sync: StepSync) -> Judgement:
        if not sync.rows:
            return Judgement(Action.STEP)
        at = sync.at

        def settle() -> None:
            self.enter("checkpoint", at.step)
            self.saver.wait()

        judgement = self.guards.judge(at, sync, settle)
        if judgement.action is Action.SKIP:
            self.spread.reset_compression()
        return judgement

    def record_step(self, sync: StepSync, judgement: Judgement) -> None:
        """Emit the step's event with the seconds since the previous step, and print a progress line
        if one is due.
        """
        if not sync.rows:
            return
        at = sync.at.next(self.config.training.batch_size)
        # The ranks of a tensor group have the same tokens
        tokens = sync.weight / self.config.parallel.tensor_size
        data: dict[str, Any] = {
            "loss": sync.loss,
            "tokens": tokens,
            "learning_rate": learning_rate(self.config.training, at.step),
            "gradient_norm": sync.gradient_norm,
            "seconds": self.reporter.clock.take(),
        }
        if judgement.action is Action.SKIP:
            data["skipped"] = judgement.reason
        data["own_seconds"] = sync.own_seconds[self.gang.rank]
        if self.gang.rank == 0:
            self.guards.record_pace(at.step, sync, self.limits.usd_per_second)
        data |= self.save_controller.record_step_time(data["seconds"], saving=bool(sync.saving))
        if self.progress is not None:
            flops = sum(row.flops for row in sync.rows)
            slowest = find_slowest(sync.own_seconds)
            data |= {"flops": flops, "slowest_rank": slowest.rank, "slowest_ratio": slowest.ratio}
            data["slowest_seconds"] = slowest.lost_seconds
            commit = self.saver.last_commit
            status = Status(
                step=at.step,
                loss=sync.loss,
                tokens=tokens,
                flops=flops,
                spent_usd=self.limits.spent_usd,
                last_commit_step=commit.step if commit else None,
                at_risk_usd=data.get("at_risk_usd"),
                drag=self.guards.pace.now,
            )
            self.progress.step(status)
        self.reporter.mark_trained(at.step)
        self.reporter.emit(STEP, step=at.step, **data)
        for news in self.limits.new_budget_thresholds(sync.stop) if self.gang.rank == 0 else ():
            self.reporter.emit(BUDGET, step=at.step, **news)
            share = f"{news['threshold']:.0%} of the budget ${news['budget_usd']:.4f}"
            spent = f"${news['spent_usd']:.4f} spent, ${news['reserve_usd']:.4f} kept"
            print(f"step {at.step}: {share} is reached: {spent}", flush=True)

    def rehearse_fault(self, step: int) -> None:
        """Inject the rehearsed fault if it is due on this rank."""
        if self.rehearsal is not None:
            most = self.config.training.max_steps
            own = {"reporter": self.reporter, "limits": self.limits}
            self.rehearsal.inject(step, max_steps=most, gang=self.gang, **own)

    def renew_if_due(self, at: Position, sync: StepSync, *, last: bool) -> None:
        """Wait for the save and raise MemoryGrowth if any rank's memory is about to run out.

        Do nothing after the `last` step.
        """
        if sync.renew and not last:
            self.saver.wait()
            ranks = ", ".join(map(str, sync.renew))
            raise MemoryGrowth(
                f"memory of rank {ranks} would have run out; saved at step {at.step}, to go on anew"
            )

    @cached_property
    def evaluation(self) -> Evaluation:
        return Evaluation(self.gang, self.limits)

    def evaluate(self, at: Position) -> Stop:
        """Evaluate the model and emit the metrics.

        Return INTERRUPTED if all ranks left early to drain. Collective.
        """
        self.enter("evaluation", at.step)
        if self.config.training.ema is not None:
            averaged = averaged_weights(self.optimizer)
        else:
            averaged = nullcontext()
        with averaged:
            metrics = self.evaluation.run(self.workload, self.spread)
        if metrics is None:
            if self.gang.rank == 0:
                message = (
                    f"step {at.step}: the evaluation is abandoned: "
                    f"{self.limits.describe(Stop.INTERRUPTED)}"
                )
                print(message, flush=True)
                self.reporter.emit(NOTICE, step=at.step, message=message)
            return Stop.INTERRUPTED
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        # Saved with this commit; retention compares them
        self.extra["metrics"] = {**finite, "step": at.step}
        check_best_metric(self.config, metrics)
        if self.gang.rank == 0:
            shown = draw_pictures(self.workload)
            self.reporter.emit(
                EVALUATION, step=at.step, metrics=metrics, **({"pictures": shown} if shown else {})
            )
        return Stop.NONE

    def end(self, at: Position, outcome: Outcome, message: str = "") -> LoopResult:
        """End the loop: wait until the last save is a commit, then emit the outcome. Collective.

        If the outcome is INTERRUPTED, a failed save is not raised as an error; the outcome's
        message mentions the failure.
        """
        self.enter("checkpoint", at.step)
        try:
            self.save_controller.finish()
        except GenerationSuperseded:
            raise
        except CheckpointError as error:
            if outcome is not Outcome.INTERRUPTED:
                raise
            message = f"{message}; the last save did not become a commit: {error}"
        if outcome is Outcome.INTERRUPTED:
            message = f"{message}; {self.save_controller.describe_resume_point(at)}"
        if outcome in (Outcome.COMPLETED, Outcome.BUDGET, Outcome.DEADLINE):
            self.guards.compare_at_end(at, self.spread.module)  # the last commit has these weights
        self.enter("done", at.step)
        # After a drain request there is no time to hash all weights; a later attempt will complete
        # the job.
        alive = partial(self.enter, "done", at.step)
        if outcome is Outcome.INTERRUPTED:
            sha256 = None
        else:
            sha256 = weights_sha256(self.spread.module, progress=alive)
        if self.gang.rank == 0:
            ending = {"outcome": str(outcome), "weights_sha256": sha256, "message": message}
            self.reporter.emit(OUTCOME, step=at.step, flush=True, **ending)
        return LoopResult(outcome, at.step, message, sha256)
