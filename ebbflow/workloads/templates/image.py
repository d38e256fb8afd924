"""A workload in one file: a small convolutional net learns to classify images."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebbflow.training.workload import Cursor, Loss, WorkloadContext

KINDS = 2
SIZE = 16
WIDTH = 16
HELD_OUT = 2**40  # first index that is never trained on


class Images(NamedTuple):
    pixels: Tensor  # [samples, 1, SIZE, SIZE]
    kinds: Tensor  # [samples], int64
    weight = property(lambda self: float(len(self.kinds)))

    def split(self, parts: int) -> list["Images"]:
        return [
            Images(*part)
            for part in zip(*(tensor.tensor_split(parts) for tensor in self), strict=True)
        ]


class Example:
    weight_unit = "images"

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context

    def model(self) -> nn.Module:
        # GroupNorm, not BatchNorm, whose running statistics would differ between ranks
        # Shapes only; every module fills its weights in its own reset_parameters
        with torch.device("meta"):
            first = nn.Sequential(
                nn.Conv2d(1, WIDTH, 3, padding=1),
                nn.GroupNorm(4, WIDTH),
                nn.ReLU(),
                nn.MaxPool2d(4),
            )
            second = nn.Sequential(
                nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(4, WIDTH), nn.ReLU()
            )
            return nn.Sequential(
                first, second, nn.Sequential(nn.Flatten(), nn.Linear(WIDTH * SIZE**2 // 16, KINDS))
            )

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())  # sharded, compiled and recomputed one by one

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Images:
        rows = [image(cursor.first + place) for place in range(cursor.count)]
        if not rows:
            nothing = torch.zeros(0, 1, SIZE, SIZE), torch.zeros(0, dtype=torch.int64)
            return Images(*(part.to(self.context.device) for part in nothing))
        return Images(
            *(torch.stack(part).to(self.context.device) for part in zip(*rows, strict=True))
        )

    def loss(self, model: nn.Module, batch: Images) -> Loss:
        return Loss(
            nn.functional.cross_entropy(model(batch.pixels), batch.kinds, reduction="sum"),
            batch.weight,
        )

    def flops(self, batch: Images) -> float:  # 6 per weight and position: forward and backward
        return 6.0 * 9 * (WIDTH * SIZE**2 + WIDTH**2 * SIZE**2 / 16) * batch.weight

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = self.next_batch(model, Cursor(HELD_OUT, 256))  # the same on all ranks
        return {
            "held_out_accuracy": float(
                (model(batch.pixels).argmax(dim=1) == batch.kinds).double().mean()
            )
        }


def image(index: int) -> tuple[Tensor, Tensor]:
    """Return image `index` and its label. Replace it by an image of your own.

    The augmentation depends on the index alone, so that a resumed run sees the same image. Here,
    images are noise with horizontal (0) or vertical (1) stripes.
    """
    chance = torch.Generator().manual_seed(index)
    kind, shift = torch.randint(4, (2,), generator=chance).tolist()
    stripes = (torch.arange(SIZE) + shift) % 4 < 2
    if kind % KINDS:
        pixels = stripes.float().expand(SIZE, SIZE)
    else:
        pixels = stripes.float()[:, None].expand(SIZE, SIZE)
    return pixels + torch.randn(1, SIZE, SIZE, generator=chance), torch.tensor(kind % KINDS)
