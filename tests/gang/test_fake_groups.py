"""Models spread over 16 and 64 ranks, by torch's process group that talks to nobody, and a standby without CUDA."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from ebbflow.infra.config.schema import ModelConfig, ParallelConfig, RunConfig
from ebbflow.training.gang import Gang
from ebbflow.training.parallel import spread_model
from tests.support.spread_rank import ModelOnly

MODEL = ModelConfig(hidden_size=64, num_layers=1, num_heads=2, sequence_length=16)


Join = Callable[[int, int], Gang]


@pytest.fixture
def join() -> Iterator[Join]:
    def join(rank: int, world_size: int) -> Gang:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        return Gang(rank=rank, world_size=world_size, ranks_per_node=8)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def make_config(mode: str, **parallel: int) -> RunConfig:
    return RunConfig(model=MODEL, parallel=ParallelConfig(mode=mode, **parallel))


def whole_weights() -> dict[str, torch.Tensor]:
    module = spread_model(ModelOnly(make_config("ddp")), make_config("ddp"), Gang()).module
    return dict(module.named_parameters())


@pytest.mark.parametrize(
    ("mode", "world_size", "shards", "rank"),
    [("fsdp2", 16, 16, 5), ("fsdp2", 64, 64, 63), ("hsdp", 16, 8, 13), ("hsdp", 64, 8, 40)],
)
def test_each_rank_holds_its_part_of_the_same_weights(join, mode: str, world_size: int, shards: int, rank: int) -> None:
    spread = spread_model(ModelOnly(make_config(mode)), make_config(mode), join(rank, world_size))
    assert spread.copies == world_size // shards
    whole, bytes_held = whole_weights(), 0
    for name, parameter in spread.module.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.to_local().device.type == "cpu"
        parts = whole[name].chunk(shards)
        own = parts[rank % shards] if rank % shards < len(parts) else whole[name][:0]
        assert torch.equal(parameter.to_local(), own), name
        bytes_held += parameter.to_local().nbytes
    largest = max(parameter.nbytes for parameter in whole.values())
    assert bytes_held <= sum(parameter.nbytes for parameter in whole.values()) / shards + largest


def test_weights_that_will_be_overwritten_are_not_initialised(join: Join) -> None:
    """But for buffers that no commit has, such as rotary frequencies."""
    calls: list[str] = []

    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.empty(4), persistent=False)

        def reset_parameters(self) -> None:
            calls.append("rotary")
            with torch.no_grad():
                self.frequencies.copy_(torch.arange(4.0))

    class Linear(nn.Linear):
        def reset_parameters(self) -> None:
            calls.append("linear")

    class Small(ModelOnly):
        def model(self) -> nn.Module:
            with torch.device("meta"):
                return nn.Sequential(Linear(4, 4), Rotary())

        def units(self, model: nn.Module) -> list[nn.Module]:
            calls.clear()  # those of the constructors, on the meta device
            return []

    config, beats = make_config("fsdp2"), list[str]()
    alive = lambda: beats.append("alive")  # noqa: E731
    module = spread_model(Small(config), config, join(3, 16), overwritten=True, progress=alive).module
    assert beats == ["alive"], "a large model is not taken for a hang"
    assert calls == ["rotary"] and module.get_buffer("1.frequencies").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_nothing_asks_for_cuda_before_the_standby_forks() -> None:
    """A process that has a CUDA context cannot fork. Each question that torch answers by `cuInit` is refused."""
    program = """
import importlib, torch
def refuse(*_, **__): raise SystemExit("CUDA was asked for")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
import ebbflow.training.worker
from ebbflow.training import standby
for name in standby._LATER: importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
