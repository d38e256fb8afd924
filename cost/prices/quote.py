"""One price of one pool, with how and when it became known, and the interface of whatever knows prices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Literal, Protocol

from cost.catalogue import InstanceType
from infra.config.rules.names import zone_prefix

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

    def missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        """Why it has no spot price there: the words after "no spot price of X in Y". zone: None: in none at all."""

    def said(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
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
