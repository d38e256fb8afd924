"""The workload that comes with Ebbflow: a causal language model on text, as bytes or as tokens of a vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from infra.model_shape import causal_lm_shape
from training.data import SampleOrder, check_vocabulary, open_tokens, prepare_tokens
from training.errors import DataError
from training.workload import Cursor, Loss, WorkloadContext
from training.workloads.model import CausalLM


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
    """Next-token prediction on the token shards that `prepare` made. Raises DataError where they do not suffice."""

    weight_unit = "tokens"

    def __init__(self, context: WorkloadContext) -> None:
        config = context.config
        self._config = config
        self._context = context
        self._tokens = open_tokens(context.store, context.prepared["fingerprint"])
        check_vocabulary(config, self._tokens.about.vocab_size)
        self._length = config.model.sequence_length
        self._shape = causal_lm_shape(config.model)
        self._order = SampleOrder(self._windows(self._tokens.train, "train"), config.training.seed)
        self._held_out = self._evenly_spaced(self._windows(self._tokens.held_out, "held-out"))

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        """The token shards, built once for the same text."""
        return prepare_tokens(context.config.data, context.store, project_root=context.project_root).to_json()

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
        """held_out_loss in nats per token, over the same windows at any world size; and what it is per byte of text,
        in bits, which is comparable between tokenizers."""
        training = self._config.training
        world_size = self._context.world_size
        micro_batch = max(1, training.batch_size // (world_size * training.gradient_accumulation_steps))
        # A sharded model is gathered by all ranks together, so that all must make the same number of passes.
        passes = math.ceil(math.ceil(len(self._held_out) / world_size) / micro_batch)
        share = Cursor(0, len(self._held_out)).share(self._context.rank, world_size)
        batch = self._batch(self._tokens.held_out, self._held_out[share.first : share.first + share.count])
        losses = [self.loss(model, part) for part in batch.split(passes)]
        sums = [sum(loss.sum.double().item() for loss in losses), batch.weight]
        own = torch.tensor(sums, dtype=torch.float64, device=self._context.device)
        total, weight = self._context.gather(own).sum(dim=0).tolist()
        about = self._tokens.about
        bits_per_token = total / weight / math.log(2)
        per_byte = bits_per_token * about.held_out_tokens / max(about.held_out_bytes, 1)
        return {"held_out_loss": total / weight, "held_out_bits_per_byte": per_byte}

    def _batch(self, tokens: np.ndarray, windows: np.ndarray) -> TextBatch:
        offsets = windows[:, None] * self._length + np.arange(self._length + 1)
        text = torch.from_numpy(tokens[offsets].astype(np.int64)).to(self._context.device)
        return TextBatch(text[:, :-1], text[:, 1:])

    def _windows(self, tokens: np.ndarray, side: str) -> int:
        """Non-overlapping windows; each needs one token more, the target of its last."""
        windows = (tokens.size - 1) // self._length
        if windows < 1:
            raise DataError(
                f"{side} text has {tokens.size} tokens, fewer than the {self._length + 1} of one sample "
                "(model.sequence_length + 1); fix: more text, or a smaller model.sequence_length"
            )
        return windows

    def _evenly_spaced(self, windows: int) -> np.ndarray:
        count = min(self._config.data.held_out_samples, windows)
        return np.arange(count, dtype=np.int64) * windows // count
