"""Every option of spreading a model, on real gangs: each trains as one process does, or is refused
with its reason.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from ebbflow.core.config.schema import (
    DataConfig,
    DdpConfig,
    FsdpConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
)
from ebbflow.core.config.schema import TrainingConfig as Training
from ebbflow.core.errors import Outcome
from ebbflow.core.store import Store
from ebbflow.training.data import prepare_tokens
from ebbflow.training.engine.parallel import spread_model
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.training.errors import ParallelError
from ebbflow.training.gang import Gang
from tests.support.checks import failed, passed
from tests.support.curves import TEXT
from tests.support.gangs import run_ranks, train_gang
from tests.support.spread_rank import ModelOnly
from tests.support.warm import start_warm

MODEL = ModelConfig(hidden_size=32, num_layers=2, num_heads=2, sequence_length=32)
LLAMA = ModelConfig(
    architecture="llama",
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    sequence_length=32,
    qkv_bias=True,
    qk_norm=True,
    tied_embeddings=True,
    end_of_document=10,
)
STEPS = 12

# What is exact, by name: sections of the configuration, accumulation, and whether the model counts
# as a large one, whose parameters are gathered anew for each pass.
EXACT: dict[str, dict[str, Any]] = {
    "ddp, static graph, 2 micro-batches": {"ddp": {"static_graph": True}, "accumulation": 2},
    "ddp, unused parameters sought, small buckets": {
        "ddp": {
            "find_unused_parameters": True,
            "bucket_cap_mb": 0.02,
            "gradient_as_bucket_view": False,
        },
        "accumulation": 2,
    },
    "fsdp2, large, 2 micro-batches": {
        "parallel": {"mode": "fsdp2"},
        "accumulation": 2,
        "large": True,
    },
    "fsdp2, offloaded": {"parallel": {"mode": "fsdp2"}, "fsdp": {"cpu_offload": True}},
    "fsdp2, recompute selective": {"parallel": {"mode": "fsdp2", "recompute": "selective"}},
    "fsdp2, recompute full, compiled": {
        "parallel": {"mode": "fsdp2", "recompute": "full", "compile": True}
    },
}
EXACT_ON_FOUR: dict[str, dict[str, Any]] = {
    "hsdp 2×2, 2 micro-batches": {"parallel": {"mode": "hsdp", "shard_size": 2}, "accumulation": 2},
    "hsdp 2×2, large, 2 micro-batches": {
        "parallel": {"mode": "hsdp", "shard_size": 2},
        "accumulation": 2,
        "large": True,
    },
    "hsdp over a node": {"parallel": {"mode": "hsdp"}},
    "hsdp, shards of one": {"parallel": {"mode": "hsdp", "shard_size": 1}},
    "tensor 1×2×2, large, 2 micro-batches": {
        "parallel": {"mode": "fsdp2", "tensor_size": 2, "recompute": "full"},
        "accumulation": 2,
        "large": True,
    },
    "tensor 2×1×2": {"parallel": {"mode": "hsdp", "shard_size": 2, "tensor_size": 2}},
}
LLAMA_ON_FOUR: dict[str, dict[str, Any]] = {
    "llama, tensor 1×2×2": {"parallel": {"mode": "fsdp2", "tensor_size": 2}, "model": LLAMA},
    "llama, tensor 2×1×2, offloaded, 2 micro-batches": {
        "parallel": {"mode": "hsdp", "shard_size": 2, "tensor_size": 2},
        "fsdp": {"cpu_offload": True},
        "accumulation": 2,
        "model": LLAMA,
    },
}
HALVES = {"use_mixed_precision": True, "reduce_dtype": "bfloat16"}
MIXED: dict[str, dict[str, Any]] = {
    "ddp, mixed": {"fsdp": {"use_mixed_precision": True}},
    "fsdp2, mixed, reduced in halves": {"parallel": {"mode": "fsdp2"}, "fsdp": HALVES},
    "hsdp, mixed": {
        "parallel": {"mode": "hsdp", "shard_size": 1, "recompute": "full"},
        "fsdp": HALVES,
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modes")


def make_config(
    store: str = "store", *, accumulation: int = 1, large: bool = False, **sections: Any
) -> RunConfig:
    return RunConfig(
        store=store,
        model=sections.get("model", MODEL),
        training=Training(
            batch_size=8,
            max_steps=STEPS,
            gradient_accumulation_steps=accumulation,
            evaluation_interval_steps=5,
        ),
        data=DataConfig(held_out_samples=7),
        parallel=ParallelConfig(**{"mode": "ddp", **sections.get("parallel", {})}),
        ddp=DdpConfig(**sections.get("ddp", {})),
        fsdp=FsdpConfig(**sections.get("fsdp", {})),
    )


def train(
    folder: Path, arrangements: dict[str, dict[str, Any]], world_size: int
) -> dict[str, list[dict]]:
    """Ragged samples, so that a mean of means would show."""
    store = str(folder / "store")
    data = DataConfig(path=str(TEXT), suffixes=[".txt"], held_out_fraction=0.15)
    tokens = prepare_tokens(data, Store.open(store), project_root=folder).fingerprint
    scenarios = {
        name: {"config": make_config(store, **arrangement), "tokens": tokens, "ragged": True}
        | ({"small_model_bytes": 0} if arrangement.get("large") else {})
        for name, arrangement in arrangements.items()
    }
    return train_gang(folder, scenarios, world_size=world_size)


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[dict]]:
    return train(folder, {"gpt": {}, "llama": {"model": LLAMA}}, 1)


@pytest.fixture(scope="module")
def reference(alone: dict[str, list[dict]]) -> dict:
    return alone["gpt"][0]


@pytest.fixture(scope="module")
def on_two(folder: Path) -> dict[str, list[dict]]:
    return train(folder, EXACT | MIXED, 2)


@pytest.fixture(scope="module")
def on_four(folder: Path) -> dict[str, list[dict]]:
    return train(folder, EXACT_ON_FOUR | LLAMA_ON_FOUR, 4)


def assert_trains_alike(results: list[dict], reference: dict, *, tolerance: float) -> None:
    for result in results:
        assert result["outcome"] == Outcome.COMPLETED
        assert result["losses"] == pytest.approx(reference["losses"], rel=tolerance)
        assert result["norms"] == pytest.approx(reference["norms"], rel=10 * tolerance)
        assert result["losses"] == results[0]["losses"]
    assert results[0]["evaluations"] == pytest.approx(reference["evaluations"], rel=tolerance)
    assert len({result["weights_sha256"] for result in results}) == 1


@pytest.mark.parametrize("name", EXACT)
def test_two_ranks_train_as_one_process(
    on_two: dict[str, list[dict]], reference: dict, name: str
) -> None:
    assert reference["losses"][-1] < reference["losses"][0] - 0.1
    assert_trains_alike(on_two[name], reference, tolerance=1e-5)


@pytest.mark.parametrize("name", EXACT_ON_FOUR)
def test_four_ranks_train_as_one_process(
    on_four: dict[str, list[dict]], reference: dict, name: str
) -> None:
    assert_trains_alike(on_four[name], reference, tolerance=1e-5)
    assert [step["tokens"] for step in on_four[name][0]["steps"]] == [
        step["tokens"] for step in reference["steps"]
    ]


@pytest.mark.parametrize("name", LLAMA_ON_FOUR)
def test_tensor_groups_train_a_llama_as_one_process(on_four: dict, alone: dict, name: str) -> None:
    """Heads of keys are shared by two heads of queries; biases, norms of heads, tied embeddings."""
    assert_trains_alike(on_four[name], alone["llama"][0], tolerance=1e-5)


def test_a_tensor_group_has_the_same_samples(on_four: dict[str, list[dict]]) -> None:
    seen = [rank["seen"] for rank in on_four["tensor 2×1×2"]]
    assert seen[0] == seen[1] != seen[2] == seen[3]


@pytest.mark.parametrize("name", MIXED)
def test_mixed_precision_stays_near(
    on_two: dict[str, list[dict]], reference: dict, name: str
) -> None:
    """bfloat16 has eight bits of mantissa: near the curve, and not on it."""
    assert_trains_alike(on_two[name], reference, tolerance=1e-2)
    assert on_two[name][0]["losses"] != pytest.approx(reference["losses"], rel=1e-6)


def test_equal_blocks_are_compiled_once(on_two: dict[str, list[dict]]) -> None:
    """Four units of three kinds, and evaluation compiles nothing."""
    assert [result["compiled_graphs"] for result in on_two["fsdp2, recompute full, compiled"]] == [
        3,
        3,
    ]
    assert on_two["fsdp2, offloaded"][0]["compiled_graphs"] == 0


def test_powersgd_residuals_do_not_outlive_a_commit() -> None:
    config = make_config(ddp={"gradient_compression": "powersgd"})
    outputs = run_ranks(2, ["-m", "tests.support.compression_rank", config.model_dump_json()])
    assert [output.split() for output in outputs] == [["saved", "True", "unsaved", "False"]] * 2


def test_replicas_that_go_on_add_up_in_the_same_order() -> None:
    """Three summands have an order, and where a gradient lies in its bucket decides it; two have
    none that shows.
    """
    outputs = run_ranks(
        3, ["-m", "tests.support.compression_rank", make_config().model_dump_json()]
    )
    assert [output.split() for output in outputs] == [["saved", "True", "unsaved", "True"]] * 3


def test_recomputing_saves_memory_and_changes_no_gradient() -> None:
    """Against what `ebbflow.core.footprint` tells the planner; logits, which are kept in any case,
    apart.
    """
    live = {}
    gradients = {}
    for recompute in ("none", "selective", "full"):
        config = make_config(parallel={"recompute": recompute})
        config = config.model_copy(update={"model": ModelConfig(num_layers=8, num_heads=2)})
        spread = spread_model(ModelOnly(config), config, Gang())
        tokens = torch.arange(8 * 128).view(8, 128) % 256
        with profile(profile_memory=True) as recorded:
            logits = spread.model(tokens)
        live[recompute] = (
            sum(event.self_cpu_memory_usage for event in recorded.events()) - 4 * logits.numel()
        )
        logits.square().sum().backward()
        gradients[recompute] = spread.gradient_tensors()
        del logits
    assert live["selective"] / live["none"] == pytest.approx(11 / 18, abs=0.05)
    assert live["full"] / live["none"] == pytest.approx(1 / 18, abs=0.02)
    for recompute in ("selective", "full"):
        assert all(map(torch.equal, gradients[recompute], gradients["none"]))


@pytest.mark.parametrize(
    ("sections", "place", "said"),
    [
        (
            {"parallel": {"mode": "hsdp", "shard_size": 4}},
            {"ranks": 6},
            r"6 = 4 × 1 \+ 2; fix: .*one of 1, 2, 3, 6",
        ),
        (
            {"parallel": {"mode": "hsdp"}},
            {"ranks": 6, "ranks_per_node": 4},
            r"\(ranks per node\) 4",
        ),
        (
            {"parallel": {"tensor_size": 2}},
            {},
            "tensor_size 2: only .* in mode fsdp2 or hsdp; fix: .* to 1",
        ),
        (
            {"parallel": {"mode": "fsdp2", "tensor_size": 4}, "model": LLAMA},
            {},
            r"tensor_size 4 does not divide model.num_kv_heads 2: 2 = 4 × 0 \+ 2; fix: .* to one "
            r"of 1, 2$",
        ),
        (
            {"parallel": {"mode": "fsdp2", "tensor_size": 2}},
            {"ranks": 6},
            r"model.hidden_size 32, into 6 / 2 = 3 equal shards, which leaves 2; fix: use mode "
            r"hsdp",
        ),
        (
            {"fsdp": {"cpu_offload": True}},
            {},
            "fsdp.cpu_offload: mode ddp has no shards.*fix: set parallel.mode",
        ),
        (
            {"ddp": {"gradient_compression": "bfloat16"}},
            {},
            "bfloat16: torch has it for NCCL.*gloo",
        ),
        (
            {"ddp": {"gradient_compression": "powersgd", "bucket_cap_mb": 1.0}},
            {"parameters": 600_000},
            r"powersgd: hangs on gloo.*2,400,000 bytes .* exceed ddp.bucket_cap_mb 1 = "
            r"1,048,576.*bucket_cap_mb to 3",
        ),
        (
            {"ddp": {"gradient_compression": "powersgd", "static_graph": True}, "accumulation": 2},
            {},
            "static_graph with 2 micro-batches",
        ),
    ],
)
def test_impossible_parallel_modes_are_refused_with_their_arithmetic(
    sections: dict, place: dict, said: str
) -> None:
    here = RankLayout(
        **({"ranks": 4, "ranks_per_node": 2, "gpu": False, "parameters": 1000} | place)
    )
    (refusal,) = find_unsupported_options(make_config(**sections), here)
    assert re.search(said, str(refusal))


def test_nccl_and_gangs_of_one_refuse_less() -> None:
    halves = make_config(ddp={"gradient_compression": "bfloat16"})
    low_rank = make_config(ddp={"gradient_compression": "powersgd", "bucket_cap_mb": 1.0})
    assert not find_unsupported_options(halves, RankLayout(ranks=2, ranks_per_node=2, gpu=True))
    assert not find_unsupported_options(
        low_rank, RankLayout(ranks=2, ranks_per_node=2, gpu=True, parameters=10**9)
    )
    assert not find_unsupported_options(halves, RankLayout(ranks=1, ranks_per_node=1, gpu=False))


def test_ranks_refuse_what_preflight_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CC", "no-such-compiler")
    config = make_config(parallel={"compile": True})
    with pytest.raises(
        ParallelError, match=r"parallel.compile.*CXX=no-such-compiler is not on PATH.*fix:"
    ) as raised:
        spread_model(ModelOnly(config), config, Gang())
    assert (raised.value.outcome, raised.value.curable) == (Outcome.CONFIG, False)
    assert "no-such-compiler" in failed("parallel", parallel={"compile": True}).detail


def test_preflight_shows_the_arrangement_of_ranks() -> None:
    hsdp = {"mode": "hsdp", "shard_size": 2, "recompute": "full"}
    detail = passed("parallel", parallel=hsdp, cluster={"nodes": 2, "processes_per_node": 4}).detail
    assert detail.startswith(
        "hsdp: 8 ranks = 4 copies of the model × 2 ranks that hold one; recompute full; precision auto"
    )
    alone = passed(
        "parallel", parallel={"mode": "fsdp2"}, cluster={"nodes": 1, "processes_per_node": 1}
    ).detail
    assert alone.startswith(
        "fsdp2: 1 rank = 1 copy of the model × 1 rank that holds one; precision"
    )
    uneven = failed("parallel", parallel={"mode": "hsdp", "shard_size": 3})
    assert "2 = 3 × 0 + 2" in uneven.detail and "parallel.shard_size to one of 1, 2" in (
        uneven.fix or ""
    )


def test_one_process_alone_has_what_only_shards_can(tmp_path: Path) -> None:
    """Mixed precision and offloading without a gang to shard over, nor an environment that names
    one.
    """
    values = {
        "store": tmp_path,
        "data.path": TEXT,
        "data.suffixes": "[.txt]",
        "model.hidden_size": 32,
        "model.num_layers": 1,
        "training.max_steps": 4,
        "training.scheduler.warmup_steps": 1,
        "checkpoint.interval_steps": 2,
        "parallel.mode": "hsdp",
        "fsdp.use_mixed_precision": "true",
        "fsdp.cpu_offload": "true",
    }
    settings = []
    for key, value in values.items():
        settings.extend(("--set", f"{key}={value}"))
    words = ["configs/laptop.yaml", "--job", "alone", *settings]
    log = tmp_path / "output.log"
    process = start_warm("ebbflow.training", words, environment=os.environ, output=log)
    assert process.wait(120) == 0 and "step 4/4 · 100%" in log.read_text(), log.read_text()
