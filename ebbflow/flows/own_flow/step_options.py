"""The options of `@ebbflow`, checked before anything runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

_UNIT_HOURS = {"m": 1 / 60, "h": 1.0, "d": 24.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([mhd])")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}")


class OptionError(ValueError):
    """Error: an option of `@ebbflow` has a wrong name or value. The message names the fix."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options of `@ebbflow`, which apply to each training of the step.

    Attributes:
        budget: Dollars that a training may cost. None: no limit.
        budget_of_all: Dollars that all trials of the foreach around the step may cost together.
        deadline: Hours from the first attempt to the end; in the source also "90m", "8h" or "2d".
        ranks: Processes on each node. None: one per GPU, or one without GPUs.
        store: Folder or s3://bucket/prefix. None: a folder beside the flow's datastore.
        name: Part of the job's name, in place of the step's name.
        config: YAML file with further settings for scripts and `attach`.
        usd_per_node_hour: Price of a node. None: the price of the machine or of the planned pool.
    """

    budget: float | None = None
    budget_of_all: float | None = None
    deadline: float | None = None
    ranks: int | None = None
    store: str | None = None
    name: str | None = None
    config: str | None = None
    usd_per_node_hour: float | None = None

    @classmethod
    def parse(cls, given: Mapping[str, object]) -> StepOptions:
        """Check and convert the options as written in the source. Raises OptionError for the first
        problem.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise OptionError(
                    f"{name} is no option of @ebbflow; fix: use one of {', '.join(known)}"
                )
        return cls(
            budget=_parse_amount("budget", given.get("budget"), "25 for $25"),
            budget_of_all=_parse_amount("budget_of_all", given.get("budget_of_all"), "40 for $40"),
            deadline=_parse_hours(given.get("deadline")),
            ranks=_parse_ranks(given.get("ranks")),
            store=_parse_text("store", given.get("store"), "s3://bucket/prefix"),
            name=_parse_label(given.get("name")),
            config=_parse_text("config", given.get("config"), "the path of a YAML file"),
            usd_per_node_hour=_parse_amount(
                "usd_per_node_hour", given.get("usd_per_node_hour"), "1.2 for $1.20"
            ),
        )


def _parse_amount(name: str, value: object, example: str) -> float | None:
    if value is None:
        return None
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = float(value)
        except ValueError:
            number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise OptionError(f"{name}={value!r} is no number above 0; fix: dollars, such as {example}")
    return number


def _parse_hours(value: object) -> float | None:
    if value is None:
        return None
    match = _DURATION.fullmatch(str(value).strip())
    if match is not None:
        hours = float(match[1]) * _UNIT_HOURS[match[2]]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        hours = float(value)
    else:
        hours = math.nan
    if not math.isfinite(hours) or hours <= 0:
        raise OptionError(
            f'deadline={value!r} is no time; fix: hours as a number, or "90m", "8h", "2d"'
        )
    return hours


def _parse_ranks(value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"ranks={value!r} is no number of processes; fix: 1 or more")
    return value


def _parse_text(name: str, value: object, example: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise OptionError(f"{name}={value!r} is no text; fix: {example}")
    return value


def _parse_label(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _LABEL.fullmatch(value):
        raise OptionError(
            f"name={value!r} cannot be part of a job's name; fix: letters, digits, '.', '_' and "
            "'-', at most 40, beginning with a letter or digit"
        )
    return value
