"""Guess the family of a failure from the words of its error lines, if no rule matches them.

`words.txt` has the words that are typical of each family, with weights: logarithms of how much more often a word is in
messages of the family than on average. They were counted in labelled log excerpts and in the error messages of public
source code (torch, NCCL, DeepSpeed, Megatron, Slurm, wandb, …), where the folder of a file determines the family of its
messages.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from pathlib import Path

_TABLE = Path(__file__).with_name("words.txt")
_WORD = re.compile(r"[a-z]{3,}")
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ABSENT = -0.3  # the weight of a word for families that it is not typical of
_MOST_LINES = 16
MARGIN = 2.0  # a family needs so much more weight than the next one to be named
SEVERE = re.compile(
    r"error|exception|fatal|fail|cannot|can't|could ?n[o']t|unable|refused|denied|abort|panic|crash|no such|not found"
    r"|invalid|corrupt|timed? ?out|exceed|mismatch|unavailable|critical|killed|terminated|unexpected|expired",
    re.IGNORECASE,
)
HARMLESS = re.compile(
    r"fall(?:ing)? ?back|retry|retries|ignor|optional|deprecat|using internal|skipp|algbw|libibverbs|not necessarily"
    r"|(?:no|0|without) (?:error|failure)s?\b|(?:error|failure|exception|failed)s?\W{0,3}(?:0|none|false)\b"
    r"|warn|\bINFO\b|\[[IW]\d*[ :]|level=info|^.{0,12}\[?[IW]\d{4}\b"
    r"|error_(?:file|handler)|--\w*(?:error|fail)|_error\b.{0,4}\d"
    # Summaries, which name no cause.
    r"|ChildFailedError|FAILED$|Failures:|Task failed|Step failure|Flow (?:aborted|failed)|AlgorithmError|exit ?code"
    r"|Job failed|traceback :",
    re.IGNORECASE,
)
TRIGGERS = tuple(
    word.encode()
    for word in (
        "error", "exception", "fatal", "fail", "cannot", "can't", "could not", "couldn", "unable", "refused", "denied",
        "abort", "panic", "crash", "no such", "not found", "invalid", "corrupt", "timed out", "timeout", "exceed",
        "mismatch", "unavailable", "critical", "killed", "terminated", "unexpected", "expired",
    )
)  # fmt: skip


def split_words(text: str) -> set[str]:
    """Split a line into lower-case words, also at underscores and at the capitals of names."""
    return set(_WORD.findall(_CAMEL.sub(" ", text[:600]).lower()))


def is_severe(text: str) -> bool:
    return bool(SEVERE.search(text)) and not HARMLESS.search(text)


def guess_family(lines: Iterable[str]) -> tuple[str, float] | None:
    """Return the failure family, such as "storage" or "cuda", that best fits the words of the severe lines.

    Returns:
        The family and its lead over the second-best one; None if no line is severe, or the lead is below `MARGIN`.
    """
    words: set[str] = set()
    for line in list(dict.fromkeys(line for line in lines if is_severe(line)))[:_MOST_LINES]:
        words |= split_words(line)
    if not words:
        return None
    table = _load_table()
    scores = {
        family: sum(weights.get(word, _ABSENT) for word in words if word in _known())
        for family, weights in table.items()
    }
    (best, first), (_, second) = sorted(scores.items(), key=lambda item: -item[1])[:2]
    return (best, first - second) if first > 0 and first - second >= MARGIN else None


def confidence_of(margin: float) -> float:
    """Return the confidence in a guessed cause: 0.5 if it leads the second-best by `MARGIN`, at most 0.7 beyond."""
    return 0.5 + 0.2 * (1 - math.exp(-(margin - MARGIN) / 3))


@functools.cache
def _load_table() -> dict[str, dict[str, float]]:
    table: dict[str, dict[str, float]] = {}
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        family, weight, *words = line.split()
        if family != "#":
            table.setdefault(family, {}).update(dict.fromkeys(words, float(weight)))
    return table


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(word for weights in _load_table().values() for word in weights)
