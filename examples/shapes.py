"""A workload of one's own in one file: a small convolutional net learns to tell drawn shapes apart."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ebbflow.training.workload import Cursor, Loss, WorkloadContext

KINDS = 4  # disc, square, cross, ring
SIZE = 16  # pixels
HELD_OUT = 2**40  # first index that is never trained on


class Drawings(NamedTuple):
    pixels: Tensor  # [samples, 1, SIZE, SIZE]
    kinds: Tensor  # [samples], int64

    @property
    def weight(self) -> float:
        return float(len(self.kinds))

    def split(self, parts: int) -> list["Drawings"]:
        pixels = self.pixels.tensor_split(parts)
        kinds = self.kinds.tensor_split(parts)
        return [Drawings(*part) for part in zip(pixels, kinds, strict=True)]


class Shapes:
    weight_unit = "images"
    units = staticmethod(list)  # the parts of the model, which is a sequence

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context
        self.width = context.options["width"]
        self.noise = context.options["noise"]

    def model(self) -> nn.Module:
        # Shapes only: every module fills its weights in its own reset_parameters.
        with torch.device("meta"):
            return nn.Sequential(
                self._block(1, self.width),
                self._block(self.width, 2 * self.width),
                self._block(2 * self.width, 4 * self.width),
                nn.Sequential(nn.Flatten(), nn.Linear(4 * self.width * (SIZE // 8) ** 2, KINDS)),
            )

    def _block(self, inputs: int, outputs: int) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        return nn.Sequential(convolution, nn.GroupNorm(4, outputs), nn.ReLU(), nn.MaxPool2d(2))

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Drawings:
        drawn = [draw(cursor.first + number, self.noise) for number in range(cursor.count)]
        pixels = torch.stack([image for image, _ in drawn])
        kinds = torch.tensor([kind for _, kind in drawn])
        return Drawings(pixels.to(self.context.device), kinds.to(self.context.device))

    def loss(self, model: nn.Module, batch: Drawings) -> Loss:
        total = cross_entropy(model(batch.pixels), batch.kinds, reduction="sum")
        return Loss(total, batch.weight)

    def flops(self, batch: Drawings) -> float:
        # 6 per weight and position of the last two convolutions, the heaviest.
        per_width = 2 * (SIZE // 2) ** 2 + 8 * (SIZE // 4) ** 2
        return batch.weight * 6 * 9 * self.width**2 * per_width

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        cursor = Cursor(HELD_OUT, 512).share(self.context.rank, self.context.world_size)
        batch = self.next_batch(model, cursor)
        is_right = (model(batch.pixels).argmax(dim=1) == batch.kinds).double()
        counts = torch.stack([is_right.sum(), torch.ones_like(is_right).sum()])
        right, count = self.context.gather(counts).sum(dim=0)
        return {"held_out_accuracy": float(right / count)}


def draw(index: int, noise: float) -> tuple[Tensor, int]:
    """Draw a shape as a function of its index alone: no download, the same at any world size."""
    random = torch.Generator().manual_seed(index)
    drawn = torch.rand(4, generator=random)
    x, y, radius, kind = (drawn * torch.tensor([6, 6, 2, KINDS]) + 3).tolist()
    across = (torch.arange(SIZE) - x - 2).abs()
    down = (torch.arange(SIZE)[:, None] - y - 2).abs()
    far = torch.maximum(across, down)
    near = torch.minimum(across, down)
    distance = torch.hypot(across, down)
    disc = distance < radius
    square = far < radius
    cross = (near < 1) & (far < radius)
    ring = (distance - radius).abs() < 0.8
    number = int(kind) - 3
    shape = [disc, square, cross, ring][number]
    return shape + noise * torch.randn(1, SIZE, SIZE, generator=random), number
