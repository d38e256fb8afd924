"""Map the built-in model of architecture llama to folders of Hugging Face transformers, and back.

Imports no torch.

The kinds of models are Llama, Qwen2 and Qwen3. Each of their tensors is one tensor of the built-in
model.
"""

import json
import re
from pathlib import Path

from ebbflow.core.config.schema import ModelConfig
from ebbflow.core.json_values import JsonObject
from ebbflow.training.errors import WorkloadError

_KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_BLOCK = r"blocks\.(\d+)\.(.+)"
_THEIR_BLOCK = r"model\.layers\.(\d+)\.(.+)"
# Modules outside the blocks, then those of a block: their names, and ours.
_MODULES = {
    "model.embed_tokens": "embeddings.token",
    "model.norm": "head.norm",
    "lm_head": "head.logits",
}
_IN_BLOCK = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "self_attn.o_proj": "attention.projection",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp_gate",
    "mlp.up_proj": "mlp_in",
    "mlp.down_proj": "mlp_out",
}
# Settings of config.json that change the computation, with the only value that the built-in model
# has.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
}
_FIXED |= {"partial_rotary_factor": 1.0}
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def our_name(name: str) -> str | None:
    """Convert the name of a transformers tensor to the built-in model's; None for RoPE's
    frequencies.

    Other names stay as they are.
    """
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return _renamed(name, _THEIR_BLOCK, "blocks", _IN_BLOCK, _MODULES)


def their_name(name: str) -> str:
    """Convert the name of a tensor of the built-in model to transformers' name."""
    inside = {ours: theirs for theirs, ours in _IN_BLOCK.items()}
    outside = {ours: theirs for theirs, ours in _MODULES.items()}
    return _renamed(name, _BLOCK, "model.layers", inside, outside)


def _renamed(
    name: str, block: str, prefix: str, inside: dict[str, str], outside: dict[str, str]
) -> str:
    module, _, leaf = name.rpartition(".")
    if found := re.fullmatch(block, module):
        number, module = found.groups()
        if module in inside:
            return f"{prefix}.{number}.{inside[module]}.{leaf}"
        return name
    if module in outside:
        return f"{outside[module]}.{leaf}"
    return name


def read_settings(path: Path) -> JsonObject:
    """Derive settings of the section `model` from the config.json of a Hugging Face model.

    Raises WorkloadError.
    """
    try:
        theirs = json.loads(path.read_text())
        kind = theirs["model_type"]
        rope = {**(theirs.get("rope_scaling") or {}), **(theirs.get("rope_parameters") or {})}
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type == "llama3":
            scaling = _SCALING
        else:
            scaling = {}
        fixed = {**_FIXED, **scaling, "rope_type": "llama3" if scaling else "default"}
        found = {**theirs, **rope, "rope_type": rope_type}
        other = [
            f"{key} {found[key]}" for key, value in fixed.items() if found.get(key, value) != value
        ]
        if kind not in _KINDS or other:
            known = f"its kinds are {', '.join(_KINDS)}, with a rope_type of default or llama3"
            if kind in _KINDS:
                text = f"has {', '.join(other)}"
            else:
                text = f"is of the kind {kind}"
            raise WorkloadError(
                f"{path}: {text}, which the built-in model has not: {known}; fix: train it as in "
                "examples/hugging_face.yaml, with transformers' own code"
            )
        heads = theirs["num_attention_heads"]
        head_size = theirs.get("head_dim") or (
            128 if kind == "qwen3" else theirs["hidden_size"] // heads
        )
        return {
            "architecture": "llama",
            "hidden_size": theirs["hidden_size"],
            "num_layers": theirs["num_hidden_layers"],
            "num_heads": heads,
            "vocab_size": theirs["vocab_size"],
            "tied_embeddings": bool(theirs.get("tie_word_embeddings", False)),
            "norm_epsilon": theirs.get("rms_norm_eps", 1e-6),
            "num_kv_heads": theirs.get("num_key_value_heads") or heads,
            "head_size": head_size,
            "intermediate_size": theirs["intermediate_size"],
            "qkv_bias": kind == "qwen2",
            "qk_norm": kind == "qwen3",
            "rope_theta": float(rope.get("rope_theta") or theirs.get("rope_theta") or 10000.0),
            **(
                {
                    "rope_factor": float(rope["factor"]),
                    "rope_original_length": rope["original_max_position_embeddings"],
                }
                if scaling
                else {"rope_factor": 1.0}
            ),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, KeyError):
            cause = f"has no {error}"
        else:
            cause = f"cannot be read: {error}"
        raise WorkloadError(
            f"{path}: {cause}; fix: copy the config.json of the model again"
        ) from error


def check_settings(model: ModelConfig, weights: str) -> None:
    """Raise WorkloadError if the section `model` differs from the config.json of a Llama or Qwen
    folder.
    """
    path = Path(weights) / "config.json"
    if not path.is_file():
        return
    try:
        theirs = read_settings(path)
    except WorkloadError:
        if model.architecture == "llama":
            raise
        return
    ours = {
        **{key: getattr(model, key) for key in theirs},
        "norm_epsilon": model.norm_epsilon or 1e-5,
        "num_kv_heads": model.kv_heads,
        "head_size": model.head_width,
        "intermediate_size": model.mlp_width,
    }
    if different := [
        f"model.{key} {ours[key]} is {value} there"
        for key, value in theirs.items()
        if ours[key] != value
    ]:
        lines = ", ".join(f"{key}: {json.dumps(value)}" for key, value in theirs.items())
        raise WorkloadError(
            f"the configuration differs from {path}: {'; '.join(different)}; fix: "
            f"model: {{{lines}, sequence_length: {model.sequence_length}}}"
        )


def write_settings(model: ModelConfig) -> JsonObject:
    """Return the config.json of the built-in model as a dict.

    Raises WorkloadError if transformers lacks the model.
    """
    if model.architecture != "llama" or (model.qkv_bias and model.qk_norm):
        if model.architecture == "gpt":
            what = "model.architecture gpt"
        else:
            what = "model.qkv_bias together with qk_norm"
        raise WorkloadError(
            f"{what} is no model of transformers; fix: export as safetensors, torch or dcp"
        )
    if model.qk_norm:
        kind = "qwen3"
    elif model.qkv_bias:
        kind = "qwen2"
    else:
        kind = "llama"
    scaling = None
    if model.rope_factor != 1.0:
        length = model.rope_original_length
        scaling = {"rope_type": "llama3", "factor": model.rope_factor, **_SCALING}
        scaling |= {"original_max_position_embeddings": length}
    return {
        "architectures": [_KINDS[kind]],
        "model_type": kind,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_width,
        "intermediate_size": model.mlp_width,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_epsilon or 1e-5,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
