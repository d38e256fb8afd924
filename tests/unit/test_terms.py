"""Budget, deadline and the reserve of a running attempt (`infra.terms`): each term and each edge."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.core.terms import BUDGET_THRESHOLDS, Fallback, Terms

NOW = 1_000_000.0
# To finish on demand, 100 steps need 1000 + 100 × 8 s and $1 + 100 × $1/64; a restart adds 128 s
# and $1/4.
RESERVE = Fallback(
    seconds=1000.0,
    restart_seconds=128.0,
    restart_usd=0.25,
    step_seconds=8.0,
    usd=1.0,
    step_usd=1 / 64,
)
SECONDS = 1800.0
USD = 1.0 + 100 / 64

# Room for the reserve and 900 s more: a save, and a placement that may find the reservation full.
MOVE = SECONDS + 900


def guarded(fallback: Fallback | None = RESERVE, **values: Any) -> Terms:
    return Terms(usd_per_rank_second=0.0, fallback=fallback, **values)


def leaves(
    terms: Terms, *, steps: int = 100, spent_usd: float = 0.0, now_utc: float = NOW, **more: Any
) -> str:
    return terms.why_leave(steps, spent_usd=spent_usd, now_utc=now_utc, **more)


@pytest.mark.parametrize(
    ("fallback", "asked", "seconds"),
    [
        ({}, {}, SECONDS),
        ({"seconds": 1100.0}, {}, SECONDS + 100),
        ({"step_seconds": 9.0}, {}, SECONDS + 100),
        ({}, {"steps": 200}, SECONDS + 800),
        ({}, {"slowness": 1.5}, SECONDS + 400),
        ({}, {"restart": True}, SECONDS + 128),
        ({"restart_seconds": 256.0}, {"restart": True}, SECONDS + 256),
        ({"restart_seconds": 256.0}, {"restart": False}, SECONDS),
        ({"begin_utc": NOW + 64}, {}, SECONDS + 64),
        ({"begin_utc": NOW - 64}, {}, SECONDS),
    ],
)
def test_an_attempt_stays_as_long_as_its_deadline_holds_each_term_of_the_reserve(
    fallback: dict[str, float], asked: dict[str, Any], seconds: float
) -> None:
    reserve = replace(RESERVE, **fallback)
    assert leaves(guarded(reserve, deadline_utc=NOW + seconds), **asked) == ""
    late = leaves(guarded(reserve, deadline_utc=NOW + seconds - 1), **asked)
    assert late == (
        f"leaves Spot for on-demand: {(seconds - 1) / 3600:.2f} h are left, and finishing on "
        f"demand may take {seconds / 3600:.2f} h"
    )


@pytest.mark.parametrize(
    ("fallback", "asked", "usd"),
    [
        ({}, {}, USD),
        ({"usd": 2.0}, {}, USD + 1),
        ({"step_usd": 2 / 64}, {}, USD + 100 / 64),
        ({}, {"steps": 200}, USD + 100 / 64),
        ({}, {"slowness": 1.5}, USD + 50 / 64),
        ({}, {"restart": True}, USD + 0.25),
        ({"restart_usd": 0.5}, {"restart": True}, USD + 0.5),
        ({"restart_usd": 0.5}, {"restart": False}, USD),
    ],
)
def test_an_attempt_stays_as_long_as_its_budget_holds_each_term_of_the_reserve(
    fallback: dict[str, float], asked: dict[str, Any], usd: float
) -> None:
    reserve = replace(RESERVE, **fallback)
    assert leaves(guarded(reserve, budget_usd=3.0 + usd), spent_usd=3.0, **asked) == ""
    dear = leaves(guarded(reserve, budget_usd=3.0 + usd - 1 / 1024), spent_usd=3.0, **asked)
    assert dear == (
        f"leaves Spot for on-demand: $3.0000 of ${3.0 + usd - 1 / 1024:.4f} is spent, and "
        f"finishing on demand may take ${usd:.4f}"
    )


def test_an_attempt_has_until_its_deadline_or_the_end_of_its_last_resort() -> None:
    for deadline, end, limit in (
        (SECONDS, 9000.0, SECONDS),
        (9000.0, SECONDS, SECONDS),
        (None, SECONDS, SECONDS),
    ):
        reserve = replace(RESERVE, end_utc=NOW + end)
        terms = guarded(reserve, deadline_utc=None if deadline is None else NOW + deadline)
        assert leaves(terms, now_utc=NOW + limit - SECONDS) == ""
        assert leaves(terms, now_utc=NOW + limit - SECONDS + 1)
    assert leaves(guarded(deadline_utc=None), now_utc=1e12) == "", "no limit at all"


def test_the_message_after_the_deadline_has_no_negative_hours() -> None:
    assert "0.00 h are left" in leaves(guarded(deadline_utc=NOW), now_utc=NOW + 7200)
    assert "0.01 h are left" in leaves(guarded(deadline_utc=NOW), now_utc=NOW - 36)
    far = guarded(replace(RESERVE, seconds=3.6e6), deadline_utc=NOW)
    assert "200.00 h are left, and finishing on demand may take 1000.22 h" in leaves(
        far, now_utc=NOW - 720_000
    )


def test_without_a_fallback_nothing_makes_an_attempt_leave_spot() -> None:
    assert leaves(guarded(None, deadline_utc=NOW - 1, budget_usd=0.5), spent_usd=9.0) == ""


def test_a_fallback_that_does_not_guard_ignores_deadline_and_budget() -> None:
    reserve = replace(RESERVE, guards=False)
    assert leaves(guarded(reserve, deadline_utc=NOW - 1, budget_usd=0.5), spent_usd=9.0) == ""


def test_an_attempt_in_a_reservation_leaves_it_with_time_for_a_last_save() -> None:
    terms = guarded(None, end_utc=NOW + 300, reserve_seconds=120.0)
    assert leaves(terms, now_utc=NOW + 179) == ""
    assert leaves(terms, now_utc=NOW + 180) == "leaves its reservation, which ends in 120 s"
    assert leaves(terms, now_utc=NOW + 301) == "leaves its reservation, which ends in 0 s"


@pytest.mark.parametrize(
    ("fallback", "deadline", "moves"),
    [
        ({"move_utc": NOW}, MOVE, True),
        ({"move_utc": NOW + 1}, MOVE, False),
        ({"move_utc": NOW}, MOVE - 1, False),
        ({"move_utc": None}, 1e6, False),
        ({"move_utc": NOW, "move_end_utc": NOW + MOVE}, 1e6, True),
        ({"move_utc": NOW, "move_end_utc": NOW + MOVE - 1}, 1e6, False),
        ({"move_utc": NOW, "move_end_utc": NOW + 1e6}, MOVE - 1, False),
        ({"move_utc": NOW, "move_end_utc": NOW + MOVE - 1}, None, False),
        ({"move_utc": NOW}, None, True),
    ],
)
@pytest.mark.parametrize("guards", [True, False])
def test_an_attempt_moves_once_its_reservation_has_begun_and_still_holds_the_rest(
    fallback: dict[str, Any], deadline: float | None, moves: bool, guards: bool
) -> None:
    reserve = replace(RESERVE, guards=guards, move_to="cr-1", **fallback)
    why = leaves(guarded(reserve, deadline_utc=None if deadline is None else NOW + deadline))
    text = "leaves Spot for reservation cr-1, which has begun and where the rest costs less"
    assert why == (text if moves else "")


def test_the_spendable_amount_is_the_budget_without_the_reserve() -> None:
    assert guarded(budget_usd=10.0, reserve_usd=1.5).spendable_usd == 8.5
    assert guarded(reserve_usd=1.5).spendable_usd is None


def test_a_gang_starts_until_only_the_reserve_is_left() -> None:
    terms = guarded(budget_usd=10.0, reserve_usd=1.5, spent_usd=8.5)
    assert terms.out_of_money() == (
        "budget: $8.5000 of $10.0000 is spent and $1.5000 is kept in reserve, so that "
        "nothing is left to train with; fix: run the job again with a larger cost.budget_usd"
    )
    assert replace(terms, spent_usd=8.499).out_of_money() == ""
    assert replace(terms, budget_usd=None).out_of_money() == ""


@pytest.mark.parametrize(
    ("spent_usd", "reached"),
    [
        (4.99, []),
        (5.0, [0.5]),
        (7.99, [0.5]),
        (8.0, [0.5, 0.8]),
        (8.99, [0.5, 0.8]),
        (9.0, [0.5, 0.8, 1.0]),
    ],
)
def test_a_threshold_of_the_budget_is_reached_at_its_share_and_the_last_at_the_reserve(
    spent_usd: float, reached: list[float]
) -> None:
    assert guarded(budget_usd=10.0, reserve_usd=1.0).reached(spent_usd) == reached
    assert guarded(reserve_usd=1.0).reached(spent_usd) == []
    assert BUDGET_THRESHOLDS == (0.5, 0.8, 1.0)


def test_terms_survive_json_with_and_without_a_fallback() -> None:
    for fallback in (
        None,
        replace(RESERVE, end_utc=5.0, guards=False, move_utc=3.0, move_to="cr-1"),
    ):
        terms = guarded(fallback, budget_usd=3.0, deadline_utc=NOW, spent_usd=2.0)
        assert Terms.from_json(terms.to_json()) == terms
    assert Terms.from_json({"usd_per_rank_second": 1.0}) == Terms(usd_per_rank_second=1.0)


def test_terms_of_older_versions_get_the_defaults_of_what_they_lack() -> None:
    terms = Terms.from_json({"usd_per_rank_second": 1.0})
    assert (terms.spent_usd, terms.reserve_usd, terms.reserve_seconds) == (0.0, 0.0, 0.0)
    assert (terms.hazard_per_hour, terms.last_notified_threshold, terms.step_seconds) == (
        0.0,
        0.0,
        0.0,
    )
    assert (terms.budget_usd, terms.deadline_utc, terms.fallback, terms.end_utc) == (
        None,
        None,
        None,
        None,
    )
    assert terms.price_kind == "recorded"
    assert (RESERVE.begin_utc, RESERVE.end_utc, RESERVE.guards) == (0.0, None, True)
    assert (RESERVE.move_utc, RESERVE.move_to, RESERVE.move_end_utc) == (None, "", None)


def test_terms_and_their_reserve_are_named_and_cannot_be_changed() -> None:
    stored = Terms.from_json(guarded().to_json())
    for terms, name in ((stored.fallback, "usd"), (stored, "budget_usd")):
        with pytest.raises(FrozenInstanceError):
            setattr(terms, name, 1e9)
    with pytest.raises(TypeError, match="positional"):
        Terms(1.0)  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        Fallback(1.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 300),
    st.floats(0, 4000),
    st.floats(0, 9),
    st.integers(0, 50),
    st.floats(0, 900),
    st.floats(0, 3),
    st.floats(1, 3),
)
def test_a_job_that_has_to_leave_spot_also_has_to_later_or_at_a_higher_price(
    steps: int,
    late: float,
    spent: float,
    more_steps: int,
    later: float,
    dearer: float,
    slower: float,
) -> None:
    terms = guarded(deadline_utc=NOW + 4000, budget_usd=9.0)
    if leaves(terms, steps=steps, now_utc=NOW + late, spent_usd=spent):
        worse = {
            "steps": steps + more_steps,
            "now_utc": NOW + late + later,
            "spent_usd": spent + dearer,
        }
        assert leaves(terms, **worse, slowness=slower)
        assert leaves(terms, **worse, slowness=slower, restart=True)
