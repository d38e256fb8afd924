"""A workload in one file: a transformer learns to continue sequences of tokens."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebbflow.training.workload import Cursor, Loss, WorkloadContext

VOCABULARY = 64
LENGTH = 32
WIDTH = 64
HEADS = 4
HELD_OUT = 2**40  # first index that is never trained on


class Texts(NamedTuple):
    inputs: Tensor  # token numbers, int64 [samples, LENGTH]
    targets: Tensor  # the token after each input, of the same shape
    weight = property(lambda self: float(self.inputs.numel()))

    def split(self, parts: int) -> list["Texts"]:
        return [
            Texts(*part)
            for part in zip(*(tensor.tensor_split(parts) for tensor in self), strict=True)
        ]


class Block(nn.Module):
    """A transformer block: causal attention, then an MLP, each added to its input.

    Parameters are in torch's own modules only.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            self.qkv(self.attention_norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(found.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Example:
    weight_unit = "tokens"

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context

    def model(self) -> nn.Module:
        # Shapes only; every module fills its weights in its own reset_parameters
        with torch.device("meta"):
            return Model()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.blocks)  # type: ignore[arg-type]  # sharded, compiled and recomputed one by one

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Texts:
        rows = [text(cursor.first + place) for place in range(cursor.count)]
        if rows:
            tokens = torch.stack(rows)
        else:
            tokens = torch.zeros(0, LENGTH + 1, dtype=torch.int64)
        return Texts(tokens[:, :-1].to(self.context.device), tokens[:, 1:].to(self.context.device))

    def loss(self, model: nn.Module, batch: Texts) -> Loss:
        logits = model(batch.inputs).flatten(0, 1)
        return Loss(
            nn.functional.cross_entropy(logits, batch.targets.flatten(), reduction="sum"),
            batch.weight,
        )

    def flops(self, batch: Texts) -> float:
        # 6 per weight and token (Kaplan et al. 2020, section 2.1)
        return 6.0 * (2 * 12 * WIDTH**2 + WIDTH * VOCABULARY) * batch.weight

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = self.next_batch(model, Cursor(HELD_OUT, 64))  # the same on all ranks
        return {"held_out_loss": float(self.loss(model, batch).sum) / batch.weight}


def text(index: int) -> Tensor:
    """Return the tokens of sample `index`. Replace it by a window of your own tokens.

    A sample depends on its index alone.
    """
    first, step = torch.randint(
        1, VOCABULARY, (2,), generator=torch.Generator().manual_seed(index)
    ).tolist()
    return (first + step * torch.arange(LENGTH + 1)) % VOCABULARY
