"""Read and write whole commits in one process, for export to and import from other formats.

Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ebbflow.core.layout import data_key, index_key
from ebbflow.core.store import Store
from ebbflow.core.store.multipart.requests import Throttle
from ebbflow.core.store.multipart.sinks import open_sink
from ebbflow.training.checkpoint.commit import await_commit
from ebbflow.training.checkpoint.dcp_reader import CommitReader
from ebbflow.training.checkpoint.lineage import CommitRef, newest_generation_number, open_generation
from ebbflow.training.checkpoint.manifest import (
    ALIGNMENT,
    CheckpointId,
    IndexEntry,
    RankIndex,
    TensorEntry,
)
from ebbflow.training.checkpoint.part_uploader import PartSettings, PartUploader
from ebbflow.training.checkpoint.save_plan import TensorShard, lay_out
from ebbflow.training.checkpoint.signing import signed_index_bytes, signer
from ebbflow.training.checkpoint.state import AVERAGE
from ebbflow.training.checkpoint.verified_io import Deadline, put_verified, retry_until
from ebbflow.training.errors import CheckpointError

_PREFIXES = (
    "module.",
    "_forward_module.",
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
)
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # states with the parameter's shape

Source = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
_WINDOW_BYTES = 128 * 2**20  # an export reads this much at once
_OBJECT_BYTES = 2 * 2**30  # per data object: memory that an import needs in addition to its input


@dataclass(kw_only=True)
class PortableState:
    """The model and optimizer state of a commit, independent of the number of ranks."""

    weights: dict[str, Tensor]  # tensors by name
    # optimizer tensors by parameter name and then state name, such as exp_avg
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    # the rest of the optimizer, as `optimizer_settings` returns it; None without an optimizer
    settings: dict[str, Any] | None = None
    step: int = 0
    # JSON that Ebbflow stores with its own commits
    extra: dict[str, Any] = field(default_factory=dict)
    # reads the values of the tensors, which are on device "meta"; None if the tensors have their
    # values
    source: Source | None = None

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) in the order of `names`.

        A tensor is valid only until the next tensor is yielded.
        """
        named = self.named()
        yield from (
            ((name, named[name]) for name in names)
            if self.source is None
            else self.source(list(names))
        )

    def named(self) -> dict[str, Tensor]:
        """Return all tensors, keyed by their names in a commit: `model.<name>` and
        `optimizer.<name>.<state>`.
        """
        named = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        for name, states in self.moments.items():
            named |= {f"optimizer.{name}.{key}": tensor for key, tensor in states.items()}
        return named

    def without_optimizer(self) -> PortableState:
        return PortableState(
            weights=self.weights, step=self.step, extra=self.extra, source=self.source
        )

    def averaged(self) -> PortableState:
        """Return the state with the averages of `training.ema` as weights, without the optimizer."""
        averages = {
            name: states[AVERAGE] for name, states in self.moments.items() if AVERAGE in states
        }
        if not averages:
            raise CheckpointError(
                "the commit has no averaged weights; fix: train with training.ema, such as 0.999"
            )
        stored = {f"model.{name}": f"optimizer.{name}.{AVERAGE}" for name in averages}
        names = {
            stored.get(f"model.{name}", f"model.{name}"): f"model.{name}" for name in self.weights
        }

        def read(wanted: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            assert self.source is not None
            for name, tensor in self.source([stored.get(name, name) for name in wanted]):
                yield names[name], tensor

        if self.source is None:
            source = None
        else:
            source = read
        return PortableState(
            weights=self.weights | averages, step=self.step, extra=self.extra, source=source
        )


def unwrap_weights(state: Mapping[str, Any], what: str) -> dict[str, Tensor]:
    """Return the weights of a state dict by name, without wrapper prefixes.

    Tied tensors appear only once.

    Raises CheckpointError if a value is not a tensor, two names become equal, or there are no
    weights.
    """
    weights: dict[str, Tensor] = {}
    seen: set[tuple[int | tuple[int, ...] | torch.dtype, ...]] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"{what}: {name!r} is a {type(tensor).__name__}: only tensors can be imported"
            )
        _check_plain(tensor, repr(name), what)
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        bare = unwrap_name(name)
        if bare in weights:
            raise CheckpointError(
                f"{what}: {name!r} and another tensor are both {bare!r} without their wrappers"
            )
        weights[bare] = tensor
    if not weights:
        raise CheckpointError(f"{what}: no weights in it")
    return weights


def unwrap_name(name: str) -> str:
    """Strip the prefixes of DDP (only at the start), Lightning, torch.compile, FSDP1 and activation
    checkpointing from a name.
    """
    name = name.removeprefix(_PREFIXES[0])
    for prefix in _PREFIXES[1:]:
        name = name.replace(prefix, "")
    return name.removeprefix(_PREFIXES[0])


def add_optimizer(content: PortableState, document: Mapping[str, Any], what: str) -> None:
    """Add an optimizer's state dict to `content`.

    The state dict identifies parameters by number, as torch does, or by name, as torch's
    distributed checkpointing (DCP) does. Raises CheckpointError if a number cannot be assigned to a
    parameter, or a state differs in shape from its parameter.
    """
    groups = document["param_groups"]
    states = document["state"]
    names = _parameter_names(content, groups, what)
    settings: dict[str, Any] = {"param_groups": [], "scalars": {}}
    for group in groups:
        plain = {
            key: _plain(value)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        settings["param_groups"].append(
            {**plain, "params": [names[str(number)] for number in group["params"]]}
        )
    for number, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                _check_plain(value, f"{key} of {names[str(number)]!r}", what)
                content.moments.setdefault(names[str(number)], {})[key] = value
            else:
                settings["scalars"].setdefault(names[str(number)], {})[key] = value
    for name, found in content.moments.items():
        for key in _SHAPED:
            if key in found and found[key].shape != content.weights[name].shape:
                shapes = f"{list(found[key].shape)}, the weight {list(content.weights[name].shape)}"
                raise CheckpointError(
                    f"{what}: {key} of {name} has shape {shapes}; hint: --weights-only"
                )
    content.settings = settings


def torch_optimizer(content: PortableState) -> dict[str, Any]:
    """Return the optimizer's state dict for `Optimizer.load_state_dict`, with parameters numbered
    in group order.
    """
    named = named_optimizer(content)
    numbers: dict[str, int] = {}
    groups = []
    for group in named["param_groups"]:
        names = list(group["params"])
        first = len(numbers)
        numbers |= {name: first + number for number, name in enumerate(names)}
        params = [numbers[name] for name in names]
        groups.append({**group, "params": params, "param_names": names})
    return {
        "state": {numbers[name]: state for name, state in named["state"].items()},
        "param_groups": groups,
    }


def named_optimizer(content: PortableState) -> dict[str, Any]:
    """Return the optimizer's state dict for torch's `set_state_dict`, with parameters identified by
    name.
    """
    assert content.settings is not None
    scalars = content.settings["scalars"]
    states: dict[str, Any] = {}
    groups = []
    for stored_group in content.settings["param_groups"]:
        for name in stored_group["params"]:
            state = {**content.moments.get(name, {}), **scalars.get(name, {})}
            if state:
                states[name] = state
        group = dict(stored_group)
        for key, value in stored_group.items():
            if isinstance(value, list) and key != "params":
                group[key] = tuple(value)
        groups.append(group)
    return {"state": states, "param_groups": groups}


def read_commit(store: Store, key: str) -> PortableState:
    """Return the state in a commit, without random states.

    Its tensors are read and verified later, by `stream`.
    """
    reader = CommitReader(store, key)
    manifest = reader.manifest
    content = PortableState(
        weights={}, step=manifest.save.step, extra=manifest.common.get("extra") or {}
    )
    content.settings = manifest.common.get("optimizer")
    content.source = partial(_stream, reader)
    # Ordered by position in the data, where neighbours share chunks.
    starts: dict[str, int] = {}
    for name, entry in manifest.tensors.items():
        starts[name] = min((piece.start for piece in entry.pieces), default=0)
    for name in sorted(starts, key=lambda name: (starts[name], name)):
        entry = manifest.tensors[name]
        kind, _, rest = name.partition(".")
        if kind not in ("model", "optimizer"):
            continue
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta")
        if kind == "model":
            content.weights[rest] = tensor
        else:
            parameter, key = rest.rsplit(".", 1)
            content.moments.setdefault(parameter, {})[key] = tensor
    return content


def commit_portable_state(store: Store, content: PortableState, *, source: str) -> CommitRef:
    """Write `content` as the first commit of a new job, within an hour.

    The job's first start continues from it.

    The commit records `source`, the name of the imported file. Raises CheckpointError if the job
    has been started before or the import fails.
    """
    if newest_generation_number(store):
        raise CheckpointError(
            f"{store.uri}: the job has been started already; hint: import into a new job's name"
        )
    generation = open_generation(store, run="import", attempt=0)
    deadline = Deadline(3600.0)
    named = content.named()
    sizes = {name: _bytes(tensor) for name, tensor in named.items()}
    objects = []
    for window in _windows(sizes, _OBJECT_BYTES):
        objects.append({name: named[name] for name in window})
    job = store.uri.rsplit("/", 1)[-1]
    save = CheckpointId(
        job=job, generation=generation.name, step=content.step, world_size=len(objects)
    )
    extra = {"cursor": 0, **content.extra, "step": content.step, "imported_from": source}
    common = {"extra": extra, "optimizer": content.settings, "parent": None}
    uploader = PartUploader(
        open_sink(store.uri, Throttle()), PartSettings(sha256=signer() is not None), Throttle()
    )
    for rank, tensors in enumerate(objects):
        items, view = _pack(tensors)
        data = uploader.upload(data_key(save.generation, save.step, rank), view, deadline)
        index = RankIndex(
            save=save, rank=rank, data=data, items=items, common=common if rank == 0 else None
        )
        key = index_key(save.generation, save.step, rank)
        raw = signed_index_bytes(store, key, index)
        retry_until(deadline, f"put {key}", lambda key=key, raw=raw: put_verified(store, key, raw))
    commit = await_commit(store, save, deadline).commit
    assert commit is not None
    return commit


def _check_plain(tensor: Tensor, name: str, what: str) -> None:
    """Raise CheckpointError unless a tensor is plain and dense, which a sparse or quantized one is
    not.
    """
    if tensor.is_meta:
        kind = "has no values (device meta)"
    elif tensor.is_quantized:
        kind = f"is quantized ({tensor.dtype})"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        kind = f"is {'nested' if tensor.is_nested else tensor.layout}"
    elif type(tensor) not in (Tensor, torch.nn.Parameter):
        kind = f"is a {type(tensor).__name__}"
    else:
        return
    raise CheckpointError(f"{what}: {name} {kind}; hint: save it as a plain tensor")


def _parameter_names(
    content: PortableState,
    groups: Iterable[Mapping[str, Any]],
    what: str,
) -> dict[str, str]:
    called: list[str] = []
    given: list[str] = []
    for group in groups:
        called += map(str, group["params"])
        given += group.get("param_names") or []
    if not all(name.isdigit() for name in called):
        given = called
    if len(given) == len(called):
        names = [unwrap_name(name) for name in given]
    elif len(list(groups)) == 1:
        names = [name for name in content.weights if name.rsplit(".", 1)[-1] not in _BUFFERS]
    else:
        names = []
    unknown = [name for name in names if name not in content.weights]
    if len(names) != len(called) or unknown:
        if unknown:
            why = f"no weights named {unknown[:3]}"
        else:
            why = f"{len(called)} parameters without names"
        raise CheckpointError(
            f"{what}: the optimizer's state cannot be assigned to parameters: {why}, "
            f"{len(content.weights)} weights; hint: --weights-only, or save it with an optimizer "
            "made from model.named_parameters()"
        )
    return dict(zip(called, names, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        plain = value.item()
    else:
        plain = value
    if isinstance(plain, float) and not math.isfinite(plain):
        raise CheckpointError(
            f"an optimizer's setting is {plain}, which JSON cannot keep; hint: --weights-only"
        )
    return plain


def _stream(reader: CommitReader, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Read the named tensors in groups ("windows"), and yield them in order.

    Only whole chunks can be verified, and a chunk is usually larger than a tensor. Reading tensor
    by tensor would read each chunk many times. The chunks at the edges of a window may be read
    twice, so a window spans at least two chunks of each object. All windows share one block of
    memory, since repeated allocation would fragment the heap.
    """
    manifest = reader.manifest
    most_bytes = max(
        [_WINDOW_BYTES, *(2 * len(manifest.data) * data.chunk_bytes for data in manifest.data)]
    )
    sizes = {name: _bytes(manifest.tensors[name]) for name in names}
    windows = [_align_window(window) for window in _windows(sizes, most_bytes)]
    memory = torch.empty(max(end for _, end in windows), dtype=torch.uint8).numpy().data
    for starts, _ in windows:
        targets = {
            name: _tensor_in(memory, start, manifest.tensors[name])
            for name, start in starts.items()
        }
        reader.read_into(targets)
        yield from targets.items()


def _tensor_in(memory: memoryview, start: int, entry: TensorEntry) -> Tensor:
    """Return a part of `memory` as a tensor with a storage of its own.

    Some export formats write a tensor's whole storage, which would otherwise be all of `memory`.
    """
    dtype = getattr(torch, entry.dtype)
    length = _bytes(entry)
    if not length:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(memory[start : start + length], dtype=dtype).view(entry.shape)


def _windows(sizes: dict[str, int], most_bytes: int) -> Iterator[dict[str, int]]:
    """Group tensors into windows of at most `most_bytes`.

    A larger tensor gets a window of its own.
    """
    found: dict[str, int] = {}
    size = 0
    for name, length in sizes.items():
        if found and size + length > most_bytes:
            yield found
            found = {}
            size = 0
        found[name] = length
        size += length
    yield found


def _align_window(sizes: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return the aligned start of each tensor in a window's memory, and the window's end, in bytes."""
    starts: dict[str, int] = {}
    end = 0
    for name, length in sizes.items():
        starts[name] = -(-end // ALIGNMENT) * ALIGNMENT
        end = starts[name] + length
    return starts, end


def _bytes(tensor: Tensor | TensorEntry) -> int:
    if isinstance(tensor.dtype, torch.dtype):
        dtype = tensor.dtype
    else:
        dtype = getattr(torch, tensor.dtype)
    return math.prod(tensor.shape) * dtype.itemsize


def _pack(tensors: dict[str, Tensor]) -> tuple[tuple[IndexEntry, ...], memoryview]:
    shards = [TensorShard.of_whole(name, tensor) for name, tensor in tensors.items()]
    layout = lay_out(0, shards)
    whole = torch.zeros(layout.length, dtype=torch.uint8)
    for item, shard in zip(layout.items, shards, strict=True):
        if item.length:
            own = whole[item.start : item.start + item.length]
            own.view(shard.local.dtype).view(shard.shape).copy_(shard.local)
    return layout.items, whole.numpy().data
