"""A leap of Spot prices while a job runs on the virtual AWS Batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import Decimal

from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.prices.quote import Quote, StaticPrices


@dataclass(frozen=True)
class PriceLeap:
    """A leap of all Spot prices to `factor` times those of the static table, at second `at`.

    A running attempt knows it as late as its watch allows (`PriceWatch`); later plans know it at
    once.
    """

    at: float
    factor: float


@dataclass(frozen=True)
class LeaptPrices(StaticPrices):
    """The static table with Spot prices multiplied by a factor."""

    factor: Decimal = Decimal(1)

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        return [
            replace(quote, usd_per_hour=quote.usd_per_hour * self.factor)
            for quote in super().spot(kind, region)
        ]
