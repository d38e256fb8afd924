"""Evidence of available capacity: capacity reservations, Capacity Blocks for sale, and Spot
placement scores.

`open_evidence` takes reservations from the configuration and, with `cost.prices: live`, queries EC2
for their current state. EC2's responses are parsed according to botocore's models; this code was
never run on a real AWS account.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Self, TypeVar

from ebbflow.core.config.schema import ReservationConfig, RunConfig
from ebbflow.core.errors import CloudError
from ebbflow.cost.catalogue import load_catalogue
from ebbflow.cost.prices.quote import Quote, format_time
from ebbflow.infra.aws.answers import BlockOffering, PlacementScore, ReservationsAnswer
from ebbflow.infra.aws.calls import RequestDeadline, aws_client, call_aws, paginate

if TYPE_CHECKING:
    from botocore.client import BaseClient

Found = TypeVar("Found")
_SECONDS = 15.0
# EC2 ends the instances of a Capacity Block this long before the block's end.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-how.html
_BLOCK_ENDS_EARLY_SECONDS = 1800.0
# With fewer instance types the score is always low.
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/how-sps-works.html
_LEAST_TYPES = 3
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-capacity-blocks.html
_BLOCK_FAMILIES = ("p4d.", "p4de.", "p5.", "p5e.", "p5en.", "p6")


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """A capacity reservation of the account, or a Capacity Block for sale."""

    id: str
    instance_type: str
    instances: int
    region: str
    zone: str | None = None
    # start_utc, end_utc: Unix times between which the reservation can run instances. A `start_utc`
    # of None means now, and an `end_utc` of None means no end.
    start_utc: float | None = None
    end_utc: float | None = None
    # Price of an instance in use; None means the on-demand price
    usd_per_hour: Decimal | None = None
    # price of the whole Capacity Block, due at purchase; None for a reservation of the account
    fee_usd: Decimal | None = None
    problem: str = ""  # reason why the reservation cannot run instances; "" if there is none
    kind: str = "configured"  # "live" if EC2 described the reservation, else "configured"

    @classmethod
    def of(cls, declared: ReservationConfig) -> Self:
        values = {
            name: getattr(declared, name)
            for name in ("id", "instance_type", "instances", "region", "zone")
        }
        usd = declared.usd_per_hour
        return cls(
            **values,
            start_utc=_unix(declared.start),
            end_utc=_unix(declared.end),
            usd_per_hour=None if usd is None else Decimal(str(usd)),
        )

    def wait_hours(self, now_utc: float) -> float:
        return max(0.0, (self.start_utc or now_utc) - now_utc) / 3600

    def why_unusable(self, nodes: int, now_utc: float) -> str:
        """Return why the reservation cannot start `nodes` instances, or "" if it can."""
        if self.end_utc is not None and self.end_utc <= now_utc:
            return f"ended {format_time(self.end_utc)}"
        if not self.problem and nodes > self.instances:
            return f"has {self.instances} instances free, and the pool has {nodes}"
        return self.problem

    def quote(self, on_demand: Quote | None, now_utc: float) -> Quote | None:
        """Return the reservation's price per instance-hour, else the on-demand price; None if both
        are unknown.
        """
        if self.usd_per_hour is None:
            return on_demand and replace(on_demand, zone=self.zone)
        return Quote(
            instance_type=self.instance_type,
            region=self.region,
            zone=self.zone,
            zone_name=None,
            usd_per_hour=self.usd_per_hour,
            at=None,
            observed=now_utc,
            kind="live" if self.kind == "live" and self.fee_usd is not None else "recorded",
            source="the block's fee ÷ its hours"
            if self.fee_usd is not None
            else "in cost.reservations",
        )


@dataclass(frozen=True, kw_only=True)
class CapacityEvidence:
    """Reservations, Capacity Blocks and Spot placement scores."""

    held: tuple[Reservation, ...] = ()  # reservations of the account
    blocks: tuple[Reservation, ...] = ()  # Capacity Blocks for sale
    # spot placement scores (1 to 10) of `cluster.nodes` instances of any planned type, by (region,
    # zone id)
    scores: Mapping[tuple[str, str], int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # one sentence for each query that EC2 did not answer

    def score(self, region: str, zone: str | None) -> int | None:
        """Return the placement score of a zone or, if `zone` is None, the region's highest score;
        None if unknown.
        """
        found = [
            score
            for (of, where), score in self.scores.items()
            if of == region and zone in (None, where)
        ]
        return max(found, default=None)


def open_evidence(
    config: RunConfig,
    *,
    network: bool = True,
    client: Callable[[str], BaseClient] | None = None,
) -> CapacityEvidence:
    """Return the configured reservations.

    With `cost.prices: live`, also query EC2 for their state, blocks and scores.

    If EC2 does not answer, or the account lacks the permission, add a note and use the configured
    reservations.

    Args:
        network: Whether network requests are allowed.
        client: Function that makes the EC2 client of a region. None uses botocore with its usual
            credentials.
    """
    cost = config.cost
    held = tuple(map(Reservation.of, config.cost.reservations))
    if cost.prices != "live" or not network or config.cluster.plan_for == "local":
        return CapacityEvidence(held=held)
    make = client or (lambda region: aws_client("ec2", region))
    deadline = RequestDeadline.after(_SECONDS)
    notes: list[str] = []

    def ask(what: str, find: Callable[[], Found], otherwise: Found) -> Found:
        try:
            return find()
        except (CloudError, KeyError, ValueError) as error:
            notes.append(f"{what} unknown: {error}")
            return otherwise

    held = tuple(
        ask(
            f"state of reservation {reservation.id}",
            lambda reservation=reservation: _described(
                reservation, make(reservation.region), deadline
            ),
            reservation,
        )
        for reservation in held
    )
    blocks: list[Reservation] = []
    kinds = [kind.name for kind in load_catalogue().matching(config.cluster.instance_types)]
    days = cost.capacity_block_days or 0
    for region in cost.regions if days else ():
        for name in (name for name in kinds if name.startswith(_BLOCK_FAMILIES)):
            what = f"Capacity Blocks of {name} in {region}"
            blocks += ask(
                what,
                lambda name=name, region=region: _blocks(
                    config, name, days, make(region), deadline
                ),
                [],
            )
    scores: dict[tuple[str, str], int] = {}
    if config.cluster.market != "on_demand" and len(kinds) >= _LEAST_TYPES:
        scores = ask(
            "Spot placement scores",
            lambda: _scores(config, kinds, make(cost.regions[0]), deadline),
            {},
        )
    return CapacityEvidence(held=held, blocks=tuple(blocks), scores=scores, notes=tuple(notes))


def _described(declared: Reservation, client: BaseClient, deadline: RequestDeadline) -> Reservation:
    answer = call_aws(
        client,
        "describe_capacity_reservations",
        deadline,
        shape=ReservationsAnswer,
        CapacityReservationIds=[declared.id],
    )
    described = answer.get("CapacityReservations") or []
    if not described:
        return replace(
            declared,
            problem=f"EC2 knows no reservation {declared.id} in {declared.region}",
            kind="live",
        )
    [found] = described
    state = found.get("State", "")
    end = _moment(found.get("EndDate"))
    block = found.get("ReservationType") == "capacity-block"
    # A block is scheduled until it begins, and all its instances are then free.
    waits = state in ("scheduled", "payment-pending")
    if waits:
        free = found["TotalInstanceCount"]
    else:
        free = found["AvailableInstanceCount"]
    return replace(
        declared,
        instance_type=found["InstanceType"],
        instances=int(free),
        zone=found.get("AvailabilityZoneId") or declared.zone,
        start_utc=_moment(found.get("StartDate")) or declared.start_utc,
        end_utc=end - _BLOCK_ENDS_EARLY_SECONDS if block and end else end or declared.end_utc,
        problem="" if waits or state == "active" else f"is {state}",
        kind="live",
    )


def _blocks(
    config: RunConfig, instance_type: str, days: int, client: BaseClient, deadline: RequestDeadline
) -> list[Reservation]:
    """Return the Capacity Blocks for sale with `cluster.nodes` instances.

    If that is "auto", return the blocks with one instance.
    """
    region = client.meta.region_name
    nodes = config.cluster.nodes
    wanted = {"InstanceType": instance_type, "InstanceCount": 1 if nodes == "auto" else nodes}
    return [
        Reservation(
            id=found["CapacityBlockOfferingId"],
            instance_type=found["InstanceType"],
            instances=found["InstanceCount"],
            region=region,
            zone=found.get("AvailabilityZone"),
            start_utc=_moment(found["StartDate"]),
            end_utc=found["EndDate"].timestamp() - _BLOCK_ENDS_EARLY_SECONDS,
            usd_per_hour=Decimal(found["UpfrontFee"])
            / found["InstanceCount"]
            / found["CapacityBlockDurationHours"],
            fee_usd=Decimal(found["UpfrontFee"]),
            kind="live",
        )
        for found in paginate(
            client,
            "describe_capacity_block_offerings",
            "CapacityBlockOfferings",
            deadline,
            shape=BlockOffering,
            token="NextToken",
            **wanted,
            CapacityDurationHours=24 * days,
        )
        if found.get("CurrencyCode", "USD") == "USD"
    ]


def _scores(
    config: RunConfig, kinds: Sequence[str], client: BaseClient, deadline: RequestDeadline
) -> dict[tuple[str, str], int]:
    nodes = config.cluster.nodes
    found = paginate(
        client,
        "get_spot_placement_scores",
        "SpotPlacementScores",
        deadline,
        shape=PlacementScore,
        token="NextToken",
        InstanceTypes=list(kinds),
        TargetCapacity=1 if nodes == "auto" else nodes,
        TargetCapacityUnitType="units",
        SingleAvailabilityZone=True,
        RegionNames=list(config.cost.regions),
    )
    return {(score["Region"], score["AvailabilityZoneId"]): int(score["Score"]) for score in found}


def _moment(value: datetime | None) -> float | None:
    if value is None:
        return None
    return value.timestamp()


def _unix(text: str | None) -> float | None:
    if text is None:
        return None
    return datetime.fromisoformat(text).timestamp()
