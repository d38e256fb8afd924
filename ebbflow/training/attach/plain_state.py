"""State of a script that has no state_dict.

Containers, tensors and arrays are restored in place; plain values are returned by `job.state`.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import MutableMapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from ebbflow.training.errors import AttachError

if TYPE_CHECKING:
    import numpy

_VALUE = "value"


class PlainState:
    """Wrapper that gives a list, dict, set, deque, tensor or array a state_dict.

    The value is restored in place, so that every name that the script has for it shows the restored
    content.
    """

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self.value = value

    def state_dict(self) -> dict[str, object]:
        value = self.value
        if isinstance(value, Tensor):
            return {_VALUE: value.detach().clone()}
        # A deque is no sequence that a commit has, and its length limit is the script's
        return {_VALUE: list(value) if isinstance(value, deque) else copy.copy(value)}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        saved = state[_VALUE]
        value = self.value
        if isinstance(value, Tensor):
            self._check_shape(tuple(saved.shape), tuple(value.shape))
            with torch.no_grad():
                value.copy_(saved)
        elif _is_array(value):
            self._check_shape(saved.shape, value.shape)
            value[...] = saved
        elif isinstance(value, list):
            value[:] = saved
        else:
            value.clear()
            if isinstance(value, deque):
                value.extend(saved)
            else:
                value.update(saved)

    def _check_shape(self, saved: tuple[int, ...], now: tuple[int, ...]) -> None:
        if tuple(saved) != tuple(now):
            raise AttachError(
                f"attach: {self._name} had the shape {tuple(saved)} in the commit, and has "
                f"{tuple(now)}; fix: make it as before, or give this job another name"
            )


class SavedValues(SimpleNamespace):
    """Plain values of a script, which every commit contains, as attributes of one object
    (`job.state`).
    """

    def state_dict(self) -> dict[str, object]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, object], /) -> None:
        vars(self).update(state)


def is_plain_state(value: object) -> bool:
    """Return whether a value that has no state_dict can be restored in place."""
    is_container = isinstance(value, list | MutableMapping | set | deque)
    return is_container or isinstance(value, Tensor) or _is_array(value)


def _is_array(value: object) -> TypeGuard[numpy.ndarray]:
    loaded = sys.modules.get("numpy")
    return loaded is not None and isinstance(value, loaded.ndarray)
