"""Text as token shards, and the order in which samples are drawn from them. Imports no torch."""

from __future__ import annotations

from training.data.build import prepare_tokens
from training.data.order import SampleOrder
from training.data.tokenizer import check_vocabulary
from training.data.tokens import TokenArrays, Tokens, open_tokens

__all__ = ["SampleOrder", "TokenArrays", "Tokens", "check_vocabulary", "open_tokens", "prepare_tokens"]
