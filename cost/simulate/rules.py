"""What a simulated job may do and what it pays: information, starts, drains, probes, billing. Three named sets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Billing(StrEnum):
    WHOLE_TICK = "whole_tick"
    """Each tick in which a machine is held is paid whole, the last one too: the definition of the published figures."""
    PER_SECOND = "per_second"
    """The time a machine is held, 60 s at least per start: Amazon's rule for Linux."""


class Information(StrEnum):
    OWN_ZONE = "own_zone"
    """The zone of the running or last start is seen at each decision; of others only what probes and starts tell."""
    OWN_POOL = "own_pool"
    """The running machine is seen, nothing else: a waiting job learns from a start alone."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Rules:
    """`attempts`: starts that can be tried at one decision, 0 for as many as there are pools. `probe_hours`: paid time
    of one probe, None where there are none. `drain_hours`: paid time of leaving a machine on purpose.
    `on_demand_delay_hours`: longest unpaid wait for on-demand, drawn uniformly from 0 for each start.
    `probe_interval_hours`: a pool is probed at most once in this time."""

    name: str
    information: Information
    billing: Billing
    attempts: int
    probe_hours: float | None
    drain_hours: float = 0.0
    on_demand_delay_hours: float = 0.0
    probe_interval_hours: float = 0.0


PUBLISHED = Rules(
    "published: sees its own zone, pays one-minute probes of others every 2 h",
    Information.OWN_ZONE,
    Billing.WHOLE_TICK,
    0,
    1 / 60,
    probe_interval_hours=2.0,
)
SEES_ALL = Rules("sees all zones", Information.ALL, Billing.WHOLE_TICK, 0, None)
ENACTABLE = Rules(
    "enactable on AWS Batch: one region, one start per decision, no probes, priced self-drain",
    Information.OWN_POOL,
    Billing.PER_SECOND,
    1,
    None,
    drain_hours=2 / 60,
    on_demand_delay_hours=0.5,
)
"""At most 50 queues is the plan's business: one region's zones of one type are far fewer."""
RULES = {"published": PUBLISHED, "sees-all": SEES_ALL, "enactable": ENACTABLE}
