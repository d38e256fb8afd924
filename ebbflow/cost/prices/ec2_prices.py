"""Live spot prices from EC2. All regions are queried in parallel, with one deadline.

`ebbflow.infra.aws.calls` makes the requests and retries them. For a region that fails, the prices
of the static table are used, and `describe` gives the reason.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Self

from ebbflow.core.errors import CloudError, CloudForbidden
from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import (
    Quote,
    StaticPrices,
    describe_on_demand,
    describe_static_table,
    format_time,
)
from ebbflow.cost.prices.recorded import (
    LINUX,
    PriceRecord,
    SpotRecord,
    ZonePrices,
    explain_zone_names,
    prices_at,
    read_record,
    with_zone_ids,
)
from ebbflow.infra.aws.answers import ZonesAnswer
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, call_aws, paginate

if TYPE_CHECKING:
    from botocore.client import BaseClient

# Deadline for all regions together; the static table stands in for a region that needs longer.
DEADLINE_SECONDS = 30.0
_PAGE = 1000
# Most values that EC2 accepts in one filter.
_FILTER_VALUES = 200


@dataclass(frozen=True, kw_only=True)
class RegionPrices:
    """EC2's answer for one region."""

    records: Sequence[SpotRecord]  # changes of spot prices
    zone_ids: Mapping[str, str]  # zone id of each zone name of this account
    names_only: str = ""  # reason why zones have names but no ids; empty if the ids are known


@dataclass(frozen=True, kw_only=True)
class PriceAnswers:
    """EC2's answers for all regions."""

    answered: Mapping[str, RegionPrices]  # answers by region
    failed: Mapping[str, str]  # reason for each region without an answer
    observed: float  # Unix time of the requests


@dataclass(frozen=True, kw_only=True)
class LivePrices(ZonePrices):
    """Live spot prices of the regions that answered.

    Regions in `failed` have the prices of the static table.
    """

    failed: Mapping[str, str]  # reason for each region without an answer
    # by region, the reason why its zone ids are unavailable
    names_only: Mapping[str, str]
    asked_at: float  # Unix time of the requests

    @classmethod
    def of(cls, answers: PriceAnswers) -> Self:
        answered = answers.answered
        records: list[SpotRecord] = []
        zones: dict[str, set[str]] = {}
        for region, answer in answered.items():
            records.extend(answer.records)
            zones[region] = {record.zone for record in answer.records}
            zones[region].update(answer.zone_ids.values())
        observed = dict.fromkeys(answered, answers.observed)
        return cls(
            quotes=prices_at(
                records,
                now_utc=answers.observed,
                observed=observed,
                kind="live",
                source="asked of EC2",
            ),
            known_zones={region: tuple(sorted(found)) for region, found in zones.items()},
            failed=answers.failed,
            names_only={
                region: answer.names_only
                for region, answer in answered.items()
                if answer.names_only
            },
            asked_at=answers.observed,
        )

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        if region in self.failed:
            return StaticPrices().spot(kind, region)
        return super().spot(kind, region)

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if region in self.failed:
            return StaticPrices().why_missing(kind, region, zone)
        if zone is None:
            return "now by EC2: not offered there as Spot"
        names = self.zones_by_name(kind, region, zone)
        if names:
            reason = self.names_only.get(region) or f"EC2 gave no ids of {', '.join(names)}"
            return f"now by EC2: {explain_zone_names(reason)}"
        return f"now by EC2: no price in that zone, but in others of {region}"

    # The unused argument is one of `PriceSource`.
    def describe(
        self,
        *,
        now_utc: float,
        regions: Sequence[str],
        max_age_hours: float,  # noqa: ARG002
    ) -> tuple[str, ...]:
        lines = []
        answered = [region for region in regions if region not in self.failed]
        empty = [region for region in answered if self.observed(region) is None]
        if answered:
            lines.append(
                f"spot prices: live, asked {format_time(self.asked_at)} of {', '.join(answered)}"
            )
        if empty:
            lines.append(
                f"spot prices: no history at all of these instance types in {', '.join(empty)}"
            )
        for region, reason in self.names_only.items():
            lines.append(f"zones of {region}: by this account's names, because {reason}")
        for region in regions:
            if region in self.failed:
                lines.append(
                    f"spot prices of {region}: {describe_static_table(now_utc)}, because "
                    f"{self.failed[region]}"
                )
        return (*lines, describe_on_demand(now_utc, regions))


def query_spot_prices(
    regions: Sequence[str],
    instance_types: Sequence[str],
    *,
    now_utc: float,
    since_utc: float | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    client: Callable[[str], BaseClient] | None = None,
    deadline: RequestDeadline | None = None,
) -> PriceAnswers:
    """Query EC2 for the spot prices of all regions in parallel, and return at the deadline at the
    latest.

    The requests run in daemon threads, so a request that hangs delays neither the return nor the
    end of the process.

    Args:
        since_utc: Unix time. The price changes after this time are returned as well (EC2 keeps 90
            days). None means only the current prices.
        client: Function that makes the EC2 client of a region. None uses botocore with its usual
            credentials.
        deadline: Deadline of the requests. None means `deadline_seconds` from now.
    """
    make = client or (lambda region: aws_client("ec2", region))
    deadline = deadline or RequestDeadline.after(deadline_seconds)
    answered: dict[str, RegionPrices] = {}
    failed: dict[str, str] = {}

    def ask_one(region: str) -> None:
        try:
            answered[region] = _ask_region(
                make(region), region, instance_types, since_utc or now_utc, deadline
            )
        except (CloudError, PriceError) as error:
            failed[region] = str(error)
        except (
            Exception
        ) as error:  # `client` cannot make a client: a broken profile, an unknown region
            failed[region] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    threads = [threading.Thread(target=ask_one, args=(region,), daemon=True) for region in regions]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + deadline_seconds
    for thread in threads:
        thread.join(limit - time.monotonic())
    in_time = {region: answered[region] for region in regions if region in answered}
    late = f"did not answer within {deadline_seconds:g} s"
    return PriceAnswers(
        answered=in_time,
        failed={
            region: failed.get(region, f"{region} {late}")
            for region in regions
            if region not in in_time
        },
        observed=now_utc,
    )


def _ask_region(
    client: BaseClient,
    region: str,
    instance_types: Sequence[str],
    since_utc: float,
    deadline: RequestDeadline,
) -> RegionPrices:
    """Query one region for its zones and prices.

    If the account has no permission to list zones, the prices have zone names instead of zone ids.
    """
    zones = [
        {"Name": "zone-type", "Values": ["availability-zone"]},
        {"Name": "region-name", "Values": [region]},
    ]
    ids = {}
    names_only = ""
    try:
        answer = call_aws(
            client, "describe_availability_zones", deadline, shape=ZonesAnswer, Filters=zones
        )
        ids = {zone["ZoneName"]: zone["ZoneId"] for zone in answer.get("AvailabilityZones", [])}
    except CloudForbidden as error:
        names_only = str(error)
    found = []
    for start in range(0, len(instance_types), _FILTER_VALUES):
        # A filter ignores unknown types; the parameter for types would refuse the whole request.
        wanted = {
            "Name": "instance-type",
            "Values": list(instance_types[start : start + _FILTER_VALUES]),
        }
        # With a start time EC2 also returns, for each type and zone, the change that was in force
        # then.
        entries = paginate(
            client,
            "describe_spot_price_history",
            "SpotPriceHistory",
            deadline,
            shape=PriceRecord,
            token="NextToken",
            Filters=[wanted],
            ProductDescriptions=list(LINUX),
            StartTime=datetime.fromtimestamp(since_utc, UTC),
            MaxResults=_PAGE,
        )
        found += [
            record
            for entry in entries
            if (record := read_record(entry, f"EC2 in {region}")) is not None
        ]
    records = with_zone_ids(found, ids)
    if all(record.zone_id for record in records):
        names_only = ""
    return RegionPrices(records=records, zone_ids=ids, names_only=names_only)
