"""One YAML file, the environment and the command line become one typed configuration, or all problems at once."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.infra.config.document import SourceText, parse
from ebbflow.infra.config.overrides import ENVIRONMENT, override_name, read_environment, read_override
from ebbflow.infra.config.problems import ConfigError, Problem
from ebbflow.infra.config.rules.names import ADDRESS
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.config.sources import sources_of
from ebbflow.infra.config.tree import Entry, collect, leaves
from ebbflow.infra.config.validate import convert_entries, validate

_LARGEST_FILE_BYTES = 1 << 20
# Keys whose value is a path, and the words that are none in its place.
_PATHS: dict[str, tuple[str, ...]] = {
    "store": (),
    "data.path": (),
    "data.tokenizer": ("bytes",),
    "training.initial_weights": (),
    "cost.prices": ("static", "live"),
}


@dataclass(frozen=True)
class LoadedConfig:
    """config, with paths made absolute.

    sources: dotted key → "default", "configs/x.yaml:3", "environment EBBFLOW__MODEL__NUM_LAYERS" or "--set".
    """

    config: RunConfig
    sources: dict[str, str]
    path: Path


def load_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    project_root: Path,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Read a configuration.

    path: the YAML file, relative to cwd (the current directory when None).
    overrides: "model.num_heads=8" and the like; later ones win, and all win over the environment and the file.
    environment: its EBBFLOW__MODEL__NUM_HEADS=8 and the like win over the file; os.environ when None.
    Relative folders in the file count from project_root, those in overrides and the environment from cwd.
    Raises ConfigError with every problem at once.
    """
    cwd = Path.cwd() if cwd is None else Path(cwd)
    file = Path(os.path.abspath(cwd / Path(path).expanduser()))
    entries, problems, readable = _read_entries(file, path, project_root, cwd)
    given, found = read_environment(os.environ if environment is None else environment)
    entries |= given
    problems += found
    for override in overrides:
        given, found = read_override(override)
        entries |= given
        problems += found
    values, mismatches = convert_entries(entries)
    problems += mismatches
    _resolve_paths(values, entries, project_root=project_root, cwd=cwd)
    # What could not be read may be anything: rules about it would compare defaults that nobody chose.
    unknown = {key for key in leaves() if not readable and key not in entries}
    unknown |= {key for problem in problems for key in leaves() if _hides(problem.key, key, entries, values)}
    config, found = validate(values, entries, unknown)
    problems += found
    if problems:
        raise ConfigError(_in_reading_order(problems, overrides))
    return LoadedConfig(config, sources_of(entries), file)


def _read_entries(
    file: Path, given: Path | str, project_root: Path, cwd: Path
) -> tuple[dict[str, Entry], list[Problem], bool]:
    """What the file gives, what is wrong with its form, and whether it could be read at all."""
    text, problems = _read(file, given, project_root, cwd)
    if text is None:
        return {}, problems, False
    source = SourceText(_display(file, cwd), text)
    node, problems = parse(source)
    if problems:
        return {}, problems, False
    entries, problems = collect(node, "", source, "file")
    return entries, problems, all(problem.key for problem in problems)


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


def _resolve_paths(values: dict[str, Any], entries: Mapping[str, Entry], *, project_root: Path, cwd: Path) -> None:
    """Makes paths absolute. What is empty, a word of its own or an address is left to the rules."""
    values.setdefault("store", leaves()["store"].default)
    for key, words in _PATHS.items():
        value = values.get(key)
        if not isinstance(value, str) or not value.strip() or value in words:
            continue
        if ADDRESS.match(value) and not (key == "store" and value.startswith("file://")):
            continue
        if key == "cost.prices" and not Path(value).suffix:  # a word that nobody knows is no file either
            continue
        base = project_root if key not in entries or entries[key].origin == "file" else cwd
        value = value.removeprefix("file://") if key == "store" else value
        values[key] = os.path.abspath(os.path.join(base, os.path.expanduser(value)))


def _hides(bad: str, key: str, entries: Mapping[str, Entry], values: Mapping[str, Any]) -> bool:
    """Whether a problem with `bad` leaves it open what the value of `key` was meant to be."""
    if key in values and key in entries:
        return False
    return bool(bad) and (key == bad or key.startswith(f"{bad}."))


def _in_reading_order(problems: Sequence[Problem], overrides: Sequence[str]) -> list[Problem]:
    """The file from top to bottom, then the environment, then the overrides as they were given."""
    order = {override_name(override): number for number, override in enumerate(overrides, start=2)}

    def position(problem: Problem) -> tuple[int, int, int]:
        place = problem.place
        if place is None:
            return 0, 0, 0
        rank = order.get(place.source, int(place.source.startswith(ENVIRONMENT)))
        return rank, place.line, place.column

    return sorted(problems, key=position)


def _display(file: Path, cwd: Path) -> str:
    """Relative to where the user stands, where it lies below."""
    return str(file.relative_to(cwd)) if file.is_relative_to(cwd) else str(file)
