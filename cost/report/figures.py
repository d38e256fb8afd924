"""The computed figures of a report: speed, quality, saves, money, Batch attempts and the optimum in hindsight.

The pools are those of the job's own shape (instance type and number of nodes) whose prices its events hold, in every
recorded zone, and on-demand; each is taken to have had capacity all the time, since nobody recorded where it had not.
So the optimum is a lower bound, and the regret an upper one. The work is the time in kept steps, their data,
evaluations and saves; each start costs what the job's first start took. Where prices never changed the cheapest pool
is the optimum; else that of the simulator's dynamic programme (`cost.simulate.simulator`) over the recorded prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ebbflow.cost.amounts import USD_DECIMALS, apportion, round_amount
from ebbflow.cost.capacity.placement import PastAttempt, read_attempts
from ebbflow.cost.ledger.bills import NodeBill, UnreportedBill, count_machines
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.ledger.pricing import PoolName, PriceCurve, Pricing, parse_pool
from ebbflow.cost.ledger.timeline import MICRO, compute_rank_times
from ebbflow.infra.events import (
    BATCH_ATTEMPT,
    BUDGET,
    COMMIT,
    COMMIT_FAILED,
    COMMIT_SKIPPED,
    EVALUATION,
    INTERVAL,
    NODE_STARTED,
    PEAK,
    PLAN,
    PREFLIGHT,
    PREPARED,
    PRICES,
    STEP,
    Event,
    LedgerClass,
)


def compute_actual_figures(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> dict[str, Any]:
    """The `actual` part of a report. Figures that the events do not hold are None.

    weight_unit: what a batch's weight counts, "tokens" for text; speeds are of it. metrics: of the last evaluation.
    tokens_per_second: median over the kept steps, waiting for data included, saves and evaluations not.
    held_out_loss and unigram_entropy_nats in nats per token; held_out_ratio is the first over the second, below 1
    when the model beats the best guess that ignores context. mfu: model flops over time × the matrix product peak of
    their machines, the best that the ranks measured there; never above 1, see `_mfu_figures`. goodput: useful steps'
    share of the paid rank-seconds. learning_rate: the highest of any step.
    """
    kept = [event for event in events if event.name == STEP and _is_kept(event, generations)]
    prepared = next((event.data for event in reversed(events) if event.name == PREPARED), {})
    entropy = _number(prepared.get("unigram_entropy_nats"))
    held_out = _held_out_loss(events)
    commits = {event.data.get("key", event.step) for event in events if event.name == COMMIT}
    return {
        "wall_hours": _wall_hours(events),
        "steps": max((event.step for event in kept if event.step is not None), default=0),
        "tokens_per_second": _median(_tokens_per_second(event) for event in kept),
        **_mfu_figures(events, kept),
        "learning_rate": _highest_learning_rate(events),
        "held_out_loss": held_out,
        "unigram_entropy_nats": entropy,
        "held_out_ratio": held_out / entropy if held_out is not None and entropy else None,
        "train_tokens": prepared.get("train_tokens"),
        "weight_unit": str(prepared.get("weight_unit", "tokens")),
        "metrics": _last_metrics(events),
        "commits": len(commits),
        "saves": compute_save_figures(events, ledger),
        "generations": len(generations),
        "goodput": _goodput(ledger),
        "unattributed_share": ledger.unattributed_share,
        "price_kind": ledger.price_kind,
    }


def _wall_hours(events: Sequence[Event]) -> float:
    """From the first sign of the job to the last; prices may be recorded at any time after it."""
    times = [event.t_wall for event in events if event.name != PRICES] or [0.0]
    return (max(times) - min(times)) / 3600


def _is_kept(event: Event, generations: dict[int, RecordedGeneration]) -> bool:
    generation = generations.get(event.generation)
    return generation is not None and event.step is not None and generation.keeps(event.step)


def _held_out_loss(events: Sequence[Event]) -> float | None:
    for event in reversed(events):
        if event.name == EVALUATION and "held_out_loss" in event.data.get("metrics", {}):
            return _number(event.data["metrics"]["held_out_loss"])
    return None


def _last_metrics(events: Sequence[Event]) -> dict[str, float | None]:
    """Whatever the workload's evaluation gave; None for what is not finite."""
    found = next((event.data.get("metrics", {}) for event in reversed(events) if event.name == EVALUATION), {})
    return {str(name): _number(value) for name, value in found.items()}


def _highest_learning_rate(events: Sequence[Event]) -> float | None:
    rates = [_number(event.data.get("learning_rate")) for event in events if event.name == STEP]
    return max((rate for rate in rates if rate is not None), default=None)


def _tokens_per_second(event: Event) -> float | None:
    busy = _busy_seconds(event)
    tokens = event.data.get("tokens")
    return tokens / busy if tokens and busy > 0 else None


def _mfu_figures(events: Sequence[Event], kept: Sequence[Event]) -> dict[str, Any]:
    """mfu: the median of the kept steps; mfu_withheld: why there is none although a peak was measured, else None."""
    peaks = _gang_peaks(events)
    mfu = _median(_mfu(event, peaks.get(event.generation)) for event in kept)
    if mfu is None or mfu <= 1.0:
        return {"mfu": mfu, "mfu_withheld": None}
    why = f"{mfu:.1f} times the peak, which was measured while the machine was busy"
    return {"mfu": None, "mfu_withheld": why}


def _gang_peaks(events: Sequence[Event]) -> dict[int, float]:
    """Flops per second of all ranks together, by generation.

    One peak per machine and job: the best of all generations with as many ranks on it, since a measurement on a busy
    machine is too low and none is too high.
    """
    machines = {
        (event.run, event.attempt, event.generation, event.node): event.data.get("instance_id")
        or event.data.get("host")
        for event in events
        if event.name == NODE_STARTED
    }
    ranks: dict[tuple[Any, ...], dict[int, float]] = {}
    dtypes: dict[tuple[Any, ...], str] = {}
    for event in events:
        if event.name == PEAK:
            place = event.run, event.attempt, event.generation, event.node
            peak = _number(event.data.get("flops_per_second")) or 0.0
            ranks.setdefault(place, {})[event.rank] = peak
            dtypes[place] = str(event.data.get("dtype"))
    best: dict[tuple[Any, ...], float] = {}
    for place, found in ranks.items():
        key = machines.get(place) or place[-1], dtypes[place], len(found)
        best[key] = max(best.get(key, 0.0), sum(found.values()))
    peaks: dict[int, float] = {}
    for place, found in ranks.items():
        generation = place[2]
        key = machines.get(place) or place[-1], dtypes[place], len(found)
        peaks[generation] = peaks.get(generation, 0.0) + best[key]
    return peaks


def _mfu(event: Event, peak_flops_per_second: float | None) -> float | None:
    flops, busy = event.data.get("flops"), _busy_seconds(event)
    return flops / busy / peak_flops_per_second if flops and busy > 0 and peak_flops_per_second else None


def _busy_seconds(event: Event) -> float:
    seconds = event.data.get("seconds", {})
    return seconds.get(LedgerClass.USEFUL_STEP, 0.0) + seconds.get(LedgerClass.DATA_WAIT, 0.0)


def _goodput(ledger: Ledger) -> float | None:
    useful = sum(line.rank_microseconds for line in ledger.lines if line.ledger_class == LedgerClass.USEFUL_STEP)
    return useful / ledger.paid_microseconds if ledger.paid_microseconds else None


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


_LOST = (LedgerClass.CHECKPOINT_STALL, LedgerClass.REDONE_STEP)


def compute_save_figures(events: Sequence[Event], ledger: Ledger) -> dict[str, Any]:
    """The `saves` part of a report's `actual`. Figures that the events do not hold are None.

    actual_loss: share of the paid time that went into stalls and steps taken again, measured. predicted_loss: the mean
    of what was expected after each save, by the stall and the hazard known then; estimated.
    """
    predicted = _numbers(events, INTERVAL, "predicted_loss")
    lost = sum(line.rank_microseconds for line in ledger.lines if line.ledger_class in _LOST)
    return {
        "skipped": sum(event.name == COMMIT_SKIPPED for event in events),
        "failed": len({(event.generation, event.step) for event in events if event.name == COMMIT_FAILED}),
        "stall_seconds": _median(_numbers(events, COMMIT, "stall_seconds")),
        "durable_seconds": _median(_numbers(events, COMMIT, "seconds")),
        "interval_seconds": _median(_numbers(events, INTERVAL, "seconds")),
        "predicted_loss": fmean(predicted) if predicted else None,
        "actual_loss": lost / ledger.paid_microseconds if ledger.paid_microseconds else None,
    }


def _numbers(events: Sequence[Event], name: str, key: str) -> list[float]:
    values = [event.data.get(key) for event in events if event.name == name]
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def compute_money_figures(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> dict[str, Any]:
    """Plain JSON. events: by time.

    forecast: of the first plan, for the whole job; later plans are for what was left. compute_usd leaves storage and
    transfer out, which the ledger does not meter. causes: dollars with six places
    that sum to the total. hindsight: None where it cannot be told. thresholds: shares of the budget that were reached.
    prices: of each kind of machine that nodes really ran on, how its price is known, and its dollars.
    attempts: on AWS Batch, planned against actual (`ebbflow.cost.report.figures`).
    light_steps_away: the steps around training were sent to other machines as well, which the ledger does not meter.
    """
    found = compute_hindsight(events, generations, ledger)
    return {
        "owner": ledger.owner,
        "project": ledger.project,
        "forecast": _forecast(events),
        "causes": [
            {"cause": line.cause, "rank_seconds": line.rank_microseconds / MICRO, "usd": float(line.usd)}
            for line in ledger.causes
        ],
        "hindsight": None if found is None else found.to_json(ledger.total_usd),
        "thresholds": sorted({event.data["threshold"] for event in events if event.name == BUDGET}),
        "instances": sorted({bill.node.instance_id for bill in ledger.nodes if bill.node.instance_id}),
        "unknown_nodes": sum(bill.node.instance_id is None for bill in ledger.nodes),
        "price_changes": _price_changes(ledger),
        "prices": _prices(ledger),
        "attempts": compute_attempt_figures(events, ledger),
        "light_steps_away": any(event.data.get("sent_away") for event in events if event.name == PREFLIGHT),
    }


def _forecast(events: Sequence[Event]) -> dict[str, Any] | None:
    plan = next((event.data for event in events if event.name == PLAN and event.data.get("chosen")), None)
    if plan is None:
        return None
    chosen = plan["chosen"]
    expected = chosen.get("expected_usd")
    return {
        "usd": expected,
        "compute_usd": chosen.get("compute_usd", expected),
        "hours": chosen.get("expected_hours"),
        "interruptions": chosen.get("interruptions"),
        "kind": "estimated",
    }


def _price_changes(ledger: Ledger) -> int:
    """Changes of price while a node was being paid for."""
    return sum(
        bill.node.started_wall < at / MICRO < bill.node.ended_wall
        for bill in ledger.nodes
        for at, _ in bill.price.curve.changes
    )


def _prices(ledger: Ledger) -> list[dict[str, Any]]:
    """Dollars sum to the total."""
    grouped: dict[tuple[str, str], list[NodeBill | UnreportedBill]] = {}
    for bill in (*ledger.nodes, *ledger.unreported):
        pool = "" if bill.price.pool is None else str(bill.price.pool)
        grouped.setdefault((pool, bill.price.kind), []).append(bill)
    spent = [sum((bill.usd for bill in bills), Decimal(0)) for bills in grouped.values()]
    return [
        {"pool": pool, "kind": kind, "nodes": len(bills), "usd": float(usd)}
        for ((pool, kind), bills), usd in zip(grouped.items(), apportion(spent, total=ledger.total_usd), strict=True)
    ]


def compute_attempt_figures(events: Sequence[Event], ledger: Ledger) -> list[dict[str, Any]]:
    """Plain JSON, one for each placement, oldest first; empty where nothing was placed on Batch. events: by time.

    planned: dollars per hour of the gang, and hours and dollars to finish the rest of the job there (estimated).
    actual: wait_seconds for capacity, hours from Batch's start to its stop, dollars of the ledger, and their quotient,
    dollars per hour; None: not told. ended: the cause, "" while nobody told it. reason: Batch's words.
    """
    words = {str(event.data.get("job_id")): event.data for event in events if event.name == BATCH_ATTEMPT}
    paid = _paid(ledger)
    history = read_attempts(events)
    return [_figures(number, one, words, paid) for number, one in enumerate(history.attempts, start=1)]


def _figures(
    position: int, attempt: PastAttempt, words: Mapping[str, Mapping[str, Any]], paid: Mapping[str, Decimal]
) -> dict[str, Any]:
    placement = attempt.placement
    return {
        "number": position,
        "where": str(placement),
        "queue": placement.queue,
        "market": placement.market,
        "instance_type": placement.instance_type,
        "nodes": placement.nodes,
        "why": placement.reason,
        "job_id": attempt.job_id,
        "ended": attempt.cause if attempt.job_id else "",
        "reason": str(words.get(attempt.job_id, {}).get("reason") or ""),
        "planned": {
            "usd_per_hour": placement.gang_usd_per_hour,
            "hours": placement.expected_hours,
            "usd": placement.expected_usd,
            "kind": "estimated",
        },
        "actual": _actual(attempt, paid.get(attempt.job_id)),
    }


def _actual(attempt: PastAttempt, spent: Decimal | None) -> dict[str, Any]:
    created, started, stopped = attempt.created_utc, attempt.started_utc, attempt.stopped_utc
    hours = None if started is None or stopped is None else max(0.0, stopped - started) / 3600
    waited = started if started is not None else stopped
    dollars = None if spent is None else float(round_amount(spent))
    return {
        "wait_seconds": None if created is None or waited is None else max(0.0, waited - created),
        "hours": hours,
        "usd": dollars,
        "usd_per_hour": dollars / hours if dollars is not None and hours else None,
    }


def _paid(ledger: Ledger) -> dict[str, Decimal]:
    """Dollars by Batch job."""
    found: dict[str, Decimal] = {}
    for bill in (*ledger.nodes, *ledger.unreported):
        if bill.job is not None:
            found[bill.job.job_id] = found.get(bill.job.job_id, Decimal(0)) + bill.usd
    return found


_WORK = (LedgerClass.USEFUL_STEP, LedgerClass.DATA_WAIT, LedgerClass.EVALUATION, LedgerClass.CHECKPOINT_STALL)
_START = (LedgerClass.STARTUP, LedgerClass.SHUTDOWN)
# Ticks of the time from the first node to the deadline (or the end): prices change less often than that.
_TICKS = 240


@dataclass(frozen=True, kw_only=True)
class Hindsight:
    """usd: of the whole gang. pools: how many had a recorded price. Estimated."""

    usd: float
    pools: int
    work_hours: float
    start_hours: float

    def to_json(self, actual_usd: Decimal) -> dict[str, Any]:
        regret = round(float(actual_usd) - self.usd, USD_DECIMALS) + 0.0  # no dust, and no negative nothing
        return {
            "usd": self.usd,
            "regret_usd": regret,
            "regret_share": regret / self.usd if self.usd > 0 else None,
            "pools": self.pools,
            "work_hours": self.work_hours,
            "start_hours": self.start_hours,
            "kind": "estimated",
        }


def compute_hindsight(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> Hindsight | None:
    """None without a plan, without paid work, or when the recorded prices cannot bear it. events: by time."""
    plan = next((event.data for event in reversed(events) if event.name == PLAN and event.data.get("chosen")), None)
    if plan is None or not ledger.nodes:
        return None
    newest = ledger.nodes[-1].node.generation
    gang = [bill for bill in ledger.nodes if bill.node.generation == newest]
    work, start = _hours(ledger.nodes, generations, ranks=sum(len(bill.node.ranks) for bill in gang))
    if work <= 0:
        return None
    known = read_price_curves(plan, _with_quotes(events, Pricing.of(events).history))
    curves = {pool: curve for pool, curve in known.items() if pool.instance_type == plan["chosen"]["instance_type"]}
    begin = min(bill.node.started_wall for bill in ledger.nodes)
    end = max(bill.node.ended_wall for bill in ledger.nodes)
    if plan.get("deadline_hours"):
        since = plan.get("started_utc") or plan.get("made_utc") or begin
        end = max(end, float(since) + plan["deadline_hours"] * 3600)
    nodes = count_machines(gang)
    if all(curve.is_constant(round(begin * MICRO), round(end * MICRO)) for curve in curves.values()):
        usd = min(float(curve.price_at(begin)) for curve in curves.values()) * nodes * (work + start)
    else:
        usd = _optimum(curves, begin, end, nodes, work, start)
    if usd == math.inf:
        return None
    return Hindsight(usd=usd, pools=len(curves), work_hours=work, start_hours=start)


def _hours(bills: Sequence[NodeBill], generations: dict[int, RecordedGeneration], *, ranks: int) -> tuple[float, float]:
    """(work, one start with its end) of the gang, from all ranks' time: the start is the first generation's."""
    work, start, first = 0, 0, bills[0].node.generation
    first_ranks = sum(len(bill.node.ranks) for bill in bills if bill.node.generation == first)
    for bill in bills:
        for rank in compute_rank_times(bill.node, generations[bill.node.generation]):
            work += sum(rank.classes.get(kind, 0) for kind in _WORK)
            if bill.node.generation == first:
                start += sum(rank.classes.get(kind, 0) for kind in _START)
        if bill.node.generation == first:
            lead = sum(extra.micros for extra in bill.extras if extra.ledger_class in _START)
            start += lead * len(bill.node.ranks)
    hour = 3600 * MICRO
    return work / hour / max(1, ranks), start / hour / max(1, first_ranks)


def read_price_curves(
    plan: dict[str, Any], history: Mapping[PoolName, Sequence[tuple[float, Decimal]]]
) -> dict[PoolName, PriceCurve]:
    """Prices of every recorded pool of as many nodes as the plan chose, from its candidates and what came since."""
    first = _quotes(plan)
    for pool, changes in history.items():
        if changes:
            first.setdefault(pool, min(changes)[1])
    return {pool: PriceCurve.of(usd, history.get(pool, ())) for pool, usd in first.items()}


def _quotes(plan: dict[str, Any]) -> dict[PoolName, Decimal]:
    chosen = plan["chosen"]
    first: dict[PoolName, Decimal] = {}
    for candidate in [*plan.get("ranked", []), chosen]:
        if candidate["nodes"] == chosen["nodes"]:
            quoted = candidate.get("quoted_usd_per_hour") or str(candidate["usd_per_hour"])
            first[parse_pool(candidate)] = Decimal(quoted)
    if chosen.get("on_demand_usd_per_hour") is not None:
        usual = PoolName(instance_type=chosen["instance_type"], market="on_demand", place=chosen.get("region") or "")
        first.setdefault(usual, Decimal(str(chosen["on_demand_usd_per_hour"])))
    return first


def _with_quotes(
    events: Sequence[Event], history: Mapping[PoolName, Sequence[tuple[float, Decimal]]]
) -> dict[PoolName, Sequence[tuple[float, Decimal]]]:
    """The history and, of pools without one, what each plan of the job quoted, from when it was made: the ledger
    charges by them too, and the newest plan's quotes alone would make of dearer days a gain over hindsight.
    """
    quoted: dict[PoolName, list[tuple[float, Decimal]]] = {}
    for event in events:
        if event.name == PLAN and event.data.get("chosen"):
            for pool, usd in _quotes(event.data).items():
                quoted.setdefault(pool, []).append((event.t_wall, usd))
    return {**quoted, **{pool: changes for pool, changes in history.items() if changes}}


def _optimum(
    curves: dict[PoolName, PriceCurve], begin: float, end: float, nodes: int, work: float, start: float
) -> float:
    import numpy as np

    from ebbflow.cost.simulate.simulator import SimulatedJob, optimum_usd
    from ebbflow.cost.simulate.world import World

    # The programme counts whole ticks, rounded up: some more than the job took, and what that adds is taken off again.
    hours = (end - begin) / 3600 * (1 + 4 / _TICKS)
    tick = hours / _TICKS
    edges = [round((begin + tick * 3600 * number) * MICRO) for number in range(_TICKS + 1)]
    # Each tick at the mean price while it lasts.
    prices = [
        [float(curve.cost(left, right)) * nodes / tick for left, right in pairwise(edges)] for curve in curves.values()
    ]
    # Within one region a move costs the start alone; what a move between regions costs is not recorded.
    world = World(
        zones=tuple(str(pool) for pool in curves),
        regions=("",) * len(curves),
        available=np.ones((len(curves), _TICKS), dtype=bool),
        usd_per_hour=np.array(prices),
        on_demand_usd_per_hour=math.inf,
        tick_hours=np.full(_TICKS, tick),
    )
    usd = optimum_usd(world, SimulatedJob(work_hours=work, deadline_hours=hours, changeover_hours=start))
    return usd * (work + start) / (tick * (math.ceil(work / tick) + math.ceil(start / tick)))
