"""Backoff grows to its limit; a retry ends with success, a cause that no retry cures, or the deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from ebbflow.infra.retry import Backoff, call_within, retry


class Clock:
    """Time that passes only in `sleep`."""

    def __init__(self, seconds: float) -> None:
        self.left_seconds = seconds
        self.pauses: list[float] = []

    def left(self) -> float:
        return self.left_seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.left_seconds -= seconds


def failing(times: int) -> Callable[[], str]:
    """A call that raises OSError so many times, then succeeds."""
    errors = [OSError(f"failure {number}") for number in range(times)]

    def call() -> str:
        if errors:
            raise errors.pop(0)
        return "done"

    return call


def attempt(call: Callable[[], str], clock: Clock, most: int | None = None) -> str:
    def judge(error: Exception) -> tuple[str, int | None]:
        if not isinstance(error, OSError):
            raise error
        return "unreachable", most

    return retry(call, Backoff(1.0, 4.0), left=clock.left, sleep=clock.sleep, judge=judge, give_up=TimeoutError)


def test_pauses_double_up_to_the_longest_and_start_over_after_a_reset() -> None:
    backoff = Backoff(1.0, 4.0)
    assert [backoff.next_pause() for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    backoff.reset()
    assert backoff.next_pause() == 1.0


def test_a_retry_waits_between_tries_until_one_succeeds() -> None:
    clock = Clock(100.0)
    assert attempt(failing(3), clock) == "done"
    assert [low <= pause <= 2 * low for low, pause in zip((0.5, 1.0, 2.0), clock.pauses, strict=True)] == [True] * 3


def test_a_retry_gives_up_before_a_pause_that_does_not_fit() -> None:
    clock = Clock(2.5)
    with pytest.raises(TimeoutError, match=r"unreachable \([23] tries\)"):
        attempt(failing(9), clock)
    assert clock.left() > 0


def test_a_retry_gives_up_after_as_many_tries_as_the_error_is_worth() -> None:
    clock = Clock(100.0)
    with pytest.raises(TimeoutError, match=r"unreachable \(2 tries\)") as given_up:
        attempt(failing(9), clock, most=2)
    assert str(given_up.value.__cause__) == "failure 1" and len(clock.pauses) == 1


def test_no_try_is_made_after_the_deadline_and_none_after_an_error_that_no_retry_cures() -> None:
    with pytest.raises(TimeoutError, match="timed out"):
        attempt(failing(0), Clock(0.0))

    def wrong() -> str:
        raise ValueError("wrong")

    clock = Clock(100.0)
    with pytest.raises(ValueError, match="wrong"):
        attempt(wrong, clock)
    assert clock.pauses == []


def test_a_call_that_hangs_is_abandoned_at_its_deadline() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="late"):
        call_within(0.05, never.wait, "hanging", lambda: TimeoutError("late"))
    never.set()
    assert call_within(5.0, lambda: 3, "quick", TimeoutError) == 3
    with pytest.raises(KeyError):
        call_within(5.0, lambda: {}["missing"], "raising", TimeoutError)
