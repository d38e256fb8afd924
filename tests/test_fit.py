"""Memory fit and throughput, by hand for one small shape."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from cost.catalogue import load_catalogue
from cost.plan.fit import CONTEXT_BYTES, memory_fit, micro_batch
from cost.plan.throughput import MFU_PRIOR, NETWORK_EFFICIENCY, PCIE_BYTES_PER_SECOND, Throughput, estimate_throughput
from infra.config.schema import FsdpConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from infra.footprint import SMALL_MODEL_BYTES, Gang, host_memory_bytes
from infra.model_shape import ModelShape, causal_lm_shape
from infra.reliability import young_interval_seconds

SHAPE = ModelShape(
    parameters=1_000_001,
    largest_unit_parameters=100_000,
    activation_bytes_per_sample=2_000_000,
    logits_bytes_per_sample=500_000,
    flops_per_sample=1e9,
    tokens_per_sample=128,
    units=4,
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
    assert fit.unsharded == 4 * (1_000_001 + 100_000) + 4 * 1_000_001  # gathered, a unit's gradient, whole gradients
    assert fit.activations == 4 * 2_000_000  # 32 / (4 × 2) samples
    assert fit.logits == 4 * 500_000
    tensors = 16 * share + 8_400_008 + 8_000_000 + 2_000_000
    assert fit.allowance == CONTEXT_BYTES + tensors // 10
    assert fit.total == tensors + fit.allowance == sum(fit.to_json().values())


def test_mixed_precision_halves_what_is_computed_in_not_what_is_kept():
    plain, mixed = memory_fit(config(), 4, SHAPE), memory_fit(config(mixed=True), 4, SHAPE)
    assert (mixed.parameters, mixed.optimizer, mixed.logits) == (plain.parameters, plain.optimizer, plain.logits)
    assert 2 * mixed.activations == plain.activations
    assert plain.unsharded - mixed.unsharded == 2 * (1_000_001 + 100_000), "gradients wait in float32"


def test_a_small_model_stays_gathered_and_its_gradients_wait():
    """On the limit of 1 GiB and one parameter above it, with one micro-batch and with two."""
    limit = SMALL_MODEL_BYTES // 4
    at, above = (replace(SHAPE, parameters=count) for count in (limit, limit + 1))
    once = config(accumulation=1)
    assert memory_fit(once, 4, at).unsharded == 4 * (limit + 100_000)
    assert memory_fit(config(), 4, at).unsharded == 4 * (limit + 100_000) + 4 * limit
    assert memory_fit(once, 4, above).unsharded == memory_fit(config(), 4, above).unsharded == 3 * 4 * 100_000
    halves = config(mixed=True)
    halves = halves.model_copy(update={"fsdp": halves.fsdp.model_copy(update={"reduce_dtype": "bfloat16"})})
    assert memory_fit(halves, 4, at).unsharded == 2 * (limit + 100_000) + 2 * limit
    assert memory_fit(once, 1, at).unsharded == 0, "one rank shards nothing"

    gang = Gang(nodes=2, processes_per_node=2)
    parameters = causal_lm_shape(once.model).parameters
    # Twice the samples at once, and no whole gradients on four ranks.
    waiting = host_memory_bytes(config(batch=2, accumulation=2), gang) - host_memory_bytes(
        config(batch=1, accumulation=1), gang
    )
    assert waiting == 4 * 4 * parameters


def test_ddp_keeps_everything_on_every_rank():
    fit = memory_fit(config("ddp"), 4, SHAPE)
    assert fit.parameters + fit.gradients + fit.optimizer == 16 * 1_000_001
    assert fit.unsharded == 4 * 1_000_001  # the buckets
    assert memory_fit(config("ddp"), 1, SHAPE).unsharded == 0


def changed(**sections: dict) -> RunConfig:
    """The configuration of `config()`, in mode hsdp, with other values in some sections."""
    base = config("hsdp")
    return base.model_copy(
        update={name: getattr(base, name).model_copy(update=values) for name, values in sections.items()}
    )


def test_hsdp_divides_by_a_shard_or_by_a_node():
    by_node, by_two = memory_fit(changed(), 4, SHAPE, ranks_per_node=4), changed(parallel={"shard_size": 2})
    assert by_node == memory_fit(config(), 4, SHAPE), "a node that is all there is"
    assert memory_fit(by_two, 4, SHAPE, ranks_per_node=4).parameters == 4 * 500_001
    assert memory_fit(changed(), 4, SHAPE, ranks_per_node=1).parameters == 4 * 1_000_001


def test_recomputing_keeps_inputs_and_one_unit():
    kept = [memory_fit(changed(parallel={"recompute": how}), 4, SHAPE).activations for how in ("selective", "full")]
    whole = 4 * 2_000_000  # of which a unit is a quarter
    assert kept == pytest.approx([whole * (11 / 18 + 7 / 18 / 4), whole * (1 / 18 + 17 / 18 / 4)], abs=1)


def test_offloading_leaves_only_what_is_gathered():
    gathered = 4 * (2 * 1_000_001 + 100_000)
    fit = memory_fit(changed(fsdp={"cpu_offload": True}), 4, SHAPE)
    assert (fit.parameters, fit.gradients, fit.optimizer, fit.unsharded) == (0, 0, 0, gathered)
    alone = memory_fit(changed(fsdp={"cpu_offload": True}), 1, SHAPE)
    assert (alone.parameters, alone.unsharded) == (0, gathered)


def test_main_memory_of_a_laptop_follows_copies_and_recomputing():
    gang = Gang(nodes=2, processes_per_node=2)
    need = {mode: host_memory_bytes(config(mode), gang) for mode in ("ddp", "hsdp", "fsdp2")}
    copy = 16 * causal_lm_shape(config().model).parameters  # weights, gradients and two moments, float32
    assert need["hsdp"] - need["fsdp2"] == copy, "a copy per node instead of one"
    assert host_memory_bytes(changed(parallel={"shard_size": 4}), gang) == need["fsdp2"]
    assert host_memory_bytes(changed(parallel={"recompute": "full"}), gang) < need["hsdp"]


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


def test_what_the_modes_move_and_compute_again():
    """Two nodes of two GPUs behind 2.5 Gbit/s: a step is as long as what it receives from the other node."""
    kind = load_catalogue()["g5.xlarge"]
    large = ModelConfig(hidden_size=2048, num_layers=16, num_heads=16)
    shape = causal_lm_shape(large)
    per_parameter = kind.network_gbps * 1e9 / 8 * NETWORK_EFFICIENCY / shape.parameters

    def received(ranks_per_node: int = 2, **sections: dict) -> float:
        speed = estimate_throughput(changed(**sections), shape, kind, 2, ranks_per_node)
        assert speed.bound == "network"
        return speed.step_seconds * per_parameter

    # Two micro-batches gather twice each in float32, and reduce once each: half of it comes from the other node.
    assert received(parallel={"mode": "fsdp2"}) == pytest.approx(2 * (2 * 4 + 4) / 2)
    assert received(parallel={"shard_size": 4}) == pytest.approx(2 * (2 * 4 + 4) / 2), "one copy over both nodes"
    assert received() == pytest.approx(2 * 4 / 2), "a copy per node: between them as ddp"
    assert received(parallel={"mode": "ddp"}) == pytest.approx(2 * 4 / 2)
    assert received(parallel={"mode": "ddp"}, ddp={"static_graph": True}) == pytest.approx(2 * 2 * 4 / 2)
    halves = {"use_mixed_precision": True, "reduce_dtype": "bfloat16"}
    assert received(fsdp=halves) == pytest.approx(2 * 2 / 2)
    assert received(parallel={"mode": "ddp"}, ddp={"gradient_compression": "bfloat16"}) == pytest.approx(2 * 2 / 2)

    def alone(**sections: dict) -> Throughput:
        return estimate_throughput(changed(**sections), shape, kind, 1, 1)

    busy = {"batch_size": 512}
    plain, again = alone(training=busy), alone(training=busy, parallel={"recompute": "full"})
    assert (plain.bound, again.bound) == ("compute", "compute")
    assert again.step_seconds == pytest.approx(plain.step_seconds * 4 / 3)
    moved = alone(training={"batch_size": 2}, fsdp={"cpu_offload": True, "use_mixed_precision": True})
    assert moved.bound == "host"
    assert moved.step_seconds == pytest.approx(3 * 2 * 4 * shape.parameters / PCIE_BYTES_PER_SECOND)


def test_a_small_model_is_gathered_once_per_micro_batch_and_reduced_once_per_step():
    kind = load_catalogue()["g5.xlarge"]
    limit = SMALL_MODEL_BYTES // 4
    at, above = (replace(SHAPE, parameters=count) for count in (limit, limit + 1))
    bandwidth = kind.network_gbps * 1e9 / 8 * NETWORK_EFFICIENCY

    def received(shape: ModelShape, accumulation: int) -> float:
        """Bytes per parameter of a node's half, mixed precision: 2 when gathered, 4 when reduced."""
        speed = estimate_throughput(config(mixed=True, accumulation=accumulation), shape, kind, 2, 1)
        assert speed.bound == "network"
        return speed.step_seconds * bandwidth / shape.parameters * 2

    assert [received(at, count) for count in (1, 4)] == pytest.approx([2 + 4, 4 * 2 + 4])
    assert [received(above, count) for count in (1, 4)] == pytest.approx([2 * 2 + 4, 4 * (2 * 2 + 4)])

    offloaded = changed(fsdp={"cpu_offload": True})
    moved = [estimate_throughput(offloaded, shape, kind, 1, 1) for shape in (at, above)]
    assert [one.bound for one in moved] == ["host", "host"]
    ups_and_downs = [one.step_seconds * PCIE_BYTES_PER_SECOND / 4 for one in moved]
    assert ups_and_downs == pytest.approx([(2 + 1) * limit, (4 + 2) * (limit + 1)])


def test_young_interval_by_hand():
    # A save of 2 s, an interruption each 4 h: √(2 · 2 s · 14400 s) = 240 s.
    assert young_interval_seconds(2.0, 0.25) == pytest.approx(240.0)
    assert young_interval_seconds(2.0, 0.0) == math.inf
    with pytest.raises(ValueError, match="must not be negative"):
        young_interval_seconds(-1.0, 0.1)
