"""What an agent has heard from the others and has not yet acted upon, whichever side of the conversation it is on."""

from __future__ import annotations

from ebbflow.training.launch.control import Order
from ebbflow.training.launch.recently import STORE_WAIT_SECONDS, Recently


class Heard:
    """The part of `ebbflow.training.launch.peers.Peers` that is the same for the lead and for a member."""

    def __init__(self) -> None:
        self._orders: list[Order] = []
        self._witnesses_wanted = False
        self._store_wait = Recently(STORE_WAIT_SECONDS)

    def orders(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders

    def witnesses_wanted(self) -> bool:
        wanted, self._witnesses_wanted = self._witnesses_wanted, False
        return wanted

    @property
    def somebody_waits(self) -> bool:
        return self._store_wait.holds
