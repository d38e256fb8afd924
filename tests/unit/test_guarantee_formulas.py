"""The formulas of the guarantee: each term, moved alone, moves each result by what it is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.cost.plan.candidates import MISSES_DEADLINE, NO_QUEUE, OVER_BUDGET
from ebbflow.cost.plan.guarantee import (
    DECIDE_HOURS,
    busy_hours,
    finish_hours,
    finish_usd,
    guaranteed_hours,
    hours_until_end,
    last_resorts,
    make_fallback,
    refuse_unguaranteed,
    spare_hours,
    spare_usd,
    start_hours,
    usd_saved_by_moving,
)
from ebbflow.cost.plan.pools import Candidate, Rejection
from ebbflow.cost.prices.reservations import Reservation
from tests.support.pools import changed_pool, make_config, on_demand_pool, spot_pool

# Of `spot_pool` and `on_demand_pool`, by hand: D = 1/2, s = 1/8, I = 1 + 1/16 h; d = 1/4 h on Spot,
# 1/2 h on demand. AWS Batch keeps machines for 1/12 h.
IDLE = 300 / 3600
BASE = {
    "finish_hours": 0.5 + 4.5 + 0.125,
    "finish_usd": (4.5 + 0.125 + IDLE) * 4 + 0.09375,
    "spare_hours": 20 - 5.125 - 2 * 0.25 - 1.0625 - (8 - 4),
    "spare_usd": 100 - 18.59375 - IDLE * 4 - 1.0625 * 4 - (2 * 0.25 + 1.0625 + 0.125 + IDLE) * 3,
    "seconds": 3600 * (0.5 + 0.5 + 1.0625 + 0.125),
    "usd": (0.5 + 1.0625 + 0.125 + IDLE) * 4 + (0.125 + IDLE) * 3 + 0.09375,
    "restart_seconds": 900.0,
    "restart_usd": 0.75,
    "step_seconds": 14.4,
    "step_usd": 0.016,
}

PLAIN = on_demand_pool()  # 5.125 h to finish
DEAR = on_demand_pool(work_hours=3.0, paid_hours=3.25, usd_per_hour=4.0)  # 4.125 h
PLAIN_USD = (4.5 + 0.125 + IDLE) * 4 + 0.09375
DEAR_USD = (3.5 + 0.125 + IDLE) * 8 + 0.09375


def figures(
    config: RunConfig, spot: Candidate, last: Candidate, steps: int = 1000
) -> dict[str, float]:
    """Compute all results of the guarantee, with 20 h and $100 left."""
    fallback = make_fallback(config, spot, last, steps=steps)
    names = ("seconds", "usd", "restart_seconds", "restart_usd", "step_seconds", "step_usd")
    return {
        "finish_hours": finish_hours(config, last),
        "finish_usd": finish_usd(config, last),
        "spare_hours": spare_hours(config, spot, last, 20.0),
        "spare_usd": spare_usd(config, spot, last, 100.0),
        **{name: getattr(fallback, name) for name in names},
    }


@pytest.mark.parametrize(
    ("of", "change", "moved"),
    [
        (
            "config",
            {"runnable_minutes": 60},
            {"finish_hours": 0.5, "spare_hours": -0.5, "seconds": 1800},
        ),
        (
            "config",
            {"save_seconds": 900},
            {
                "finish_hours": 0.125,
                "finish_usd": 0.5,
                "spare_hours": -0.125,
                "spare_usd": -0.875,
                "seconds": 450,
                "usd": 0.875,
            },
        ),
        (
            "config",
            {"hang_floor_seconds": 450},
            {"spare_hours": -0.0625, "spare_usd": -0.4375, "seconds": 225, "usd": 0.25},
        ),
        (
            "spot",
            {"start_hours": 0.5},
            {"spare_hours": -0.5, "spare_usd": -1.5, "restart_seconds": 900, "restart_usd": 0.75},
        ),
        (
            "spot",
            {"fixed_lost_hours": 0.5},
            {"spare_hours": -0.5, "spare_usd": -1.5, "restart_seconds": 900, "restart_usd": 0.75},
        ),
        ("spot", {"fixed_lost_hours": 0.2}, {}),
        (
            "spot",
            {"interval_hours": 1.5},
            {"spare_hours": -0.5, "spare_usd": -3.5, "seconds": 1800, "usd": 2},
        ),
        ("spot", {"work_hours": 9}, {"spare_hours": -1}),
        ("spot", {"work_hours": 3}, {"spare_hours": 4}),
        (
            "spot",
            {"usd_per_hour": 2},
            {"spare_usd": -1.6875 - IDLE, "usd": 0.125 + IDLE, "restart_usd": 0.25},
        ),
        (
            "spot",
            {"volume_usd_per_hour": 0.5},
            {"spare_usd": -1.6875 - IDLE, "usd": 0.125 + IDLE, "restart_usd": 0.25},
        ),
        ("spot", {"step_seconds": 4}, {}),
        (
            "spot",
            {"step_seconds": 1},
            {"spare_hours": -1, "spare_usd": -7, "seconds": 3600, "usd": 4},
        ),
        (
            "last",
            {"step_seconds": 4},
            {"spare_hours": -1, "spare_usd": -7, "seconds": 3600, "usd": 4},
        ),
        (
            "last",
            {"work_hours": 5},
            {
                "finish_hours": 1,
                "finish_usd": 4,
                "spare_usd": -4,
                "step_seconds": 3.6,
                "step_usd": 0.004,
            },
        ),
        (
            "last",
            {"fixed_lost_hours": 0.75},
            {
                "finish_hours": 0.25,
                "finish_usd": 1,
                "spare_hours": -0.25,
                "spare_usd": -1,
                "seconds": 900,
                "usd": 1,
            },
        ),
        (
            "last",
            {"paid_hours": 6.5},
            {
                "finish_hours": 2,
                "finish_usd": 8,
                "spare_hours": -2,
                "spare_usd": -8,
                "step_seconds": 7.2,
                "step_usd": 0.008,
            },
        ),
        (
            "last",
            {"usd_per_hour": 3},
            {
                "finish_usd": 9.25 + 2 * IDLE,
                "spare_usd": -9.25 - 2.125 - 2 * IDLE,
                "usd": 3.375 + 2 * IDLE,
                "step_usd": 0.008,
            },
        ),
        (
            "last",
            {"volume_usd_per_hour": 1},
            {
                "finish_usd": 9.25 + 2 * IDLE,
                "spare_usd": -9.25 - 2.125 - 2 * IDLE,
                "usd": 3.375 + 2 * IDLE,
                "step_usd": 0.008,
            },
        ),
        ("last", {"storage_usd": 1.0625}, {"finish_usd": 1, "spare_usd": -1, "usd": 1}),
        ("last", {"transfer_usd": 1.03125}, {"finish_usd": 1, "spare_usd": -1, "usd": 1}),
        ("last", {"wait_hours": 2}, {"finish_hours": 2, "spare_hours": -2}),
        ("last", {"interval_hours": 9}, {}),
    ],
)
def test_each_term_of_the_guarantee_moved_alone_moves_the_reserve(
    of: str, change: dict[str, float], moved: dict[str, float]
) -> None:
    if of == "config":
        config = make_config(**change)
    else:
        config = make_config()
    if of == "spot":
        spot = spot_pool(**change)
    else:
        spot = spot_pool()
    if of == "last":
        last = on_demand_pool(**change)
    else:
        last = on_demand_pool()
    expected = {name: value + moved.get(name, 0.0) for name, value in BASE.items()}
    assert figures(config, spot, last) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("steps", "step_hours"), [(1, 4.0), (0, 4.0), (2, 2.0)])
def test_the_fallback_spreads_the_work_on_demand_over_the_steps(
    steps: int, step_hours: float
) -> None:
    found = figures(make_config(), spot_pool(), on_demand_pool(), steps)
    assert (found["step_seconds"], found["step_usd"]) == (3600 * step_hours, 4 * step_hours)


def test_the_reserve_in_time_holds_a_last_save_if_a_loss_undoes_less() -> None:
    """An attempt that leaves Spot saves first; one that loses its machine does not."""
    config = make_config(hang_floor_seconds=0.0)
    short = figures(config, spot_pool(interval_hours=0.0625), on_demand_pool())
    assert short["spare_hours"] == BASE["spare_hours"] + 1.0625 - 0.125
    assert short["seconds"] == BASE["seconds"] - 3600 * (1.0625 - 0.125)
    assert short["spare_usd"] == pytest.approx(BASE["spare_usd"] + (4 + 3) * 1.0)
    assert short["usd"] == pytest.approx(BASE["usd"] - 4 * 1.0)


def test_the_fallback_knows_when_its_last_resort_begins_and_ends() -> None:
    fallback = make_fallback(
        make_config(), spot_pool(), on_demand_pool(ends_utc=9000.0), steps=1, begin_utc=4000.0
    )
    assert (fallback.begin_utc, fallback.end_utc, fallback.guards) == (4000.0, 9000.0, True)
    plain = make_fallback(make_config(), spot_pool(), on_demand_pool(), steps=1)
    assert (plain.begin_utc, plain.end_utc) == (0.0, None)


def test_a_start_takes_the_longer_of_the_first_start_and_a_restart() -> None:
    assert start_hours(spot_pool(start_hours=0.25, fixed_lost_hours=0.125)) == 0.25
    assert start_hours(spot_pool(start_hours=0.125, fixed_lost_hours=0.5)) == 0.5
    assert DECIDE_HOURS == 300 / 3600


def test_busy_hours_hold_start_and_work_and_expected_failures_if_those_take_longer() -> None:
    assert busy_hours(on_demand_pool()) == 4.5
    assert busy_hours(on_demand_pool(paid_hours=4.75)) == 4.75


def test_hours_until_a_reservations_end_are_exact_and_others_have_no_end() -> None:
    assert hours_until_end(on_demand_pool(ends_utc=10_000.0), 2_800.0) == 2.0
    assert hours_until_end(on_demand_pool(), 2_800.0) == math.inf


def test_last_resorts_are_plain_on_demand_pools_or_else_reservations() -> None:
    spot = spot_pool()
    plain = on_demand_pool()
    held = on_demand_pool(reservation="cr-1")
    assert last_resorts([spot, held, plain]) == [plain]
    assert last_resorts([spot, held]) == [held]
    assert last_resorts([spot]) == []


def reservation(
    *, starts: float | None, ends: float | None = None, usd: str | None = "0.5"
) -> Reservation:
    """Make a reservation that starts and ends at so many hours."""
    return Reservation(
        id="cr-1",
        instance_type="g5.xlarge",
        instances=2,
        region="us-east-1",
        start_utc=None if starts is None else 3600 * starts,
        end_utc=None if ends is None else 3600 * ends,
        usd_per_hour=None if usd is None else Decimal(usd),
    )


@pytest.mark.parametrize(
    ("held", "changes", "saved"),
    [
        # 2 h until it begins, 1/4 h of them to start: 6.25 h of work are left, 1/8 h of which on
        # Spot is the save.
        (reservation(starts=3), {}, (6.25 - 0.125) * 3 - (6.25 + 0.25) * 0.5 * 2),
        (reservation(starts=4), {}, (5.25 - 0.125) * 3 - (5.25 + 0.25) * 0.5 * 2),
        (reservation(starts=3, usd="0.25"), {}, (6.25 - 0.125) * 3 - (6.25 + 0.25) * 0.25 * 2),
        (reservation(starts=3), {"work_hours": 9.0}, (7.25 - 0.125) * 3 - (7.25 + 0.25) * 0.5 * 2),
        (reservation(starts=3), {"start_hours": 0.5}, (6.5 - 0.125) * 3 - (6.5 + 0.5) * 0.5 * 2),
        (
            reservation(starts=3),
            {"usd_per_hour": 1.0},
            (6.25 - 0.125) * 2 - (6.25 + 0.25) * 0.5 * 2,
        ),
        # The volume of a reserved machine costs as much as that of a Spot machine.
        (
            reservation(starts=3),
            {"volume_usd_per_hour": 0.25},
            (6.25 - 0.125) * 3.5 - (6.25 + 0.25) * 0.75 * 2,
        ),
        (reservation(starts=3), {"nodes": 1}, (6.25 - 0.125) * 1.5 - (6.25 + 0.25) * 0.5),
        # It begins within the start, or after the work.
        (reservation(starts=1.125), {}, (8 - 0.125) * 3 - (8 + 0.25) * 0.5 * 2),
        (reservation(starts=3), {"work_hours": 1.0}, -0.125 * 3 - 0.25 * 0.5 * 2),
        # It has begun, has no price of its own, or ends before the work: 1 + 2 + 1/4 + 6.25 h.
        (reservation(starts=1), {}, 0.0),
        (reservation(starts=None), {}, 0.0),
        (reservation(starts=3, usd=None), {}, 0.0),
        (reservation(starts=3, ends=9.5), {}, (6.25 - 0.125) * 3 - (6.25 + 0.25) * 0.5 * 2),
        (reservation(starts=3, ends=9.5 - 1 / 4096), {}, 0.0),
    ],
)
def test_the_saving_of_a_move_to_a_reservation_follows_from_its_work(
    held: Reservation, changes: dict[str, Any], saved: float
) -> None:
    assert usd_saved_by_moving(make_config(), spot_pool(**changes), held, 3600.0) == pytest.approx(
        saved, rel=1e-12
    )


@pytest.mark.parametrize(
    ("budget", "pools", "chosen", "hours"),
    [
        (None, [spot_pool(), PLAIN, DEAR], spot_pool(), 4.125 + DECIDE_HOURS),
        (DEAR_USD + 1e-9, [PLAIN, DEAR], spot_pool(), 4.125 + DECIDE_HOURS),
        (DEAR_USD - 1e-9, [PLAIN, DEAR], spot_pool(), 5.125 + DECIDE_HOURS),
        (PLAIN_USD - 1e-9, [PLAIN, DEAR], DEAR, 4.125 + DECIDE_HOURS),
        (PLAIN_USD - 1e-9, [PLAIN, DEAR], spot_pool(), 0.0),
        (PLAIN_USD - 1e-9, [PLAIN, spot_pool()], PLAIN, 5.125 + DECIDE_HOURS),
    ],
)
def test_the_guaranteed_deadline_is_the_shortest_within_the_budget(
    budget: float | None, pools: list[Candidate], chosen: Candidate, hours: float
) -> None:
    assert guaranteed_hours(make_config(budget_usd=budget), pools, chosen, 0.0) == hours


def test_the_guaranteed_deadline_of_a_reservation_is_before_its_end() -> None:
    needed = 5.125 + DECIDE_HOURS
    held = on_demand_pool(reservation="cr-1", ends_utc=needed * 3600)
    config = make_config(budget_usd=None)
    assert guaranteed_hours(config, [held], held, 0.0) == needed
    assert guaranteed_hours(config, [held], held, 1.0) == 0.0
    later = changed_pool(held, ends_utc=math.inf, work_hours=6.0)
    assert guaranteed_hours(config, [held, later], held, 1.0) == 7.125 + DECIDE_HOURS


def refused(
    pools: list[Candidate],
    rejected: Sequence[Rejection] = (),
    *,
    hours_left: float = 100.0,
    usd_left: float = math.inf,
    now_utc: float = 0.0,
    market: str = "auto",
    **cost: Any,
) -> dict[str, Any] | None:
    config = make_config(**cost).changed("cluster", market=market)
    return refuse_unguaranteed(
        config, pools, rejected, now_utc=now_utc, hours_left=hours_left, usd_left=usd_left
    )


def test_a_new_job_is_admitted_up_to_the_last_second_and_cent_that_on_demand_needs() -> None:
    needed = 5.125 + DECIDE_HOURS
    assert refused([PLAIN], hours_left=needed, usd_left=PLAIN_USD + 1e-9) is None
    assert refused([PLAIN], hours_left=needed - 1e-9) is not None
    assert refused([PLAIN], usd_left=PLAIN_USD - 1e-9) is not None
    held = on_demand_pool(reservation="cr-1", ends_utc=needed * 3600)
    assert refused([held]) is None
    assert refused([held], now_utc=1.0) is not None
    assert refused([DEAR, PLAIN], usd_left=20.0) is None, "the cheaper one is within the budget"
    assert refused([DEAR, PLAIN], hours_left=5.0, usd_left=20.0) is not None, "but not in time"


def test_a_refused_deadline_names_each_term_and_a_deadline_that_suffices() -> None:
    found = refused([on_demand_pool(work_hours=5.0), PLAIN], hours_left=4.0, deadline_hours=10.0)
    assert found is not None and found["outcome"] is Outcome.DEADLINE
    assert found["message"] == (
        f"the deadline cannot be guaranteed: {PLAIN} takes 4.00 h of work + 0.50 h to start + "
        "0.50 h for on-demand capacity (batch.runnable_minutes) + 0.12 h for a last save + 0.08 "
        "h to place it = 5.21 h, of 4.00 h"
    )
    assert found["hint"] == (
        "set cost.deadline_hours to 11.21 or more, or batch.runnable_minutes lower; without this "
        "guarantee: cluster.market=spot and a lower cost.confidence"
    )
    assert found["enough"] == pytest.approx(10.0 - 4.0 + 5.125 + DECIDE_HOURS, rel=1e-12)
    without = refused([PLAIN], hours_left=4.0, deadline_hours=None)
    assert without is not None and without["enough"] == pytest.approx(-4.0 + 5.125 + DECIDE_HOURS)


def test_a_reservation_that_ends_before_the_job_is_refused_for_its_end() -> None:
    needed = 5.125 + DECIDE_HOURS
    held = on_demand_pool(reservation="cr-1", ends_utc=needed * 3600 - 360)
    found = refused([held], hours_left=needed, deadline_hours=needed)
    assert found is not None and found["outcome"] is Outcome.DEADLINE
    assert found["message"].endswith("+ 0.08 h to place it = 5.21 h, and ends in 5.11 h")
    assert found["hint"] == (
        "use a reservation that ends later, or a queue of on-demand machines; without this "
        "guarantee: cluster.market=spot and a lower cost.confidence"
    )
    short = refused([held], hours_left=5.0)
    assert short is not None and "lower" in short["hint"]


def test_a_refused_budget_names_the_cheapest_pool_and_a_budget_that_suffices() -> None:
    found = refused([DEAR, PLAIN], usd_left=10.0, budget_usd=12.0)
    assert found is not None and found["outcome"] is Outcome.BUDGET
    assert found["message"] == (
        f"deadline and budget cannot be guaranteed together: finishing on {PLAIN} takes "
        "$18.9271, of $10.0000"
    )
    assert (
        found["hint"]
        == "set cost.budget_usd to 20.93 or more; without this guarantee: cluster.market=spot and a lower cost.confidence"
    )
    assert found["enough"] == pytest.approx(2.0 + PLAIN_USD)
    without = refused([PLAIN], usd_left=10.0, budget_usd=None)
    assert without is not None and without["enough"] == pytest.approx(PLAIN_USD - 10.0)


def rejection(kind: str, excess: float, market: str = "on_demand") -> Rejection:
    return Rejection(
        instance_type="g5.xlarge",
        nodes=1,
        processes_per_node=1,
        market=market,
        kind=kind,
        reason=f"is beyond it by {excess}",
        excess=excess,
    )


def test_without_an_on_demand_pool_the_nearest_rejection_names_the_limit() -> None:
    late = rejection(MISSES_DEADLINE, 2.0)
    dear = rejection(OVER_BUDGET, 1.5)
    others = [rejection(NO_QUEUE, 1.0), rejection(OVER_BUDGET, 0.5, market="spot")]
    for rejected, outcome, hint in (
        ([late, dear, *others], Outcome.BUDGET, "raise cost.budget_usd"),
        ([late, *others], Outcome.DEADLINE, "raise cost.deadline_hours"),
        ([replace(late, excess=1.2), dear], Outcome.DEADLINE, "raise cost.deadline_hours"),
    ):
        found = refused([spot_pool()], rejected)
        nearest = min(
            (rejection for rejection in rejected if rejection not in others),
            key=lambda one: one.excess,
        )
        assert found == {
            "outcome": outcome,
            "message": (
                "no on-demand pool can take over if Spot has no capacity; the nearest, "
                f"{nearest}, {nearest.reason}"
            ),
            "hint": f"{hint}; without this guarantee: cluster.market=spot and a lower cost.confidence",
        }
    assert refused([spot_pool()], others) is None, "no limit is to blame"
    assert refused([spot_pool()], [late], market="spot") is None
    assert refused([spot_pool()]) is None
    assert refused([PLAIN], [late, dear]) is None
