"""The names under which a commit stores the tensors of model and optimizer, and random states.

    model.<fqn>                parameters and persistent buffers (DTensors where FSDP2 shards them)
    optimizer.<fqn>.<state>    optimizer states that are tensors, such as exp_avg, exp_avg_sq and step
    rng.<rank>.<source>        random states of a rank (torch, python, numpy, cuda) and other tensors of one rank
    state.<name>               other tensors that all ranks hold (`FurtherState`)

Param groups and optimizer states that are not tensors are stored as JSON (`optimizer_settings`).

A fully qualified name (fqn) is the parameter's name in the unwrapped model, without the prefixes of
DDP, torch.compile and activation checkpointing. So a job in any parallel mode can read what a job
in another mode wrote. Tied parameters are stored once, under their first name.
"""

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ebbflow.training.checkpoint.manifest import Manifest, TensorEntry
from ebbflow.training.errors import CheckpointError, CommitMismatch

SHARED_PREFIX = "state."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_PREFIX = "rng"
AVERAGE = "ema"  # the optimizer's state with a parameter's average, so that commits hold it
_BITS = re.compile(r"\d+bit$")
_OTHER_SETTINGS = 2  # this many on both sides are another optimizer's
_ALL_GROUPS = (
    "give the optimizer all its groups before the job is restored, with requires_grad=False "
    "until they train"
)


@dataclass(frozen=True)
class FurtherState:
    """Tensors of a commit that belong neither to model or optimizer nor to the random states."""

    # tensors of one rank, by name. A restore with another world size skips them.
    own: dict[str, Tensor] = field(default_factory=dict)
    # tensors that all ranks hold, plain or as DTensors, by name; names begin with `SHARED_PREFIX`
    shared: dict[str, Tensor] = field(default_factory=dict)


def named_state(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Return the tensors to save, by name, without copying them.

    Raises CheckpointError if a tensor cannot be named, for example because an optimizer state's
    name has a dot.
    """
    state = {f"model.{name}": tensor.detach() for name, tensor in model_tensors(model).items()}
    if optimizer is None:
        return state
    for fqn, parameter in _optimized(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if "." in key:
                raise CheckpointError(
                    f"optimizer state {key!r} of {fqn}: a dot in its name is not supported"
                )
            if isinstance(value, Tensor):
                state[f"optimizer.{fqn}.{key}"] = value.detach()
    return state


def optimizer_settings(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's class, param groups and non-tensor states as JSON data.

    Param groups list their parameters by name.
    """
    names = {id(parameter): fqn for fqn, parameter in _optimized(model, optimizer)}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        groups.append(
            {**settings, "params": [names[id(parameter)] for parameter in group["params"]]}
        )
    scalars: dict[str, dict[str, Any]] = {}
    for fqn, parameter in _optimized(model, optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                scalars.setdefault(fqn, {})[key] = value
    return {"class": _class_name(optimizer), "param_groups": groups, "scalars": scalars}


def prepare_for_loading(
    manifest: Manifest, model: nn.Module, optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return the tensors into which a commit is loaded, by name.

    First allocate optimizer state that is missing, and delete optimizer state that the commit
    lacks.

    Raises CommitMismatch, on all ranks alike, if names or global shapes differ. The model is
    compared first, because a different model also has different optimizer state.
    """
    targets = {f"model.{name}": tensor.detach() for name, tensor in model_tensors(model).items()}
    stored = {name for name in manifest.tensors if name.startswith("model.")}
    _compare_names(stored, set(targets), manifest)
    _compare_shapes(targets, manifest)
    if optimizer is not None:
        _prepare_optimizer(manifest, model, optimizer)
        state = {
            name: t
            for name, t in named_state(model, optimizer).items()
            if name.startswith("optimizer.")
        }
        _compare_shapes(state, manifest)
        targets |= state
    return targets


def apply_settings(settings: Mapping[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Apply `settings` to the optimizer, matching param groups by position.

    Raises CommitMismatch.
    """
    _refuse_other_class(settings.get("class"), optimizer)
    groups = settings["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        have = len(optimizer.param_groups)
        raise CommitMismatch(
            f"{len(groups)} optimizer groups in the commit, {have} here; fix: {_ALL_GROUPS}"
        )
    _refuse_other_optimizer(groups[0], optimizer)
    for stored, group in zip(groups, optimizer.param_groups, strict=True):
        for key, value in stored.items():
            if key == "params":
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                if isinstance(value, list) and not isinstance(current, list):
                    group[key] = tuple(value)
                else:
                    group[key] = value
    parameters = dict(_optimized(model, optimizer))
    for fqn, values in settings["scalars"].items():
        optimizer.state[parameters[fqn]].update(values)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by the names that they have without wrappers.

    Raises CheckpointError.
    """
    inner = model
    wrapped = model
    while wrapped is not None:
        inner = wrapped
        if isinstance(inner, DistributedDataParallel):
            wrapped = inner.module
        else:
            wrapped = getattr(inner, "_orig_mod", None)
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in inner.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            raise CheckpointError(
                f"model.state_dict()[{name!r}] is a {kind}: only tensors can be saved"
            )
        if id(value) not in seen:
            seen.add(id(value))
            for wrapper in _WRAPPERS:
                name = name.replace(wrapper, "")
            found[name] = value
    return found


def capture_rng(rank: int) -> dict[str, Tensor]:
    """Return the random states of this process by name, as uint8 tensors: torch, CUDA, Python, and
    NumPy if loaded.
    """
    states = {"torch": torch.get_rng_state(), "python": to_bytes(random.getstate())}
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        states["numpy"] = to_bytes([name, keys.tolist(), position, has_gauss, gauss])
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {rng_name(rank, source): state for source, state in states.items()}


def rng_name(rank: int, source: str = "") -> str:
    return f"{_PREFIX}.{rank}.{source}"


def restore_rng(rank: int, states: dict[str, Tensor]) -> None:
    """Restore the random states from `capture_rng`.

    Skip CUDA and NumPy if this process does not have them.
    """
    for source in ("torch", "python", "numpy", "cuda"):
        state = states.get(rng_name(rank, source))
        if state is None:
            continue
        if source == "torch":
            torch.set_rng_state(state)
        elif source == "python":
            version, numbers, gauss = json.loads(state.numpy().tobytes())
            random.setstate((version, tuple(numbers), gauss))
        elif source == "numpy" and "numpy" in sys.modules:
            name, keys, position, has_gauss, gauss = json.loads(state.numpy().tobytes())
            numpy = sys.modules["numpy"]
            numpy.random.set_state(
                (name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, gauss)
            )
        elif source == "cuda" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state)


def reseed_rng(commit: str, rank: int) -> None:
    """Seed the random generators from the commit's hash and the rank: repeatable, and different on
    every rank.
    """
    seed = int.from_bytes(hashlib.sha256(f"{commit}:{rank}".encode()).digest()[:8], "little") >> 1
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def to_bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _optimized(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
    names = {id(tensor): name for name, tensor in model_tensors(model).items()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                where = f"optimizer group {number}, parameter {place} {list(parameter.shape)}"
                raise CheckpointError(f"{where}: is not a parameter of the model")
            yield names[id(parameter)], parameter


def _prepare_optimizer(manifest: Manifest, model: nn.Module, optimizer: Optimizer) -> None:
    wanted: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("optimizer."):
            fqn, key = name.removeprefix("optimizer.").rsplit(".", 1)
            wanted.setdefault(fqn, {})[key] = entry
    for fqn, parameter in _optimized(model, optimizer):
        state = optimizer.state[parameter]
        entries = wanted.pop(fqn, {})
        for key in set(state) - set(entries):
            del state[key]
        for key, entry in entries.items():
            if key not in state:
                state[key] = _allocate(fqn, key, entry, parameter, optimizer)
        if not state:
            del optimizer.state[parameter]
    if wanted:
        few = sorted(wanted)[:5]
        raise CommitMismatch(
            f"the commit has optimizer state of {few}, which this optimizer lacks; fix: "
            f"{_ALL_GROUPS}"
        )


def _allocate(
    fqn: str, key: str, entry: TensorEntry, parameter: nn.Parameter, optimizer: Optimizer
) -> Tensor:
    """Allocate a zero state on the device that `Optimizer.load_state_dict` would use.

    That is the CPU for `step`, unless the optimizer is fused or capturable, and the parameter's
    device otherwise.
    """
    dtype = getattr(torch, entry.dtype)
    if key != "step" and entry.shape == tuple(parameter.shape):
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False).detach()
    if isinstance(parameter, DTensor) and key != "step" and entry.shape != ():
        raise CheckpointError(
            f"optimizer state {key!r} {list(entry.shape)} of the sharded {fqn} "
            f"{list(parameter.shape)} has a shape of its own, so its sharding is unknown; hint: "
            "let the optimizer create it (one step), then restore"
        )
    group = _group_of(parameter, optimizer)
    on_cpu = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.zeros(entry.shape, dtype=dtype, device="cpu" if on_cpu else parameter.device)


def _compare_names(stored: set[str], have: set[str], manifest: Manifest) -> None:
    if stored == have:
        return
    only_stored = sorted(stored - have)[:5] or "none"
    only_here = sorted(have - stored)[:5] or "none"
    raise CommitMismatch(
        f"the commit of step {manifest.save.step} and this model have different tensors; "
        f"only in the commit: {only_stored}; only in the model: {only_here}"
    )


def _compare_shapes(targets: Mapping[str, Tensor], manifest: Manifest) -> None:
    differing = []
    for name, tensor in targets.items():
        entry = manifest.tensors[name]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            stored = f"{entry.dtype} {list(entry.shape)}"
            here = f"{dtype} {list(tensor.shape)}"
            differing.append(f"{name} is {stored} in the commit, {here} in this model")
    if differing:
        if differing[1:]:
            others = f" (and {len(differing) - 1} more of {len(targets)} tensors differ)"
        else:
            others = ""
        raise CommitMismatch(
            f"{differing[0]}{others}; hint: the configuration was changed; use a new job name "
            "for a new model"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return value


def _class_name(optimizer: Optimizer) -> str:
    """Return the name of the torch class that the optimizer is or extends; without one, its own
    class.

    Wrappers do not count, and neither does the number of bits in which a class keeps its state, as
    in PagedAdamW8bit of bitsandbytes.
    """
    for name in ("optimizer", "optim"):  # accelerate's wrapper, and ZeroRedundancyOptimizer
        inner = getattr(optimizer, name, None)
        if isinstance(inner, Optimizer):
            return _class_name(inner)
    for kind in type(optimizer).__mro__:
        if kind is not Optimizer and f"{kind.__module__}.".startswith("torch.optim."):
            return kind.__name__
    name = type(optimizer).__name__
    return _BITS.sub("", name.removeprefix("Paged"))


def _refuse_other_class(stored: str | None, optimizer: Optimizer) -> None:
    """Raise CommitMismatch if the commit's optimizer state was saved by another optimizer class.

    With its settings, for example, AdamW would compute as Adam.

    `stored` is None in an imported commit and in one of an older Ebbflow.
    """
    here = _class_name(optimizer)
    if stored not in (None, here):
        raise CommitMismatch(
            f"the commit has the state of {stored}, and the optimizer is {here}; fix: {stored}, or "
            "another name for the job"
        )


def _refuse_other_optimizer(stored: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise CommitMismatch if the settings in a commit belong to another optimizer class.

    The state of that class would be loaded and have no effect. This finds some classes in commits
    that do not name them.

    One setting more or less can come from another release of torch, and some from a scheduler.
    """
    missing = sorted(set(optimizer.defaults) - set(stored))
    foreign = sorted(set(stored) - set(optimizer.param_groups[0]))
    if len(missing) < _OTHER_SETTINGS or len(foreign) < _OTHER_SETTINGS:
        return
    raise CommitMismatch(
        f"the commit has the state of another optimizer, with {', '.join(foreign)}; "
        f"{type(optimizer).__name__} has {', '.join(missing)}; fix: the optimizer of the commit, or "
        "another name for the job"
    )


def _group_of(parameter: torch.Tensor, optimizer: Optimizer) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return group
    raise LookupError("the parameter is in no group of the optimizer")
