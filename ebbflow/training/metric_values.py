"""Metrics that a script or a workload logs, as numbers that commits, events and trackers can hold."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ebbflow.core.events import EVALUATION
from ebbflow.training.reporter import Reporter

# Names that commits, trackers and pages use for the place of a metric
_RESERVED = frozenset({"step", "time", "_step", "_timestamp", "_runtime"})
_PREFIX = "logged_"


@dataclass(frozen=True)
class MetricValues:
    """Metrics by name: the finite ones, and the others as texts such as "inf"."""

    finite: dict[str, float] = field(default_factory=dict)
    non_finite: dict[str, str] = field(default_factory=dict)


class MetricGate:
    """Reader of logged metrics, which warns once per name if it renames or drops a value.

    Args:
        say: prints a warning.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._warned: set[str] = set()

    def read(self, values: Mapping[str, object]) -> MetricValues:
        """Convert tensors, numpy scalars, numbers, and texts that contain a number; drop all other
        values.

        A metric is never an error: it says nothing about the weights.
        """
        found = MetricValues()
        for name, value in values.items():
            key = self._name(str(name))
            number = read_metric(value)
            if number is None:
                kind = type(value).__name__
                self._warn(key, f"metric {key} is no number but a {kind}: left out")
            elif math.isfinite(number):
                found.finite[key] = number
            else:
                found.non_finite[key] = str(number)
                self._warn(
                    f"{key} non-finite",
                    f"metric {key} is {number}: left out of commits and trackers",
                )
        return found

    def _name(self, name: str) -> str:
        if name not in _RESERVED:
            return name
        renamed = f"{_PREFIX}{name.lstrip('_')}"
        self._warn(
            name, f"metric {name} is recorded as {renamed}, since {name} is the tracker's own"
        )
        return renamed

    def _warn(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            self._say(text)


def read_metric(value: object) -> float | None:
    """Convert a metric to a number, or return None if that is impossible.

    A tensor or array must have one element.
    """
    if value is None or isinstance(value, bytes):
        return None
    item = getattr(value, "item", None)  # of tensors and of numpy's scalars and arrays
    try:
        if callable(item):
            value = item()
        return float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def emit_evaluation(
    reporter: Reporter, step: int, values: MetricValues, pictures: Mapping[str, str] | None = None
) -> None:
    """Emit the evaluation event of a step, with non-finite metrics as texts."""
    data: dict[str, object] = {"metrics": values.finite}
    if values.non_finite:
        data["non_finite"] = values.non_finite
    if pictures:
        data["pictures"] = pictures
    reporter.emit(EVALUATION, step=step, **data)
