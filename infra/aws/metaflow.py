"""Metaflow's settings, found where Metaflow finds them, without importing it: the environment, then its file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def metaflow_settings(environment: Mapping[str, str] | None = None) -> dict[str, tuple[str, str]]:
    """Every METAFLOW_* setting as (value, where it stands). A file that cannot be read has none.

    The file is ~/.metaflowconfig/config.json, or config_<profile>.json there; METAFLOW_HOME moves the folder.
    """
    variables = os.environ if environment is None else environment
    path = _file(variables)
    found = {name: (str(value), str(path)) for name, value in _read(path).items() if name.startswith("METAFLOW_")}
    given = {name: (value, "the environment") for name, value in variables.items() if name.startswith("METAFLOW_")}
    return found | given


def metaflow_setting(name: str, environment: Mapping[str, str] | None = None) -> str:
    """The value of one, "" where nobody sets it."""
    return metaflow_settings(environment).get(name, ("", ""))[0]


def _file(variables: Mapping[str, str]) -> Path:
    folder = Path(variables.get("METAFLOW_HOME") or "~/.metaflowconfig").expanduser()
    profile = variables.get("METAFLOW_PROFILE")
    return folder / (f"config_{profile}.json" if profile else "config.json")


def _read(path: Path) -> Mapping[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
