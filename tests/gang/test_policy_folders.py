"""Policies and rewards that are models of transformers: generation, LoRA, exact resume, and what
does not fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.store import Store
from ebbflow.training.errors import TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import initialise, materialise
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload, prepare_data, workload_context
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads.policy.policy_folder import without_lora
from ebbflow.workloads.policy.policy_prompts import Prompt
from ebbflow.workloads.policy.policy_rewards import Reward
from ebbflow.workloads.policy.policy_rollouts import TorchEngine, score
from tests.gang.test_hugging_face import GPT2, TIED, random_model
from tests.gang.test_policy_training import numbers_of
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_folder(
    tmp_path: Path, settings: PreTrainedConfig = TIED, name: str = "model", *, chat: bool = False
) -> Path:
    folder = tmp_path / name
    random_model(settings, folder)
    if chat:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
        )
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(folder)
    return folder


def config_of(
    tmp_path: Path, folder: Path, options: dict[str, Any] | None = None, **sections: Any
) -> RunConfig:
    rows = [{"prompt": f"tide {number}", "answer": "in"} for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    own = {
        "model": str(folder),
        "path": str(tmp_path / "rows.jsonl"),
        "held_out_prompts": 4,
        "prompt_max_len": 24,
        "n_samples_per_prompt": 2,
        "init_kl_coef": 0.05,
        "reward": "tests.gang.test_policy_training:small_bytes",
    }
    training = {
        "batch_size": 4,
        "max_steps": 6,
        "evaluation_interval_steps": 3,
        "learning_rate": 1e-2,
    }
    training |= {"scheduler": {"type": "constant", "warmup_steps": 0}}
    return RunConfig.model_validate(
        {
            "store": str(tmp_path / "store"),
            "workload": "ebbflow.workloads:PolicyOptimization",
            "workload_options": own | (options or {}),
            "training": training,
            "checkpoint": {"interval_steps": 3},
            "parallel": {"mode": "ddp"},
            "cluster": {"device": "cpu"},
            **sections,
        }
    )


def prepare(config: RunConfig) -> Any:
    context = workload_context(config, Gang(), store=Store.open(config.store))
    return replace(context, prepared=prepare_data(config, context))


def start(workload: Any) -> Any:
    model = workload.model()
    blank = workload.model()
    materialise(model, "cpu")
    initialise(model, blank, seed=1)
    return model


@pytest.mark.parametrize(
    ("settings", "rank"), [(TIED, 0), (TIED, 4), (GPT2, 0)], ids=["llama", "llama-lora", "gpt2"]
)
def test_a_folder_is_policy_engine_and_reference(
    settings: PreTrainedConfig, rank: int, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path, settings)
    config = config_of(tmp_path, folder, {"lora_rank": rank})
    workload: Any = make_workload(config, prepare(config))
    model = start(workload)
    engine = workload._engine
    assert isinstance(engine, TorchEngine)
    engine.update_weights(model, 0)
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12]]
    draws = torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
    cached = engine.generate(prompts, draws)
    engine.cached = False
    plain = engine.generate(prompts, draws)
    assert torch.equal(cached.tokens, plain.tokens) and torch.allclose(
        cached.log_probs, plain.log_probs, atol=1e-5
    )
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = (
            theirs(cached.tokens[:, :-1])
            .logits.log_softmax(-1)
            .gather(2, cached.tokens[:, 1:, None])[..., 0]
        )
    assert torch.allclose(cached.log_probs, expected * cached.mask, atol=1e-5)
    batch = workload.next_batch(model, Cursor(0, 4))
    assert torch.allclose(batch.reference * batch.mask, batch.old, atol=1e-5), (
        "the policy is its reference"
    )
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained) == bool(rank)
    with torch.no_grad():  # a policy that has moved, and a reference that has not
        model.get_parameter(trained[-1]).add_(0.5)
    engine.update_weights(model, 1)
    with torch.no_grad():
        moved = score(engine.model, cached.tokens, 1.0) * cached.mask
    assert not torch.allclose(moved, cached.log_probs, atol=1e-3)
    again = workload._score_by_reference(model, cached.tokens) * cached.mask
    assert torch.allclose(again, cached.log_probs, atol=1e-5)
    if rank:
        with without_lora(engine.model), torch.no_grad():
            assert torch.allclose(
                score(engine.model, cached.tokens, 1.0) * cached.mask, cached.log_probs, atol=1e-5
            )
    assert workload.other_bytes() == (0 if rank else 4 * workload._models.parameters)
    trial = try_workload(config, prepare(config))
    assert "held_out_reward" in trial.text and not trial.notes


def test_a_job_with_lora_resumes_at_another_world_size(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    config = config_of(tmp_path, folder, {"lora_rank": 4}, parallel={"mode": "fsdp2"})
    path = tmp_path / "job.yaml"
    run_alone(config, "quiet")
    half = config.model_copy(
        update={"training": config.training.model_copy(update={"max_steps": 3})}
    )
    path.write_text(half.model_dump_json())
    run_ranks(2, ["-m", "ebbflow.training", str(path), "--job", "two"])
    run_alone(config, "two")
    assert numbers_of(config, "two") == pytest.approx(
        numbers_of(config, "quiet"), rel=1e-5, abs=1e-5
    )


def test_a_chat_template_wraps_prompts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, chat=True)
    config = config_of(tmp_path, folder, {"chat": True})
    workload: Any = make_workload(config, prepare(config))
    batch = workload.next_batch(start(workload), Cursor(0, 1))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.decode(batch.tokens[0, : int(batch.prompt_lengths[0])]).replace(" ", "")
    assert text.startswith("<user>tide") and text.endswith("<assistant>")
    bare = make_folder(tmp_path / "other")
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(
        TrainingError, match="has no chat template; fix: a model that was tuned to chat"
    ):
        prepare(config_of(tmp_path, bare, {"chat": True}))


def test_a_model_judges_completions(tmp_path: Path) -> None:
    """The reward is the classifier's output for the prompt and the completion as one text."""
    folder = make_folder(tmp_path, chat=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    settings = type(TIED).from_dict({**TIED.to_dict(), "num_labels": 1})
    torch.manual_seed(3)
    judge = AutoModelForSequenceClassification.from_config(settings).eval()
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    reward = Reward("model:judge=2, exact_match=1", seconds=10, memory_mib=64, root=tmp_path)
    found = reward(Prompt("the tide", {"answer": " in"}), " in")
    with torch.no_grad():
        expected = judge(tokenizer("the tide in", return_tensors="pt")["input_ids"]).logits[0, 0]
    assert found == pytest.approx(2 * float(expected) + 1, abs=1e-5)
    assert reward.model_bytes == 4 * sum(parameter.numel() for parameter in judge.parameters())
    prompts = [Prompt("the tide " * (1 + number % 5), {"answer": ""}) for number in range(70)]
    texts = [f" comes in {number}" for number in range(70)]
    alone = [reward(*pair) for pair in zip(prompts, texts, strict=True)]
    for pad, most_passes in ((None, 15), (tokenizer.eos_token_id, 3)):
        model = reward._models["model:judge"]._model
        model.config.pad_token_id = pad
        passes = list[int]()
        hook = model.register_forward_pre_hook(lambda *_, seen=passes: seen.append(1))
        assert reward.judge(prompts, texts) == pytest.approx(alone, abs=1e-5)
        hook.remove()
        assert len(passes) <= most_passes
        assert model.config.pad_token_id == pad
    assert reward.judge([], []) == []
    with pytest.raises(
        TrainingError, match=r"have \d+ tokens, more than its 64 positions; fix: shorter"
    ):
        reward(Prompt("the tide comes in " * 20, {"answer": ""}), "x")
    AutoModelForSequenceClassification.from_config(TIED).save_pretrained(tmp_path / "two")
    with pytest.raises(TrainingError, match="has 2 outputs; fix: a classifier with one"):
        Reward("model:two", seconds=10, memory_mib=64, root=tmp_path)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    other = make_folder(
        tmp_path, type(TIED).from_dict({**TIED.to_dict(), "vocab_size": 320}), "other"
    )
    for options, problem in (
        (
            {"reference": str(other)},
            "a vocabulary of 320 tokens, the policy has 300; fix: a model of the same",
        ),
        ({"prompt_max_len": 61}, "model.sequence_length is 65, and .* has positions for 64"),
        (
            {"prompt_max_len": 2},
            "12 of 12 train prompts have more than workload_options.prompt_max_len 2 tokens",
        ),
        (
            {"supervised_start": 0.5},
            "it has first weights of its own; fix: leave out weights and supervised_start",
        ),
        ({"model": str(tmp_path / "absent")}, "absent: there is no config.json; fix: hf download"),
        ({"model": "", "lora_rank": 2}, "lora_rank and chat are for a model of transformers"),
        (
            {"lora_targets": "absent", "lora_rank": 2},
            "workload_options.lora_targets: Target modules",
        ),
    ):
        with pytest.raises(TrainingError, match=problem):
            prepare(config_of(tmp_path, folder, options))
    (folder / "model.safetensors").unlink()
    with pytest.raises(TrainingError, match="has no weights to adapt"):
        prepare(config_of(tmp_path, folder, {"lora_rank": 2}))
