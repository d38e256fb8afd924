"""Models of transformers, trained by its own code (examples/hugging_face.py) or as the built-in model, and returned."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen3Config

from ebbflow.infra.config.load import load_config
from ebbflow.infra.config.schema import ModelConfig, RunConfig
from ebbflow.infra.preflight import PreflightContext
from ebbflow.infra.program import PROJECT_ROOT
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.file_formats import write_file
from ebbflow.training.checkpoint.hugging_face import our_name, read_settings
from ebbflow.training.checkpoint.portable_state import PortableState, unwrap_weights
from ebbflow.training.checks import check_initial_weights
from ebbflow.training.errors import WorkloadError
from ebbflow.training.weights.load import load_weights
from ebbflow.training.workloads.language_model import CausalLM, generate
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks

SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_a_model_of_transformers_trains_from_its_files_and_returns_to_them(tmp_path: Path) -> None:
    folder, texts, exported = tmp_path / "model", tmp_path / "texts", tmp_path / "exported"
    texts.mkdir()
    exported.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("the tide comes in and the tide goes out again\n" * 60)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    tokenizer.train([str(path) for path in sorted(texts.iterdir())], trainer)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=300, max_position_embeddings=64, tie_word_embeddings=True, **SIZE)
    start = LlamaForCausalLM(config)
    start.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))

    settings = {
        "store": tmp_path / "store",
        "workload_options.folder": folder,
        "training.initial_weights": folder,
        "data.tokenizer": folder,
        "data.path": texts,
        "model.vocab_size": 300,
        "model.sequence_length": 16,
        "training.batch_size": 4,
        "training.max_steps": 4,
        "training.learning_rate": 1e-9,  # so small that the weights stay where they started
        "training.scheduler.warmup_steps": 0,
        "checkpoint.interval_steps": 4,
        "cluster.nodes": 1,
        "cluster.processes_per_node": 2,
        "cluster.device": "cpu",
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    example = str(PROJECT_ROOT / "examples" / "hugging_face.yaml")
    output = run_ranks(2, ["-m", "ebbflow.training", example, "--job", "tide", *words])
    assert "initial weights: 20 tensors" in output[0]
    target = exported / "model.safetensors"
    assert checkpoints(["export", str(tmp_path / "store" / "jobs" / "tide"), str(target), "--weights-only"]) == 0
    (exported / "config.json").write_bytes((folder / "config.json").read_bytes())
    end, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(end(tokens).logits, start(tokens).logits, rtol=0, atol=1e-5)
    changed = [name for name, value in end.state_dict().items() if not torch.equal(value, start.state_dict()[name])]
    assert changed  # it was trained, if only a little


GROUPED = {**SIZE, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 64}
STRETCHED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
THEIRS = {
    "llama": LlamaConfig(**GROUPED, rms_norm_eps=1e-5, rope_theta=5000.0),
    "llama 3.1": LlamaConfig(
        **GROUPED, head_dim=16, tie_word_embeddings=True, rope_theta=500.0,
        rope_scaling={**STRETCHED, "original_max_position_embeddings": 32},
    ),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=12, rope_theta=1e6),
}  # fmt: skip
TOKENS = torch.arange(3 * 40).reshape(3, 40) * 7 % 299 + 1  # without 0, which is taken for padding


def random_folder(kind: str, folder: Path) -> PreTrainedModel:
    """A model with random weights, biases and norms too, written as transformers writes it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THEIRS[kind], attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    return model


def settings_of(folder: Path) -> dict[str, Any]:
    return {**read_settings(folder / "config.json"), "sequence_length": 64}


@pytest.mark.parametrize("kind", THEIRS)
@torch.no_grad()
def test_the_built_in_model_computes_what_transformers_computes_and_returns_it(kind: str, tmp_path: Path) -> None:
    theirs = random_folder(kind, tmp_path / "theirs")
    config = RunConfig(model=ModelConfig(**settings_of(tmp_path / "theirs")))
    ours = CausalLM(config.model)
    assert load_weights(str(tmp_path / "theirs"), ours, our_name) == len(dict(theirs.named_parameters()))
    expected = theirs(TOKENS).logits
    torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    continued = theirs.generate(TOKENS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(generate(ours, TOKENS, 8), continued)

    weights = unwrap_weights(ours.state_dict(), "the model")
    write_file(PortableState(weights=weights), tmp_path / "ours", "hugging-face", config)
    back, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and type(back) is type(theirs)
    assert torch.equal(back(TOKENS).logits, expected)


def test_a_job_starts_from_a_folder_of_qwen_and_exports_one(tmp_path: Path) -> None:
    folder, texts, exported = tmp_path / "theirs", tmp_path / "texts", tmp_path / "exported"
    random_folder("qwen2", folder)
    texts.mkdir()
    for number in range(4):
        (texts / f"{number}.txt").write_text("the tide comes in and the tide goes out again\n" * 20)
    config = RunConfig(
        store=str(tmp_path / "store"),
        training={"batch_size": 4, "max_steps": 2, "initial_weights": str(folder), "scheduler": {"warmup_steps": 0}},
        data={"path": str(texts), "suffixes": [".txt"], "held_out_fraction": 0.3},
        checkpoint={"interval_steps": 2},
    )
    refused = check_initial_weights(PreflightContext(config=config, project_root=tmp_path))
    assert "model.num_kv_heads 4 is 2 there" in refused.detail
    path = tmp_path / "pasted.yaml"
    path.write_text(refused.fix or "")
    pasted = load_config(str(path), [], project_root=tmp_path).config.model
    assert pasted == ModelConfig(**{**settings_of(folder), "sequence_length": 128})
    with pytest.raises(WorkloadError, match=r"num_kv_heads 4 is 2 there.*fix: model: \{architecture"):
        run_alone(config, "refused")

    config = config.model_copy(update={"model": pasted.model_copy(update={"sequence_length": 64})})
    assert "tensors" in check_initial_weights(PreflightContext(config=config, project_root=tmp_path)).detail
    assert run_alone(config, "tide").step == 2
    job = str(tmp_path / "store" / "jobs" / "tide")
    assert checkpoints(["export", job, str(exported), "--kind", "hugging-face"]) == 0
    assert checkpoints(["export", job, str(tmp_path / "plain.safetensors"), "--weights-only"]) == 0
    ours = CausalLM(config.model)
    load_weights(str(tmp_path / "plain.safetensors"), ours)
    back = AutoModelForCausalLM.from_pretrained(exported, attn_implementation="eager")
    torch.testing.assert_close(back(TOKENS).logits, ours(TOKENS), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "is of the kind mixtral"),
        ({"hidden_act": "gelu", "attention_bias": True}, "has hidden_act gelu, attention_bias True"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "has rope_type yarn"),
        ({"hidden_size": None}, "cannot be read"),
    ],
)
def test_a_folder_that_the_built_in_model_cannot_be_is_refused(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**THEIRS["llama"].to_dict(), "rope_parameters": None, "head_dim": None, **changes}))
    with pytest.raises(WorkloadError, match=rf"config.json: .*{words}.*fix: "):
        read_settings(path)
