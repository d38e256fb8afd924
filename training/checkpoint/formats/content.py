"""What every format can hold: weights by name, and an optimizer's state and settings by the names of the weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from training.errors import CheckpointError

_PREFIXES = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
_SHAPED = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # states that torch's optimizers give the parameter's shape

Source = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]


@dataclass(kw_only=True)
class Content:
    """moments: state tensors by parameter and state. settings: as `optimizer_settings` makes them, None without an
    optimizer. extra: what our own commits carry besides, JSON.

    source: where the values of the tensors are, None: in them. Otherwise they have a shape and a dtype alone (device
    "meta"), and their values are to be asked for by `stream`.
    """

    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    settings: dict[str, Any] | None = None
    step: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    source: Source | None = None

    def stream(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors of `named` with their values, in this order, each until the next is asked for.

        There need not be memory for all of them, and what one had may be used again for another.
        """
        named = self.named()
        yield from ((name, named[name]) for name in names) if self.source is None else self.source(list(names))

    def named(self) -> dict[str, Tensor]:
        """The tensors as a commit names them."""
        named = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        for name, states in self.moments.items():
            named |= {f"optimizer.{name}.{key}": tensor for key, tensor in states.items()}
        return named

    def without_optimizer(self) -> Content:
        return Content(weights=self.weights, step=self.step, extra=self.extra, source=self.source)


def bare_weights(state: Mapping[str, Any], what: str) -> dict[str, Tensor]:
    """A state dict without what wrappers put before its names, and each tied tensor once, under its first name."""
    weights: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"{what}: {name!r} is a {type(tensor).__name__}: only tensors can be imported")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        bare = bare_name(name)
        if bare in weights:
            raise CheckpointError(f"{what}: {name!r} and another tensor are both {bare!r} without their wrappers")
        weights[bare] = tensor
    if not weights:
        raise CheckpointError(f"{what}: no weights in it")
    return weights


def bare_name(name: str) -> str:
    """`module.` is a wrapper's only in front; compilation and recomputation wrap inner modules too."""
    name = name.removeprefix(_PREFIXES[0])
    for prefix in _PREFIXES[1:]:
        name = name.replace(prefix, "")
    return name.removeprefix(_PREFIXES[0])


def add_optimizer(content: Content, document: Mapping[str, Any], what: str) -> None:
    """Take in an optimizer's state dict, whose parameters are numbers (torch's own) or names (DCP's).

    Raises CheckpointError where it cannot be told which number is which parameter.
    """
    groups, states = document["param_groups"], document["state"]
    names = _names(content, groups, states, what)
    settings: dict[str, Any] = {"param_groups": [], "scalars": {}}
    for group in groups:
        plain = {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}
        settings["param_groups"].append({**plain, "params": [names[str(number)] for number in group["params"]]})
    for number, state in states.items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                content.moments.setdefault(names[str(number)], {})[key] = value
            else:
                settings["scalars"].setdefault(names[str(number)], {})[key] = value
    for name, found in content.moments.items():
        for key in _SHAPED:
            if key in found and found[key].shape != content.weights[name].shape:
                shapes = f"{list(found[key].shape)}, the weight {list(content.weights[name].shape)}"
                raise CheckpointError(f"{what}: {key} of {name} has shape {shapes}; hint: --weights-only")
    content.settings = settings


def torch_optimizer(content: Content) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes: parameters are numbers, in the order of the groups."""
    assert content.settings is not None
    groups, states, number = [], {}, 0
    for group in content.settings["param_groups"]:
        settings = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        names = group["params"]
        numbers = list(range(number, number + len(names)))
        for place, name in zip(numbers, names, strict=True):
            state = {**content.moments.get(name, {}), **content.settings["scalars"].get(name, {})}
            if state:
                states[place] = state
        number += len(names)
        groups.append({**settings, "params": numbers, "param_names": list(names)})
    return {"state": states, "param_groups": groups}


def named_optimizer(content: Content) -> dict[str, Any]:
    """What torch's `set_state_dict` takes: parameters are names."""
    assert content.settings is not None
    scalars = content.settings["scalars"]
    names = [name for group in content.settings["param_groups"] for name in group["params"]]
    states = {name: {**content.moments.get(name, {}), **scalars.get(name, {})} for name in names}
    groups = [
        {key: tuple(value) if isinstance(value, list) and key != "params" else value for key, value in group.items()}
        for group in content.settings["param_groups"]
    ]
    return {"state": {name: state for name, state in states.items() if state}, "param_groups": groups}


def _names(
    content: Content, groups: Iterable[Mapping[str, Any]], states: Mapping[Any, Any], what: str
) -> dict[str, str]:
    """Name of each parameter as the optimizer calls it."""
    called = [str(number) for group in groups for number in group["params"]]
    given = [name for group in groups for name in group.get("param_names") or []]
    if not all(name.isdigit() for name in called):
        given = called
    if len(given) == len(called):
        names = [bare_name(name) for name in given]
    elif len(list(groups)) == 1:
        names = [name for name in content.weights if name.rsplit(".", 1)[-1] not in _BUFFERS]
    else:
        names = []
    unknown = [name for name in names if name not in content.weights]
    if len(names) != len(called) or unknown:
        why = f"no weights named {unknown[:3]}" if unknown else f"{len(called)} parameters without names"
        raise CheckpointError(
            f"{what}: whose the optimizer's state is cannot be told: {why}, {len(content.weights)} weights; "
            "hint: --weights-only, or save it with an optimizer made from model.named_parameters()"
        )
    return dict(zip(called, names, strict=True))


def _plain(value: Any) -> Any:
    plain = value.item() if isinstance(value, Tensor) else value
    if isinstance(plain, float) and not math.isfinite(plain):
        raise CheckpointError(f"an optimizer's setting is {plain}, which JSON cannot keep; hint: --weights-only")
    return plain
