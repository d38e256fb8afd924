"""What a commit of an attached job contains besides weights: states, buffers and position in the
data.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ebbflow.training.attach.guards import describe_resize, script_sha256
from ebbflow.training.attach.plain_state import PlainState, SavedValues
from ebbflow.training.attach.state import (
    BatchSource,
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
from ebbflow.training.checkpoint.state import FurtherState, to_bytes
from ebbflow.training.errors import AttachError
from ebbflow.training.gang import Gang

VALUES = "values"  # name of the plain values among the states of a job
Say = Callable[[str], None]  # prints a line on rank 0


class Stateful(Protocol):
    """An object whose state is saved with the job, such as a scheduler, a gradient scaler or
    averaged weights.
    """

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class Captured:
    fields: dict[str, Any]  # JSON of the commit
    tensors: FurtherState  # the tensors to which the fields refer


class JobState(Protocol):
    """Interface to the state of an attached job, through which `AttachedJob` saves and restores it."""

    model: nn.Module
    optimizer: Optimizer | None
    # How a resumed run reads the same data if the job has no loader; "" if it may not
    same_data: str
    resized: str  # why results may differ after a change of the number of ranks; "" if they do not
    by_library: bool  # whether a library writes the state of model and optimizer
    commits_guards: bool  # whether a commit has the state of the guards
    source: BatchSource | None  # reader of the job's loader; None if the job has none

    @property
    def stateful_objects(self) -> Sequence[Stateful]:
        """The objects that are saved besides model and optimizer."""
        ...

    @property
    def saved_objects(self) -> Mapping[str, object]:
        """The objects that the job saves or reads, by the names that they have in the script."""
        ...

    def capture(self, step: int, /) -> Captured:
        """Return the fields and tensors for the commit of `step`, without those of model and
        optimizer.

        Collective.
        """
        ...

    def open_place(self) -> Place:
        """Prepare to restore a commit, and return a function that gives the destination of each
        tensor.

        Collective.
        """
        ...

    def restore(self, restored: RestoreResult, say: Say) -> None:
        """Restore the fields and tensors that `capture` has returned. Collective.

        Raises AttachError if the commit is not one of such a job.
        """
        ...

    def digest(self) -> str | None:
        """Return the hash of the final weights, or None if it is unknown. Collective."""
        ...


class ScriptState:
    """State of a script that keeps its own loop.

    Attributes:
        epoch: number of the current epoch, counted from 0.
        batch: number of completed batches of this epoch.
        epoch_samples: number of samples of this epoch that all ranks have read.
        source: reader of the script's loader; None before it reads one.
    """

    commits_guards = True

    def __init__(
        self,
        gang: Gang,
        model: nn.Module,
        optimizer: Optimizer | None,
        states: Mapping[str, Stateful],
        *,
        by_library: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.by_library = by_library
        self.same_data = "random states"
        self.resized = ""
        self.epoch = 0
        self.batch = 0
        self.epoch_samples = 0
        self.source: BatchSource | None = None
        self._gang = gang
        self._states = dict(states)
        self._values: SavedValues | None = None
        self._saved_values: dict[str, object] = {}  # of the commit, until the script asks for them
        self._seed = torch.initial_seed()
        # The state of the source in the commit, until the script reads its loader
        self._source_state: Any = None
        # Number of samples that the data set had at the restored commit, until the script reads its
        # loader; None if unknown
        self._committed_samples: int | None = None
        # Number of samples of the only loader that was read; None if unknown, or after a second one
        self._samples: int | None = None
        # Whether a different number of ranks made the commit, in the middle of an epoch
        self._in_other_batches = False

    @property
    def stateful_objects(self) -> Sequence[Stateful]:
        return list(self._states.values())

    @property
    def saved_objects(self) -> Mapping[str, object]:
        states = {
            name: state.value if isinstance(state, PlainState) else state
            for name, state in self._states.items()
        }
        return {"model": self.model, "optimizer": self.optimizer, **states}

    def open_values(self, values: dict[str, object]) -> SavedValues:
        """Return the script's plain values, with restored values in place of the given ones.

        Raises AttachError if a value cannot be saved.
        """
        if self._values is None:
            self._values = SavedValues()
            self._states[VALUES] = self._values
        split_state(values, "job.state", {})
        for name, value in values.items():
            setattr(self._values, name, self._saved_values.pop(name, value))
        return self._values

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batch = 0
        self.epoch_samples = 0
        self._source_state = None

    def count_batch(self, samples: int = 0) -> None:
        self.batch += 1
        self.epoch_samples += samples

    def open_source(self, loader: Any, warn: Say) -> BatchSource:
        """Return a reader of `loader` that begins at the position of the restored commit.

        Raises AttachError if the loader cannot be read.
        """
        if self.source is None or self.source.loader is not loader:
            is_first = self.source is None
            self.source = BatchSource(loader, self._seed, warn)
            if self._source_state is not None:
                self.source.load(self._source_state)
            self._samples = self.source.samples if is_first else None
            self._compare_samples(self._samples, warn)
            if self._in_other_batches:
                self._find_batch(loader)
        return self.source

    def _compare_samples(self, samples: int | None, warn: Say) -> None:
        """Warn if the data set had another number of samples at the restored commit."""
        before = self._committed_samples
        self._committed_samples = None
        if before is not None and samples is not None and samples != before:
            warn(
                f"the data set had {before} samples at the restored commit and has {samples} now; "
                "if it is the same loader, its data changed, and the samples from here on are not "
                "those of an uninterrupted run; fix: bring the data back, or give this job another "
                "name"
            )

    def _find_batch(self, loader: Any) -> None:
        """Choose the batch at which to continue an epoch that a different number of ranks began.

        Samples may repeat.
        """
        size = (getattr(loader, "batch_size", None) or 1) * self._gang.world_size
        self.batch, repeated = divmod(self.epoch_samples, size)
        self._in_other_batches = False
        if repeated:
            self.resized += f"; {repeated} samples of epoch {self.epoch} are read twice"

    def capture(self, _step: int, /) -> Captured:
        shared: dict[str, Tensor] = {}
        forms = split_states(self._states, shared)
        own = own_buffers(self.model, every=not self._gang.alone)
        source = None if self.source is None else self.source.state()
        own["attach"] = to_bytes({"seed": self._seed, "source": split_state(source, "source", own)})
        fields = {
            "epoch": self.epoch,
            "batch": self.batch,
            "samples": self.epoch_samples,
            # Between two epochs the next one may read another loader
            "dataset_samples": self._samples if self.batch else None,
            "seed": self._seed,
            "states": forms,
            "frozen": None if self.by_library else find_frozen(self.model),
            "resized": self.resized,
        }
        return Captured({"attach": fields}, FurtherState(own, shared))

    def open_place(self) -> Place:
        shared: dict[str, Tensor] = {}
        split_states(self._states, shared)

        def place(name: str, entry: TensorEntry) -> Tensor:
            there = shared.get(name)
            if there is None or tuple(there.shape) != entry.shape or not isinstance(there, DTensor):
                return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
            return there

        return place

    def restore(self, restored: RestoreResult, say: Say) -> None:
        fields = restored.extra.get("attach")
        if fields is None:
            raise AttachError(
                f"{restored.key} was not made by attach; fix: give this job another name"
            )
        lost = sorted(fields["states"].keys() - self._states.keys() - {VALUES})
        if lost:
            raise AttachError(
                f"{restored.key} has the state of {', '.join(lost)}, which attach was not given; "
                f"fix: pass {', '.join(f'{name}=…' for name in lost)}, or give this job another "
                "name"
            )
        for name, state in self._states.items():
            if name in fields["states"]:
                state.load_state_dict(join_state(fields["states"][name], restored.further.shared))
            else:
                say(f"{restored.key} has no state of {name}, which begins anew")
        if VALUES in fields["states"]:
            self._saved_values = join_state(fields["states"][VALUES], restored.further.shared)
        self.epoch = fields["epoch"]
        self.batch = fields["batch"]
        self.epoch_samples = fields.get("samples", 0)
        self.resized = fields.get("resized", "")
        if restored.world_size == self._gang.world_size:
            self._committed_samples = fields.get("dataset_samples")
        else:  # a rank's own part of the data may have another length
            self._seed = fields.get("seed", self._seed)
            self._in_other_batches = self.epoch_samples > 0
            self.resized = describe_resize(restored.world_size, self._gang.world_size)
        restore_frozen(self.model, fields.get("frozen"), say)
        own = restored.further.own
        if "attach" in own:
            kept = from_bytes(own["attach"])
            self._seed = kept["seed"]
            self._source_state = join_state(kept["source"], own)
        restore_buffers(self.model, own)

    def digest(self) -> str | None:
        return None if self.by_library else script_sha256(self.model)
