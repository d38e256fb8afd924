"""EC2 as a client that answers from lists, for tests of what is asked and of what the answers come
to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError

OPERATIONS = {
    "describe_availability_zones": "DescribeAvailabilityZones",
    "describe_capacity_block_offerings": "DescribeCapacityBlockOfferings",
    "describe_capacity_reservations": "DescribeCapacityReservations",
    "describe_spot_price_history": "DescribeSpotPriceHistory",
    "get_spot_placement_scores": "GetSpotPlacementScores",
}


class FakeEc2:
    """EC2 of one region.

    Attributes:
        requests: Each request so far, as (operation, its parameters).
    """

    def __init__(
        self, region: str = "us-east-1", **answers: list[dict[str, Any] | Exception]
    ) -> None:
        """answers: by operation, what EC2 answers to each of its requests in turn; an exception is
        raised.
        """
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._answers = answers
        service = SimpleNamespace(signing_name="ec2")
        self.meta = SimpleNamespace(
            region_name=region, method_to_api_mapping=OPERATIONS, service_model=service
        )

    def __getattr__(self, operation: str) -> Callable[..., dict[str, Any]]:
        if operation not in OPERATIONS:
            raise AttributeError(operation)

        def answer(**request: Any) -> dict[str, Any]:
            self.requests.append((operation, request))
            found = self._answers[operation].pop(0)
            if isinstance(found, Exception):
                raise found
            return found

        return answer


def refusal(operation: str, code: str = "UnauthorizedOperation") -> ClientError:
    """EC2's refusal of an operation; by default the credentials lack the permission."""
    metadata = {"HTTPStatusCode": 403}
    return ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": metadata}, operation
    )


def record_joins(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets each time limit with which a thread is waited for, in seconds."""
    limits: list[float] = []
    join = threading.Thread.join

    def record(thread: threading.Thread, timeout: float | None = None) -> None:
        if timeout is not None:
            limits.append(timeout)
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", record)
    return limits
