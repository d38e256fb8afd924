"""Memory fit and throughput, by hand for one small shape."""

from __future__ import annotations

import math

import pytest

from cost.catalogue import load_catalogue
from cost.fit import CONTEXT_BYTES, memory_fit, micro_batch
from cost.throughput import MFU_PRIOR, NETWORK_EFFICIENCY, estimate_throughput
from infra.config.schema import FsdpConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from infra.model_shape import ModelShape, causal_lm_shape
from infra.reliability import young_interval_seconds

SHAPE = ModelShape(
    parameters=1_000_001,
    largest_unit_parameters=100_000,
    activation_bytes_per_sample=2_000_000,
    logits_bytes_per_sample=500_000,
    flops_per_sample=1e9,
    tokens_per_sample=128,
)


def config(mode: str = "fsdp2", mixed: bool = False, batch: int = 32, accumulation: int = 2) -> RunConfig:
    return RunConfig(
        training=TrainingConfig(batch_size=batch, gradient_accumulation_steps=accumulation),
        parallel=ParallelConfig(mode=mode),
        fsdp=FsdpConfig(use_mixed_precision=mixed),
    )


def test_sharded_float32_by_hand():
    fit = memory_fit(config(), 4, SHAPE)
    share = 250_001  # a quarter, rounded up
    assert (fit.parameters, fit.gradients, fit.optimizer) == (4 * share, 4 * share, 8 * share)
    assert fit.unsharded == 3 * 4 * 100_000
    assert fit.activations == 4 * 2_000_000  # 32 / (4 × 2) samples
    assert fit.logits == 4 * 500_000
    tensors = 16 * share + 1_200_000 + 8_000_000 + 2_000_000
    assert fit.allowance == CONTEXT_BYTES + tensors // 10
    assert fit.total == tensors + fit.allowance == sum(fit.to_json().values())


def test_mixed_precision_halves_what_is_computed_in_not_what_is_kept():
    plain, mixed = memory_fit(config(), 4, SHAPE), memory_fit(config(mixed=True), 4, SHAPE)
    assert (mixed.parameters, mixed.optimizer, mixed.logits) == (plain.parameters, plain.optimizer, plain.logits)
    assert (2 * mixed.unsharded, 2 * mixed.activations) == (plain.unsharded, plain.activations)


def test_ddp_keeps_everything_on_every_rank():
    fit = memory_fit(config("ddp"), 4, SHAPE)
    assert fit.parameters + fit.gradients + fit.optimizer == 16 * 1_000_001
    assert fit.unsharded == 4 * 1_000_001  # the buckets
    assert memory_fit(config("ddp"), 1, SHAPE).unsharded == 0


def test_more_ranks_never_need_more_memory_each():
    shape = causal_lm_shape(ModelConfig(hidden_size=1024, num_layers=12, num_heads=16))
    totals = [memory_fit(config(batch=64), ranks, shape).total for ranks in (2, 4, 8, 16, 32)]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == len(totals)


def test_a_batch_that_does_not_divide_shows_its_arithmetic():
    assert micro_batch(config(batch=36), 4) is None
    assert micro_batch(config(batch=4), 4) is None  # no sample for anyone
    with pytest.raises(ValueError, match=r"36 = 4 × 8 \+ 4"):
        memory_fit(config(batch=36), 4, SHAPE)


def test_throughput_is_the_tightest_of_its_bounds():
    types = load_catalogue()
    large = RunConfig(
        model=ModelConfig(hidden_size=4096, num_layers=32, num_heads=32, sequence_length=4096),
        training=TrainingConfig(batch_size=64),
        fsdp=FsdpConfig(use_mixed_precision=True),
    )
    shape = causal_lm_shape(large.model)
    one = estimate_throughput(large, shape, types["p5.48xlarge"], 1, 8)
    assert one.bound == "compute" and one.mfu == pytest.approx(MFU_PRIOR)
    assert one.tokens_per_second == pytest.approx(64 * 4096 / one.step_seconds)
    assert one.step_seconds == pytest.approx(shape.flops_per_sample * 64 / (8 * 989.5e12 * MFU_PRIOR))

    pcie = estimate_throughput(large, shape, types["g6e.48xlarge"], 1, 8)
    alone = estimate_throughput(large, shape, types["g6e.48xlarge"], 1, 1)
    assert pcie.mfu < alone.mfu == pytest.approx(MFU_PRIOR), "PCIe between GPUs costs"
    apart = [estimate_throughput(large, shape, types[name], 2, 1) for name in ("g6e.4xlarge", "g6e.8xlarge")]
    assert [one.bound for one in apart] == ["compute", "compute"]
    assert apart[0].mfu < apart[1].mfu == pytest.approx(MFU_PRIOR), "only the larger one has EFA"

    few = large.model_copy(update={"training": TrainingConfig(batch_size=2)})
    slow = estimate_throughput(few, shape, types["g5.xlarge"], 2, 1)  # 2.5 Gbit/s and no EFA
    moved = (2 * 2 + 4) * shape.parameters / 2
    assert slow.bound == "network"
    assert slow.step_seconds == pytest.approx(moved / (2.5e9 / 8 * NETWORK_EFFICIENCY))

    small = RunConfig(fsdp=FsdpConfig(use_mixed_precision=True))
    tiny = estimate_throughput(small, causal_lm_shape(small.model), types["p5.4xlarge"], 1, 1)
    assert tiny.bound == "launch" and tiny.mfu < 0.05
    assert estimate_throughput(small, SHAPE, types["g4dn.xlarge"], 1, 1) is None  # no bfloat16 peak


def test_young_interval_by_hand():
    # A save of 2 s, an interruption each 4 h: √(2 · 2 s · 14400 s) = 240 s.
    assert young_interval_seconds(2.0, 0.25) == pytest.approx(240.0)
    assert young_interval_seconds(2.0, 0.0) == math.inf
    with pytest.raises(ValueError, match="must not be negative"):
        young_interval_seconds(-1.0, 0.1)
