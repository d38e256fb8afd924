"""Spot and on-demand prices from EC2: paged queries with bounded retries, and live prices by region.

boto3 is imported when a client is made, and only then. What goes wrong becomes an `Unavailable` with the reason in
words; nothing here decides what stands in for the prices.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from ebbflow.cost.catalogue import InstanceType
from ebbflow.cost.errors import PriceError
from ebbflow.cost.prices.quote import Quote, StaticPrices, on_demand_text, table_text, time_text
from ebbflow.cost.prices.recorded import (
    LINUX,
    SpotRecord,
    ZonePrices,
    by_name_text,
    prices_at,
    read_record,
    with_zone_ids,
)

# What EC2 says when it is asked too often, or is troubled itself: asking again later may help.
_THROTTLED = frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled",
     "RequestThrottledException", "TooManyRequestsException", "EC2ThrottledException", "SlowDown"}
)  # fmt: skip
_TROUBLED = frozenset({"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "RequestTimeout"})
_FORBIDDEN = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
_NOT_ACCEPTED = frozenset(
    {"AuthFailure", "InvalidClientTokenId", "ExpiredToken", "ExpiredTokenException", "RequestExpired",
     "SignatureDoesNotMatch", "UnrecognizedClientException", "IncompleteSignature"}
)  # fmt: skip
_ATTEMPTS = 5
_ATTEMPTS_TO_REACH = 2  # without a network the table should not take long to stand in
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0
_REQUEST_SECONDS = 5.0
_PAGE = 1000
# EC2 takes at most this many values in one filter.
_FILTER_VALUES = 200


class Unavailable(Exception):
    """A region's prices could not be had. The text goes on from "because"."""


class Forbidden(Unavailable):
    """The credentials are good, and lack a right."""


@dataclass(frozen=True)
class Patience:
    """Until when to try, and how to wait. deadline: in the time of `monotonic`, seconds."""

    deadline: float
    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def left(self) -> float:
        return self.deadline - self.monotonic()


def ec2_clients() -> Callable[[str], Any]:
    """What makes a region's EC2 client."""
    make = aws_clients()
    return lambda region: make("ec2", region)


def aws_clients() -> Callable[[str, str], Any]:
    """What makes a client of (service, region), one that neither retries nor waits long: both are done here.

    Credentials by the usual chain. All clients come from one session, which reads EC2's large description once.
    """
    lock = threading.Lock()  # a session may be shared by threads, but not while it makes a client

    @cache
    def session() -> Any:
        import boto3

        return boto3.session.Session()

    def client(service: str, region: str) -> Any:
        from botocore.config import Config

        limits = Config(
            connect_timeout=_REQUEST_SECONDS, read_timeout=_REQUEST_SECONDS, retries={"total_max_attempts": 1}
        )
        with lock:
            return session().client(service, region_name=region, config=limits)

    return client


def zone_ids(client: Any, region: str, patience: Patience) -> dict[str, str]:
    """The region's zones: this account's names with the ids that are the same for all. Raises Unavailable."""

    def ask(**_: Any) -> Mapping[str, Any]:
        filters = [{"Name": "zone-type", "Values": ["availability-zone"]}, {"Name": "region-name", "Values": [region]}]
        return client.describe_availability_zones(Filters=filters)

    answer = answered(ask, "ec2:DescribeAvailabilityZones", region, patience)
    return {zone["ZoneName"]: zone["ZoneId"] for zone in answer.get("AvailabilityZones", [])}


def spot_records(
    client: Any,
    region: str,
    instance_types: Sequence[str],
    ids: Mapping[str, str],
    *,
    since_utc: float,
    patience: Patience,
) -> list[SpotRecord]:
    """All change events since `since_utc`, and of each type and zone the one that held then.

    With `since_utc` the present moment these are the present prices and nothing else. Types go into a filter, which
    knows no wrong type, where the parameter for types refuses the whole request. Raises Unavailable.
    """
    records = []
    for start in range(0, len(instance_types), _FILTER_VALUES):
        wanted = {"Name": "instance-type", "Values": list(instance_types[start : start + _FILTER_VALUES])}
        for entry in _pages(client, region, wanted, since_utc, patience):
            record = read_record(entry, f"EC2 in {region}")
            if record is not None:
                records.append(record)
    return with_zone_ids(records, ids)


def _pages(
    client: Any, region: str, wanted: Mapping[str, Any], since_utc: float, patience: Patience
) -> Iterator[Mapping[str, Any]]:
    token = ""
    while True:
        request: dict[str, Any] = {
            "Filters": [wanted],
            "ProductDescriptions": list(LINUX),
            "StartTime": datetime.fromtimestamp(since_utc, UTC),
            "MaxResults": _PAGE,
        }
        if token:
            request["NextToken"] = token
        answer = answered(
            client.describe_spot_price_history, "ec2:DescribeSpotPriceHistory", region, patience, **request
        )
        yield from answer.get("SpotPriceHistory", [])
        following = answer.get("NextToken") or ""  # the last page has an empty token, not none
        if following == token:
            return
        token = following
        if not token:
            return


def answered(
    ask: Callable[..., Mapping[str, Any]], right: str, region: str, patience: Patience, **request: Any
) -> Mapping[str, Any]:
    """The answer to one request, asked again after a growing pause while that may help."""
    pause = _FIRST_PAUSE_SECONDS
    for attempt in itertools.count(1):
        if patience.left() <= 0:
            raise Unavailable(f"{region} did not answer within the time there was")
        try:
            return ask(**request)
        except Exception as error:
            reason, attempts = _curable(error, right, region)
            cause = error
        wait = pause * random.uniform(0.5, 1.0)  # so that many jobs do not come back together
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        if attempt == attempts or wait >= patience.left():
            raise Unavailable(f"{reason} (asked {attempt} times)" if attempt > 1 else reason) from cause
        patience.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def _curable(error: Exception, right: str, region: str) -> tuple[str, int]:
    """The reason in words, and how often to ask in all; raises Unavailable for what asking again cannot cure."""
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection

    if isinstance(error, ClientError):
        code = error.response.get("Error", {}).get("Code", "")
        if code in _THROTTLED:
            return f"{region} throttled the request ({code})", _ATTEMPTS
        if code in _TROUBLED:
            return f"{region} is in trouble itself ({code})", _ATTEMPTS
        if code in _FORBIDDEN:
            raise Forbidden(f"{region} denied it ({code}): the credentials lack the right {right}") from error
        if code in _NOT_ACCEPTED:
            why = f"does not accept the credentials ({code}), or the account has not enabled the region"
            raise Unavailable(f"{region} {why}") from error
        raise Unavailable(f"{region} refused it: {_first_line(error)}") from error
    if isinstance(error, NoConnection | HTTPClientError):
        return f"{region} cannot be reached: {_first_line(error)}", _ATTEMPTS_TO_REACH
    if isinstance(error, BotoCoreError):  # no credentials, half of them, an unknown region or profile
        raise Unavailable(_first_line(error)) from error
    raise error


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")


# For all regions together: a plan is worth waiting this long for, and the table stands in after it.
DEADLINE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class RegionPrices:
    """What a region said: its change events and its zones (names with ids). names_only: why ids could not be had."""

    records: Sequence[SpotRecord]
    zone_ids: Mapping[str, str]
    names_only: str = ""


@dataclass(frozen=True, kw_only=True)
class PriceAnswers:
    """Of all regions asked: those that answered, and why the others did not. observed: Unix time of the asking."""

    answered: Mapping[str, RegionPrices]
    failed: Mapping[str, str]
    observed: float


@dataclass(frozen=True, kw_only=True)
class LivePrices(ZonePrices):
    """Quotes of the regions that answered; a region of `failed` has the table's, and both say so."""

    failed: Mapping[str, str] = field(default_factory=dict)
    names_only: Mapping[str, str] = field(default_factory=dict)
    asked_at: float

    @classmethod
    def of(cls, answers: PriceAnswers) -> LivePrices:
        """The prices that the answers hold for the moment of asking."""
        answered = answers.answered
        records = [record for answer in answered.values() for record in answer.records]
        zones = {
            region: {*answer.zone_ids.values(), *(record.zone for record in answer.records)}
            for region, answer in answered.items()
        }
        observed = dict.fromkeys(answered, answers.observed)
        return cls(
            quotes=prices_at(records, now_utc=answers.observed, observed=observed, kind="live", source="asked of EC2"),
            known_zones={region: tuple(sorted(found)) for region, found in zones.items()},
            failed=answers.failed,
            names_only={region: answer.names_only for region, answer in answered.items() if answer.names_only},
            asked_at=answers.observed,
        )

    def spot(self, kind: InstanceType, region: str) -> Sequence[Quote]:
        return StaticPrices().spot(kind, region) if region in self.failed else super().spot(kind, region)

    def why_missing(self, kind: InstanceType, region: str, zone: str | None) -> str:
        if region in self.failed:
            return StaticPrices().why_missing(kind, region, zone)
        if zone is None:
            return "now by EC2: not offered there as Spot"
        if names := self.zones_by_name(kind, region, zone):
            reason = self.names_only.get(region) or f"EC2 gave no ids of {', '.join(names)}"
            return f"now by EC2: {by_name_text(reason)}"
        return f"now by EC2: no price in that zone, but in others of {region}"

    def describe(self, *, now_utc: float, regions: Sequence[str], max_age_hours: float) -> tuple[str, ...]:
        lines = []
        answered = [region for region in regions if region not in self.failed]
        empty = [region for region in answered if self.observed(region) is None]
        if answered:
            lines.append(f"spot prices: live, asked {time_text(self.asked_at)} of {', '.join(answered)}")
        if empty:
            lines.append(f"spot prices: no history at all of these instance types in {', '.join(empty)}")
        for region, reason in self.names_only.items():
            lines.append(f"zones of {region}: by this account's names, because {reason}")
        for region in regions:
            if region in self.failed:
                lines.append(f"spot prices of {region}: {table_text(now_utc)}, because {self.failed[region]}")
        return (*lines, on_demand_text(now_utc, regions))


def query_spot_prices(
    regions: Sequence[str],
    instance_types: Sequence[str],
    *,
    now_utc: float,
    since_utc: float | None = None,
    deadline_seconds: float = DEADLINE_SECONDS,
    client: Callable[[str], Any] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PriceAnswers:
    """Ask all regions side by side; back after the deadline at the latest, whoever still hangs.

    client: makes a region's EC2 client; None: boto3's. since_utc: also the changes since then, at most 90 days; None:
    the present prices only. The threads are daemons, so that a name server that never answers keeps no process from
    ending.
    """
    started = monotonic()
    make = ec2_clients() if client is None else client
    patience = Patience(deadline=started + deadline_seconds, monotonic=monotonic, sleep=sleep)
    found: dict[str, RegionPrices | str] = {}

    def ask_one(region: str) -> None:
        try:
            found[region] = _ask(make(region), region, instance_types, since_utc or now_utc, patience)
        except (Unavailable, PriceError) as error:
            found[region] = str(error)
        except Exception as error:  # a client that cannot be made: a broken profile, an unknown region
            found[region] = f"{type(error).__name__}: {' '.join(str(error).split())}"

    threads = {region: threading.Thread(target=ask_one, args=(region,), daemon=True) for region in regions}
    for thread in threads.values():
        thread.start()
    limit = time.monotonic() + deadline_seconds
    for thread in threads.values():
        thread.join(max(0.0, limit - time.monotonic()))
    found = dict(found)  # a late answer must not come between what follows
    late = f"did not answer within {deadline_seconds:g} s"
    answered = {region: found[region] for region in regions if isinstance(found.get(region), RegionPrices)}
    return PriceAnswers(
        answered=answered,
        failed={region: found.get(region, f"{region} {late}") for region in regions if region not in answered},
        observed=now_utc,
    )


def _ask(client: Any, region: str, instance_types: Sequence[str], since_utc: float, patience: Patience) -> RegionPrices:
    """One region. Without the right to see zones the prices are still good, under the account's zone names."""
    try:
        ids, names_only = zone_ids(client, region, patience), ""
    except Forbidden as error:
        ids, names_only = {}, str(error)
    records = spot_records(client, region, instance_types, ids, since_utc=since_utc, patience=patience)
    if all(record.zone_id for record in records):
        names_only = ""
    return RegionPrices(records=records, zone_ids=ids, names_only=names_only)
