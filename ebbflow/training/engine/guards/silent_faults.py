"""Checks of one rank's own hardware: bits that flip at rest, and arithmetic that is wrong.

No other rank holds the same shard with FSDP2, so a rank compares what it has with what it had, and
what it computes with what it computes a second time. Both are off unless configured.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ebbflow.training.workload import Loss

# A prime below 2**53, because the step sync sends float64, which represents integers exactly up to
# 2**53.
_MODULUS = 2**47 - 115
_MULTIPLIER = 1_000_003
# Elements that are added up at once. A sum as int64 copies its input to up to eight times the size.
_CHUNK = 2**22


class Differences(NamedTuple):
    """What differed on one rank between two computations of one step."""

    gradients: bool  # before they were reduced over the ranks
    loss: bool
    update: bool  # the rank's shard of weights and optimizer state after the step


class RestingState:
    """Detector of changes in a rank's weights and optimizer state between two optimizer steps.

    In that time nothing may change them.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._checksum: int | None = None  # None before the first step

    def remember(self) -> None:
        """Store the checksum of weights and optimizer state after an optimizer step."""
        self._checksum = self._compute()

    def has_changed(self) -> bool:
        """Return whether any bit has changed since the last optimizer step."""
        return self._checksum is not None and self._checksum != self._compute()

    def _compute(self) -> int:
        return checksum([*self._module.parameters(), *_state_tensors(self._optimizer)])


class RepeatedStep:
    """A step that is computed twice from the same weights, state, batch and random numbers.

    Keeps a copy of the rank's weights, buffers and optimizer state from its creation on.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer
        self._weights = _copies([*module.parameters(), *module.buffers()])
        self._state = {
            parameter: _copy_state(state) for parameter, state in optimizer.state.items()
        }
        self._groups = [_settings(group) for group in optimizer.param_groups]
        self._random = torch.get_rng_state()
        self._device_random = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        self._passes: list[_Pass] = []
        self._gradients = 0

    @contextmanager
    def watch_gradients(self, *, compiled: bool) -> Iterator[None]:
        """Return a context for forward and backward that adds up the bits of the rank's own
        gradients before they are reduced.

        compiled: the model is compiled. Hooks would compile it again, so its gradients are not
            watched.
        """
        self._gradients = 0
        handles: list[RemovableHandle] = []
        followed: dict[int, Tensor] = {}

        def add(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._gradients = (self._gradients + checksum([parameter.grad])) % _MODULUS

        def follow(module: nn.Module, _inputs: object) -> None:
            # In the forward pass: FSDP2's whole parameters exist only there
            for parameter in module.parameters(recurse=False):
                if parameter.requires_grad and id(parameter) not in followed:
                    followed[id(parameter)] = parameter
                    handles.append(parameter.register_post_accumulate_grad_hook(add))

        if not compiled:
            handles += [
                module.register_forward_pre_hook(follow) for module in self._module.modules()
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_pass(self, loss: Loss) -> None:
        """Record the result of one of the computations, after its optimizer step."""
        tensors = [*self._module.parameters(), *_state_tensors(self._optimizer)]
        self._passes.append(_Pass(self._gradients, checksum([loss.sum]), checksum(tensors)))

    def restore(self) -> None:
        """Restore weights, buffers, optimizer state and random numbers to their values before the
        step.
        """
        with torch.no_grad():
            for tensor, before in self._weights:
                tensor.copy_(before)
            for parameter in list(self._optimizer.state):
                if parameter not in self._state:
                    del self._optimizer.state[parameter]
            for parameter, before in self._state.items():
                _restore_state(self._optimizer.state[parameter], before)
        for group, values in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name in group.keys() - values.keys() - {"params"}:
                del group[name]
            group.update(values)
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random)

    def compare(self) -> Differences:
        """Return the differences between two computations of the same step."""
        first, second = self._passes
        return Differences(
            gradients=first.gradients != second.gradients,
            loss=first.loss != second.loss,
            update=first.update != second.update,
        )


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return a checksum of this rank's shards of the tensors, from 1 to 2**47.

    It sums the bits of each tensor as integers, and combines the sums in order. The checksum
    changes with any flipped bit or changed value, but not if values within one tensor swap places.
    """
    sums: list[Tensor] = []
    for tensor in tensors:
        local = _local(tensor)
        if local.numel():
            flat = local.contiguous().view(-1)
            width = flat.element_size()
            if width % 4 == 0:
                bits = flat.view(torch.int32)
            else:
                bits = flat.view(torch.int16 if width == 2 else torch.uint8)
            sums.append(torch.stack([part.sum() for part in bits.split(_CHUNK)]).sum())
    total = 0
    for value in _read(sums):
        total = (total * _MULTIPLIER + value) % _MODULUS
    return total + 1


@dataclass(frozen=True)
class _Pass:
    gradients: int
    loss: int
    update: int


def _read(sums: list[Tensor]) -> list[int]:
    """Copy the numbers to the host, in a single copy if they are all on one device."""
    if len({value.device for value in sums}) == 1:
        return torch.stack(sums).tolist()
    return [int(value) for value in sums]


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors: list[Tensor] = []
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def _copies(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    shards = [_local(tensor) for tensor in tensors]
    return [(shard, shard.clone()) for shard in shards]


def _copy(value: Any) -> Any:
    return _local(value).clone() if isinstance(value, Tensor) else value


def _copy_state(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copy(value) for name, value in state.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _restore_state(state: dict[str, Any], before: Mapping[str, Any]) -> None:
    for name in list(state):
        if name not in before:
            del state[name]
    for name, value in before.items():
        if isinstance(value, Tensor):
            _local(state[name]).copy_(value)
        else:
            state[name] = value
