"""Settings of a job whose code is a script: its name, and its configuration without a file. Torch-free."""

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
    """Return the configuration as JSON; the save interval is "auto" unless one was chosen.

    Steps of unknown scripts take microseconds or minutes, so a number of steps would be arbitrary.
    """
    settings = loaded.config.model_dump(mode="json")
    if all(loaded.sources.get(key, "default") == "default" for key in _INTERVALS):
        settings["checkpoint"]["interval"] = "auto"
    return settings


def job_of_script(name: str | None, script: str) -> str:
    """Return the wanted name of a job, else that of the environment, else one made of the script's."""
    stem = re.sub(r"^\W+", "", plain_name(Path(script).stem)) if script not in ("", "-c") else ""
    return name or os.environ.get(JOB_VARIABLE) or stem or "job"


def plain_name(text: str) -> str:
    """Return a valid job name for any text. If characters are replaced, a hash is added to keep names unique."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", text)[:_LONGEST_NAME]
    return plain if plain == text else f"{plain}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
