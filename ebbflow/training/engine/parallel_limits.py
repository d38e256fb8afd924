"""Checks for parallel options that a model, gang or machine does not support.

Preflight and each starting rank run these checks. This module does not import torch. It repeats
some rules of `ebbflow.core.config.shape_rules`, because those rules may not have checked a rank's
configuration.
"""

import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import shard_ranks

# The compilers that torch's inductor searches for, unless the environment variable is set.
_COMPILERS = {"CXX": ("g++", "clang++"), "CC": ("gcc", "cc", "clang")}


@dataclass(frozen=True)
class RankLayout:
    ranks: int  # the number of ranks
    ranks_per_node: int  # the number of ranks on each node
    gpu: bool  # True for NCCL on GPUs, False for gloo on CPUs
    parameters: int | None = None  # the number of the model's parameters; None if unknown


@dataclass(frozen=True)
class UnsupportedOption:
    message: str  # the option's key, and the reason with its arithmetic
    fix: str  # an option to use instead

    def __str__(self) -> str:
        return f"{self.message}; fix: {self.fix}"


def find_unsupported_options(config: RunConfig, place: RankLayout) -> list[UnsupportedOption]:
    """Return every reason why `config` cannot run on these ranks, or an empty list if it can."""
    found = [*_shards(config, place), *_replicas(config, place)]
    if config.parallel.tensor_size > 1:
        found += _tensor_groups(config, place)
    if config.parallel.compile:
        found += _compiler(place)
    if config.guards.repeat_interval_steps and config.fsdp.compute_dtype == "float16":
        found.append(
            UnsupportedOption(
                "guards.repeat_interval_steps: ranks compute in float16, whose loss scale may change "
                "between the two computations of a step",
                "set fsdp.use_mixed_precision to false, or guards.repeat_interval_steps to null",
            )
        )
    if config.fsdp.float8 == "on" and not place.gpu:
        found.append(
            UnsupportedOption(
                "fsdp.float8 on: CPUs have no fp8", "set fsdp.float8 to emulate or off"
            )
        )
    if config.fsdp.float8 != "off" and config.parallel.tensor_size > 1:
        what = (
            f"fsdp.float8 {config.fsdp.float8}: layers that are split by parallel.tensor_size "
            "have none"
        )
        found.append(
            UnsupportedOption(what, "set parallel.tensor_size to 1, or fsdp.float8 to off")
        )
    return found


def _shards(config: RunConfig, place: RankLayout) -> Iterator[UnsupportedOption]:
    size = shard_ranks(config, place.ranks, place.ranks_per_node)
    if place.ranks % size:
        copies, rest = divmod(place.ranks, size)
        if config.parallel.shard_size:
            given = "parallel.shard_size"
        else:
            given = "parallel.shard_size (ranks per node)"
        fitting = [number for number in range(1, place.ranks + 1) if place.ranks % number == 0]
        yield UnsupportedOption(
            f"mode hsdp: {place.ranks} ranks are no multiple of {given} {size}: {place.ranks} = "
            f"{size} × {copies} + {rest}",
            f"set parallel.shard_size to one of {', '.join(map(str, fitting))}, or parallel.mode "
            "to fsdp2",
        )
    if config.fsdp.cpu_offload and config.parallel.mode == "ddp":
        yield UnsupportedOption(
            "fsdp.cpu_offload: mode ddp has no shards that could stay in host memory",
            "set parallel.mode to fsdp2 or hsdp, or fsdp.cpu_offload to false",
        )


def _tensor_groups(config: RunConfig, place: RankLayout) -> Iterator[UnsupportedOption]:
    tensor = config.parallel.tensor_size
    model = config.model
    if config.parallel.mode == "ddp" or config.script is not None:
        yield UnsupportedOption(
            f"parallel.tensor_size {tensor}: only the layers of the built-in model can be split, "
            "in mode fsdp2 or hsdp",
            "set parallel.tensor_size to 1",
        )
        return
    size = shard_ranks(config, place.ranks, place.ranks_per_node)
    split = {"the ranks that hold one copy of the model,": size}
    if config.workload is None:  # other workloads check their own models
        split |= {"model.num_heads": model.num_heads, "model.num_kv_heads": model.kv_heads}
        split |= {
            "model.hidden_size": model.hidden_size,
            "model.intermediate_size": model.mlp_width,
        }
    fitting = [number for number in range(1, size + 1) if math.gcd(*split.values()) % number == 0]
    for name, number in split.items():
        if number % tensor:
            yield UnsupportedOption(
                f"parallel.tensor_size {tensor} does not divide {name} {number}: {number} = "
                f"{tensor} × {number // tensor} + {number % tensor}",
                f"set parallel.tensor_size to one of {', '.join(map(str, fitting))}",
            )
    if config.workload is not None or size % tensor:
        return
    rest = model.hidden_size % (size // tensor)
    if rest:
        yield UnsupportedOption(
            f"parallel.tensor_size {tensor}: FSDP2 cuts the columns of weights, "
            f"model.hidden_size {model.hidden_size}, into {size} / {tensor} = {size // tensor} "
            f"equal shards, which leaves {rest}",
            "use mode hsdp with a parallel.shard_size that fits, or another model.hidden_size",
        )


def _replicas(config: RunConfig, place: RankLayout) -> Iterator[UnsupportedOption]:
    if config.parallel.mode != "ddp" or place.ranks == 1:
        return
    compression = config.ddp.gradient_compression
    if compression == "bfloat16" and not place.gpu:
        yield UnsupportedOption(
            "ddp.gradient_compression bfloat16: torch has it for NCCL on GPUs only, and these "
            "ranks talk over gloo",
            "set ddp.gradient_compression to none",
        )
    if compression == "powersgd" and not place.gpu and place.parameters is not None:
        gradients = 4 * place.parameters
        bucket = int(config.ddp.bucket_cap_mb * 2**20)
        if gradients > bucket:
            yield UnsupportedOption(
                "ddp.gradient_compression powersgd: hangs on gloo with more than one bucket, and "
                f"{gradients:,} bytes of gradients ({place.parameters:,} parameters × 4) exceed "
                f"ddp.bucket_cap_mb {config.ddp.bucket_cap_mb:g} = {bucket:,} bytes",
                f"set ddp.bucket_cap_mb to {-(-gradients // 2**20)}, or ddp.gradient_compression "
                "to none",
            )
    accumulation = config.training.gradient_accumulation_steps
    if compression != "none" and config.ddp.static_graph and accumulation > 1:
        yield UnsupportedOption(
            f"ddp.static_graph with {accumulation} micro-batches reduces the gradients after "
            f"each of them, and {compression} would compress what was compressed before",
            "set ddp.static_graph to false",
        )


def _compiler(place: RankLayout) -> Iterator[UnsupportedOption]:
    """Yield each missing requirement of torch.compile: a C++ (CPU) or C (GPU) compiler, and
    Python.h.
    """
    if place.gpu:
        variable = "CC"
    else:
        variable = "CXX"
    named = os.environ.get(variable, "")
    if not any(shutil.which(name) for name in ([named] if named else _COMPILERS[variable])):
        if named:
            looked = f"{variable}={named}"
        else:
            looked = " or ".join(_COMPILERS[variable])
        yield UnsupportedOption(
            f"parallel.compile: torch.compile needs a compiler of its own, and {looked} is not "
            "on PATH",
            "install one (apt-get install g++), or set parallel.compile to false",
        )
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        yield UnsupportedOption(
            f"parallel.compile: the compiled code includes Python.h, and {header} does not exist",
            "install the headers of this Python (apt-get install python3-dev), or set "
            "parallel.compile to false",
        )
