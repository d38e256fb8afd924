"""Pauses grow to their limit; a retry ends with success, a cause that no retry cures, or the deadline."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from ebbflow.infra.retry import backoff_pauses, call_within, retry


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


def attempt(call: Callable[[], str], clock: Clock, most: int = 99) -> str:
    return retry(
        call,
        left=clock.left,
        curable=lambda error, tries: isinstance(error, OSError) and tries < most,
        give_up=lambda error, tries: TimeoutError(f"{tries} tries") if isinstance(error, OSError) else error,
        pauses=backoff_pauses(first_seconds=1.0, longest_seconds=4.0),
        sleep=clock.sleep,
    )


def test_pauses_grow_to_the_longest() -> None:
    runs = [list(itertools.islice(backoff_pauses(first_seconds=1.0, longest_seconds=4.0), 5)) for _ in range(200)]
    assert all(0.5 <= pause <= most for run in runs for pause, most in zip(run, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True))
    assert max(run[4] for run in runs) > 3.5 and len({run[0] for run in runs}) > 100


def test_a_retry_waits_between_tries_until_one_succeeds() -> None:
    clock = Clock(100.0)
    assert attempt(failing(3), clock) == "done"
    assert [0.5 <= pause <= most for most, pause in zip((1.0, 2.0, 4.0), clock.pauses, strict=True)] == [True] * 3


def test_a_retry_gives_up_before_a_pause_that_does_not_fit() -> None:
    clock = Clock(2.5)
    with pytest.raises(TimeoutError, match=r"\d tries"):
        attempt(failing(99), clock)
    assert clock.left() > 0


def test_a_retry_gives_up_after_as_many_tries_as_the_error_is_worth() -> None:
    clock = Clock(100.0)
    with pytest.raises(TimeoutError, match="2 tries") as given_up:
        attempt(failing(9), clock, most=2)
    assert str(given_up.value.__cause__) == "failure 1" and len(clock.pauses) == 1


def test_there_is_no_second_try_after_an_error_that_no_retry_cures() -> None:
    def wrong() -> str:
        raise ValueError("wrong")

    clock = Clock(100.0)
    with pytest.raises(ValueError, match="wrong") as given_up:
        attempt(wrong, clock)
    assert clock.pauses == [] and given_up.value.__cause__ is None


def test_a_call_that_hangs_is_abandoned_at_its_deadline() -> None:
    never, called = threading.Event(), []
    with pytest.raises(TimeoutError, match="late"):
        call_within(0.05, never.wait, "hanging", lambda: TimeoutError("late"))
    never.set()
    with pytest.raises(TimeoutError, match="late"):
        call_within(0.0, lambda: called.append(1), "after the deadline", lambda: TimeoutError("late"))
    assert not called and call_within(5.0, lambda: 3, "quick", TimeoutError) == 3
    with pytest.raises(KeyError):
        call_within(5.0, lambda: {}["missing"], "raising", TimeoutError)
