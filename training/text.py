"""The workload that comes with Ebbflow: a causal language model on byte-level text."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from infra.config.schema import RunConfig
from infra.model_shape import causal_lm_shape
from training.data import SampleOrder, TokenArrays
from training.errors import DataError
from training.gang import Gang
from training.model import CausalLM
from training.workload import Cursor, Loss


@dataclass(frozen=True)
class TextBatch:
    """inputs and targets: int64 [samples, sequence_length]; a target is the token after its input."""

    inputs: Tensor
    targets: Tensor

    @property
    def weight(self) -> float:
        return float(self.inputs.numel())

    def split(self, parts: int) -> list[TextBatch]:
        return [
            TextBatch(inputs, targets)
            for inputs, targets in zip(self.inputs.tensor_split(parts), self.targets.tensor_split(parts), strict=True)
        ]


class TextWorkload:
    """Next-token prediction. `tokens` are the shards, `gang` says which part of an evaluation is this rank's."""

    def __init__(self, config: RunConfig, tokens: TokenArrays, gang: Gang) -> None:
        self._config = config
        self._tokens = tokens
        self._gang = gang
        self._length = config.model.sequence_length
        self._shape = causal_lm_shape(config.model)
        self._order = SampleOrder(self._windows(tokens.train, "train"), config.training.seed)
        self._held_out = self._evenly_spaced(self._windows(tokens.held_out, "held-out"))

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return CausalLM(self._config.model)

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, CausalLM)
        return [model.embeddings, *model.blocks, model.head]

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        return self._batch(self._tokens.train, self._order.window(cursor.first, cursor.count))

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        logits = model(batch.inputs)
        total = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")
        return Loss(total, batch.weight)

    def flops(self, batch: TextBatch) -> float:
        return len(batch.inputs) * self._shape.flops_per_sample

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """held_out_loss in nats per token, over the same windows at any world size."""
        training = self._config.training
        micro_batch = max(1, training.batch_size // (self._gang.world_size * training.gradient_accumulation_steps))
        # A sharded model is gathered by all ranks together, so that all must make the same number of passes.
        passes = math.ceil(math.ceil(len(self._held_out) / self._gang.world_size) / micro_batch)
        share = Cursor(0, len(self._held_out)).share(self._gang.rank, self._gang.world_size)
        batch = self._batch(self._tokens.held_out, self._held_out[share.first : share.first + share.count])
        losses = [self.loss(model, part) for part in batch.split(passes)]
        own = torch.tensor([sum(loss.sum.double().item() for loss in losses), batch.weight], dtype=torch.float64)
        total, weight = self._gang.gather(own).sum(dim=0).tolist()
        return {"held_out_loss": total / weight}

    def _batch(self, tokens: np.ndarray, windows: np.ndarray) -> TextBatch:
        offsets = windows[:, None] * self._length + np.arange(self._length + 1)
        text = torch.from_numpy(tokens[offsets].astype(np.int64)).to(self._gang.device)
        return TextBatch(text[:, :-1], text[:, 1:])

    def _windows(self, tokens: np.ndarray, side: str) -> int:
        """Non-overlapping windows; each needs one token more, the target of its last."""
        windows = (tokens.size - 1) // self._length
        if windows < 1:
            raise DataError(
                f"{side} text has {tokens.size} tokens, fewer than the {self._length + 1} of one sample "
                "(model.sequence_length + 1); fix: more text, or a smaller model.sequence_length"
            )
        largest = int(tokens.max())
        if largest >= self._config.model.vocab_size:
            raise DataError(
                f"{side} text holds token {largest}, but model.vocab_size is {self._config.model.vocab_size}; "
                f"fix: set model.vocab_size to at least {largest + 1}"
            )
        return windows

    def _evenly_spaced(self, windows: int) -> np.ndarray:
        count = min(self._config.data.held_out_samples, windows)
        return np.arange(count, dtype=np.int64) * windows // count
