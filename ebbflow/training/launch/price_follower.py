"""Follower of the held pool's price, on node 0 of a gang."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ebbflow.core.terms import RankPrice
from ebbflow.training.launch.logs import print_line

# Returns the price of the held pool as far as it is known now
PriceLookup = Callable[[], RankPrice]


class PriceFollower:
    """Thread that looks up the price of the held pool every `seconds`.

    While the lookup fails, the last price applies.
    """

    def __init__(self, look_up: PriceLookup, seconds: float) -> None:
        self._look_up = look_up
        self._seconds = seconds
        self._known: RankPrice | None = None
        self._new = threading.Event()
        self._done = threading.Event()
        self._problem = ""
        self._thread = threading.Thread(target=self._follow, name="prices", daemon=True)
        self._thread.start()

    def take_new(self) -> RankPrice | None:
        """Return the price if it has changed since the last call, else None."""
        if not self._new.is_set():
            return None
        self._new.clear()
        return self._known

    def close(self) -> None:
        """Ask the thread to end, without waiting for a request that hangs."""
        self._done.set()

    def _follow(self) -> None:
        while not self._done.is_set():
            try:
                price = self._look_up()
            except Exception as error:  # prices must never end the training
                problem = f"{type(error).__name__}: {error}"
                if problem != self._problem:
                    print_line(f"prices cannot be read, the last one applies: {problem}")
                self._problem = problem
            else:
                self._problem = ""
                if price != self._known:
                    self._known = price
                    self._new.set()
            self._done.wait(self._seconds)
