"""The built-in workload: a causal language model that is trained on text.

A token is a byte or an entry of a tokenizer's vocabulary. The planner, which does not import torch,
computes the model's size with `ebbflow.core.footprint.causal_lm_shape`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ebbflow.core.config.schema import ModelConfig
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.training.checkpoint.hugging_face import our_name
from ebbflow.training.data import SampleOrder, check_vocabulary, open_tokens, prepare_tokens
from ebbflow.training.data.stream import TokenStream
from ebbflow.training.engine import tensor_parallel as tensor
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.readers.step_reader import StepReader

_INITIAL_STD = 0.02
_STEPS_AHEAD = 4  # of a token stream

# Factors of all published Llama 3 models
_LOW_TURNS = 1.0  # low_freq_factor
_HIGH_TURNS = 4.0  # high_freq_factor


class Linear(nn.Linear):
    """Linear layer with normally distributed initial weights of standard deviation `std`.

    A bias starts at 0; by default there is none.
    """

    def __init__(
        self, inputs: int, outputs: int, *, std: float = _INITIAL_STD, bias: bool = False
    ) -> None:
        self._std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self._std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """Embedding table with normally distributed initial weights of standard deviation 0.02."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_INITIAL_STD)


class KeyValues:
    """Cache of one block's keys and values during generation, for up to `capacity` tokens.

    It is not a tensor, because FSDP2 would pass a copy in another dtype to the block.
    """

    mask: Tensor | None = None  # added to attention's scores instead of the causal mask

    def __init__(self, capacity: int) -> None:
        self.length = 0
        self._capacity = capacity
        self._both: Tensor | None = None  # [2, batch, heads, capacity, head width]

    def positions(self, length: int) -> slice | Tensor:
        """Return the positions of the next `length` tokens, as an index into a sequence."""
        return slice(self.length, self.length + length)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys and values, and return all that were added so far.

        Their shape is `[batch, heads, length, head width]`.
        """
        if self._both is None:
            batch, heads, _, width = key.shape
            self._both = key.new_empty(2, batch, heads, self._capacity, width)
        start = self.length
        self.length = self.length + key.shape[2]
        self._both[:, :, :, start : self.length] = torch.stack((key, value))
        return self._both[0, :, :, : self.length], self._both[1, :, :, : self.length]


class Documents(KeyValues):
    """Boundaries of the documents in a batch, so that tokens attend only within their document.

    It has the interface of `KeyValues`, but keeps no keys and values.

    Args:
        tokens: `[batch, length]`.
        end: the last token of a document.
    """

    def __init__(self, tokens: Tensor, end: int) -> None:
        super().__init__(0)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        starts = (places * F.pad(tokens[:, :-1] == end, (1, 0))).cummax(dim=1).values
        self._positions = places - starts

    def positions(self, length: int) -> Tensor:  # noqa: ARG002 (the interface of KeyValues)
        """Return each token's position in its document, `[batch, length]`."""
        return self._positions

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return key, value

    def make_mask(self, x: Tensor) -> None:
        """Make the attention mask, causal within each document, that all blocks use.

        Its shape is `[batch, 1, length, length]`. It is 0 or -inf and has the dtype of the queries
        that are computed from `x`, because attention would make such a copy of a mask of bools in
        each block.
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


class Attention(nn.Module):
    """Causal self-attention. Input and output have the shape `[batch, length, hidden]`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.width = model.hidden_size // model.num_heads
        self.qkv = Linear(model.hidden_size, 3 * model.hidden_size)
        self.projection = Linear(model.hidden_size, model.hidden_size, std=_residual_std(model))

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (3, -1, self.width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        return self.projection(_attend(query, key, value, past))


class Rotation(nn.Module):
    """Rotary position embedding (RoPE; Su et al. 2021, section 3.4.2) in the rotate-half layout of
    Llama.

    With `rope_factor`, frequencies of less than one turn in `rope_original_length` tokens are
    divided by the factor, those of more than four turns are unchanged, and those between are
    interpolated (Llama 3.1).
    """

    cos: Tensor  # [sequence length, head width], float32
    sin: Tensor

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self._model = model
        for name in ("cos", "sin"):
            empty = torch.empty(model.sequence_length, model.head_width)
            self.register_buffer(name, empty, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        model = self._model
        device = self.cos.device
        even = torch.arange(0, model.head_width, 2, dtype=torch.float32, device=device)
        frequencies = 1.0 / model.rope_theta ** (even / model.head_width)
        turns = model.rope_original_length * frequencies / (2 * math.pi)
        kept = ((turns - _LOW_TURNS) / (_HIGH_TURNS - _LOW_TURNS)).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / model.rope_factor)
        angles = torch.outer(
            torch.arange(model.sequence_length, dtype=torch.float32, device=device), frequencies
        )
        self.cos.copy_(angles.cos().repeat(1, 2))
        self.sin.copy_(angles.sin().repeat(1, 2))

    def forward(self, x: Tensor, positions: slice | Tensor) -> Tensor:
        """Rotate queries or keys, `[batch, heads, length, head width]`, which are at `positions`."""
        # The same for all heads
        cos, sin = (table[positions].unsqueeze(-3) for table in (self.cos, self.sin))
        low, high = x.float().chunk(2, dim=-1)
        return (x.float() * cos + torch.cat((-high, low), dim=-1) * sin).type_as(x)


class RotaryAttention(nn.Module):
    """Causal self-attention with rotary positions.

    Several query heads may share a head of keys and values. Input and output have the shape
    `[batch, length, hidden]`.
    """

    def __init__(self, model: ModelConfig, rotation: Rotation) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.width = model.head_width
        self.query = Linear(hidden, model.num_heads * self.width, bias=model.qkv_bias)
        self.key = Linear(hidden, model.kv_heads * self.width, bias=model.qkv_bias)
        self.value = Linear(hidden, model.kv_heads * self.width, bias=model.qkv_bias)
        if model.qk_norm:
            self.query_norm = _norm(model, self.width)
        else:
            self.query_norm = nn.Identity()
        if model.qk_norm:
            self.key_norm = _norm(model, self.width)
        else:
            self.key_norm = nn.Identity()
        self.projection = Linear(model.num_heads * self.width, hidden, std=_residual_std(model))
        self.rotation = rotation  # the same module in all blocks

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        if past is None:
            positions = slice(x.shape[1])
        else:
            positions = past.positions(x.shape[1])
        query, key, value = (
            part(x).unflatten(2, (-1, self.width)) for part in (self.query, self.key, self.value)
        )
        query = self.rotation(self.query_norm(query).transpose(1, 2), positions)
        key = self.rotation(self.key_norm(key).transpose(1, 2), positions)
        return self.projection(_attend(query, key, value.transpose(1, 2), past))


class Block(nn.Module):
    """A transformer block: attention, then an MLP, each added to the residual stream."""

    def __init__(self, model: ModelConfig, rotation: Rotation | None) -> None:
        super().__init__()
        hidden = model.hidden_size
        self.gated = rotation is not None
        self.attention_norm = _norm(model, hidden)
        if rotation is None:
            self.attention = Attention(model)
        else:
            self.attention = RotaryAttention(model, rotation)
        self.mlp_norm = _norm(model, hidden)
        if self.gated:
            self.mlp_gate = Linear(hidden, model.mlp_width)
        self.mlp_in = Linear(hidden, model.mlp_width)
        self.mlp_out = Linear(model.mlp_width, hidden, std=_residual_std(model))

    def forward(self, x: Tensor, past: KeyValues | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), past)
        y = self.mlp_norm(x)
        return x + self.mlp_out(
            F.silu(self.mlp_gate(y)) * self.mlp_in(y) if self.gated else F.gelu(self.mlp_in(y))
        )


class Embeddings(nn.Module):
    """Token embeddings, plus position embeddings unless positions are rotary.

    Maps token ids `[batch, length]` to vectors.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.token = Embedding(model.vocab_size, model.hidden_size)
        rotary = model.architecture == "llama"
        if rotary:
            self.position = None
        else:
            self.position = Embedding(model.sequence_length, model.hidden_size)

    def forward(self, tokens: Tensor, past: KeyValues | None = None) -> Tensor:
        vectors = self.token(tokens)
        length = tokens.shape[1]
        if self.position is None:
            return vectors
        if past is None:
            positions = slice(length)
        else:
            positions = past.positions(length)
        return vectors + tensor.local_part(self.position.weight)[positions]


class Head(nn.Module):
    """Final norm and projection to logits `[batch, length, vocabulary]`.

    With `targets`, it returns the loss instead.
    """

    chunk_tokens: int | None = None  # as training.loss_chunk_tokens

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = _norm(model, model.hidden_size)
        self.logits = Linear(model.hidden_size, model.vocab_size)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        if targets is None:
            return self.logits(x)
        return sum_cross_entropy(self.logits, x, targets, self.chunk_tokens)


class CausalLM(nn.Module):
    """A causal language model: token ids `[batch, length]` to logits `[batch, length, vocabulary]`."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.config = model
        if model.architecture == "llama":
            rotation = Rotation(model)
        else:
            rotation = None
        self.embeddings = Embeddings(model)
        self.blocks = nn.ModuleList(Block(model, rotation) for _ in range(model.num_layers))
        self.head = Head(model)
        if model.tied_embeddings:
            self.head.logits.weight = self.embeddings.token.weight

    def forward(
        self, tokens: Tensor, past: list[KeyValues] | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Compute the logits of `tokens` or, with `targets`, the sum of their losses.

        Args:
            past: one `KeyValues` for each block, with the tokens before `tokens`.
        """
        end = self.config.end_of_document
        documents = None
        if end is not None and not past:
            documents = Documents(tokens, end)
        context = past or [documents] * len(self.blocks)
        x = self.embeddings(tokens, context[0])
        if documents is not None:
            documents.make_mask(x)
        for block, earlier in zip(self.blocks, context, strict=True):
            x = block(x, earlier)
        return self.head(x, targets)

    def units(self) -> list[nn.Module]:
        """Return the parts of the model that FSDP2 shards as units.

        Tied weights stay outside, because a parameter has one unit.
        """
        if self.config.tied_embeddings:
            return [*self.blocks]
        return [self.embeddings, *self.blocks, self.head]

    def split_layers(self) -> dict[nn.Module, tensor.SplitLayer]:
        """Return for each layer with weights how a tensor group splits it over its ranks.

        Attention is split by heads. Embeddings and head are split by their width, so that their
        weights can be tied and the vocabulary can have any size.
        """
        kinds = {
            "qkv": tensor.FUSED_COLUMNS,
            "token": tensor.EMBEDDING,
            "logits": tensor.ROWS_OF_WHOLE,
        }
        kinds |= dict.fromkeys(("query", "key", "value", "mlp_gate", "mlp_in"), tensor.COLUMNS)
        kinds |= dict.fromkeys(("projection", "mlp_out"), tensor.ROWS)
        kinds |= dict.fromkeys(("attention_norm", "mlp_norm"), tensor.BEFORE_SPLIT)
        kinds |= dict.fromkeys(("query_norm", "key_norm"), tensor.PER_HEAD)
        kinds |= dict.fromkeys(("norm", "position", "values"), tensor.WHOLE)
        return {
            part: kinds[name.rpartition(".")[2]]
            for name, part in self.named_modules()
            if part._parameters
        }


@dataclass(frozen=True)
class TextBatch:
    """Batch of token sequences, in which each target is the next token."""

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
            for inputs, targets in zip(
                self.inputs.tensor_split(parts), self.targets.tensor_split(parts), strict=True
            )
        ]


class TextWorkload:
    """Workload of next-token prediction on the token shards that `prepare` wrote.

    Raises DataError if there is too little text.
    """

    weight_unit = "tokens"

    def __init__(self, context: WorkloadContext) -> None:
        config = context.config
        self._config = config
        self._context = context
        self._reader = StepReader(self._read, context.device, config.training.batch_size)
        self._length = config.model.sequence_length
        self._tokens = open_tokens(
            context.store,
            context.prepared["fingerprint"],
            window=self._length,
            cache_gib=config.data.cache_gib,
            alive=context.alive,
        )
        check_vocabulary(config, self._tokens.about.vocab_size)
        self._shape = causal_lm_shape(config.model)
        self._order = SampleOrder(self._windows(self._tokens.train, "train"), config.training.seed)
        self._held_out = self._evenly_spaced(self._windows(self._tokens.held_out, "held-out"))

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        """Convert the text to token shards in the store, unless it has them, and return their
        description.
        """
        return prepare_tokens(
            context.config.data, context.store, project_root=context.project_root
        ).to_json()

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = CausalLM(self._config.model)
        model.head.chunk_tokens = self._config.training.loss_chunk
        return model

    def translate_weights(self, name: str) -> str | None:
        """Translate a tensor's name in transformers' Llama or Qwen to its name in this model."""
        if self._config.model.architecture == "llama":
            return our_name(name)
        return name

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, CausalLM)
        return model.units()

    def next_batch(self, model: nn.Module, cursor: Cursor) -> TextBatch:  # noqa: ARG002 (the interface of Workload)
        if self._context.device.type != "cuda":
            self._read_ahead(cursor)
            return self._batch(self._tokens.train, self._order.window(cursor.first, cursor.count))
        return TextBatch.of(self._reader.take(cursor)[0])

    def _read(self, cursor: Cursor) -> list[Tensor]:
        """Read the samples at a cursor, and those of the next steps ahead if tokens are
        streamed.
        """
        self._read_ahead(cursor)
        windows = self._order.window(cursor.first, cursor.count)
        return [self._text(self._tokens.train, windows)]

    def _read_ahead(self, cursor: Cursor) -> None:
        if isinstance(self._tokens.train, TokenStream):
            steps = (
                cursor.first + number * self._config.training.batch_size
                for number in range(_STEPS_AHEAD + 1)
            )
            windows = np.concatenate([self._order.window(first, cursor.count) for first in steps])
            self._tokens.train.read_ahead(windows.tolist())

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        if self._config.training.loss_chunk is not None:
            return Loss(model(batch.inputs, targets=batch.targets), batch.weight)
        return Loss(
            sum_cross_entropy(nn.Identity(), model(batch.inputs), batch.targets), batch.weight
        )

    def flops(self, batch: TextBatch) -> float:
        return len(batch.inputs) * self._shape.flops_per_sample

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the held-out loss in nats per token and in bits per byte.

        Bits per byte are comparable between tokenizers.
        """
        training = self._config.training
        world_size = self._context.world_size
        micro_batch = max(
            1, training.batch_size // (world_size * training.gradient_accumulation_steps)
        )
        # All ranks gather a sharded model together, so all must make the same number of passes.
        passes = math.ceil(math.ceil(len(self._held_out) / world_size) / micro_batch)
        share = Cursor(0, len(self._held_out)).share(self._context.rank, world_size)
        batch = self._batch(
            self._tokens.held_out, self._held_out[share.first : share.first + share.count]
        )
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
                f"{side} text has {tokens.size} tokens, fewer than the {self._length + 1} of one "
                "sample (model.sequence_length + 1); fix: more text, or a smaller "
                "model.sequence_length"
            )
        return windows

    def _evenly_spaced(self, windows: int) -> np.ndarray:
        count = min(self._config.data.held_out_samples, windows)
        return np.arange(count, dtype=np.int64) * windows // count


def sum_cross_entropy(
    head: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """Sum the cross entropies of the logits `head(x)`, in float32.

    Targets of -100 do not count. With `chunk_tokens`, the logits of so many tokens at a time are
    computed, and again in the backward pass, so that the logits of all tokens never exist at once.

    Args:
        x: inputs of the output layer, `[batch, length, hidden]`.
        targets: token numbers, `[batch, length]`.
    """

    def sum_part(part: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(head(part).flatten(0, 1).float(), wanted, reduction="sum")

    rows = x.flatten(0, 1)[None]
    wanted = targets.flatten()
    if chunk_tokens is None or len(wanted) <= chunk_tokens:
        return sum_part(rows, wanted)
    parts = zip(rows.split(chunk_tokens, dim=1), wanted.split(chunk_tokens), strict=True)
    sums = [
        checkpoint(sum_part, *part, use_reentrant=False, preserve_rng_state=False) for part in parts
    ]
    return torch.stack(sums).sum()


@torch.no_grad()
def generate(
    model: CausalLM, tokens: Tensor, count: int, *, temperature: float = 0.0, cached: bool = True
) -> Tensor:
    """Continue each row of `tokens`, `[batch, length]`, by `count` tokens.

    Collective if the model is sharded.

    Args:
        temperature: divides the logits before a token is drawn with torch's generator; 0: the
            likeliest token.
        cached: keep keys and values of earlier tokens, instead of computing them again for each
            token. A model with documents computes them again.

    Raises:
        WorkloadError: if the rows would become longer than model.sequence_length.
    """
    longest = tokens.shape[1] + count
    if longest > model.config.sequence_length:
        raise WorkloadError(
            f"{tokens.shape[1]} + {count} = {longest} tokens are more than model.sequence_length "
            f"{model.config.sequence_length}; fix: generate fewer tokens"
        )
    # Cached keys do not know their document
    cached = cached and model.config.end_of_document is None
    if cached:
        past = [KeyValues(longest) for _ in model.blocks]
    else:
        past = None
    fresh = tokens
    for _ in range(count):
        logits = model(fresh, past)[:, -1].float()
        greedy = logits.argmax(-1, keepdim=True)
        if temperature:
            newest = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            newest = greedy
        tokens = torch.cat((tokens, newest), dim=1)
        if cached:
            fresh = newest
        else:
            fresh = tokens
    return tokens


def _attend(query: Tensor, key: Tensor, value: Tensor, past: KeyValues | None) -> Tensor:
    """Compute causal attention, `[batch, length, query heads × head width]`.

    There may be fewer key heads than query heads. After the first call with `past`, the length must
    be 1.
    """
    if past is None:
        mask = None
    else:
        mask = past.mask
    first = mask is None and (past is None or past.length == 0)
    if past is not None:
        key, value = past.append(key, value)
    grouped = key.shape[1] < query.shape[1]
    if grouped and query.device.type == "cuda" and query.dtype != torch.bfloat16:
        # Of CUDA's kernels, only flash attention, which is for 16-bit floats on newer GPUs, groups
        # heads by itself.
        key, value = (
            kv.repeat_interleave(query.shape[1] // kv.shape[1], dim=1) for kv in (key, value)
        )
        grouped = False
    attended = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=first, enable_gqa=grouped
    )
    return attended.transpose(1, 2).flatten(2)


def _norm(model: ModelConfig, width: int) -> nn.RMSNorm:
    return nn.RMSNorm(
        width, eps=model.norm_epsilon or (1e-5 if model.architecture == "llama" else None)
    )


def _residual_std(model: ModelConfig) -> float:
    """Return an initial standard deviation for which the residual stream does not grow with depth.

    Source: GPT-2, section 2.3.
    """
    return _INITIAL_STD / math.sqrt(2 * model.num_layers)
