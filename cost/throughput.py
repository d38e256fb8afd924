"""Tokens per second of a gang, estimated: the longest of three bounds that a step cannot beat.

- compute: flops of the step / (GPUs × dense peak × MFU prior).
- network: bytes that each node exchanges per step / its sustained bandwidth, perfectly overlapped with compute.
- launch: the host must start every kernel; a model too narrow for its GPU is bound by that, however fast the GPU.

Real steps are slower than their largest bound, which the MFU prior makes up for in the usual case. It is a prior, to
be replaced by the measured throughput of a short run.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost.catalogue import InstanceType
from cost.fit import BFLOAT16_BYTES, FLOAT32_BYTES
from infra.config.schema import RunConfig
from infra.model_shape import ModelShape

# Published for tuned runs: 46 % (PaLM 540B, Chowdhery et al. 2022, table 3), 38–43 % (Llama 3 405B, Grattafiori et
# al. 2024, table 4). Ours is not tuned, so below the lowest of them.
MFU_PRIOR = 0.35
# GPUs of one node that talk over PCIe instead of NVLink gather their shards more slowly than they compute.
PCIE_FACTOR = 0.7
# Gathering over TCP costs CPU time and latency which EFA's bypass of the kernel saves.
NO_EFA_FACTOR = 0.6
# Share of the listed bandwidth that collectives reach.
NETWORK_EFFICIENCY = 0.7
# About 100 kernels per block, forward and backward, at about 10 µs of host time each in eager mode.
LAUNCH_SECONDS_PER_BLOCK = 1e-3


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """step_seconds: one optimizer step. bound: compute, network or launch. mfu: what the estimate comes to."""

    tokens_per_second: float
    step_seconds: float
    bound: str
    mfu: float


def estimate_throughput(
    config: RunConfig, shape: ModelShape, kind: InstanceType, nodes: int, processes_per_node: int
) -> Throughput | None:
    """None when the GPU's peak for the configured precision is not known."""
    peak = kind.gpu.peak_flops(config.fsdp.use_mixed_precision)
    if peak is None:
        return None
    ranks = nodes * processes_per_node
    flops = shape.flops_per_sample * config.training.batch_size
    seconds = {
        "compute": flops / (ranks * peak * _mfu_prior(kind, nodes, processes_per_node)),
        "network": _network_bytes(config, shape, nodes) / (kind.network_gbps * 1e9 / 8 * NETWORK_EFFICIENCY),
        "launch": LAUNCH_SECONDS_PER_BLOCK * (config.model.num_layers + 2) * _micro_steps(config),
    }
    bound = max(seconds, key=seconds.__getitem__)
    step_seconds = seconds[bound]
    return Throughput(
        tokens_per_second=config.tokens_per_step / step_seconds,
        step_seconds=step_seconds,
        bound=bound,
        mfu=flops / (step_seconds * ranks * peak),
    )


def _mfu_prior(kind: InstanceType, nodes: int, processes_per_node: int) -> float:
    prior = MFU_PRIOR
    if processes_per_node > 1 and not kind.gpu.nvlink:
        prior *= PCIE_FACTOR
    if nodes > 1 and not kind.efa:
        prior *= NO_EFA_FACTOR
    return prior


def _micro_steps(config: RunConfig) -> int:
    return config.training.gradient_accumulation_steps


def _network_bytes(config: RunConfig, shape: ModelShape, nodes: int) -> float:
    """Bytes that one node receives from the others per optimizer step.

    FSDP2 gathers the parameters for forward and again for backward of every micro-batch, then reduces float32
    gradients once. DDP's ring all-reduce moves the float32 gradients twice.
    """
    remote = (nodes - 1) / nodes
    if config.parallel.mode == "ddp":
        return 2 * FLOAT32_BYTES * shape.parameters * remote
    gathered = BFLOAT16_BYTES if config.fsdp.use_mixed_precision else FLOAT32_BYTES
    return (2 * _micro_steps(config) * gathered + FLOAT32_BYTES) * shape.parameters * remote
