"""Asking EC2 for a region's spot prices: all pages, with few and bounded retries, before a deadline.

boto3 is imported when a client is made, and only then. What goes wrong becomes an `Unavailable` with the reason in
words; nothing here decides what stands in for the prices.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

from cost.prices.history import LINUX, SpotRecord, read_record, with_zone_ids

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
