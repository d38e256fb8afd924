"""Terms of a running job (budget, deadline and prices), which `cost` computes and `training`
uses.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from ebbflow.core.config.schema import RunConfig

# Fractions of the budget that are reported when reached. At the last one a job stops, with the
# reserve unspent.
BUDGET_THRESHOLDS = (0.5, 0.8, 1.0)
UNPRICED = "unpriced"  # price kind of capacity whose price is not known
# Multiple to which a Spot price may rise before the ranks know of it. Budgets keep it in reserve.
PRICE_RISE = 3.0
# Time beyond the reserve that a move to a reservation needs: a save, and a placement (5 min) that
# finds it full or not.
_MOVE_SECONDS = 900.0
# Of a budget that lasts for an hour, the price is asked every 36 s
_LOOKS_PER_BUDGET = 100
_SHORTEST_LOOK_SECONDS = 2.0
# Longest time from an answer of the price source to the agents' store, beside the looks
_ANSWER_SECONDS = 2.0


@dataclass(frozen=True)
class PriceWatch:
    """Settings for watching the price of a job's Spot pool: how often it is requested."""

    seconds: float  # `cost.price_seconds`; 0: the price is not watched
    budget_usd: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> PriceWatch:
        """Return the settings for a run of `TrainFlow` with this configuration.

        Stated prices, of a cluster's pools or of Slurm's partitions, do not change while a job runs
        and are not watched.
        """
        cost = config.cost
        target = config.cluster.plan_for
        is_stated = target == "slurm" or (target == "kubernetes" and config.kubernetes.pools)
        if cost.prices == "static" or is_stated:
            return cls(0.0)
        return cls(cost.price_seconds, cost.budget_usd)

    def look_seconds(self, gang_usd_per_hour: float) -> float:
        """Return the seconds between two requests for the price.

        They are at most a hundredth of the time for which the budget lasts, but at least 2 s.
        """
        if self.budget_usd is None or gang_usd_per_hour <= 0:
            return self.seconds
        lasts = self.budget_usd / gang_usd_per_hour * 3600
        return min(self.seconds, max(_SHORTEST_LOOK_SECONDS, lasts / _LOOKS_PER_BUDGET))

    def rise_usd(self, gang_usd_per_hour: float, busy_seconds: float) -> float:
        """Return the dollars by which spending may exceed what the ranks know of.

        The estimate assumes that the price rises to `PRICE_RISE` times the known one, and that the
        ranks learn of it after two intervals (the launcher's and the agent's) plus `busy_seconds`.
        """
        if not self.seconds:
            return 0.0
        unseen = 2 * self.look_seconds(gang_usd_per_hour) + _ANSWER_SECONDS
        return (PRICE_RISE - 1) * gang_usd_per_hour * (unseen + busy_seconds) / 3600


@dataclass(frozen=True)
class RankPrice:
    """Dollars per rank-second over time."""

    first: float  # before the first change
    # (Unix time, dollars per rank-second from then on), ordered by time
    changes: Sequence[tuple[float, float]] = ()

    def price_at(self, utc: float) -> float:
        index = bisect_right(self.changes, utc, key=_time_of_change)
        if index:
            return self.changes[index - 1][1]
        return self.first

    def shifted(self, seconds: float) -> RankPrice:
        """Return the prices with all times `seconds` earlier, for a clock that is behind by as
        much.
        """
        return replace(self, changes=[(at - seconds, usd) for at, usd in self.changes])

    def cost(self, start: float, end: float) -> float:
        """Return the dollars that one rank costs from `start` to `end`."""
        total = 0.0
        at = start
        for moment, _ in self.changes:
            if start < moment < end:
                total += self.price_at(at) * (moment - at)
                at = moment
        return total + self.price_at(at) * max(0.0, end - at)


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """Reserve of time and dollars with which an attempt on Spot can still finish on demand."""

    # time to wait for on-demand machines, start them, redo the work that an interruption now would
    # lose, and save once more
    seconds: float
    # restart_seconds, restart_usd: time and cost of a restart of the ranks on the same machines
    # after a failure
    restart_seconds: float
    restart_usd: float
    step_seconds: float  # duration of a step on demand, including its share of the checkpoints
    # cost of `seconds`, in which waiting for machines costs nothing, and of idle machines afterwards
    usd: float
    step_usd: float  # cost of a step on demand
    # begin_utc, end_utc: begin and end (Unix time) of the reservation that takes the place of
    # on-demand machines
    begin_utc: float = 0.0
    end_utc: float | None = None
    # Whether deadline and budget are guarded; if not, only the move to a reservation remains
    guards: bool = True
    # move_utc, move_to, move_end_utc: begin (Unix time), id and end of a reservation in which the
    # remaining steps cost less
    move_utc: float | None = None
    move_to: str = ""
    move_end_utc: float | None = None
    # Part of `usd` at the price of Spot: a last save, a rise of the price that is not known yet, and
    # the time for which AWS Batch keeps the machines
    spot_usd: float = 0.0

    def at_spot_price(self, ratio: float) -> Fallback:
        """Return the reserve adjusted to a Spot price that has changed by the factor `ratio`."""
        return replace(
            self,
            usd=self.usd + self.spot_usd * (ratio - 1),
            spot_usd=self.spot_usd * ratio,
            restart_usd=self.restart_usd * ratio,
        )

    def needs(self, steps: float, *, restart: bool) -> FallbackNeeds:
        """Return the time and dollars that may be needed to finish on on-demand machines.

        Args:
            steps: number of steps left, in steps of planned duration.
            restart: whether the ranks would first have to start again.
        """
        seconds = self.seconds + steps * self.step_seconds
        usd = self.usd + steps * self.step_usd
        if restart:
            return FallbackNeeds(seconds + self.restart_seconds, usd + self.restart_usd)
        return FallbackNeeds(seconds, usd)


@dataclass(frozen=True)
class FallbackNeeds:
    seconds: float
    usd: float


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Budget, deadline and prices of a job.

    Prices are floats, because they only drive decisions; the ledger uses Decimal.
    """

    usd_per_rank_second: float  # price of the planned capacity per rank
    budget_usd: float | None = None  # spending limit of the job; None: no limit
    spent_usd: float = 0.0  # cost of earlier attempts of the job
    # Part of the budget reserved for the last save, and for idle machines after it
    reserve_usd: float = 0.0
    # Time kept for the same before the deadline and the end of a reservation
    reserve_seconds: float = 0.0
    deadline_utc: float | None = None  # Unix time by which the job must be done; None: no deadline
    # Expected interruptions of the planned pool (a gang in one pool is one hazard)
    hazard_per_hour: float = 0.0
    # "live", "recorded" (on a date), "estimated", "simulated", "stated" (by the user) or `UNPRICED`
    price_kind: str = "recorded"
    # Highest of `BUDGET_THRESHOLDS` that earlier attempts reported; 0: none
    last_notified_threshold: float = 0.0
    step_seconds: float = 0.0  # expected duration of a step until one is measured; 0: unknown
    # Reserve for finishing on demand; None if the attempt is not on Spot
    fallback: Fallback | None = None
    # Unix time at which the attempt's reservation ends; None: it has none, or no end
    end_utc: float | None = None
    # Seconds between two looks at the price of Spot; 0: the price is not watched
    price_look_seconds: float = 0.0

    @property
    def price_rise(self) -> float:
        """Factor by which the price may have risen since the last known price."""
        if self.price_look_seconds:
            return PRICE_RISE
        return 1.0

    @property
    def is_priced(self) -> bool:
        """Whether the price is known. If it is not, amounts in dollars have no meaning."""
        return self.price_kind != UNPRICED

    @property
    def spendable_usd(self) -> float | None:
        """The budget minus the reserve, or None if there is no budget."""
        if self.budget_usd is None:
            return None
        return self.budget_usd - self.reserve_usd

    def at_price(self, usd_per_rank_second: float, *, spent_usd: float) -> Terms:
        """Return the terms at another price of the machines in use; the reserves change in
        proportion.
        """
        ratio = 1.0
        if self.usd_per_rank_second > 0:
            ratio = usd_per_rank_second / self.usd_per_rank_second
        fallback = self.fallback
        return replace(
            self,
            usd_per_rank_second=usd_per_rank_second,
            spent_usd=spent_usd,
            reserve_usd=self.reserve_usd * ratio,
            fallback=None if fallback is None else fallback.at_spot_price(ratio),
        )

    def reached(self, spent_usd: float) -> list[float]:
        """Return the shares of the budget, out of `BUDGET_THRESHOLDS`, that `spent_usd` has
        reached.

        The last threshold counts as reached once only the reserve of the budget is left.
        """
        if self.budget_usd is None:
            return []
        limits = {share: self.budget_usd * share for share in BUDGET_THRESHOLDS}
        limits[BUDGET_THRESHOLDS[-1]] = self.budget_usd - self.reserve_usd
        return [share for share, usd in limits.items() if spent_usd >= usd]

    def out_of_money(self) -> str:
        """Return why the ranks must not start if only the reserve of the budget is left, else
        "".
        """
        if self.spendable_usd is None or self.spent_usd < self.spendable_usd:
            return ""
        return (
            f"budget: ${self.spent_usd:.4f} of ${self.budget_usd:.4f} is spent and "
            f"${self.reserve_usd:.4f} is kept in reserve, so that nothing is left to "
            "train with; fix: run the job again with a larger cost.budget_usd"
        )

    def why_leave(
        self,
        steps_left: int,
        *,
        spent_usd: float,
        now_utc: float,
        slowness: float = 1.0,
        restart: bool = False,
    ) -> str:
        """Return why the attempt must now move to other machines to finish; "" if it may stay.

        Args:
            spent_usd: dollars spent so far, including this attempt.
            slowness: measured duration of a step divided by the planned duration, at least 1.
            restart: whether the ranks would first have to start again.
        """
        if self.end_utc is not None and now_utc + self.reserve_seconds >= self.end_utc:
            return f"leaves its reservation, which ends in {max(0.0, self.end_utc - now_utc):.0f} s"
        if self.fallback is None:
            return ""
        needs = self.fallback.needs(steps_left * slowness, restart=restart)
        return self._why_leave_spot(self.fallback, needs, spent_usd=spent_usd, now_utc=now_utc)

    def _why_leave_spot(
        self, reserve: Fallback, needs: FallbackNeeds, *, spent_usd: float, now_utc: float
    ) -> str:
        deadline = _earliest(self.deadline_utc)
        limit = _earliest(self.deadline_utc, reserve.end_utc)
        needed = max(0.0, reserve.begin_utc - now_utc) + needs.seconds
        if reserve.guards and now_utc + needed > limit:
            left = max(0.0, limit - now_utc) / 3600
            text = f"{left:.2f} h are left, and finishing on demand may take {needed / 3600:.2f} h"
            return f"leaves Spot for on-demand: {text}"
        budget = self.budget_usd
        if reserve.guards and budget is not None and spent_usd + needs.usd > budget:
            text = (
                f"${spent_usd:.4f} of ${budget:.4f} is spent, and finishing on demand may take "
                f"${needs.usd:.4f}"
            )
            return f"leaves Spot for on-demand: {text}"
        if reserve.move_utc is None:
            return ""
        last_move = _earliest(deadline, reserve.move_end_utc) - needs.seconds - _MOVE_SECONDS
        if reserve.move_utc <= now_utc <= last_move:
            return (
                f"leaves Spot for reservation {reserve.move_to}, which has begun and where the "
                "rest costs less"
            )
        return ""

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict) -> Terms:
        fallback = data.get("fallback")
        return cls(**{**data, "fallback": fallback and Fallback(**fallback)})


def describe_unwatched_limits(config: RunConfig, command: str) -> str:
    """Return a warning that the configured budget or deadline is not watched in a job without a
    plan.

    Return "" if neither is set.

    Args:
        command: the command that plans the job and watches them.
    """
    limits = {
        "cost.budget_usd": config.cost.budget_usd,
        "cost.deadline_hours": config.cost.deadline_hours,
    }
    names = " and ".join(name for name, limit in limits.items() if limit is not None)
    if not names:
        return ""
    return (
        f"ebbflow: {names}: not watched, since this job has no plan; fix: {command}, which plans and "
        "watches them"
    )


def _time_of_change(change: tuple[float, float]) -> float:
    return change[0]


def _earliest(*times_utc: float | None) -> float:
    """Return the earliest of several times; infinity if all are None."""
    return min((at for at in times_utc if at is not None), default=math.inf)
