"""Problems of a configuration: where each one is, what is wrong, and how to fix it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ebbflow.infra.errors import InfraError, Outcome

_WIDEST_LINE = 160
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # password in a URL: terminals are recorded


@dataclass(frozen=True, kw_only=True)
class SourceSpan:
    """A stretch of one line. line and column count from 1, in characters; text is the whole line."""

    source: str
    line: int
    column: int
    length: int
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One error in a configuration. key is dotted ("model.hidden_size"), or "" for the file as a whole."""

    message: str
    key: str = ""
    place: SourceSpan | None = None
    hint: str | None = None

    def __str__(self) -> str:
        return render_problems([self])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class ConfigError(InfraError):
    """The configuration cannot be used. Carries every problem at once; its text is the rendered list."""

    outcome = Outcome.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(render_problems(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return (ConfigError, (self.problems,))


def render_problems(problems: Sequence[Problem]) -> str:
    """Render the problems for a terminal: place and message, the line with a caret, the hint."""
    return _PASSWORD.sub(lambda found: "*" * len(found[0]), "\n\n".join(_render(problem) for problem in problems))


def _render(problem: Problem) -> str:
    lines = [problem.message]
    if problem.place is not None:
        lines = [f"{problem.place}: {problem.message}", *_excerpt(problem.place)]
    if problem.hint:
        lines.append(f"  hint: {problem.hint}")
    return "\n".join(lines)


def _excerpt(place: SourceSpan) -> list[str]:
    """Return the line and the caret below it; a long line is cut around the place."""
    start = max(0, place.column - 1 - _WIDEST_LINE // 2) if len(place.text) > _WIDEST_LINE else 0
    shown = place.text[start : start + _WIDEST_LINE]
    before = place.column - 1 - start
    under = shown[before : before + max(1, place.length)]
    caret = " " * _cells(shown[:before]) + "^" * max(1, _cells(under))
    return [f"{place.line:>6} | {_printable(shown)}".rstrip(), f"{'':>6} | {caret}"]


def _printable(text: str) -> str:
    """Replace unprintable characters one for one: a file must not be able to control the terminal."""
    return "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in text)


def _cells(text: str) -> int:
    """Count the terminal columns of a text: East Asian wide characters take two, combining characters none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
