"""Derive the settings of a job whose code is a script: its name and its configuration. Torch-free."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from ebbflow.infra.config.load import LoadedConfig

JOB_VARIABLE = "EBBFLOW_JOB"
_LONGEST_NAME = 80
_INTERVALS = ("checkpoint.interval", "checkpoint.interval_steps", "checkpoint.interval_seconds")


def settings_of_script(loaded: LoadedConfig) -> dict[str, Any]:
    """Return the configuration as JSON. The save interval is "auto" unless the user chose one.

    A default in steps would be arbitrary, because the steps of an unknown script may take microseconds or minutes.
    """
    settings = loaded.config.model_dump(mode="json")
    if all(loaded.sources.get(key, "default") == "default" for key in _INTERVALS):
        settings["checkpoint"]["interval"] = "auto"
    return settings


def job_of_script(name: str | None, script: str) -> str:
    """Return the job's name: `name` if given, else EBBFLOW_JOB, else a name derived from the script's file name."""
    stem = re.sub(r"^\W+", "", plain_name(Path(script).stem)) if script not in ("", "-c") else ""
    return name or os.environ.get(JOB_VARIABLE) or stem or "job"


def plain_name(text: str) -> str:
    """Convert any text to a valid job name. If this replaces characters, append a hash to keep names distinct."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_LONGEST_NAME]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
