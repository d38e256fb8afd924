"""Reward from a sequence classifier of transformers, whose single output scores a completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ebbflow.training.errors import WorkloadError
from ebbflow.workloads.language.model_folder import ChatTemplate, find_folder

try:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
except ImportError as error:
    raise WorkloadError(
        f"transformers cannot be imported ({error}); fix: pip install transformers"
    ) from error

_BATCH = 32  # completions that are scored at once
_NO_TOKEN = -1


class RewardModel:
    """Reward model that scores prompt and completion with the classifier in a folder.

    Completions are scored in batches of similar length. Those of a rank's rollouts are the same
    after a resume, and so are their scores, bit for bit; another number of ranks may round them
    differently. If the folder has a chat template, prompt and completion are the messages of a user
    and an assistant; otherwise, one text.
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
        """Return the score of one completion.

        Raises WorkloadError if the text is longer than the model's context.
        """
        return self.score([(prompt, completion)])[0]

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the score of each prompt and completion.

        Raises WorkloadError if a text is longer than the model's context.
        """
        self.load()
        tokens = [self._encode(*pair) for pair in pairs]
        pad = self._model.config.pad_token_id
        order = sorted(range(len(tokens)), key=lambda place: len(tokens[place]))
        scores = [0.0] * len(tokens)
        for places in _batches(order, tokens, same_length=pad is None):
            rows = [tokens[place] for place in places]
            found = self._score_rows(rows, pad)
            for place, score in zip(places, found, strict=True):
                scores[place] = score
        return scores

    def _encode(self, prompt: str, completion: str) -> Tensor:
        text = prompt + completion
        if self._chat is not None:
            said = [
                {"role": "user", "content": prompt},
                {"role": "assistant", "content": completion},
            ]
            text = self._chat.render(said)
        tokens = self._tokenizer(text, add_special_tokens=self._chat is None, return_tensors="pt")[
            "input_ids"
        ][0]
        if isinstance(self._longest, int) and len(tokens) > self._longest:
            raise WorkloadError(
                f"reward model {self._folder}: prompt {prompt[:60]!r} and its completion have "
                f"{len(tokens)} tokens, more than its {self._longest} positions; fix: "
                "shorter workload_options.generate_max_len"
            )
        return tokens

    def _score_rows(self, rows: Sequence[Tensor], pad: int | None) -> list[float]:
        """Return the scores of several token sequences; without a padding token, their lengths are
        equal.
        """
        config = self._model.config
        if pad is None:
            config.pad_token_id = _NO_TOKEN  # else transformers refuses several rows
        try:
            tokens = pad_sequence(list(rows), batch_first=True, padding_value=pad or 0)
            lengths = torch.tensor([len(row) for row in rows])
            mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
            with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
                found = self._model(
                    input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)
                )
            return found.logits[:, 0].tolist()
        finally:
            config.pad_token_id = pad

    def load(self) -> None:
        """Load the weights, unless they are loaded."""
        if self._model is None:
            found = AutoModelForSequenceClassification.from_pretrained(
                self._folder, local_files_only=True, dtype=torch.float32
            )
            self._model = found.eval().requires_grad_(False).to(self._device)


def _batches(
    order: Sequence[int], tokens: Sequence[Tensor], *, same_length: bool
) -> Iterator[list[int]]:
    """Yield batches of entries of `order`; with `same_length`, the texts of a batch are equally
    long.
    """
    batch: list[int] = []
    for place in order:
        other_length = bool(batch) and len(tokens[place]) != len(tokens[batch[0]])
        if len(batch) == _BATCH or (same_length and other_length):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch
