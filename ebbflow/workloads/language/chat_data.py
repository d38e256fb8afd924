"""Tokens of conversations, with masks of the tokens that assistants wrote, stored in shards.

<store>/tokens/<fingerprint>/train.mask  held_out.mask    one byte per token of train.bin and held_out.bin; 1: counted
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ebbflow.core.layout import tokens_prefix
from ebbflow.core.store import Store
from ebbflow.training.data import SampleOrder
from ebbflow.training.data.tokenizer import Tokenizer, dtype_of
from ebbflow.training.data.tokens import (
    DESCRIPTION,
    SHARDS,
    Tokens,
    count_tokens,
    download_shard,
    downloads_folder,
    entropy_nats,
    read_description,
)
from ebbflow.training.errors import DataError
from ebbflow.workloads.language.language_model import TextBatch

_FORMAT = 1
_MASKS = {side: f"{side}.mask" for side in SHARDS}
_NOT_COUNTED = -100  # `ignore_index` of torch's cross entropy

# A conversation, and the spans of characters that assistants write
MarkedText = tuple[str, list[list[int]]]


@dataclass(frozen=True)
class AnswerBatch(TextBatch):
    """Batch of conversations in which only tokens that an assistant wrote are targets.

    All other targets are `_NOT_COUNTED`.
    """

    # Counted targets of each sample. They are known on the CPU, so that the GPU is not waited for
    counts: np.ndarray

    @property
    def weight(self) -> float:
        return float(self.counts.sum())

    def split(self, parts: int) -> list[AnswerBatch]:  # type: ignore[override]
        tensors = (self.inputs.tensor_split(parts), self.targets.tensor_split(parts))
        return [
            AnswerBatch(*part)
            for part in zip(*tensors, np.array_split(self.counts, parts), strict=True)
        ]


class AnswerMask:
    """Masks of the targets that count in the loss, read from the shards.

    A window is a sequence of `length` tokens. Windows without a target that counts are left out.

    Args:
        length: tokens of a window.
        alive: called during a download.
    """

    def __init__(
        self, store: Store, about: Tokens, length: int, alive: Callable[[], object]
    ) -> None:
        shards = store.sub(tokens_prefix(about.fingerprint))
        self._length = length
        self._masks = dict[str, np.ndarray]()
        self._kept = dict[str, np.ndarray]()
        for side, size in (("train", about.train_tokens), ("held_out", about.held_out_tokens)):
            key = _MASKS[side]
            sha256 = about.shard_sha256[_MASKS[side]]
            path = shards.local_path(key) or download_shard(
                shards, key, sha256, size, downloads_folder(), alive
            )
            mask = self._masks[side] = np.asarray(np.memmap(path, dtype=bool, mode="r"))
            windows = (size - 1) // length
            counted = mask[1 : windows * length + 1].reshape(windows, length).any(axis=1)
            self._kept[side] = np.flatnonzero(counted)
            if not len(self._kept[side]):
                raise DataError(
                    f"no sequence of {length} {side.replace('_', '-')} tokens has a token of an "
                    "assistant; fix: more conversations, or a larger model.sequence_length"
                )

    @staticmethod
    def is_stored(about: Tokens) -> bool:
        return _MASKS["train"] in about.shard_sha256

    def windows(self, side: str) -> np.ndarray:
        """Return the numbers of the windows (token sequences) with a target that counts in the
        loss.

        Args:
            side: "train" or "held_out".
        """
        return self._kept[side]

    def mark(self, batch: TextBatch, side: str, windows: np.ndarray) -> AnswerBatch:
        """Return the batch with `_NOT_COUNTED` for each target that does not count in the loss."""
        offsets = windows[:, None] * self._length + np.arange(1, self._length + 1)
        mask = self._masks[side][offsets]
        left_out = torch.from_numpy(~mask)
        if batch.targets.device.type == "cuda":  # else the host waits for the copy
            left_out = left_out.pin_memory()
        left_out = left_out.to(batch.targets.device, non_blocking=True)
        return AnswerBatch(
            batch.inputs, batch.targets.masked_fill(left_out, _NOT_COUNTED), mask.sum(axis=1)
        )


class KeptOrder(SampleOrder):
    """Order of training samples, which has only selected windows (token sequences)."""

    def __init__(self, kept: np.ndarray, seed: int) -> None:
        super().__init__(len(kept), seed)
        self._kept = kept

    def window(self, first: int, count: int) -> np.ndarray:
        return self._kept[super().window(first, count)]


def prepare_chat(
    texts: Iterable[MarkedText], tokenizer: Tokenizer, fraction: float, store: Store
) -> Tokens:
    """Write the token and mask shards of conversations to the store, unless it has them.

    The last `fraction` is held out. Raises DataError if there are fewer than two conversations, or
    if the train or held-out ones have no text by an assistant.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as rows:
        digest = hashlib.sha256(f"{_FORMAT} {tokenizer.identity} {fraction!r}".encode())
        count = 0
        for marked in texts:
            row = json.dumps(marked) + "\n"
            digest.update(row.encode())
            rows.write(row)
            count += 1
        fingerprint = digest.hexdigest()
        shards = store.sub(tokens_prefix(fingerprint))
        known = read_description(shards)
        if known is not None:
            return known
        held_out = max(1, round(count * fraction))
        if held_out >= count:
            raise DataError(
                f"{count} conversations cannot be split into train and held-out ones; fix: more "
                "of them"
            )
        sizes = dict[str, int]()
        totals = dict[str, int]()
        hashes = dict[str, str]()
        entropy = 0.0
        rows.seek(0)
        for side, wanted in (("train", count - held_out), ("held_out", held_out)):
            parts = []
            masks = []
            for _ in range(wanted):
                text, spans = json.loads(rows.readline())
                tokens, mask = encode(text, spans, tokenizer)
                parts.append(tokens)
                masks.append(mask)
                totals[side] = totals.get(side, 0) + len(text.encode())
            tokens = np.concatenate(parts)
            mask = np.concatenate(masks)
            if not mask.any():
                raise DataError(
                    f"the {side.replace('_', '-')} conversations have no message of an assistant; fix: messages with "
                    '"role": "assistant", or workload_options.assistant_only_loss: false'
                )
            if side == "train":
                entropy = entropy_nats(count_tokens(tokens[mask], tokenizer.vocab_size))
            sizes[side] = tokens.size
            for key, name, content in (
                (SHARDS[side], side, tokens.tobytes()),
                (_MASKS[side], _MASKS[side], mask.tobytes()),
            ):
                hashes[name] = hashlib.sha256(content).hexdigest()
                shards.put(key, content)
    about = Tokens(
        fingerprint=fingerprint,
        vocab_size=tokenizer.vocab_size,
        train_tokens=sizes["train"],
        held_out_tokens=sizes["held_out"],
        unigram_entropy_nats=entropy,
        files=1,
        bytes=sum(totals.values()),
        held_out_bytes=totals["held_out"],
        shard_sha256=hashes,
    )
    shards.put(DESCRIPTION, json.dumps(about.to_json(), indent=1).encode())
    return about


def encode(
    text: str, spans: Sequence[Sequence[int]], tokenizer: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of a text, and a mask of those that overlap `spans`.

    The separator follows the text. It is in the mask if the text ends with a span, because it then
    tells the assistant to stop.
    """
    found = tokenizer._tokenizer.encode(text, add_special_tokens=False)
    mask = [_overlaps(begin, end, spans) for begin, end in found.offsets]
    tokens = list(found.ids)
    if tokenizer.separator is not None:
        tokens.append(tokenizer.separator)
        mask.append(any(last == len(text) for _, last in spans))
    return np.array(tokens, dtype=dtype_of(tokenizer.vocab_size)), np.array(mask, dtype=bool)


def _overlaps(begin: int, end: int, spans: Sequence[Sequence[int]]) -> bool:
    return any(begin < last and end > first for first, last in spans)
