"""Guess the family of a failure from the words of its error lines, if no rule matches them.

`words.txt` has the weights of a sparse logistic regression: for each family, words and pairs of
successive words that support it (or contradict it, if negative). It was fitted to 22,800 error
messages of public source code (torch, NCCL, DeepSpeed, Megatron, Slurm, wandb, …), where the folder
of a file determines the family of its messages, and to labelled log excerpts. The term "*" is the
family's constant. The family "none" is for lines without a cause.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable
from pathlib import Path

from ebbflow.diagnose.rules import VALUES

_TABLE = Path(__file__).with_name("words.txt")
_WORD = re.compile(r"[a-z]{3,}")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_MOST_LINES = 16
MARGIN = 2.0  # a family needs so much more weight than the next one to be named
SEVERE, HARMLESS = (
    re.compile("|".join(VALUES[name]), re.IGNORECASE) for name in ("severe", "harmless")
)
TRIGGERS = tuple(word.encode() for word in VALUES["severe_triggers"])


def split_terms(text: str) -> set[str]:
    """Split a line into its lower-case words and all pairs of successive words.

    Names are split at underscores and capitals. A pair is written as "a-b".
    """
    words = _WORD.findall(_CAMEL.sub(" ", text[:600]).lower())
    return {*words, *(f"{first}-{second}" for first, second in itertools.pairwise(words))}


def is_severe(text: str) -> bool:
    return bool(SEVERE.search(text)) and not HARMLESS.search(text)


def guess_family(lines: Iterable[str]) -> tuple[str, float] | None:
    """Return the failure family, such as "storage" or "cuda", that best fits the words of the
    severe lines.

    Returns:
        The family and its lead over the second-best one; None if no line is severe, or the lead is
        below `MARGIN`.
    """
    severe = list(dict.fromkeys(line for line in lines if is_severe(line)))[:_MOST_LINES]
    if not severe:
        return None
    terms = {"*"}.union(*map(split_terms, severe))
    scores = {}
    for family, weights in _load_table().items():
        # In a fixed order, so that rounding does not depend on the seed of hashes
        scores[family] = sum(weights.get(term, 0.0) for term in sorted(terms))
    (best, first), (_, second) = sorted(scores.items(), key=lambda item: -item[1])[:2]
    if first - second >= MARGIN and best != "none":
        return (best, first - second)
    return None


def confidence_of(margin: float) -> float:
    """Convert the lead of a guessed family over the next one to a confidence.

    The confidence is 0.5 for a lead of `MARGIN`, and at most 0.7.
    """
    return 0.5 + 0.2 * (1 - math.exp(-(margin - MARGIN) / 3))


@functools.cache
def _load_table() -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        family, weight, *words = line.split()
        if family != "#":
            table.setdefault(family, {}).update(dict.fromkeys(words, float(weight)))
    return table
