"""One price (`Quote`), the interface of all price sources (`PriceSource`), and the shipped static
price table.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Literal, Protocol, Self

from ebbflow.core.config.name_rules import zone_prefix
from ebbflow.cost.catalogue import (
    RATES_RECORDED,
    InstanceType,
    advisor_recorded,
    on_demand_recorded,
)
from ebbflow.cost.plan_json import PriceJson

QuoteKind = Literal["live", "recorded", "estimated"]

_SECONDS_PER_DAY = 86400.0
# Age from which a shipped table is reported as old.
STALE_DAYS = 90
_DAYS_PER_MONTH = 30.44
_REGION_NAME = re.compile(r"[a-z]{2,}(?:-[a-z]+)+-\d+")

# The names of the values of `PoolPrice.to_json`.
PRICE_KEYS = ("usd_per_hour", "quoted_usd_per_hour", "price_kind", "volume_usd_per_hour")

# Spot prices are quoted to a ten-thousandth of a cent; estimates are rounded to the same digit.
_QUANTUM = Decimal("0.000001")


@dataclass(frozen=True, kw_only=True)
class Quote:
    """Hourly price of one instance in one zone or region."""

    instance_type: str
    region: str
    # zone id (use1-az1), which means the same zone in every account. If the id is unknown, this is
    # the zone name (us-east-1a), which differs between accounts. None means any zone of the region.
    zone: str | None
    zone_name: str | None
    usd_per_hour: Decimal  # price exactly as quoted
    at: float | None  # Unix time of the last price change; None if unknown
    # Unix time at which the price was last known to be valid. The age of the price counts from this
    # time, because a price may stay unchanged for weeks.
    observed: float
    kind: QuoteKind  # kind of price: live, recorded (on a date) or estimated
    source: str  # source of the price, in words
    # whether EC2 bills the node's root volume beside this price; not if a user states the price
    has_volume: bool = True

    def age_hours(self, now_utc: float) -> float:
        return max(0.0, now_utc - self.observed) / 3600

    def is_stale(self, now_utc: float, max_age_hours: float) -> bool:
        """Return whether a live or recorded price is older than the limit.

        An estimate is never stale: its description states its age.
        """
        return self.kind != "estimated" and self.age_hours(now_utc) > max_age_hours

    def describe(self, now_utc: float, max_age_hours: float) -> str:
        """Describe the kind and the age of the price, such as "recorded 2021-05-31 00:20 UTC, 5.5
        years old: stale".

        The text begins with `kind`.
        """
        age = f"{format_age(now_utc - self.observed)} old"
        if self.kind == "estimated":
            return f"estimated from {self.source}, {age}"
        if self.at is None:
            return f"{self.kind} {self.source}, {age}"
        if self.kind == "live" and not self.is_stale(now_utc, max_age_hours):
            return f"live {format_time(self.observed)}, unchanged since {format_time(self.at)}"
        if self.is_stale(now_utc, max_age_hours):
            stale = ": stale"
        else:
            stale = ""
        return f"{self.kind} {format_time(self.observed)}, {age}{stale}"


@dataclass(frozen=True, kw_only=True)
class PoolPrice:
    """Price of one node of a pool, as a plan quoted it.

    Plans, placements, the ledger and reports share this object. Their JSON stores the price as two
    values: a float, and the exact decimal as text.
    """

    usd_per_hour: Decimal  # US dollars per node and hour, exactly as quoted
    # source of the price, as text that begins with "live", "recorded" or "estimated"; "" if unknown
    kind: str = ""
    # Only plans store the age, so prices of different age may be equal.
    # age_hours: hours since the price was last known to be valid; None if unknown
    age_hours: float | None = field(default=None, compare=False)
    # whether a quoted spot price is older than `cost.max_price_age_hours`
    is_stale: bool = field(default=False, compare=False)
    # US dollars per hour for the node's root volume, at its list price; 0 without one, and in older
    # plans, which count volumes as storage
    volume_usd_per_hour: Decimal = Decimal(0)

    @property
    def usd_float(self) -> float:
        """The price as a float, for estimates. Bills use the exact `usd_per_hour`."""
        return float(self.usd_per_hour)

    @property
    def node_usd_float(self) -> float:
        """The dollars per hour of a node with its root volume, for estimates."""
        return float(self.usd_per_hour + self.volume_usd_per_hour)

    @classmethod
    def from_json(cls, data: PriceJson) -> Self:
        """Read the price from the JSON form of a candidate, a placement or a Batch attempt.

        Old plans have only the float.

        Raises:
            KeyError: There is no price.
            ValueError: The price is not a number of dollars, 0 or more.
        """
        return cls(
            usd_per_hour=_parse_usd(data.get("quoted_usd_per_hour") or data["usd_per_hour"]),
            volume_usd_per_hour=_parse_usd(data.get("volume_usd_per_hour") or 0),
            kind=str(data.get("price_kind") or ""),
            age_hours=data.get("price_age_hours"),
            is_stale=bool(data.get("price_stale")),
        )

    def to_json(self) -> dict[str, float | str]:
        return {
            "usd_per_hour": self.usd_float,
            "quoted_usd_per_hour": f"{self.usd_per_hour:f}",
            "price_kind": self.kind,
            "volume_usd_per_hour": f"{self.volume_usd_per_hour:f}",
        }


class PriceSource(Protocol):
    """Prices at one moment, from any source.

    A source reads files and sends requests only when it is created.
    """

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        """Return one quote per zone with a price, or one for the whole region; empty if no price is
        known.
        """
        ...

    def on_demand(self, kind: InstanceType, region: str) -> Quote | None:
        """Return the region's on-demand price; None if it is not on record."""
        ...

    def zones(self, region: str) -> Sequence[str]:
        """Return the known zones of the region, whether or not they have a price."""
        ...

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        """Explain why a spot price is missing, as a continuation of "no spot price of X in Y".

        Args:
            zone: The zone without a price; None if the whole region has no price.
        """
        ...

    def describe(
        self, *, now_utc: float, regions: Sequence[str], max_age_hours: float
    ) -> tuple[str, ...]:
        """Return sentences about the origin and the age of the prices, for the plan and the report."""
        ...


def format_time(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_age(seconds: float) -> str:
    """Format an age in one unit: 12 min, 3.2 h, 5 days, 4 months, 5.5 years."""
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


@dataclass(frozen=True, kw_only=True)
class StaticPrices:
    """The shipped price table: recorded on-demand prices, and spot prices estimated from AWS Spot
    Advisor's savings.

    The table has one spot price per region, not per zone. It is typical of the region; the current
    price of a pool may differ.
    """

    # Reason why live prices were unavailable; empty if the configuration selects the static table
    because: str = ""

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        advice = kind.advice.get(region)
        on_demand = self.on_demand(kind, region)
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
                source=(
                    f"on-demand recorded {on_demand.source}, savings recorded {advisor_recorded()}"
                ),
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

    # The unused arguments below are those of `PriceSource`.
    def zones(self, region: str) -> Sequence[str]:  # noqa: ARG002
        return ()

    def why_missing(
        self,
        kind: InstanceType,  # noqa: ARG002
        region: str,
        zone: str | None,  # noqa: ARG002
    ) -> str:
        if region not in on_demand_recorded():
            return (
                f"in the static table, whose prices are of {', '.join(on_demand_recorded())} only"
            )
        return (
            "in the static table: the spot advisor did not list it, or its on-demand price is "
            "not on record"
        )

    def describe(
        self,
        *,
        now_utc: float,
        regions: Sequence[str],
        max_age_hours: float,  # noqa: ARG002
    ) -> tuple[str, ...]:
        if self.because:
            why = f", because {self.because}"
        else:
            why = ""
        spot = f"spot prices: {describe_static_table(now_utc)}{why}"
        return (
            spot,
            *(
                [describe_on_demand(now_utc, regions)]
                if {*regions} - {*on_demand_recorded()}
                else []
            ),
        )


def region_of(zone: str) -> str | None:
    """Return the region of a zone name (us-east-1a, us-west-2-lax-1a); None for anything else, such
    as a zone id.
    """
    found = _REGION_NAME.match(zone)
    if found and found.end() < len(zone):
        return found.group()
    return None


def is_zone_of(zone_id: str, region: str) -> bool:
    """Return whether a zone id (use1-az4) belongs to the region."""
    prefix = zone_prefix(region)
    return prefix is not None and zone_id.startswith(f"{prefix}-")


def format_short_age(seconds: float) -> str:
    """Format an age for a narrow column: 12min, 3h, 5d, 4mo, 5.5y."""
    return (
        format_age(seconds)
        .replace(" years", "y")
        .replace(" months", "mo")
        .replace(" days", "d")
        .replace(" ", "")
    )


def describe_static_table(now_utc: float) -> str:
    """Describe the static table: its regions, and the ages of its on-demand prices and Spot Advisor
    savings.
    """
    regions = on_demand_recorded()
    advisor = advisor_recorded()
    oldest = min(regions.values())
    savings = f"savings of {advisor}, {format_age(now_utc - _unix(advisor))} old"
    prices = f"on-demand prices of {oldest}, {format_age(now_utc - _unix(oldest))} old"
    return f"static table of {', '.join(regions)} ({prices}; {savings})"


def describe_on_demand(now_utc: float, regions: Sequence[str]) -> str:
    """Describe the age of the on-demand prices, and name the regions whose prices are not on
    record.
    """
    recorded = on_demand_recorded()
    others = [region for region in regions if region not in recorded]
    if others:
        lacking = (
            f"; none on record for {', '.join(others)} ({refresh_command(others)} brings them)"
        )
    else:
        lacking = ""
    known = {region: recorded[region] for region in regions if region in recorded} or recorded
    oldest = min(known.values())
    age = format_age(now_utc - _unix(oldest))
    return f"on-demand prices: static table of {', '.join(known)}, {oldest}, {age} old{lacking}"


def table_ages(regions: Sequence[str] = ()) -> list[tuple[str, str, float]]:
    """Return (name, date, Unix time) of the recording of each shipped table.

    The date is a day or a month.

    Args:
        regions: Regions whose on-demand prices are included; empty for all recorded regions.
    """
    found = [
        (f"on-demand prices of {region}", day)
        for region, day in on_demand_recorded().items()
        if not regions or region in regions
    ]
    found += [
        ("savings and bands of the spot advisor", advisor_recorded()),
        ("storage and transfer", RATES_RECORDED),
    ]
    return [(name, day, _unix(day)) for name, day in found]


def warn_of_age(now_utc: float, regions: Sequence[str]) -> str | None:
    """Return a warning that names the shipped tables older than `STALE_DAYS`; None if there are
    none.
    """
    limit = now_utc - STALE_DAYS * _SECONDS_PER_DAY
    old = [
        f"{name} ({format_age(now_utc - at)})" for name, _, at in table_ages(regions) if at < limit
    ]
    if not old:
        return None
    return (
        f"! tables older than {STALE_DAYS} days: {', '.join(old)}; fix: {refresh_command(regions)}"
    )


def refresh_command(regions: Sequence[str]) -> str:
    return f"ebbflow catalogue refresh --regions {' '.join(regions)}"


def _unix(date: str) -> float:
    """Return the Unix time at which a day (2026-07-20) or a month (2025-07) begins in UTC."""
    if date.count("-") == 2:
        form = "%Y-%m-%d"
    else:
        form = "%Y-%m"
    return datetime.strptime(date, form).replace(tzinfo=UTC).timestamp()


def _parse_usd(value: float | str) -> Decimal:
    """Read dollars per hour, exactly as recorded. Raises ValueError unless 0 or more."""
    try:
        usd = Decimal(str(value))
    except InvalidOperation:
        raise ValueError(f"{value} is not dollars per hour") from None
    if not usd.is_finite() or usd < 0:
        raise ValueError(f"{value} is not dollars per hour")
    return usd
