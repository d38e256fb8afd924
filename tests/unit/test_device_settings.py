"""The keys that are "auto" until the device is known, what they cost in the plan, and the keys that
a plan or a refusal proposes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benchmarks.training.published import (
    judge_foundry_run,
    read_foundry_runs,
    summarise_foundry,
)
from ebbflow.core.config.device_settings import (
    LOSS_BYTES,
    choose_loss_chunk,
    renew_defaults,
    settle_for_device,
)
from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import causal_lm_shape, rank_bytes
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.plan.candidates import PlanInputs, feasible_pools
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.plan.plan_text import render_plan
from ebbflow.cost.plan.throughput import (
    CONTEXT_BYTES,
    FLOAT8_SPEEDUP,
    MFU_PRIOR,
    estimate_throughput,
    memory_fit,
    speed_fingerprint,
)
from ebbflow.cost.prices.quote import StaticPrices
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.training.launch.devices import VisibleGpus, assign_gpus

NOW = 1_790_000_000.0
ROOT = Path(__file__).resolve().parents[2]


def model(width: int, blocks: int, heads: int, length: int = 2048) -> dict[str, int]:
    return {
        "hidden_size": width,
        "num_layers": blocks,
        "num_heads": heads,
        "sequence_length": length,
        "vocab_size": 50368,
    }


def job(
    shape: dict[str, int],
    kind: str,
    *,
    nodes: int = 1,
    batch: int,
    parts: int = 1,
    recompute: str = "none",
) -> RunConfig:
    """A job whose configuration names model, batch and machines, and leaves the rest alone."""
    return RunConfig.model_validate(
        {
            "model": shape,
            "training": {
                "batch_size": batch,
                "gradient_accumulation_steps": parts,
                "max_steps": 5000,
            },
            "cluster": {
                "nodes": nodes,
                "processes_per_node": "auto",
                "instance_types": [kind],
                "plan_for": "kubernetes",
            },
            "cost": {"regions": ["us-east-1", "us-west-2", "us-east-2"]},
            "parallel": {"recompute": recompute},
        }
    )


JOBS = {
    "124M on T4": job(model(768, 12, 12, 1024), "g4dn.12xlarge", batch=64, parts=4),
    "124M on A10G": job(model(768, 12, 12, 1024), "g5.12xlarge", batch=64),
    "350M on L4": job(model(1024, 24, 16), "g6.12xlarge", batch=32, parts=4),
    "760M on L40S": job(model(1536, 24, 12), "g6e.12xlarge", batch=64, parts=4),
    "1.3B on A100": job(model(2048, 24, 16), "p4d.24xlarge", batch=64),
    "3B on A100": job(model(2560, 32, 20), "p4de.24xlarge", batch=64, parts=4),
    "7B on H100": job(model(4096, 32, 32), "p5.48xlarge", batch=64, parts=2),
    "13B on H100": job(model(5120, 40, 40), "p5.48xlarge", batch=64, recompute="full"),
    "30B on H200": job(model(7168, 48, 56), "p5en.48xlarge", nodes=2, batch=128, recompute="full"),
    "70B on H200": job(model(8192, 80, 64), "p5en.48xlarge", nodes=8, batch=512, recompute="full"),
}


def planned_usd(config: RunConfig) -> float:
    """Expected dollars that the plan of a configuration shows for its best pool."""
    return make_plan(config, now_utc=NOW).ranked[0].expected_usd


def cheapest_usd(config: RunConfig) -> float:
    inputs = PlanInputs(
        catalogue=load_catalogue(),
        shape=causal_lm_shape(config.model),
        prices=StaticPrices(),
        now_utc=NOW,
    )
    return min((pool.expected_usd for pool in feasible_pools(config, inputs)), default=math.inf)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.slow
def test_the_defaults_cost_at_most_a_tenth_more_than_the_best_keys(name: str) -> None:
    config = JOBS[name]
    defaults = cheapest_usd(config)
    tried = product((True, False), ("bfloat16", "float16"), (True, False), (None, 512, 2048))
    best = min(
        cheapest_usd(
            config.changed("fsdp", use_mixed_precision=mixed, param_dtype=dtype).changed(
                "training", tf32=tf32, loss_chunk_tokens=chunk
            )
        )
        for mixed, dtype, tf32, chunk in tried
    )
    assert math.isfinite(defaults) and defaults <= 1.1 * best


def test_automatic_keys_are_those_of_the_card() -> None:
    config = JOBS["1.3B on A100"]
    on_cpu, on_t4, on_a100 = (settle_for_device(config, card) for card in (None, 7.5, 8.0))
    assert on_cpu.fsdp.compute_dtype == "float32" and on_cpu.training.loss_chunk is None
    assert on_t4.fsdp.compute_dtype == "float16" and on_a100.fsdp.compute_dtype == "bfloat16"
    assert on_a100.training.loss_chunk == choose_loss_chunk(50368) == 1024
    asked = config.changed("fsdp", use_mixed_precision=False).changed(
        "training", loss_chunk_tokens=None
    )
    kept = settle_for_device(asked, 9.0)
    assert kept.fsdp.compute_dtype == "float32" and kept.training.loss_chunk is None
    own_loop = config.model_copy(update={"script": "train.py"})
    assert settle_for_device(own_loop, 9.0).fsdp.compute_dtype == "float32"
    own_loss = config.model_copy(update={"workload": "mine:Model"})
    assert settle_for_device(own_loss, 9.0).training.loss_chunk is None
    unsettled = rank_bytes(config, causal_lm_shape(config.model), ranks=8, samples=8)
    assert unsettled == rank_bytes(on_cpu, causal_lm_shape(config.model), ranks=8, samples=8)


@pytest.mark.parametrize("vocabulary", [256, 32000, 50257, 128256, 2**20])
def test_a_chunk_of_the_loss_takes_a_gib_or_256_tokens(vocabulary: int) -> None:
    chunk = choose_loss_chunk(vocabulary)
    assert chunk.bit_count() == 1
    assert chunk == 256 or 12 * vocabulary * chunk <= LOSS_BYTES < 12 * vocabulary * 2 * chunk


def test_ranks_compute_in_what_the_oldest_card_has_and_a_mixture_is_named() -> None:
    def sees(gpu: str, name: str, capability: float) -> VisibleGpus:
        return VisibleGpus(gpus=(gpu,), models=((name, capability),))

    alike = [sees("a", "A100", 8.0), sees("b", "A100", 8.0)]
    assert assign_gpus(alike, "auto").capability == 8.0 and not assign_gpus(alike, "auto").note
    mixed = assign_gpus([*alike, sees("c", "Tesla T4", 7.5)], "auto")
    assert mixed.capability == 7.5
    assert mixed.note == (
        "the 3 ranks have 2 kinds of GPU (2 × A100, 1 × Tesla T4): each step waits for the slowest, "
        "and the precision is that of Tesla T4 (capability 7.5); fix: CUDA_VISIBLE_DEVICES with "
        "GPUs of one kind"
    )
    assert VisibleGpus.from_json(alike[0].to_json()) == alike[0]


def test_speed_counts_tf32_fp8_and_the_loss_that_is_computed_again() -> None:
    kind = load_catalogue()["p5.48xlarge"]
    config = JOBS["7B on H100"]
    shape = causal_lm_shape(config.model)

    def step(**changes: Mapping[str, object]) -> float:
        changed = config.changed("training", gradient_accumulation_steps=1)
        for section, values in changes.items():
            changed = changed.changed(section, **values)
        speed = estimate_throughput(changed, shape, kind, 1, 8)
        assert speed is not None and speed.bound == "compute"
        return speed.step_seconds

    float32 = {"use_mixed_precision": False}
    flops = shape.flops_per_sample * 64 / (8 * MFU_PRIOR)
    assert step(fsdp=float32) == pytest.approx(flops / 67e12)
    assert step(fsdp=float32, training={"tf32": True}) == pytest.approx(flops / (989.5e12 / 2))
    plain = step(fsdp={"use_mixed_precision": True})
    eager = {"use_mixed_precision": True, "float8": "on"}
    assert step(fsdp=eager) == plain, "scaling takes what the products save"
    assert plain / step(fsdp=eager, parallel={"compile": True}) == pytest.approx(FLOAT8_SPEEDUP)
    chunked = step(fsdp={"use_mixed_precision": True}, training={"loss_chunk_tokens": 1024})
    head = 2.0 * 50368 * 4096 * 2048 / shape.flops_per_sample
    # Of the matrix products, which take most of a step
    assert chunked / plain == pytest.approx(1 + head, abs=0.1 * head) and 0.005 < head < 0.02


def test_efa_counts_as_far_as_the_job_requests_it_and_is_proposed_where_it_pays() -> None:
    kind = load_catalogue()["p5.48xlarge"]
    config = JOBS["70B on H200"].changed("cluster", instance_types=["p5.48xlarge"])

    def tokens(interfaces: int, plan_for: str = "batch") -> float:
        asked = settle_for_device(config, 9.0).changed("batch", efa_interfaces=interfaces)
        asked = asked.changed("cluster", plan_for=plan_for)
        speed = estimate_throughput(asked, causal_lm_shape(config.model), kind, 8, 8)
        assert speed is not None
        return speed.tokens_per_second

    assert tokens(32) == tokens(64) == tokens(0, "slurm"), "no type has more than 32"
    assert tokens(0) <= tokens(1) < tokens(32) and tokens(32) / tokens(0) > 1.5
    two = JOBS["13B on H100"].changed("cluster", nodes=2)
    savings = {
        saving.key: saving for saving in make_plan(two, now_utc=NOW, compare_keys=True).key_savings
    }
    assert savings["batch.efa_interfaces"].value == "32"
    assert savings["batch.efa_interfaces"].usd == pytest.approx(
        planned_usd(two.changed("batch", efa_interfaces=32))
    )


def test_logits_that_are_freed_leave_a_block_that_no_float32_tensor_fits() -> None:
    config = settle_for_device(JOBS["7B on H100"], 9.0)
    shape = causal_lm_shape(config.model)

    def allowance(**training: object) -> tuple[int, int]:
        fit = memory_fit(config.changed("training", **training), 8, shape)
        return fit.allowance - CONTEXT_BYTES - (fit.total - fit.allowance) // 10, fit.logits

    freed, logits = allowance(loss_chunk_tokens=None)
    assert freed == pytest.approx(logits / 6, abs=2) and logits == 4 * 12 * 2048 * 50368
    assert allowance(loss_chunk_tokens=1024)[0] == pytest.approx(0, abs=2)


@pytest.mark.slow
def test_the_plan_refuses_hardly_any_run_that_was_published() -> None:
    judged = [judge_foundry_run(run) for run in read_foundry_runs()]
    found = summarise_foundry(judged)
    assert found["runs"] == 209 and len(found["refused"]) <= 5
    assert found["fitted"]["runs"] + found["held_out"]["runs"] == 209
    assert abs(found["held_out"]["bias"]) < 0.15 and found["held_out"]["spread"] < 0.2
    whole_logits = [
        entry
        for entry in judged
        if entry.has_bytes - entry.needed_bytes < 12 * 50368 * entry.run.length * entry.run.samples
    ]
    assert len(whole_logits) > 50, "without chunks, many did not fit"


def test_a_plan_prints_each_key_that_would_save_more_than_a_twentieth_with_its_dollars() -> None:
    slow = JOBS["1.3B on A100"].changed("fsdp", use_mixed_precision=False)
    slow = slow.changed("training", gradient_accumulation_steps=4)
    made = make_plan(slow, now_utc=NOW, compare_keys=True)
    by_key = {saving.key: saving for saving in made.key_savings}
    assert {"fsdp.use_mixed_precision", "training.tf32"} <= set(by_key)
    now = made.ranked[0].expected_usd
    for saving in made.key_savings:
        section, _, name = saving.key.partition(".")
        value = {"true": True, "false": False, "null": None}.get(saving.value, saving.value)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        with_it = planned_usd(slow.changed(section, **{name: value}))
        assert saving.usd == pytest.approx(with_it) and with_it < 0.95 * now
        assert saving.saved_usd == pytest.approx(now - with_it), "beside the plan's own dollars"
        assert f"cheaper with {saving.key}: {saving.value} → ${saving.usd:.2f}" in render_plan(made)
    at_defaults = make_plan(JOBS["1.3B on A100"], now_utc=NOW, compare_keys=True)
    assert not {"fsdp.use_mixed_precision", "training.tf32"} & {
        saving.key for saving in at_defaults.key_savings
    }
    assert type(made).from_json(made.to_json()) == made
    assert make_plan(slow, now_utc=NOW) == replace(made, key_savings=()), (
        "the slow search, if wanted"
    )
    strict = make_plan(slow.changed("training", deterministic="strict"), now_utc=NOW)
    assert set(strict.notes) - set(made.notes) == {
        "speed: as with training.deterministic auto, but strict slows down attention's backward "
        "pass on GPUs, by how much was not measured"
    }


def test_a_refusal_for_memory_names_keys_with_values_that_suffice() -> None:
    large = job(model(8192, 80, 64), "p5.48xlarge", nodes=4, batch=256)
    for config in (
        JOBS["1.3B on A100"].changed("training", loss_chunk_tokens=None, batch_size=136),
        large.changed("training", loss_chunk_tokens=None),
        large.changed("fsdp", use_mixed_precision=False),
    ):
        refused = make_plan(config, now_utc=NOW)
        assert refused.refusal is not None and "needs" in refused.refusal.message
        changed = config
        for change in refused.refusal.hint.removeprefix("set ").split(", "):
            key, _, value = change.partition(" to ")
            section, _, name = key.partition(".")
            number = int(value) if value.isdigit() else {"true": True}.get(value, value)
            changed = changed.changed(section, **{name: number})
        assert make_plan(changed, now_utc=NOW).chosen is not None, refused.refusal.hint
        if config.training.loss_chunk_tokens is None:
            assert "training.loss_chunk_tokens to 1024" in refused.refusal.hint


def test_a_card_without_bfloat16_is_refused_if_bfloat16_was_asked_for() -> None:
    config = JOBS["124M on T4"].changed("fsdp", use_mixed_precision=True, param_dtype="bfloat16")
    refused = make_plan(config, now_utc=NOW)
    assert refused.refusal is not None
    assert "T4 has capability 7.5; bfloat16 needs 8.0; set fsdp.param_dtype to auto or float16" in (
        refused.refusal.message
    )


def test_a_job_that_an_earlier_version_stored_has_the_settings_of_the_same_command_today() -> None:
    today = RunConfig()
    stored = today.model_dump(mode="json")
    stored["fsdp"] |= {"use_mixed_precision": False, "param_dtype": "bfloat16"}
    stored["training"] |= {"loss_chunk_tokens": None}
    keys = ("fsdp.use_mixed_precision", "fsdp.param_dtype", "training.loss_chunk_tokens")
    document = {"config": stored, "sources": dict.fromkeys(keys, "default")}
    assert RunConfig.model_validate(renew_defaults(document)) == today
    assert stored["fsdp"]["param_dtype"] == "bfloat16", "the document is left as it is"

    document["sources"]["fsdp.use_mixed_precision"] = "job.yaml:3"
    renewed = RunConfig.model_validate(renew_defaults(document))
    assert renewed.fsdp.use_mixed_precision is False, "the user wrote it"


def test_a_step_is_repeated_at_default_precision_and_not_in_float16() -> None:
    words = ["guards.repeat_interval_steps=5", "training.deterministic=strict"]
    config = load_config(None, words, project_root=ROOT, cwd=ROOT).config
    for capability, refused in ((None, 0), (8.0, 0), (7.5, 1)):
        settled = settle_for_device(config, capability)
        place = RankLayout(ranks=2, ranks_per_node=2, gpu=capability is not None)
        found = [str(option) for option in find_unsupported_options(settled, place)]
        assert len([text for text in found if "repeat_interval_steps" in text]) == refused


def test_a_speed_measured_under_the_former_name_of_the_default_dtype_is_known() -> None:
    mixed = RunConfig().changed("fsdp", use_mixed_precision=True)
    former = mixed.changed("fsdp", param_dtype="bfloat16")
    assert speed_fingerprint(mixed) == speed_fingerprint(former)
    assert speed_fingerprint(mixed) != speed_fingerprint(RunConfig())
