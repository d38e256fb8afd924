"""One price of one pool, the interface of price sources, and the shipped price table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Literal, Protocol

from ebbflow.cost.catalogue import InstanceType, advisor_recorded, on_demand_recorded
from ebbflow.infra.config.name_rules import zone_prefix

QuoteKind = Literal["live", "recorded", "estimated"]

_SECONDS_PER_DAY = 86400.0
_DAYS_PER_MONTH = 30.44
_REGION_NAME = re.compile(r"[a-z]{2,}(?:-[a-z]+)+-\d+")


@dataclass(frozen=True, kw_only=True)
class Quote:
    """What one instance costs for an hour in one place.

    region: of AWS. zone: its id (use1-az1), the same zone for every account; where only the name (us-east-1a) is
    known, which each account has its own of, that; None: any zone of the region. usd_per_hour: exactly as quoted.
    at: Unix time since which it holds (the last change), None where that is not known. observed: Unix time when it was
    last known to hold; its age counts from there, since a price may hold for weeks. kind: live; recorded on a date;
    estimated. source: what it stands on, in words.
    """

    instance_type: str
    region: str
    zone: str | None
    zone_name: str | None
    usd_per_hour: Decimal
    at: float | None
    observed: float
    kind: QuoteKind
    source: str

    def age_hours(self, now_utc: float) -> float:
        return max(0.0, now_utc - self.observed) / 3600

    def is_stale(self, now_utc: float, max_age_hours: float) -> bool:
        """A quoted price older than the limit. An estimate was never a price of some moment: its words say its age."""
        return self.kind != "estimated" and self.age_hours(now_utc) > max_age_hours

    def describe(self, now_utc: float, max_age_hours: float) -> str:
        """How the price is known, such as "recorded 2021-05-31 00:20 UTC, 5.5 years old: stale". Begins with kind."""
        age = f"{age_text(now_utc - self.observed)} old"
        if self.kind == "estimated":
            return f"estimated from {self.source}, {age}"
        if self.at is None:
            return f"{self.kind} {self.source}, {age}"
        if self.kind == "live" and not self.is_stale(now_utc, max_age_hours):
            return f"live {time_text(self.observed)}, unchanged since {time_text(self.at)}"
        stale = ": stale" if self.is_stale(now_utc, max_age_hours) else ""
        return f"{self.kind} {time_text(self.observed)}, {age}{stale}"


class PriceSource(Protocol):
    """Prices as they were known at one moment. Asking it costs nothing: whatever had to be read or asked has been."""

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        """One quote for each zone that has a price, or a single one without a zone; empty: no price is known."""

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        """The region's on-demand price; None: not on record."""

    def zones(self, region: str) -> Sequence[str]:
        """The zones of the region as far as they are known, with a price or without."""

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        """Why it has no spot price there: the words after "no spot price of X in Y". zone: None: in none at all."""

    def describe(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
        """Lines on what the prices are and how old, for the plan and the report."""


def region_of(zone: str) -> str | None:
    """The region of a zone's *name* (us-east-1a, us-west-2-lax-1a); None for anything else, such as a zone id."""
    found = _REGION_NAME.match(zone)
    return found.group() if found and found.end() < len(zone) else None


def is_zone_of(zone_id: str, region: str) -> bool:
    """Whether a zone id (use1-az4) is of the region."""
    prefix = zone_prefix(region)
    return prefix is not None and zone_id.startswith(f"{prefix}-")


def time_text(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def age_text(seconds: float) -> str:
    """An age as people say it: 12 min, 3.2 h, 5 days, 4 months, 5.5 years."""
    seconds = max(0.0, seconds)
    days = seconds / _SECONDS_PER_DAY
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if days < 2:
        return f"{seconds / 3600:.1f} h"
    if days < 60:
        return f"{days:.0f} days"
    if days < 730:
        return f"{days / _DAYS_PER_MONTH:.0f} months"
    return f"{days / 365.25:.1f} years"


def short_age_text(seconds: float) -> str:
    """The same for a narrow column: 12min, 3h, 5d, 4mo, 5.5y."""
    return age_text(seconds).replace(" years", "y").replace(" months", "mo").replace(" days", "d").replace(" ", "")


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

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if region not in on_demand_recorded():
            return f"in the static table, whose prices are of {', '.join(on_demand_recorded())} only"
        return "in the static table: the spot advisor did not list it, or its on-demand price is not on record"

    def describe(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
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
    return f"ebbflow catalogue refresh --regions {' '.join(regions)}"


def _unix(date: str) -> float:
    """The first moment of a day (2026-07-20) or month (2025-07), UTC."""
    form = "%Y-%m-%d" if date.count("-") == 2 else "%Y-%m"
    return datetime.strptime(date, form).replace(tzinfo=UTC).timestamp()
