"""Work that may take long, such as asking a store, done without falling silent towards those who wait for news."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from infra.errors import InfraError
from training.errors import TrainingError

T = TypeVar("T")
_LOOK_SECONDS = 0.01
_AGAIN_SECONDS = 1.0


def do_meanwhile(work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
    """What `work` returns or raises. It runs in a thread, and must have deadlines of its own; `meanwhile` runs here."""
    with ThreadPoolExecutor(1, thread_name_prefix="patience") as pool:
        future = pool.submit(work)
        while not future.done():
            meanwhile()
            time.sleep(_LOOK_SECONDS)
        return future.result()


def try_again(work: Callable[[], T], seconds: float, given_up: Callable[[], bool]) -> T:
    """`work`, again and again while it fails for a reason that may pass, up to the deadline; then its last error."""
    limit = time.monotonic() + seconds
    while True:
        try:
            return work()
        except (TrainingError, InfraError) as error:
            passing = isinstance(error, InfraError) or error.curable
            if not passing or given_up() or time.monotonic() + _AGAIN_SECONDS >= limit:
                raise
        time.sleep(_AGAIN_SECONDS)
