"""Parser of durations such as 90m, 1.5h, 1h 30m or 1:30, and hints for dates given instead."""

import re
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|min|[smhd])\s*")
_CLOCK = re.compile(r"(\d+):([0-5]\d)(?::([0-5]\d))?")
# By the end of a key, the seconds of its unit
_MOMENT = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)(?:[T ](?P<time>\d\d:\d\d(?::\d\d)?))?\s*"
    r"(?P<zone>Z|UTC|[+-]\d\d(?::?\d\d)?|[A-Za-z]+(?:/[A-Za-z_+-]+)+)?"
)
_UNITS = {"_seconds": 1.0, "_minutes": 60.0, "_hours": 3600.0, "_days": 86400.0}


def read_duration(key: str, text: str) -> float | None:
    """Convert a duration such as "90m" to the unit in the key's name, such as 1.5 for
    cost.deadline_hours.

    Return None if the key's name has no unit, or if the text is not a duration with a unit. h:mm
    and h:mm:ss are hours. A text that repeats a unit or puts a smaller one first is not a duration.
    """
    unit = next((seconds for ending, seconds in _UNITS.items() if key.endswith(ending)), None)
    seconds = _read_seconds(text.strip())
    if unit is None or seconds is None:
        return None
    return seconds / unit


def explain_moment(key: str, text: str, now: datetime) -> str | None:
    """Return a hint for a date or time given as the duration `key`: the number to write instead.

    Return None if the text is not a date or time, or if the key's name has no unit.

    Args:
        text: such as "2030-03-31 14:00 Europe/Berlin".
        now: time from which the duration counts, with a time zone.
    """
    unit = next((seconds for ending, seconds in _UNITS.items() if key.endswith(ending)), None)
    match = _MOMENT.fullmatch(text.strip())
    if unit is None or match is None:
        return None
    try:
        wall = datetime.fromisoformat(f"{match['date']}T{match['time'] or '00:00'}")
        zone = _read_zone(match["zone"] or "")
    except (ValueError, ZoneInfoNotFoundError):
        return None
    if zone is None:
        return f"{key} is a duration; to have it computed, add a zone, such as {text} Europe/Berlin"
    moment = wall.replace(tzinfo=zone)
    try:
        return _explain_change_of_clocks(moment) or _explain_length(key, moment, now, unit)
    except OverflowError:  # in UTC it is before year 1 or after 9999
        return None


def _explain_change_of_clocks(moment: datetime) -> str | None:
    """Explain that a local time is skipped or ambiguous when clocks change, or return None."""
    zone = moment.tzinfo
    if moment.astimezone(UTC).astimezone(zone).replace(tzinfo=None) != moment.replace(tzinfo=None):
        return f"there is no {moment:%H:%M} on that day in {zone}: clocks are set forward"
    later = moment.replace(fold=1)
    if later.utcoffset() != moment.utcoffset():
        return (
            f"{moment:%H:%M} comes twice on that day in {zone}: write {moment.isoformat()} or "
            f"{later.isoformat()}"
        )
    return None


def _explain_length(key: str, moment: datetime, now: datetime, unit: float) -> str:
    length = (moment - now).total_seconds() / unit
    if length <= 0:
        return f"{key} is a duration from the job's start, and {moment.isoformat()} is past"
    return f"{key} is a duration from the job's start: write {length:.2f} if it starts now"


def _read_zone(text: str) -> timezone | ZoneInfo | None:
    """Parse a time zone such as "Z", "+02:00" or "Europe/Berlin"; return None for an empty text.

    Raises ZoneInfoNotFoundError, ValueError.
    """
    if not text:
        return None
    if text in ("Z", "UTC"):
        return UTC
    if text[0] in "+-":
        digits = text[1:].replace(":", "").ljust(4, "0")
        offset = timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        return timezone(-offset if text[0] == "-" else offset)
    return ZoneInfo(text)


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
