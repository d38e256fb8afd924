"""The job object of `ebbflow.attach`: loops that count the steps of a user's script."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any, TypeVar

from ebbflow.training.attach.capture import ScriptState, Stateful
from ebbflow.training.attach.loop import AttachedLoop, refuse
from ebbflow.training.attach.plain_state import SavedValues
from ebbflow.training.attach.script_state import find_own_line
from ebbflow.training.attach.state import (
    BatchSource,
    change_iteration,
    count_samples,
    find_enumerate,
)
from ebbflow.training.errors import AttachError

Batch = TypeVar("Batch")
__all__ = ["AttachedJob", "Stateful", "refuse"]


class AttachedJob:
    """The job to which `attach` has attached this process.

    Attributes:
        name: name of the job.
        step: number of completed steps; a step is one iteration of `batches` or `steps`.
        epoch: number of the current epoch, counted from 0.
        batch: number of completed batches of this epoch.
        resumed: whether a commit was restored.
    """

    def __init__(self, loop: AttachedLoop, state: ScriptState) -> None:
        self._loop = loop
        self._state = state
        self._count = 0  # of epochs; 0 if unknown
        # Of the epoch before: the loader's number of batches, and how many the script took
        self._taken: tuple[int, int] | None = None
        self._reading: Generator[Any, None, None] | None = None  # the batches of the current epoch
        # Whether the next loop over the loader is that of the epoch
        self._reads_epoch = False
        # What `batches` read last
        self._last_epoch = -1
        self._last_loader: object = None
        self._is_exhausted = False  # whether it gave all batches of that loader

    @property
    def name(self) -> str:
        return self._loop.name

    @property
    def step(self) -> int:
        return self._loop.step

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def batch(self) -> int:
        return self._state.batch

    @property
    def resumed(self) -> bool:
        return self._loop.resumed

    def __enter__(self) -> AttachedJob:
        self._loop.enter_block()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._loop.leave_block(error)

    def log(self, **values: Any) -> None:
        """Record the `loss` and `tokens` of this step, and metrics of your own under any other
        names.

        A loss given as a tensor is read later, so that the loop does not wait for the device.
        """
        self._loop.step_log.log(values)

    def state(self, **values: object) -> SavedValues:
        """Return plain values that are part of each commit, as attributes of one object.

        After a resume they are those of the commit instead of the given ones:

            saved = job.state(best=float("inf"), history=[])
            …
            saved.best = min(saved.best, loss)

        The values are numbers, texts, tensors, and lists and dicts of them.
        """
        try:
            return self._state.open_values(values)
        except AttachError as error:
            refuse(error)

    def epochs(self, count: int, loader: Any = None) -> Iterator[int]:
        """Yield the numbers of the remaining epochs.

        With `loader`, a plain `for` loop over it skips the batches that the last commit covers.
        Without `loader`, loop over `batches(loader)` in the epoch. If the epoch has a loop of its
        own, such as over rows of an array, each step of the optimizer is a step, and the job saves
        at the end of an epoch.
        """
        if loader is not None:
            _check_rereadable(loader, count)
            length = self._open_source(loader).length
            self._loop.max_steps = count * (length or 0)
            self._follow(loader)
        self._count = count
        self._loop.tell_if_complete(is_complete=self.epoch >= count)
        with self._loop.run():
            while self.epoch < count:
                self._reads_epoch = True
                self._loop.begin_epoch(counts_updates=loader is None)
                try:
                    yield self.epoch
                finally:
                    self._end_reading()
                self._state.begin_epoch(self.epoch + 1)
                self._loop.end_epoch(self.epoch - 1)

    def batches(self, loader: Iterable[Batch], *, epochs: int | None = None) -> Iterator[Batch]:
        """Yield the remaining batches of `epochs` epochs; without `epochs`, those of the current
        epoch, once in each epoch.
        """
        if epochs is None:
            if not self._loop.is_running:
                refuse(
                    AttachError(
                        "job.batches(loader) without epochs; fix: give it epochs, or loop over "
                        "job.epochs"
                    )
                )
            yield from self._epoch(loader)
            return
        _check_rereadable(loader, epochs)
        self._loop.max_steps = epochs * (self._open_source(loader).length or 0)
        for _ in self.epochs(epochs):
            yield from self._epoch(loader)

    def steps(self, max_steps: int) -> Iterator[int]:
        """Yield the numbers of the remaining steps, up to `max_steps` - 1."""
        loop = self._loop
        loop.max_steps = max_steps
        loop.tell_if_complete(is_complete=loop.step >= max_steps)
        with loop.run():
            while loop.step < max_steps:
                loop.begin_step()
                with loop.counting(1):
                    yield loop.step
                loop.end_step(1)

    def restore_random_states(self) -> None:
        """Restore the commit's random states again, because code after `attach` may have drawn
        numbers.

        Only the first call has an effect.
        """
        self._loop.restore_random_states()

    def say(self, text: str) -> None:
        """Print a line if this is rank 0."""
        self._loop.say(text)

    def close_at_exit(self) -> None:
        """At the script's end, close the job, and complete it if the script left its loop with
        `break`.
        """
        self._loop.close_at_exit()

    def leave_exit_to_caller(self) -> None:
        """Leave the exit code to the caller, who has caught the SystemExit that the job raised."""
        self._loop.leave_exit_to_caller()

    def _follow(self, loader: Any) -> None:
        """Turn the next plain `for` loop over `loader` in each epoch into the loop of the epoch."""
        iterate = type(loader).__iter__

        def iterate_epoch(loader: Iterable[Batch]) -> Iterator[Batch]:
            if self._reads_epoch:
                return self._epoch(loader)
            return iterate(loader)

        try:
            change_iteration(loader, iterate_epoch)
        except AttachError as error:
            refuse(error)

    def _open_source(self, loader: Any) -> BatchSource:
        try:
            return self._state.open_source(loader, self._loop.record_notice)
        except AttachError as error:
            refuse(error)

    def _epoch(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Return the remaining batches of the current epoch, each as a step."""
        reading = self._read_epoch(loader)
        self._reading = reading
        return reading

    def _end_reading(self) -> None:
        """Count the last step of an epoch that the script has left, and the batches that it took.

        A progress bar in a variable would keep the batches open until the next epoch.
        """
        reading = self._reading
        self._reading = None
        source = self._state.source
        if reading is None or inspect.getgeneratorstate(reading) == inspect.GEN_RUNNING:
            return
        reading.close()
        if source is not None and source.length is not None:
            self._taken = (source.length, self.batch)

    def _count_steps(self, length: int) -> int:
        """Return the number of the job's steps if all further epochs are like the one before.

        Args:
            length: the loader's number of batches.
        """
        state = self._state
        before = self._loop.step - state.batch
        taken = length
        if self._taken is not None:
            # Scripts may leave each epoch early
            taken = self._taken[1] if self._taken[0] == length else length
        elif state.epoch:
            taken = min(length, before // state.epoch)
        return before + (self._count - state.epoch) * max(taken, 1)

    def _read_epoch(self, loader: Iterable[Batch]) -> Generator[Batch, None, None]:
        loop = self._loop
        state = self._state
        reporter = loop.session.reporter
        self._check_first_loader(loader)
        source = self._open_source(loader)
        if self._count and source.length is not None:
            loop.max_steps = self._count_steps(source.length)
        self._reads_epoch = False
        loop.read_batches()
        reporter.enter("data", loop.step + 1)
        if state.batch:
            place = find_enumerate(sys._getframe(1))
            if place:
                self.say(
                    f"{place} counts batches from 0 after a resume; fix, if numbers matter: "
                    "enumerate(loader, job.batch)"
                )
        for batch in source.epoch(state.epoch, state.batch):
            samples = count_samples(batch) * loop.session.gang.world_size
            if loop.skips_samples:
                state.count_batch(samples)
                loop.skip_batch(samples)
                continue
            loop.begin_step()
            with loop.counting(samples, state.count_batch):
                yield batch
            state.count_batch(samples)
            last = source.length is not None and state.batch >= source.length
            loop.end_step(samples, last=last)
        self._is_exhausted = True
        reporter.enter("evaluation", loop.step)

    def _check_first_loader(self, loader: object) -> None:
        """Exit if the epoch had batches of another loader, or all of this one: commits count the
        batches of one loader.
        """
        epoch = self._state.epoch
        is_same = loader is self._last_loader
        if self._last_epoch == epoch and (self._is_exhausted or not is_same):
            what = "all batches of this loader" if is_same else "batches of another loader"
            refuse(
                AttachError(
                    f"{find_own_line()}: job.batches after {what} in epoch {epoch}, but a commit "
                    "counts the batches of one loader; fix: one loader that gives the batches of "
                    "both, such as one over a ConcatDataset, or one more epoch"
                )
            )
        self._last_epoch = epoch
        self._last_loader = loader
        self._is_exhausted = False


def _check_rereadable(loader: object, epochs: int) -> None:
    """Exit if the script asks for several epochs of an iterator, which can be read only once."""
    if epochs > 1 and isinstance(loader, Iterator):
        refuse(
            AttachError(
                f"job: {epochs} epochs of a {type(loader).__name__}, which can be read once; fix: "
                "pass a DataLoader or a list, or loop over job.steps(n) and draw from it"
            )
        )
