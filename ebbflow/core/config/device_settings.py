"""Values that replace "auto" in a configuration, chosen for the device on which ranks train.

A key that is still "auto" counts as on a CPU: float32, and the logits of all tokens at once.
"""

import copy

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.json_values import JsonObject

# First compute capability whose tensor cores multiply bfloat16 (Ampere). Older cards multiply
# float16.
BFLOAT16_CAPABILITY = 8.0
# The logits of a micro-batch, their log-probabilities and their gradient may take this much before
# an automatic loss is computed in chunks.
LOSS_BYTES = 2**30
_LOSS_BYTES_PER_LOGIT = 3 * 4
_SMALLEST_CHUNK = 256


# Defaults of keys before their default was "auto"
_FORMER_DEFAULTS = {
    ("fsdp", "use_mixed_precision"): False,
    ("fsdp", "param_dtype"): "bfloat16",
    ("training", "loss_chunk_tokens"): None,
}


def renew_defaults(document: JsonObject) -> JsonObject:
    """Return the configuration of a job's config.json, with defaults of earlier versions replaced
    by "auto".

    Only values that the user did not set are replaced. An unchanged job thus has the same settings
    as before an update of Ebbflow.
    """
    written = document.get("config")
    sources = document.get("sources")
    if not isinstance(written, dict):
        return {}
    config = copy.deepcopy(written)
    if not isinstance(sources, dict):
        return config
    for (section, name), former in _FORMER_DEFAULTS.items():
        values = config.get(section)
        if not isinstance(values, dict) or name not in values:
            continue
        if sources.get(f"{section}.{name}") == "default" and values[name] == former:
            values[name] = "auto"
    return config


def settle_for_device(config: RunConfig, capability: float | None) -> RunConfig:
    """Return the configuration with each "auto" replaced by the value for a device.

    A training script keeps its own precision and loss, and a user's workload keeps its own loss.

    Args:
        capability: lowest compute capability of the GPUs of all ranks, such as 8.0; None: a CPU.
    """
    on_gpu = capability is not None and config.script is None
    fsdp = config.fsdp
    mixed = on_gpu if fsdp.use_mixed_precision == "auto" else fsdp.use_mixed_precision
    dtype = fsdp.param_dtype
    if dtype == "auto":
        has_bfloat16 = capability is None or capability >= BFLOAT16_CAPABILITY
        dtype = "bfloat16" if has_bfloat16 else "float16"
    settled = config.changed("fsdp", use_mixed_precision=mixed, param_dtype=dtype)
    if on_gpu and config.user_code is None and config.training.loss_chunk_tokens == "auto":
        chunk = choose_loss_chunk(config.model.vocab_size)
        settled = settled.changed("training", loss_chunk_tokens=chunk)
    return settled


def most_even_ranks(most: int, batch_size: int, parts: int) -> int | None:
    """Return the largest number of ranks per node that divides the batch evenly, or None.

    Args:
        most: GPUs of a node.
        batch_size: samples of a step on all ranks.
        parts: nodes × micro-batches, among which the batch is divided as well.
    """
    for ranks in range(most, 0, -1):
        if batch_size % (parts * ranks) == 0:
            return ranks
    return None


def choose_loss_chunk(vocab_size: int) -> int:
    """Return the number of tokens in a chunk of the loss: a power of two, 256 or more.

    Logits and loss of a chunk take at most LOSS_BYTES, unless 256 tokens already take more.
    """
    fitting = LOSS_BYTES // (_LOSS_BYTES_PER_LOGIT * vocab_size)
    return max(_SMALLEST_CHUNK, 1 << max(0, fitting.bit_length() - 1))
