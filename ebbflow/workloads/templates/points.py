"""A workload in one file: a net that ignores the order of points learns to classify point
clouds.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebbflow.training.workload import Cursor, Loss, WorkloadContext

KINDS = 2
POINTS = 64
WIDTH = 64
HELD_OUT = 2**40  # first index that is never trained on


class Clouds(NamedTuple):
    points: Tensor  # [samples, POINTS, 3]
    kinds: Tensor  # [samples], int64
    weight = property(lambda self: float(len(self.kinds)))

    def split(self, parts: int) -> list["Clouds"]:
        return [
            Clouds(*part)
            for part in zip(*(tensor.tensor_split(parts) for tensor in self), strict=True)
        ]


class Model(nn.Module):
    """A net that takes the maximum of all points' features (Qi et al. 2017, PointNet)."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, KINDS))

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.each(points).amax(dim=1))


class Example:
    weight_unit = "clouds"

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context

    def model(self) -> nn.Module:
        # Shapes only; every module fills its weights in its own reset_parameters
        with torch.device("meta"):
            return Model()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())  # sharded, compiled and recomputed one by one

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Clouds:
        rows = [cloud(cursor.first + place) for place in range(cursor.count)]
        if not rows:
            nothing = torch.zeros(0, POINTS, 3), torch.zeros(0, dtype=torch.int64)
            return Clouds(*(part.to(self.context.device) for part in nothing))
        return Clouds(
            *(torch.stack(part).to(self.context.device) for part in zip(*rows, strict=True))
        )

    def loss(self, model: nn.Module, batch: Clouds) -> Loss:
        return Loss(
            nn.functional.cross_entropy(model(batch.points), batch.kinds, reduction="sum"),
            batch.weight,
        )

    def flops(self, batch: Clouds) -> float:  # 6 per weight and point: forward and backward
        return 6.0 * (POINTS * (3 * WIDTH + WIDTH**2) + WIDTH**2) * batch.weight

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        batch = self.next_batch(model, Cursor(HELD_OUT, 256))  # the same on all ranks
        return {
            "held_out_accuracy": float(
                (model(batch.points).argmax(dim=1) == batch.kinds).double().mean()
            )
        }


def cloud(index: int) -> tuple[Tensor, Tensor]:
    """Return cloud `index` and its label. Replace it by a cloud of your own.

    A sample depends on its index alone. Here, points are on a sphere (0) or on a cube (1).
    """
    chance = torch.Generator().manual_seed(index)
    kind = int(torch.randint(KINDS, (), generator=chance))
    points = torch.randn(POINTS, 3, generator=chance)
    if kind:
        length = points.abs().amax(dim=1, keepdim=True)
    else:
        length = points.norm(dim=1, keepdim=True)
    return points / length, torch.tensor(kind)
