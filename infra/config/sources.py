"""Who said what: every value of a configuration with its source, as plain data for artifacts, reports and terminals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ebbflow.infra.config.overrides import environment_source
from ebbflow.infra.config.tree import Entry, leaves, mapping_of, mappings

DEFAULT = "default"


def sources_of(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Every leaf in the schema's order; in the place of a free mapping the names that were given in it."""
    sources: dict[str, str] = {}
    for key in leaves():
        names = [name for name in entries if mapping_of(name) == key] if key in mappings() else []
        sources |= {name: _source(entries.get(name)) for name in names or [key]}
    return sources


def values_with_sources(config: Mapping[str, Any], sources: Mapping[str, str]) -> list[dict[str, Any]]:
    """[{key, value, source}] in the order of `sources`. config: as JSON, nested; a key that it lacks is null."""
    return [{"key": key, "value": _at(config, key), "source": source} for key, source in sources.items()]


def render_sources(rows: Sequence[Mapping[str, Any]], *, defaults: bool = True) -> str:
    """One line for each key: "model.num_layers  6  --set". defaults: whether to show those that nobody has set."""
    shown = [row for row in rows if defaults or row["source"] != DEFAULT]
    texts = [(row["key"], value_text(row["value"]), row["source"]) for row in shown]
    # A long list runs over instead of moving every other line to the right.
    widths = [min(60, max((len(text[column]) for text in texts), default=0)) for column in range(2)]
    lines = [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in texts]
    left_out = len(rows) - len(shown)
    return "\n".join([*lines, *([f"… and {left_out} defaults"] if left_out else [])])


def value_text(value: Any) -> str:
    """As YAML would take it: null, true, [.py, .txt], 0.001."""
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _source(entry: Entry | None) -> str:
    if entry is None:
        return DEFAULT
    if entry.origin == "environment":
        return environment_source(entry.key)
    return "--set" if entry.origin == "set" else f"{entry.place.source}:{entry.place.line}"


def _at(config: Mapping[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
