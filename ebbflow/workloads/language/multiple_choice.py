"""Multiple-choice test of a language model: which choice is the likeliest continuation of a
prompt?
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ebbflow.core.json_values import Json
from ebbflow.core.store import Store
from ebbflow.training.data.tokenizer import Tokenizer
from ebbflow.training.errors import DataError
from ebbflow.training.workload import WorkloadContext


class Question(NamedTuple):
    prompt: str
    choices: list[str]
    answer: int  # number of the right choice, from 0


class ChoiceTest:
    """Multiple-choice questions, as tokens.

    A choice is the continuation of its prompt, character for character, so it usually begins with a
    space. Raises DataError if prompt and choice have more than `longest` tokens.
    """

    def __init__(self, questions: list[Question], tokenizer: Tokenizer, longest: int) -> None:
        self._questions = questions
        self._items = list[_Item]()
        for number, question in enumerate(questions, 1):
            begin = len(tokenizer.encode(question.prompt.encode()))
            for choice in question.choices:
                tokens = tokenizer.encode((question.prompt + choice).encode()).tolist()
                if len(tokens) > longest:
                    raise DataError(
                        f"workload_options.choices: question {number} has {len(tokens)} tokens "
                        f"with its choice {choice[:40]!r}, more than model.sequence_length "
                        f"{longest}; fix: a larger sequence_length"
                    )
                # A choice that merges with the end of its prompt has at least its last token.
                self._items.append(
                    _Item(tokens, max(1, min(begin, len(tokens) - 1)), len(choice.encode()))
                )

    def evaluate(
        self, logits_of: Callable[[Tensor], Tensor], context: WorkloadContext, batch: int
    ) -> dict[str, float]:
        """Return two accuracies, which rank choices by log-probability, and by log-probability per
        byte.

        Collective.
        """
        count = len(self._items)
        share = -(-count // context.world_size)
        mine = [self._items[min(context.rank * share + place, count - 1)] for place in range(share)]
        scores = [
            self._score(logits_of, mine[first : first + batch], context.device)
            for first in range(0, share, batch)
        ]
        every = context.gather(torch.cat(scores)).flatten()[:count].tolist()
        per_byte = [score / item.bytes for score, item in zip(every, self._items, strict=True)]
        right = 0
        right_per_byte = 0
        first = 0
        for question in self._questions:
            last = first + len(question.choices)
            right += _place_of_largest(every[first:last]) == question.answer
            right_per_byte += _place_of_largest(per_byte[first:last]) == question.answer
            first = last
        total = len(self._questions)
        return {
            "choice_accuracy": right / total,
            "choice_accuracy_per_byte": right_per_byte / total,
        }

    @staticmethod
    def _score(
        logits_of: Callable[[Tensor], Tensor], items: list[_Item], device: torch.device
    ) -> Tensor:
        """Return the log-probability of each choice after its prompt."""
        longest = max(len(item.tokens) for item in items)
        # Later tokens change nothing
        rows = [item.tokens + [0] * (longest - len(item.tokens)) for item in items]
        tokens = torch.tensor(rows, device=device)
        spread = logits_of(tokens[:, :-1]).float().log_softmax(-1)
        found = spread.gather(2, tokens[:, 1:, None])[..., 0].double()
        return torch.stack(
            [
                row[item.begin - 1 : len(item.tokens) - 1].sum()
                for row, item in zip(found, items, strict=True)
            ]
        )


def pack_questions(store: Store, path: Path) -> str:
    """Copy a file of questions to the store, and return their fingerprint.

    Raises DataError for a bad row.
    """
    content = json.dumps([question._asdict() for question in read_questions(path)]).encode()
    fingerprint = hashlib.sha256(content).hexdigest()
    store.put(f"choices/{fingerprint}.json", content)
    return fingerprint


def open_questions(store: Store, fingerprint: str) -> list[Question]:
    return [Question(**row) for row in json.loads(store.get(f"choices/{fingerprint}.json"))]


def read_questions(path: Path) -> list[Question]:
    """Read questions from a file with one JSON object per line.

    An object has `prompt`, `choices` (texts) and `answer` (number from 0, or text).
    """
    if not path.is_file():
        raise DataError(
            f"workload_options.choices: {path} is not a file; fix: a .jsonl file of questions"
        )
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                found.append(_question(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                if isinstance(error, KeyError):
                    problem = f"there is no {error}"
                else:
                    problem = " ".join(str(error).split())
                raise DataError(
                    f'{path}:{number}: {problem}; fix: {{"prompt": TEXT, "choices": [TEXT, TEXT, '
                    '…], "answer": 0}'
                ) from error
    if not found:
        raise DataError(
            f"{path} has no questions; fix: another file, or leave out workload_options.choices"
        )
    return found


class _Item(NamedTuple):
    tokens: list[int]  # of prompt and choice
    begin: int  # first token of the choice
    bytes: int  # of the choice


def _question(row: Mapping[str, Json]) -> Question:
    prompt = row["prompt"]
    choices = row["choices"]
    answer = row["answer"]
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("the prompt is no text")
    texts: list[str] = []
    if isinstance(choices, list):
        texts = [choice for choice in choices if isinstance(choice, str) and choice]
    if not isinstance(choices, list) or len(choices) < 2 or len(texts) < len(choices):
        raise ValueError("choices must be two texts or more")
    if isinstance(answer, str) and answer in texts:
        answer = texts.index(answer)
    if type(answer) is not int or not 0 <= answer < len(texts):
        raise ValueError(f"answer {answer!r} is none of {len(texts)} choices")
    return Question(prompt, texts, answer)


def _place_of_largest(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
