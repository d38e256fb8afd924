"""Pools and configurations with round figures, for the formulas of the guarantee and the rule of
placement.
"""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from functools import cache
from typing import Any

from ebbflow.core.config.schema import RunConfig
from ebbflow.cost.plan.plan import Plan
from ebbflow.cost.plan.pools import Candidate
from tests.support.capacity import batch_config, planned
from tests.support.timelines import WALL

# Their fields belong to `Candidate.case`.
_CASE = frozenset({"start_hours", "work_hours", "fixed_lost_hours", "interval_hours", "wait_hours"})


@cache
def template_plan() -> Plan:
    return planned(_template_config(), WALL)


def changed_pool(pool: Candidate, **values: Any) -> Candidate:
    """Change fields of a pool, of its price (`usd_per_hour`, `volume_usd_per_hour`), or of its
    forecast's inputs.
    """
    case = {name: value for name, value in values.items() if name in _CASE}
    rest = {name: value for name, value in values.items() if name not in _CASE}
    prices = {
        name: Decimal(str(rest.pop(name)))
        for name in ("usd_per_hour", "volume_usd_per_hour")
        if name in rest
    }
    if "price" not in rest:
        rest["price"] = replace(pool.price, **prices)
    return replace(pool, case=replace(pool.case, **case), **rest)


def make_pool(market: str, **values: Any) -> Candidate:
    """Make a pool of one g5.xlarge, of which `values` are changed."""
    template = next(candidate for candidate in template_plan().ranked if candidate.market == market)
    return changed_pool(template, **values)


def make_config(
    *,
    runnable_minutes: float = 30.0,
    save_seconds: float = 450.0,
    hang_floor_seconds: float = 225.0,
    **cost: Any,
) -> RunConfig:
    """Make a configuration whose durations are round fractions of an hour: 1/2, 1/8 and 1/16.

    `cost`: its section.
    """
    config = _template_config().changed("batch", runnable_minutes=runnable_minutes)
    config = config.changed("checkpoint", deadline_seconds=save_seconds)
    return config.changed("survival", hang_floor_seconds=hang_floor_seconds).changed("cost", **cost)


def spot_pool(**values: Any) -> Candidate:
    """Make a Spot pool of two nodes at $3 per hour, 8 h of work, a start of 1/4 h and a commit per
    hour.
    """
    return make_pool(
        "spot",
        **{
            "nodes": 2,
            "usd_per_hour": 1.5,
            "start_hours": 0.25,
            "fixed_lost_hours": 0.125,
            "work_hours": 8.0,
            "interval_hours": 1.0,
            "step_seconds": 2.0,
            "expected_usd": 30.0,
        }
        | values,
    )


def on_demand_pool(**values: Any) -> Candidate:
    """Make an on-demand pool of two nodes at $4 per hour, 4 h of work and a start of 1/2 h."""
    return make_pool(
        "on_demand",
        **{
            "nodes": 2,
            "usd_per_hour": 2.0,
            "start_hours": 0.25,
            "fixed_lost_hours": 0.5,
            "work_hours": 4.0,
            "paid_hours": 4.25,
            "interval_hours": 3.0,
            "step_seconds": 2.0,
            "storage_usd": 0.0625,
            "transfer_usd": 0.03125,
            "expected_usd": 40.0,
        }
        | values,
    )


@cache
def _template_config() -> RunConfig:
    # Without volumes, so that prices stay round
    return batch_config("cost.volume_gib_per_node=0")
