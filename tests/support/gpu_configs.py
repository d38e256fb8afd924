"""The configurations of GPU size, with folders and prompts of the sizes that they name, but no
weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from ebbflow.core.config.load import load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.training.gang import Gang
from ebbflow.training.workload_loader import prepare_data, workload_context
from tests.gang.test_hugging_face import TIED, random_model

# Llama 2 7B, and a model of 0.5 billion parameters as Qwen2.5's; vocabularies rounded.
_LARGE = LlamaConfig(
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
    vocab_size=32000,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)
_SMALL = LlamaConfig(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=152000,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
MODELS = {
    "point-clouds-gpu": None,
    "policy-optimization-gpu": _LARGE,
    "policy-optimization-low-memory": _LARGE,
    "policy-optimization-ddp": _SMALL,
}


def load_gpu_config(name: str, tmp_path: Path, *words: str) -> RunConfig:
    settings = MODELS[name]
    given = [f"store={tmp_path / 'store'}", *words]
    if settings is not None:
        folder = tmp_path / "model"
        random_model(TIED, folder)  # for its tokenizer
        (folder / "model.safetensors").unlink()
        settings.save_pretrained(folder)
        rows = [
            {"prompt": f"What is {number} + {number}?", "answer": str(2 * number)}
            for number in range(1000)
        ]
        (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given += [
            f"workload_options.model={folder}",
            f"workload_options.path={tmp_path / 'prompts.jsonl'}",
        ]
    path = PROJECT_ROOT / "ebbflow/configs" / f"{name}.yaml"
    return load_config(path, given, project_root=PROJECT_ROOT, environment={}).config


def prepared_context(config: RunConfig) -> Any:
    context = workload_context(config, Gang(), store=Store.open(config.store))
    return replace(context, prepared=prepare_data(config, context))
