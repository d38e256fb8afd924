"""Matrix products in fp8 with torchao: the linear layers of a model's units compute with scaled
8-bit floats.

Weights, gradients and commits stay as they are, and so do names, initial weights and the layers'
identity.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ebbflow.training.errors import ParallelError

_CAPABILITY = (8, 9)  # as of Ada; the products need Tensor Cores for fp8
_MULTIPLE = 16  # of both sizes of a layer, which torch's scaled product needs
_OUTPUTS = frozenset({"head", "lm_head"})  # stay as they are: their logits need the precision


def convert_units(
    units: Iterable[tuple[str, nn.Module]], mode: str, device: torch.device
) -> list[str]:
    """Make the linear layers of the named units compute in fp8, in place. Return the layers' names.

    Mode "emulate" rounds as fp8 does and computes in the usual dtype, on any device. Raises
    ParallelError if torchao or the GPU cannot do it, or if no layer can be converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise ParallelError(
            f"fsdp.float8 {mode}: {error}; fix: pip install torchao==0.18.0"
        ) from error
    if mode == "on" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < _CAPABILITY:
            raise ParallelError(
                f"fsdp.float8 on: {torch.cuda.get_device_name(device)} has compute capability "
                f"{major}.{minor}, fp8 needs 8.9 (L4, L40S, H100 or later); fix: fsdp.float8 off"
            )
    config = Float8LinearConfig(emulate=mode == "emulate", pad_inner_dim=True)
    converted = dict[int, str]()
    for unit_name, unit in units:
        for name, layer in unit.named_modules(prefix=unit_name):
            if id(layer) in converted or _OUTPUTS & set(name.split(".")):
                continue
            if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
                continue
            if layer.in_features % _MULTIPLE == layer.out_features % _MULTIPLE == 0:
                own = Float8Linear.from_float(layer, config=config).__dict__
                layer.__dict__.update(
                    {key: value for key, value in own.items() if key not in layer.__dict__}
                )
                layer.__class__ = _subclass(Float8Linear, type(layer))  # pyright: ignore[reportAttributeAccessIssue]
                converted[id(layer)] = name
    if not converted:
        raise ParallelError(
            f"fsdp.float8 {mode}: no unit has a linear layer whose sizes are multiples of "
            f"{_MULTIPLE}; fix: fsdp.float8 off"
        )
    return list(converted.values())


@functools.cache
def _subclass(float8: Any, kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (float8, kind), {"__module__": kind.__module__})
