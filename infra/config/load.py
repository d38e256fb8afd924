"""One YAML file and the overrides of the command line become one typed configuration, or all problems at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from infra.config.document import SourceText, parse
from infra.config.problems import ConfigError, Place, Problem
from infra.config.rules import Violation, violations
from infra.config.scalars import Expected, Mismatch, convert
from infra.config.schema import RunConfig
from infra.config.tree import Entry, collect, leaves, sections, unknown_key

_LARGEST_FILE_BYTES = 1 << 20
_DEFAULT, _FILE, _SET = 0, 1, 2


@dataclass(frozen=True)
class LoadedConfig:
    """config, with paths made absolute. sources: dotted key → "default", "configs/x.yaml:3" or "--set"."""

    config: RunConfig
    sources: dict[str, str]
    path: Path


def load_config(
    path: Path | str, overrides: Sequence[str] = (), *, project_root: Path, cwd: Path | None = None
) -> LoadedConfig:
    """Read a configuration.

    path: the YAML file, relative to cwd (the current directory when None).
    overrides: "model.num_heads=8" and the like; later ones win, and all win over the file.
    Relative folders in the file count from project_root, those in overrides from cwd.
    Raises ConfigError with every problem at once.
    """
    cwd = Path.cwd() if cwd is None else Path(cwd)
    file = Path(os.path.abspath(cwd / Path(path).expanduser()))
    text, problems = _read(file, path, project_root, cwd)
    entries: dict[str, Entry] = {}
    if text is not None:
        source = SourceText(_display(file, cwd), text)
        node, syntax = parse(source)
        entries, found = collect(node, "", source, "file")
        problems += syntax + found
    for override in overrides:
        given, found = _read_override(override)
        entries |= given
        problems += found
    values, found = _convert(entries)
    problems += found
    _resolve_paths(values, entries, project_root=project_root, cwd=cwd)
    config, found = _validate(values, entries, {problem.key for problem in problems})
    problems += found
    if problems:
        raise ConfigError(sorted(problems, key=_reading_order))
    return LoadedConfig(config, _sources(entries), file)


def _read(file: Path, given: Path | str, project_root: Path, cwd: Path) -> tuple[str | None, list[Problem]]:
    """The text of the file, or the problem that prevents it."""
    try:
        if file.is_dir():
            message = f"{given}: is a folder, not a configuration file"
            return None, [Problem(message=message, hint=_configs_there_are(file, project_root, cwd))]
        if file.exists() and not file.is_file():
            return None, [Problem(message=f"{given}: is not a regular file")]
        with file.open("rb") as stream:
            raw = stream.read(_LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        missing = isinstance(error, FileNotFoundError)
        reason = f"there is no such file (looked in {cwd})" if missing else f"cannot be read: {error}"
        return None, [Problem(message=f"{given}: {reason}", hint=_configs_there_are(file, project_root, cwd))]
    if len(raw) > _LARGEST_FILE_BYTES:
        return None, [Problem(message=f"{given}: is larger than 1 MiB, which no configuration is")]
    try:
        return raw.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        good = SourceText(_display(file, cwd), raw[: error.start].decode("utf-8-sig", "replace") + "\ufffd")
        message = f"not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}"
        return None, [Problem(message=message, place=good.place_at(len(good.text) - 1), hint="save the file as UTF-8")]


def _configs_there_are(file: Path, project_root: Path, cwd: Path) -> str:
    """Names the configurations of the project and of the place that was looked in, the closest first."""
    folders = dict.fromkeys([file, file.parent, project_root / "configs"])
    try:
        names = [_display(found, cwd) for folder in folders for found in sorted(folder.glob("*.yaml"))]
    except (OSError, ValueError):
        names = []
    if not names:
        return f"write one; there is no *.yaml in {file.parent} or {project_root / 'configs'}"
    close = difflib.get_close_matches(_display(file, cwd), names, n=1, cutoff=0.8)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}configurations that exist: {', '.join(dict.fromkeys(names))}"


def _read_override(override: str) -> tuple[dict[str, Entry], list[Problem]]:
    """The entries of one "key=value". A whole section can be given too: "model={num_heads: 8}"."""
    key, equals, value = override.partition("=")
    name = f"--set {override}" if override.isprintable() else f"--set {override!r}"
    stripped = key.strip()
    place = Place(source=name, line=1, column=1, length=max(1, len(key)), text=override.split("\n")[0])
    if not equals or not stripped:
        example = f"{stripped or 'model.num_heads'}=8"
        return {}, [Problem(message="an override is written key=value", place=place, hint=f"for example {example}")]
    source = SourceText(name, value, first_column=len(key) + 1, before=f"{key}=")
    if stripped in sections():
        node, problems = parse(source)
        entries, found = collect(node, stripped, source, "set")
        return entries, problems + found
    if stripped not in leaves():
        return {}, [unknown_key(stripped, place)]
    node, problems = parse(source)
    if problems:
        return {}, [Problem(message=p.message, key=stripped, place=p.place, hint=p.hint) for p in problems]
    if node is None:
        node = yaml.ScalarNode("tag:yaml.org,2002:str", "", *[yaml.Mark(name, 0, 0, 0, None, None)] * 2)
    return {stripped: Entry(stripped, node, source.place(node.start_mark, node.end_mark), "set")}, []


def _convert(entries: Mapping[str, Entry]) -> tuple[dict[str, Any], list[Problem]]:
    """Values of the types that the schema wants, by dotted key."""
    values: dict[str, Any] = {}
    problems = []
    for key, entry in entries.items():
        field = leaves()[key]
        try:
            values[key] = convert(entry.node, Expected.of(field.annotation))
        except Mismatch as mismatch:
            message = f"{key} {mismatch.message}"
            problems.append(Problem(message=message, key=key, place=entry.place, hint=mismatch.hint))
    return values, problems


def _resolve_paths(
    values: dict[str, Any], entries: Mapping[str, Entry], *, project_root: Path, cwd: Path
) -> None:
    """Makes the store's folder and the data path absolute. What is empty or of another scheme is left to the rules."""
    values.setdefault("store", leaves()["store"].default)
    for key in ("store", "data.path"):
        value = values.get(key)
        if not isinstance(value, str) or not value.strip():
            continue
        if key == "store" and "://" in value and not value.startswith("file://"):
            continue
        base = cwd if key in entries and entries[key].origin == "set" else project_root
        value = value.removeprefix("file://") if key == "store" else value
        values[key] = os.path.abspath(os.path.join(base, os.path.expanduser(value)))


def _validate(
    values: Mapping[str, Any], entries: Mapping[str, Entry], broken: set[str]
) -> tuple[RunConfig, list[Problem]]:
    """The configuration, with defaults in the place of what is wrong, and what is wrong with ranges and rules."""
    problems = []
    good = dict(values)
    try:
        RunConfig.model_validate(_nested(good))
    except ValidationError as error:
        for key, details in _errors_by_key(error).items():
            message, hint = _range_message(key, details)
            problems.append(Problem(message=message, key=key, place=entries[key].place, hint=hint))
            del good[key]
    config = RunConfig.model_validate(_nested(good))
    without = {key for key in leaves() if any(_covers(bad, key) for bad in broken | {p.key for p in problems})}
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


def _range_message(key: str, details: ErrorDetails) -> tuple[str, str | None]:
    limits = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    wanted = [f"{words} {details['ctx'][name]:g}" for name, words in limits.items() if name in details.get("ctx", {})]
    if not wanted:
        return f"{key}: {details['msg']}", None
    default = leaves()[key].default
    hint = None if default is None else f"the default is {default}"
    return f"{key} must be {wanted[0]}, not {details['input']}", hint


def _rule_problem(violation: Violation, entries: Mapping[str, Entry]) -> Problem:
    """Blames the key that was given last: on the command line before in the file, and never a default."""
    blamed = max(violation.keys, key=lambda key: _rank(entries.get(key)))  # the first of equals
    place = entries[blamed].place if blamed in entries else None
    return Problem(message=violation.message, key=blamed, place=place, hint=violation.hint)


def _rank(entry: Entry | None) -> int:
    return _DEFAULT if entry is None else _SET if entry.origin == "set" else _FILE


def _covers(key: str, leaf: str) -> bool:
    return bool(key) and (leaf == key or leaf.startswith(f"{key}."))


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[leaf] = value
    return tree


def _sources(entries: Mapping[str, Entry]) -> dict[str, str]:
    def name(key: str) -> str:
        entry = entries.get(key)
        if entry is None:
            return "default"
        return "--set" if entry.origin == "set" else f"{entry.place.source}:{entry.place.line}"

    return {key: name(key) for key in leaves()}


def _reading_order(problem: Problem) -> tuple[bool, str, int, int]:
    """The file from top to bottom, then the overrides."""
    place = problem.place
    if place is None:
        return (False, "", 0, 0)
    return (place.source.startswith("--set"), place.source, place.line, place.column)


def _display(file: Path, cwd: Path) -> str:
    """Relative to where the user stands, where it lies below."""
    return str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)
