"""Loader of the typed configuration from a YAML file, the environment and --set.

It reports all problems at once.
"""

import difflib
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TypedDict

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml.nodes import ScalarNode

from ebbflow.core.config import name_rules, shape_rules
from ebbflow.core.config.durations import explain_moment, read_duration
from ebbflow.core.config.keys import (
    ENVIRONMENT,
    Entry,
    Given,
    Origin,
    annotation_of,
    environment_source,
    leaf_fields,
    mapping_of,
    override_name,
)
from ebbflow.core.config.problems import ConfigError, Problem
from ebbflow.core.config.rule_base import Violation
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.config.step_defaults import ShortenedDefault, shorten_defaults
from ebbflow.core.config.yaml_values import Expected, MismatchError, SourceText, convert, parse
from ebbflow.core.json_values import Json, JsonObject
from ebbflow.core.store_address import ADDRESS, find_address_problem

_RULES = (*shape_rules.RULES, *name_rules.RULES)

_BLAME: dict[Origin, int] = {"file": 1, "environment": 2, "set": 3}

_LARGEST_FILE_BYTES = 1 << 20
# Keys whose value is a path, and special words that are valid instead.
_PATHS: dict[str, tuple[str, ...]] = {
    "store": (),
    "script": (),
    "data.path": (),
    "data.tokenizer": ("bytes",),
    "training.initial_weights": (),
    "cost.prices": (),
}
_VARIABLE = re.compile(r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w*)\})")
_WIDEST_COLUMN = 60  # of a key or value in a list of all keys

DEFAULT = "default"


class SettingRow(TypedDict):
    """Configuration key with its value and source."""

    key: str
    value: Json
    source: str


@dataclass(frozen=True)
class LoadedConfig:
    """A validated configuration, and the source of each value."""

    config: RunConfig  # values of all keys, with absolute paths
    # Source of each key: "default", "configs/x.yaml:3", "environment EBBFLOW__…" or "--set"
    sources: dict[str, str]
    path: Path  # absolute path of the configuration file; the current directory without one

    def script_settings(self) -> JsonObject:
        """Return the configuration of a user's script as JSON.

        The save interval is "auto" unless the user chose one. A default in steps would be
        arbitrary, because the steps of an unknown script may take microseconds or minutes.
        """
        settings = self.config.model_dump(mode="json")
        intervals = (
            "checkpoint.interval",
            "checkpoint.interval_steps",
            "checkpoint.interval_seconds",
        )
        if all(self.sources.get(key, "default") == "default" for key in intervals):
            settings["checkpoint"]["interval"] = "auto"
        return settings


def violations(config: RunConfig, *, without: Collection[str] = ()) -> list[Violation]:
    """Check a configuration against all rules, and return the violations.

    Rules about a key in `without` are not checked.
    """
    broken = []
    for rule in _RULES:
        if any(key in without for key in rule.keys):
            continue
        found = rule.check(config)
        if found is not None:
            broken.append(Violation(keys=rule.keys, message=found[0], hint=found[1]))
    return broken


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    project_root: Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Load the configuration from a YAML file, EBBFLOW__… variables and overrides; later sources
    win.

    Args:
        path: the YAML file, or its content as a JSON object such as '{"model": {"num_layers": 8}}',
            or None.
        overrides: values of the --set options, such as "model.num_heads=8".
        project_root: base of relative paths that are written in the file.
        cwd: base of all other relative paths, including `path`; None for the current directory.
        environment: environment variables; None for os.environ.

    Raises:
        ConfigError: the configuration has problems; the error lists all of them.
    """
    cwd = Path.cwd() if cwd is None else Path(cwd)
    variables = os.environ if environment is None else environment
    given, file, readable = _collect(path, overrides, project_root, cwd, variables)
    entries = given.entries
    problems = given.problems
    values = _convert(given)
    _expand_variables(values, given, variables)
    _resolve_paths(values, entries, project_root=project_root, cwd=cwd)
    shortened = shorten_defaults(values, entries, file)
    values |= {default.key: default.value for default in shortened}
    # Values that could not be read are unknown: rules about them would judge defaults that the user
    # did not choose.
    unknown = {key for key in leaf_fields() if not readable and key not in entries}
    for problem in problems:
        unknown |= {key for key in leaf_fields() if _hides(problem.key, key, values)}
    config = _validate(values, given, unknown)
    if problems:
        raise ConfigError(_in_reading_order(problems, overrides))
    _warn_of_old_names(entries.values())
    _announce(shortened, config.training.max_steps)
    sources = sources_of(entries)
    sources |= {
        default.key: f"{default.default} shortened for training.max_steps" for default in shortened
    }
    return LoadedConfig(config, sources, file)


def read_given_values(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    project_root: Path,
    cwd: Path,
) -> dict[str, tuple[object, str]]:
    """Map each key that the user set to its value and source; defaults are left out.

    Rules are not checked, and values that cannot be read are left out. The arguments are those of
    `load_config`.
    """
    given, _, _ = _collect(path, overrides, project_root, cwd, os.environ)
    values = _convert(given)
    return {key: (value, _source(given.entries[key])) for key, value in values.items()}


def sources_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Map each key, in the schema's order, to its value's source, such as "default" or "--set".

    A mapping whose names the user chooses, such as workload_options, has one source per name.
    """
    sources: dict[str, str] = {}
    for key in leaf_fields():
        names = [name for name in entries if mapping_of(name) == key]
        sources |= {name: _source(entries.get(name)) for name in names or [key]}
    return sources


def values_with_sources(config: Mapping[str, Json], sources: Mapping[str, str]) -> list[SettingRow]:
    """Return a row {"key", "value", "source"} for each key in `sources`.

    config: the configuration as nested JSON objects.
    """
    return [
        {"key": key, "value": _at(config, key), "source": source} for key, source in sources.items()
    ]


def render_sources(rows: Sequence[SettingRow], *, defaults: bool = True) -> str:
    """Render one line per key with its value and source, such as "model.num_layers 6 --set".

    Without `defaults`, keys that were not set are omitted.
    """
    shown = [row for row in rows if defaults or row["source"] != DEFAULT]
    keys = [row["key"] for row in shown]
    values = [value_text(row["value"]) for row in shown]
    key_width = _column_width(keys)
    value_width = _column_width(values)
    lines = [
        f"{key:<{key_width}}  {value:<{value_width}}  {row['source']}"
        for key, value, row in zip(keys, values, shown, strict=True)
    ]
    left_out = len(rows) - len(shown)
    if left_out:
        lines.append(f"… and {left_out} defaults")
    return "\n".join(lines)


def value_text(value: Json) -> str:
    """Render a value as YAML, such as null, true or 0.001."""
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _collect(
    path: Path | str | None,
    overrides: Sequence[str],
    project_root: Path,
    cwd: Path,
    variables: Mapping[str, str],
) -> tuple[Given, Path, bool]:
    """Read the given values from the configuration file, the environment and the overrides.

    Return the values, the file's path, and whether the whole file could be read.
    """
    is_inline = isinstance(path, str) and path.lstrip().startswith("{")
    inline = str(path) if is_inline else None
    file = cwd
    if path is not None and not is_inline:
        file = Path(os.path.abspath(cwd / Path(path).expanduser()))
    given = Given()
    try:
        if path is not None:
            if inline:
                where = "--config"
            else:
                where = _display(file, cwd)
            source = SourceText(where, inline or _read(file, path, project_root, cwd))
            given.add_section(parse(source), "", source, "file")
    except ConfigError as error:
        given.problems.extend(error.problems)
    readable = all(problem.key for problem in given.problems)
    given.add_environment(variables)
    for override in overrides:
        given.add_override(override)
    return given, file, readable


def _convert(given: Given) -> JsonObject:
    """Convert each given value to its type in the schema, and map each dotted key to the result.

    A value that cannot be converted is left out, and added to the problems of `given`.
    """
    values: JsonObject = {}
    for key, entry in given.entries.items():
        duration = None
        if isinstance(entry.node, ScalarNode):
            duration = read_duration(key, entry.node.value)
        if duration is not None:
            values[key] = duration
            continue
        try:
            values[key] = convert(entry.node, Expected.of(annotation_of(key)))
        except MismatchError as mismatch:
            hint = mismatch.hint or _default_hint(key)
            if isinstance(entry.node, ScalarNode):
                hint = explain_moment(key, entry.node.value, datetime.now(UTC)) or hint
            given.complain(f"{key} {mismatch.message}", key, entry.place_of(mismatch.node), hint)
    return values


def _validate(values: Mapping[str, Json], given: Given, unknown: Collection[str]) -> RunConfig:
    """Validate the values against the schema and the rules, and return the configuration.

    Problems are added to `given`, and defaults replace wrong values. Rules about a key in `unknown`
    are not checked, because the value that the user intended for it is unknown.
    """
    good = dict(values)
    bad = set(unknown)
    try:
        RunConfig.model_validate(_nested(good))
    except ValidationError as error:
        for key, details in _errors_by_key(error).items():
            message, hint = _range_message(given.entries[key], details)
            given.complain(message, key, given.entries[key].place, hint)
            bad.add(key)
            del good[key]
    config = RunConfig.model_validate(_nested(good))
    for violation in violations(config, without=bad):
        # Blame the key given with --set, else in the environment, else in the file; of several, the
        # first.
        found = {key: _entry(key, given.entries) for key in violation.keys}
        ranks = {key: 0 if entry is None else _BLAME[entry.origin] for key, entry in found.items()}
        blamed = max(violation.keys, key=lambda key: ranks[key])
        entry = found[blamed]
        given.complain(
            violation.message, blamed, None if entry is None else entry.place, violation.hint
        )
    return config


def _errors_by_key(error: ValidationError) -> dict[str, ErrorDetails]:
    """Return one pydantic error for each wrong key.

    For a union such as `int | Literal["auto"]`, pydantic reports one error per member. Of these, an
    error about an exceeded limit is preferred to "not a valid choice".
    """
    found: dict[str, ErrorDetails] = {}
    for details in error.errors():
        key = ".".join(str(part) for part in details["loc"])
        while key not in leaf_fields():
            key = key.rpartition(".")[0]
        if key not in found or found[key]["type"] == "literal_error":
            found[key] = details
    return found


def _range_message(entry: Entry, details: ErrorDetails) -> tuple[str, str | None]:
    key = entry.key
    limits = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
    context = details.get("ctx", {})
    wanted = [f"{words} {context[name]:g}" for name, words in limits.items() if name in context]
    if not wanted or not isinstance(entry.node, ScalarNode):
        return f"{key}: {details['msg']}", None
    return f"{key} must be {wanted[0]}, not {entry.node.value}", _default_hint(key)


def _default_hint(key: str) -> str | None:
    field = leaf_fields().get(key)
    if field is None or field.is_required():
        return None
    default = field.get_default(call_default_factory=True)
    if default is None or isinstance(default, bool):
        return f"the default is {json.dumps(default)}"
    return f"the default is {default}"


def _entry(key: str, entries: Mapping[str, Entry]) -> Entry | None:
    """Return a key's `Entry`, or None.

    For a free mapping (workload_options), return the `Entry` of its first name.
    """
    names = (name for name in entries if mapping_of(name) == key)
    return entries.get(key) or entries.get(next(names, ""))


def _nested(values: Mapping[str, Json]) -> JsonObject:
    tree: JsonObject = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        branch = tree
        for parent in parents:
            section = branch.setdefault(parent, {})
            assert isinstance(section, dict), f"{parent} is a section"
            branch = section
        branch[leaf] = value
    return tree


def _warn_of_old_names(entries: Iterable[Entry]) -> None:
    for entry in entries:
        if entry.given_key != entry.key:
            _warn(f"warning: {entry.place}: {entry.given_key} has a new name: write {entry.key}")


def _announce(shortened: Sequence[ShortenedDefault], steps: int) -> None:
    if shortened:
        changes = [f"{default.key} {default.default} → {default.value}" for default in shortened]
        _warn(f"training.max_steps is {steps}; defaults were shortened: {', '.join(changes)}")


@cache
def _warn(line: str) -> None:
    """Print a warning to stderr, only once per process, because launching loads the configuration
    several times.
    """
    print(line, file=sys.stderr, flush=True)


def _read(file: Path, given: Path | str, project_root: Path, cwd: Path) -> str:
    """Return the text of the configuration file. Raises ConfigError."""
    place = None
    try:
        if file.is_dir():
            message = "is a folder, not a configuration file"
            hint = _configs_there_are(file, project_root, cwd)
        elif file.exists() and not file.is_file():
            message = "is not a regular file"
            hint = None
        else:
            with file.open("rb") as stream:
                raw = stream.read(_LARGEST_FILE_BYTES + 1)
            if len(raw) <= _LARGEST_FILE_BYTES:
                return raw.decode("utf-8-sig")
            message = "is larger than 1 MiB; expected a configuration file"
            hint = None
        message = f"{given}: {message}"
    except UnicodeDecodeError as error:
        raw = error.object
        good = SourceText(
            _display(file, cwd), raw[: error.start].decode("utf-8-sig", "replace") + "\ufffd"
        )
        message = f"not UTF-8 text: byte 0x{raw[error.start]:02x} at offset {error.start}"
        place = good.span_at(len(good.text) - 1)
        hint = "save the file as UTF-8"
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        missing = isinstance(error, FileNotFoundError)
        if missing:
            reason = f"there is no such file (looked in {cwd})"
        else:
            reason = f"cannot be read: {error}"
        message = f"{given}: {reason}"
        hint = _configs_there_are(file, project_root, cwd)
    raise ConfigError([Problem(message=message, place=place, hint=hint)])


def _configs_there_are(file: Path, project_root: Path, cwd: Path) -> str:
    """Return a hint that lists the existing configuration files and suggests the one with the most
    similar name.
    """
    folders = dict.fromkeys([file, file.parent, project_root / "configs"])
    try:
        names = []
        for folder in folders:
            for file_there in sorted(folder.glob("*.yaml")):
                names.append(_display(file_there, cwd))
    except (OSError, ValueError):
        names = []
    if not names:
        return f"write one; there is no *.yaml in {file.parent} or {project_root / 'configs'}"
    close = difflib.get_close_matches(_display(file, cwd), names, n=1, cutoff=0.8)
    if close:
        meant = f"did you mean {close[0]}? "
    else:
        meant = ""
    return f"{meant}configurations that exist: {', '.join(dict.fromkeys(names))}"


def _expand_variables(values: JsonObject, given: Given, variables: Mapping[str, str]) -> None:
    """Replace $NAME and ${NAME} in paths and addresses, in place.

    A variable that does not exist is a problem: it would become a part of the path.
    """
    for key in _PATHS:
        value = values.get(key)
        if not isinstance(value, str):
            continue
        missing = {
            name
            for name in map(_variable_name, _VARIABLE.finditer(value))
            if not variables.get(name)
        }
        for name in sorted(missing):
            given.complain(
                f"{key}: the environment variable {name} is not set",
                key,
                given.entries[key].place,
                f"set it, or write the path without ${name}",
            )
        if not missing:
            values[key] = _VARIABLE.sub(lambda match: variables[_variable_name(match)], value)


def _variable_name(match: re.Match[str]) -> str:
    return match["plain"] or match["braced"]


def _resolve_paths(
    values: JsonObject, entries: Mapping[str, Entry], *, project_root: Path, cwd: Path
) -> None:
    """Make paths in `values` absolute, in place; keep keywords such as "static" and addresses such
    as s3://.
    """
    values.setdefault("store", leaf_fields()["store"].default)
    for key, words in _PATHS.items():
        value = values.get(key)
        if not isinstance(value, str) or not value.strip() or value in words:
            continue
        if key == "store" and find_address_problem(value) is not None:
            continue  # a rule refuses it
        if ADDRESS.match(value) and not (key == "store" and value.startswith("file://")):
            continue
        if key == "cost.prices" and not Path(value).suffix:  # "static", "live", or an unknown word
            continue
        if key not in entries or entries[key].origin == "file":
            base = project_root
        else:
            base = cwd
        path = os.path.expanduser(value.removeprefix("file://"))
        values[key] = os.path.abspath(os.path.join(base, path))


def _hides(bad: str, key: str, values: Mapping[str, Json]) -> bool:
    """Return whether a problem with the key or section `bad` leaves the value of `key` unknown."""
    return key not in values and (key == bad or key.startswith(f"{bad}."))


def _in_reading_order(problems: Sequence[Problem], overrides: Sequence[str]) -> list[Problem]:
    """Sort problems: first the file from top to bottom, then the environment, then the overrides in
    order.
    """
    order = {override_name(override): number for number, override in enumerate(overrides, start=2)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        if place is None:
            return 0, 0, 0
        rank = order.get(place.source, int(place.source.startswith(ENVIRONMENT)))
        return rank, place.line, place.column

    return sorted(problems, key=position)


def _display(file: Path, cwd: Path) -> str:
    """Return a file's path for messages: relative if the file is below `cwd`, otherwise absolute."""
    if file.is_relative_to(cwd):
        return str(file.relative_to(cwd))
    return str(file)


def _column_width(texts: Sequence[str]) -> int:
    """Return the width of a column of texts, up to a limit that a long text exceeds."""
    return min(_WIDEST_COLUMN, max(map(len, texts), default=0))


def _source(entry: Entry | None) -> str:
    if entry is None:
        return DEFAULT
    if entry.origin == "environment":
        return environment_source(entry.key)
    if entry.origin == "set":
        return "--set"
    return f"{entry.place.source}:{entry.place.line}"


def _at(config: Mapping[str, Json], key: str) -> Json:
    value: Json = config
    for name in key.split("."):
        if isinstance(value, Mapping):
            value = value.get(name)
        else:
            value = None
    return value
