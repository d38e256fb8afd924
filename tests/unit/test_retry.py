"""Pauses grow to their limit; a retry ends with success, a cause that no retry cures, or the
deadline.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable

import pytest

from ebbflow.core import errors
from ebbflow.core.retry import backoff_pauses, call_within, retry
from ebbflow.training import errors as training_errors
from ebbflow.training.retry import is_transient, retry_until_deadline, run_while


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
        give_up=lambda error, tries: (
            TimeoutError(f"{tries} tries") if isinstance(error, OSError) else error
        ),
        pauses=backoff_pauses(first_seconds=1.0, longest_seconds=4.0),
        sleep=clock.sleep,
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The limits between which pauses were drawn. Each draw gives the upper one."""
    limits: list[tuple[float, float]] = []

    def draw(_: random.SystemRandom, least: float, most: float) -> float:
        limits.append((least, most))
        return most

    monkeypatch.setattr(random.SystemRandom, "uniform", draw)
    return limits


@pytest.mark.parametrize(
    ("options", "upper"),
    [
        ({"first_seconds": 1.0, "longest_seconds": 4.0}, [1.0, 2.0, 4.0, 4.0]),
        ({"first_seconds": 1.0, "longest_seconds": 3.0}, [1.0, 2.0, 3.0, 3.0]),
        ({"first_seconds": 8.0, "longest_seconds": 3.0}, [8.0, 3.0, 3.0]),
        ({}, [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0]),
    ],
)
def test_pauses_are_drawn_up_to_a_limit_that_doubles_to_the_longest(
    drawn: list[tuple[float, float]], options: dict[str, float], upper: list[float]
) -> None:
    assert list(itertools.islice(backoff_pauses(**options), len(upper))) == pytest.approx(upper)
    assert [least for least, _ in drawn] == pytest.approx([upper[0] / 2] * len(upper))


def test_pauses_differ_between_processes_with_the_same_seed() -> None:
    random.seed(1)
    before = random.getstate()
    pauses = {next(backoff_pauses(first_seconds=1.0)) for _ in range(100)}
    assert len(pauses) > 50 and all(0.5 <= pause <= 1.0 for pause in pauses)
    assert random.getstate() == before, "the user's own draws are not disturbed"


def test_a_retry_waits_between_tries_until_one_succeeds() -> None:
    clock = Clock(100.0)
    assert attempt(failing(3), clock) == "done"
    assert [
        0.5 <= pause <= most for most, pause in zip((1.0, 2.0, 4.0), clock.pauses, strict=True)
    ] == [True] * 3


@pytest.mark.parametrize(("left_seconds", "tries"), [(3.0, 2), (3.1, 3)])
def test_a_retry_gives_up_unless_the_pause_ends_before_the_deadline(
    drawn: list[tuple[float, float]], left_seconds: float, tries: int
) -> None:
    """Pauses of 1, 2 and 4 s: after the first, the second one needs more than 2 s."""
    clock = Clock(left_seconds)
    with pytest.raises(TimeoutError, match=f"{tries} tries"):
        attempt(failing(99), clock)
    assert clock.pauses == [1.0, 2.0][: tries - 1]


def test_a_retry_without_given_pauses_backs_off(drawn: list[tuple[float, float]]) -> None:
    clock = Clock(100.0)
    done = retry(failing(3), left=clock.left, curable=lambda *_: True, sleep=clock.sleep)
    assert done == "done" and clock.pauses == pytest.approx([0.02, 0.04, 0.08])


def test_a_retry_raises_the_last_error_unless_another_is_given() -> None:
    with pytest.raises(OSError, match="failure 0") as raised:
        retry(failing(1), left=lambda: 0.0, curable=lambda *_: True)
    assert raised.value.__cause__ is None


def test_a_retry_whose_pauses_end_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="pauses never end"):
        retry(failing(9), left=lambda: 9.0, curable=lambda *_: True, pauses=iter([0.0]))


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
    never = threading.Event()
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="late"):
        call_within(0.05, never.wait, "hanging", lambda: TimeoutError("late"))
    assert 0.05 <= time.monotonic() - began < 10
    (abandoned,) = (thread for thread in threading.enumerate() if thread.name == "hanging")
    assert abandoned.daemon, "else the process could not exit"
    never.set()


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_a_call_after_its_deadline_is_not_made(seconds: float) -> None:
    called = []
    with pytest.raises(TimeoutError, match="late"):
        call_within(
            seconds, lambda: called.append(1), "after the deadline", lambda: TimeoutError("late")
        )
    assert not called


@pytest.mark.parametrize("result", [3, None, False])
def test_a_call_within_its_deadline_is_awaited_and_gives_its_result(result: object) -> None:
    def take_a_moment() -> object:
        time.sleep(0.02)
        return result

    assert call_within(0.9, take_a_moment, "quick", TimeoutError) is result


def test_a_call_within_its_deadline_gives_its_error() -> None:
    with pytest.raises(KeyError):
        call_within(5.0, lambda: {}["missing"], "raising", TimeoutError)
    with pytest.raises(SystemExit):
        call_within(5.0, lambda: (_ for _ in ()).throw(SystemExit), "raising", TimeoutError)


@pytest.mark.parametrize(
    ("error", "transient"),
    [
        (errors.StoreError("x"), True),
        (errors.StoreUnavailable("x"), True),
        (errors.StoreTimeout("x"), True),
        (errors.StoreFull("x"), True),
        (errors.ObjectNotFound("x"), True),
        (errors.StoreForbidden("x"), False),
        (errors.StoreMisconfigured("x"), False),
        (errors.CloudUnavailable("x"), True),
        (training_errors.CheckpointError("x"), True),
        (training_errors.NoRoom("x"), False),
        (training_errors.DataError("x"), False),
        (training_errors.GangError("x", curable=False), False),
        (training_errors.GangError("x"), True),
        (OSError("x"), False),
        (ValueError("x"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_transient_if_its_cause_can_pass(error: Exception, transient: bool) -> None:
    assert is_transient(error) is transient


def failing_with(*raised: Exception) -> Callable[[], str]:
    left = list(raised)

    def call() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return call


def test_work_is_retried_until_its_deadline_and_the_last_error_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each try takes 5 s: after the third, 1.2 of the 16.2 s are left."""
    limits: list[float] = []
    seconds = [1000.0]

    def draw(_: random.SystemRandom, least: float, most: float) -> float:
        limits.append(most)
        return most / 1000

    def fail() -> None:
        seconds[0] += 5.0
        raise errors.StoreUnavailable(f"failed at {seconds[0]:g}")

    monkeypatch.setattr(random.SystemRandom, "uniform", draw)
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    with pytest.raises(errors.StoreUnavailable, match="failed at 1020"):
        retry_until_deadline(fail, 16.2)
    assert limits == pytest.approx([0.2, 0.4, 0.8, 1.6])
    limits.clear()
    with pytest.raises(errors.StoreUnavailable):
        retry_until_deadline(fail, 45.0)
    assert limits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0])


def test_work_is_retried_only_for_curable_errors() -> None:
    assert retry_until_deadline(failing_with(errors.StoreUnavailable("x")), 60.0) == "done"
    with pytest.raises(errors.StoreForbidden):
        retry_until_deadline(failing_with(errors.StoreForbidden("x")), 60.0)
    given = retry_until_deadline(
        failing_with(ValueError("x")), 60.0, curable=lambda error: type(error) is ValueError
    )
    assert given == "done"


def test_the_caller_continues_every_10_ms_while_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    looks: list[int] = []
    enough = threading.Event()
    sleep = time.sleep

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        sleep(0.001)

    def look() -> None:
        looks.append(len(pauses))
        if len(looks) == 4:
            enough.set()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", pause)
        assert run_while(lambda: enough.wait(30), look) is True
    assert looks[:4] == [0, 1, 2, 3] and set(pauses) == {0.01}
    with pytest.raises(KeyError):
        run_while(lambda: {}["missing"], lambda: None)
