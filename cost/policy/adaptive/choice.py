"""Which spot pool, when there are several: what a start elsewhere costs beyond one in the best pool at home."""

from __future__ import annotations

from dataclasses import dataclass

from cost.policy.interface import PoolView, State

PRIOR_STAY_HOURS = 4.0
PRIOR_STAYS = 2.0
"""A pool not yet tried counts as two stays of four hours: the mean over the recorded zones is 0.7 to 10 hours."""


@dataclass(slots=True)
class Stays:
    """What a job has seen of one pool while it ran there."""

    hours: float = 0.0
    losses: int = 0

    @property
    def expected_hours(self) -> float:
        """Posterior mean of a stay (Gamma-Poisson)."""
        return (PRIOR_STAYS * PRIOR_STAY_HOURS + self.hours) / (PRIOR_STAYS + self.losses)


def reference_usd_per_hour(state: State) -> float:
    """The price that the value tables reckon with: of the cheapest pool at home, else of the cheapest."""
    return min(pool.usd_per_hour for pool in state.home_pools or state.spot_pools)


class Chooser:
    """Ranks pools by dollars per useful hour of an expected stay."""

    def __init__(self) -> None:
        self.stays: dict[str, Stays] = {}

    def of(self, pool: PoolView) -> Stays:
        return self.stays.setdefault(pool.id, Stays())

    def stay_hours(self, pool: PoolView, state: State) -> float:
        return max(state.tick_hours, min(self.of(pool).expected_hours, state.work_left_hours))

    def entry_usd(self, pool: PoolView, state: State) -> float:
        """Transfer of the checkpoint and the paid time of it."""
        return pool.egress_usd + pool.usd_per_hour * pool.transfer_hours

    def rank(self, pool: PoolView, state: State) -> tuple[float, str]:
        entry = self.entry_usd(pool, state) + pool.usd_per_hour * state.changeover_hours
        return pool.usd_per_hour + entry / self.stay_hours(pool, state), pool.id

    def extra_usd(self, pool: PoolView, state: State) -> float:
        """What a stay in this pool costs beyond one at the reference price without a transfer; may be negative."""
        dearer = pool.usd_per_hour - reference_usd_per_hour(state)
        return dearer * self.stay_hours(pool, state) + self.entry_usd(pool, state)

    def saving_usd(self, pool: PoolView, current: PoolView, state: State) -> float:
        """What moving from a running `current` saves over one expected stay; negative if it costs."""
        hours = state.changeover_hours + pool.transfer_hours
        leaving = state.drain_hours * current.usd_per_hour + pool.usd_per_hour * hours + pool.egress_usd
        return (current.usd_per_hour - pool.usd_per_hour) * self.stay_hours(pool, state) - leaving
