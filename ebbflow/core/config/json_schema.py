"""JSON schema of the configuration file, with which editors complete and check keys and values."""

import json
from typing import Any

from ebbflow.core.config.keys import OPTION_NAME
from ebbflow.core.config.schema import RENAMED_KEYS, RunConfig
from ebbflow.core.json_values import JsonObject

# The newest version that YAML language servers support
_DIALECT = "http://json-schema.org/draft-07/schema#"


def json_schema() -> JsonObject:
    """Return the JSON schema of the configuration file, with all definitions inlined.

    Each $ref is replaced by its definition, because draft 7 of JSON schema ignores other keywords
    beside a $ref.
    """
    generated = RunConfig.model_json_schema()
    tree = _inlined(generated, generated.get("$defs", {}))
    for old, new in RENAMED_KEYS.items():
        section, _, name = new.rpartition(".")
        keys = tree["properties"][section]["properties"]
        described = {
            "deprecated": True,
            "description": f"old name of {new}; still accepted, with a warning",
        }
        keys[old.rpartition(".")[2]] = {
            key: value for key, value in keys[name].items() if key != "default"
        } | described
    head = {"$schema": _DIALECT, "title": "Ebbflow configuration"}
    return head | {name: value for name, value in tree.items() if name != "$defs"}


def schema_text() -> str:
    return json.dumps(json_schema(), indent=1, ensure_ascii=False) + "\n"


def _inlined(node: Any, definitions: JsonObject) -> Any:
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        # A section's default follows from its keys; a section may also be empty.
        section = _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
        if isinstance(section["type"], list):
            kinds = section["type"]
        else:
            kinds = [section["type"]]
        return section | {"type": [*kinds, "null"]}
    if isinstance(node.get("description"), str):  # a docstring, whose lines are those of the code
        node = node | {"description": " ".join(node["description"].split())}
    # pydantic's titles repeat the names; but a key may be called title.
    kept = {
        name: value
        for name, value in node.items()
        if not (name == "title" and isinstance(value, str))
    }
    done = {name: _inlined(value, definitions) for name, value in kept.items() if name != "$defs"}
    if "$ref" in node.get("items", {}):
        done["items"]["type"] = "object"  # a section in a list is never left empty
    free = isinstance(node.get("additionalProperties"), dict)
    return done | ({"propertyNames": {"pattern": f"^{OPTION_NAME.pattern}$"}} if free else {})
