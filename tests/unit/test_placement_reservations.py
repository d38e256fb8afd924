"""Reservations in the rule of placement: waits for them, moves to them, and reservations as the
last resort.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from decimal import Decimal
from typing import Any

import pytest

from ebbflow.cost.capacity.decision import RULE
from ebbflow.cost.plan.guarantee import DECIDE_HOURS, make_fallback, usd_saved_by_moving
from ebbflow.cost.plan.pools import Candidate
from ebbflow.cost.prices.reservations import Reservation
from tests.support.capacity import queue, queues
from tests.support.placing import (
    BOTH,
    HOUR,
    NEEDED_HOURS,
    ON_DEMAND_QUEUE,
    SPOT_QUEUE,
    attempt,
    place,
)
from tests.support.pools import make_config, on_demand_pool, spot_pool
from tests.support.timelines import WALL

HELD_QUEUE = queue("held", "on_demand", reservation="cr-1")
ALL = queues(SPOT_QUEUE, ON_DEMAND_QUEUE, HELD_QUEUE)

# On demand, the job needs 5.125 h; a wait for a reservation must leave that, and 5 min to place it.
LATEST_HOURS = 5.125 + DECIDE_HOURS


def held_pool(**values: Any) -> Candidate:
    """Make a reservation of two nodes: 4 h of work, a start of 1/2 h, and no dearer than Spot."""
    return on_demand_pool(**{"reservation": "cr-1", "expected_usd": 30.0} | values)


def test_a_reservation_is_taken_if_the_rest_of_the_job_costs_no_more_there() -> None:
    pools = [spot_pool(), on_demand_pool(), held_pool()]
    found = place(pools, where=ALL)
    assert (found.queue, found.reservation, found.policy) == ("held", "cr-1", RULE)
    assert found.reason == "reservation cr-1, where the rest costs no more"
    assert (found.fallback, found.start_by_utc, found.runnable_seconds) == (None, None, 1800)
    dearer = place([spot_pool(), on_demand_pool(), held_pool(expected_usd=30.1)], where=ALL)
    assert dearer.queue == "spot"
    after = place(pools, where=ALL, past=[attempt("reclaimed")])
    assert after.reason.startswith(
        "2 × g5.xlarge spot in queue spot was reclaimed; reservation cr-1"
    )


def test_a_refused_reservation_gives_way_until_an_attempt_has_started() -> None:
    pools = [spot_pool(), on_demand_pool(), held_pool()]
    full = attempt("never_started", queue="held", started=False)
    lacking = attempt("never_started", at=60.0, started=False)
    assert place(pools, where=ALL, past=[full]).queue == "spot"
    assert place(pools, where=ALL, past=[full, lacking]).queue == "spot", (
        "with plain on-demand to fall back to"
    )
    assert place(pools, where=ALL, past=[full, attempt("reclaimed", at=60.0)]).queue == "held"
    alone = queues(SPOT_QUEUE, HELD_QUEUE)
    reserved = [spot_pool(), held_pool()]
    unguarded = place(reserved, where=alone, past=[full])
    assert (unguarded.queue, unguarded.fallback) == ("spot", None)
    assert place(reserved, where=alone, past=[attempt("ended", queue="held")]).queue == "held", (
        "it was not full"
    )
    assert place(reserved, where=alone, past=[full, lacking]).queue == "held", "in turn"


def test_the_only_pool_is_tried_again_although_it_was_full() -> None:
    for pool, where in ((held_pool(), queues(HELD_QUEUE)), (on_demand_pool(), BOTH)):
        full = attempt(
            "never_started", queue="held" if pool.reservation else "on-demand", started=False
        )
        found = place([pool], where=where, past=[full])
        assert found.market == "on_demand"
        assert found.reason.endswith("on-demand: no usable queue runs a Spot pool of the plan")


def test_a_reservation_is_worth_a_wait_of_five_minutes() -> None:
    pools = [spot_pool(), on_demand_pool(), held_pool()]
    for minutes, worth in ((5.0, True), (4.99, False)):
        config = make_config(runnable_minutes=minutes)
        assert (place(pools, config=config, where=ALL).queue == "held") is worth


def test_another_reservation_is_tried_if_the_first_one_was_full() -> None:
    second = queue("second", "on_demand", reservation="cr-2")
    pools = [spot_pool(), on_demand_pool(), held_pool(), held_pool(reservation="cr-2")]
    where = queues(*ALL.values(), second)
    assert place(pools, where=where).queue == "held"
    assert (
        place(
            pools, where=where, past=[attempt("never_started", queue="held", started=False)]
        ).queue
        == "second"
    )


@pytest.mark.parametrize(
    ("begins", "deadline", "ends", "wait"),
    [
        # It waits for its begin and then D, as long as deadline and end allow.
        (0.0, 20.0, None, 0.5),
        (2.0, 20.0, None, 2.5),
        (2.0, None, None, 2.5),
        (2.0, LATEST_HOURS + 2.25, None, 2.25),
        (0.0, LATEST_HOURS + 0.25, None, 0.25),
        (0.0, LATEST_HOURS + 0.084, None, 0.084),
        (0.0, LATEST_HOURS + 0.083, None, None),
        (2.0, LATEST_HOURS + 2.084, None, 2.084),
        (2.0, LATEST_HOURS + 2.083, None, None),
        # A start takes 1/2 h, the work 4 h and the last save 1/8 h, before its end.
        (0.0, 20.0, 4.625 + 0.25, 0.25),
        (2.0, 20.0, 4.625 + 2.25, 2.25),
        (2.0, 20.0, 4.625 + 2.5, 2.5),
        (2.0, 20.0, 4.625 + 9.0, 2.5),
        (2.0, None, 4.625 + 2.25, 2.25),
        (2.0, 20.0, 4.625 + 2.083, None),
    ],
)
def test_a_wait_for_a_reservation_leaves_on_demand_its_time_and_ends_before_the_reservation_is_too_short(
    begins: float, deadline: float | None, ends: float | None, wait: float | None
) -> None:
    held = held_pool(wait_hours=begins, ends_utc=None if ends is None else WALL + (ends + 1) * HOUR)
    config = make_config()
    # An hour has passed since the job began.
    known = {
        "where": ALL,
        "now_utc": WALL + HOUR,
        "deadline_hours": None if deadline is None else deadline + 1,
    }
    found = place(
        [spot_pool(expected_usd=50.0), on_demand_pool(), held], config=config, held=[], **known
    )
    assert (found.reservation is not None) is (wait is not None)
    if wait is not None:
        assert found.runnable_seconds == pytest.approx(wait * HOUR, abs=1.0)


def test_a_reservation_without_plain_on_demand_must_itself_finish_after_the_wait() -> None:
    """There is nothing else to go to after a wait in vain, so D does not count."""
    alone = queues(HELD_QUEUE)
    for begins in (0.0, 2.0):
        needed = 4.625 + begins + DECIDE_HOURS
        held = held_pool(wait_hours=begins)
        found = place([held], where=alone, deadline_hours=needed + 0.25)
        assert found.reason == "reservation cr-1, where the rest costs no more"
        assert found.runnable_seconds == pytest.approx((begins + 0.25) * HOUR, abs=1.0)


def test_a_reservation_that_is_the_last_resort_is_waited_for_although_it_is_too_late() -> None:
    found = place([held_pool(wait_hours=2.0)], where=queues(HELD_QUEUE), deadline_hours=4.0)
    assert found.runnable_seconds == 2.5 * HOUR


def test_the_end_of_a_reservation_that_is_the_last_resort_limits_the_time_on_spot() -> None:
    """Spot may be used until the reservation, which begins later and has an end, is just long
    enough.
    """
    where = queues(SPOT_QUEUE, HELD_QUEUE)
    for deadline, end in ((30.0, NEEDED_HOURS + 0.25 + 2), (NEEDED_HOURS + 0.25 + 2, 30.0)):
        held = held_pool(wait_hours=2.0, expected_usd=99.0, ends_utc=WALL + end * HOUR)
        found = place([spot_pool(), held], where=where, deadline_hours=deadline, held=[])
        assert (found.market, found.runnable_seconds) == ("spot", 900)
        assert found.start_by_utc == WALL + 0.5 * HOUR
        assert found.fallback == asdict(
            make_fallback(make_config(), spot_pool(), held, steps=1000, begin_utc=WALL + 2 * HOUR)
        )
    later = place(
        [spot_pool(), replace(held, ends_utc=None)],
        where=where,
        deadline_hours=30.0,
        held=[],
        now_utc=WALL,
    )
    assert later.fallback is not None and later.fallback["end_utc"] is None


def test_a_last_resort_that_can_begin_now_has_no_begin() -> None:
    found = place([spot_pool(), held_pool(expected_usd=99.0)], where=queues(SPOT_QUEUE, HELD_QUEUE))
    assert found.market == "spot"
    assert found.fallback is not None and found.fallback["begin_utc"] == 0.0


def reservation(name: str = "cr-1", **values: Any) -> Reservation:
    """Make a reservation that begins in 2 h and costs less than Spot."""
    known = {
        "id": name,
        "instance_type": "g5.xlarge",
        "instances": 2,
        "region": "us-east-1",
        "start_utc": WALL + 2 * HOUR,
        "usd_per_hour": Decimal("0.5"),
    }
    return Reservation(**{**known, **values})


def test_an_attempt_on_spot_moves_to_the_reservation_that_saves_the_most() -> None:
    second = queue("second", "on_demand", reservation="cr-2")
    where = queues(*ALL.values(), second)
    cheap = reservation("cr-2", usd_per_hour=Decimal("0.25"), end_utc=WALL + 99 * HOUR)
    saved = usd_saved_by_moving(make_config(), spot_pool(), cheap, WALL)
    for held in ([reservation(), cheap], [cheap, reservation()]):
        found = place(where=where, held=held)
        plain = make_fallback(make_config(), spot_pool(), on_demand_pool(), steps=1000)
        moves = replace(plain, move_utc=cheap.start_utc, move_to="cr-2", move_end_utc=cheap.end_utc)
        assert found.fallback == asdict(moves)
        assert found.reason == (
            "Spot while a start is safe (9.31 h more than the reserve); moves to reservation "
            f"cr-2 at its begin, which saves about ${saved:.2f}"
        )
    same = place(where=where, held=[reservation(), reservation("cr-2")])
    assert same.fallback is not None and same.fallback["move_to"] == "cr-1", "the first of equals"


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({}, True),
        ({"instance_type": "g6.xlarge"}, False),
        ({"region": "us-west-2"}, False),
        ({"id": "cr-9"}, False),
        ({"instances": 1}, False),
        ({"problem": "is expired"}, False),
        ({"usd_per_hour": Decimal("1.5")}, False),
        ({"start_utc": WALL}, False),
    ],
)
def test_an_attempt_moves_only_to_a_reservation_of_its_machines_that_a_queue_has_and_that_saves(
    changes: dict[str, Any], moves: bool
) -> None:
    found = place(where=ALL, held=[reservation(**changes)])
    assert found.fallback is not None
    assert (found.fallback["move_utc"] is not None) is moves
    assert ("moves to reservation" in found.reason) is moves


def test_an_attempt_moves_to_no_reservation_whose_queue_is_not_usable_nor_from_on_demand() -> None:
    closed = queues(
        SPOT_QUEUE, ON_DEMAND_QUEUE, replace(HELD_QUEUE, usable=False, problem="is DISABLED")
    )
    found = place(where=closed, held=[reservation()])
    assert found.fallback is not None and found.fallback["move_utc"] is None
    late = place(where=ALL, held=[reservation()], deadline_hours=6.0)
    assert (late.market, late.fallback) == ("on_demand", None)
    only_spot = make_config().changed("cluster", market="spot")
    stays = place(config=only_spot, where=ALL, held=[reservation()])
    assert stays.fallback is not None and stays.fallback["move_utc"] is None


def test_an_unguarded_attempt_that_moves_guards_nothing_else() -> None:
    found = place([spot_pool()], where=ALL, held=[reservation()])
    plain = make_fallback(make_config(), spot_pool(), spot_pool(), steps=1000)
    assert found.fallback == asdict(
        replace(plain, guards=False, move_utc=WALL + 2 * HOUR, move_to="cr-1", move_end_utc=None)
    )
    little = reservation(usd_per_hour=Decimal("1.4"))
    saved = usd_saved_by_moving(make_config(), spot_pool(), little, WALL)
    assert 0 < saved < 1
    assert place([spot_pool()], where=ALL, held=[little]).fallback is not None


def test_the_configured_reservations_count_if_none_are_given() -> None:
    found = place(where=ALL)
    assert found.fallback is not None and found.fallback["move_utc"] is None
    assert place(where=ALL, held=[reservation()]).fallback["move_to"] == "cr-1"
