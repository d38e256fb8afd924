"""The artifact that a training in a user's flow returns."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typing_extensions

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.events import Event
from ebbflow.core.layout import KnownJob, job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.report.parts import ReportJson
from ebbflow.cost.report.report import RunReport

if TYPE_CHECKING:
    from torch import Tensor, nn

_REPLACED = "_collect_parameters"
_SUFFIXES = {"safetensors": ".safetensors", "torch": ".pt", "dcp": ""}


class NoCommit(InfraError):
    """Error: the training has saved no commit."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Result of a training, for later steps and notebooks on any machine that reaches the store.

    Attributes:
        job: Name of the job.
        store: Address of the store of all jobs.
        outcome: Outcome of the job, such as "completed".
        commit: Key of the final commit in the job's part of the store; None without commits.
        best: Key of the commit with the best metric; None if no commit was evaluated.
        steps: Number of steps.
        weights_sha256: Hash of the final weights; None if it was not recorded.
        usd: Dollars so far, with interruptions.
        price_kind: Source of the prices, such as "simulated"; "unpriced" without a price.
        hours: Hours from the first event to the last, with waits between attempts.
        interruptions: Number of unplanned ends of the training.
        report: The job's report as JSON.
    """

    job: str
    store: str
    outcome: str
    commit: str | None
    best: str | None
    steps: int
    weights_sha256: str | None
    usd: float
    price_kind: str
    hours: float
    interruptions: int
    report: ReportJson = field(repr=False)

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], TrainedModel], tuple[dict[str, Any]]]:
        """Pickle as plain data, so that other versions of Ebbflow can read the artifact."""
        return TrainedModel.from_json, (asdict(self),)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrainedModel:
        known = {name: data[name] for name in cls.__dataclass_fields__ if name in data}
        return cls(**known)

    @property
    def uri(self) -> str | None:
        """Address of the final commit, or None without commits."""
        return self._address(self.commit)

    @property
    def best_uri(self) -> str | None:
        """Address of the best commit, or None if no commit was evaluated."""
        return self._address(self.best)

    @property
    def run_report(self) -> RunReport:
        return RunReport.from_json(self.report)

    def load(self, module: nn.Module, *, best: bool = False) -> nn.Module:
        """Load the weights into a module of the trained architecture, and return the module.

        Args:
            best: Whether to load the best commit instead of the final one.

        Raises:
            NoCommit: There is no such commit.
            RuntimeError: The module has other parameters than the trained model.
        """
        weights = self.state_dict(best=best)
        found = module.load_state_dict(weights, strict=False)
        given = module.state_dict()
        loaded = {given[name].data_ptr() for name in weights if name in given}
        # Of tied tensors, a commit has one
        missing = [name for name in found.missing_keys if given[name].data_ptr() not in loaded]
        if missing or found.unexpected_keys:
            raise RuntimeError(
                f"job {self.job}: {type(module).__name__} is not the trained model: it lacks "
                f"{found.unexpected_keys[:3]}, and the commit lacks {missing[:3]}; fix: build it as "
                "the training did"
            )
        return module

    def state_dict(self, *, best: bool = False) -> dict[str, Tensor]:
        """Return the weights by name. Every byte is verified. Raises NoCommit."""
        _undo_vendored_typing()
        from ebbflow.training.checkpoint.portable_state import read_commit

        key = self._key(best)
        content = read_commit(self._open(), key).without_optimizer()
        # A tensor of the stream is valid only until the next one
        names = [f"model.{name}" for name in content.weights]
        return {
            name.removeprefix("model."): tensor.clone() for name, tensor in content.stream(names)
        }

    def export(
        self, kind: str = "safetensors", path: Path | str | None = None, *, best: bool = False
    ) -> Path:
        """Write the weights to a file, or with `dcp` to a folder, and return its path.

        Args:
            kind: safetensors, torch or dcp.
            path: The path to write; None: the job's name in the current folder.
            best: Whether to export the best commit instead of the final one.

        Raises:
            NoCommit: There is no such commit.
            CheckpointError: The path exists.
            ValueError: The kind is unknown.
        """
        _undo_vendored_typing()
        from ebbflow.training.checkpoint.file_formats import write_file
        from ebbflow.training.checkpoint.portable_state import read_commit

        if kind not in _SUFFIXES:
            raise ValueError(f"kind {kind!r} is unknown; fix: one of {', '.join(_SUFFIXES)}")
        target = Path(f"{self.job}{_SUFFIXES[kind]}" if path is None else path)
        key = self._key(best)
        content = read_commit(self._open(), key).without_optimizer()
        write_file(content, target, kind)
        return target

    def _address(self, key: str | None) -> str | None:
        if key is None:
            return None
        return f"{KnownJob(self.job, self.store).uri}/{key}"

    def _key(self, best: bool) -> str:
        key = self.best if best else self.commit
        if key is None and best:
            raise NoCommit(
                f"job {self.job}: no commit was evaluated, so none is the best; fix: load the "
                "final one, with best=False"
            )
        if key is None:
            raise NoCommit(
                f"job {self.job}: nothing was saved; fix: call ebbflow.attach(model, optimizer) "
                "in the training"
            )
        return key

    def _open(self) -> Store:
        from ebbflow.training.checkpoint.commands import choose_signing_key

        opened = Store.open(self.store, create=False).sub(job_prefix(self.job))
        choose_signing_key(opened, None, must_check=False)
        return opened


def describe_training(
    job: str, store: Store, store_uri: str, report: RunReport, events: list[Event]
) -> TrainedModel:
    """Build the `TrainedModel` of a job from its report and commits.

    Args:
        store: The job's part of the store.
        store_uri: Address of the store of all jobs.
    """
    from ebbflow.cost.ledger.ledger import fold
    from ebbflow.training.checkpoint.best import find_best
    from ebbflow.training.checkpoint.lineage import trace_lineage
    from ebbflow.training.errors import CheckpointError

    traced = trace_lineage(store)
    final = next((commit for commit in traced if commit.unreachable_because is None), None)
    try:
        best = find_best(store, traced).ref.key
    except CheckpointError:  # no commit was evaluated
        best = None
    return TrainedModel(
        job=job,
        store=store_uri,
        outcome=str(report.outcome or Outcome.INTERRUPTED),
        commit=None if final is None else final.ref.key,
        best=best,
        steps=int(report.actual.get("steps") or 0) if final is None else final.ref.step,
        weights_sha256=report.weights_sha256,
        usd=float(report.total_usd),
        price_kind=fold(events).price_kind,
        hours=float(report.actual.get("wall_hours") or 0.0),
        interruptions=report.interruptions,
        report=report.to_json(),
    )


def _undo_vendored_typing() -> None:
    """Let torch be imported in a notebook in which Metaflow's Runner was used.

    Metaflow's copy of typing_extensions replaces a function of `typing` by one that does not know
    the defaults of the original's type variables, so that torch's modules raise TypeError.
    """
    replaced = getattr(typing, _REPLACED, None)
    own = getattr(typing_extensions, _REPLACED, None)
    if own is not None and getattr(replaced, "__module__", "").startswith("metaflow."):
        setattr(typing, _REPLACED, own)
