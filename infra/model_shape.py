"""A model as plain numbers: what the planner needs to know of it without importing torch.

`training` tests these figures against the real modules; `cost` reads them for memory fit and throughput.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ebbflow.infra.config.schema import ModelConfig

BLOCK_FLOATS = 16  # of activations that a block keeps per token and unit of width: see `causal_lm_shape`
STREAM_FLOATS = 2  # of them the residual stream: the inputs of both norms
NORM_FLOATS = 2  # more where a norm is not one kernel, as on CPUs: each keeps its normalised input as well


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """parameters: count of all; largest_unit_parameters: of the largest unit that FSDP gathers at once.

    activation_bytes_per_sample: kept for backward, one sequence, float32.
    logits_bytes_per_sample: at their peak, float32: log-probabilities, their gradient and that of the logits.
    backward_bytes_per_sample: gradients of activations inside one unit, float32; 0: part of the others, or unknown.
    flops_per_sample: forward and backward of one sequence (multiply and add counted as two).
    tokens_per_sample: sequence length; of a workload of one's own the weight of a sample, in `weight_unit`.
    units: what is sharded and started as one; the built-in model's are its blocks, embeddings and head.
    kind: "computed" from the formulas below, or "measured" on one sample.
    """

    parameters: int
    largest_unit_parameters: int
    activation_bytes_per_sample: int
    logits_bytes_per_sample: int
    flops_per_sample: float
    tokens_per_sample: float
    units: int
    backward_bytes_per_sample: int = 0
    weight_unit: str = "tokens"
    kind: str = "computed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelShape:
        return cls(**data)


def causal_lm_shape(model: ModelConfig) -> ModelShape:
    """The shape of `ebbflow.training.workloads.language_model.CausalLM`.

    Flops: 6 per matmul parameter and token, plus 12·L·T·d per token for attention scores and values
    (Chowdhery et al. 2022, PaLM, appendix B). Activations per block and token in floats, as autograd keeps them without
    recomputation: for each of two norms its input and output (2·d), qkv 3·d, attention output d, the MLP's hidden layer
    before and after its activation (4·d each): 16·d. `scaled_dot_product_attention` keeps one float per head (its
    log-sum-exp) and makes no matrix of length × length. Fused norms are assumed, as CUDA has them (`NORM_FLOATS`).
    Backward holds the gradient of the residual stream and of the MLP's hidden layer: 5·d, and 6·d with temporaries.
    """
    d, layers, heads = model.hidden_size, model.num_layers, model.num_heads
    length, vocab = model.sequence_length, model.vocab_size
    block = 12 * d * d + 2 * d  # qkv 3d², projection d², MLP 8d², two RMSNorm weights
    embeddings = vocab * d + length * d
    head = vocab * d
    parameters = layers * block + embeddings + d + head
    matmul_parameters = layers * 12 * d * d + head
    per_token = layers * (BLOCK_FLOATS * d + heads + 2) + 3 * d
    return ModelShape(
        parameters=parameters,
        largest_unit_parameters=max(block, embeddings, head + d),  # the last norm travels with the head
        activation_bytes_per_sample=4 * length * per_token,
        logits_bytes_per_sample=3 * 4 * length * vocab,
        flops_per_sample=float(length) * (6.0 * matmul_parameters + 12.0 * layers * length * d),
        tokens_per_sample=length,
        units=layers + 2,
        backward_bytes_per_sample=4 * length * 6 * d,
    )
