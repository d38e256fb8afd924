"""What is done to a unit itself, before it is sharded or replicated: recompute its activations, compile it.

A unit is changed by giving it a subclass of its own class. So no wrapper stands in the tree of modules, and the names
of parameters, hence digests and commits, are those of the plain model. Equal units share one subclass and with it one
compiled code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten

# Outputs that cost much to compute for their size: matrix products, and attention in each of torch's kernels.
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


def recompute_units(units: Iterable[nn.Module], how: str) -> None:
    """how: "full" keeps only a unit's input for backward; "selective" also what `_EXPENSIVE` lists; "none" nothing."""
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(kind: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(kind.forward, self, *args, **options, **kwargs)

        return forward

    _override_forward(units, recomputed)


def autocast(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """The forward pass of the whole model computes in `dtype` where that is safe; parameters keep theirs."""

    def in_dtype(kind: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device_type, dtype=dtype):
                return kind.forward(self, *args, **kwargs)

        return forward

    _override_forward([model], in_dtype)


def compile_units(units: Sequence[nn.Module]) -> None:
    """In place, and at the first call, for the shapes of that call: micro-batches are of one size.

    Each unit by itself and not the whole model: blocks that are equal are compiled once, and hooks between them stay.
    """
    # Units that differ count towards one limit, beyond which torch goes on without compiling them.
    limit = max(8, 2 * len(units))
    for unit in units:
        unit.compile(dynamic=False, recompile_limit=limit)


def _override_forward(units: Iterable[nn.Module], make: Callable[[type[nn.Module]], Callable[..., Any]]) -> None:
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for unit in units:
        kind = type(unit)
        if kind not in kinds:
            kinds[kind] = type(kind.__name__, (kind,), {"forward": make(kind), "__module__": kind.__module__})
        unit.__class__ = kinds[kind]


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _EXPENSIVE else CheckpointPolicy.PREFER_RECOMPUTE
