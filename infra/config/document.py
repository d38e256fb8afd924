"""YAML as a tree in which every value still knows its place. Nothing is converted here, nothing is constructed."""

from __future__ import annotations

import re
from dataclasses import dataclass

import yaml

from ebbflow.infra.config.problems import Place, Problem

_LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")  # what PyYAML counts as one
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}

_SYNTAX_HINTS = (
    ("found character '\\t'", "YAML indents with spaces; replace the tab"),
    ("found character '@'", "put the value in quotes"),
    ("found character '`'", "put the value in quotes"),
    ("mapping values are not allowed", "indent each key like its neighbours; quote a text that has ': ' in it"),
    ("found unexpected end of stream", "a quote or bracket is not closed"),
    ("<stream end>", "a quote or bracket is not closed"),
    ("expected <block end>", "indent the keys of a section alike, two spaces deeper than its name"),
    ("could not find expected ':'", "write 'key: value', with a space after the colon"),
    ("found undefined alias", "put a text that begins with '*' in quotes"),
    ("expected a single document", "remove the '---' line: one file holds one configuration"),
)


@dataclass(frozen=True)
class SourceText:
    """A text that was read, and the name under which problems in it are reported."""

    name: str
    text: str
    first_column: int = 0  # characters that stand before the text in the line that is shown
    before: str = ""

    def place(self, start: yaml.Mark, end: yaml.Mark | None = None) -> Place:
        """From one mark to another, or to the end of the line where the other is on a later one."""
        lines = _LINE_BREAK.split(self.text)
        line = lines[start.line] if start.line < len(lines) else ""
        column = min(start.column, len(line))
        stop = end.column if end is not None and end.line == start.line else len(line.rstrip())
        shift, before = (self.first_column, self.before) if start.line == 0 else (0, "")
        return Place(
            source=self.name,
            line=start.line + 1,
            column=column + shift + 1,
            length=max(1, stop - column),
            text=before + line,
        )

    def place_at(self, index: int) -> Place:
        """The character at a position of the text."""
        lines = _LINE_BREAK.split(self.text[:index])
        mark = yaml.Mark(self.name, index, len(lines) - 1, len(lines[-1]), None, None)
        end = yaml.Mark(self.name, index + 1, mark.line, mark.column + 1, None, None)
        return self.place(mark, end)


def parse(source: SourceText) -> tuple[yaml.Node | None, list[Problem]]:
    """The node graph of one YAML document; None for an empty one, or with the problem that prevents it."""
    try:
        node = yaml.compose(source.text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_problem(source, error)]
    except yaml.reader.ReaderError as error:
        place = source.place_at(error.position)
        message = f"character U+{ord(source.text[error.position]):04X} is not allowed in YAML"
        return None, [Problem(message=message, place=place, hint="remove it")]
    except RecursionError:
        return None, [Problem(message=f"{source.name}: nested too deeply to be a configuration")]
    return node, []


def is_empty(node: yaml.Node | None) -> bool:
    """Nothing was written: ``model:`` with no value, or an empty file."""
    return node is None or (isinstance(node, yaml.ScalarNode) and node.style is None and node.value == "")


def foreign_tag(node: yaml.Node) -> str | None:
    """An explicit tag such as ``!!python/name:os.system``, which a configuration has no use for."""
    return None if node.tag in _PLAIN_TAGS else node.tag.replace("tag:yaml.org,2002:", "!!")


def _syntax_problem(source: SourceText, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    what = error.problem or "it cannot be parsed"
    hint = next((hint for sign, hint in _SYNTAX_HINTS if sign in what), None)
    if "found character '\\t'" in what:
        what = "a tab where YAML wants spaces"
    message = f"not valid YAML: {what}" + (f" {error.context}" if error.context else "")
    if mark is None:
        return Problem(message=f"{source.name}: {message}", hint=hint)
    one = yaml.Mark(source.name, mark.index, mark.line, mark.column + 1, None, None)
    return Problem(message=message, place=source.place(mark, one), hint=hint)
