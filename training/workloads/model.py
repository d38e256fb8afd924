"""A causal language model: pre-norm transformer with learned positions, RMSNorm, fused qkv and an untied head.

`infra.model_shape.causal_lm_shape` holds its size as plain numbers for the planner.
"""

from __future__ import annotations

import math

import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from infra.config.schema import ModelConfig

_INITIAL_STD = 0.02


class Linear(nn.Linear):
    """A matrix without bias that starts from a normal distribution of standard deviation `std`."""

    def __init__(self, inputs: int, outputs: int, *, std: float = _INITIAL_STD) -> None:
        self._std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class Embedding(nn.Embedding):
    """A table that starts like `Linear`."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_INITIAL_STD)


class Attention(nn.Module):
    """Causal self-attention over [batch, length, hidden]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.heads = model.num_heads
        self.qkv = Linear(model.hidden_size, 3 * model.hidden_size)
        self.projection = Linear(model.hidden_size, model.hidden_size, std=_residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, hidden / heads]
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(attended.transpose(1, 2).reshape(batch, length, hidden))


class Block(nn.Module):
    """Attention and a four times wider MLP, each normalised before and added to the residual stream."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(model)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.mlp_in = Linear(hidden, 4 * hidden)
        self.mlp_out = Linear(4 * hidden, hidden, std=_residual_std(model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class Embeddings(nn.Module):
    """Token and position vectors, added: [batch, length] of token numbers to [batch, length, hidden]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.token = Embedding(model.vocab_size, model.hidden_size)
        self.position = Embedding(model.sequence_length, model.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """The last norm and the projection to logits [batch, length, vocabulary]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden_size)
        self.logits = Linear(model.hidden_size, model.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class CausalLM(nn.Module):
    """Token numbers [batch, length] to logits [batch, length, vocabulary]; length is at most sequence_length."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(model)
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.num_layers))
        self.head = Head(model)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _residual_std(model: ModelConfig) -> float:
    """Each layer adds to the stream twice; so scaled, its variance does not grow with depth (GPT-2, section 2.3)."""
    return _INITIAL_STD / math.sqrt(2 * model.num_layers)
