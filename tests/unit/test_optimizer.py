"""The optimizer and the learning rate, each against its formula."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ebbflow.core.config.schema import SchedulerConfig, TrainingConfig
from ebbflow.training.engine.optimizer import (
    Muon,
    averaged_weights,
    can_skip_step,
    hidden_matrices,
    keep_average,
    learning_rate,
    make_optimizer,
    orthogonalise,
    scale_and_clip,
    set_learning_rate,
    skip_if_non_finite,
)
from tests.support.rank_threads import call_in_process_group

SETTINGS = {"learning_rate": 0.25, "weight_decay": 0.125}


class Network(nn.Module):
    """An embedding table, a convolution, hidden layers (two of them tied), and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.filter = nn.Conv1d(4, 4, 3)
        self.first = nn.Linear(4, 3, dtype=torch.float64)
        self.again = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        self.again.weight = self.first.weight
        self.lookup = nn.Linear(4, 6, bias=False)
        self.lookup.weight = self.table.weight
        self.second = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.output = nn.Linear(5, 2, dtype=torch.float64)


def names_of(module: nn.Module, parameters: list[Tensor]) -> list[str]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [names[id(parameter)] for parameter in parameters]


def test_hidden_matrices_are_linear_weights_but_the_last_and_no_tables() -> None:
    module = Network()
    assert names_of(module, hidden_matrices(module)) == ["first.weight", "second.weight"]
    assert hidden_matrices(nn.Linear(3, 2)) == []


def test_adamw_decays_whatever_has_two_dimensions() -> None:
    module = Network()
    optimizer = make_optimizer(module, TrainingConfig(**SETTINGS))
    assert type(optimizer) is torch.optim.AdamW
    matrices, others = optimizer.param_groups
    assert names_of(module, matrices["params"]) == [
        "table.weight",
        "filter.weight",
        "first.weight",
        "second.weight",
        "output.weight",
    ]
    assert names_of(module, others["params"]) == ["filter.bias", "first.bias", "output.bias"]
    assert [group["weight_decay"] for group in (matrices, others)] == [0.125, 0.0]
    for group in (matrices, others):
        assert (group["lr"], group["betas"], group["fused"]) == (0.25, (0.9, 0.95), True)
        assert "muon_dtype" not in group


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "float32"), ({"muon_dtype": torch.bfloat16}, "bfloat16")],
    ids=["default", "bfloat16"],
)
def test_muon_trains_hidden_matrices_and_leaves_the_rest_to_adamw(
    options: dict[str, Any], name: str
) -> None:
    module = Network()
    optimizer = make_optimizer(module, TrainingConfig(optimizer="muon", **SETTINGS), **options)
    assert type(optimizer) is Muon
    hidden, matrices, others = optimizer.param_groups
    assert names_of(module, hidden["params"]) == ["first.weight", "second.weight"]
    assert names_of(module, matrices["params"]) == [
        "table.weight",
        "filter.weight",
        "output.weight",
    ]
    assert names_of(module, others["params"]) == ["filter.bias", "first.bias", "output.bias"]
    assert [group["weight_decay"] for group in (hidden, matrices, others)] == [0.125, 0.125, 0.0]
    assert [group.get("muon_dtype") for group in (hidden, matrices, others)] == [name, None, None]


def test_a_model_without_hidden_matrices_is_left_to_adamw() -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = make_optimizer(model, TrainingConfig(optimizer="muon"))
    assert type(optimizer) is torch.optim.AdamW and len(optimizer.param_groups) == 1


def newton_schulz(matrix: np.ndarray) -> np.ndarray:
    """Orthogonalise as Keller Jordan's Muon does."""
    if matrix.shape[0] <= matrix.shape[1]:
        wide = matrix
    else:
        wide = matrix.T
    x = wide / max(np.linalg.norm(wide), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    if matrix.shape[0] <= matrix.shape[1]:
        return x
    return x.T


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 6)])
def test_orthogonalise_is_five_newton_schulz_iterations(shape: tuple[int, int]) -> None:
    matrix = torch.randn(
        shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )
    np.testing.assert_allclose(
        orthogonalise(matrix).numpy(), newton_schulz(matrix.numpy()), rtol=1e-12, atol=1e-14
    )
    singular = torch.linalg.svdvals(orthogonalise(matrix))
    assert float(singular.min()) > 0.6 and float(singular.max()) < 1.25


def test_orthogonalise_keeps_a_matrix_of_zeros_and_scales_up_a_small_one() -> None:
    assert orthogonalise(torch.zeros(2, 3)).abs().max() == 0.0
    # Below the smallest norm to divide by
    small = torch.full((1, 1), 2.0**-40, dtype=torch.float64)
    np.testing.assert_allclose(
        orthogonalise(small).numpy(), newton_schulz(small.numpy()), rtol=1e-12
    )


def muon_of(
    *, rows: int = 3, columns: int = 5
) -> tuple[Muon, nn.Parameter, nn.Parameter, nn.Parameter]:
    """Return a Muon optimizer with an unused matrix, a matrix that it orthogonalises, and a vector
    of AdamW.
    """
    generator = torch.Generator().manual_seed(1)
    unused = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    matrix = nn.Parameter(torch.randn(rows, columns, dtype=torch.float64, generator=generator))
    vector = nn.Parameter(torch.randn(4, dtype=torch.float64, generator=generator))
    groups = [
        {"params": [unused, matrix], "weight_decay": 0.5, "muon_dtype": "float64"},
        {"params": [vector], "weight_decay": 0.0},
    ]
    return Muon(groups, lr=0.25, betas=(0.9, 0.95), fused=True), unused, matrix, vector


def draw_gradients(matrix: nn.Parameter, vector: nn.Parameter, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in (matrix, vector):
        parameter.grad = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize(("rows", "columns"), [(3, 5), (5, 3)])
def test_a_step_of_muon_is_its_formula(rows: int, columns: int) -> None:
    optimizer, unused, matrix, vector = muon_of(rows=rows, columns=columns)
    plain = nn.Parameter(vector.detach().clone())
    adamw = torch.optim.AdamW([plain], lr=0.25, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    momentum = np.zeros((rows, columns))
    expected = matrix.detach().numpy().copy()
    for seed in range(3):
        draw_gradients(matrix, vector, seed)
        gradient = matrix.grad.numpy()  # type: ignore[union-attr]
        momentum = 0.95 * momentum + 0.05 * gradient
        update = newton_schulz(0.95 * momentum + 0.05 * gradient)
        expected = (1 - 0.25 * 0.5) * expected - 0.25 * 0.2 * math.sqrt(5) * update
        plain.grad = vector.grad.clone()  # type: ignore[union-attr]
        optimizer.step()
        adamw.step()
        np.testing.assert_allclose(matrix.detach().numpy(), expected, rtol=1e-11)
        np.testing.assert_allclose(
            optimizer.state[matrix]["momentum_buffer"].numpy(), momentum, rtol=1e-12
        )
        assert torch.equal(vector, plain)
    assert bool((unused == 1).all()) and not optimizer.state[unused]
    assert len(optimizer.param_groups) == 2


def test_a_step_of_muon_is_left_out_if_the_norm_is_not_finite() -> None:
    optimizer, _, matrix, vector = muon_of()
    for seed, norm in enumerate((1.0, math.inf, 2.0)):
        before = [matrix.detach().clone(), vector.detach().clone()]
        draw_gradients(matrix, vector, seed)
        assert can_skip_step(optimizer)
        skip_if_non_finite(optimizer, torch.tensor(norm))
        kept = [state.clone() for state in optimizer.state[matrix].values()]
        optimizer.step()
        left_out = not math.isfinite(norm)
        assert (
            torch.equal(matrix, before[0]) is left_out
            and torch.equal(vector, before[1]) is left_out
        )
        assert not left_out or all(map(torch.equal, kept, optimizer.state[matrix].values()))


def test_ranks_that_shard_a_matrix_take_the_step_of_muon_and_average_alike() -> None:
    whole_optimizer, _, whole, _ = muon_of()
    keep_average(whole_optimizer, 0.5)

    def train_shard(rank: int) -> tuple[Tensor, Tensor]:
        optimizer, _, matrix, _ = muon_of()
        mesh = init_device_mesh("cpu", (2,))
        shard = nn.Parameter(
            distribute_tensor(matrix.detach(), mesh, [Shard(0)], src_data_rank=None)
        )
        optimizer.param_groups[0]["params"] = [shard]
        keep_average(optimizer, 0.5)
        for gradient in gradients:
            shard.grad = distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
            optimizer.step()
        with averaged_weights(optimizer):
            average = shard.detach().to_local().clone()
        return shard.detach().to_local().clone(), average

    gradients = [
        torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        for s in (1, 2)
    ]
    for gradient in gradients:
        whole.grad = gradient.clone()
        whole_optimizer.step()
    shards, averages = zip(*call_in_process_group(2, train_shard), strict=True)
    assert [len(shard) for shard in shards] == [2, 1]
    torch.testing.assert_close(torch.cat(shards), whole.detach(), rtol=1e-12, atol=0)
    with averaged_weights(whole_optimizer):
        torch.testing.assert_close(torch.cat(averages), whole.detach(), rtol=1e-12, atol=0)


def test_muon_keeps_its_groups_when_a_step_fails() -> None:
    optimizer, _, matrix, vector = muon_of()
    draw_gradients(matrix, vector, 0)
    optimizer.state[vector]["step"] = "broken"
    with pytest.raises(KeyError):
        optimizer.step()
    assert len(optimizer.param_groups) == 2
    with pytest.raises(AssertionError):
        optimizer.step(lambda: None)  # type: ignore[arg-type]


def test_an_average_is_updated_whatever_other_parameters_do() -> None:
    """The first parameter has no gradient, the second group has none at all, and the last one
    begins later.
    """
    unused, weight, late = (nn.Parameter(torch.tensor([float(value)])) for value in (9.0, 1.0, 5.0))
    idle = nn.Parameter(torch.tensor([7.0]))
    groups = [{"params": [unused, weight, late]}, {"params": [idle]}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    keep_average(optimizer, 0.5)
    averages: dict[int, float] = {}
    for step in range(1, 13):
        weight.grad = torch.tensor([float(step)])
        if step >= 3:
            late.grad = torch.tensor([-1.0])
        else:
            late.grad = None
        optimizer.step()
        decay = min(0.5, (1 + step) / (10 + step))
        for parameter in [weight, late] if step >= 3 else [weight]:
            value = parameter.item()
            before = averages.get(id(parameter), value)
            averages[id(parameter)] = decay * before + (1 - decay) * value
    weights = [parameter.item() for parameter in (unused, weight, late, idle)]
    with pytest.raises(KeyboardInterrupt), averaged_weights(optimizer):
        assert weight.item() == pytest.approx(averages[id(weight)], rel=1e-6)
        assert late.item() == pytest.approx(averages[id(late)], rel=1e-6)
        assert (unused.item(), idle.item()) == (9.0, 7.0)
        raise KeyboardInterrupt
    assert [parameter.item() for parameter in (unused, weight, late, idle)] == weights
    assert not optimizer.state[unused] and not optimizer.state[idle]


def test_the_average_of_a_first_step_is_its_weight() -> None:
    weight = nn.Parameter(torch.tensor([4.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    keep_average(optimizer, 0.999)
    weight.grad = torch.tensor([1.0])
    optimizer.step()
    with averaged_weights(optimizer):
        assert weight.item() == 3.0
    weight.grad = torch.tensor([1.0])
    optimizer.step()
    with averaged_weights(optimizer):
        assert weight.item() == pytest.approx(3 / 12 * 3.0 + 9 / 12 * 2.0)


def test_the_learning_rate_of_a_group_has_its_scale() -> None:
    first = nn.Parameter(torch.zeros(1))
    second = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD(
        [{"params": [first], "lr_scale": 0.25}, {"params": [second]}], lr=1.0
    )
    set_learning_rate(optimizer, 8.0)
    assert [group["lr"] for group in optimizer.param_groups] == [2.0, 8.0]


@pytest.mark.parametrize("on_device", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize(
    ("limit", "norm", "factor"),
    [
        (None, 50.0, 1.0),
        (2.0, 1.0, 1.0),
        (2.0, 8.0, 2.0 / (8.0 + 1e-6)),
        (2.0, 2.0, 2.0 / (2.0 + 1e-6)),
        (2e-6, 1e-6, 1.0),
        (1e-6, 1e-6, 0.5),
    ],
)
def test_gradients_are_scaled_and_clipped_to_the_limit(
    on_device: bool, limit: float | None, norm: float, factor: float
) -> None:
    gradients = [torch.tensor([1.0, -3.0]), torch.tensor([[5.0]])]
    expected = [gradient * 0.25 * factor for gradient in gradients]

    def kind(value: float) -> Any:
        return torch.tensor(value, dtype=torch.float64) if on_device else value

    scale_and_clip(gradients, scale=kind(0.25), norm=kind(norm), limit=limit)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=3e-7, atol=0)


def test_a_fused_optimizer_alone_skips_a_step_without_the_host() -> None:
    parameter = nn.Parameter(torch.ones(2))
    fused = torch.optim.AdamW([parameter], fused=True)
    plain = torch.optim.Adamax([parameter])
    skip_if_non_finite(fused, 1.0)
    assert can_skip_step(fused) and not hasattr(fused, "found_inf")
    skip_if_non_finite(plain, torch.tensor(math.nan))
    assert not can_skip_step(plain) and not hasattr(plain, "found_inf")
    for norm, skipped in ((1.0, 0.0), (math.nan, 1.0), (math.inf, 1.0)):
        skip_if_non_finite(fused, torch.tensor(norm))
        assert fused.found_inf.dtype is torch.float32 and float(fused.found_inf) == skipped


def schedule(kind: str, *, warmup: int, steps: int, final_ratio: float = 0.2) -> TrainingConfig:
    scheduler = SchedulerConfig(type=kind, warmup_steps=warmup, final_ratio=final_ratio)
    return TrainingConfig(max_steps=steps, learning_rate=4.0, scheduler=scheduler)


@pytest.mark.parametrize(
    ("kind", "warmup", "steps", "step", "share"),
    [
        # Warm-up: linear, and at the peak in its last step.
        ("constant", 4, 20, 1, 0.25),
        ("constant", 4, 20, 3, 0.75),
        ("constant", 4, 20, 4, 1.0),
        ("constant", 4, 20, 5, 1.0),
        ("constant", 0, 20, 1, 1.0),
        ("constant", 0, 20, 20, 1.0),
        # Linear from the end of the warm-up to the last step.
        ("linear_warmup", 4, 20, 4, 1.0),
        ("linear_warmup", 4, 20, 5, 0.2 + 0.8 * 15 / 16),
        ("linear_warmup", 4, 20, 20, 0.2),
        ("linear_warmup", 4, 20, 25, 0.2),
        ("linear_warmup", 0, 4, 1, 0.2 + 0.8 * 3 / 4),
        # Half a cosine.
        ("cosine", 4, 20, 4, 1.0),
        ("cosine", 4, 20, 8, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2),
        ("cosine", 4, 20, 12, 0.6),
        ("cosine", 4, 20, 20, 0.2),
        # The last fifth, rounded up: 5 of 21 steps.
        ("wsd", 4, 21, 10, 1.0),
        ("wsd", 4, 21, 16, 1.0),
        ("wsd", 4, 21, 17, 0.2 + 0.8 * 4 / 5),
        ("wsd", 4, 21, 21, 0.2),
        # A warm-up that ends later than the decay would begin.
        ("wsd", 18, 20, 17, 17 / 18),
        ("wsd", 18, 20, 18, 1.0),
        ("wsd", 18, 20, 19, 0.6),
        ("wsd", 18, 20, 20, 0.2),
        # A warm-up as long as the job, or longer.
        ("linear_warmup", 20, 20, 19, 0.95),
        ("linear_warmup", 20, 20, 20, 1.0),
        ("linear_warmup", 30, 20, 20, 20 / 30),
        ("linear_warmup", 19, 20, 20, 0.2),
    ],
)
def test_the_learning_rate_is_a_formula_of_the_step(
    kind: str, warmup: int, steps: int, step: int, share: float
) -> None:
    assert learning_rate(schedule(kind, warmup=warmup, steps=steps), step) == pytest.approx(
        4.0 * share, rel=1e-12
    )
