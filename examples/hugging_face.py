"""A causal language model of Hugging Face transformers as a workload, with the data of the built-in one.

`workload_options.folder` is a local folder with config.json, as `save_pretrained` or `hf download` leaves it. Every
node reads it; nothing is downloaded.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ebbflow.training.workload import Loss, WorkloadContext
from ebbflow.training.workloads.language_model import TextBatch, TextWorkload


class CausalLM(TextWorkload):
    """Train or fine-tune any decoder that transformers has; text, tokenizer and evaluation are those of `data`."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.settings = AutoConfig.from_pretrained(context.options["folder"], local_files_only=True)
        self.parameters = sum(parameter.numel() for parameter in self.model().parameters())

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(self.settings, attn_implementation="sdpa", dtype=torch.float32)
        for module in model.modules():
            # Ebbflow initialises module by module; transformers has one function for all of its modules.
            module.reset_parameters = partial(model._init_weights, module)
        return model

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        """The decoder's blocks. Embeddings and head, whose weights may be tied, stay outside."""
        return next(module for module in model.modules() if isinstance(module, nn.ModuleList))

    def loss(self, model: nn.Module, batch: TextBatch) -> Loss:
        logits = model(input_ids=batch.inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten(), reduction="sum")
        return Loss(loss, batch.weight)

    def flops(self, batch: TextBatch) -> float:
        """6 per parameter and token (Kaplan et al. 2020, section 2.1); attention over long sequences comes on top."""
        return 6.0 * self.parameters * batch.weight
