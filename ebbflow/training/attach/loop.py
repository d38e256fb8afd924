"""The training loop of a script or framework, which Ebbflow follows step by step.

The job saves and exits only between two steps. At certain steps, called syncs, all ranks agree
whether to save and whether to stop. A sync is an all-gather over gloo, about twice a second.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome, describe_error
from ebbflow.core.events import NOTICE, OUTCOME
from ebbflow.core.json_values import JsonObject
from ebbflow.training.attach import exits
from ebbflow.training.attach.capture import JobState
from ebbflow.training.attach.guards import (
    LoopWatch,
    ScriptGuards,
    describe_promise,
    make_script_guards,
)
from ebbflow.training.attach.script_state import ScriptWatch
from ebbflow.training.attach.standalone import (
    end_observer,
    release_job,
    write_result,
)
from ebbflow.training.attach.state import (
    StrayReads,
    count_samples,
    from_bytes,
    join_state,
    split_state,
)
from ebbflow.training.attach.steps import StepLog, SyncSchedule
from ebbflow.training.checkpoint.signing import signer, use_signing_key
from ebbflow.training.checkpoint.state import FurtherState, restore_rng, rng_name, to_bytes
from ebbflow.training.engine.parallel import Spread, refuse_unused_parameters
from ebbflow.training.engine.profiler import make_step_watches
from ebbflow.training.errors import (
    AttachError,
    TrainingError,
    describe_exception,
    redact_secrets,
)
from ebbflow.training.gang import Gang, leave
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.limits import Position, Stop
from ebbflow.training.metric_values import MetricGate, emit_evaluation
from ebbflow.training.reporter import Reporter
from ebbflow.training.save_controller import SaveController, make_save_schedule
from ebbflow.training.session import (
    JobSession,
    make_limits,
    make_rehearsal,
    open_reporter,
    open_saver,
)
from ebbflow.training.step_sync import Row, StepSync

# Before SIGKILL, leave without a save if the gradients of a step are still accumulating
_LAST_SECONDS = 2.0

current: AttachedLoop | None = None  # the loop of this process's job
was_opened = False  # whether this process ever had a job


class AttachedLoop:
    """The loop of the job to which `attach` has attached this process.

    Args:
        kept_steps: number of the newest step events that wait for a loss that is logged later.

    Attributes:
        name: name of the job.
        step: number of completed steps.
        samples: number of samples that all ranks have read since the job began.
        resumed: whether a commit was restored.
        saved_step: the last step that this process saved; -1 before the first save.
        max_steps: number of steps of the job; 0 if unknown.
        script: looks at the script's variables.
        divided: whether more ranks take fewer steps, because they divide each epoch.
    """

    _completed = False  # whether all steps of the job are taken

    def __init__(
        self, spec: WorkerSpec, gang: Gang, state: JobState, *, kept_steps: int = 0
    ) -> None:
        global current, was_opened
        was_opened = True
        self._pid = os.getpid()
        self.name = spec.job
        self.step = 0
        self.samples = 0
        self.resumed = False
        self.saved_step = -1
        self.max_steps = 0
        self.divided = False
        self._in_step = 0  # number of the step that was begun last
        self._begun = False  # whether a step was begun
        self._running = False  # whether the script is in its loop
        self._left = False  # whether the script left its loop by `break` or an exception
        self._in_block = False  # whether the end of a `with` block completes the job
        self._closed = False
        self._older_error = getattr(sys, "last_value", None)  # of a notebook cell before
        self._exit_code: int | None = None
        self._updated = False  # whether the optimizer has stepped since the last step of the loop
        self._forwarded = False  # whether gradients were computed since the optimizer's last step
        self._save_owed = False  # whether a save was due while gradients were accumulating
        # Whether the optimizer's steps are the steps of this epoch, whose loop the job cannot see
        self._counts_updates = False
        self._update_pending = (
            False  # whether such a step waits for the loss that is logged after it
        )
        self._first_step_of_epoch = 0
        self._forward_samples = 0  # samples of this rank in the forward passes of such a step
        # A sync that waits for the end of the epoch: whether gradients are unused; None if none
        self._held_sync: bool | None = None
        self._rng: dict[str, Tensor] = {}
        self._spec = spec
        self._state = state
        use_signing_key(spec.config.checkpoint.signing_key_env)
        signer()  # raises at once if this node lacks the key
        self._ends = contextlib.ExitStack()
        reporter, _ = self._ends.enter_context(open_reporter(spec, gang))
        self._former_handler = signal.getsignal(signal.SIGTERM)
        self.session = _open_session(spec, gang, spec.config, reporter, state, self._capture)
        self._guards = ScriptGuards(self.session)
        self._syncs = SyncSchedule(spec.config.checkpoint)
        self.step_log = StepLog(reporter, kept_steps)
        self._metrics = MetricGate(self.record_notice)
        self._step_watches = make_step_watches(
            spec, spec.config, gang, reporter, is_over=lambda: self._completed
        )
        self._strays = StrayReads(state.stateful_objects, self.say)
        self._ends.enter_context(self._strays.watch())
        self.script = ScriptWatch(
            lambda: state.saved_objects, restores_generators=state.commits_guards
        )
        self._watch = LoopWatch(
            gang,
            f"{spec.generation}-{spec.generation_id}",
            lambda: self._in_step if self._running else 0,
        )
        self._restore()
        self._watch_model()
        self.session.saver.prepare(self.session.saves.spread.module, self.session.saves.optimizer)
        reporter.clock.emit_phases()
        self._watch_exit()
        current = self

    @property
    def is_saving(self) -> bool:
        return self.session.saver.busy

    @property
    def is_running(self) -> bool:
        return self._running

    @property
    def skips_samples(self) -> bool:
        """Whether the next samples are to be skipped, because of a rewind."""
        return self.samples < self._guards.first_sample

    def say(self, text: str) -> None:
        """Print a line if this is rank 0."""
        if self.session.gang.rank == 0:
            print(f"ebbflow: {text}", flush=True)

    def tell_if_complete(self, *, is_complete: bool) -> None:
        """If the resumed job has no step left, print this, because the user's code may not expect
        it.
        """
        if self.resumed and is_complete:
            self.say(
                f"job {self.name} is complete at step {self.step}, so its loop takes no step; to train "
                "anew, give another name: attach(…, name=…) or EBBFLOW_JOB"
            )

    def record_notice(self, text: str) -> None:
        """Print a line, and record it as an event, if this is rank 0."""
        self.say(text)
        if self.session.gang.rank == 0:
            self.session.reporter.emit(NOTICE, step=self.step, message=text)

    def enter_block(self) -> None:
        """Complete the job at the end of the script's `with` block, and not already at the end of
        its loop.
        """
        self._in_block = True

    def leave_block(self, error: BaseException | None) -> None:
        """At the end of the `with` block, complete the job or record the error that ended the
        block.
        """
        if self._is_fork:
            return
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.complete()
        elif not self._closed:
            if isinstance(error, SystemExit):
                self._record_exit(exits.describe_exit(error))
            else:
                self._record_failure(error)
            self._close()

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """Run the script's outermost loop in this context, and complete the job when the loop ends."""
        if self._running or self._closed:
            state = "has ended" if self._closed else "already runs a loop"
            refuse(
                AttachError(
                    f"job {self.name} {state}; fix: use one of job.batches, job.epochs and "
                    "job.steps, once"
                )
            )
        self._running = True
        self.script.look()
        self.restore_random_states()
        self._syncs.start_clock()
        try:
            yield
        except GeneratorExit:
            self._left = True  # by break, or by an exception: known when the script ends
            if self._judges_exit:
                exits.mark_pending_exit(sys._getframe())
            raise
        finally:
            self._running = False
        if not self._in_block:
            self.complete()

    def restore_random_states(self) -> None:
        """Restore the commit's random states again, because code after `attach` may have drawn
        numbers.

        Only the first call has an effect.
        """
        rank = self.session.gang.rank
        states = {rng_name(rank, name): state for name, state in self._rng.items()}
        self._rng = {}
        restore_rng(rank, states)

    @contextlib.contextmanager
    def counting(
        self, samples: int, count_batch: Callable[[int], object] | None = None
    ) -> Iterator[None]:
        """Within the context, count the current step even if the user's code leaves the loop early.

        The step, of so many samples over all ranks, counts if the optimizer has stepped.
        """
        self._strays.step = self._in_step
        try:
            yield
        except GeneratorExit:
            if self._updated:
                self._updated = False
                self.step += 1
                self.samples += samples
                if not self._closed and not self._is_fork:
                    self._record(samples, None)
                if count_batch is not None:
                    count_batch(samples)
            raise
        finally:
            self._strays.step = 0

    def begin_step(self) -> None:
        self._end_fork()
        reporter = self.session.reporter
        if not self._begun:
            self._begun = True
            reporter.clock.emit_phases()
        self._in_step = self.step + 1
        for reach in self._step_watches:
            reach(self._in_step)
        reporter.enter("forward", self._in_step)

    def begin_framework_step(self) -> None:
        """Begin a step of a loop that a framework runs, without `run`."""
        if not self._begun:
            self.script.look()
        self._running = True
        self.begin_step()

    def end_step(self, samples: int, *, last: bool = False) -> None:
        """Count the step, and sync if a sync is due.

        After the last step of an epoch, the sync waits until the user's code at the end of the
        epoch has run. Otherwise a commit could precede that code, and a script that resumed from
        this commit would run the code without the variables of the epoch, such as the epoch's last
        loss.
        """
        unsettled = self._state.optimizer is not None and not self._updated
        self._updated = False
        self.count_step(samples)
        if self.sync_is_due:
            if last:
                self._held_sync = unsettled
            else:
                self._sync(unsettled)
        self.session.reporter.enter("data", self.step + 1)

    def begin_epoch(self, *, counts_updates: bool) -> None:
        """Begin an epoch.

        Args:
            counts_updates: whether to count the optimizer's steps until the job reads batches itself
                (`read_batches`). The job then saves at the end of the epoch only: a commit in the
                middle would not have the place in a loop that the job cannot see.
        """
        self._counts_updates = counts_updates
        self._first_step_of_epoch = self.step

    def read_batches(self) -> None:
        """Count batches instead of the optimizer's steps in this epoch."""
        self._counts_updates = False

    def end_epoch(self, epoch: int) -> None:
        """Sync at the end of an epoch, if the last step's sync was held back for it.

        Also sync if the epoch counted the optimizer's steps.
        """
        if self._counts_updates:
            self._count_update()
            self._counts_updates = False
            if self.step == self._first_step_of_epoch:
                refuse(
                    AttachError(
                        f"job.epochs: no step was counted in epoch {epoch}, since no optimizer given "
                        "to attach took one; fix: for batch in job.batches(loader) in the epoch, or "
                        "job.steps(n) in place of job.epochs"
                    )
                )
            self._sync(False)
            return
        if self._held_sync is not None:
            unsettled = self._held_sync
            self._held_sync = None
            self._sync(unsettled)

    def count_step(self, samples: int, learning_rate: float | None = None) -> None:
        """Count the step, and record its event."""
        self._end_fork()
        self.step += 1
        self.samples += samples
        self._record(samples, learning_rate)
        self._after_step()

    def skip_batch(self, samples: int) -> None:
        """Count the samples of a batch that is skipped after a rewind."""
        self.samples += samples

    @property
    def sync_is_due(self) -> bool:
        session = self.session
        stops_alone = session.gang.alone and session.limits.drain_requested
        return self._syncs.is_due(self.step) or stops_alone

    def agree(self, unsettled: bool = False) -> StepSync:
        """Exchange whether each rank wants to save or to stop, and return the common result.

        Exit if the losses since the last sync are bad. Collective.

        Args:
            unsettled: whether gradients are accumulated that no optimizer step has used.
        """
        session = self.session
        row = Row(
            step=self.step,
            cursor=self.samples,
            loss_sum=self.step_log.flush(all_steps=False),
            weight=1.0,
            square_sum=0.0,
            flops=0.0,
            compute_seconds=self._syncs.seconds_per_step(self.step),
            data_seconds=0.0,
            stop=session.limits.stop(),
            own_seconds=self._syncs.mean_of_steps(self._guards.take_own(), self.step),
            unsettled=unsettled,
        )
        sync = session.sync(session.with_save_request(row, save_owed=self._save_owed))
        self._save_owed = sync.save_due and not sync.settled
        self._guards.record_pace(self.step, sync)
        self._guards.promise(self.step, self._describe_promise())
        try:
            bad = self._guards.judge(sync, self._syncs.synced_step, self.samples)
        except TrainingError as error:
            if self._spec.agent_pid is None:  # otherwise the agent starts the ranks again
                refuse(error)
            raise
        if bad:
            self.leave(Outcome.NON_FINITE, f"step {self.step}: {bad}; the last commit stands")
        return sync

    def postpone_sync(self) -> None:
        """Repeat the sync after the next step, because gradients are being accumulated now."""
        self._syncs.postpone(self.step)

    def plan_next_sync(self, sync: StepSync) -> None:
        self._syncs.plan_next(self.step, sync.rows[0].compute_seconds)

    def save(self, sync: StepSync | None = None) -> None:
        """Save if `sync`, on which the ranks agreed, asks for it; without `sync`, save always.
        Collective.
        """
        at = Position(self.step, self.samples)
        if sync is None:
            self.session.saves.save(at)
        else:
            last = sync.stop not in (Stop.NONE, Stop.INTERRUPTED)
            self.session.save_if_due(at, sync, last=last)

    def leave_if_stopped(self, sync: StepSync) -> None:
        """End the job and this process if the ranks agreed to stop."""
        if sync.stop is not Stop.NONE:
            self.leave(sync.stop.outcome, self.session.limits.describe(sync.stop))

    def leave(self, outcome: Outcome, message: str) -> NoReturn:
        """End the job with the outcome, and exit with its exit code."""
        session = self.session
        at = Position(self.step, self.samples)
        message = session.finish_saves(message, fatal=None)
        message = f"{message}; {session.saves.describe_resume_point(at)}"
        self._end(outcome, message)
        self.say(f"job {self.name}, step {self.step}: {message}")
        self._exit_code = outcome.exit_code
        raise SystemExit(self._exit_code)

    def complete(self) -> None:
        """Make the final commit and end the job. Collective."""
        if self._closed:
            return
        self._end_fork()
        session = self.session
        self._watch.leave(self.step)
        session.reporter.enter("evaluation", self.step)
        try:
            # A script that left by break may have destroyed the group
            if session.gang.alone or dist.is_initialized():
                self.agree()  # all ranks are here, and the last losses are judged
            self.step_log.flush()
            if self.saved_step != self.step and self.step > 0:
                self.save()
            session.saves.finish()
        except TrainingError as error:
            refuse(error)
        session.reporter.enter("done", self.step)
        self._completed = True
        self._end(Outcome.COMPLETED, "", self._state.digest())

    def leave_exit_to_caller(self) -> None:
        """Leave the exit code to the caller, who has caught the SystemExit that the job raised."""
        self._exit_code = None

    def close_at_exit(self) -> None:
        """At the script's end, close the job, and complete it if the script left its loop with
        `break`.
        """
        if self._is_fork:
            return
        error = getattr(sys, "last_value", None)  # which ended the script, unless it is older
        if error is self._older_error:
            error = None
        if not self._closed and error is not None:
            self._record_failure(error)
        elif not self._closed and self._judges_exit and exits.found is not None:
            self._record_exit(exits.found)
        elif self._left and not self._closed:
            self.complete()
        self._close()

    @property
    def _is_fork(self) -> bool:
        """Whether this process is a fork that the script made of the rank's process, which owns the
        job.
        """
        return os.getpid() != self._pid

    def _record_failure(self, error: BaseException) -> None:
        """Record that the error ended the script. With an agent, the agent records it."""
        outcome = Outcome.FAILED
        if isinstance(error, KeyboardInterrupt):
            outcome = Outcome.INTERRUPTED
        elif isinstance(error, TrainingError | InfraError):
            outcome = error.outcome
        self._record_end(outcome, describe_exception(error))

    def _record_exit(self, end: exits.ProgramExit) -> None:
        """Record that the script has ended its process with a code other than 0."""
        outcome = Outcome.INTERRUPTED if end.is_interrupt else Outcome.FAILED
        self._record_end(outcome, end.message)

    def _record_end(self, outcome: Outcome, message: str) -> None:
        if self._judges_exit and self.session.gang.rank == 0:
            self.session.reporter.emit(
                OUTCOME,
                step=self.step,
                outcome=str(outcome),
                message=redact_secrets(message),
            )

    def close_refused(self, error: TrainingError | InfraError) -> None:
        """Close the job, which the error ends. With an agent, the agent does so."""
        if self._judges_exit and not self._closed and not self._is_fork:
            self._record_failure(error)
            self._close()

    @property
    def _judges_exit(self) -> bool:
        """Whether this process records how it ends, since no agent does."""
        return self._spec.agent_pid is None

    def _describe_promise(self) -> JsonObject:
        state = self._state
        return describe_promise(
            state.model,
            has_optimizer=state.optimizer is not None or state.by_library,
            source=state.source,
            same_data=state.same_data,
            resized=state.resized,
            stray=self._strays.found,
            watch=self.script,
        )

    def _sync(self, unsettled: bool) -> None:
        """Agree with the other ranks whether to save and whether to stop, and act on the result.

        Collective.
        """
        sync = self.agree(unsettled)
        wanted = sync.stop is not Stop.NONE or sync.save_due
        _, seconds_left = sync.last_save
        if wanted and not sync.settled and seconds_left > _LAST_SECONDS:
            self.postpone_sync()
            return
        if sync.settled:
            self.save(sync)
            if self._state.optimizer is None:
                self.session.saver.before_step()
        self.leave_if_stopped(sync)
        self.plan_next_sync(sync)

    def _after_step(self) -> None:
        source = self._state.source
        self._guards.probe(
            self.step,
            self._state.model,
            samples=self.samples,
            steps=self.max_steps,
            divided=self.divided,
            loader=None if source is None else source.loader,
        )
        self.session.rehearse_fault(self.step, self.max_steps)

    def _record(self, samples: int, learning_rate: float | None) -> None:
        session = self.session
        session.reporter.mark_trained(self.step)
        seconds = session.reporter.clock.take()
        data: JsonObject = {"tokens": self.step_log.take("tokens", samples), "seconds": seconds}
        if self._state.optimizer is not None:
            learning_rate = self._state.optimizer.param_groups[0]["lr"]
        if isinstance(learning_rate, float):
            data["learning_rate"] = learning_rate
        data |= session.saves.record_step_time(seconds, saving=session.saver.busy)
        data |= self._guards.end_pace()
        loss = self.step_log.take("loss")
        if session.take_spoiled_loss():
            loss = float("nan")
        self.step_log.add(self.step, data, loss, max_steps=self.max_steps)
        logged = self.step_log.take_metrics()
        if logged:
            metrics = self._metrics.read(logged)
            if session.gang.rank == 0:
                emit_evaluation(session.reporter, self.step, metrics)
            session.saves.extra["metrics"] = {**metrics.finite, "step": self.step}

    def _capture(self, step: int) -> dict[str, Any]:
        """Return the job's fields for a commit, and hand their tensors to the saver."""
        saver = self.session.saver
        saver.further = FurtherState()  # releases the files of the last save
        updated = self._updated
        captured = self._state.capture(step)
        # Torch may have initialised the optimizer's state by a step without effect
        self._updated = updated
        own = captured.tensors.own
        states = self.script.generator_states()
        own["generators"] = to_bytes(split_state(states, "generators", own))
        saver.further = captured.tensors
        self._look_at_script()
        self.saved_step = step
        fields = captured.fields | {"script": self.script.to_json()}
        if not self._state.commits_guards:
            return fields
        return fields | {"guards": self.session.guards.numbers.to_json()}

    def _look_at_script(self) -> None:
        script = self.script
        known = (set(script.unsaved), set(script.deciding))
        script.look()
        for name, unsaved in script.unsaved.items():
            if name not in known[0]:
                self.say(f"not exact: {unsaved.describe()}")
        for name, deciding in script.deciding.items():
            if name not in known[1]:
                self.say(deciding.describe())

    def _restore(self) -> None:
        """Restore the newest commit, if there is one, and continue from its step. Collective."""
        candidates = self._spec.candidates
        if not candidates:
            return
        restored = self.session.restore(candidates, place=self._state.open_place())
        if restored is None:
            return
        self.step = restored.step
        self.samples = restored.extra["cursor"]
        self.saved_step = self.step
        self.resumed = True
        self._syncs.begin(self.step)
        self.session.guards.numbers.restore(restored.extra.get("guards", {}))
        if restored.rng == "restored":
            self._rng = restored.further.own
        self.say(f"job {self.name} goes on from step {self.step}")
        self._state.restore(restored, self.say)
        self.script.restore(restored.extra.get("script") or {})
        own = restored.further.own
        if "generators" in own:
            self.script.set_generator_states(join_state(from_bytes(own["generators"]), own))

    def _count_update(self) -> None:
        """Count the step of the optimizer's last update, whose loss has been logged by now."""
        if not self._update_pending:
            return
        self._update_pending = False
        self._updated = False
        self.count_step(self._forward_samples * self.session.gang.world_size)
        self._forward_samples = 0
        self._save_owed = self._save_owed or self.session.saves.due(self.step)

    def _watch_model(self) -> None:
        """Register hooks on the optimizer's steps and on the model's forward passes."""
        model = self._state.model
        optimizer = self._state.optimizer
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._before_optimizer_step)
            optimizer.register_step_post_hook(self._on_optimizer_step)
        if not hasattr(model, "_orig_mod") and model._compiled_call_impl is None:
            model.register_forward_pre_hook(self._on_forward)
            self._guards.time_model(model)

    def _before_optimizer_step(self, *_: object) -> None:
        if self._forwarded:
            refuse_unused_parameters(self._state.model)
        self._forwarded = False
        self.session.saver.before_step()

    def _on_optimizer_step(self, *_: object) -> None:
        self._updated = True
        if self._counts_updates:
            self._count_update()  # of a step whose forward pass was not seen
            self._update_pending = True
            self._in_step = self.step + 1
        self.session.reporter.mark_trained(self._in_step)
        self.session.reporter.clock.begin_own()

    def _on_forward(self, module: nn.Module, inputs: object) -> None:
        """Report whether the model is in evaluation or training: the agent has a hang threshold for
        each.
        """
        if not module.training:
            self.session.reporter.enter("evaluation", self.step)
        elif self._running:
            self._forwarded = torch.is_grad_enabled()
            if self._counts_updates and self._forwarded:
                self._count_update()
                self._forward_samples += count_samples(inputs)
            self.session.reporter.enter("forward", self.step + 1)

    def _end(self, outcome: Outcome, message: str, sha256: str | None = None) -> None:
        at = Position(self.step, self.samples)
        self._guards.promise(self.step, self._describe_promise())
        ending = self.session.end(at, outcome, message, sha256)
        if self._spec.result_path:
            write_result(Path(self._spec.result_path), ending)
        self._close()

    def _end_fork(self) -> None:
        """End a forked process that continues the rank's training loop.

        Its saves would overwrite those of the rank.
        """
        if not self._is_fork:
            return
        print(
            f"ebbflow: process {os.getpid()}, a fork of process {self._pid}, went on with the loop "
            f"after step {self.step} and was ended; fix: end a fork with os._exit",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    def _watch_exit(self) -> None:
        atexit.register(self._on_exit)
        if self._judges_exit:
            exits.watch_exits()

    def _on_exit(self) -> None:
        if self._is_fork:
            return
        self.close_at_exit()
        end_observer()
        if self._exit_code is not None:
            leave(self._exit_code)  # torch aborts in some exits after a gloo group

    def _close(self) -> None:
        global current
        if self._closed or self._is_fork:
            return
        self._closed = True
        self._watch.close()
        self.step_log.flush()
        self.session.saver.close()
        self._ends.close()
        signal.signal(signal.SIGTERM, self._former_handler)
        exits.unwatch_exits()
        release_job()
        current = None


def refuse(error: TrainingError | InfraError, *, ends_job: bool = True) -> NoReturn:
    """Print the error in one line, and exit with the error's exit code.

    ends_job: whether the error ends the job of this process, if it has one.
    """
    if ends_job and current is not None:
        current.close_refused(error)
    release_job()
    print(f"ebbflow: {describe_error(error)}", file=sys.stderr, flush=True)
    end_observer()
    raise SystemExit(error.outcome.exit_code) from error


def _open_session(
    spec: WorkerSpec,
    gang: Gang,
    config: RunConfig,
    reporter: Reporter,
    state: JobState,
    commit_fields: Callable[[int], dict[str, Any]],
) -> JobSession:
    """Open the session of a script. `commit_fields` returns the job's fields for the commit of a
    step.
    """
    limits = make_limits(spec, gang, config, reporter.clock)
    saver = open_saver(spec, gang, reporter)
    # The model whose tensors Ebbflow itself writes into a commit, and its optimizer
    model = nn.Module() if state.by_library else state.model
    optimizer = None if state.by_library else state.optimizer
    saves = SaveController(
        config=config.checkpoint,
        rank=gang.rank,
        spread=Spread(model=model, module=model, copies=1),
        optimizer=optimizer,
        saver=saver,
        limits=limits,
        reporter=reporter,
        extra={},
        carried=commit_fields,
        save_schedule=make_save_schedule(spec, config, gang),
    )
    return JobSession(
        config=config,
        gang=gang,
        reporter=reporter,
        limits=limits,
        saver=saver,
        saves=saves,
        guards=make_script_guards(spec, config, gang, reporter),
        rehearsal=make_rehearsal(spec, gang),
    )
