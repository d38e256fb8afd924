"""Models spread over 16 and 64 ranks, by torch's process group that talks to nobody, and a standby
without CUDA.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from ebbflow.core.config.schema import ModelConfig, ParallelConfig, RunConfig
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import weights_sha256
from tests.support.gangs import run_ranks
from tests.support.spread_rank import ModelOnly

MODEL = ModelConfig(hidden_size=64, num_layers=1, num_heads=2, sequence_length=16)

Join = Callable[[int, int], Gang]

LLAMA = ModelConfig(
    architecture="llama",
    hidden_size=64,
    num_layers=1,
    num_heads=8,
    num_kv_heads=4,
    sequence_length=16,
    vocab_size=259,
    qkv_bias=True,
    qk_norm=True,
)
GPT = ModelConfig(
    hidden_size=64,
    num_layers=1,
    num_heads=8,
    sequence_length=16,
    vocab_size=259,
    tied_embeddings=True,
)


class Drawn(TorchDispatchMode):
    """Counts the elements that are drawn at random on the CPU."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func in (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
            and args[0].device.type == "cpu"
        ):
            self.elements += args[0].numel()
        return func(*args, **kwargs or {})


class Special(nn.Linear):
    """Initialised by operations on whole tensors, after numbers that are drawn by rows."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.weight.copy_(torch.arange(float(self.weight.numel())).view_as(self.weight)).mul_(
                2
            ).add_(1)
            self.weight[3] = 0.5


class Wide(ModelOnly):
    def model(self) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(
                nn.Embedding(3001, 512), nn.Linear(512, 1030), nn.Linear(1030, 4), Special(512, 600)
            )


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
def test_each_rank_holds_its_part_of_the_same_weights(
    join, mode: str, world_size: int, shards: int, rank: int
) -> None:
    spread = spread_model(ModelOnly(make_config(mode)), make_config(mode), join(rank, world_size))
    assert spread.copies == world_size // shards
    whole = whole_weights()
    bytes_held = 0
    for name, parameter in spread.module.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.to_local().device.type == "cpu"
        parts = whole[name].chunk(shards)
        if rank % shards < len(parts):
            own = parts[rank % shards]
        else:
            own = whole[name][:0]
        assert torch.equal(parameter.to_local(), own), name
        bytes_held += parameter.to_local().nbytes
    largest = max(parameter.nbytes for parameter in whole.values())
    assert bytes_held <= sum(parameter.nbytes for parameter in whole.values()) / shards + largest


def test_tensor_groups_hold_and_write_each_number_once(tmp_path: Path) -> None:
    """16 ranks in tensor groups of 4, in one copy of the model or two.

    Only vectors and positions are not split.
    """
    modes = (
        ParallelConfig(mode="fsdp2", tensor_size=4),
        ParallelConfig(mode="hsdp", shard_size=8, tensor_size=4),
    )
    configs = [
        RunConfig(model=model, parallel=mode)
        for model, mode in zip((GPT, LLAMA), modes, strict=True)
    ]
    (tmp_path / "configs.json").write_text(
        json.dumps([config.model_dump(mode="json") for config in configs])
    )
    run_ranks(
        16,
        ["-m", "tests.support.split_rank", str(tmp_path / "configs.json"), str(tmp_path / "out")],
    )
    ranks = [torch.load(tmp_path / f"out.{rank}", weights_only=False) for rank in range(16)]
    for number, config in enumerate(configs):
        alone = config.model_copy(update={"parallel": ParallelConfig()})
        size = config.parallel.shard_size or 16
        whole = dict(spread_model(ModelOnly(alone), alone, Gang()).module.named_parameters())
        holders, writers = (
            {name: torch.zeros_like(value) for name, value in whole.items()} for _ in range(2)
        )
        for held, written in (rank[number] for rank in ranks):
            for name, slices, part in held:
                assert torch.equal(whole[name][slices], part), name
                holders[name][slices] += 1
            for name, offsets, sizes in written:
                writers[name][
                    tuple(map(slice, offsets, map(sum, zip(offsets, sizes, strict=True))))
                ] += 1
            share = sum(part.numel() for _, _, part in held) / sum(
                value.numel() for value in whole.values()
            )
            assert share < 1.3 / size
        for name, value in whole.items():
            if value.dim() == 1 or "position" in name:
                by_group = 4
            else:
                by_group = 1
            assert (holders[name] == 16 // size * by_group).all(), name
            assert (writers[name] == 1).all(), name


@pytest.mark.parametrize(
    ("mode", "world_size", "shards", "rank"), [("fsdp2", 16, 16, 15), ("hsdp", 16, 8, 11)]
)
def test_of_large_weights_a_rank_draws_its_own_rows(
    join, mode: str, world_size: int, shards: int, rank: int
) -> None:
    class Parts(Wide):
        def units(self, model: Any) -> list[nn.Module]:
            return list(model)

    config = make_config(mode)
    whole = dict(
        spread_model(
            Parts(make_config("ddp")), make_config("ddp"), Gang()
        ).module.named_parameters()
    )
    gang = join(rank, world_size)
    with Drawn() as drawn:
        module = spread_model(Parts(config), config, gang).module
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        parts = whole[name].chunk(shards)
        if rank % shards < len(parts):
            own = parts[rank % shards]
        else:
            own = whole[name][:0]
        assert torch.equal(parameter.to_local(), own), name
    # At most two blocks of each weight but the last, which is drawn once by rows and once as a
    # whole.
    last = whole["3.weight"].numel()
    assert (
        drawn.elements
        <= 2 * 2 * 2**18
        + 2 * last
        + sum(len(tensor) for tensor in whole.values())
        + whole["2.weight"].numel()
    )


def test_only_rank_0_hashes_sharded_weights(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config("fsdp2")
    beats = list[int]()
    waits = list[torch.dtype]()
    read = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: (waits.append(tensor.dtype), read(tensor))[1]
    )
    module = spread_model(ModelOnly(config), config, join(3, 16)).module
    digest = weights_sha256(module, progress=lambda: beats.append(0))
    assert digest == hashlib.sha256().hexdigest(), (
        "of nothing: this group does not bring the digest of rank 0"
    )
    assert len(beats) == len(list(module.parameters())), "a large model is not taken for a hang"
    # Without a wait for each, NCCL would time the last all-gather from the start, through all of
    # rank 0's hashing.
    assert waits.count(torch.float32) == len(beats)


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

    config = make_config("fsdp2")
    beats = list[str]()
    spread = spread_model(
        Small(config),
        config,
        join(3, 16),
        overwritten=True,
        progress=lambda: beats.append("alive"),
    )
    module = spread.module
    assert beats == ["alive"], "a large model is not taken for a hang"
    assert calls == ["rotary"] and module.get_buffer("1.frequencies").tolist() == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]


def test_nothing_asks_for_cuda_before_the_standby_forks(tmp_path: Path) -> None:
    """A process that has a CUDA context cannot fork.

    Each question that torch answers by `cuInit` is refused, and a driver that only writes down each
    `cuInit` is there for all other libraries. At the end this process calls it itself, which shows
    that calls are seen.
    """
    log = tmp_path / "calls"
    source = tmp_path / "stub.c"
    source.write_text(
        '#include <stdio.h>\nint cuInit(unsigned flags) { FILE *log = fopen("LOG", "a"); fputs("cuInit\\n", log); '
        "return fclose(log) + 100; }\n".replace("LOG", str(log))
    )
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "torch.compile's tests need one too"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True
    )
    program = """
import ctypes, pathlib, sys, torch
def refuse(*_, **__): raise SystemExit("CUDA was asked for")
for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
import ebbflow.training.worker
from ebbflow.training import standby
standby._import_for_ranks()
if pathlib.Path(sys.argv[1]).exists(): raise SystemExit("cuInit was called")
ctypes.CDLL("libcuda.so.1").cuInit(0)
"""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}",
    }
    command = [sys.executable, "-c", program, str(log)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert log.read_text() == "cuInit\n"
