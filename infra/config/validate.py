"""From entries to a typed configuration: types, ranges and rules, each problem at the place of the value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ebbflow.infra.config.problems import Problem
from ebbflow.infra.config.rules import Violation, violations
from ebbflow.infra.config.scalars import Expected, MismatchError, convert
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.config.tree import Entry, Origin, annotation_of, leaves, mapping_of

# Who is blamed for a broken rule: the last word had it, and never a default.
_BLAME: dict[Origin | None, int] = {None: 0, "file": 1, "environment": 2, "set": 3}


def convert_entries(entries: Mapping[str, Entry]) -> tuple[dict[str, Any], list[Problem]]:
    """Values of the types that the schema wants, by dotted key."""
    values: dict[str, Any] = {}
    problems = []
    for key, entry in entries.items():
        try:
            values[key] = convert(entry.node, Expected.of(annotation_of(key)))
        except MismatchError as mismatch:
            message = f"{key} {mismatch.message}"
            problems.append(Problem(message=message, key=key, place=entry.place_of(mismatch.node), hint=mismatch.hint))
    return values, problems


def validate(
    values: Mapping[str, Any], entries: Mapping[str, Entry], unknown: Collection[str]
) -> tuple[RunConfig, list[Problem]]:
    """The configuration, with defaults in the place of what is wrong, and what is wrong with ranges and rules.

    unknown: keys whose meant value is not known; rules about them are left out.
    """
    problems = []
    good = dict(values)
    try:
        RunConfig.model_validate(_nested(good))
    except ValidationError as error:
        for key, details in _errors_by_key(error).items():
            message, hint = _range_message(entries[key], details)
            problems.append(Problem(message=message, key=key, place=entries[key].place, hint=hint))
            del good[key]
    config = RunConfig.model_validate(_nested(good))
    without = {*unknown, *(problem.key for problem in problems)}
    problems += [_rule_problem(violation, entries) for violation in violations(config, without=without)]
    return config, problems


def _errors_by_key(error: ValidationError) -> dict[str, ErrorDetails]:
    """One error for each key. Of a union's branches, a broken limit tells more than "not the other branch"."""
    found: dict[str, ErrorDetails] = {}
    for details in error.errors():
        key = ".".join(str(part) for part in details["loc"])
        while key not in leaves():
            key = key.rpartition(".")[0]
        if key not in found or found[key]["type"] == "literal_error":
            found[key] = details
    return found


def _range_message(entry: Entry, details: ErrorDetails) -> tuple[str, str | None]:
    key = entry.key
    limits = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    wanted = [f"{words} {details['ctx'][name]:g}" for name, words in limits.items() if name in details.get("ctx", {})]
    if not wanted or not isinstance(entry.node, yaml.ScalarNode):
        return f"{key}: {details['msg']}", None
    default = leaves()[key].default
    hint = None if default is None else f"the default is {default}"
    return f"{key} must be {wanted[0]}, not {entry.node.value}", hint


def _rule_problem(violation: Violation, entries: Mapping[str, Entry]) -> Problem:
    """Blames the key that was given last: on the command line before the environment before the file."""
    given = {key: _entry(key, entries) for key in violation.keys}
    blamed = max(violation.keys, key=lambda key: _rank(given[key]))  # the first of equals
    entry = given[blamed]
    return Problem(
        message=violation.message, key=blamed, place=None if entry is None else entry.place, hint=violation.hint
    )


def _entry(key: str, entries: Mapping[str, Entry]) -> Entry | None:
    """Of a free mapping, the first name in it."""
    names = (name for name in entries if mapping_of(name) == key)
    return entries.get(key) or entries.get(next(names, ""))


def _rank(entry: Entry | None) -> int:
    return _BLAME[None if entry is None else entry.origin]


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree
