"""Estimate the distribution of Spot capacity over time.

A plan derives interruptions, waits, the checkpoint interval, hours, dollars and P(in time) from it.

Capacity alternates between spells (periods) with and without it. The prior is a table of recorded
zones. A job's zone is none of them, so a random factor makes a zone's spells longer or shorter.
Each pair of a zone and a factor is a *particle*. Before anything was observed, all zones weigh the
same. The losses and the waits of the user's own jobs in the pool weigh each particle by its
likelihood.

The zones are those of one instance type (one V100) in one half-year. Other types, gangs and years
may behave differently; the factor allows for as much as the recorded zones differ, doubled.

The Spot advisor's interruption band is not used. It is an average over a month and all zones of a
region, and the recorded pools lost capacity 300 to 4,000 times as often as their band suggests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy

# Log deviation of the actual zone from a recorded one, in standard deviations between the recorded
# zones: of 0, 0.5, 1, 1.5 and 2 the one with which nearest to 80 % of the jobs in the first half of
# the recordings cost p10 to p90.
ZONE_DEVIATIONS = 2.0
# Strata of the factor, each with the same probability.
_STRATA = 101


class ZoneSpells(NamedTuple):
    """Recorded periods with and without Spot capacity in one zone."""

    share_up: float  # share of the time with capacity
    # up_hours, down_hours: hours of the periods with and without capacity. The sorted periods are
    # split into six groups of equal size, and each value is the mean of one group.
    up_hours: tuple[float, ...]
    down_hours: tuple[float, ...]


# V100, 45.5 days from 2023-02-15, one tick per 195 s (recorded by skypilot-org/spot-traces
# 221da1a).
ZONE_SPELLS = {
    "us-east-1a": ZoneSpells(
        0.167, (0.16, 0.17, 0.28, 0.44, 0.77, 2.50), (0.16, 0.19, 0.37, 0.94, 2.78, 17.21)
    ),
    "us-east-1c": ZoneSpells(
        0.467, (0.16, 0.20, 0.38, 0.62, 1.30, 6.27), (0.16, 0.22, 0.43, 0.88, 2.02, 6.51)
    ),
    "us-east-1d": ZoneSpells(
        0.447, (0.16, 0.24, 0.41, 0.69, 1.34, 7.12), (0.16, 0.27, 0.47, 1.01, 2.12, 8.29)
    ),
    "us-east-1f": ZoneSpells(
        0.591, (0.16, 0.19, 0.42, 0.77, 2.12, 10.04), (0.16, 0.18, 0.32, 0.63, 1.53, 6.65)
    ),
    "us-east-2a": ZoneSpells(
        0.759, (0.17, 0.31, 0.67, 1.74, 5.00, 26.63), (0.16, 0.23, 0.37, 0.68, 2.19, 7.31)
    ),
    "us-east-2b": ZoneSpells(
        0.682, (0.18, 0.33, 0.71, 1.91, 4.79, 17.76), (0.16, 0.26, 0.47, 1.14, 2.87, 7.05)
    ),
    "us-west-2a": ZoneSpells(
        0.883, (0.16, 0.33, 0.69, 1.87, 4.67, 29.32), (0.17, 0.30, 0.35, 0.46, 0.84, 2.77)
    ),
    "us-west-2b": ZoneSpells(
        0.905, (0.16, 0.26, 0.81, 2.41, 7.62, 53.86), (0.16, 0.30, 0.37, 0.62, 1.36, 4.02)
    ),
    "us-west-2c": ZoneSpells(
        0.891, (0.16, 0.31, 0.67, 1.80, 4.41, 34.64), (0.16, 0.23, 0.34, 0.46, 0.82, 3.08)
    ),
}


class ObservedWait(NamedTuple):
    """Wait for capacity after a reclaim in one of the user's jobs."""

    hours: float
    # whether the wait was cut short, because the job moved to another pool
    is_cut: bool
    weight: float  # as how many independent waits it counts


@dataclass(frozen=True, kw_only=True)
class SpotEvidence:
    """Observations of the user's own jobs in one Spot pool, weighted by their age and worth."""

    losses: float = 0.0
    hours: float = 0.0  # hours with capacity in which the losses occurred
    waits: tuple[ObservedWait, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SpotEvidence:
        waits = tuple(ObservedWait(*wait) for wait in data["waits"])
        return cls(losses=data["losses"], hours=data["hours"], waits=waits)


NOTHING_SEEN = SpotEvidence()


@dataclass(frozen=True)
class SpotBelief:
    """Distribution of the spells (periods with and without capacity) of one Spot pool.

    It consists of weighted particles.

    Attributes:
        spells: Hours of the spells of each particle, [particles, 2, groups], first without
            capacity, then with it. All groups of a particle are equally frequent.
        weights: Probability of each particle, [particles].
        hazard_per_hour: Expected losses per hour with capacity.
        wait_hours: Expected hours from a loss until there is capacity again.
        share_up: Expected share of the time with capacity.
    """

    spells: numpy.ndarray = field(repr=False)
    weights: numpy.ndarray = field(repr=False)
    hazard_per_hour: float
    wait_hours: float
    share_up: float


def believe(
    evidence: SpotEvidence = NOTHING_SEEN, zones: Mapping[str, ZoneSpells] = ZONE_SPELLS
) -> SpotBelief:
    """Estimate the spells of a Spot pool from recorded `zones` and the `evidence` of own jobs."""
    return _believe(evidence, tuple(zones.values()))


@cache
def _believe(evidence: SpotEvidence, zones: tuple[ZoneSpells, ...]) -> SpotBelief:
    import numpy

    recorded = numpy.array([[zone.down_hours, zone.up_hours] for zone in zones])
    deviation = numpy.log(recorded.sum(axis=2)).std(axis=0) * ZONE_DEVIATIONS
    normal = NormalDist()
    strata = numpy.array([normal.inv_cdf((index + 0.5) / _STRATA) for index in range(_STRATA)])
    # One draw for both: where capacity is missing for long, it stays for short (their logs
    # correlate by -0.79).
    factors = numpy.exp(strata[:, numpy.newaxis] * deviation * [1.0, -1.0])
    spells = (recorded[:, numpy.newaxis] * factors[numpy.newaxis, :, :, numpy.newaxis]).reshape(
        -1, 2, recorded.shape[2]
    )
    down = spells[:, 0].mean(axis=1)
    up = spells[:, 1].mean(axis=1)
    logs = evidence.losses * -numpy.log(up) - evidence.hours / up
    for wait in evidence.waits:
        logs += wait.weight * _log_likelihood(wait, spells[:, 0])
    weights = numpy.exp(logs - logs.max())
    weights /= weights.sum()
    # Per hour of the clock, since a job meets each pool for the same time
    losses = (weights / (up + down)).sum()
    share_up = (weights * up / (up + down)).sum()
    waits = (weights * down / (up + down)).sum()
    return SpotBelief(
        spells=spells,
        weights=weights,
        hazard_per_hour=float(losses / share_up),
        wait_hours=float(waits / losses),
        share_up=float(share_up),
    )


def _log_likelihood(wait: ObservedWait, down: numpy.ndarray) -> numpy.ndarray:
    """Return the log likelihood of a wait for each particle, [particles].

    The waits of a group are taken as exponential with the group's mean. A wait that was cut short
    says that the whole wait was longer.
    """
    import numpy

    longer = numpy.exp(-wait.hours / down)
    if wait.is_cut:
        likely = longer.mean(axis=1)
    else:
        likely = (longer / down).mean(axis=1)
    return numpy.log(numpy.maximum(likely, 1e-300))
