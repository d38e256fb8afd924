"""`python -m cost replay RUN [--pool WORDS] [--interval STEPS]`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from cost.errors import ReplayError
from cost.jobs.find import read_job
from cost.ledger.price_curve import PriceCurve
from cost.ledger.pricing import PoolName, Pricing, pool_of
from cost.replay.facts import Facts, facts_of
from cost.replay.whatif import Answer, Question, answer, error_share
from cost.report.hindsight import recorded_curves
from cost.report.number_text import duration, percent, usd
from infra.events import PLAN, Event


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "replay", help="what a finished run would have cost in another pool, or saving otherwise"
    )
    parser.add_argument("job", metavar="RUN", help="a job's name, 'latest', or the folder or s3:// URI of a job")
    parser.add_argument("--pool", default=None, metavar="WORDS", help="such as 'g5.xlarge spot use1-az4', as recorded")
    parser.add_argument("--usd-per-hour", type=Decimal, default=None, help="a price of your own, per node")
    parser.add_argument("--interval", type=int, default=None, metavar="STEPS", help="between saves")
    parser.add_argument("--no-interruptions", action="store_true", help="as if nothing had cut it short")
    parser.add_argument("--store", default=None, metavar="URI", help="where the job lies, if not as this machine knows")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_replay)


def _replay(arguments: argparse.Namespace) -> int:
    found = replay(
        read_job(arguments.job, arguments.store),
        pool=arguments.pool,
        usd_per_hour=arguments.usd_per_hour,
        interval_steps=arguments.interval,
        interruptions=not arguments.no_interruptions,
    )
    print(json.dumps(found, indent=1, allow_nan=False) if arguments.json else render(found))
    return 0


def replay(
    events: Sequence[Event],
    *,
    pool: str | None = None,
    usd_per_hour: Decimal | None = None,
    interval_steps: int | None = None,
    interruptions: bool = True,
) -> dict[str, Any]:
    """The run as measured, as predicted for its own pool and interval, and as it would have been. Plain JSON.

    pool: words that one recorded pool has; None: its own. Raises ReplayError naming the recorded pools for any other.
    """
    if interval_steps is not None and interval_steps < 1:
        raise ReplayError(f"--interval {interval_steps}: at least one step lies between two saves")
    facts = facts_of(events)
    own_pool, own_curve = _own(facts)
    own = answer(facts, Question(pool=str(own_pool), curve=own_curve, interval_steps=facts.interval_steps))
    name, curve, speed = _asked(events, pool, own_pool, own_curve)
    if usd_per_hour is not None:
        curve = PriceCurve(usd_per_hour)
    interval = interval_steps or facts.interval_steps
    ask = Question(pool=str(name), curve=curve, interval_steps=interval, speed=speed, interruptions=interruptions)
    other = answer(facts, ask)
    return {
        "job": facts.job,
        "price_kind": facts.ledger.price_kind,
        "measured": {
            "pool": str(own_pool),
            "interval_steps": facts.interval_steps,
            "usd": float(facts.ledger.total_usd),
            "paid_seconds": facts.paid_seconds,
            "redone_steps": facts.ledger.redone_steps,
        },
        "predicted": {"error_share": error_share(facts, own), **_json(own)},
        "what_if": {"pool": str(name), "interval_steps": interval, "speed": speed, **_json(other)},
        "kind": "simulated",
    }


def render(found: dict[str, Any]) -> str:
    measured, own, other = found["measured"], found["predicted"], found["what_if"]
    return "\n".join(
        [
            f"replay of job {found['job']} (prices: {found['price_kind']})",
            f"  measured   {usd(measured['usd'])}  {measured['pool']}, a save each {measured['interval_steps']} steps, "
            f"{duration(measured['paid_seconds'])} paid, {measured['redone_steps']} steps redone",
            f"  predicted  {usd(own['usd'])}  the same by the model: error {percent(own['error_share'], 2)}",
            f"  what if    {usd(other['usd'])}  {other['pool']}, a save each {other['interval_steps']} steps, "
            f"{duration(other['paid_seconds'])} paid, {other['redone_steps']} steps redone, simulated",
            f"  difference {usd(other['usd'] - own['usd'])}  against the prediction, so its error falls out",
            "  interruptions come when they came; how often another pool is interrupted is not replayed"
            + ("" if other["speed"] == 1.0 else f"; speed × {other['speed']:.3g} as the plan estimated"),
        ]
    )


def _json(found: Answer) -> dict[str, Any]:
    return {
        "usd": float(found.usd),
        "paid_seconds": found.paid_seconds,
        "redone_steps": found.redone_steps,
        "saves": found.saves,
        "interruptions": found.interruptions,
    }


def _own(facts: Facts) -> tuple[PoolName, PriceCurve]:
    price = facts.ledger.nodes[-1].price
    if price.pool is None:
        raise ReplayError("the events hold no plan, so that the run has no price")
    return price.pool, price.curve


def _asked(
    events: Sequence[Event], words: str | None, own: PoolName, own_curve: PriceCurve
) -> tuple[PoolName, PriceCurve, float]:
    """(pool, price, speed against the run's own as the plan estimated them)."""
    if words is None:
        return own, own_curve, 1.0
    plan = next(event.data for event in reversed(events) if event.name == PLAN and event.data.get("chosen"))
    curves = recorded_curves(plan, Pricing.of(events).history)
    wanted = words.lower().replace("on_demand", "on-demand").split()
    found = [pool for pool in curves if all(word in str(pool).lower().split() for word in wanted)]
    if len(found) != 1:
        known = "\n".join(f"  {pool}" for pool in sorted(map(str, found or curves)))
        which = "more than one recorded pool is" if found else "no recorded pool is"
        raise ReplayError(f"{which} {words!r}; name one of\n{known}\nor state a price with --usd-per-hour")
    return found[0], curves[found[0]], _speed(plan, found[0])


def _speed(plan: dict[str, Any], pool: PoolName) -> float:
    own = plan["chosen"].get("tokens_per_second")
    speeds = [one.get("tokens_per_second") for one in plan.get("ranked", []) if pool_of(one) == pool]
    return speeds[0] / own if speeds and speeds[0] and own else 1.0
