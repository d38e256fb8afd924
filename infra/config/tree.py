"""The keys of the schema, and which of them a document gives: unknown and duplicate keys are found here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.config.document import SourceText, is_empty
from infra.config.problems import Place, Problem
from infra.config.scalars import describe, nearest
from infra.config.schema import RunConfig

Origin = Literal["file", "set"]


@dataclass(frozen=True)
class Entry:
    """A leaf of the configuration as somebody gave it: the node of its value, where it stands, who says so."""

    key: str
    node: yaml.Node
    place: Place
    origin: Origin


@cache
def leaves() -> dict[str, FieldInfo]:
    """Every dotted key that holds a value, in the schema's order."""
    return dict(_walk(RunConfig, ""))


@cache
def sections() -> dict[str, type[BaseModel]]:
    """Every section by its dotted name; "" is the whole."""
    found: dict[str, type[BaseModel]] = {"": RunConfig}
    pending = [("", RunConfig)]
    while pending:
        prefix, model = pending.pop()
        for name, field in model.model_fields.items():
            if _is_section(field):
                found[prefix + name] = field.annotation
                pending.append((f"{prefix}{name}.", field.annotation))
    return found


def collect(
    node: yaml.Node | None, section: str, source: SourceText, origin: Origin, at: Place | None = None
) -> tuple[dict[str, Entry], list[Problem]]:
    """The leaves that a node gives for a section. at: where to point when the node is no section at all."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    if node is None or is_empty(node):
        return entries, problems
    if not isinstance(node, yaml.MappingNode):
        what = section or source.name
        message = f"{what} must be a section of 'key: value' lines, not {describe(node)}"
        place = at or source.place(node.start_mark, node.end_mark)
        hint = f"known keys: {', '.join(sections()[section].model_fields)}"
        return entries, [Problem(message=message, key=section, place=place, hint=hint)]
    first: dict[str, Place] = {}
    for key_node, value in node.value:
        key_place = source.place(key_node.start_mark, key_node.end_mark)
        name = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        key = f"{section}.{name}" if section else name
        if name is None:
            problems.append(Problem(message="a key must be a name", key=section, place=key_place))
            continue
        if name in first:
            problems.append(_duplicate(key, key_place, first[name]))
        first.setdefault(name, key_place)
        if key in sections() and name and "." not in name:
            found, worse = collect(value, key, source, origin)
            entries |= found
            problems += worse
        elif key in leaves() and "." not in name:
            empty = value.start_mark.index == value.end_mark.index
            place = key_place if empty else source.place(value.start_mark, value.end_mark)
            entries[key] = Entry(key, value, place, origin)
        else:
            problems.append(unknown_key(key, key_place))
    return entries, problems


def unknown_key(key: str, place: Place) -> Problem:
    """A key that the schema does not have, with the one that was probably meant."""
    shown = key if key.isprintable() and len(key) <= 80 else repr(key[:80])
    return Problem(message=f"unknown key {shown}", key=key, place=place, hint=_meant(key))


def _meant(key: str) -> str:
    """The closest sibling, or the place where a key of that name belongs, or what there is to choose from."""
    known = [*leaves(), *(section for section in sections() if section)]
    if key in known:  # only the nesting is wrong: `model.hidden_size: 64` as one key of the file
        parent, _, leaf = key.rpartition(".")
        return f"write {leaf} on a line of its own in the section {parent}"
    section, _, name = key.rpartition(".")
    while section not in sections():  # of `modle.hidden_size`, as an override gives it, only `modle` is wrong
        section, _, name = section.rpartition(".")
    siblings = list(sections()[section].model_fields)
    prefix = f"{section}." if section else ""
    sibling = nearest(name, siblings)
    mended = f"{prefix}{sibling}{key[len(prefix + name) :]}"
    if sibling and mended.count(".") > prefix.count(".") and mended in known:
        return f"did you mean {mended}?"
    wanted = key.rpartition(".")[2]
    elsewhere = [other for other in known if other.rpartition(".")[2] == wanted]
    if elsewhere:
        return "it belongs to " + " or to ".join(f"{_parent(other)}: {other}" for other in elsewhere)
    if sibling:
        return f"did you mean {prefix}{sibling}?"
    leaf = nearest(wanted, sorted({other.rpartition(".")[2] for other in known}))
    if leaf:
        return "did you mean " + " or ".join(other for other in known if other.rpartition(".")[2] == leaf) + "?"
    return f"known keys{' of ' + section if section else ''}: {', '.join(siblings)}"


def _parent(key: str) -> str:
    return key.rpartition(".")[0] or "the top level"


def _duplicate(key: str, place: Place, first: Place) -> Problem:
    message = f"{key} is given twice; the first is at {first}"
    return Problem(message=message, key=key, place=place, hint="keep one of the two")


def _walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if _is_section(field):
            yield from _walk(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
