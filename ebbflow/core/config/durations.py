"""Durations as people write them: 90m, 1.5h, 1h 30m, 1:30."""

import re

_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|min|[smhd])\s*")
_CLOCK = re.compile(r"(\d+):([0-5]\d)(?::([0-5]\d))?")
# By the end of a key, the seconds of its unit
_UNITS = {"_seconds": 1.0, "_minutes": 60.0, "_hours": 3600.0, "_days": 86400.0}


def read_duration(key: str, text: str) -> float | None:
    """Return a duration in the unit that a key's name ends with, such as 1.5 for "90m" and
    cost.deadline_hours. None if the key has no unit, or the text is no duration with a unit.

    h:mm and h:mm:ss are hours. A text that repeats a unit or puts a smaller one first is no duration.
    """
    unit = next((seconds for ending, seconds in _UNITS.items() if key.endswith(ending)), None)
    seconds = _read_seconds(text.strip())
    if unit is None or seconds is None:
        return None
    return seconds / unit


def _read_seconds(text: str) -> float | None:
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        return int(clock[1]) * 3600.0 + int(clock[2]) * 60.0 + int(clock[3] or 0)
    total = 0.0
    smallest = float("inf")
    end = 0
    while end < len(text):
        part = _PART.match(text, end)
        if part is None or _SECONDS[part[2]] >= smallest:
            return None
        smallest = _SECONDS[part[2]]
        total += float(part[1]) * smallest
        end = part.end()
    return total if text else None
