"""A point in time that every wait of a save shares, and the pauses between two tries."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ebbflow.infra.errors import StoreError, StoreForbidden, StoreFull, StoreMisconfigured
from ebbflow.training.errors import CheckpointError

T = TypeVar("T")

# What waiting does not cure; who reads the message can.
HOPELESS = (StoreForbidden, StoreFull, StoreMisconfigured)


class Deadline:
    """`seconds` from now, on the monotonic clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def remaining_seconds(self) -> float:
        return self._end - time.monotonic()


def pauses(*, first_seconds: float = 0.02, longest_seconds: float = 2.0) -> Iterator[float]:
    """Doubling pauses with full jitter above the first, so that ranks that failed together do not return together."""
    pause = first_seconds
    while True:
        yield random.uniform(first_seconds, pause)
        pause = min(pause * 2, longest_seconds)


def retried(what: str, operation: Callable[[], T], deadline: Deadline) -> T:
    """Repeat `operation` while it raises a StoreError that time may cure.

    Raises CheckpointError naming `what`, the tries and the cause.
    """
    for tries, pause in enumerate(pauses(), start=1):
        try:
            return operation()
        except StoreError as error:
            if isinstance(error, HOPELESS) or deadline.remaining_seconds <= pause:
                raise gave_up(what, tries, deadline, error) from error
        time.sleep(pause)
    raise AssertionError("pauses never end")


def gave_up(what: str, tries: int, deadline: Deadline, error: StoreError) -> CheckpointError:
    """The one sentence for a store that did not do what was asked, whatever the reason."""
    tried = f"{tries} {'try' if tries == 1 else 'tries'} within {deadline.seconds:g} s"
    return CheckpointError(f"{what}: gave up after {tried}: {error}")
