"""The two checks of a rank's own hardware, on one rank: what each sees, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbflow.training.engine.guards.silent_faults import Differences, RepeatedStep, RestingState
from ebbflow.training.engine.optimizer import Muon, keep_average
from ebbflow.training.workload import Loss

BATCH = torch.linspace(-1.0, 1.0, 32).view(8, 4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keep_average(optimizer, 0.9)
    return optimizer


def muon(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    groups = [{"params": matrices, "muon_dtype": "float32"}, {"params": others}]
    return Muon(groups, lr=0.01)


def small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    alter: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Loss:
    optimizer.zero_grad()
    loss = alter(functional.mse_loss(model(BATCH), BATCH.sum(1, keepdim=True)))
    loss.backward()
    optimizer.step()
    return Loss(loss.detach(), 8.0)


@pytest.mark.parametrize("make_optimizer", [adamw, muon])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_computed_twice_is_equal_and_leaves_no_trace(
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer], steps_before: int
) -> None:
    results = []
    for repeats in (False, True):
        model = small_model()
        optimizer = make_optimizer(model)
        for _ in range(steps_before):
            take_step(model, optimizer)
        repeated = RepeatedStep(model, optimizer)
        for number in range(1 + repeats):
            if number:
                repeated.restore()
            with repeated.watch_gradients(compiled=False):
                loss = take_step(model, optimizer)
            repeated.end_pass(loss)
        if repeats:
            assert repeated.compare() == Differences(gradients=False, loss=False, update=False)
        take_step(model, optimizer)
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def scale_gradient(loss: Tensor) -> Tensor:
    loss.register_hook(lambda gradient: gradient * (1 + 2**-20))
    return loss


@pytest.mark.parametrize(
    ("alter", "compiled", "seen"),
    [
        (scale_gradient, False, Differences(gradients=True, loss=False, update=True)),
        (scale_gradient, True, Differences(gradients=False, loss=False, update=True)),
        (lambda loss: loss * (1 + 2**-20), False, Differences(True, loss=True, update=True)),
    ],
)
def test_wrong_arithmetic_is_seen_where_it_begins(
    alter: Callable[[Tensor], Tensor], compiled: bool, seen: Differences
) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    repeated = RepeatedStep(model, optimizer)
    for number in range(2):
        if number:
            repeated.restore()
        with repeated.watch_gradients(compiled=compiled):
            loss = take_step(model, optimizer, alter if not number else lambda loss: loss)
        repeated.end_pass(loss)
    assert repeated.compare() == seen


def test_any_bit_that_flips_between_two_updates_is_seen() -> None:
    model = small_model()
    optimizer = adamw(model)
    resting = RestingState(model, optimizer)
    assert not resting.has_changed()
    take_step(model, optimizer)
    resting.remember()
    model(BATCH)  # running means of a forward pass are no weights
    assert not resting.has_changed()
    first = next(iter(model.parameters()))
    for held in (first.detach(), optimizer.state[first]["exp_avg"]):
        for bit in (0, 13, 30):
            flipped = held.view(-1)[3:4].view(torch.int32)
            flipped.bitwise_xor_(1 << bit)
            assert resting.has_changed()
            flipped.bitwise_xor_(1 << bit)
    assert not resting.has_changed()
