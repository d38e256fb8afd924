"""What overrides a file: variables of the environment, and `--set` on the command line."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from ebbflow.infra.config.document import SourceText, parse
from ebbflow.infra.config.problems import Place, Problem
from ebbflow.infra.config.tree import Entry, Origin, collect, leaves, mapping_of, mappings, sections, unknown_key

# EBBFLOW__MODEL__NUM_LAYERS=6: two underscores stand for the dot, since keys have single ones.
PREFIX = "EBBFLOW__"
ENVIRONMENT = f"environment {PREFIX}"  # how sources and messages about such a variable begin


def environment_source(key: str) -> str:
    """How the variable that overrides a key is named: "environment EBBFLOW__MODEL__NUM_HEADS"."""
    return ENVIRONMENT + key.replace(".", "__").upper()


def read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Entry], list[Problem]]:
    """The entries of all variables that begin with EBBFLOW__, in the order of their names. Keys are lower-case."""
    entries: dict[str, Entry] = {}
    problems: list[Problem] = []
    for name in sorted(name for name in environment if name.startswith(PREFIX)):
        key = name.removeprefix(PREFIX).replace("__", ".").lower()
        given, found = _read(key, name, environment[name], f"environment {name}", "environment")
        entries |= given
        problems += found
    return entries, problems


def read_override(override: str) -> tuple[dict[str, Entry], list[Problem]]:
    """The entries of one "key=value". A whole section can be given too: "model={num_heads: 8}"."""
    key, equals, value = override.partition("=")
    stripped = key.strip()
    if not equals or not stripped:
        place = _place(override_name(override), key, override)
        example = f"{stripped or 'model.num_heads'}=8"
        return {}, [Problem(message="an override is written key=value", place=place, hint=f"for example {example}")]
    return _read(stripped, key, value, override_name(override), "set")


def override_name(override: str) -> str:
    """How an override is named in messages."""
    return f"--set {override}" if override.isprintable() else f"--set {override!r}"


def _read(key: str, written: str, value: str, name: str, origin: Origin) -> tuple[dict[str, Entry], list[Problem]]:
    """written: what stands before the equals sign. name: under which problems are reported."""
    source = SourceText(name, value, first_column=len(written) + 1, before=f"{written}=")
    if key in sections() or key in mappings():
        node, problems = parse(source)
        entries, found = collect(node, key, source, origin)
        return entries, problems + found
    if key not in leaves() and mapping_of(key) is None:
        return {}, [unknown_key(key, _place(name, written, f"{written}={value}"))]
    node, problems = parse(source)
    if problems:
        return {}, [Problem(message=p.message, key=key, place=p.place, hint=p.hint) for p in problems]
    if node is None:
        node = yaml.ScalarNode("tag:yaml.org,2002:str", "", *[yaml.Mark(name, 0, 0, 0, None, None)] * 2)
    return {key: Entry(key, node, source.place(node.start_mark, node.end_mark), origin, source)}, []


def _place(name: str, written: str, text: str) -> Place:
    return Place(source=name, line=1, column=1, length=max(1, len(written)), text=text.split("\n")[0])
