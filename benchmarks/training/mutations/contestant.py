"""What the two that are asked have in common: the state that they store, and what can become of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

_SIZES = {"first.weight": (64, 48), "first.bias": (64,), "second.weight": (32, 64)}
STEPS = (1, 2)  # the second is changed; the first lends what belongs to another step


class Outcome(StrEnum):
    """What a start brings.

    FELL_BACK: to the earlier one, and it said so; UNTOLD: and it did not. CRASHED, which the
    process that starts may not live to say: it died, ran out of memory, or gave no answer in time.
    """

    REFUSED = "refused"
    FELL_BACK = "fell back"
    UNTOLD = "untold"
    SAME = "same bits"
    CRASHED = "crashed"
    WRONG = "wrong"


@dataclass(frozen=True)
class Answer:
    """named: whether a command that verifies names what was changed. told: what a person would
    read.
    """

    outcome: Outcome
    named: bool
    told: str


class Contestant(Protocol):
    """Two steps of two ranks below a folder."""

    @staticmethod
    def store(folder: Path) -> None:
        """Make them."""
        ...

    def __init__(self, folder: Path) -> None: ...

    def ask(self) -> Answer:
        """Load the newest, as somebody who starts would, and compare it with what was stored."""
        ...


def tensors(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(size, generator=generator) for name, size in _SIZES.items()}


def model(step: int) -> nn.Module:
    """A module that has these tensors as its parameters."""
    found = nn.Module()
    for name, tensor in tensors(step).items():
        owner, _, leaf = name.partition(".")
        if not hasattr(found, owner):
            found.add_module(owner, nn.Module())
        found.get_submodule(owner).register_parameter(leaf, nn.Parameter(tensor))
    return found


def same(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Bit for bit: NaN equals itself here, and zero is not minus zero."""
    return loaded.keys() == expected.keys() and all(
        loaded[name].detach().numpy().tobytes() == tensor.numpy().tobytes()
        for name, tensor in expected.items()
    )
