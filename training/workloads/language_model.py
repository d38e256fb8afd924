"""The built-in workload: a causal language model on text.

A token is a byte or an entry of a tokenizer's vocabulary. The planner, which does not import torch, computes the
model's size with `ebbflow.infra.footprint.causal_lm_shape`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn

from ebbflow.infra.config.schema import ModelConfig
from ebbflow.infra.footprint import causal_lm_shape
from ebbflow.training.data import SampleOrder, check_vocabulary, open_tokens, prepare_tokens
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, Loss, WorkloadContext

_INITIAL_STD = 0.02


class Linear(nn.Linear):
    """A linear layer without bias, whose initial weights are normally distributed with standard deviation `std`."""

    def __init__(self, inputs: int, outputs: int, *, std: float = _INITIAL_STD) -> None:
        self._std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)


class Embedding(nn.Embedding):
    """An embedding table, whose initial weights are normally distributed with standard deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_INITIAL_STD)


class Attention(nn.Module):
    """Causal self-attention. Input and output have the shape `[batch, length, hidden]`."""

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
    """A transformer block: attention, then an MLP of fourfold width, each added to the residual stream."""

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
    """Token and position embeddings: token ids `[batch, length]` to vectors `[batch, length, hidden]`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.token = Embedding(model.vocab_size, model.hidden_size)
        self.position = Embedding(model.sequence_length, model.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """The final norm and the projection to logits `[batch, length, vocabulary]`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(model.hidden_size)
        self.logits = Linear(model.hidden_size, model.vocab_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


class CausalLM(nn.Module):
    """A causal language model: token ids `[batch, length]` to logits `[batch, length, vocabulary]`."""

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
    """Return a standard deviation that keeps the variance of the residual stream from growing with depth.

    Source: GPT-2, section 2.3.
    """
    return _INITIAL_STD / math.sqrt(2 * model.num_layers)


@dataclass(frozen=True)
class TextBatch:
    """A batch of token sequences, with the next token as the target of each token."""

    inputs: Tensor  # token numbers, int64 `[samples, sequence_length]`
    targets: Tensor  # the token after each input, of the same shape

    @classmethod
    def of(cls, text: Tensor) -> TextBatch:
        """Make a batch from token sequences of shape `[batch, length + 1]`."""
        return cls(text[:, :-1], text[:, 1:])

    @property
    def weight(self) -> float:
        return float(self.inputs.numel())

    def split(self, parts: int) -> list[TextBatch]:
        return [
            TextBatch(inputs, targets)
            for inputs, targets in zip(self.inputs.tensor_split(parts), self.targets.tensor_split(parts), strict=True)
        ]


class TextWorkload:
    """Next-token prediction on the token shards that `prepare` built. Raises DataError if there is too little text."""

    weight_unit = "tokens"

    def __init__(self, context: WorkloadContext) -> None:
        config = context.config
        self._config = config
        self._context = context
        self._reader: ThreadPoolExecutor | None = None  # reads a step ahead on a GPU
        self._ahead: tuple[Cursor, Future[Tensor]] | None = None
        self._tokens = open_tokens(context.store, context.prepared["fingerprint"])
        check_vocabulary(config, self._tokens.about.vocab_size)
        self._length = config.model.sequence_length
        self._shape = causal_lm_shape(config.model)
        self._order = SampleOrder(self._windows(self._tokens.train, "train"), config.training.seed)
        self._held_out = self._evenly_spaced(self._windows(self._tokens.held_out, "held-out"))

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        """Convert the text to token shards, unless the store already has them. Return the description of the shards."""
        return prepare_tokens(context.config.data, context.store, project_root=context.project_root).to_json()

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return CausalLM(self._config.model)

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, CausalLM)
        return [model.embeddings, *model.blocks, model.head]

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:
        if self._context.device.type != "cuda":
            return self._batch(self._tokens.train, self._order.window(cursor.first, cursor.count))
        if self._reader is None:  # a new thread would use the first GPU
            self._reader = ThreadPoolExecutor(1, "tokens", torch.cuda.set_device, (self._context.device,))
        expected, rows = self._ahead or (None, None)
        if rows is None or expected != cursor:
            rows = self._reader.submit(self._read, cursor)
        after = Cursor(cursor.first + self._config.training.batch_size, cursor.count)
        self._ahead = after, self._reader.submit(self._read, after)
        return TextBatch.of(rows.result().to(self._context.device, non_blocking=True))

    def _read(self, cursor: Cursor) -> Tensor:
        """Read the samples of a step into page-locked memory. A thread calls this one step ahead of training."""
        return self._text(self._tokens.train, self._order.window(cursor.first, cursor.count)).pin_memory()

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        logits = model(batch.inputs)
        total = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")
        return Loss(total, batch.weight)

    def flops(self, batch: TextBatch) -> float:
        return len(batch.inputs) * self._shape.flops_per_sample

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the held-out loss in nats per token and in bits per byte.

        Bits per byte are comparable between tokenizers.
        """
        training = self._config.training
        world_size = self._context.world_size
        micro_batch = max(1, training.batch_size // (world_size * training.gradient_accumulation_steps))
        # All ranks gather a sharded model together, so all must make the same number of passes.
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
        return TextBatch.of(self._text(tokens, windows).to(self._context.device))

    def _text(self, tokens: np.ndarray, windows: np.ndarray) -> Tensor:
        offsets = windows[:, None] * self._length + np.arange(self._length + 1)
        return torch.from_numpy(tokens[offsets].astype(np.int64))

    def _windows(self, tokens: np.ndarray, side: str) -> int:
        """Return the number of non-overlapping samples in `tokens`.

        One more token is needed after the last sample, as the target of its last token.
        """
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
