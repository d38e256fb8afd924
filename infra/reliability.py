"""Interruptions as pure math: how often they come, and how often to save because of them."""

from __future__ import annotations

import math


def young_interval_seconds(save_seconds: float, hazard_per_hour: float) -> float:
    """The time between saves that loses least: √(2 · save cost · mean time between interruptions).

    save_seconds: time that training loses per save. hazard_per_hour: interruptions per hour of the whole gang.
    Returns infinity without a hazard. Raises ValueError for a negative argument.
    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974. It holds
    while a save is short against the mean time between interruptions.
    """
    if save_seconds < 0 or hazard_per_hour < 0:
        raise ValueError(f"save_seconds {save_seconds} and hazard_per_hour {hazard_per_hour} must not be negative")
    if hazard_per_hour == 0:
        return math.inf
    return math.sqrt(2.0 * save_seconds * 3600.0 / hazard_per_hour)
