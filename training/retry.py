"""Retry work that may fail for a passing reason, such as asking a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ebbflow.infra.errors import InfraError, StoreForbidden, StoreMisconfigured
from ebbflow.training.checkpoint.verified_io import backoff_pauses
from ebbflow.training.errors import TrainingError

T = TypeVar("T")
_LOOK_SECONDS = 0.01
_HOPELESS = (StoreForbidden, StoreMisconfigured)  # a store that is full may be made room in
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 5.0


def run_while(work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
    """What `work` returns or raises. It runs in a thread, and must have deadlines of its own; `meanwhile` runs here."""
    with ThreadPoolExecutor(1, thread_name_prefix="patience") as pool:
        future = pool.submit(work)
        while not future.done():
            meanwhile()
            time.sleep(_LOOK_SECONDS)
        return future.result()


def is_transient(error: TrainingError | InfraError) -> bool:
    """Whether time alone may cure it."""
    return error.curable if isinstance(error, TrainingError) else not isinstance(error, _HOPELESS)


def retry_until_deadline(
    work: Callable[[], T],
    seconds: float,
    *,
    given_up: Callable[[], bool] = lambda: False,
    passing: Callable[[TrainingError | InfraError], bool] = is_transient,
) -> T:
    """`work`, again and again while it fails for a reason that is `passing`, up to the deadline; then its last error.

    Pauses grow to 5 s: a store that refuses because too much is asked of it is not to be asked more for that.
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
