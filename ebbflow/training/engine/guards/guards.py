"""Guards of one rank, which check losses, gradients, weights and memory during training.

All ranks make the same decisions, because decisions depend only on data that the step sync shares.
Every commit contains the state of `LossGuard`, so a resumed job judges each step exactly as an
uninterrupted job would.
"""

import math
import os
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NoReturn, TypedDict

import torch
from torch import nn

from ebbflow.core.config.schema import GuardsConfig, RunConfig
from ebbflow.core.events import GUARD, GuardAction
from ebbflow.core.layout import job_prefix
from ebbflow.core.process import host_bytes_left
from ebbflow.core.store import Store
from ebbflow.training import errors
from ebbflow.training.engine.guards.memory import (
    MemoryGrowthMonitor,
    fitting_accumulation,
    is_out_of_memory,
    memory_of_other_processes,
    more_micro_batches,
    try_micro_batch,
)
from ebbflow.training.engine.guards.overrides import Overrides, record_rewind, record_split
from ebbflow.training.engine.guards.silent_faults import Differences, checksum
from ebbflow.training.engine.parallel import Spread
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.launch.watch import resident_bytes
from ebbflow.training.limits import Position
from ebbflow.training.step_sync import PaceMonitor, StepSync
from ebbflow.training.workload import Cursor, Workload

# The standard deviation of a normal distribution is this multiple of its median absolute deviation
# (Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation", 1993).
_SIGMA_PER_MAD = 1.4826
# The smallest deviation that counts, as a share of the median. Otherwise, after equal values, a
# rounding error would be a spike.
_SMALLEST_SHARE = 1e-3


class RobustWindow:
    """Window of the last `size` values, from which a robust z-score is computed.

    The score is 0 until the window is half full.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self.values: deque[float] = deque(values, maxlen=size)
        self._size = size

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def z_score(self, value: float) -> float:
        """Return (value - median) / (1.4826 × MAD), where MAD is the median absolute deviation of
        the window.

        The score of a value below the median is 0, because only larger values are spikes.
        """
        if 2 * len(self.values) < self._size:
            return 0.0
        median = self.median
        mad = statistics.median([abs(other - median) for other in self.values])
        return max(0.0, value - median) / max(
            _SIGMA_PER_MAD * mad, _SMALLEST_SHARE * abs(median), 1e-12
        )


class Action(Enum):
    STEP = "step"  # take the optimizer step
    SKIP = "skip"  # discard the gradients of this step
    REWIND = "rewind"  # go back to an older commit
    STOP = "stop"  # end the job


@dataclass(frozen=True)
class Judgement:
    action: Action
    reason: str = ""  # why the step is not taken; "" if it is
    finite: bool = True  # False if the reason is a non-finite loss or gradient


class LossGuardState(TypedDict, total=False):
    """State of a `LossGuard` in a commit. It is empty in commits without guards."""

    losses: list[float]
    gradient_norms: list[float]
    skipped_in_a_row: int


class LossScaleState(TypedDict, total=False):
    """State of a `LossScale` in a commit. It is empty in commits of other dtypes."""

    value: float
    good_steps: int


class LossGuard:
    """Guard against spikes of the loss or gradient norm, and against non-finite values."""

    def __init__(self, config: GuardsConfig) -> None:
        self._config = config
        self.restore({})

    def judge(self, *, loss: float, gradient_norm: float, non_finite: str) -> Judgement:
        """Judge a step by its mean loss and its gradient norm before clipping.

        `non_finite` is a message that names the ranks with a non-finite loss or gradient; "" if all
        are finite.
        """
        config = self._config
        if non_finite:
            return self._bad(config.non_finite, non_finite, finite=False)
        if config.spike != "off":
            reason = self._spike("loss", loss, self._losses) or self._spike(
                "gradient norm", gradient_norm, self._norms
            )
            if reason:
                return self._bad(config.spike, reason, finite=True)
            self._losses.values.append(loss)
            self._norms.values.append(gradient_norm)
        self.skipped_in_a_row = 0
        return Judgement(Action.STEP)

    def to_json(self) -> LossGuardState:
        return {
            "losses": list(self._losses.values),
            "gradient_norms": list(self._norms.values),
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def restore(self, data: LossGuardState) -> None:
        """Restore the state that `to_json` returned, or reset it if `data` is empty."""
        size = self._config.spike_window_steps
        self._losses = RobustWindow(size, data.get("losses", ()))
        self._norms = RobustWindow(size, data.get("gradient_norms", ()))
        self.skipped_in_a_row = data.get("skipped_in_a_row", 0)

    def _spike(self, name: str, value: float, window: RobustWindow) -> str:
        score = window.z_score(value)
        if score <= self._config.spike_z:
            return ""
        return (
            f"{name} {value:.4g} is {score:.1f} robust deviations (limit "
            f"{self._config.spike_z:g}) above the median {window.median:.4g} of "
            f"{len(window.values)} steps"
        )

    def _bad(self, policy: str, reason: str, *, finite: bool) -> Judgement:
        action = Action(policy)
        if action is Action.SKIP and self.skipped_in_a_row >= self._config.skips_in_a_row:
            action = Action.REWIND
            reason = f"{reason}, after {self.skipped_in_a_row} skipped steps in a row"
        if action is Action.SKIP:
            self.skipped_in_a_row += 1
        return Judgement(action, reason, finite)


class LossScale:
    """Dynamic loss scale for float16, whose range is 6e-8 to 65504 (Micikevicius et al. 2018,
    section 3.2).

    The scale starts at 16, since losses are sums: with 4,096 tokens, that is torch's 65536 for a
    mean. An overflow halves it, and 2,000 steps in a row without one double it. All ranks have the
    same scale.
    """

    FIRST = 2.0**4
    SMALLEST = 2.0**-14
    LARGEST = 2.0**24
    GOOD_STEPS = 2000

    def __init__(self) -> None:
        self.restore({})

    def restore(self, data: LossScaleState) -> None:
        self.value = data.get("value", self.FIRST)
        self._good_steps = data.get("good_steps", 0)

    def to_json(self) -> LossScaleState:
        return {"value": self.value, "good_steps": self._good_steps}

    def update(self, *, overflow: bool) -> str:
        """Adapt the loss scale after a step.

        Return why an overflow requires skipping the step; "" if it does not.
        """
        if overflow:
            self._good_steps = 0
        else:
            self._good_steps = self._good_steps + 1
        if self._good_steps == self.GOOD_STEPS:
            self.value = min(2 * self.value, self.LARGEST)
            self._good_steps = 0
        if not overflow or self.value <= self.SMALLEST:
            return ""
        self.value /= 2
        return f"float16 overflow in gradients; loss scale {2 * self.value:g} → {self.value:g}"


@dataclass(kw_only=True)
class Guards:
    config: RunConfig
    gang: Gang
    copies: int  # the number of copies of the model over all ranks
    emit: Callable[..., object]  # takes (name, step=, flush=, **data)
    store: Store | None = None  # where overrides are recorded; None: nowhere
    generation: int = 0  # number of this generation
    overrides: Overrides = field(default_factory=Overrides)  # those that this start applies
    growth: tuple[MemoryGrowthMonitor, ...] = ()  # monitors of memory growth; empty if they are off
    pace: PaceMonitor = field(default_factory=PaceMonitor)  # the detector of slowdowns
    # Keeps a snapshot of the GPU's memory; takes the step
    keep_snapshot: Callable[[int], object] = lambda _: None
    # The last step after which replicas had equal weights; None before a comparison
    agreed_step: int | None = None
    saved_step: int | None = None  # the last step that this start saved; None before the first save
    # The last step that was computed twice with equal results, or that this start began after
    repeated_step: int = 0

    def __post_init__(self) -> None:
        self.numbers = LossGuard(self.config.guards)
        if self.config.fsdp.compute_dtype == "float16":
            self.loss_scale = LossScale()
        else:
            self.loss_scale = None
        self._first_step: int | None = None  # of this generation

    def commit_fields(self, step: int) -> dict[str, Any]:
        """Return the guards' fields for the commit of `step`.

        The next sync compares the weights of all replicas.
        """
        self.saved_step = step
        if self.loss_scale:
            scale = {"loss_scale": self.loss_scale.to_json()}
        else:
            scale = {}
        return {
            "guards": self.numbers.to_json() | {"first_sample": self.overrides.first_sample} | scale
        }

    def resume(self, at: Position, extra: Mapping[str, Any]) -> Position:
        """Restore the guards' state from a commit's fields, and return the position at which to
        continue.

        This position is that of the commit, `at`. After a rewind it is later, because training
        skips all samples before the override's `first_sample`.
        """
        self.numbers.restore(extra.get("guards", {}))
        if self.loss_scale is not None:
            self.loss_scale.restore(extra.get("guards", {}).get("loss_scale", {}))
        self.repeated_step = at.step
        first = self.overrides.first_sample
        if at.cursor >= first:
            return at
        self.numbers.skipped_in_a_row = 0
        if self.gang.rank == 0:
            print(f"samples {at.cursor} to {first - 1} are skipped after a rewind", flush=True)
        return Position(at.step, first)

    def weights_checksum(self, step: int, module: torch.nn.Module) -> int:
        """Return the checksum of the weights if they must be compared after `step`, else 0."""
        interval = self.config.guards.hash_interval_steps
        if interval is None or self.copies == 1:
            return 0
        due = self.agreed_step is None or step == self.saved_step or step % interval == 0
        if due:
            return weights_checksum(module)
        return 0

    def compare_at_end(self, at: Position, module: torch.nn.Module) -> None:
        """Compare the weights of replicas after the last step; a collective.

        Raises DivergenceError if they differ.
        """
        if self.config.guards.hash_interval_steps is not None and self.copies > 1:
            sums = self.gang.gather_numbers([weights_checksum(module)])
            self._compare(at, [checksum for (checksum,) in sums], seen_at=at.step)

    def judge(self, at: Position, sync: StepSync, settle: Callable[[], object]) -> Judgement:
        """Decide whether to take or skip the step after position `at`, or to end the job; all ranks
        agree.

        `settle` waits for the in-flight save. Raises Rewind or TooManyRewinds if the job must go
        back to an older commit, and DivergenceError if the weights of replicas differ.
        """
        self._compare(at, [row.weights_checksum for row in sync.rows], seen_at=at.step + 1)
        changed = [rank for rank, row in enumerate(sync.rows) if row.changed_at_rest]
        if changed:
            found = (
                f"weights or optimizer state of {_names(changed)} changed at rest between steps "
                f"{at.step} and {at.step + 1}"
            )
            # A commit of that step may have been copied after the change
            self._go_back(at.step + 1, changed, found, limit=max(0, at.step - 1))
        non_finite = sync.non_finite
        before = self.numbers.skipped_in_a_row
        # A non-finite loss is no matter of scale
        overflow = bool(non_finite) and math.isfinite(sync.loss)
        skipped = ""
        if self.loss_scale is not None:
            skipped = self.loss_scale.update(overflow=overflow)
        if skipped:
            judgement = Judgement(Action.SKIP, skipped, finite=False)
        else:
            judgement = self.numbers.judge(
                loss=sync.loss, gradient_norm=sync.gradient_norm, non_finite=non_finite
            )
        if judgement.action is Action.REWIND:
            return self._rewind(at, judgement, first_bad=at.step + 1 - before, settle=settle)
        if judgement.action is Action.SKIP and self.gang.rank == 0:
            samples = [at.cursor, at.cursor + self.config.training.batch_size]
            self.emit(
                GUARD,
                step=at.step + 1,
                action=GuardAction.SKIP,
                reason=judgement.reason,
                samples=samples,
            )
            print(f"step {at.step + 1}: skipped: {judgement.reason}", flush=True)
        return judgement

    def compare_passes(self, step: int, own: Differences) -> None:
        """Compare two computations of a step on all ranks; a collective.

        Raises DivergenceError, which names the ranks with different results.
        """
        rows = self.gang.gather_numbers([float(differs) for differs in own])
        # A wrong gradient of one rank makes the reduced ones, and so the updates of others, wrong
        for name, differs in zip(Differences._fields, zip(*rows, strict=True), strict=True):
            ranks = [rank for rank, value in enumerate(differs) if value]
            if ranks:
                found = f"step {step}, computed twice, differs on {_names(ranks)} in its {name}"
                self._go_back(step, ranks, found, limit=self.repeated_step)
        self.repeated_step = step

    def record_pace(self, step: int, sync: StepSync, usd_per_second: float) -> None:
        data_seconds = [row.data_seconds for row in sync.rows]
        if self.gang.alone and not data_seconds[0]:
            return
        for drag in self.pace.note(
            sync.own_seconds, data_seconds, sync.step_seconds, usd_per_second
        ):
            figures = {"rank": drag.rank, "share": drag.share, "usd_per_hour": drag.usd_per_hour}
            self.emit(GUARD, step=step, action=drag.action, **figures, reason=drag.reason)

    def is_memory_running_out(self, needed_seconds: float) -> bool:
        """Return whether this rank's memory will soon be full, before the job is done.

        If so, record an event.
        """
        for watch in self.growth:
            reason = watch.look(needed_seconds)
            if reason:
                self.emit(GUARD, action=GuardAction.RENEW, rank=self.gang.rank, reason=reason)
                print(
                    f"rank {self.gang.rank}: {reason}; saved, to go on in new processes", flush=True
                )
                return True
        return False

    @contextmanager
    def catch_out_of_memory(self, step: int) -> Iterator[None]:
        """Return a context that converts an out-of-memory error into MicroBatchTooLarge.

        If micro-batches cannot be made smaller, the context raises BatchCannotBeSplit.
        """
        if self._first_step is None:
            self._first_step = step
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.keep_snapshot(step)
            if self.config.guards.out_of_memory == "stop":
                raise
            held = ""
            if step == self._first_step:
                held = memory_of_other_processes(self.gang.device)
            if held:
                # Such as a rank that was killed just now. A smaller micro-batch would be used for
                # the rest of the job.
                first = " ".join(str(error).split())[:200]
                raise errors.TrainingError(
                    f"rank {self.gang.rank}: other processes hold {held} of its GPU: {first}"
                ) from error
            self._split(error, step)

    def _split(self, error: BaseException, step: int) -> NoReturn:
        accumulation = self.config.training.gradient_accumulation_steps
        first = " ".join(str(error).split())[:200]
        rank = self.gang.rank
        try:
            more = more_micro_batches(self.config, self.gang.world_size, accumulation)
        except errors.BatchCannotBeSplit as refusal:
            raise errors.BatchCannotBeSplit(
                f"rank {rank}, step {step}: out of memory: {refusal}; {first}"
            ) from error
        place = f"rank {rank}, step {step}"
        reason = (
            f"{place}: out of memory in one of {accumulation} micro-batches; from the last "
            f"commit on with {more}"
        )
        if self.store is not None:
            record_split(self.store, generation=self.generation, rank=rank, accumulation=more)
        self.emit(
            GUARD,
            step=step,
            flush=True,
            action=GuardAction.SPLIT,
            rank=rank,
            accumulation=more,
            reason=reason,
        )
        raise errors.MicroBatchTooLarge(f"{reason}: {first}") from error

    def _compare(self, at: Position, sums: Sequence[float], *, seen_at: int) -> None:
        if not sums[0]:
            return
        odd, certain = find_divergent_ranks(sums, self.copies)
        if not odd:
            self.agreed_step = at.step
            return
        names = ", ".join(map(str, odd))
        found = (
            f"weights of rank {names} differ from those of {'their' if odd[1:] else 'its'} replicas"
        )
        if not certain:
            found = f"weights of ranks {names} differ, and no majority shows which are right"
        if self.agreed_step is None:
            found += f" at the start, step {at.step}"
        else:
            found += (
                f" after step {at.step}; they were equal after step {self.agreed_step}, to where "
                "the job goes back"
            )
            self._order_rewind(limit=self.agreed_step, first_sample=0, sound=False)
        self._tell(seen_at, GuardAction.DIVERGED, ranks=odd, reason=found)
        raise errors.DivergenceError(found)

    def _go_back(self, step: int, ranks: list[int], found: str, *, limit: int) -> NoReturn:
        found += f"; the job goes back to the newest commit up to step {limit}"
        self._order_rewind(limit=limit, first_sample=0, sound=False)
        self._tell(step, GuardAction.DIVERGED, ranks=ranks, reason=found)
        raise errors.DivergenceError(found)

    def _rewind(
        self, at: Position, judgement: Judgement, *, first_bad: int, settle: Callable[[], object]
    ) -> Judgement:
        guards = self.config.guards
        gone = self.overrides.rewinds
        if gone >= guards.max_rewinds:
            reason = f"{judgement.reason}; {gone} rewinds, the limit of guards.max_rewinds"
            if not judgement.finite:
                return Judgement(Action.STOP, reason, finite=False)
            raise errors.TooManyRewinds(f"step {at.step + 1}: {reason}")
        try:
            settle()  # the save in flight may be the commit to restore
        except errors.GenerationSuperseded:
            raise
        except errors.CheckpointError as error:
            print(f"step {at.step}: the last save did not become a commit: {error}", flush=True)
        limit = max(0, first_bad - 1 - guards.rewind_margin_steps)
        first_sample = at.cursor + self.config.training.batch_size
        back = f"back to the newest commit up to step {limit}, and on from sample {first_sample}"
        reason = f"step {at.step + 1}: {judgement.reason}; {back}"
        self._order_rewind(limit=limit, first_sample=first_sample, sound=True)
        self._tell(
            at.step + 1, GuardAction.REWIND, reason=reason, limit=limit, first_sample=first_sample
        )
        raise errors.Rewind(reason)

    def _order_rewind(self, *, limit: int, first_sample: int, sound: bool) -> None:
        if self.gang.rank == 0 and self.store is not None:
            own = {"generation": self.generation, "rank": 0}
            record_rewind(self.store, **own, limit=limit, first_sample=first_sample, sound=sound)

    def _tell(self, step: int, action: GuardAction, **data: Any) -> None:
        """Record the guard's event on rank 0.

        All ranks call this, and wait until the event is recorded.
        """
        if self.gang.rank == 0:
            self.emit(GUARD, step=step, flush=True, action=action, **data)
        self.gang.gather_numbers([0.0])


def weights_checksum(module: nn.Module) -> int:
    """Return the checksum of this rank's shards of all parameters, from 1 to 2**47."""
    return checksum(module.parameters())


def find_divergent_ranks(sums: Sequence[float], copies: int) -> tuple[list[int], bool]:
    """Return the ranks whose weights differ from those of their replicas, and whether a majority
    proves them wrong.

    `sums` has one checksum per rank. The ranks form `copies` equal groups of consecutive ranks,
    each with one copy of the model; ranks at the same position in their groups are replicas. If no
    majority in a set of replicas agrees, the whole set is returned.
    """
    shards = len(sums) // copies
    odd: list[int] = []
    certain = True
    for first in range(shards):
        ranks = range(first, len(sums), shards)
        (usual, count), *others = Counter(sums[rank] for rank in ranks).most_common()
        if not others:
            continue
        majority = 2 * count > len(ranks)
        certain = certain and majority
        odd += [rank for rank in ranks if not majority or sums[rank] != usual]
    return sorted(odd), certain


def apply_overrides(config: RunConfig, overrides: Overrides) -> RunConfig:
    """Return the configuration with the number of micro-batches that `overrides` has.

    If the configured number is at least as large, return the configuration unchanged.
    """
    accumulation = overrides.gradient_accumulation_steps
    if accumulation is None or accumulation <= config.training.gradient_accumulation_steps:
        return config
    return config.changed("training", gradient_accumulation_steps=accumulation)


def make_guards(
    spec: WorkerSpec, config: RunConfig, gang: Gang, *, copies: int, emit: Callable[..., object]
) -> Guards:
    """Build the guards of one rank.

    `copies` is the number of copies of the model that all ranks hold together.
    """
    return Guards(
        config=config,
        gang=gang,
        copies=copies,
        emit=emit,
        store=Store.open(spec.store_uri).sub(job_prefix(spec.job)),
        generation=spec.generation,
        overrides=Overrides.from_json(spec.overrides),
        growth=_growth_monitors(gang, spec.colocated_ranks)
        if config.guards.memory_growth == "renew"
        else (),
    )


def fit_micro_batch(
    guards: Guards, workload: Workload, spread: Spread, optimizer: torch.optim.Optimizer
) -> RunConfig:
    """Return the configuration with the smallest number of micro-batches per step for which memory
    suffices.

    All ranks must call this function together. They find the number once per job, with the first
    batch, and store it as an override, so that all later starts use the same micro-batches. For a
    sharded model the result has the configured number, since no rank can test such a model alone.
    Raises BatchCannotBeSplit if memory does not suffice for a single sample.
    """
    config = guards.config
    gang = guards.gang
    known = guards.overrides.gradient_accumulation_steps is not None
    if (
        config.training.micro_batch == "fixed"
        or known
        or not (gang.alone or config.parallel.mode == "ddp")
    ):
        return config
    cursor = Cursor(0, config.training.batch_size).share(gang.rank, gang.world_size)
    batch = workload.next_batch(spread.module, cursor)

    def fits(parts: int) -> bool:
        return try_micro_batch(
            workload, spread.module, batch, parts, has_state=bool(optimizer.state)
        )

    def tell(text: str) -> None:
        if gang.rank == 0:
            print(f"before the first step: {text}", flush=True)

    accumulation = fitting_accumulation(config, gang, fits, tell=tell)
    if gang.rank == 0 and guards.store is not None:
        record_split(guards.store, generation=guards.generation, rank=0, accumulation=accumulation)
        reason = f"tried before the first step: {accumulation} micro-batches fit"
        guards.emit(
            GUARD, action=GuardAction.SPLIT, rank=0, accumulation=accumulation, reason=reason
        )
    return apply_overrides(config, Overrides(gradient_accumulation_steps=accumulation))


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"


def _growth_monitors(gang: Gang, colocated_ranks: int) -> tuple[MemoryGrowthMonitor, ...]:
    own = os.getpid()
    host = MemoryGrowthMonitor(
        "memory",
        held=lambda: resident_bytes(own),
        left=host_bytes_left,
        sharers=max(1, colocated_ranks),
    )
    if gang.device.type != "cuda":
        return (host,)

    allocated = partial(torch.cuda.memory_allocated, gang.device)

    def left() -> int:
        # Held by torch's allocator, used by no tensor
        cached = torch.cuda.memory_reserved(gang.device) - allocated()
        return torch.cuda.mem_get_info(gang.device)[0] + cached

    return host, MemoryGrowthMonitor("memory of the GPU", held=allocated, left=left, sharers=1)
