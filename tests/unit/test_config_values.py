"""Values of a configuration: how YAML scalars, lists and sections become typed values, and the
place of each error.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from ruamel.yaml.nodes import MappingNode, SequenceNode

from ebbflow.core.config import ConfigError
from ebbflow.core.config.rule_base import Rule, Violation
from ebbflow.core.config.yaml_values import (
    Expected,
    MismatchError,
    SourceText,
    closest_match,
    convert,
    describe_node,
    empty_node,
    is_empty,
    parse,
)

LARGEST = 10**15

NO_VALUE = "remove the line for the default"
KNOWN = "known keys: name, count, kind"
OCTAL = "a leading zero may mean an octal number"

QUOTE = "put the value in quotes"
NOT_CLOSED = "a quote or bracket is not closed"


class Item(BaseModel):
    name: str
    count: int = 1
    kind: Literal["small", "large"] | None = None


KINDS: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "list": list[str],
    "mode": Literal["ddp", "fsdp2"],
    "auto": Annotated[int, Field(ge=1)] | Literal["auto"],
    "optional": float | None,
    "option": bool | int | float | str,
    "items": list[Item],
}


def read(kind: str, text: str) -> Any:
    node = parse(SourceText("x", text))
    assert node is not None
    return convert(node, Expected.of(KINDS[kind]))


@pytest.mark.parametrize(
    ("kind", "described"),
    [
        ("int", "a whole number"),
        ("float", "a number"),
        ("bool", "true or false"),
        ("str", "text"),
        ("list", "a list of texts"),
        ("mode", "one of ddp, fsdp2"),
        ("auto", "a whole number or auto"),
        ("optional", "a number or null"),
        ("option", "a number or true or false or text"),
        ("items", "a list of sections"),
    ],
)
def test_the_values_of_a_type_are_described_in_words(kind: str, described: str) -> None:
    assert str(Expected.of(KINDS[kind])) == described


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "3", 3),
        ("int", "-3", -3),
        ("int", "+3", 3),
        ("int", "0", 0),
        ("int", "1_000", 1000),
        ("int", "0x1F", 31),
        ("int", "0o17", 15),
        ("int", str(LARGEST), LARGEST),
        ("int", str(-LARGEST), -LARGEST),
        ("float", "3", 3.0),
        ("float", "1e3", 1000.0),
        ("float", "1_0.5", 10.5),
        ("float", ".5e3", 500.0),
        ("float", "-.5E-3", -0.0005),
        ("float", "+.5e+3", 500.0),
        ("float", "2e15", 2e15),
        ("float", "1e30", 1e30),
        ("float", "-1e30", -1e30),
        ("bool", "true", True),
        ("bool", "FALSE", False),
        *(("bool", text, True) for text in ("yes", "On", "y")),
        *(("bool", text, False) for text in ("no", "OFF", "n")),
        ("bool", "%YAML 1.1\n---\nyes", True),
        ("str", "auto", "auto"),
        ("str", "yes", "yes"),
        ("str", "012", "012"),
        ("str", "2024-01-01", "2024-01-01"),
        ("str", "inf", "inf"),
        ("str", "''", ""),
        ("str", "!!str 3", "3"),
        ("str", "=", "="),
        ("str", "<<", "<<"),
        ("list", "[a, 'b', c d]", ["a", "b", "c d"]),
        ("list", "[]", []),
        ("mode", "fsdp2", "fsdp2"),
        ("mode", "'ddp'", "ddp"),
        ("auto", "auto", "auto"),
        ("auto", "2", 2),
        ("optional", "null", None),
        ("optional", "~", None),
        ("optional", "2", 2.0),
        ("option", "2", 2),
        ("option", "2.0", 2.0),
        ("option", "true", True),
        ("option", "'2'", "2"),
        ("option", "012", "012"),
        (
            "items",
            "[{name: a}, {name: b, count: 3, kind: null}]",
            [{"name": "a"}, {"name": "b", "count": 3, "kind": None}],
        ),
    ],
)
def test_a_scalar_is_read_as_the_type_that_is_expected(kind: str, text: str, value: Any) -> None:
    assert read(kind, text) == value
    assert type(read(kind, text)) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message", "hint"),
    [
        ("int", "012", "must be a whole number, not 012", f"write 12: {OCTAL}"),
        ("int", "'012'", "must be a whole number, not the text '012'", f"write 12: {OCTAL}"),
        ("int", "00", "must be a whole number, not 00", f"write 0: {OCTAL}"),
        ("int", "+0_1", "must be a whole number, not +0_1", f"write 1: {OCTAL}"),
        ("float", "012", "must be a number, not 012", f"write 12: {OCTAL}"),
        ("bool", "012", "must be true or false, not the text '012'", "write true or false"),
        ("int", "1e3", "must be a whole number, not the number 1000.0", "write 1000"),
        (
            "int",
            "1e15",
            "must be a whole number, not the number 1000000000000000.0",
            f"write {LARGEST}",
        ),
        ("int", "2e15", "must be a whole number, not the number 2000000000000000.0", None),
        ("int", "1.5", "must be a whole number, not the number 1.5", None),
        ("bool", "1.0", "must be true or false, not the number 1.0", None),
        ("int", str(LARGEST + 1), "is too large: more than 1e+15", None),
        ("int", str(-LARGEST - 1), "is too large: more than 1e+15", None),
        ("float", str(LARGEST + 1), "is too large: more than 1e+15", None),
        ("int", "9" * 5000, "is too large: more than 1e+15", None),
        ("float", "1.1e30", "is too large: more than 1e+30", None),
        ("float", "-1.1e30", "is too large: more than 1e+30", None),
        ("float", ".inf", "must be a finite number, not .inf", None),
        ("float", "-.INF", "must be a finite number, not -.INF", None),
        ("float", ".nan", "must be a finite number, not .nan", None),
        ("float", "nan", "must be a finite number, not nan", None),
        ("float", "-Infinity", "must be a finite number, not -Infinity", None),
        ("int", "nan", "must be a whole number, not the text 'nan'", None),
        ("int", ".inf", "must be a whole number, not the number inf", None),
        ("int", "true", "must be a whole number, not true", None),
        ("float", "TRUE", "must be a number, not true", None),
        ("int", "yes", "must be a whole number, not the text 'yes'", None),
        ("bool", "'yes'", "must be true or false, not the text 'yes'", "write true or false"),
        ("bool", "'true'", "must be true or false, not the text 'true'", "remove the quotes: true"),
        ("bool", "3", "must be true or false, not the number 3", None),
        ("int", "'3'", "must be a whole number, not the text '3'", "remove the quotes: 3"),
        ("float", '"2.5"', "must be a number, not the text '2.5'", "remove the quotes: 2.5"),
        ("mode", "'3'", "must be one of ddp, fsdp2, not the text '3'", None),
        ("int", "'a: ['", "must be a whole number, not the text 'a: ['", None),
        ("int", "'[1]'", "must be a whole number, not the text '[1]'", "write 1"),
        ("int", "'x'", "must be a whole number, not the text 'x'", None),
        ("int", "!!str 3", "must be a whole number, not the text '3'", "write 3"),
        ("int", "1,000,000", "must be a whole number, not the text '1,000,000'", "write 1000000"),
        ("bool", "1,000", "must be true or false, not the text '1,000'", "write true or false"),
        ("bool", "tRUE", "must be true or false, not the text 'tRUE'", "write true or false"),
        ("int", "1,00", "must be a whole number, not the text '1,00'", None),
        ("str", "3", "must be text, not the number 3", 'put it in quotes: "3"'),
        ("str", "true", "must be text, not true", 'put it in quotes: "true"'),
        ("str", "1.50", "must be text, not the number 1.5", 'put it in quotes: "1.50"'),
        ("int", "null", "has no value; it must be a whole number", NO_VALUE),
        ("str", "", "has no value; it must be text", NO_VALUE),
        ("list", "a", "must be a list of texts, not the text 'a'", "write [a]"),
        ("items", "a", "must be a list of sections, not the text 'a'", KNOWN),
        ("int", "[1]", "must be a whole number, not a list", "write 1, without brackets"),
        ("int", "{a: 1}", "must be a whole number, not a section", None),
        ("str", "{a: 1}", "must be text, not a section", "quote a text that has ': ' in it"),
        (
            "mode",
            "FSDP_2",
            "must be one of ddp, fsdp2, not the text 'FSDP_2'",
            "did you mean fsdp2?",
        ),
        ("mode", "zero", "must be one of ddp, fsdp2, not the text 'zero'", None),
        (
            "auto",
            "Auto",
            "must be a whole number or auto, not the text 'Auto'",
            "did you mean auto?",
        ),
        ("int", "x" * 60, f"must be a whole number, not the text '{'x' * 60}'", None),
        ("int", "x" * 61, f"must be a whole number, not the text '{'x' * 57}…'", None),
        (
            "int",
            "!mine 3",
            "has the tag !mine, which a configuration has no use for",
            "remove the tag",
        ),
        (
            "str",
            "!!binary aGk=",
            "has the tag !!binary, which a configuration has no use for",
            "remove the tag",
        ),
        ("list", "[a, 3]", "item 2 must be text, not the number 3", 'put it in quotes: "3"'),
        ("list", "[[a]]", "item 1 must be text, not a list", "write a, without brackets"),
        ("list", "[~]", "item 1 has no value; it must be text", NO_VALUE),
        (
            "items",
            "[{name: a}, b]",
            "item 2 must be a section of 'key: value' lines, not the text 'b'",
            KNOWN,
        ),
        ("items", "[[a]]", "item 1 must be a section of 'key: value' lines, not a list", KNOWN),
        ("items", "[{nam: a}]", "item 1 has an unknown key 'nam'", "did you mean name?"),
        ("items", "[{name: a, zzz: b}]", "item 1 has an unknown key 'zzz'", KNOWN),
        ("items", "[{[a]: b}]", "item 1 has an unknown key ''", KNOWN),
        ("items", "[{name: a, name: b}]", "item 1 gives name twice", "keep one of the two"),
        ("items", "[{count: 1}]", "item 1 lacks name", KNOWN),
        (
            "items",
            "[{name: a, count: x}]",
            "item 1 count must be a whole number, not the text 'x'",
            None,
        ),
        (
            "items",
            "[{name: a, count: '3'}]",
            "item 1 count must be a whole number, not the text '3'",
            "remove the quotes: 3",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_fix(
    kind: str, text: str, message: str, hint: str | None
) -> None:
    with pytest.raises(MismatchError) as caught:
        convert(parse(SourceText("x", text)) or empty_node(), Expected.of(KINDS[kind]))
    assert (caught.value.message, str(caught.value), caught.value.hint) == (message, message, hint)


@pytest.mark.parametrize(
    ("kind", "text", "part"),
    [
        ("list", "[a, 3]", "3"),
        ("items", "[{name: a}, b]", "b"),
        ("items", "[{name: a, nam: b}]", "nam"),
        ("items", "[{name: a, count: many}]", "many"),
        ("items", "[{count: 1}]", "{count: 1}"),
        ("int", "many", None),
    ],
)
def test_a_mismatch_points_at_the_wrong_part(kind: str, text: str, part: str | None) -> None:
    source = SourceText("x", text)
    with pytest.raises(MismatchError) as caught:
        read(kind, text)
    node = caught.value.node
    if part is None:
        assert node is None
    else:
        assert node is not None
        span = source.span_of(node)
        assert text[span.column - 1 : span.column - 1 + span.length] == part


@pytest.mark.parametrize(
    ("text", "described"),
    [
        ("3", "the number 3"),
        ("2.50", "the number 2.5"),
        ("True", "true"),
        ("null", "nothing"),
        ("a b", "the text 'a b'"),
        ("'3'", "the text '3'"),
        ("[a]", "a list"),
        ("{a: 1}", "a section"),
    ],
)
def test_a_node_is_described_by_its_value(text: str, described: str) -> None:
    node = parse(SourceText("x", text))
    assert node is not None
    assert describe_node(node) == described


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("hiden-size", "hidden_size"),
        ("HIDDEN SIZE", "hidden_size"),
        (" num_heads ", "num_heads"),
        ("heads", "num_heads"),  # 2 × 5 / (5 + 9) = 0.714
        ("head", None),  # 2 × 4 / (4 + 9) = 0.615
        ("", None),
    ],
)
def test_the_closest_match_ignores_case_dashes_and_spaces(word: str, match: str | None) -> None:
    assert closest_match(word, ["hidden_size", "num_heads"]) == match


def test_an_empty_node_has_no_content() -> None:
    nothing = parse(SourceText("x", "a:"))
    assert isinstance(nothing, MappingNode)
    assert is_empty(None)
    assert is_empty(nothing.value[0][1])
    assert is_empty(empty_node())
    for text in ("''", "null", "a", "[]", "{}"):
        assert not is_empty(parse(SourceText("x", text))), text
    for mark in (empty_node().start_mark, empty_node().end_mark):
        assert (mark.line, mark.column) == (0, 0)
    assert convert(empty_node(), Expected.of(int | None)) is None


# Places


def test_a_span_has_the_line_the_column_and_the_length_of_a_value() -> None:
    source = SourceText("f.yaml", "a: 12\nbb:   [c,\n  d]\n", first_column=4, before="k.x=")
    node = parse(source)
    assert isinstance(node, MappingNode)
    (_, twelve), (_, letters) = node.value
    first = source.span_of(twelve)
    assert (first.source, first.line, first.column, first.length, first.text) == (
        "f.yaml",
        1,
        8,
        2,
        "k.x=a: 12",
    )
    assert isinstance(letters, SequenceNode)
    whole = source.span_of(letters)  # ends on another line: to the end of its first line
    assert (whole.line, whole.column, whole.length, whole.text) == (2, 7, 3, "bb:   [c,")
    last = source.span_of(letters.value[1])
    assert (last.line, last.column, last.length, last.text) == (3, 3, 1, "  d]")


def test_a_span_without_an_end_reaches_the_last_character_of_its_line() -> None:
    source = SourceText("f", "a: b  c   \nd: e")
    node = parse(source)
    assert isinstance(node, MappingNode)
    value = node.value[0][1]
    span = source.span(value.start_mark)
    assert (span.line, span.column, span.length, span.text) == (1, 4, 4, "a: b  c   ")
    # An empty value begins behind the last line, and has the length of one character.
    end = source.span(node.end_mark, node.end_mark)
    assert (end.line, end.column, end.length, end.text) == (2, 5, 1, "d: e")


def test_a_span_behind_the_text_is_an_empty_line() -> None:
    node = parse(SourceText("f", "a:\n  - b\n  - c\n"))
    assert isinstance(node, MappingNode)
    for number, entry in enumerate(node.value[0][1].value, start=2):
        span = SourceText("f", "a:").span(entry.start_mark)
        assert (span.line, span.column, span.length, span.text) == (number, 1, 1, "")


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_lines_are_counted_at_each_line_break_of_yaml(line_break: str) -> None:
    text = f"a: 'x{line_break}y'{line_break}b: 23"
    source = SourceText("f", text)
    node = parse(source)
    assert isinstance(node, MappingNode)
    for span in (source.span_of(node.value[1][1]), source.span_at(text.index("23"))):
        assert (span.line, span.column, span.text) == (3, 4, "b: 23")
    assert source.span_at(text.index("23")).length == 1


@pytest.mark.parametrize("separator", ["\x85", "\u2028", "\u2029"])
def test_a_separator_of_unicode_is_no_line_break_of_a_place(separator: str) -> None:
    text = f"a: 'x{separator}y'\nb: 23"
    source = SourceText("f", text)
    node = parse(source)
    assert isinstance(node, MappingNode)
    for span in (source.span_of(node.value[1][1]), source.span_at(text.index("23"))):
        assert (span.line, span.column, span.text) == (2, 4, "b: 23")


@pytest.mark.parametrize(
    ("text", "message", "place", "hint"),
    [
        (
            "a: @x",
            "found character '@' that cannot start any token while scanning for the next token",
            "f:1:4",
            QUOTE,
        ),
        (
            "a: `x",
            "found character '`' that cannot start any token while scanning for the next token",
            "f:1:4",
            QUOTE,
        ),
        (
            "a: b: c",
            "mapping values are not allowed here",
            "f:1:5",
            "indent each key like its neighbours; quote a text that has ': ' in it",
        ),
        (
            'a: "x',
            "found unexpected end of stream while scanning a quoted scalar",
            "f:1:6",
            NOT_CLOSED,
        ),
        (
            "a: [1",
            "expected ',' or ']', but got '<stream end>' while parsing a flow sequence",
            "f:1:6",
            NOT_CLOSED,
        ),
        (
            "a:\n  b: 1\n c: 2",
            "expected <block end>, but found '<block mapping start>' while parsing a block mapping",
            "f:3:2",
            "indent the keys of a section alike: line 2 by 2 spaces, line 3 by 1",
        ),
        (
            "a:\n  b:1  # one\n  c: 2",
            "expected <block end>, but found '<block mapping start>' while parsing a block mapping",
            "f:3:3",
            "line 2 has no space after its colon: b:1",
        ),
        (
            "a:\n  b: 1\n  c:1\n  d: 2",
            "could not find expected ':' while scanning a simple key",
            "f:4:3",
            "line 3 has no space after its colon: c:1",
        ),
        (
            "a: 1\nb\nc: 2",
            "could not find expected ':' while scanning a simple key",
            "f:3:1",
            "write 'key: value', with a space after the colon",
        ),
        (
            "a: *x",
            "found undefined alias 'x'",
            "f:1:4",
            "put a text that begins with '*' in quotes",
        ),
        (
            "a: 1\n---\nb: 2",
            "but found another document expected a single document in the stream",
            "f:2:1",
            "remove the '---' line: one file holds one configuration",
        ),
        (
            "a:\n\tb: 1",
            "a tab where YAML wants spaces while scanning for the next token",
            "f:2:1",
            "YAML indents with spaces; replace the tab",
        ),
        ("a: !<x", "expected '>' but found '\\x00' while parsing a tag", "f:1:7", None),
    ],
)
def test_wrong_syntax_is_shown_where_it_is_with_its_fix(
    text: str, message: str, place: str, hint: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SourceText("f", text))
    (problem,) = caught.value.problems
    assert (problem.message, str(problem.place), problem.hint) == (
        f"not valid YAML: {message}",
        place,
        hint,
    )
    assert problem.place is not None
    assert problem.place.length == 1


def test_a_character_that_yaml_forbids_is_shown_by_its_code() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SourceText("f", "a: 1\nb: x\x02y"))
    (problem,) = caught.value.problems
    assert (problem.message, problem.hint) == (
        "character U+0002 is not allowed in YAML",
        "remove it",
    )
    assert str(problem.place) == "f:2:5"


def test_deep_nesting_is_a_problem_without_a_place() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(SourceText("f", "[" * 600))
    (problem,) = caught.value.problems
    assert (problem.message, problem.place) == ("f: nested too deeply to be a configuration", None)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 5000, "a: " + "[" * 9000 + "]" * 9000])
def test_nested_brackets_are_refused_in_under_a_second_of_work(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse(SourceText("f", text))
    assert time.process_time() - began < 1.0


def test_brackets_one_after_the_other_are_no_nesting() -> None:
    assert parse(SourceText("f", "a: [" + "[1], " * 1000 + "[2]]")) is not None


def test_an_anchor_that_is_used_twice_is_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        node = parse(SourceText("f", "a: &x 1\nb: &x 2\nc: *x"))
    assert isinstance(node, MappingNode)
    assert [value.value for _, value in node.value] == ["1", "2", "2"]


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (SourceText("f", "a"), "text"),
        (Expected(frozenset({int}), (), False), "nullable"),
        (Rule((), lambda config: None), "keys"),
        (Violation(keys=(), message="m"), "message"),
    ],
)
def test_rules_and_sources_cannot_be_changed(value: Any, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, getattr(value, field))
    assert hash(value) == hash(dataclasses.replace(value))


def test_a_violation_is_made_by_names_only() -> None:
    with pytest.raises(TypeError):
        Violation(("store",), "message")  # type: ignore[misc]
    assert Violation(keys=("store",), message="m").hint is None
