"""fp8 by torchao's emulation on a CPU: what changes is the rounding of products, not weights, names
or samples.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.plan.candidates import _why_unable
from ebbflow.training.engine.float8 import convert_units
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.errors import ParallelError
from ebbflow.training.gang import Gang
from tests.support.fake_gpu import fake_gpu
from tests.support.spread_rank import ModelOnly

SIZE = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "sequence_length": 16, "vocab_size": 64}


def configure(float8: str, architecture: str = "gpt", **parallel: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {**SIZE, "architecture": architecture},
            "fsdp": {"float8": float8},
            "parallel": parallel,
        }
    )


def train(config: RunConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The initial weights, and the losses of ten steps."""
    module = spread_model(ModelOnly(config), config, Gang()).module
    initial = {name: value.detach().clone() for name, value in module.named_parameters()}
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    losses = list[float]()
    tokens = torch.randint(64, (8, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(10):
        loss = F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return initial, losses


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_are_rounded_to_eight_bits_and_weights_stay(
    architecture: str, recompute: str
) -> None:
    (plain, expected), (weights, losses), (_, again) = (
        train(configure(how, architecture, recompute=recompute))
        for how in ("off", "emulate", "emulate")
    )
    assert plain.keys() == weights.keys() and all(
        torch.equal(plain[name], weights[name]) for name in plain
    )
    assert losses == again, "equal runs give equal bits"
    assert (
        losses != expected
        and losses == pytest.approx(expected, rel=0.02)
        and losses[-1] < 0.95 * losses[0]
    )


def test_layers_keep_their_identity_and_the_output_its_precision() -> None:
    config = configure("emulate")
    model = ModelOnly(config).model()
    before = dict(model.named_modules())
    names = {id(part): name for name, part in before.items()}
    converted = convert_units(
        [(names[id(unit)], unit) for unit in model.units()], "emulate", torch.device("cpu")
    )
    assert dict(model.named_modules()) == before
    assert converted and all(name.startswith("blocks.") for name in converted)
    linear = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and "blocks." in name
    ]
    assert sorted(converted) == sorted(linear)


def test_layers_that_cannot_compute_in_fp8_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ParallelError, match=r"CPUs have no fp8; fix: set fsdp.float8 to emulate or off"
    ):
        spread_model(ModelOnly(configure("on")), configure("on"), Gang())
    odd = [("unit", nn.Linear(24, 24))]
    with pytest.raises(
        ParallelError, match="no unit has a linear layer whose sizes are multiples of 16"
    ):
        convert_units(odd, "emulate", torch.device("cpu"))
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
        with pytest.raises(ParallelError, match=r"fake has compute capability 8.0, fp8 needs 8.9"):
            convert_units(odd, "on", torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ParallelError, match="fix: pip install torchao"):
        convert_units(odd, "emulate", torch.device("cpu"))


def test_the_plan_leaves_out_gpus_without_fp8() -> None:
    config = configure("on")
    pool = SimpleNamespace(market="spot", nodes=1, processes_per_node=1)
    found = {kind.gpu.name: _why_unable(config, pool, kind) for kind in load_catalogue().types}  # type: ignore[arg-type]
    old = found["A100"]
    assert old is not None
    assert (old.kind, old.reason) == (
        "GPU too old",
        "A100 has capability 8.0; fsdp.float8 needs 8.9",
    )
    assert found["H100"] is None and found["L4"] is None
