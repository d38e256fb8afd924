"""Workloads for the tests: a sound one, and others that each have one thing wrong.

Named as `tests.support…:Name`.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ebbflow.training.workload import Cursor, Loss, WorkloadContext

NUMBER = 3


class Points(NamedTuple):
    x: Tensor
    weight = property(lambda self: float(len(self.x)))

    def split(self, parts: int) -> list[Points]:
        return [Points(x) for x in self.x.tensor_split(parts)]


class Sound:
    """Learns the sum of four numbers."""

    def __init__(self, context: WorkloadContext) -> None:
        self.context = context

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)

    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        made = [
            torch.rand(4, generator=torch.Generator().manual_seed(index))
            for index in range(cursor.first, cursor.first + cursor.count)
        ]
        return Points(torch.stack(made))

    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        return (model(batch.x)[:, 0] - batch.x.sum(dim=1)).square()

    def loss(self, model: nn.Module, batch: Points) -> Loss:
        return Loss(self.errors(model, batch).sum(), batch.weight)

    def flops(self, batch: Points) -> float:
        return 6.0 * 40 * len(batch.x)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {}


class WithData(Sound):
    weight_unit = "points"
    calls = 0

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        cls.calls += 1
        context.store.put("points.bin", b"1234")
        return {"points": context.options.get("points", 4)}

    def model(self) -> nn.Module:
        assert self.context.prepared["points"] > 0
        return super().model()


class Counting(WithData):
    """An optimizer of its own with momentum and two rates, and a buffer that every step changes."""

    def model(self) -> nn.Module:
        model = super().model()
        model.append(Counter())
        return model

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters()},
            {"params": model[1].parameters(), "lr_scale": 0.5},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def evaluate(self, model: Any) -> dict[str, float]:
        return {"passes": model[2].passes, "slower": float(model[1].weight.detach().sum())}


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), device="meta"))

    def reset_parameters(self) -> None:
        self.passes.zero_()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return x


class Mean(Sound):
    def loss(self, model: nn.Module, batch: Points) -> Loss:
        return Loss(self.errors(model, batch).mean(), batch.weight)


class OnTheCpu(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))


class NoUnits(Sound):
    def units(self, model: Any) -> list[nn.Module]:
        return []


class Overlapping(Sound):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Sequential(nn.Linear(4, 8)), nn.Linear(8, 1))

    def units(self, model: Any) -> list[nn.Module]:
        return [model[0], model[0][0], model[1]]


class Whole(Sound):
    def units(self, model: Any) -> list[nn.Module]:
        return [model]


class NoReset(Sound):
    def model(self) -> nn.Module:
        class Scale(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.ones(1, device="meta"))

        return nn.Sequential(Scale(), super().model()[1])


class Raises(Sound):
    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.width = context.options["width"]  # the line that is to be named


class NoLoss(Sound):
    loss = None
    flops = None


class Unrepeatable(Sound):
    def next_batch(self, model: nn.Module, cursor: Cursor) -> Points:
        return Points(torch.full((cursor.count, 4), random.random()))


class Detached(Sound):
    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        return super().errors(model, batch).detach()


class NotANumber(Sound):
    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        return super().errors(model, batch).log() * 0 + torch.nan


class NoEvaluation(Sound):
    """Its metrics are what its options hold."""

    def evaluate(self, model: nn.Module) -> dict[str, Any]:
        return {"accuracy": self.context.options["accuracy"]}  # the line that is to be named


class Endless(Sound):
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        while True:
            self.next_batch(model, Cursor(0, 4))


class FailsLater(Sound):
    """From its third evaluation on, in the way that its options name."""

    evaluations = 0

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self.evaluations += 1
        if self.evaluations < 3:
            return {}
        if self.context.options["how"] == "a lost peer":
            raise RuntimeError("Connection closed by peer")
        if self.context.options["how"] == "here":
            return {"first": [][0]}
        return json.loads(b"", cls=3)


class Branching(Sound):
    def model(self) -> nn.Module:
        model = super().model()
        model.append(nn.Linear(3, 3, device="meta"))
        return model

    def errors(self, model: Any, batch: Points) -> Tensor:
        return (model[1](model[0](batch.x))[:, 0] - batch.x.sum(dim=1)).square()


class PrepareNeedsSelf(Sound):
    def prepare(self, context: WorkloadContext) -> dict:
        return {}


class PreparesNoJson(Sound):
    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        return {"data": torch.zeros(1)}


class Hangs(Sound):
    def __init__(self, context: WorkloadContext) -> None:
        time.sleep(600)


class Digits(nn.Module):
    """What stands in a table, and is looked up in it again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding((10 * x[:, 0]).long())))


class Tied(Sound):
    """A parameter with two names, outside the units; data that take their time."""

    @classmethod
    def prepare(cls, context: WorkloadContext) -> dict:
        time.sleep(context.options.get("seconds", 0))
        return {}

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return Digits()

    def units(self, model: Any) -> list[nn.Module]:
        return [model.hidden]

    def errors(self, model: nn.Module, batch: Points) -> Tensor:
        return model(batch.x).square().sum(dim=1)


class TiedAcross(Tied):
    def units(self, model: Any) -> list[nn.Module]:
        return [model.embedding, model.head]


class Huge(Sound):
    """Two matrices of 4 GiB each, and no memory for them."""

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(4, 2**15), nn.Linear(2**15, 2**15), nn.Linear(2**15, 1))


def factory(context: WorkloadContext) -> Sound:
    return Sound(context)
