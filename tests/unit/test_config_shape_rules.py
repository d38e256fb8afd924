"""Rules about sizes: each breaks at its edge, in the words and with the arithmetic that the user
sees.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.core.config import RunConfig, violations
from ebbflow.core.config.rule_base import (
    Violation,
    count_ranks,
    division,
    nearest_divisors,
    nearest_multiples,
    product,
    suggest_values,
    value_of,
)
from ebbflow.core.config.schema import DdpConfig, ModelConfig
from ebbflow.core.config.shape_rules import Derived

BATCH_KEYS = (
    "training.batch_size training.gradient_accumulation_steps cluster.nodes "
    "cluster.processes_per_node parallel.tensor_size"
)
SAMPLE_KEYS = (
    "training.batch_size parallel.tensor_size training.gradient_accumulation_steps cluster.nodes "
    "cluster.processes_per_node"
)
NO_SAMPLES = "samples per micro-batch must be at least 1, or ranks have nothing to compute: "
NO_COMMITS = "commits of the job must be at least 1, or an interruption loses everything: "
BATCH_MULTIPLE = (
    "training.batch_size must be a multiple of cluster.nodes × cluster.processes_per_node × "
    "training.gradient_accumulation_steps"
)

# A configuration, the keys of the one rule that it breaks, the rule's message, and its hint.
BREACHES = {
    "width that heads do not divide": (
        "model: {hidden_size: 770, num_heads: 12}",
        "model.hidden_size model.num_heads model.head_size",
        "model.hidden_size must be divisible by model.num_heads: 770 = 12 × 64 + 2",
        "set model.num_heads to 10 or 11, or model.hidden_size to 768 or 780",
    ),
    "more heads than width": (
        "model: {hidden_size: 4, num_heads: 12}",
        "model.hidden_size model.num_heads",
        "width of an attention head must be at least 1, or a head sees nothing: "
        "model.hidden_size / model.num_heads = 4 / 12 = 0.3333",
        "set model.hidden_size to 12, or model.num_heads to 4",
    ),
    "heads of keys that do not divide heads": (
        "model: {architecture: llama, num_heads: 12, hidden_size: 96, num_kv_heads: 5}",
        "model.num_kv_heads model.num_heads",
        "model.num_heads must be a multiple of model.num_kv_heads: 12 = 5 × 2 + 2",
        "set model.num_kv_heads to 4 or 6",
    ),
    "an odd width of a head, computed": (
        "model: {architecture: llama, hidden_size: 20, num_heads: 4}",
        "model.head_size model.hidden_size model.num_heads model.architecture",
        "the width of an attention head must be even for rotary positions: "
        "5 = model.hidden_size / model.num_heads = 20 / 4",
        "set model.head_size to 6",
    ),
    "an odd width of a head, given": (
        "model: {architecture: llama, head_size: 7}",
        "model.head_size model.hidden_size model.num_heads model.architecture",
        "the width of an attention head must be even for rotary positions: 7",
        "set model.head_size to 8",
    ),
    "a batch of tensor parallel ranks": (
        "{cluster: {nodes: 2, processes_per_node: 4}, parallel: {tensor_size: 2}, "
        "training: {gradient_accumulation_steps: 3}}",
        BATCH_KEYS,
        f"{BATCH_MULTIPLE} / parallel.tensor_size = 2 × 4 × 3 / 2 = 12: 32 = 12 × 2 + 8",
        "set training.batch_size to 24 or 36, or training.gradient_accumulation_steps to 2 or 4",
    ),
    "a batch of fewer ranks than a tensor parallel group": (
        "{parallel: {tensor_size: 4}, training: {gradient_accumulation_steps: 5}}",
        BATCH_KEYS,
        f"{BATCH_MULTIPLE} / parallel.tensor_size = 2 × 1 × 5 / 4 = 5: 32 = 5 × 6 + 2",
        "set training.batch_size to 30 or 35, or training.gradient_accumulation_steps to 2 or 4",
    ),
    "a batch that the ranks do not divide": (
        "{cluster: {nodes: 3, processes_per_node: 2}, training: {gradient_accumulation_steps: 2}}",
        BATCH_KEYS,
        f"{BATCH_MULTIPLE} = 3 × 2 × 2 = 12: 32 = 12 × 2 + 8",
        "set training.batch_size to 24 or 36",
    ),
    "a batch that ranks divide and micro-batches do not": (
        "{cluster: {nodes: 3}, training: {batch_size: 30, gradient_accumulation_steps: 4}}",
        BATCH_KEYS,
        f"{BATCH_MULTIPLE} = 3 × 1 × 4 = 12: 30 = 12 × 2 + 6",
        "set training.batch_size to 24 or 36, or training.gradient_accumulation_steps to 2 or 5",
    ),
    "a warm-up one step longer than the job": (
        "{training: {max_steps: 95, scheduler: {warmup_steps: 96}}}",
        "training.scheduler.warmup_steps training.max_steps",
        "training.scheduler.warmup_steps must not exceed training.max_steps: 96 > 95",
        "set training.scheduler.warmup_steps to 9, or training.max_steps to 960",
    ),
    "a warm-up longer than a job of few steps": (
        "{training: {max_steps: 5, scheduler: {warmup_steps: 6}}, checkpoint: {interval_steps: 1}}",
        "training.scheduler.warmup_steps training.max_steps",
        "training.scheduler.warmup_steps must not exceed training.max_steps: 6 > 5",
        "set training.scheduler.warmup_steps to 1, or training.max_steps to 60",
    ),
    "one token fewer than bytes": (
        "model: {vocab_size: 255}",
        "model.vocab_size data.tokenizer",
        "model.vocab_size must be at least 256, one for each byte of the text: 255 < 256",
        "set model.vocab_size to 256",
    ),
    "a token beyond the vocabulary": (
        "model: {vocab_size: 300, end_of_document: 300}",
        "model.end_of_document model.vocab_size",
        "model.end_of_document 300 is no token: model.vocab_size 300 has tokens 0 to 299",
        "set model.end_of_document to 0 or 299, or model.vocab_size to 301",
    ),
    "no file ending": (
        "data: {suffixes: []}",
        "data.suffixes",
        "data.suffixes must name at least one file ending, or no file is taken",
        "for example [.py, .txt]",
    ),
    "file endings that are none": (
        "data: {suffixes: ['*.py', txt, .md, '.', rst.]}",
        "data.suffixes",
        "data.suffixes must be file endings with their dot, not '*.py', 'txt', '.', 'rst.'",
        "write .py, .txt, ., .rst",
    ),
    "fewer samples than micro-batches": (
        "{training: {batch_size: 4, gradient_accumulation_steps: 2}, cluster: {nodes: 2, "
        "processes_per_node: 4}}",
        SAMPLE_KEYS,
        f"{NO_SAMPLES}training.batch_size / (training.gradient_accumulation_steps × "
        "cluster.nodes × cluster.processes_per_node) = 4 / (2 × 2 × 4) = 0.25",
        "set training.batch_size to 16, or cluster.processes_per_node to 1",
    ),
    "fewer samples than tensor parallel groups": (
        "{training: {batch_size: 2}, parallel: {tensor_size: 2}, cluster: {nodes: 2, "
        "processes_per_node: 4}}",
        SAMPLE_KEYS,
        f"{NO_SAMPLES}(training.batch_size × parallel.tensor_size) / "
        "(training.gradient_accumulation_steps × cluster.nodes × cluster.processes_per_node) = "
        "(2 × 2) / (1 × 2 × 4) = 0.5",
        "set cluster.nodes to 1, or cluster.processes_per_node to 2",
    ),
    "fewer samples than ranks of one node, on any number of nodes": (
        "{training: {batch_size: 4}, cluster: {nodes: auto, processes_per_node: 8}}",
        SAMPLE_KEYS,
        f"{NO_SAMPLES}training.batch_size / (training.gradient_accumulation_steps × "
        "cluster.processes_per_node) = 4 / (1 × 8) = 0.5",
        "set training.batch_size to 8, or cluster.processes_per_node to 4",
    ),
    "a number of samples that no smaller gang divides": (
        "{training: {batch_size: 5}, cluster: {nodes: 2, processes_per_node: 4}}",
        SAMPLE_KEYS,
        f"{NO_SAMPLES}training.batch_size / (training.gradient_accumulation_steps × "
        "cluster.nodes × cluster.processes_per_node) = 5 / (1 × 2 × 4) = 0.625",
        "set training.batch_size to 8",
    ),
    "a job one step shorter than the interval": (
        "{training: {max_steps: 49}}",
        "training.max_steps checkpoint.interval_steps",
        f"{NO_COMMITS}training.max_steps / checkpoint.interval_steps = 49 / 50 = 0.98",
        "set training.max_steps to 200, or checkpoint.interval_steps to 12",
    ),
    "a job too short for four commits": (
        "{training: {max_steps: 3, scheduler: {warmup_steps: 0}}, checkpoint: {interval_steps: 5}}",
        "training.max_steps checkpoint.interval_steps",
        f"{NO_COMMITS}training.max_steps / checkpoint.interval_steps = 3 / 5 = 0.6",
        "set training.max_steps to 20, or checkpoint.interval_steps to 1",
    ),
    "fewer ranks than a shard group": (
        "parallel: {mode: hsdp, shard_size: 4}",
        "cluster.nodes cluster.processes_per_node parallel.shard_size",
        "copies of the model must be at least 1, or no group of ranks holds the whole of it: "
        "(cluster.nodes × cluster.processes_per_node) / parallel.shard_size = (2 × 1) / 4 = 0.5",
        "set parallel.shard_size to 2",
    ),
    "ranks that are no multiple of a shard group": (
        "{parallel: {mode: hsdp, shard_size: 4}, cluster: {nodes: 3, processes_per_node: 2}, "
        "training: {batch_size: 36}}",
        "parallel.shard_size parallel.mode cluster.nodes cluster.processes_per_node",
        "parallel.shard_size must divide the ranks, cluster.nodes × cluster.processes_per_node = "
        "3 × 2 = 6: 6 = 4 × 1 + 2",
        "set parallel.shard_size to 2 or 3",
    ),
    "shard groups across nodes that may be lost": (
        "{cluster: {min_nodes: 1, nodes: 2, processes_per_node: 2}, parallel: {mode: hsdp, "
        "shard_size: 4}}",
        "parallel.shard_size parallel.mode cluster.processes_per_node cluster.min_nodes "
        "cluster.nodes",
        "parallel.shard_size must divide cluster.processes_per_node where cluster.min_nodes lets "
        "nodes be lost: 2 = 4 × 0 + 2",
        "set parallel.shard_size to 1 or 2, or cluster.min_nodes to null",
    ),
    "gradients compressed in each micro-batch": (
        "{parallel: {mode: ddp}, ddp: {static_graph: true, gradient_compression: powersgd}, "
        "training: {gradient_accumulation_steps: 2}}",
        "ddp.static_graph ddp.gradient_compression training.gradient_accumulation_steps "
        "parallel.mode",
        "ddp.static_graph with training.gradient_accumulation_steps 2 reduces gradients 2 times "
        "per step, and ddp.gradient_compression powersgd would compress what was compressed "
        "before",
        "set ddp.static_graph to false, or training.gradient_accumulation_steps to 1",
    ),
    "unused parameters of a static graph": (
        "{parallel: {mode: ddp}, ddp: {static_graph: true, find_unused_parameters: true}}",
        "ddp.find_unused_parameters ddp.static_graph",
        "ddp.find_unused_parameters has no effect with ddp.static_graph true: torch finds them "
        "once, in the first step, and takes them to be the same in every step",
        "set ddp.static_graph to false, or ddp.find_unused_parameters to false, the default",
    ),
    "a dtype of the reduction without mixed precision": (
        "fsdp: {reduce_dtype: bfloat16, use_mixed_precision: false}",
        "fsdp.reduce_dtype fsdp.use_mixed_precision",
        "fsdp.reduce_dtype has no effect with fsdp.use_mixed_precision false: gradients of float32 "
        "parameters are added up in float32",
        "set fsdp.use_mixed_precision to auto or true, or fsdp.reduce_dtype to float32, the default",
    ),
    "a dtype of the sharded reduction": (
        "{parallel: {mode: ddp}, fsdp: {reduce_dtype: bfloat16, use_mixed_precision: true}}",
        "fsdp.reduce_dtype parallel.mode",
        "fsdp.reduce_dtype has no effect with parallel.mode ddp: it is an option of fsdp2 and hsdp",
        "set parallel.mode to fsdp2 or hsdp, or fsdp.reduce_dtype to float32, the default",
    ),
    "shards on the CPU in ddp": (
        "{parallel: {mode: ddp}, fsdp: {cpu_offload: true}}",
        "fsdp.cpu_offload parallel.mode",
        "fsdp.cpu_offload has no effect with parallel.mode ddp: it is an option of fsdp2 and hsdp",
        "set parallel.mode to fsdp2 or hsdp, or fsdp.cpu_offload to false, the default",
    ),
    "a shard group without groups, of more ranks than there are": (
        "parallel: {shard_size: 3}",
        "parallel.shard_size parallel.mode",
        "parallel.shard_size has no effect with parallel.mode fsdp2: it is an option of hsdp",
        "set parallel.mode to hsdp, or parallel.shard_size to null, the default",
    ),
    "a shard group without groups, that does not divide the ranks": (
        "{parallel: {shard_size: 4}, cluster: {nodes: 3, min_nodes: 1, processes_per_node: 2}, "
        "training: {batch_size: 36}}",
        "parallel.shard_size parallel.mode",
        "parallel.shard_size has no effect with parallel.mode fsdp2: it is an option of hsdp",
        "set parallel.mode to hsdp, or parallel.shard_size to null, the default",
    ),
    "fewer nodes than the least": (
        "cluster: {min_nodes: 3}",
        "cluster.min_nodes cluster.nodes",
        "cluster.min_nodes 3 is more than cluster.nodes 2",
        "set cluster.min_nodes to 2, or cluster.nodes to 3",
    ),
    "more nodes than the most": (
        "{cluster: {nodes: 5, max_nodes: 4}, training: {batch_size: 5}}",
        "cluster.nodes cluster.max_nodes",
        "cluster.nodes 5 is more than cluster.max_nodes 4",
        "set cluster.nodes to 4 or auto, or cluster.max_nodes to 5",
    ),
    "a least number of nodes above the most": (
        "cluster: {nodes: auto, max_nodes: 4, min_nodes: 5}",
        "cluster.min_nodes cluster.max_nodes",
        "cluster.min_nodes 5 is more than cluster.max_nodes 4",
        "set cluster.min_nodes to 4, or cluster.max_nodes to 5",
    ),
}


def broken(text: str) -> list[Violation]:
    """The rules that a configuration written in YAML breaks."""
    return violations(RunConfig.model_validate(yaml.safe_load(text) or {}))


@pytest.mark.parametrize("name", BREACHES)
def test_a_rule_about_sizes_shows_its_keys_arithmetic_and_hint(name: str) -> None:
    text, keys, message, hint = BREACHES[name]
    assert broken(text) == [Violation(keys=tuple(keys.split()), message=message, hint=hint)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "model: {hidden_size: 12, num_heads: 12}",
        "model: {architecture: llama, hidden_size: 770, num_heads: 12, head_size: 64}",
        "model: {architecture: llama, hidden_size: 4, num_heads: 12, head_size: 64}",
        "{workload: 'mine:Own', model: {hidden_size: 4, num_heads: 12}}",
        "model: {architecture: llama, num_kv_heads: 2}",
        "model: {hidden_size: 20, num_heads: 4}",
        "{cluster: {nodes: auto}, training: {gradient_accumulation_steps: 5}}",
        "{cluster: {processes_per_node: auto}, training: {gradient_accumulation_steps: 5}}",
        "{script: train.py, training: {gradient_accumulation_steps: 5}}",
        "{script: train.py, training: {batch_size: 5}, cluster: {nodes: 2, processes_per_node: 4}}",
        "{training: {batch_size: 6, gradient_accumulation_steps: 3}}",
        "{training: {max_steps: 60, scheduler: {warmup_steps: 60}}}",
        "{data: {tokenizer: t.json}, model: {vocab_size: 255}}",
        "model: {end_of_document: 255}",
        "model: {end_of_document: 0}",
        "training: {max_steps: 50}",
        "{training: {max_steps: 49}, checkpoint: {interval: seconds}}",
        "{training: {max_steps: 49}, checkpoint: {interval: auto}}",
        "{script: train.py, training: {max_steps: 49}}",
        "parallel: {mode: hsdp}",
        "parallel: {mode: hsdp, shard_size: 2}",
        "{parallel: {mode: hsdp, shard_size: 4}, cluster: {nodes: auto}}",
        "{parallel: {mode: hsdp, shard_size: 3}, cluster: {nodes: 4, processes_per_node: auto}}",
        "{parallel: {mode: hsdp, shard_size: 3}, cluster: {nodes: 4, min_nodes: 2, "
        "processes_per_node: auto}}",
        "{parallel: {mode: hsdp, shard_size: 4}, cluster: {nodes: 2, min_nodes: 2, "
        "processes_per_node: 2}}",
        "{parallel: {mode: hsdp, shard_size: 2}, cluster: {nodes: 2, min_nodes: 1, "
        "processes_per_node: 4}}",
        "{parallel: {mode: hsdp, shard_size: 4}, cluster: {nodes: 2, processes_per_node: 2}}",
        "{parallel: {mode: hsdp}, cluster: {nodes: 2, min_nodes: 1, processes_per_node: 2}}",
        "{parallel: {mode: fsdp2}, cluster: {nodes: 2, min_nodes: 1, processes_per_node: 2}}",
        "{parallel: {mode: ddp}, ddp: {static_graph: true, gradient_compression: powersgd}}",
        "{parallel: {mode: ddp}, ddp: {static_graph: true}, training: "
        "{gradient_accumulation_steps: 2}}",
        "{parallel: {mode: ddp}, ddp: {gradient_compression: powersgd}, training: "
        "{gradient_accumulation_steps: 2}}",
        "{parallel: {mode: ddp}, ddp: {find_unused_parameters: true}}",
        "{fsdp: {reduce_dtype: bfloat16, use_mixed_precision: true, cpu_offload: true}}",
        "{parallel: {mode: hsdp}, fsdp: {reduce_dtype: bfloat16, use_mixed_precision: true, "
        "cpu_offload: true}}",
        "cluster: {min_nodes: 2, nodes: 2, max_nodes: 2}",
        "cluster: {min_nodes: 2, nodes: auto, max_nodes: 2}",
    ],
)
def test_rules_about_sizes_accept_values_at_their_edges(text: str) -> None:
    assert broken(text) == []


@pytest.mark.parametrize(
    ("changed", "lets_through"),
    [
        ({}, False),
        ({"ddp": {"static_graph": False}}, True),
        ({"ddp": {"gradient_compression": "none"}}, True),
        ({"training": {"gradient_accumulation_steps": 1}}, True),
        ({"parallel": {"mode": "fsdp2"}}, True),
    ],
)
def test_the_rule_against_compressing_twice_needs_each_of_its_conditions(
    changed: dict[str, dict[str, Any]], lets_through: bool
) -> None:
    values: dict[str, dict[str, Any]] = {
        "parallel": {"mode": "ddp"},
        "ddp": {"static_graph": True, "gradient_compression": "bfloat16"},
        "training": {"gradient_accumulation_steps": 2},
    }
    for section, names in changed.items():
        values[section] = {**values[section], **names}
    messages = [violation.message for violation in violations(RunConfig.model_validate(values))]
    assert any("would compress" in message for message in messages) is not lets_through


def test_each_option_of_ddp_and_of_llama_has_no_effect_without_it() -> None:
    others = {
        "ddp": {
            "find_unused_parameters": True,
            "static_graph": True,
            "gradient_as_bucket_view": False,
            "bucket_cap_mb": 5.0,
            "gradient_compression": "bfloat16",
        },
        "model": {
            "num_kv_heads": 2,
            "head_size": 64,
            "intermediate_size": 64,
            "qkv_bias": True,
            "qk_norm": True,
            "rope_theta": 2.0,
            "rope_factor": 2.0,
            "rope_original_length": 10,
        },
    }
    assert set(others["ddp"]) == set(DdpConfig.model_fields)
    assert set(others["model"]) == {
        name
        for name, field in ModelConfig.model_fields.items()
        if (field.description or "").startswith("llama: ")
    }
    for section, selector in (("ddp", "parallel.mode"), ("model", "model.architecture")):
        for name, value in others[section].items():
            found = [
                violation.keys[0]
                for violation in violations(RunConfig.model_validate({section: {name: value}}))
                if violation.keys[1:] == (selector,)
            ]
            assert found == [f"{section}.{name}"]


def test_violations_omit_rules_about_a_key_of_unknown_value() -> None:
    config = RunConfig.model_validate(
        {"model": {"hidden_size": 770, "num_heads": 12, "vocab_size": 255}}
    )
    both = violations(config)
    assert [violation.keys[0] for violation in both] == ["model.hidden_size", "model.vocab_size"]
    assert violations(config, without=["model.head_size"]) == both[1:]
    assert violations(config, without={"data.tokenizer"}) == both[:1]
    assert violations(config, without=("data.tokenizer", "model.hidden_size")) == []


@pytest.mark.parametrize(
    ("nodes", "processes", "ranks"),
    [(3, 2, 6), (1, 1, 1), ("auto", 2, None), (3, "auto", None), ("auto", "auto", None)],
)
def test_ranks_are_counted_unless_a_number_is_automatic(
    nodes: int | str, processes: int | str, ranks: int | None
) -> None:
    config = RunConfig.model_validate(
        {"cluster": {"nodes": nodes, "processes_per_node": processes}}
    )
    assert count_ranks(config) == ranks
    assert value_of(config, "cluster.nodes") == nodes


@pytest.mark.parametrize(
    ("number", "near", "divisors"),
    [
        (12, 5, [4, 6]),
        (12, 12, [6, 12]),
        (12, 1, [1, 2]),
        (16, 16, [8, 16]),
        (9, 6, [3, 9]),  # both are 3 away
        (6, 4, [2, 3]),  # 2 and 6 are 2 away: the lower one
        (32640, 128, [120, 128]),  # 120 and 136 are 8 away, in any order of a set
        (7, 4, [1, 7]),
        (1, 3, [1]),
        (0, 3, []),
        (-4, 2, []),
        (10**12, 10**12, [5 * 10**11, 10**12]),
        (10**12 + 1, 1, []),
    ],
)
def test_the_nearest_divisors_are_two_and_the_lower_one_wins_a_tie(
    number: int, near: int, divisors: list[int]
) -> None:
    assert nearest_divisors(number, near) == divisors


@given(number=st.integers(1, 400), near=st.integers(1, 500))
def test_no_other_divisor_is_nearer_than_the_nearest_divisors(number: int, near: int) -> None:
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    nearest = sorted(divisors, key=lambda divisor: (abs(divisor - near), divisor))[:2]
    assert nearest_divisors(number, near) == sorted(nearest)


@pytest.mark.parametrize(
    ("unit", "near", "multiples"), [(6, 32, [30, 36]), (6, 5, [6]), (1, 1, [1, 2]), (7, 8, [7, 14])]
)
def test_the_nearest_multiples_are_positive(unit: int, near: int, multiples: list[int]) -> None:
    assert nearest_multiples(unit, near) == multiples


def test_arithmetic_is_rendered_as_a_user_would_write_it() -> None:
    assert division(770, 12) == "770 = 12 × 64 + 2"
    assert product([2, 4, 1]) == "(2 × 4 × 1)"
    assert product([2, 4]) == "(2 × 4)"
    assert product(["model.hidden_size"]) == "model.hidden_size"
    assert suggest_values(("a", [1, 2]), ("b", []), ("c", [3])) == "set a to 1 or 2, or c to 3"


def test_a_derived_quantity_is_a_quotient_of_products_and_hints_at_what_is_left_over() -> None:
    rounds = Derived(
        name="rounds",
        top=("training.max_steps",),
        bottom=("training.batch_size",),
        why="nothing is trained",
        spare=2,
    )
    assert rounds.value(RunConfig()) == 300 // 32
    assert rounds.check(RunConfig()) is None
    config = RunConfig.model_validate({"training": {"max_steps": 3, "batch_size": 4}})
    assert rounds.check(config) == (
        "rounds must be at least 1, or nothing is trained: training.max_steps / "
        "training.batch_size = 3 / 4 = 0.75",
        "set training.max_steps to 8, or training.batch_size to 1",
    )
    with pytest.raises(TypeError):
        Derived("rounds", (), (), "nothing is trained")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        rounds.spare = 1  # type: ignore[misc]
