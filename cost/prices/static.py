"""The shipped price table. It is dated, and every price it gives says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal

from cost.catalogue import InstanceType, advisor_recorded, on_demand_recorded
from cost.prices.quote import Quote, age_text

# Estimates are rounded where spot prices are quoted: a ten-thousandth of a cent.
_QUANTUM = Decimal("0.000001")


@dataclass(frozen=True, kw_only=True)
class StaticPrices:
    """On-demand prices of the regions on record, and what the spot advisor's savings make of them.

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
                observed=min(_unix(advisor_recorded()), on_demand.observed),
                kind="estimated",
                source=f"on-demand recorded {on_demand.source}, savings recorded {advisor_recorded()}",
            ),
        )

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        price = kind.on_demand.get(region)
        if price is None:
            return None
        return Quote(
            instance_type=kind.name,
            region=region,
            zone=None,
            zone_name=None,
            usd_per_hour=price.usd_per_hour,
            at=None,
            observed=_unix(price.recorded),
            kind="recorded",
            source=price.recorded,
        )

    def zones(self, region: str) -> Sequence[str]:
        return ()

    def missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if region not in on_demand_recorded():
            return f"in the static table, whose prices are of {', '.join(on_demand_recorded())} only"
        return "in the static table: the spot advisor did not list it, or its on-demand price is not on record"

    def said(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
        why = f", because {self.because}" if self.because else ""
        spot = f"spot prices: {table_text(now_utc)}{why}"
        return (spot, *([on_demand_text(now_utc, regions)] if {*regions} - {*on_demand_recorded()} else []))


def table_text(now_utc: float) -> str:
    """What the table's spot prices are, with both ages: of the oldest on-demand price, and of the savings."""
    regions, advisor = on_demand_recorded(), advisor_recorded()
    oldest = min(regions.values())
    savings = f"savings of {advisor}, {age_text(now_utc - _unix(advisor))} old"
    prices = f"on-demand prices of {oldest}, {age_text(now_utc - _unix(oldest))} old"
    return f"static table of {', '.join(regions)} ({prices}; {savings})"


def on_demand_text(now_utc: float, regions: Sequence[str]) -> str:
    """How old the on-demand prices are, and which of the regions have none on record."""
    recorded = on_demand_recorded()
    others = [region for region in regions if region not in recorded]
    lacking = f"; none on record for {', '.join(others)} ({refresh_command(others)} brings them)" if others else ""
    known = {region: recorded[region] for region in regions if region in recorded} or recorded
    oldest = min(known.values())
    age = age_text(now_utc - _unix(oldest))
    return f"on-demand prices: static table of {', '.join(known)}, {oldest}, {age} old{lacking}"


def refresh_command(regions: Sequence[str]) -> str:
    return f"python -m cost catalogue refresh --regions {' '.join(regions)}"


def _unix(date: str) -> float:
    """The first moment of a day (2026-07-20) or month (2025-07), UTC."""
    form = "%Y-%m-%d" if date.count("-") == 2 else "%Y-%m"
    return datetime.strptime(date, form).replace(tzinfo=UTC).timestamp()
