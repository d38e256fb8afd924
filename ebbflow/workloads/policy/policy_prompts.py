"""Prompts of reinforcement fine-tuning: rows of a data set, or sums of two numbers.

A prompt is a function of its number, so that restarts and world size change nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ebbflow.core.config.schema import DataConfig
from ebbflow.core.store import Store
from ebbflow.training.data.tokenizer import ByteTokenizer, VocabularyTokenizer, open_tokenizer
from ebbflow.training.data.tokens import SampleOrder
from ebbflow.training.errors import DataError
from ebbflow.workloads.readers.rows import find_rows, read_rows

# Range of the addends of the arithmetic task
_LOWEST = 10
_HIGHEST = 99
_NUMBERS = _HIGHEST - _LOWEST + 1
ARITHMETIC_PAIRS = _NUMBERS**2


class Prompt(NamedTuple):
    """A prompt's text, with its row of the data set, which rewards read."""

    text: str
    row: Mapping[str, Any]

    @property
    def answer(self) -> str:
        return str(self.row.get("answer", ""))


class Prompts:
    """A job's prompts: those to train on, numbered from 0, and held-out ones."""

    def __init__(self, train: list[Prompt], held_out: list[Prompt]) -> None:
        self.train = train
        self.held_out = held_out


class Codec:
    """Converter of texts to tokens and back.

    Args:
        stop: the token that ends a completion; None: the tokenizer's end of text, or byte 0.
        wrap: function that makes the model's input of a prompt, such as a chat template.
    """

    def __init__(
        self,
        data: DataConfig,
        root: Path,
        *,
        stop: int | None = None,
        wrap: Callable[[str], str] | None = None,
    ) -> None:
        self._tokenizer = open_tokenizer(data, project_root=root)
        self._wrap = wrap
        self.vocab_size = self._tokenizer.vocab_size
        self.identity = self._tokenizer.identity
        if stop is None and self._tokenizer.separator is None:
            raise DataError(
                f"data.tokenizer {data.tokenizer} has no end-of-text token; fix: add one, such "
                "as </s>"
            )
        if stop is None:
            self.stop = self._tokenizer.separator or 0
        else:
            self.stop = stop

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return self.encode_plain(text if self._wrap is None else self._wrap(text))

    def encode_plain(self, text: str) -> list[int]:
        return self._tokenizer.encode(text.encode()).tolist()

    def decode(self, tokens: list[int]) -> str:
        """Return the text up to the first stop token."""
        if self.stop in tokens:
            kept = tokens[: tokens.index(self.stop)]
        else:
            kept = tokens
        if isinstance(self._tokenizer, ByteTokenizer):
            return bytes(kept).decode(errors="replace")
        assert isinstance(self._tokenizer, VocabularyTokenizer)
        return self._tokenizer._tokenizer.decode(kept, skip_special_tokens=False)


def addition(number: int) -> Prompt:
    """Return the prompt of the addition with this number, such as "12+34=".

    The answer's digits are in reverse order, the last digit first. A model that writes the sum from
    its last digit can carry (Lee et al. 2023, "Teaching Arithmetic to Small Transformers").
    """
    a = _LOWEST + number // _NUMBERS
    b = _LOWEST + number % _NUMBERS
    return Prompt(f"{a}+{b}=", {"answer": str(a + b)[::-1]})


def additions(held_out: int, seed: int) -> Prompts:
    """Return all sums of two two-digit numbers, in random order; the first `held_out` are held
    out.
    """
    order = SampleOrder(ARITHMETIC_PAIRS, seed).window(0, ARITHMETIC_PAIRS).tolist()
    prompts = [addition(number) for number in order]
    return Prompts(prompts[held_out:], prompts[:held_out])


def pack_prompts(store: Store, path: str | Path, *, column: str, held_out: int) -> str:
    """Copy the rows of a data set to the store, and return their fingerprint.

    `held_out` rows, evenly spaced, are held out. Raises DataError for a row without a prompt.
    """
    rows = read_prompts(path, column=column, held_out=held_out)
    chosen = {place * len(rows) // held_out for place in range(held_out)}
    split = {
        "train": [row for place, row in enumerate(rows) if place not in chosen],
        "held_out": [rows[place] for place in sorted(chosen)],
    }
    try:
        content = json.dumps(split, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path}: a row is not JSON: {error}; fix: texts, numbers, lists and objects"
        ) from error
    fingerprint = hashlib.sha256(content).hexdigest()
    store.put(f"prompts/{fingerprint}.json", content)
    return fingerprint


def read_prompts(path: str | Path, *, column: str, held_out: int) -> list[Mapping[str, Any]]:
    """Read the rows of a data set, each of which has a prompt.

    Raises DataError for a row without a prompt, or if all rows are held out.
    """
    files = find_rows(path, ())
    if not files:
        raise DataError(
            f"{path} is plain text; fix: a data set of .jsonl, .json, .parquet or .arrow files"
        )
    rows = []
    for placed in read_rows(files):
        row = placed.row
        if not isinstance(row.get(column), str) or not row[column]:
            names = ", ".join(map(str, row)) or "nothing"
            raise DataError(
                f"{placed}: no text in {column!r}; it has {names}; fix: "
                "workload_options.prompt_column"
            )
        rows.append(row)
    if len(rows) <= held_out:
        raise DataError(
            f"{path}: {len(rows)} rows - {held_out} held-out prompts leave none to train on; "
            "fix: more rows, or smaller workload_options.held_out_prompts"
        )
    return rows


def open_prompts(store: Store, fingerprint: str, column: str) -> Prompts:
    """Read the prompts that `pack_prompts` wrote to the store."""
    content = store.get(f"prompts/{fingerprint}.json")
    if hashlib.sha256(content).hexdigest() != fingerprint:
        raise DataError(
            f"prompts {fingerprint} in the store are damaged; fix: delete them, and run prepare "
            "again"
        )
    split = json.loads(content)
    return Prompts(
        [Prompt(row[column], row) for row in split["train"]],
        [Prompt(row[column], row) for row in split["held_out"]],
    )


def check_lengths(prompts: Prompts, codec: Codec, longest: int) -> None:
    """Raise DataError if a prompt has more than `longest` tokens."""
    for side, rows in (("train", prompts.train), ("held-out", prompts.held_out)):
        lengths = np.array([len(codec.encode(prompt.text)) for prompt in rows])
        if (lengths > longest).any():
            worst = int(lengths.argmax())
            raise DataError(
                f"{int((lengths > longest).sum())} of {len(rows)} {side} prompts have more than "
                f"workload_options.prompt_max_len {longest} tokens; the longest, number {worst}, "
                f"has {lengths[worst]} ({rows[worst].text[:40]!r}…); fix: prompt_max_len: "
                f"{lengths[worst]}, with a model.sequence_length that holds it, or shorter "
                "prompts"
            )
        if (lengths == 0).any():
            raise DataError(f"a {side} prompt has no token; fix: remove it")
