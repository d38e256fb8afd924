"""Documents in rows of tokens: attention that stays inside each of them, and positions that start
anew.

The built-in language model loads this module if `model.end_of_document` is set.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from ebbflow.workloads.language.language_model import KeyValues


class Documents(KeyValues):
    """The documents of a batch, as the context of its tokens. No earlier tokens are kept.

    Args:
        tokens: `[batch, length]`.
        end: the token that is the last one of a document.
    """

    def __init__(self, tokens: Tensor, end: int) -> None:
        super().__init__(0)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        starts = (places * F.pad(tokens[:, :-1] == end, (1, 0))).cummax(dim=1).values
        self._positions = places - starts

    def positions(self, length: int) -> Tensor:
        """Return the position of each token in its document, `[batch, length]`."""
        return self._positions

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def make_mask(self, x: Tensor) -> None:
        """Make the mask of causal attention in each document, `[batch, 1, length, length]`, for all
        blocks.

        It is 0 or -inf and has the dtype of the queries that are computed from `x`, because
        attention would make such a copy of a mask of bools in each block.
        """
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        else:
            dtype = x.dtype
        places = torch.arange(self._positions.shape[1], device=self._positions.device)
        behind = places[:, None] - places  # how many places a token is behind another
        hidden = (behind < 0) | (behind > self._positions[:, :, None])
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
            hidden, -math.inf
        )
        self.mask = mask[:, None]
