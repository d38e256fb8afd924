"""examples/hugging_face.py: fine-tunes a model from transformers' files, and gives it back in the same format."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from ebbflow.infra.program import PROJECT_ROOT
from ebbflow.training.checkpoint.commands import main as checkpoints
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
