"""Retries with exponential backoff until a deadline, and a deadline for calls that may hang.

The package tenacity is not used: it cannot limit tries by the kind of error, nor account for the time of the call
itself.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Backoff:
    """Pauses between tries: each is twice as long as the one before, up to a longest one."""

    def __init__(self, first_seconds: float, longest_seconds: float) -> None:
        self._first, self._longest = first_seconds, longest_seconds
        self._next = first_seconds

    def next_pause(self) -> float:
        pause, self._next = self._next, min(2 * self._next, self._longest)
        return pause

    def reset(self) -> None:
        self._next = self._first


def backoff_pauses(*, first_seconds: float = 0.02, longest_seconds: float = 2.0) -> Iterator[float]:
    """Yield random pauses in seconds, without end. Their upper limit doubles from `first_seconds` to `longest_seconds`.

    They are random so that ranks that failed together do not retry together.
    """
    pause = first_seconds
    while True:
        yield random.uniform(first_seconds, pause)
        pause = min(pause * 2, longest_seconds)


def retry(
    call: Callable[[], T],
    backoff: Backoff,
    *,
    left: Callable[[], float],
    sleep: Callable[[float], None],
    judge: Callable[[Exception], tuple[str, int | None]],
    give_up: Callable[[str], Exception],
) -> T:
    """Call a function until it succeeds, fails for good, or the time is over, and return its result.

    Pauses are shortened at random to 50–100 %, so that many jobs do not retry at the same moment.

    Args:
        call: the function.
        backoff: pauses between tries.
        left: returns the seconds until the deadline. There is a further try only if the next pause ends before it.
        sleep: waits for a number of seconds.
        judge: takes the exception of a try, and returns a reason in words and the largest number of tries (None: no
            limit); raises if no retry can help.
        give_up: creates the exception that is raised in the end, from the reason of the last failure.
    """
    for tries in itertools.count(1):
        if left() <= 0:
            raise give_up("timed out")
        try:
            return call()
        except Exception as error:
            reason, most = judge(error)
            cause = error
        pause = backoff.next_pause() * random.uniform(0.5, 1.0)
        if (most is not None and tries >= most) or pause >= left():
            raise give_up(f"{reason} ({tries} tries)" if tries > 1 else reason) from cause
        sleep(pause)
    raise AssertionError("the last try returns or raises")


def call_within(seconds: float, call: Callable[[], T], name: str, late: Callable[[], Exception]) -> T:
    """Call a function with a time limit. Return its result, or raise its exception.

    The call runs in a daemon thread. A call that never returns is abandoned, and does not keep the process from
    exiting: name servers, sources of credentials and foreign libraries can hang and cannot be interrupted.

    Args:
        seconds: time limit.
        call: the function.
        name: name of the thread.
        late: creates the exception that is raised at the time limit.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if errors:
        raise errors[0]
    if not results:
        raise late()
    return results[0]
