"""Job of a script that keeps its own training loop. The job saves and exits only between two steps.

At certain steps, called syncs, all ranks agree whether to save and whether to stop. A sync is an
all-gather over gloo, about twice a second.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ebbflow.core.errors import InfraError, Outcome, describe_error
from ebbflow.core.events import EVALUATION, NOTICE, OUTCOME, STEP
from ebbflow.training.attach.guards import (
    LoopWatch,
    ScriptGuards,
    describe_resize,
    script_sha256,
    worst_loss,
)
from ebbflow.training.attach.standalone import release_job, write_result
from ebbflow.training.attach.state import (
    BatchSource,
    StrayReads,
    change_iteration,
    count_samples,
    find_enumerate,
    find_frozen,
    from_bytes,
    join_state,
    own_buffers,
    restore_buffers,
    restore_frozen,
    split_state,
    split_states,
)
from ebbflow.training.checkpoint.manifest import TensorEntry
from ebbflow.training.checkpoint.restore import Place, RestoreResult
from ebbflow.training.checkpoint.signing import signer, use_signing_key
from ebbflow.training.checkpoint.state import FurtherState, restore_rng, rng_name, to_bytes
from ebbflow.training.engine.parallel import Spread, refuse_unused_parameters
from ebbflow.training.engine.profiler import make_profiler
from ebbflow.training.engine.trainer_setup import (
    make_limits,
    make_save_schedule,
    meet_others,
    open_reporter,
    open_saver,
    report_restore,
)
from ebbflow.training.errors import AttachError, TrainingError, describe_exception
from ebbflow.training.gang import Gang, leave
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import LoopResult, Position, Stop
from ebbflow.training.save_controller import SaveController
from ebbflow.training.step_sync import Row, StepSync, exchange

_SYNC_SECONDS = 0.5
_MOST_STEPS = 100  # between two syncs
# Before SIGKILL, leave without a save if the gradients of a step are still accumulating
_LAST_SECONDS = 2.0

current: AttachedJob | None = None  # the job of this process


def refuse(error: TrainingError | InfraError) -> NoReturn:
    """Print the error in one line, and exit with the error's exit code."""
    release_job()
    print(f"ebbflow: {describe_error(error)}", file=sys.stderr, flush=True)
    raise SystemExit(error.outcome.exit_code) from error


class Stateful(Protocol):
    """An object whose state is saved with the job, such as a scheduler, a gradient scaler or
    averaged weights.
    """

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class AttachedJob:
    """The job to which `attach` has attached this process.

    Attributes:
        name: name of the job.
        step: number of completed steps; a step is one iteration of `batches` or `steps`.
        epoch: number of the current epoch, counted from 0.
        batch: number of completed batches of this epoch.
        resumed: whether a commit was restored.
    """

    _kept_steps = 0  # events of steps that are not emitted yet, because their loss may follow
    _max_steps = 0  # of the job; 0 if unknown
    _divided = False  # whether more ranks take fewer steps, because they divide each epoch
    # How a resumed run reads the same data if the job has no loader; "" if it may not
    _same_data = "random states"
    _by_library = False  # whether a library writes the state of model and optimizer
    _resized = ""  # why results may differ after a change of the number of ranks

    def __init__(
        self,
        spec: WorkerSpec,
        gang: Gang,
        model: nn.Module,
        optimizer: Optimizer | None,
        states: dict[str, Stateful],
    ) -> None:
        self.name = spec.job
        self.step = 0
        self.epoch = 0
        self.resumed = False
        self._spec = spec
        self._gang = gang
        self._model = model
        self._optimizer = optimizer
        self._states = states
        # The model and the optimizer whose tensors Ebbflow itself writes into a commit
        if self._by_library:
            self._saved = (nn.Module(), None)
        else:
            self._saved = (model, optimizer)
        self._config = config = spec.config
        use_signing_key(config.checkpoint.signing_key_env)
        signer()  # raises at once if this node lacks the key
        self._ends = contextlib.ExitStack()
        self._reporter, _ = self._ends.enter_context(open_reporter(spec, gang))
        self._former_handler = signal.getsignal(signal.SIGTERM)
        self._limits = make_limits(spec, gang, config, self._reporter.clock)
        self._saver = open_saver(spec, gang, self._reporter)
        if gang.rank == 0:
            schedule = make_save_schedule(spec, config, self._limits.terms)
        else:
            schedule = None
        saved = Spread(model=self._saved[0], module=self._saved[0], copies=1)
        self._saves = SaveController(
            config=config.checkpoint,
            rank=gang.rank,
            spread=saved,
            optimizer=self._saved[1],
            saver=self._saver,
            limits=self._limits,
            reporter=self._reporter,
            extra={},
            carried=self._capture,
            save_schedule=schedule,
        )
        self._guards = ScriptGuards(spec, config, gang, self._reporter)
        self._profiler = make_profiler(spec, config, gang, self._reporter)
        self._seed = torch.initial_seed()
        # Samples of the job, and of this epoch on all ranks
        self.batch = self._samples = self._epoch_samples = 0
        # The commit was made by another number of ranks, in mid-epoch
        self._in_other_batches = False
        self._source: BatchSource | None = None
        self._source_state: Any = None
        self._rng: dict[str, Tensor] = {}
        self._reads = self._begun = self._in_block = self._looping = False
        self._strays = StrayReads(states.values(), self.say)
        self._ends.enter_context(self._strays.watch())
        self._left_loop = self._closed = self._updated = self._forwarded = False
        self._owed = False  # a save was due while gradients were accumulating
        self._exit_code: int | None = None
        # Not None: a sync waits for the epoch's end; True: gradients are unused
        self._held: bool | None = None
        self._saved_step = -1
        self._next_sync = 0
        self._synced_at = 0.0
        self._synced_step = 0
        self._in_step = 0  # number of the step that was begun last
        generation = f"{spec.generation}-{spec.generation_id}"
        self._watch = LoopWatch(gang, generation, lambda: self._in_step if self._looping else 0)
        self._logged: dict[str, Any] = {}
        self._steps: list[
            tuple[int, tuple[float, float], dict[str, Any], Any]
        ] = []  # not emitted yet
        self._restore()
        self._watch_model()
        self._saver.prepare(*self._saved)
        self._reporter.clock.emit_phases()
        atexit.register(self._on_exit)

    def __enter__(self) -> AttachedJob:
        self._in_block = True
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            self._complete()
        elif not self._closed:
            if self._spec.agent_pid is None and self._gang.rank == 0:
                message = describe_exception(error)
                self._reporter.emit(
                    OUTCOME, step=self.step, outcome=str(Outcome.FAILED), message=message
                )
            self._close()

    def log(self, **values: Any) -> None:
        """Record the `loss` and `tokens` of this step, and metrics of your own under any other
        names.

        A loss given as a tensor is read later, so that the loop does not wait for the device.
        """
        self._logged |= {
            name: value.detach() if isinstance(value, Tensor) else value
            for name, value in values.items()
        }

    def epochs(self, count: int, loader: Any = None) -> Iterator[int]:
        """Yield the numbers of the remaining epochs.

        With `loader`, a plain `for` loop over it skips the batches that the last commit covers.
        Without `loader`, loop over `batches(loader)` instead.
        """
        if loader is not None:
            length = self._open_source(loader).length
            self._max_steps = count * (length or 0)
            iterate = type(loader).__iter__
            try:
                change_iteration(
                    loader, lambda loader: self._epoch(loader) if self._reads else iterate(loader)
                )
            except AttachError as error:
                refuse(error)
        with self._outermost_loop():
            while self.epoch < count:
                self._reads = True
                yield self.epoch
                self.epoch = self.epoch + 1
                self.batch = 0
                self._source_state = None
                self._epoch_samples = 0
                if self._held is not None:
                    held = self._held
                    self._held = None
                    self._sync(held)

    def batches(self, loader: Any, *, epochs: int | None = None) -> Iterator[Any]:
        """Yield the remaining batches of `epochs` epochs; without `epochs`, those of the current
        epoch of the job.
        """
        if epochs is None:
            if not self._looping:
                refuse(
                    AttachError(
                        "job.batches(loader) without epochs; fix: give it epochs, or loop over "
                        "job.epochs"
                    )
                )
            yield from self._epoch(loader)
            return
        for _ in self.epochs(epochs):
            yield from self._epoch(loader)

    def steps(self, max_steps: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, up to `max_steps` - 1."""
        self._max_steps = max_steps
        with self._outermost_loop():
            while self.step < max_steps:
                self._begin_step()
                with self._counting():
                    yield self.step
                self._end_step(1)

    @contextlib.contextmanager
    def _outermost_loop(self) -> Iterator[None]:
        if self._looping or self._closed:
            if self._closed:
                state = "has ended"
            else:
                state = "already runs a loop"
            refuse(
                AttachError(
                    f"job {self.name} {state}; fix: use one of job.batches, job.epochs and "
                    "job.steps, once"
                )
            )
        self._looping = True
        self.restore_random_states()
        self._synced_at = time.monotonic()
        try:
            yield
        except GeneratorExit:
            self._left_loop = True  # by break, or by an exception: known when the script ends
            raise
        finally:
            self._looping = False
        if not self._in_block:
            self._complete()

    def restore_random_states(self) -> None:
        """Restore the random states of the commit again, since code may have drawn random numbers
        after `attach`.

        Only the first call has an effect.
        """
        rng = self._rng
        self._rng = {}
        restore_rng(
            self._gang.rank, {rng_name(self._gang.rank, name): state for name, state in rng.items()}
        )

    def _open_source(self, loader: Any) -> BatchSource:
        if self._source is None or self._source.loader is not loader:
            try:
                self._source = BatchSource(loader, self._seed, self.say)
            except AttachError as error:
                refuse(error)
            if self._source_state is not None:
                self._source.load(self._source_state)
            if self._in_other_batches:
                self._find_batch(loader)
        return self._source

    def _find_batch(self, loader: Any) -> None:
        """Choose the batch at which to continue an epoch that a different number of ranks began.

        Samples may repeat.
        """
        size = (getattr(loader, "batch_size", None) or 1) * self._gang.world_size
        self.batch, rest = divmod(self._epoch_samples, size)
        self._in_other_batches = False
        if rest:
            self._resized += f"; {rest} samples of epoch {self.epoch} are read twice"

    def _epoch(self, loader: Any) -> Iterator[Any]:
        source = self._open_source(loader)
        self._reads = False
        self._reporter.enter("data", self.step + 1)
        if self.batch and (place := find_enumerate(sys._getframe(1))):
            self.say(
                f"{place} counts batches from 0 after a resume; fix, if numbers matter: "
                "enumerate(loader, job.batch)"
            )
        for batch in source.epoch(self.epoch, self.batch):
            samples = count_samples(batch) * self._gang.world_size
            if self._samples < self._guards.first_sample:
                self.batch = self.batch + 1
                self._samples = self._samples + samples
                self._epoch_samples += samples
                continue
            self._begin_step()
            with self._counting():
                yield batch
            self.batch += 1
            self._epoch_samples += samples
            self._end_step(samples, last=source.length is not None and self.batch >= source.length)
        self._reporter.enter("evaluation", self.step)

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        """Count the current step even if the user's code leaves the loop in the middle, after the
        optimizer's step.
        """
        self._strays.step = self._in_step
        try:
            yield
        except GeneratorExit:
            if self._updated:
                self.batch += 1
                self.step += 1
            raise
        finally:
            self._strays.step = 0

    def _begin_step(self) -> None:
        if not self._begun:
            self._begun = True
            self._reporter.clock.emit_phases()
        self._in_step = self.step + 1
        if self._profiler is not None:
            self._profiler.reach(self._in_step)
        self._reporter.enter("forward", self._in_step)

    def _end_step(self, samples: int, *, last: bool = False) -> None:
        """Count the step, and sync if a sync is due.

        After the last step of an epoch, the sync waits until the user's code at the end of the
        epoch has run. Otherwise a commit could precede that code, and a script that resumed from
        this commit would run the code without the variables of the epoch, such as the epoch's last
        loss.
        """
        self.step += 1
        self._samples += samples
        unsettled = self._optimizer is not None and not self._updated
        self._updated = False
        self._record(samples)
        self._after_step()
        if self.step >= self._next_sync or (self._gang.alone and self._limits.drain_requested):
            if last:
                self._held = unsettled
            else:
                self._sync(unsettled)
        self._reporter.enter("data", self.step + 1)

    def _after_step(self) -> None:
        facts = {"samples": self._samples, "steps": self._max_steps, "divided": self._divided}
        self._guards.probe(
            self.step, self._model, **facts, loader=self._source and self._source.loader
        )
        self._guards.rehearse(self.step, self._max_steps, self._limits)

    def _record(self, samples: int, learning_rate: float | None = None) -> None:
        self._reporter.mark_trained(self.step)
        data: dict[str, Any] = {"tokens": self._logged.pop("tokens", samples)}
        data["seconds"] = seconds = self._reporter.clock.take()
        if self._optimizer is not None:
            learning_rate = self._optimizer.param_groups[0]["lr"]
        if isinstance(learning_rate, float):
            data["learning_rate"] = learning_rate
        data |= (
            self._saves.record_step_time(seconds, saving=self._saver.busy) | self._guards.end_pace()
        )
        loss = self._guards.spoil(self._logged.pop("loss", None))
        self._steps.append((self.step, (time.time(), time.monotonic()), data, loss))
        if self._logged:
            metrics = {name: float(value) for name, value in self._logged.items()}
            self._logged = {}
            if self._gang.rank == 0:
                self._reporter.emit(EVALUATION, step=self.step, metrics=metrics)
            self._saves.extra["metrics"] = {**metrics, "step": self.step}

    def _flush_steps(self, keep: int = 0) -> float:
        """Emit the pending step events, except the last `keep`.

        Return the worst loss in these events, or 0 if none.
        """
        losses = []
        count = len(self._steps) - keep
        for step, at, data, loss in self._steps[:count]:
            if loss is not None:
                losses.append(float(loss))
                if math.isfinite(losses[-1]):
                    data["loss"] = losses[-1]
            self._reporter.emit(STEP, step=step, at=at, **data)
        del self._steps[:count]
        return worst_loss(losses)

    def _sync(self, unsettled: bool) -> None:
        """Agree with the other ranks whether to save and whether to stop, and do both as agreed.

        Collective.
        """
        sync = self._agree(unsettled)
        stopping = sync.stop is not Stop.NONE
        wanted = sync.stop is not Stop.NONE or sync.save_due
        if wanted and not sync.settled and sync.last_save[1] > _LAST_SECONDS:
            self._next_sync = self.step + 1
            return
        if sync.settled:
            self._save(sync)
            if self._optimizer is None:
                self._saver.before_step()
        if stopping:
            self._leave(sync.stop.outcome, self._limits.describe(sync.stop))
        self._plan_next_sync(sync)

    def _save(self, sync: StepSync) -> None:
        last = sync.stop not in (Stop.NONE, Stop.INTERRUPTED)
        self._saves.save_if_due(Position(self.step, self._samples), sync, last=last)

    def _agree(self, unsettled: bool = False) -> StepSync:
        """Exchange whether each rank wants to save or to stop, and return the common result.

        Collective.
        """
        saves = self._saves
        steps = max(1, self.step - self._synced_step)
        row = Row(
            step=self.step,
            cursor=self._samples,
            loss_sum=self._flush_steps(self._kept_steps),
            weight=1.0,
            square_sum=0.0,
            flops=0.0,
            compute_seconds=(time.monotonic() - self._synced_at) / steps,
            data_seconds=0.0,
            stop=self._limits.stop(),
            stop_seconds=self._limits.stop_seconds,
            own_seconds=self._guards.take_own() / steps,
            unsettled=unsettled,
            **saves.row_fields(self.step, owed=self._owed),
        )
        sync = exchange(self._gang, row)
        self._owed = sync.save_due and not sync.settled
        self._guards.record_pace(self.step, sync, self._limits.usd_per_second)
        if sync.failed_save:
            self._saver.abandon(sync.failed_save)
        found = {"source": self._source, "same_data": self._same_data, "stray": self._strays.found}
        has_optimizer = self._optimizer is not None or self._by_library
        self._guards.promise(
            self.step, self._model, has_optimizer=has_optimizer, resized=self._resized, **found
        )
        try:
            bad = self._guards.judge(sync, self._synced_step, self._samples, self._saver.wait)
        except TrainingError as error:
            if self._spec.agent_pid is None:  # otherwise the agent starts the ranks again
                refuse(error)
            raise
        if bad:
            self._leave(Outcome.NON_FINITE, f"step {self.step}: {bad}; the last commit stands")
        return sync

    def _plan_next_sync(self, sync: StepSync) -> None:
        """Choose the step of the next sync, the same on all ranks, from the time that rank 0 takes
        per step.
        """
        seconds = max(sync.rows[0].compute_seconds, 1e-6)
        self._next_sync = self.step + max(1, min(_MOST_STEPS, int(_SYNC_SECONDS / seconds)))
        if self._config.checkpoint.interval == "steps":
            interval = self._config.checkpoint.interval_steps
            self._next_sync = min(self._next_sync, (self.step // interval + 1) * interval)
        self._synced_at = time.monotonic()
        self._synced_step = self.step

    def _capture(self, step: int) -> dict[str, Any]:
        """Return the job's fields for a commit, and give the saver the tensors to which these
        fields refer.
        """
        shared: dict[str, Tensor] = {}
        forms = split_states(self._states, shared)
        if not self._gang.alone:
            own = own_buffers(self._model)
        else:
            own = {}
        if self._source is not None:
            source = self._source.state()
        else:
            source = None
        own["attach"] = to_bytes({"seed": self._seed, "source": split_state(source, "source", own)})
        self._saver.further = FurtherState(own, shared)
        self._saved_step = step
        at = {
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self._epoch_samples,
            "seed": self._seed,
        }
        at |= {"states": forms, "frozen": None if self._by_library else find_frozen(self._model)}
        at["resized"] = self._resized
        return {"attach": at, "guards": self._guards.numbers.to_json()}

    def _restore(self) -> None:
        """Restore the newest commit, if there is one. Collective."""
        if not self._spec.candidates:
            return
        shared: dict[str, Tensor] = {}
        split_states(self._states, shared)

        def place(name: str, entry: TensorEntry) -> Tensor:
            there = shared.get(name)
            if there is None or tuple(there.shape) != entry.shape or not isinstance(there, DTensor):
                return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            return there

        restored = self._read_commit(place)
        if restored is None:
            return
        at = restored.extra.get("attach")
        if at is None:
            raise AttachError(
                f"{restored.key} was not made by attach; fix: give this job another name"
            )
        if lost := sorted(at["states"].keys() - self._states.keys()):
            raise AttachError(
                f"{restored.key} has the state of {', '.join(lost)}, which attach was not given; "
                f"fix: pass {', '.join(f'{name}=…' for name in lost)}, or give this job another "
                "name"
            )
        for name, one in self._states.items():
            if name in at["states"]:
                one.load_state_dict(join_state(at["states"][name], restored.further.shared))
            else:
                self.say(f"{restored.key} has no state of {name}, which begins anew")
        self.epoch = at["epoch"]
        self.batch = at["batch"]
        self._epoch_samples = at.get("samples", 0)
        self._resized = at.get("resized", "")
        if restored.world_size != self._gang.world_size:
            self._seed = at.get("seed", self._seed)
            self._in_other_batches = self._epoch_samples > 0
            self._resized = describe_resize(restored.world_size, self._gang.world_size)
        restore_frozen(self._model, at.get("frozen"), self.say)
        if "attach" in (own := restored.further.own):
            kept = from_bytes(own["attach"])
            self._seed = kept["seed"]
            self._source_state = join_state(kept["source"], own)
        restore_buffers(self._model, own)

    def _read_commit(self, place: Place) -> RestoreResult | None:
        """Read the newest commit into model and optimizer, and continue from its step.

        Collective.
        """
        alive = partial(self._reporter.enter, "restore", 0)
        if self._spec.candidates:
            alive()
        begun = time.monotonic()
        meet = partial(meet_others, self._gang, self._config, alive)
        working = self._gang.announce(alive)
        restored = self._saver.restore(
            self._spec.candidates, *self._saved, place=place, progress=working, meet=meet
        )
        if restored is None:
            return None
        self.step = restored.step
        self._samples = restored.extra["cursor"]
        self._next_sync = self._synced_step = self._saved_step = self.step
        self._guards.numbers.restore(restored.extra.get("guards", {}))
        self.resumed = True
        if restored.rng == "restored":
            self._rng = restored.further.own
        if self._saves.save_schedule is not None:
            self._saves.save_schedule.remember(restored.extra.get("exposed_seconds", 0.0))
            report_restore(self._reporter, restored, time.monotonic() - begun)
        self.say(f"job {self.name} goes on from step {self.step}")
        return restored

    def _watch_model(self) -> None:
        """Register hooks on the optimizer's steps and on the model's forward passes."""
        if self._optimizer is not None:
            self._optimizer.register_step_pre_hook(self._before_optimizer_step)
            self._optimizer.register_step_post_hook(self._on_optimizer_step)
        if not hasattr(self._model, "_orig_mod") and self._model._compiled_call_impl is None:
            self._model.register_forward_pre_hook(self._on_forward)
            self._guards.time_model(self._model)

    def _before_optimizer_step(self, *_: Any) -> None:
        if self._forwarded:
            refuse_unused_parameters(self._model)
        self._forwarded = False
        self._saver.before_step()

    def _on_optimizer_step(self, *_: Any) -> None:
        self._updated = True
        self._reporter.mark_trained(self._in_step)
        self._reporter.clock.begin_own()

    def _on_forward(self, module: nn.Module, _: Any) -> None:
        """Report whether the model is evaluated or trained, because the agent has a hang threshold
        for each phase.
        """
        if not module.training:
            self._reporter.enter("evaluation", self.step)
        elif self._looping:
            self._forwarded = torch.is_grad_enabled()
            self._reporter.enter("forward", self.step + 1)

    def _leave(self, outcome: Outcome, message: str) -> NoReturn:
        at = Position(self.step, self._samples)
        try:
            self._saves.finish()
        except TrainingError as error:
            message = f"{message}; the last save did not become a commit: {error}"
        message = f"{message}; {self._saves.describe_resume_point(at)}"
        self._end(outcome, message)
        self.say(f"job {self.name}, step {self.step}: {message}")
        self._exit_code = outcome.exit_code
        raise SystemExit(self._exit_code)

    def _complete(self) -> None:
        """Make the final commit and end the job. Collective."""
        if self._closed:
            return
        self._watch.leave(self.step)
        self._reporter.enter("evaluation", self.step)
        try:
            # A script that left by break may have destroyed the group
            if self._gang.alone or dist.is_initialized():
                self._agree()  # all ranks are here, and the last losses are judged
            self._flush_steps()
            if self._saved_step != self.step and self.step > 0:
                self._saves.save(Position(self.step, self._samples))
            self._saves.finish()
        except TrainingError as error:
            refuse(error)
        self._reporter.enter("done", self.step)
        self._end(Outcome.COMPLETED, "", self._digest())

    def _digest(self) -> str | None:
        if self._by_library:
            return None
        return script_sha256(self._model)

    def _end(self, outcome: Outcome, message: str, sha256: str | None = None) -> None:
        if self._gang.rank == 0:
            self._reporter.emit(
                OUTCOME,
                step=self.step,
                flush=True,
                outcome=str(outcome),
                weights_sha256=sha256,
                message=message,
            )
        if self._spec.result_path:
            write_result(
                Path(self._spec.result_path), LoopResult(outcome, self.step, message, sha256)
            )
        self._close()

    def close_at_exit(self) -> None:
        """Complete the job if the script left its loop with `break`, and close it."""
        if self._left_loop and not self._closed and not hasattr(sys, "last_value"):
            self._complete()
        self._close()

    def _on_exit(self) -> None:
        self.close_at_exit()
        if self._exit_code is not None:
            leave(self._exit_code)  # torch aborts in some exits after a gloo group

    def _close(self) -> None:
        global current
        if self._closed:
            return
        self._closed = True
        self._flush_steps()
        self._saver.close()
        self._ends.close()
        signal.signal(signal.SIGTERM, self._former_handler)
        release_job()
        current = None

    def say(self, text: str) -> None:
        """Print a line if this is rank 0."""
        if self._gang.rank == 0:
            print(f"ebbflow: {text}", flush=True)
            if text.startswith("reading"):
                self._reporter.emit(NOTICE, step=self.step, message=text)
