"""Retries of work that may fail for a transient reason, such as a store request."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ebbflow.infra.errors import InfraError, StoreForbidden, StoreMisconfigured
from ebbflow.infra.retry import backoff_pauses
from ebbflow.training.errors import TrainingError

T = TypeVar("T")
_LOOK_SECONDS = 0.01
_PERMANENT = (StoreForbidden, StoreMisconfigured)  # a full store is transient: space can be freed
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0


def run_while(work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
    """Run `work` in a thread, and return its result or raise its error.

    Until it ends, this thread calls `meanwhile` every 10 ms. `work` must have deadlines of its own.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="retry") as pool:
        future = pool.submit(work)
        while not future.done():
            meanwhile()
            time.sleep(_LOOK_SECONDS)
        return future.result()


def is_transient(error: TrainingError | InfraError) -> bool:
    """Return whether an error may disappear with time alone."""
    return error.curable if isinstance(error, TrainingError) else not isinstance(error, _PERMANENT)


def retry_until_deadline(
    work: Callable[[], T],
    seconds: float,
    *,
    given_up: Callable[[], bool] = lambda: False,
    passing: Callable[[TrainingError | InfraError], bool] = is_transient,
) -> T:
    """Call `work` and return its result. Until the deadline, repeat it when it fails with a transient error.

    Args:
        seconds: time until the deadline; pauses between tries grow to 5 s.
        given_up: returns True to stop retrying early.
        passing: returns whether an error is transient.

    Raises:
        TrainingError, InfraError: the error of the last try.
    """
    limit = time.monotonic() + seconds
    for pause in backoff_pauses(first_seconds=_FIRST_PAUSE_SECONDS, longest_seconds=_LONGEST_PAUSE_SECONDS):
        try:
            return work()
        except (TrainingError, InfraError) as error:
            if not passing(error) or given_up() or time.monotonic() + pause >= limit:
                raise
        time.sleep(pause)
    raise AssertionError("backoff_pauses never end")
