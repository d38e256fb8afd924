"""Quotes and the shipped table: ages, staleness, estimates, and what each source says of itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.cost.catalogue import (
    ON_DEMAND,
    RATES_RECORDED,
    OnDemandPrice,
    SpotAdvice,
    advisor_recorded,
    load_catalogue,
    on_demand_recorded,
)
from ebbflow.cost.prices.quote import (
    STALE_DAYS,
    Quote,
    StaticPrices,
    describe_on_demand,
    describe_static_table,
    format_age,
    format_short_age,
    format_time,
    is_zone_of,
    refresh_command,
    region_of,
    table_ages,
    warn_of_age,
)

NOW = 1_790_000_000.0  # 2026-09-21 14:13 UTC
HOUR = 3600.0
DAY = 86400.0
QUOTE = Quote(
    instance_type="g5.xlarge",
    region="us-east-1",
    zone="use1-az4",
    zone_name="us-east-1a",
    usd_per_hour=Decimal("0.41"),
    at=NOW - 50 * HOUR,
    observed=NOW - 10 * HOUR,
    kind="recorded",
    source="in prices.json",
)
KIND = load_catalogue()["g5.xlarge"]

DEAR = replace(
    KIND,
    on_demand={"us-east-1": OnDemandPrice(usd_per_hour=Decimal("1.234567"), recorded="2026-07-20")},
    advice={"us-east-1": SpotAdvice(savings_percent=33.5, interruption_band=1)},
)


def utc(year: int, month: int, day: int = 1) -> float:
    return datetime(year, month, day, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("age", "hours"), [(0.0, 0.0), (1800.0, 0.5), (36 * HOUR, 36.0), (-50.0, 0.0)]
)
def test_the_age_of_a_quote_counts_from_when_it_was_last_known_to_be_valid(
    age: float, hours: float
) -> None:
    assert replace(QUOTE, observed=NOW - age).age_hours(NOW) == hours


@pytest.mark.parametrize(
    ("kind", "limit", "stale"),
    [
        ("recorded", 10.0, False),
        ("recorded", 9.99, True),
        ("live", 10.0, False),
        ("live", 9.99, True),
        ("estimated", 0.0, False),
    ],
)
def test_a_quote_is_stale_beyond_the_limit_unless_it_is_an_estimate(
    kind, limit: float, stale: bool
) -> None:
    assert replace(QUOTE, kind=kind).is_stale(NOW, limit) is stale


@pytest.mark.parametrize(
    ("changes", "limit", "text"),
    [
        ({}, 24.0, "recorded 2026-09-21 04:13 UTC, 10.0 h old"),
        ({}, 9.0, "recorded 2026-09-21 04:13 UTC, 10.0 h old: stale"),
        ({"kind": "live"}, 24.0, "live 2026-09-21 04:13 UTC, unchanged since 2026-09-19 12:13 UTC"),
        ({"kind": "live"}, 9.0, "live 2026-09-21 04:13 UTC, 10.0 h old: stale"),
        ({"at": None, "source": "2026-07-20"}, 9.0, "recorded 2026-07-20, 10.0 h old"),
        ({"kind": "live", "at": None, "source": "now"}, 9.0, "live now, 10.0 h old"),
        ({"kind": "estimated", "source": "the table"}, 9.0, "estimated from the table, 10.0 h old"),
    ],
)
def test_a_quote_describes_its_kind_and_age(changes: dict, limit: float, text: str) -> None:
    assert replace(QUOTE, **changes).describe(NOW, limit) == text


@pytest.mark.parametrize(
    ("seconds", "age", "short"),
    [
        (-5.0, "0 min", "0min"),
        (89.0, "1 min", "1min"),
        (3599.0, "60 min", "60min"),
        (HOUR, "1.0 h", "1.0h"),
        (2 * DAY - 1, "48.0 h", "48.0h"),
        (2 * DAY, "2 days", "2d"),
        (60 * DAY - 1, "60 days", "60d"),
        (60 * DAY, "2 months", "2mo"),
        (137 * DAY, "5 months", "5mo"),
        (730 * DAY - 1, "24 months", "24mo"),
        (730 * DAY, "2.0 years", "2.0y"),
        (20_015 * DAY, "54.8 years", "54.8y"),
    ],
)
def test_an_age_has_one_unit(seconds: float, age: str, short: str) -> None:
    assert (format_age(seconds), format_short_age(seconds)) == (age, short)


def test_a_month_has_30_44_days_and_a_year_365_25() -> None:
    """Of 700 days the number of months, and of 273.9 years the number, tell other lengths apart."""
    assert [format_age(months * 30.44 * DAY) for months in (22.51, 23.49)] == [
        "23 months",
        "23 months",
    ]
    assert format_age(100_000 * DAY) == "273.8 years"


def test_a_time_is_in_utc_to_the_minute() -> None:
    assert format_time(NOW) == "2026-09-21 14:13 UTC"


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-east-1a", "us-east-1"),
        ("us-west-2-lax-1a", "us-west-2"),
        ("us-gov-west-1b", "us-gov-west-1"),
        ("ap-southeast-12c", "ap-southeast-12"),
        ("us-east-1", None),
        ("use1-az4", None),
        ("u-east-1a", None),
        ("", None),
    ],
)
def test_the_region_of_a_zone_name(zone: str, region: str | None) -> None:
    assert region_of(zone) == region


@pytest.mark.parametrize(
    ("zone", "region", "belongs"),
    [
        ("use1-az4", "us-east-1", True),
        ("use10-az4", "us-east-1", False),
        ("use1", "us-east-1", False),
        ("us-east-1a", "us-east-1", False),
        ("use1-az4", "nowhere", False),
        ("None-az4", "nowhere", False),
    ],
)
def test_a_zone_id_belongs_to_the_region_with_its_prefix(
    zone: str, region: str, belongs: bool
) -> None:
    assert is_zone_of(zone, region) is belongs


def test_the_static_spot_price_is_the_on_demand_price_less_the_advisors_savings() -> None:
    [quote] = StaticPrices().spot(DEAR, "us-east-1")
    assert quote == Quote(
        instance_type="g5.xlarge",
        region="us-east-1",
        zone=None,
        zone_name=None,
        usd_per_hour=Decimal("0.820987"),  # 66.5 % of $1.234567, to a ten-thousandth of a cent
        at=None,
        observed=utc(2025, 7),  # the older of the two tables
        kind="estimated",
        source="on-demand recorded 2026-07-20, savings recorded 2025-07",
    )
    assert advisor_recorded() == "2025-07"
    old = replace(
        DEAR, on_demand={"us-east-1": replace(DEAR.on_demand["us-east-1"], recorded="2020-01-02")}
    )
    assert StaticPrices().spot(old, "us-east-1")[0].observed == utc(2020, 1, 2)


@pytest.mark.parametrize("lacking", ["on_demand", "advice"])
def test_without_an_on_demand_price_or_advice_there_is_no_static_spot_price(lacking: str) -> None:
    assert StaticPrices().spot(replace(DEAR, **{lacking: {}}), "us-east-1") == ()


def test_the_static_on_demand_price_is_as_recorded() -> None:
    quote = StaticPrices().on_demand(DEAR, "us-east-1")
    assert quote == Quote(
        instance_type="g5.xlarge",
        region="us-east-1",
        zone=None,
        zone_name=None,
        usd_per_hour=Decimal("1.234567"),
        at=None,
        observed=utc(2026, 7, 20),
        kind="recorded",
        source="2026-07-20",
    )
    assert StaticPrices().on_demand(DEAR, "us-west-2") is None
    assert StaticPrices().zones("us-east-1") == ()


def test_the_static_table_gives_the_reason_for_a_missing_price() -> None:
    prices = StaticPrices()
    assert (
        prices.why_missing(KIND, "mars-1", None)
        == "in the static table, whose prices are of us-east-1 only"
    )
    assert "the spot advisor did not list it" in prices.why_missing(KIND, "us-east-1", None)


def test_the_static_table_describes_itself_and_what_it_lacks() -> None:
    now = utc(2026, 9, 20)
    table = (
        "static table of us-east-1 (on-demand prices of 2026-07-20, 2 months old; savings of "
        "2025-07, 15 months old)"
    )
    assert describe_static_table(now) == table
    described = StaticPrices().describe(now_utc=now, regions=["us-east-1"], max_age_hours=1.0)
    assert described == (f"spot prices: {table}",), "the on-demand prices are of the same table"
    because = StaticPrices(because="nobody answered")
    far = because.describe(now_utc=now, regions=["us-east-1", "eu-west-1"], max_age_hours=1.0)
    assert far == (
        f"spot prices: {table}, because nobody answered",
        describe_on_demand(now, ["us-east-1", "eu-west-1"]),
    )


def test_on_demand_prices_are_described_with_the_regions_that_lack_them() -> None:
    known = "on-demand prices: static table of us-east-1, 2026-07-20, 2 months old"
    lacking = (
        "; none on record for mars-1, eu-west-1 (ebbflow catalogue refresh --regions mars-1 "
        "eu-west-1 brings them)"
    )
    now = utc(2026, 9, 20)
    assert describe_on_demand(now, ["us-east-1"]) == known
    assert describe_on_demand(now, ["mars-1", "us-east-1", "eu-west-1"]) == known + lacking
    assert describe_on_demand(now, ["mars-1"]).startswith(known), (
        "none of the regions is recorded: all that are"
    )
    assert refresh_command(["a-1", "b-2"]) == "ebbflow catalogue refresh --regions a-1 b-2"


@pytest.fixture
def two_regions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A shipped table with a second region, whose prices are older."""
    table = tmp_path / "on_demand.csv"
    table.write_text(f"{ON_DEMAND.read_text()}eu-west-1,g5.xlarge,1.2,2026-05-01\n")
    monkeypatch.setattr("ebbflow.cost.catalogue.ON_DEMAND", table)
    on_demand_recorded.cache_clear()
    yield
    on_demand_recorded.cache_clear()


@pytest.mark.usefixtures("two_regions")
def test_the_oldest_of_several_recorded_regions_counts() -> None:
    now = utc(2026, 9, 20)
    both = describe_on_demand(now, ["us-east-1", "eu-west-1", "mars-1"])
    assert both.startswith(
        "on-demand prices: static table of us-east-1, eu-west-1, 2026-05-01, 5 months old; none"
    )
    assert describe_on_demand(now, ["us-east-1"]).endswith(
        "static table of us-east-1, 2026-07-20, 2 months old"
    )
    assert "on-demand prices of 2026-05-01, 5 months old;" in describe_static_table(now)
    assert len(table_ages(["us-east-1"])) == len(table_ages()) - 1


def test_each_shipped_table_has_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day begins in UTC, and not where the machine is."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    ages = table_ages()
    monkeypatch.undo()
    time.tzset()
    assert ages == [
        ("on-demand prices of us-east-1", "2026-07-20", utc(2026, 7, 20)),
        ("savings and bands of the spot advisor", "2025-07", utc(2025, 7)),
        (
            "storage and transfer",
            RATES_RECORDED,
            utc(*map(int, RATES_RECORDED.split("-"))),
        ),
    ]
    assert [name for name, _, _ in table_ages(["eu-west-1"])] == [
        "savings and bands of the spot advisor",
        "storage and transfer",
    ]
    assert list(on_demand_recorded()) == ["us-east-1"]


def test_tables_are_old_after_90_days() -> None:
    assert STALE_DAYS == 90
    at = utc(2026, 7, 20) + 90 * DAY
    assert "us-east-1 (" not in (warn_of_age(at, ["us-east-1"]) or "")
    assert "on-demand prices of us-east-1 (3 months)" in (warn_of_age(at + 1, ["us-east-1"]) or "")
    assert "us-east-1 (" not in (warn_of_age(at + 1, ["eu-west-1"]) or ""), (
        "only regions that are asked for"
    )
    assert warn_of_age(utc(2025, 7), []) is None
    assert warn_of_age(utc(2025, 7) + 91 * DAY, ["mars-1"]) == (
        "! tables older than 90 days: savings and bands of the spot advisor (3 months); "
        "fix: ebbflow catalogue refresh --regions mars-1"
    )
