"""Denoiser of point clouds: a transformer in plain torch, whose tokens are the points.

Each point attends to all others, as in Point-E (Nichol et al. 2022), or, with `latents`, to learned
tokens that attend to all points (Set Transformer, Lee et al. 2019), which makes large clouds
affordable. Timestep and category scale and shift every normalisation (DiT, Peebles and Xie 2023).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

_FREQUENCIES = 4  # of a coordinate's Fourier features: 1, 2, 4 and 8
_TIME_FEATURES = 64
_LONGEST_PERIOD = 10_000.0
_WIDENING = 4  # of the feed-forward layers


class ZeroLinear(nn.Linear):
    """Linear layer with initial weights of 0, so that each block starts as the identity."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class PointAttention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(hidden, 2 * hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Let the tokens `x` attend to the tokens `seen`, both `[batch, tokens, hidden]`."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query(x), *self.key_value(seen).chunk(2, dim=-1))
        )
        return self.output(
            F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        )


class PointBlock(nn.Module):
    """Transformer block whose normalisations depend on `condition`, `[batch, hidden]`."""

    def __init__(self, hidden: int, heads: int, latents: int) -> None:
        super().__init__()
        self.modulation = ZeroLinear(hidden, 6 * hidden)
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        if latents:
            self.latents = nn.Embedding(latents, hidden)
        else:
            self.latents = None
        if latents:
            self.summary = PointAttention(hidden, heads)
        else:
            self.summary = None
        self.attention = PointAttention(hidden, heads)
        self.wide = nn.Linear(hidden, _WIDENING * hidden)
        self.narrow = nn.Linear(_WIDENING * hidden, hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_wide, scale_wide, gate_wide = self.modulation(condition)[
            :, None
        ].chunk(6, dim=-1)
        normed = self.norm(x) * (1 + scale) + shift
        seen = normed
        if self.latents is not None and self.summary is not None:
            seen = self.norm(self.summary(self.latents.weight.expand(len(x), -1, -1), normed))
        x = x + gate * self.attention(normed, seen)
        normed = self.norm(x) * (1 + scale_wide) + shift_wide
        return x + gate_wide * self.narrow(F.gelu(self.wide(normed), approximate="tanh"))


class PointEmbedding(nn.Module):
    """Embedding of points as tokens, and of timestep and category as the condition of each cloud.

    A token depends on the point's coordinates and on whether the point is known.
    """

    def __init__(self, hidden: int, categories: int) -> None:
        super().__init__()
        self.points = nn.Linear(3 * (1 + 2 * _FREQUENCIES) + 1, hidden)
        self.time = nn.Linear(_TIME_FEATURES, hidden)
        self.time_out = nn.Linear(hidden, hidden)
        if categories:
            self.category = nn.Embedding(categories, hidden)
        else:
            self.category = None

    def forward(self, x: Tensor, t: Tensor, category: Tensor, known: int) -> tuple[Tensor, Tensor]:
        waves = [x * 2.0**number for number in range(_FREQUENCIES)]
        mark = torch.zeros_like(x[..., :1])
        mark[:, :known] = 1.0
        tokens = self.points(
            torch.cat([x, *map(torch.sin, waves), *map(torch.cos, waves), mark], dim=-1)
        )
        half = _TIME_FEATURES // 2
        rates = torch.exp(torch.arange(half, device=x.device) * (-math.log(_LONGEST_PERIOD) / half))
        angles = t[:, None].to(x.dtype) * rates.to(x.dtype)
        condition = self.time_out(
            F.silu(self.time(torch.cat([angles.sin(), angles.cos()], dim=-1)))
        )
        if self.category is not None:
            condition = condition + self.category(category)
        return tokens, F.silu(condition)


class PointHead(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.modulation = ZeroLinear(hidden, 2 * hidden)
        self.norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.output = ZeroLinear(hidden, 3)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=-1)
        return self.output(self.norm(x) * (1 + scale) + shift)


class PointDenoiser(nn.Module):
    """Denoiser that maps noised clouds, timesteps and categories to predictions.

    Clouds and predictions are `[batch, points, 3]`, timesteps and categories `[batch]`. The first
    `known` points of each cloud are given: they are not noised, and their predictions have no
    meaning.
    """

    def __init__(
        self, *, hidden: int, layers: int, heads: int, latents: int, categories: int
    ) -> None:
        super().__init__()
        self.embedding = PointEmbedding(hidden, categories)
        self.blocks = nn.ModuleList(PointBlock(hidden, heads, latents) for _ in range(layers))
        self.head = PointHead(hidden)

    def forward(self, x: Tensor, t: Tensor, category: Tensor, known: int) -> Tensor:
        tokens, condition = self.embedding(x, t, category, known)
        for block in self.blocks:
            tokens = block(tokens, condition)
        return self.head(tokens, condition)


def count_flops(*, points: int, hidden: int, layers: int, latents: int) -> float:
    """Return the floating point operations of forward and backward for one cloud.

    A multiply-add counts as two; embeddings are left out.
    """
    matrices = 12 * points
    attention = 2 * points**2
    if latents:
        matrices = 12 * points + 4 * latents
        attention = 4 * points * latents
    return 6.0 * layers * (matrices * hidden**2 + attention * hidden)
