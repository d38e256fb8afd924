"""A model as plain numbers: what the planner needs to know of it without importing torch.

`training` tests these figures against the real modules; `cost` reads them for memory fit and throughput.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from infra.config.schema import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """parameters: count of all; largest_unit_parameters: of the largest unit that FSDP gathers at once.

    activation_bytes_per_sample: kept for backward, one sequence, float32.
    logits_bytes_per_sample: logits and their gradient, float32.
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
    weight_unit: str = "tokens"
    kind: str = "computed"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelShape:
        return cls(**data)


def causal_lm_shape(model: ModelConfig) -> ModelShape:
    """The shape of `training.workloads.language_model.CausalLM`.

    Flops: 6 per matmul parameter and token, plus 12·L·T·d per token for attention scores and values
    (Chowdhery et al. 2022, PaLM, appendix B). Activations per block and token, float32, without recomputation:
    norms, qkv, attention output, projection, the 4·d MLP hidden layer before and after its activation (about 18·d
    floats), plus the attention matrix 2·heads·T floats where it is materialised.
    """
    d, layers, heads = model.hidden_size, model.num_layers, model.num_heads
    length, vocab = model.sequence_length, model.vocab_size
    block = 12 * d * d + 2 * d  # qkv 3d², projection d², MLP 8d², two RMSNorm weights
    embeddings = vocab * d + length * d
    head = vocab * d
    parameters = layers * block + embeddings + d + head
    matmul_parameters = layers * 12 * d * d + head
    per_token = layers * (18 * d + 2 * heads * length) + 4 * d
    return ModelShape(
        parameters=parameters,
        largest_unit_parameters=max(block, embeddings, head + d),  # the last norm travels with the head
        activation_bytes_per_sample=4 * length * per_token,
        logits_bytes_per_sample=2 * 4 * length * vocab,
        flops_per_sample=float(length) * (6.0 * matmul_parameters + 12.0 * layers * length * d),
        tokens_per_sample=length,
        units=layers + 2,
    )
