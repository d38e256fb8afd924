"""The shipped price table. It is dated, and every price it gives says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from cost.catalogue import ADVISOR_RECORDED, ON_DEMAND_RECORDED, ON_DEMAND_REGION, InstanceType
from cost.prices.quote import Quote, age_text

# Estimates are rounded where spot prices are quoted: a ten-thousandth of a cent.
_QUANTUM = Decimal("0.000001")


@dataclass(frozen=True, kw_only=True)
class StaticPrices:
    """On-demand prices of one region, and what the spot advisor's savings make of them.

    because: why the table stands in for live prices; empty when it was asked for. It knows no zones: a spot price is
    a typical one of the region, and what any pool costs right now may differ.
    """

    because: str = ""

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        advice, on_demand = kind.advice.get(region), self.on_demand(kind, region)
        if advice is None or on_demand is None:
            return ()
        left = (100 - Decimal(str(advice.savings_percent))) / 100
        return (
            Quote(
                instance_type=kind.name,
                region=region,
                zone=None,
                zone_name=None,
                usd_per_hour=(on_demand.usd_per_hour * left).quantize(_QUANTUM).normalize(),
                at=None,
                observed=min(_unix(ADVISOR_RECORDED), on_demand.observed),
                kind="estimated",
                source=f"on-demand recorded {ON_DEMAND_RECORDED}, savings recorded {ADVISOR_RECORDED}",
            ),
        )

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        if region != ON_DEMAND_REGION or kind.on_demand_usd_per_hour is None:
            return None
        return Quote(
            instance_type=kind.name,
            region=region,
            zone=None,
            zone_name=None,
            usd_per_hour=Decimal(str(kind.on_demand_usd_per_hour)),
            at=None,
            observed=_unix(ON_DEMAND_RECORDED),
            kind="recorded",
            source=ON_DEMAND_RECORDED,
        )

    def zones(self, region: str) -> Sequence[str]:
        return ()

    def missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if region != ON_DEMAND_REGION:
            return f"in the static table, whose prices are of {ON_DEMAND_REGION} only"
        return "in the static table: the spot advisor did not list it, or its on-demand price is not on record"

    def said(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
        why = f", because {self.because}" if self.because else ""
        spot = f"spot prices: {table_text(now_utc)}{why}"
        return (spot, *([on_demand_text(now_utc, regions)] if {*regions} - {ON_DEMAND_REGION} else []))


def table_text(now_utc: float) -> str:
    """What the table's spot prices are, with both ages."""
    savings = f"savings of {ADVISOR_RECORDED}, {age_text(now_utc - _unix(ADVISOR_RECORDED))} old"
    prices = f"on-demand prices of {ON_DEMAND_RECORDED}, {age_text(now_utc - _unix(ON_DEMAND_RECORDED))} old"
    return f"static table of {ON_DEMAND_REGION} ({prices}; {savings})"


def on_demand_text(now_utc: float, regions: Sequence[str]) -> str:
    """How old the on-demand prices are, and which of the regions have none on record."""
    others = [region for region in regions if region != ON_DEMAND_REGION]
    lacking = f"; none on record for {', '.join(others)}" if others else ""
    age = age_text(now_utc - _unix(ON_DEMAND_RECORDED))
    return f"on-demand prices: static table of {ON_DEMAND_REGION}, {ON_DEMAND_RECORDED}, {age} old{lacking}"


def _unix(date: str) -> float:
    """The first moment of a day (2026-07-20) or month (2025-07), UTC."""
    form = "%Y-%m-%d" if date.count("-") == 2 else "%Y-%m"
    return datetime.strptime(date, form).replace(tzinfo=UTC).timestamp()
