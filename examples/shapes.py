"""A workload of one's own in one file: a small convolutional net learns to tell drawn shapes apart,
in any noise.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebbflow.training.workload import Cursor, Loss, WorkloadContext

# disc, square, cross, ring; pixels; first index that is never trained on
KINDS = 4
SIZE = 16
HELD_OUT = 2**40


class Drawings(NamedTuple):
    pixels: Tensor  # [samples, 1, SIZE, SIZE]
    kinds: Tensor  # [samples], int64
    weight = property(lambda self: float(len(self.kinds)))

    def split(self, parts: int) -> list["Drawings"]:
        return [
            Drawings(*part)
            for part in zip(*(tensor.tensor_split(parts) for tensor in self), strict=True)
        ]


def draw(index: int, noise: float) -> tuple[Tensor, Tensor]:
    """A drawing is a function of its index alone: no download, the same at any world size and after
    any restart.
    """
    random = torch.Generator().manual_seed(index)
    x, y, radius, kind = (
        torch.rand(4, generator=random) * torch.tensor([6, 6, 2, KINDS]) + 3
    ).tolist()
    across = (torch.arange(SIZE) - x - 2).abs()
    down = (torch.arange(SIZE)[:, None] - y - 2).abs()
    far = torch.maximum(across, down)
    near = torch.minimum(across, down)
    distance = torch.hypot(across, down)
    kinds = [
        distance < radius,
        far < radius,
        (near < 1) & (far < radius),
        (distance - radius).abs() < 0.8,
    ]
    return kinds[int(kind) - 3] + noise * torch.randn(
        1, SIZE, SIZE, generator=random
    ), torch.tensor(int(kind) - 3)


class Shapes:
    weight_unit = "images"
    units = staticmethod(list)  # the parts of the model, which is a sequence

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context
        self.width = context.options["width"]
        self.noise = context.options["noise"]

    def model(self) -> nn.Module:
        sizes = [(1, self.width), (self.width, 2 * self.width), (2 * self.width, 4 * self.width)]
        with torch.device(
            "meta"
        ):  # shapes only; every module fills its weights in its own reset_parameters
            blocks = [
                (nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.ReLU(), nn.MaxPool2d(2))
                for i, o in sizes
            ]
            head = (nn.Flatten(), nn.Linear(4 * self.width * (SIZE // 8) ** 2, KINDS))
            return nn.Sequential(*(nn.Sequential(*part) for part in (*blocks, head)))

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Drawings:
        drawn = [draw(cursor.first + i, self.noise) for i in range(cursor.count)]
        return Drawings(
            *(torch.stack(part).to(self.context.device) for part in zip(*drawn, strict=True))
        )

    def loss(self, model: nn.Module, batch: Drawings) -> Loss:
        return Loss(
            nn.functional.cross_entropy(model(batch.pixels), batch.kinds, reduction="sum"),
            batch.weight,
        )

    def flops(
        self, batch: Drawings
    ) -> float:  # 6 per weight and position of the last two convolutions, the heaviest
        return batch.weight * 6 * 9 * self.width**2 * (2 * (SIZE // 2) ** 2 + 8 * (SIZE // 4) ** 2)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = self.next_batch(
            model, Cursor(HELD_OUT, 512).share(self.context.rank, self.context.world_size)
        )
        right = (model(batch.pixels).argmax(dim=1) == batch.kinds).double()
        right, count = self.context.gather(
            torch.stack([right.sum(), torch.ones_like(right).sum()])
        ).sum(dim=0)
        return {"held_out_accuracy": float(right / count)}
