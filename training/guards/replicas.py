"""Whether ranks that should hold the same weights do: a sum over their bits, compared through the pulse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

# The pulse carries float64, which holds integers up to 2**53 exactly. A prime, so that no factor is lost to it.
_MODULUS = 2**47 - 115
_MULTIPLIER = 1_000_003
# Summed at once: adding up as int64 first makes a copy of up to eight times the size, for which there may be no room.
_CHUNK = 2**22


def weights_sum(module: nn.Module) -> int:
    """Of this rank's part of every parameter: from 1 to 2**47. One pass, on the parameters' own device.

    Each tensor's bits are added up as integers, and the sums combined in the order of the parameters. A flipped bit or
    a value that differs always shows; values that changed places within one tensor do not.
    """
    sums = []
    for parameter in module.parameters():
        local = parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()
        if local.numel():
            sums.append(torch.stack([part.sum(dtype=torch.int64) for part in _bits(local).split(_CHUNK)]).sum())
    total = 0
    for value in torch.stack(sums).tolist() if sums else []:
        total = (total * _MULTIPLIER + value) % _MODULUS
    return total + 1


def odd_ranks(sums: Sequence[float], copies: int) -> tuple[list[int], bool]:
    """(ranks whose weights differ from those of their replicas, whether a majority says so).

    sums: of all ranks. copies: of the model; neighbours share one copy, so that rank r's replicas are those with the
    same r modulo the ranks of a copy. Where no sum is that of more than half, all replicas of that part are named.
    """
    shards = len(sums) // copies
    odd: list[int] = []
    certain = True
    for first in range(shards):
        ranks = range(first, len(sums), shards)
        (usual, count), *others = Counter(sums[rank] for rank in ranks).most_common()
        if not others:
            continue
        majority = 2 * count > len(ranks)
        certain = certain and majority
        odd += [rank for rank in ranks if not majority or sums[rank] != usual]
    return sorted(odd), certain


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.contiguous().view(-1)
    width = flat.element_size()
    return flat.view(torch.int32 if width % 4 == 0 else torch.int16 if width == 2 else torch.uint8)
