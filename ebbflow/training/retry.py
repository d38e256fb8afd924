"""Retries of work that may fail for a transient reason, such as a store request."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ebbflow.core.errors import InfraError, StoreForbidden, StoreMisconfigured
from ebbflow.core.retry import backoff_pauses, retry
from ebbflow.training.errors import TrainingError

T = TypeVar("T")
_LOOK_SECONDS = 0.01
_PERMANENT = (StoreForbidden, StoreMisconfigured)  # a full store is transient: space can be freed


def run_while(work: Callable[[], T], meanwhile: Callable[[], object]) -> T:
    """Run `work` in a thread and call `meanwhile` every 10 ms until it ends.

    Return its result or raise its error.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="retry") as pool:
        future = pool.submit(work)
        while not future.done():
            meanwhile()
            time.sleep(_LOOK_SECONDS)
        return future.result()


def is_transient(error: Exception) -> bool:
    if isinstance(error, TrainingError):
        return error.curable
    return isinstance(error, InfraError) and not isinstance(error, _PERMANENT)


def retry_until_deadline(
    work: Callable[[], T], seconds: float, *, curable: Callable[[Exception], bool] = is_transient
) -> T:
    """Call `work` and return its result.

    Retry curable errors for `seconds`, then raise the last one.
    """
    limit = time.monotonic() + seconds
    return retry(
        work,
        left=lambda: limit - time.monotonic(),
        curable=lambda error, _: curable(error),
        pauses=backoff_pauses(first_seconds=0.2, longest_seconds=5.0),
    )
