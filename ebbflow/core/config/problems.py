"""Problems of a configuration, with location, message and hint, rendered for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.json_values import JsonObject

_WIDEST_LINE = 160
_PASSWORD = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # password in a URL: terminals are recorded


@dataclass(frozen=True, kw_only=True)
class SourceSpan:
    """A range of characters in one line of a configuration's source."""

    source: str  # name of the source, such as a file's path or "--set model.num_heads=8"
    line: int  # number of the line, counted from 1
    column: int  # position of the first character in the line, counted from 1
    length: int  # number of characters
    text: str  # the whole line

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One error in a configuration."""

    message: str  # what is wrong
    key: str = ""  # dotted key ("model.hidden_size"); "" for the file as a whole
    place: SourceSpan | None = None  # location of the error, if there is one
    hint: str | None = None  # how to fix it

    def __str__(self) -> str:
        return render_problems([self])

    def to_json(self) -> JsonObject:
        return asdict(self)


class ConfigError(InfraError, outcome=Outcome.CONFIG):
    """Error: the configuration cannot be used.

    `problems` contains every problem; the error's text is the rendered list.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(render_problems(self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[Problem]]]:
        return (ConfigError, (self.problems,))


def render_problems(problems: Sequence[Problem]) -> str:
    """Render problems for a terminal: location and message, the source line with carets under the
    error, the hint.
    """
    return _PASSWORD.sub(
        lambda found: "*" * len(found[0]), "\n\n".join(_render(problem) for problem in problems)
    )


def _render(problem: Problem) -> str:
    lines = [problem.message]
    if problem.place is not None:
        lines = [f"{problem.place}: {problem.message}", *_excerpt(problem.place)]
    if problem.hint:
        lines.append(f"  hint: {problem.hint}")
    return "\n".join(lines)


def _excerpt(place: SourceSpan) -> list[str]:
    """Return the source line and a line of carets under the error.

    A line of more than 160 characters is shortened around the error.
    """
    if len(place.text) > _WIDEST_LINE:
        start = max(0, place.column - 1 - _WIDEST_LINE // 2)
    else:
        start = 0
    shown = place.text[start : start + _WIDEST_LINE]
    before = place.column - 1 - start
    under = shown[before : before + max(1, place.length)]
    caret = " " * _cells(shown[:before]) + "^" * max(1, _cells(under))
    # A file must not be able to control the terminal.
    safe = "".join(char if char.isprintable() else "?" for char in shown.replace("\t", " "))
    return [f"{place.line:>6} | {safe}".rstrip(), f"{'':>6} | {caret}"]


def _cells(text: str) -> int:
    """Return the width of a text in terminal columns: 2 for East Asian wide characters, 0 for
    combining characters.
    """
    cells = 0
    for char in text:
        if unicodedata.combining(char):
            continue
        cells += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return cells
