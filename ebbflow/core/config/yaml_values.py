"""YAML 1.2 parser that keeps source positions, and conversion of its nodes to the schema's types.

The parser is ruamel.yaml, because YAML 1.1 parsers read ``1e-3`` as text, ``012`` as ten, ``1:30``
as ninety and ``no`` as false. Each node keeps its start and end, so that errors can point at the
value.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, StringMark
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from ebbflow.core.config.problems import ConfigError, Problem, SourceSpan
from ebbflow.core.errors import InfraError, Outcome

Value = None | bool | int | float | str

_LINE_BREAK = re.compile("\r\n|[\n\r]")  # line breaks of YAML 1.2, as ruamel.yaml counts them
_TAG_PREFIX = "tag:yaml.org,2002:"
_CORE_KINDS = ("str", "seq", "map", "null", "bool", "int", "float", "timestamp", "merge", "value")
_CORE_TAGS = {_TAG_PREFIX + kind for kind in _CORE_KINDS}
_NON_FINITE = re.compile(r"[-+]?\.?(inf|nan|infinity)", re.IGNORECASE)
# .5e3 is a number in the standard, but text in ruamel.yaml
_FRACTION = re.compile(r"[-+]?\.[0-9]+[eE][-+]?[0-9]+")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_NUMBER_IN_TEXT = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_UNSPACED_KEY = re.compile(r"\s*([A-Za-z_]\w*:\S+)")
_GROUPED = re.compile(r"[-+]?[0-9]{1,3}(,[0-9]{3})+")
_YAML_1_1_BOOLS = {"yes": True, "on": True, "y": True, "no": False, "off": False, "n": False}
_BRACKETS = re.compile(r"[\[\]{}]")
_DEEPEST = 200  # nested brackets; no configuration has a tenth of them
_LARGEST = 10**15  # far above anything sensible, and exact as a float
_LARGEST_FLOAT = 1e30  # a learning rate that rehearses a loss that is not finite

_INDENT_ALIKE = "indent the keys of a section alike, two spaces deeper than its name"
_SPACE_AFTER_COLON = "write 'key: value', with a space after the colon"
_SYNTAX_HINTS = (
    ("found character '\\t'", "YAML indents with spaces; replace the tab"),
    ("found character '@'", "put the value in quotes"),
    ("found character '`'", "put the value in quotes"),
    (
        "mapping values are not allowed",
        "indent each key like its neighbours; quote a text that has ': ' in it",
    ),
    ("found unexpected end of stream", "a quote or bracket is not closed"),
    ("<stream end>", "a quote or bracket is not closed"),
    ("expected <block end>", _INDENT_ALIKE),
    ("could not find expected ':'", _SPACE_AFTER_COLON),
    ("found undefined alias", "put a text that begins with '*' in quotes"),
    ("found another document", "remove the '---' line: one file holds one configuration"),
)


@dataclass(frozen=True)
class SourceText:
    """A YAML text with its name, for showing the location of a problem in messages."""

    name: str  # name of the text in problems, such as the file's path
    text: str  # the YAML text
    first_column: int = 0  # number of characters shown before the text in its first line
    before: str = ""  # these characters, such as "model.num_heads=" of an override

    def span(self, start: StringMark, end: StringMark | None = None) -> SourceSpan:
        """Return the range from `start` to `end` on one line.

        The range ends with the line if `end` is None or on another line.
        """
        lines = _LINE_BREAK.split(self.text)
        if start.line < len(lines):
            line = lines[start.line]
        else:
            line = ""
        column = min(start.column, len(line))
        if end is not None and end.line == start.line:
            stop = end.column
        else:
            stop = len(line.rstrip())
        shift = 0
        before = ""
        if start.line == 0:
            shift = self.first_column
            before = self.before
        return SourceSpan(
            source=self.name,
            line=start.line + 1,
            column=column + shift + 1,
            length=max(1, stop - column),
            text=before + line,
        )

    def span_of(self, node: Node) -> SourceSpan:
        return self.span(node.start_mark, node.end_mark)

    def span_at(self, index: int) -> SourceSpan:
        """Return the location of the character at `index`, as a span of length 1."""
        lines = _LINE_BREAK.split(self.text[:index])
        mark = _mark(len(lines) - 1, len(lines[-1]))
        return self.span(mark, mark)


class MismatchError(InfraError, outcome=Outcome.CONFIG):
    """Error: a key does not accept a value. Callers put the key's name before the message.

    The message begins like "must be a whole number, not …".
    """

    def __init__(self, message: str, hint: str | None = None, node: Node | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.node = node  # the part of the value to point at; None: the whole value


@dataclass(frozen=True)
class Expected:
    """The values that a field accepts."""

    types: frozenset[type]  # accepted Python types
    choices: tuple[str, ...]  # accepted words
    nullable: bool  # whether null is accepted
    # Type of a list's items if they are sections; None if they are texts
    section: type[BaseModel] | None = None

    @classmethod
    def of(cls, annotation: Any) -> Expected:
        """Return the values that fit a type annotation such as ``int | Literal["auto"]``."""
        types = set()
        choices = []
        nullable = False
        section = None
        for part in _alternatives(annotation):
            if part is type(None):
                nullable = True
            elif get_origin(part) is Literal:
                choices += [str(choice) for choice in get_args(part)]
            else:
                types.add(get_origin(part) or part)
                section = next((item for item in get_args(part) if _is_section(item)), section)
        return cls(frozenset(types), tuple(choices), nullable, section)

    def __str__(self) -> str:
        names = {
            int: "a whole number",
            float: "a number",
            bool: "true or false",
            str: "text",
            list: "a list of texts",
        }
        if self.section:
            names |= {list: "a list of sections"}
        else:
            names |= {}
        if float in self.types:
            names |= {int: names[float]}
        else:
            names |= {}
        parts = list(dict.fromkeys(name for kind, name in names.items() if kind in self.types))
        if len(self.choices) > 1:
            parts.append("one of " + ", ".join(self.choices))
        else:
            parts += self.choices
        return " or ".join(parts + ["null"] * self.nullable)


def parse(source: SourceText) -> Node | None:
    """Parse one YAML document into a tree of nodes; return None if it is empty.

    Raises ConfigError.
    """
    yaml = YAML(typ="safe", pure=True, plug_ins=[])
    yaml.composer.warn_double_anchors = False
    try:
        _check_depth(source.text)
        return yaml.compose(source.text)
    except MarkedYAMLError as error:
        problem = _syntax_problem(source, error)
    except ReaderError as error:
        message = f"character U+{ord(source.text[error.position]):04X} is not allowed in YAML"
        problem = Problem(message=message, place=source.span_at(error.position), hint="remove it")
    except RecursionError:
        problem = Problem(message=f"{source.name}: nested too deeply to be a configuration")
    raise ConfigError([problem])


def is_empty(node: Node | None) -> bool:
    """Return whether a node has no content, as in an empty file or after ``model:`` with no value."""
    return node is None or (
        isinstance(node, ScalarNode) and node.style is None and node.value == ""
    )


def empty_node() -> ScalarNode:
    return ScalarNode(_TAG_PREFIX + "null", "", _mark(0, 0), _mark(0, 0))


def convert(node: Node, expected: Expected) -> Any:
    """Convert a node to a Python value.

    Raises MismatchError if `expected` does not include the value.
    """
    if node.tag not in _CORE_TAGS:
        tag = node.tag.replace(_TAG_PREFIX, "!!")  # such as !!python/name:os.system
        raise MismatchError(
            f"has the tag {tag}, which a configuration has no use for", "remove the tag"
        )
    if isinstance(node, SequenceNode):
        if list not in expected.types:
            hint = None
            if len(node.value) == 1 and isinstance(node.value[0], ScalarNode):
                hint = f"write {node.value[0].value}, without brackets"
            raise MismatchError(f"must be {expected}, not a list", hint)
        return [
            _convert_item(item, number, expected.section)
            for number, item in enumerate(node.value, start=1)
        ]
    if isinstance(node, MappingNode) and dict in expected.types:
        return _convert_texts(node)
    if isinstance(node, MappingNode):
        if str in expected.types:
            hint = "quote a text that has ': ' in it"
        else:
            hint = None
        raise MismatchError(f"must be {expected}, not a section", hint)
    assert isinstance(node, ScalarNode), "the third and last kind of node"
    return _convert_scalar(node, expected)


def describe_node(node: Node) -> str:
    """Describe a value for messages, such as "the number 3"."""
    if isinstance(node, ScalarNode):
        return _describe_value(_interpret(node))
    if isinstance(node, SequenceNode):
        return "a list"
    return "a section"


def closest_match(word: str, known: list[str] | tuple[str, ...]) -> str | None:
    """Return the known word most similar to `word`, ignoring case and dashes.

    Return None if no word is similar.
    """
    folded = {_fold(name): name for name in known}
    matches = difflib.get_close_matches(_fold(word), folded, n=1, cutoff=0.7)
    if matches:
        return folded[matches[0]]
    return None


def _check_depth(text: str) -> None:
    """Raise RecursionError if brackets are nested too deeply.

    The parser takes seconds to find that, since it looks back at each open bracket.
    """
    depth = 0
    for bracket in _BRACKETS.findall(text):
        depth += 1 if bracket in "[{" else -1
        if depth > _DEEPEST:
            raise RecursionError


def _mark(line: int, column: int) -> StringMark:
    return StringMark("", 0, line, column, None, None)


def _syntax_problem(source: SourceText, error: MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    cause = error.problem or "it cannot be parsed"
    hint = next((hint for sign, hint in _SYNTAX_HINTS if sign in cause), None)
    if mark is not None and hint in (_INDENT_ALIKE, _SPACE_AFTER_COLON):
        hint = _hint_on_line_before(source.text, mark.line) or hint
    if "found character '\\t'" in cause:
        cause = "a tab where YAML wants spaces"
    message = f"not valid YAML: {cause}" + (f" {error.context}" if error.context else "")
    if mark is None:
        return Problem(message=f"{source.name}: {message}", hint=hint)
    return Problem(message=message, place=source.span(mark, mark), hint=hint)


def _hint_on_line_before(text: str, line: int) -> str | None:
    """Return a hint if the preceding line causes the syntax error on line number `line` (from 0).

    The preceding line lacks a space after its colon, or has another indentation.
    """
    lines = _LINE_BREAK.split(text)
    before = max((number for number in range(line) if lines[number].strip()), default=None)
    if before is None:
        return None
    unspaced = _UNSPACED_KEY.match(lines[before])
    if unspaced:
        return f"line {before + 1} has no space after its colon: {unspaced[1]}"
    widths = [len(lines[number]) - len(lines[number].lstrip()) for number in (before, line)]
    if widths[0] != widths[1] and not lines[before].rstrip().endswith(":"):
        return (
            f"indent the keys of a section alike: line {before + 1} by {widths[0]} spaces, "
            f"line {line + 1} by {widths[1]}"
        )
    return None


def _convert_texts(node: MappingNode) -> dict[str, str]:
    """Convert a mapping whose values are all texts, such as a pool's labels."""
    texts: dict[str, str] = {}
    for name, value in node.value:
        if not isinstance(name, ScalarNode) or not isinstance(value, ScalarNode):
            raise MismatchError("must be names with texts, such as {pool: a}")
        if name.value in texts:
            raise MismatchError(f"has {name.value} twice")
        texts[name.value] = value.value
    return texts


def _convert_item(node: Node, number: int, section: type[BaseModel] | None) -> Any:
    try:
        if section is not None:
            return _convert_section(node, section)
        return convert(node, Expected(frozenset({str}), (), False))
    except MismatchError as mismatch:
        raise MismatchError(
            f"item {number} {mismatch.message}", mismatch.hint, mismatch.node or node
        ) from None


def _convert_section(node: Node, section: type[BaseModel]) -> dict[str, Any]:
    """Convert a list item, which must be a section, to a dict.

    Raises MismatchError for wrong or missing keys.
    """
    fields = section.model_fields
    known = _known_keys(section)
    if not isinstance(node, MappingNode):
        raise MismatchError(
            f"must be a section of 'key: value' lines, not {describe_node(node)}", known
        )
    values: dict[str, Any] = {}
    for key, value in node.value:
        if isinstance(key, ScalarNode):
            name = key.value
        else:
            name = ""
        if name not in fields:
            close = closest_match(name, list(fields))
            raise MismatchError(
                f"has an unknown key {name!r}", f"did you mean {close}?" if close else known, key
            )
        if name in values:
            raise MismatchError(f"gives {name} twice", "keep one of the two", key)
        try:
            values[name] = convert(value, Expected.of(fields[name].annotation))
        except MismatchError as mismatch:
            raise MismatchError(
                f"{name} {mismatch.message}", mismatch.hint, mismatch.node or value
            ) from None
    missing = [name for name, field in fields.items() if field.is_required() and name not in values]
    if missing:
        raise MismatchError(f"lacks {' and '.join(missing)}", known)
    return values


def _convert_scalar(node: ScalarNode, expected: Expected) -> Any:
    text = node.value
    types = expected.types
    value = _interpret(node)
    if isinstance(value, str):
        return _convert_text(node, text, expected)
    if value is None:
        if expected.nullable:
            return None
        raise MismatchError(
            f"has no value; it must be {expected}", "remove the line for the default"
        )
    if isinstance(value, bool):
        if bool in types:
            return value
    elif isinstance(value, int):
        if types & {int, float}:
            return _check_integer(value, types)
    elif float in types:
        return _check_float(value, text)
    hint = None
    if isinstance(value, float) and int in types and value.is_integer() and abs(value) <= _LARGEST:
        hint = f"write {int(value)}"
    if str in types:
        hint = f'put it in quotes: "{text}"'
    raise MismatchError(f"must be {expected}, not {_describe_value(value)}", hint)


def _check_integer(value: int, types: Collection[type]) -> int | float:
    if abs(value) > _LARGEST:
        raise MismatchError(f"is too large: more than {_LARGEST:.0e}")
    if int in types:
        return value
    return float(value)


def _check_float(value: float, text: str) -> float:
    if not math.isfinite(value):
        raise MismatchError(f"must be a finite number, not {text}")
    if abs(value) > _LARGEST_FLOAT:
        raise MismatchError(f"is too large: more than {_LARGEST_FLOAT:.0e}")
    return value


def _convert_text(node: ScalarNode, text: str, expected: Expected) -> Any:
    types = expected.types
    plain = node.style is None
    if text in expected.choices or str in types:
        return text
    if bool in types and plain and text.lower() in _YAML_1_1_BOOLS:
        return _YAML_1_1_BOOLS[text.lower()]
    if float in types and _NON_FINITE.fullmatch(text):
        raise MismatchError(f"must be a finite number, not {text}")
    if plain and types & {int, float} and _LEADING_ZERO.fullmatch(text):
        given = text
    else:
        given = f"the text {_quoted(text)}"
    raise MismatchError(f"must be {expected}, not {given}", _text_hint(text, expected, plain))


def _text_hint(text: str, expected: Expected, plain: bool) -> str | None:  # noqa: PLR0911 - one return for each mistake, in the order of their precedence
    numeric = bool(expected.types & {int, float})
    if not plain and (numeric or bool in expected.types) and _is_value_unquoted(text):
        return f"remove the quotes: {text}"
    if numeric and _LEADING_ZERO.fullmatch(text):
        return (
            f"write {text.lstrip('+').replace('_', '').lstrip('0') or '0'}: a leading zero may "
            "mean an octal number"
        )
    if numeric and _GROUPED.fullmatch(text):
        return f"write {text.replace(',', '')}"
    if list in expected.types:
        if expected.section is None:
            return f"write [{text}]"
        return _known_keys(expected.section)
    close = closest_match(text, expected.choices)
    if close:
        return f"did you mean {close}?"
    numbers = _NUMBER_IN_TEXT.findall(text)
    if numeric and len(numbers) == 1:
        return f"write {numbers[0]}"
    if expected.types == {bool}:
        return "write true or false"
    return None


def _is_value_unquoted(text: str) -> bool:
    try:
        node = parse(SourceText("", text))
    except ConfigError:
        return False
    return isinstance(node, ScalarNode) and not isinstance(_interpret(node), str)


def _interpret(node: ScalarNode) -> Value:
    """Convert a scalar by the core schema of YAML 1.2, but keep a number with a leading zero as
    text.
    """
    text = node.value
    kind = node.tag.removeprefix(_TAG_PREFIX)
    if node.style is not None:
        return text
    if kind == "null":
        return None
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    digits = text.replace("_", "").lower()
    try:
        if kind == "int" and not _LEADING_ZERO.fullmatch(text):
            return int(digits[:1000], 0)  # Python rejects thousands of digits
        if kind == "float" or _FRACTION.fullmatch(text):
            return float(re.sub(r"\.(?=inf|nan)", "", digits))
    except ValueError:
        pass
    return text


def _describe_value(value: Value) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {_quoted(value)}"
    return f"the number {value}"


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "…")


def _alternatives(annotation: Any) -> list[Any]:
    """List the members of a union type, without `Annotated` metadata.

    Any other type yields a list of only that type.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return _alternatives(get_args(annotation)[0])
    if origin in (Union, UnionType):
        alternatives = []
        for member in get_args(annotation):
            alternatives.extend(_alternatives(member))
        return alternatives
    return [annotation]


def _known_keys(section: type[BaseModel]) -> str:
    return f"known keys: {', '.join(section.model_fields)}"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _fold(word: str) -> str:
    return word.strip().lower().replace("-", "_").replace(" ", "_")
