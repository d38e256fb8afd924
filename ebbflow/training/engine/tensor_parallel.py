"""Tensor parallelism: a group of ranks computes each layer together, and each rank holds a part of
its weights.

The layers are split as in Megatron-LM (Shoeybi et al. 2019, section 3): the first matrix of
attention and MLP by columns, the second by rows, so that the ranks exchange activations twice per
block in the forward pass and twice in the backward pass. All ranks of a group have the same data.
Weights are DTensors on the mesh dimension "tensor", which FSDP2 shards further; activations are
plain tensors. Never run on CUDA with NCCL.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ebbflow.training.errors import WorkloadError

# Conversions of activations `[batch, length, width]`: placement on the ranks before and after, and
# of the gradient.
_Conversion = tuple[Placement, Placement, Placement]
# Changes nothing, but adds up the ranks' gradients
_SHARE: _Conversion = (Replicate(), Replicate(), Partial())
_ADD: _Conversion = Partial(), Replicate(), Replicate()
_JOIN: _Conversion = Shard(2), Replicate(), Replicate()
_CUT: _Conversion = Replicate(), Shard(2), Shard(2)


@dataclass(frozen=True, kw_only=True)
class SplitLayer:
    """How a group of ranks computes a layer.

    By default each rank has all of its weights and computes all of it.
    """

    # The dimension of the weight that is split; None: each rank has the whole weight
    dimension: int | None = None
    # The number of equal parts of this dimension that are split each, as of a fused matrix
    parts: int = 1
    entry: _Conversion | None = None  # the conversion of the input
    exit: _Conversion | None = None  # the conversion of the output
    # Whether each rank computes only its part of the weight's gradient
    adds_gradients: bool = False

    def placement(self) -> Placement:
        if self.dimension is None:
            return Replicate()
        if self.parts > 1:
            return _StridedShard(self.dimension, split_factor=self.parts)
        return Shard(self.dimension)


WHOLE = SplitLayer()  # input and output are equal on all ranks
# The same; the layers after it compute parts of their outputs
BEFORE_SPLIT = SplitLayer(exit=_SHARE)
# Each rank applies the weights to its own attention heads
PER_HEAD = SplitLayer(adds_gradients=True)
COLUMNS = SplitLayer(dimension=0)  # each rank computes a part of the outputs
FUSED_COLUMNS = SplitLayer(dimension=0, parts=3)  # the same, of queries, keys and values
ROWS = SplitLayer(dimension=1, exit=_ADD)  # each rank has a part of the inputs
ROWS_OF_WHOLE = SplitLayer(dimension=1, entry=_CUT, exit=_ADD)  # each rank has all inputs
EMBEDDING = SplitLayer(dimension=1, exit=_JOIN)  # each rank computes a part of each vector


def check_splits(model: nn.Module, size: int) -> None:
    """Raise WorkloadError if a tensor group of `size` ranks cannot split a workload's model."""
    if size > 1 and not hasattr(model, "split_layers"):
        raise WorkloadError(
            f"parallel.tensor_size {size}: {type(model).__name__} has no split_layers, as the "
            "built-in model has; fix: parallel.tensor_size: 1"
        )


def split_weights(
    module: nn.Module, layers: Mapping[nn.Module, SplitLayer], group: DeviceMesh
) -> None:
    """Replace the parameters, which are on the meta device, with DTensors on the mesh `group`.

    Keep ties.
    """
    done: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in done:
                if name == "weight":
                    layer = layers[part]
                else:
                    layer = WHOLE
                shape = list(parameter.shape)
                if layer.dimension is not None:
                    pieces = group.size() * layer.parts
                    if shape[layer.dimension] % pieces:
                        raise WorkloadError(
                            f"parallel.tensor_size {group.size()}: a weight of "
                            f"{type(part).__name__} has {shape[layer.dimension]} values in "
                            f"dimension {layer.dimension}, not a multiple of {pieces}; fix: a "
                            "tensor_size that divides it"
                        )
                    shape[layer.dimension] //= group.size()
                local = parameter.new_empty(shape)
                whole = {"shape": parameter.shape, "stride": parameter.stride()}
                split = DTensor.from_local(
                    local, group, [layer.placement()], run_check=False, **whole
                )
                done[parameter] = nn.Parameter(split)
            part._parameters[name] = done[parameter]


def choose_sharded_dimension(parameter: nn.Parameter) -> Shard:
    """Return the dimension along which FSDP2 shards a weight.

    This is dimension 1 (columns) if the tensor group has split the rows, otherwise dimension 0.
    """
    if isinstance(parameter, DTensor):
        placements = parameter.placements
    else:
        placements = ()
    return Shard(1 if any(getattr(placement, "dim", None) == 0 for placement in placements) else 0)


def split_computation(layers: Mapping[nn.Module, SplitLayer], group: DeviceMesh) -> None:
    """Make each layer compute its part, by setting its `__class__` to a subclass.

    Layers of one kind share one.
    """
    # Outputs that were converted are views in the eyes of autograd. No code changes them in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    kinds: dict[tuple[type[nn.Module], SplitLayer], type[nn.Module]] = {}
    for module, layer in layers.items():
        key = type(module), layer
        if key not in kinds:
            own = {"forward": _make_forward(layer, group), "__module__": key[0].__module__}
            kinds[key] = type(key[0].__name__, (key[0],), own)
        module.__class__ = kinds[key]


def local_part(weight: Tensor) -> Tensor:
    """Return a weight as a plain tensor; in a tensor group, only the part that this rank holds."""
    if isinstance(weight, DTensor):
        return weight.to_local()
    return weight


def is_whole(parameter: Tensor) -> bool:
    """Return whether a parameter is replicated, and not split, across the ranks of a tensor group.

    Its sharding by FSDP2 does not matter.
    """
    return isinstance(parameter, DTensor) and parameter.placements[-1].is_replicate()


def _convert(x: Tensor, conversion: _Conversion | None, group: DeviceMesh) -> Tensor:
    if conversion is None:
        return x
    before, after, gradient = conversion
    whole = DTensor.from_local(x, group, [before], run_check=False).redistribute(placements=[after])
    return whole.to_local(grad_placements=[gradient])


def _make_forward(layer: SplitLayer, group: DeviceMesh) -> Callable[[Any, Tensor], Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = _convert(local_part(self.weight), _SHARE if layer.adds_gradients else None, group)
        x = _convert(x, layer.entry, group)
        if isinstance(self, nn.Embedding):
            y = F.embedding(x, weight)
        elif isinstance(self, nn.RMSNorm):
            y = F.rms_norm(x, self.normalized_shape, weight, self.eps)
        else:
            bias = self.bias
            if bias is not None:  # each rank has all of it, and uses the part of its outputs
                bias = local_part(bias)
                if layer.dimension == 0:
                    bias = _convert(bias, _SHARE, group).chunk(group.size())[group.get_local_rank()]
            if layer.exit is _ADD and bias is not None:  # once, not with the part of each rank
                return _convert(F.linear(x, weight), layer.exit, group) + bias
            y = F.linear(x, weight, bias)
        return _convert(y, layer.exit, group)

    return forward
