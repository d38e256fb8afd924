"""A reward that is a model: a sequence classifier of transformers with one output, which scores a
completion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ebbflow.training.errors import WorkloadError
from ebbflow.workloads.language.model_folder import ChatTemplate, find_folder

try:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    raise WorkloadError(
        f"transformers cannot be imported ({error}); fix: pip install transformers"
    ) from error


class RewardModel:
    """The score of prompt and completion under a folder's classifier.

    Each completion is scored alone, so that its score does not depend on other completions. If the
    folder has a chat template, prompt and completion are the messages of a user and an assistant;
    otherwise, one text.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._folder = find_folder(Path(), str(folder), "reward")
        self._device = device
        settings = AutoConfig.from_pretrained(folder, local_files_only=True)
        if settings.num_labels != 1:
            raise WorkloadError(
                f"workload_options.reward: {folder} has {settings.num_labels} outputs; fix: a "
                "classifier with one, as reward models have (num_labels: 1)"
            )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self._tokenizer.chat_template:
            self._chat = ChatTemplate(folder)
        else:
            self._chat = None
        self._longest = getattr(settings, "max_position_embeddings", None)
        with torch.device("meta"):
            shape = AutoModelForSequenceClassification.from_config(settings)
        self.bytes = 4 * sum(parameter.numel() for parameter in shape.parameters())
        self._model: Any = None

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:  # noqa: ARG002 (the interface of rewards)
        """Return the score. Raises WorkloadError if the text is longer than the model's context."""
        text = prompt + completion
        if self._chat is not None:
            said = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
            text = self._chat.render(said)
        tokens = self._tokenizer(text, add_special_tokens=self._chat is None, return_tensors="pt")[
            "input_ids"
        ]
        if isinstance(self._longest, int) and tokens.shape[1] > self._longest:
            raise WorkloadError(
                f"reward model {self._folder}: prompt {prompt[:60]!r} and its completion have "
                f"{tokens.shape[1]} tokens, more than its {self._longest} positions; fix: "
                "shorter workload_options.generate_max_len"
            )
        self.load()
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return float(self._model(input_ids=tokens.to(self._device)).logits[0, 0])

    def load(self) -> None:
        """Read the weights on the first call."""
        if self._model is None:
            found = AutoModelForSequenceClassification.from_pretrained(
                self._folder, local_files_only=True, dtype=torch.float32
            )
            self._model = found.eval().requires_grad_(False).to(self._device)
