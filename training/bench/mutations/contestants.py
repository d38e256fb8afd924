"""The same two-rank state as a commit and as a DCP folder, and what a load of it brings after a change."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from infra.store import Store
from training.bench.mutations.changes import Parts
from training.checkpoint import Checkpointer, CommitReader, open_generation, verify_commit
from training.errors import CheckpointError

REFUSED, EQUAL, WRONG = "refused", "loaded equal", "loaded WRONG"
_SIZES = {"first.weight": (64, 48), "first.bias": (64,), "second.weight": (32, 64)}
_STEPS = (1, 2)  # the second is changed; the first lends its shards


class Contestant(Protocol):
    """parts: of what is changed."""

    parts: Parts

    def load(self) -> str:
        """REFUSED, EQUAL or WRONG."""
        ...

    def found_without_loading(self) -> bool:
        """Whether its own way of verifying reports something; False where it has none."""
        ...


class Commits:
    """Ours: two ranks in one job's folder."""

    def __init__(self, folder: Path) -> None:
        self._store = Store.open(str(folder / "jobs" / "mutations"))
        gang = {"generation": open_generation(self._store, run="mutations", attempt=0), "world_size": 2}
        with (
            Checkpointer(self._store.uri, rank=0, **gang) as first,
            Checkpointer(self._store.uri, rank=1, **gang) as second,
        ):
            commits = []
            for step in _STEPS:
                for saver in (second, first):
                    saver.save(step, _model(step), None, {"cursor": step})
                commits.append(first.wait())
                second.wait()
        assert commits[0] is not None and commits[1] is not None
        self._key = commits[1].key
        root = Path(self._store.uri)
        earlier, manifest = (CommitReader(self._store, commit.key).manifest for commit in commits)
        self.parts = Parts(
            data=[root / data.key for data in manifest.data],
            index=sorted((root / "index" / manifest.save.generation / f"{_STEPS[1]:012d}").iterdir()),
            manifest=[root / self._key],
            earlier=[root / data.key for data in earlier.data],
        )
        self._expected = {f"model.{name}": tensor for name, tensor in _tensors(_STEPS[1]).items()}

    def load(self) -> str:
        try:
            loaded = CommitReader(self._store, self._key).read_whole(*self._expected)
        except CheckpointError:
            return REFUSED
        return EQUAL if _same(loaded, self._expected) else WRONG

    def found_without_loading(self) -> bool:
        return bool(verify_commit(self._store, self._key))


class Dcp:
    """torch.distributed.checkpoint's FileSystemWriter and FileSystemReader, with their defaults."""

    def __init__(self, folder: Path) -> None:
        multiprocessing.spawn(_save_dcp, args=(str(folder),), nprocs=2)
        self._path = folder / "step-2"
        self.parts = Parts(
            data=sorted(self._path.glob("*.distcp")),
            index=[],
            manifest=[self._path / ".metadata"],
            earlier=sorted((folder / "step-1").glob("*.distcp")),
        )
        self._expected = _tensors(_STEPS[1])

    def load(self) -> str:
        loaded = {name: torch.full_like(tensor, -1.0) for name, tensor in self._expected.items()}
        try:
            with redirect_stderr(io.StringIO()):
                dcp.load(loaded, checkpoint_id=str(self._path), no_dist=True)
        except (Exception, dcp.api.CheckpointException):  # whatever it is, the user is told
            return REFUSED
        return EQUAL if _same(loaded, self._expected) else WRONG

    def found_without_loading(self) -> bool:
        return False


def _save_dcp(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for step in _STEPS:
        state = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in _tensors(step).items()}
        dcp.save(state, checkpoint_id=f"{folder}/step-{step}")
    dist.barrier()
    sys.stdout.flush()
    dist.destroy_process_group()


def _tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in _SIZES.items()}


def _model(step: int) -> nn.Module:
    model = nn.Module()
    for name, tensor in _tensors(step).items():
        owner, _, leaf = name.partition(".")
        if not hasattr(model, owner):
            model.add_module(owner, nn.Module())
        model.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor))
    return model


def _same(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit: NaN equals itself here, and zero is not minus zero."""
    return loaded.keys() == expected.keys() and all(
        loaded[name].numpy().tobytes() == tensor.numpy().tobytes() for name, tensor in expected.items()
    )
