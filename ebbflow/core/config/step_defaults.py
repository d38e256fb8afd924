"""Shorter defaults for intervals, such as the save interval, in jobs with few steps."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ebbflow.core.config.keys import Entry, leaf_fields
from ebbflow.core.program import DEFAULT_CONFIG

_STEPS = "training.max_steps"
# By key, into how many parts a job that is shorter than the default divides its steps
_PARTS = {
    "training.scheduler.warmup_steps": 10,
    "training.evaluation_interval_steps": 2,
    "checkpoint.interval_steps": 4,
}


@dataclass(frozen=True, kw_only=True)
class ShortenedDefault:
    """A default that exceeds the job's number of steps, and the value that replaces it."""

    key: str
    default: int
    value: int


def shorten_defaults(
    values: Mapping[str, object], entries: Mapping[str, Entry], file: Path
) -> list[ShortenedDefault]:
    """Return the defaults that exceed `training.max_steps`, each with a value that fits.

    A value counts as a default if nobody wrote it, or if it comes from the project's own default
    configuration while `training.max_steps` was given elsewhere. What the user wrote is left to the
    rules, which refuse it.

    Args:
        values: the given values by dotted key.
        file: absolute path of the configuration file.
    """
    steps = values.get(_STEPS)
    # A script counts its steps itself
    if not isinstance(steps, int) or steps < 1 or values.get("script"):
        return []
    is_own_file = file.resolve() == DEFAULT_CONFIG.resolve()
    if is_own_file and entries[_STEPS].origin == "file":
        return []
    shortened = []
    for key, parts in _PARTS.items():
        entry = entries.get(key)
        if entry is not None and not (is_own_file and entry.origin == "file"):
            continue
        default = values.get(key, leaf_fields()[key].default)
        if isinstance(default, int) and default > steps:
            shortened.append(
                ShortenedDefault(key=key, default=default, value=max(1, steps // parts))
            )
    return shortened
