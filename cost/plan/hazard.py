"""How often a pool takes its machines back, from the little that is published.

The advisor's band is the share of a type's spot capacity that was reclaimed in the trailing month. Reading it as the
chance p that one instance is lost within a month of 730 hours gives the hazard −ln(1 − p) / 730 per hour. It is an
average over a month and all zones: a pool that is running dry is far worse than its band. So the band is only the mean
of a prior with very little weight, and what own jobs saw of a pool moves it at once (`cost.experience`).

A gang lies in one pool, whose interruptions come together: it counts once, not once per node. Failures of machines
are independent, so they grow with the GPUs, on either market.
"""

from __future__ import annotations

import math

from infra.reliability import GammaHazard

HOURS_PER_MONTH = 730.0
# Middle of each band of the advisor; the last band is open above ("over 20 %") and taken as 25 %.
BAND_SHARE = (0.025, 0.075, 0.125, 0.175, 0.25)
# 419 unexpected interruptions in 54 days on 16,384 H100: Grattafiori et al. 2024, "The Llama 3 Herd of Models",
# section 3.3.4.
FAILURES_PER_GPU_HOUR = 419 / (54 * 24 * 16384)
# How many interruptions seen the band is worth. Of 1, 0.01 and 0.001 the last makes the losses in nine zones (V100,
# 2023; on another day each, given those before) the likeliest by far: pools are reclaimed a thousand times as often as
# their band says, or hardly ever.
PRIOR_WEIGHT = 0.001


def reclaim_prior(band: int) -> GammaHazard:
    """What is believed of the reclaims of a spot pool of this band before any job has been there."""
    return GammaHazard.from_prior(reclaim_hazard_per_hour(band), weight=PRIOR_WEIGHT)


def reclaim_hazard_per_hour(band: int) -> float:
    """Interruptions per hour of a spot pool of this advisor band. Raises IndexError for an unknown band."""
    return -math.log1p(-BAND_SHARE[band]) / HOURS_PER_MONTH


def gang_hazard_per_hour(market: str, band: int | None, gpus: int) -> float | None:
    """Expected interruptions per hour of a gang of `gpus` GPUs in one pool; None when the band is not known."""
    failures = FAILURES_PER_GPU_HOUR * gpus
    if market != "spot":
        return failures
    return None if band is None else reclaim_hazard_per_hour(band) + failures
