"""Policies from a folder of Hugging Face transformers, optionally with LoRA."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from ebbflow.core.json_values import JsonObject
from ebbflow.training.data.tokenizer import BYTES
from ebbflow.training.errors import WorkloadError
from ebbflow.training.weights.files import describe_files
from ebbflow.training.workload import WorkloadContext
from ebbflow.workloads.language.language_model import Linear
from ebbflow.workloads.language.model_folder import (
    ModelFolder,
    find_folder,
    flops_per_token,
    list_blocks,
)
from ebbflow.workloads.policy.policy_model import Record, fill
from ebbflow.workloads.policy.policy_options import PolicyOptions, refuse_option


class FolderPolicy(nn.Module):
    """A causal language model of transformers as policy, with a value head for PPO."""

    def __init__(
        self, model: PreTrainedModel, *, values: bool = False, record: Record | None = None
    ) -> None:
        super().__init__()
        self.language = model
        shape = model.config.get_text_config()
        if values:
            self.values = Linear(shape.hidden_size, 1, bias=True)
        else:
            self.values = None
        self.record = record
        heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
        width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
        self.cached_numbers_per_token = 2 * shape.num_hidden_layers * heads * width

    def forward(self, tokens: Tensor, past: Any = None) -> Any:
        """Compute logits `[batch, length, vocabulary]` and, with a value head, values `[batch,
        length]`.
        """
        found = self.language(
            input_ids=tokens,
            past_key_values=past,
            use_cache=past is not None,
            output_hidden_states=self.values is not None,
        )
        if self.values is None:
            return found.logits
        x = found.hidden_states[-1]
        return found.logits, self.values(F.rms_norm(x, x.shape[-1:]))[..., 0]

    def make_cache(self, capacity: int) -> DynamicCache:  # noqa: ARG002 (the interface of policies)
        """Return an empty cache of keys and values, which grows as tokens are added."""
        return DynamicCache(config=self.language.config)


class FolderModels:
    """Policy and reference from the folder in `workload_options.model`.

    With LoRA, the reference is the policy without LoRA's matrices.
    """

    def __init__(self, context: WorkloadContext, options: PolicyOptions) -> None:
        self._options = options
        root = find_folder(context.project_root, options.model)
        self._folder = ModelFolder(
            root,
            lora_rank=options.lora_rank,
            lora_alpha=options.lora_alpha,
            lora_targets=options.lora_targets,
        )
        self._folder.check_length(options.sequence)
        config = context.config
        changed = {"vocab_size": self._folder.vocabulary}
        config = config.model_copy(update={"model": config.model.model_copy(update=changed)})
        if config.data.tokenizer == BYTES:
            path = str(root.parent if root.is_file() else root)
            config = config.model_copy(
                update={"data": config.data.model_copy(update={"tokenizer": path})}
            )
        self.config = config
        if options.reference:
            self._reference = ModelFolder(
                find_folder(context.project_root, options.reference, "reference")
            )
        else:
            self._reference = None
        if self._reference is not None and self._reference.vocabulary != self._folder.vocabulary:
            refuse_option(
                f"reference: {self._reference.root} has a vocabulary of "
                f"{self._reference.vocabulary} tokens, the policy has {self._folder.vocabulary}; "
                "fix: a model of the same vocabulary"
            )
        settings: Any = self._folder.settings.get_text_config()
        ends = settings.eos_token_id
        self.stop = _last_of(ends)
        model = self.policy()
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._flops = flops_per_token(model)

    def policy(self, record: Record | None = None) -> FolderPolicy:
        model = self._folder.model()
        with torch.device("meta"):
            return FolderPolicy(
                model, values=self._options.advantage_estimator == "ppo", record=record
            )

    def reference(self, device: torch.device, dtype: torch.dtype) -> FolderPolicy | None:
        if self._reference is None and self._options.lora_rank:
            return None
        folder = self._reference or self._folder
        model, blank = (FolderPolicy(folder.model(lora=False)) for _ in range(2))
        return fill(model, blank, self.config.training.seed, device, dtype)

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        return list_blocks(model)

    def flops_per_token(self) -> float:
        return self._flops

    def describe(self) -> JsonObject:
        """Describe the first weights as JSON, so that a change of them can be detected."""
        folders = {"model": self._folder, "reference": self._reference}
        return {name: _identify(folder) for name, folder in folders.items() if folder is not None}


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """Disable LoRA's matrices while the context is active."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise WorkloadError(
            "workload_options.lora_rank needs peft; fix: pip install peft"
        ) from error
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _last_of(ends: Any) -> int | None:
    if isinstance(ends, list):
        if ends:
            return int(ends[-1])
        return None
    return ends


def _identify(folder: ModelFolder) -> list[Any]:
    if folder.root.is_file():
        settings = folder.root
    else:
        settings = folder.root / "config.json"
    return [
        json.loads(settings.read_text()),
        *(describe_files(str(folder.root)) if folder.stored else []),
    ]
