"""Build token shards from text, and draw samples from them in a fixed order. Imports no torch."""

from ebbflow.training.data.build import prepare_tokens
from ebbflow.training.data.tokenizer import check_vocabulary
from ebbflow.training.data.tokens import SampleOrder, TokenArrays, Tokens, open_tokens

__all__ = [
    "SampleOrder",
    "TokenArrays",
    "Tokens",
    "check_vocabulary",
    "open_tokens",
    "prepare_tokens",
]
