"""Text as token shards, and the order in which samples are drawn from them. Imports no torch."""

from __future__ import annotations

from training.data.order import SampleOrder
from training.data.tokens import TokenArrays, Tokens, open_tokens, prepare_tokens

__all__ = ["SampleOrder", "TokenArrays", "Tokens", "open_tokens", "prepare_tokens"]
