"""Find the parts of a tensor that this rank holds."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor that this rank holds."""

    # Position of the part's first element in the whole tensor, by dimension
    offsets: tuple[int, ...]
    local: Tensor  # the part, in the memory of the rank's own tensor

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.local.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The part's index into the whole tensor."""
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)
        )


def own_boxes(tensor: Tensor) -> list[Box]:
    """Return the non-empty rectangular parts of a plain or distributed tensor that this rank holds.

    A tensor whose rows are cut into several groups, each of them sharded, has one part for each
    group. Torch's `compute_local_shape_and_global_offset` knows the first part only.
    """
    if not isinstance(tensor, DTensor):
        if tensor.numel():
            return [Box((0,) * tensor.dim(), tensor.detach())]
        return []
    local = tensor.to_local().detach()
    mesh = tensor.device_mesh
    indices = dict[int, Tensor]()
    coordinate = mesh.get_coordinate()
    if coordinate is None or not local.numel():
        return []
    for number, placement in enumerate(tensor.placements):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:  # sharded
            whole = indices.get(dimension, torch.arange(tensor.shape[dimension]))
            # Of torch's _StridedShard
            groups = _chunk(whole, getattr(placement, "split_factor", 1))
            indices[dimension] = torch.cat(
                [_chunk(group, mesh.size(number))[coordinate[number]] for group in groups]
            )
    ranges = [
        _find_runs(indices[d]) if d in indices else [(0, 0, size)]
        for d, size in enumerate(tensor.shape)
    ]
    return [
        Box(
            tuple(start for start, _, _ in box),
            local[tuple(slice(at, at + size) for _, at, size in box)],
        )
        for box in itertools.product(*ranges)
    ]


def _chunk(indices: Tensor, count: int) -> list[Tensor]:
    parts = list(indices.chunk(count))
    return parts + [indices[:0]] * (count - len(parts))


def _find_runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Split ascending indices into runs of consecutive numbers.

    Return first index, position and length of each run.
    """
    ends = [*((indices.diff() != 1).nonzero().flatten() + 1).tolist(), len(indices)]
    return [(int(indices[at]), at, end - at) for at, end in itertools.pairwise([0, *ends])]
