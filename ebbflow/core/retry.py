"""Retries with exponential backoff until a deadline, and a time limit for calls that may hang.

The package tenacity is not used, because it cannot limit the number of tries by the kind of error,
nor count the duration of the call itself towards the deadline.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

# Draws nothing from Python's own generator, whose state belongs to the user's script.
_JITTER = random.SystemRandom()

T = TypeVar("T")


def backoff_pauses(*, first_seconds: float = 0.02, longest_seconds: float = 2.0) -> Iterator[float]:
    """Yield random pauses in seconds, endlessly, for exponential backoff.

    Their upper limit doubles until it reaches `longest_seconds`. Randomness keeps processes that
    failed together from retrying together.
    """
    limit = first_seconds
    while True:
        yield _JITTER.uniform(first_seconds / 2, limit)
        limit = min(limit * 2, longest_seconds)


def retry(
    call: Callable[[], T],
    *,
    left: Callable[[], float],
    curable: Callable[[Exception, int], bool],
    give_up: Callable[[Exception, int], Exception] = lambda error, _: error,
    pauses: Iterator[float] | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> T:
    """Call a function again until it succeeds, and return its result.

    Stop at the deadline or if an error is not `curable`.

    Args:
        left: returns the seconds until the deadline. There is another try only if the next pause
        ends before the deadline.
        curable: takes an exception and the number of tries so far, and returns whether another try
            may help.
        give_up: takes the last exception and the number of tries, and returns the exception to
            raise.
        pauses: seconds to wait between tries; default: `backoff_pauses()`.
        sleep: waits for a number of seconds.
    """
    for tries, pause in enumerate(pauses or backoff_pauses(), start=1):
        try:
            return call()
        except Exception as error:
            if not curable(error, tries) or pause >= left():
                final = give_up(error, tries)
                if final is error:
                    raise
                raise final from error
        sleep(pause)
    raise AssertionError("pauses never end")


def call_within(
    seconds: float, call: Callable[[], T], name: str, late: Callable[[], Exception]
) -> T:
    """Call a function with a time limit. Return its result, or raise its exception.

    The call runs in a daemon thread, because name servers, sources of credentials, file systems and
    foreign libraries can hang and cannot be interrupted. A call that never returns is abandoned,
    and does not keep the process from exiting.

    Args:
        seconds: time limit. At 0 or less the function is not called.
        name: name of the thread.
        late: creates the exception that is raised at the time limit.
    """
    if seconds <= 0:
        raise late()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise late()
    return results[0]
