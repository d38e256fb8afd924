"""Figures of a report: speed, quality, checkpoints, money, AWS Batch attempts and the optimum in
hindsight.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import chain, pairwise
from statistics import fmean, median
from typing import Any, cast

import ebbflow.core.events as ev
from ebbflow.core.event_payloads import (
    BudgetPayload,
    CommitPayload,
    EvaluationPayload,
    GpuMemoryPayload,
    IntervalPayload,
    NetworkPayload,
    NodeStartedPayload,
    PeakPayload,
    PreflightPayload,
    PreparedPayload,
    PricesPayload,
    ProfilePayload,
    StepPayload,
)
from ebbflow.core.events import Event, LedgerClass, find_last_event, is_event, select_events
from ebbflow.core.grouping import group_by_key, sum_by_key
from ebbflow.cost.amounts import USD_DECIMALS, apportion, format_duration, round_amount
from ebbflow.cost.capacity.placement import read_attempts
from ebbflow.cost.ledger.bills import NodeBill, UnreportedBill, compute_bills, count_machines
from ebbflow.cost.ledger.generations import RecordedGeneration, read_generations
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.ledger.pricing import (
    PoolName,
    PriceCurve,
    Pricing,
    parse_pool,
    parse_usd,
    parse_volume_usd,
    read_plan,
    select_plans,
)
from ebbflow.cost.ledger.timeline import MICRO, compute_rank_times, compute_rate
from ebbflow.cost.plan_json import PlanJson
from ebbflow.cost.report.parts import (
    ActualFigures,
    AttemptRow,
    Forecast,
    GpuMemoryRow,
    Hindsight,
    MfuFigures,
    MoneyFigures,
    NetworkFigures,
    NetworkMedians,
    PriceRow,
    SaveFigures,
)
from ebbflow.cost.report.slurm_jobs import summarize_slurm_jobs

_WORK = (
    LedgerClass.USEFUL_STEP,
    LedgerClass.DATA_WAIT,
    LedgerClass.EVALUATION,
    LedgerClass.PROFILING,
    LedgerClass.CHECKPOINT_STALL,
)
_START = (LedgerClass.STARTUP, LedgerClass.SHUTDOWN)
# Number of time steps (ticks) from the start of the first node to the deadline or the end. Prices
# change less often.
_TICKS = 240

STEP_COLUMNS = (
    "step",
    "seconds",
    "tokens_per_second",
    "learning_rate",
    "gradient_norm",
    "loss",
    "mfu",
    "usd",
    "generation",
    "kept",
)


def compute_actual_figures(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> ActualFigures:
    """Compute the `actual` part of a report: the measured figures of the job.

    Figures are measured unless stated otherwise. Unknown figures are None.

    Returns:
        A dictionary with, among others:

        - weight_unit: Unit in which batch sizes and speeds are counted; "tokens" for text.
        - tokens_per_second: Median speed of the steps that contributed to the final weights. It
          includes waits for data and excludes saves and evaluations.
        - held_out_loss, unigram_entropy_nats: Nats per token. held_out_ratio is held_out_loss
          divided by unigram_entropy_nats; below 1, the model beats the best guess without context.
        - mfu: Model FLOPs per second, divided by the measured matrix product peak of the gang's
          machines; at most 1.
        - metrics: Metrics of the last evaluation, by name.
        - usd_per_1000_rollouts: The ledger's dollars per 1,000 rollouts that the last evaluation
          counted.
        - goodput: Share of the paid rank-seconds that was spent in useful steps.
        - learning_rate: The highest learning rate of all steps.
    """
    executed = [
        event
        for event in select_events(events, StepPayload)
        if event.step and event.generation in generations
    ]
    kept = [event for event in executed if generations[event.generation].keeps(event.step or 0)]
    last_prepared = find_last_event(events, PreparedPayload)
    if last_prepared is None:
        prepared = PreparedPayload()
    else:
        prepared = last_prepared.payload
    entropy = read_number(prepared.unigram_entropy_nats)
    evaluations = select_events(events, EvaluationPayload)
    metrics = [event.payload.metrics or {} for event in reversed(evaluations)]
    profiles = [event for event in select_events(events, ProfilePayload) if event.rank == 0]
    rollouts = read_number((metrics[0] if metrics else {}).get("rollouts"))
    held_out = next(
        (read_number(found["held_out_loss"]) for found in metrics if "held_out_loss" in found), None
    )
    # Prices may be recorded much later
    times = [event.t_wall for event in events if event.name != ev.PRICES] or [0.0]
    useful = sum(
        line.rank_microseconds
        for line in ledger.lines
        if line.ledger_class == LedgerClass.USEFUL_STEP
    )
    return {
        "wall_hours": (max(times) - min(times)) / 3600,
        "steps": max((event.step for event in kept if event.step is not None), default=0),
        "tokens_per_second": _median(compute_rate(event, "tokens") for event in kept),
        **_compute_mfu(events, kept),
        "gpu_memory": list_gpu_memory(events),
        "learning_rate": max(
            _numbers(event.payload.learning_rate for event in select_events(events, StepPayload)),
            default=None,
        ),
        "held_out_loss": held_out,
        "unigram_entropy_nats": entropy,
        "held_out_ratio": held_out / entropy if held_out is not None and entropy else None,
        "train_tokens": prepared.train_tokens,
        "text_bytes": prepared.bytes,
        "tokens_per_byte": _tokens_per_byte(prepared),
        "rows": read_number(prepared.rows),
        "empty_rows": read_number(prepared.empty_rows),
        "repaired_rows": read_number(prepared.repaired_rows),
        "weight_unit": prepared.weight_unit or "tokens",
        "metrics": {
            str(name): read_number(value) for name, value in (metrics[0] if metrics else {}).items()
        }
        | (evaluations[-1].payload.non_finite or {} if evaluations else {}),
        "usd_per_1000_rollouts": float(ledger.total_usd) * 1000 / rollouts if rollouts else None,
        "network": _compare_networks(events),
        "profile": profiles[-1].payload.lines if profiles else None,
        "commits": len(
            {event.payload.key or event.step for event in select_events(events, CommitPayload)}
        ),
        "saves": compute_save_figures(events, ledger),
        "generations": len(generations),
        "goodput": _compute_goodput(useful, ledger),
        "unattributed_share": ledger.unattributed_share,
        "price_kind": ledger.price_kind,
    }


def list_gpu_memory(events: Sequence[Event]) -> list[GpuMemoryRow]:
    """Return the memory peaks of each rank's GPU, ordered by rank.

    They are those of the newest generation that recorded any.
    """
    found = select_events(events, GpuMemoryPayload)
    newest = max((event.generation for event in found), default=0)
    rows: dict[int, GpuMemoryRow] = {}
    for event in found:
        if event.generation != newest:
            continue
        before = rows.get(
            event.rank, GpuMemoryRow(rank=event.rank, allocated_bytes=0, reserved_bytes=0)
        )
        rows[event.rank] = {
            "rank": event.rank,
            "allocated_bytes": max(before["allocated_bytes"], event.payload.allocated_bytes or 0),
            "reserved_bytes": max(before["reserved_bytes"], event.payload.reserved_bytes or 0),
        }
    return [rows[rank] for rank in sorted(rows)]


def list_step_figures(events: Sequence[Event]) -> list[tuple[float | int | bool | None, ...]]:
    """List the figures of each executed step (`STEP_COLUMNS`), by generation and step.

    A redone step has several rows.

    Seconds and tokens per second are those of the slowest rank. MFU is computed from the first rank
    that recorded FLOPs. Dollars are summed over all ranks. The column `kept` tells whether this
    execution of the step is part of the final weights.
    """
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    generations = read_generations(ordered)
    peaks = find_peaks(ordered)
    # (seconds, dollars, event) of each rank
    executed: dict[tuple[int, int], list[tuple[float, float, Event[StepPayload]]]] = {}
    for bill in compute_bills(ordered, generations).nodes:
        curve = bill.node_curve
        ranks = len(bill.node.ranks)
        for event in chain.from_iterable(bill.node.events.values()):
            if is_event(event, StepPayload) and event.step is not None:
                seconds = sum((event.payload.seconds or {}).values())
                wall = bill.node.started_wall + event.t_mono - bill.node.start
                usd = float(curve.price_at(wall)) / 3600 / ranks * seconds
                executed.setdefault((event.generation, event.step), []).append(
                    (seconds, usd, event)
                )
    rows = []
    for (generation, step), parts in sorted(executed.items()):
        seconds, _, slowest = max(parts, key=lambda part: part[0])
        # Of rank 0
        flops = next(
            (speed for *_, event in parts if (speed := compute_rate(event, "flops"))), None
        )
        peak = peaks.get(generation)
        if flops is not None and peak and flops <= peak:
            mfu = flops / peak
        else:
            mfu = None
        steps = [event.payload for *_, event in parts]
        known = [
            _first_number(taken.learning_rate for taken in steps),
            _first_number(taken.gradient_norm for taken in steps),
            _first_number(taken.loss for taken in steps),
        ]
        usd = sum(part[1] for part in parts)
        speed = compute_rate(slowest, "tokens")
        kept = generations[generation].keeps(step)
        rows.append((step, seconds, speed, *known, mfu, usd, generation, kept))
    return rows


def find_peaks(events: Sequence[Event]) -> dict[int, float]:
    """Return the peak FLOPs per second of each generation, summed over its ranks.

    A peak that was measured on a busy machine is too low, but no measurement is too high. The
    highest measurement of each (machine, number of ranks, dtype) therefore applies to all
    generations.
    """
    machines: dict[
        tuple[str, int, int, int], str
    ] = {}  # keys, here and below: run, attempt, generation, node
    peaks: dict[tuple[str, int, int, int], dict[int, float]] = {}
    dtypes: dict[tuple[str, int, int, int], str] = {}
    for event in events:
        node = event.run, event.attempt, event.generation, event.node
        payload = event.payload
        if isinstance(payload, NodeStartedPayload):
            machines[node] = payload.instance_id or payload.host or ""
        elif isinstance(payload, PeakPayload):
            peaks.setdefault(node, {})[event.rank] = read_number(payload.flops_per_second) or 0.0
            dtypes[node] = str(payload.dtype)
    keys = {
        node: (machines.get(node) or node[-1], dtypes[node], len(ranks))
        for node, ranks in peaks.items()
    }
    best: dict[tuple[str | int, str, int], float] = {}
    for node, ranks in peaks.items():
        best[keys[node]] = max(best.get(keys[node], 0.0), sum(ranks.values()))
    return sum_by_key((node[2], best[keys[node]]) for node in peaks)


def compute_save_figures(events: Sequence[Event], ledger: Ledger) -> SaveFigures:
    """Compute the `saves` part of `actual`: measured and predicted cost of checkpoints and redone
    steps.

    `actual_loss` is the measured share of the paid time lost to checkpoint stalls and redone steps.
    `predicted_loss` is the estimate of that share. It is the mean of the predictions that the job
    made whenever it computed the checkpoint interval. Unknown figures are None.
    """
    intervals = [event.payload for event in select_events(events, IntervalPayload)]
    commits = [event.payload for event in select_events(events, CommitPayload)]
    predicted = _numbers(interval.predicted_loss for interval in intervals)
    classes = (LedgerClass.CHECKPOINT_STALL, LedgerClass.REDONE_STEP)
    lost = sum(line.rank_microseconds for line in ledger.lines if line.ledger_class in classes)
    return {
        "skipped": sum(event.name == ev.COMMIT_SKIPPED for event in events),
        "failed": len(
            {(event.generation, event.step) for event in events if event.name == ev.COMMIT_FAILED}
        ),
        "stall_seconds": _median(_numbers(commit.stall_seconds for commit in commits)),
        "durable_seconds": _median(_numbers(commit.seconds for commit in commits)),
        "interval_seconds": _median(_numbers(interval.seconds for interval in intervals)),
        "predicted_loss": fmean(predicted) if predicted else None,
        "actual_loss": lost / ledger.paid_microseconds if ledger.paid_microseconds else None,
    }


def read_number(value: float | None) -> float | None:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def compute_money_figures(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> MoneyFigures:
    """Compute the `money` part of a report.

    Args:
        events: Events of the job, ordered by time.

    Returns:
        JSON values, among them:

        - forecast: Forecast of the first plan, for the whole job. Later plans cover only the
          remaining work. `compute_usd`, of nodes and their root volumes, excludes storage and
          transfer, which the ledger does not meter. `useful_usd` is its part for useful work; None for plans of older versions.
        - causes: Dollars by cause, with six decimals, that sum to the total.
        - cells: The same dollars and rank-seconds by cause and ledger class.
        - hindsight: Lowest possible cost, and regret (`compute_hindsight`).
        - thresholds: Shares of the budget (0 to 1) that were reached and notified.
        - prices: Nodes and dollars by pool and kind of price.
        - attempts: Planned and actual figures of the attempts on AWS Batch.
        - slurm_jobs: Slurm jobs, as `SlurmJobRow`.
        - light_steps_away: Whether the Metaflow steps before and after training also ran on other
          machines. The ledger does not meter these machines.
    """
    changes = []
    for bill in ledger.nodes:
        changes += [(bill.node, at / MICRO) for at, _ in bill.price.curve.changes]
    return {
        "owner": ledger.owner,
        "project": ledger.project,
        "forecast": _find_forecast(events),
        "causes": [
            {
                "cause": line.cause,
                "rank_seconds": line.rank_microseconds / MICRO,
                "usd": float(line.usd),
            }
            for line in ledger.causes
        ],
        "cells": [
            {
                "cause": cause,
                "class": str(kind),
                "rank_seconds": micros / MICRO,
                "usd": float(round_amount(usd)),
            }
            for cause, kind, micros, usd in ledger.cells
        ],
        "hindsight": compute_hindsight(events, generations, ledger),
        "thresholds": sorted(
            {event.payload.threshold for event in select_events(events, BudgetPayload)}
        ),
        "instances": sorted(
            {bill.node.instance_id for bill in ledger.nodes if bill.node.instance_id}
        ),
        "unknown_nodes": sum(bill.node.instance_id is None for bill in ledger.nodes),
        "price_changes": sum(node.started_wall < at < node.ended_wall for node, at in changes),
        "prices": _sum_by_price(ledger),
        "price_silence": _describe_price_silence(events),
        "attempts": _compute_attempt_figures(events, ledger),
        "slurm_jobs": summarize_slurm_jobs(events),
        "light_steps_away": any(
            event.payload.sent_away for event in select_events(events, PreflightPayload)
        ),
    }


def compute_hindsight(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> Hindsight | None:
    """Compute the lowest possible cost of the same work if all prices had been known in advance,
    and the regret.

    The regret is the job's total cost less this lowest cost. The compared pools have the job's
    instance type and number of nodes: every zone with a recorded Spot price, and on-demand.
    Capacity is assumed to be always available, because missing capacity is not recorded. The
    optimum is therefore a lower bound and the regret an upper bound, and both are estimates. The
    work is the time of the steps that are part of the final weights, including data, evaluations
    and checkpoints. Each start costs as much as the job's first start. If prices never changed, the
    cheapest pool is the optimum; otherwise dynamic programming (`cost.report.optimum`) finds it.

    Args:
        events: Events of the job, ordered by time.

    Returns:
        Lowest cost and regret in dollars, and hours of work and start; None without a plan or paid
        work, or if no recorded pool could do the work.
    """
    plans = select_plans(events)
    if not plans or not ledger.nodes:
        return None
    plan = read_plan(plans[-1])
    newest = ledger.nodes[-1].node.generation
    gang = [bill for bill in ledger.nodes if bill.node.generation == newest]
    work, start = _compute_hours(
        ledger.nodes, generations, ranks=sum(len(bill.node.ranks) for bill in gang)
    )
    if work <= 0:
        return None
    known = read_price_curves(plan, _add_quotes(events, Pricing.of(events).history))
    curves = {
        pool: curve
        for pool, curve in known.items()
        if pool.instance_type == plan["chosen"]["instance_type"]
    }
    begin = min(bill.node.started_wall for bill in ledger.nodes)
    end = max(bill.node.ended_wall for bill in ledger.nodes)
    deadline_hours = plan.get("deadline_hours")
    if deadline_hours:
        since = plan.get("started_utc") or plan.get("made_utc") or begin
        end = max(end, float(since) + deadline_hours * 3600)
    nodes = count_machines(gang)
    if all(
        curve.is_constant(round(begin * MICRO), round(end * MICRO)) for curve in curves.values()
    ):
        usd = (
            min(float(curve.price_at(begin)) for curve in curves.values()) * nodes * (work + start)
        )
    else:
        usd = _find_optimum(curves, begin, end, nodes, work, start)
    if usd == math.inf:
        return None
    # Adding 0.0 turns -0.0 into 0.0
    regret = round(float(ledger.total_usd) - usd, USD_DECIMALS) + 0.0
    return {
        "usd": usd,
        "regret_usd": regret,
        "regret_share": regret / usd if usd > 0 else None,
        "pools": len(curves),
        "work_hours": work,
        "start_hours": start,
        "kind": "estimated",
    }


def read_price_curves(
    plan: Mapping[str, Any], history: Mapping[PoolName, Sequence[tuple[float, Decimal]]]
) -> dict[PoolName, PriceCurve]:
    """Return the price curve of one node with its root volume by pool: first the plan's quote, then
    the recorded price changes.

    Quotes for numbers of nodes other than the planned number are left out.
    """
    first = _read_quotes(cast(PlanJson, plan))
    for pool, changes in history.items():
        if changes:
            first.setdefault(pool, min(changes)[1])
    volume_usd = parse_volume_usd(plan["chosen"])
    return {
        pool: PriceCurve.of(usd, history.get(pool, ())).plus(volume_usd)
        for pool, usd in first.items()
    }


def _compute_goodput(useful: int, ledger: Ledger) -> float | None:
    """Return the share of the paid time that was spent in useful steps.

    Return None if the steps of a script are unknown.
    """
    is_unknown = not useful and any(
        line.ledger_class is LedgerClass.SCRIPT for line in ledger.lines
    )
    if is_unknown or not ledger.paid_microseconds:
        return None
    return useful / ledger.paid_microseconds


def _tokens_per_byte(prepared: PreparedPayload) -> float | None:
    counted = [read_number(prepared.train_tokens), read_number(prepared.held_out_tokens)]
    size = read_number(prepared.bytes)
    if None in counted or not size:
        return None
    return sum(tokens for tokens in counted if tokens is not None) / size


def _compute_mfu(events: Sequence[Event], kept: Sequence[Event]) -> MfuFigures:
    """Return the median MFU of the useful steps as `mfu`, or the reason for not reporting it as
    `mfu_withheld`.

    An MFU above 1 is not reported, because the peak was then measured on a busy machine. If the MFU
    is unknown, both `mfu` and `mfu_withheld` are None.
    """
    peaks = find_peaks(events)
    shares = []
    for event in kept:
        speed = compute_rate(event, "flops")
        peak = peaks.get(event.generation)
        shares.append(speed / peak if speed is not None and peak else None)
    mfu = _median(shares)
    if mfu is None or mfu <= 1.0:
        return {"mfu": mfu, "mfu_withheld": None}
    return {
        "mfu": None,
        "mfu_withheld": f"{mfu:.1f} times the peak, which was measured while the machine was busy",
    }


def _compare_networks(events: Sequence[Event]) -> NetworkFigures | None:
    """Return the newest network probe; its key `before` has the medians of earlier probes.

    None without probes.
    """
    probes = select_events(events, NetworkPayload)
    if not probes:
        return None
    before = [event.payload for event in probes[:-1]]
    earlier: NetworkMedians = {
        "probes": len(before),
        "bandwidth_bytes_per_second": _median(
            read_number(probe.bandwidth_bytes_per_second) for probe in before
        ),
        "all_reduce_bytes_per_second": _median(
            read_number(probe.all_reduce_bytes_per_second) for probe in before
        ),
        "round_trip_seconds": _median(read_number(probe.round_trip_seconds) for probe in before),
        "clock_offset_seconds": _median(
            read_number(probe.clock_offset_seconds) for probe in before
        ),
    }
    # All fields as they were recorded
    return cast(NetworkFigures, {**probes[-1].data, "before": earlier})


def _numbers(recorded: Iterable[float | None]) -> list[float]:
    values = [read_number(value) for value in recorded]
    return [value for value in values if value is not None]


def _first_number(recorded: Iterable[float | None]) -> float | None:
    """Return the first value that was recorded; None if it is not finite."""
    return next((read_number(value) for value in recorded if value is not None), None)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    if known:
        return median(known)
    return None


def _find_forecast(events: Sequence[Event]) -> Forecast | None:
    plans = select_plans(events)
    if not plans:
        return None
    chosen = read_plan(plans[0])["chosen"]
    expected = chosen.get("expected_usd")
    hours = chosen.get("expected_hours")
    compute = chosen.get("compute_usd", expected)
    work = (chosen.get("case") or {}).get("work_hours")
    return {
        "usd": expected,
        "compute_usd": compute,
        "useful_usd": compute * work / hours
        if compute is not None and work is not None and hours
        else None,
        "hours": hours,
        "interruptions": chosen.get("interruptions"),
        "kind": "estimated",
    }


def _sum_by_price(ledger: Ledger) -> list[PriceRow]:
    """Count the nodes and sum the dollars by pool and kind of price.

    The dollars sum to the total of the ledger.
    """
    grouped = group_by_key(
        (("" if bill.price.pool is None else str(bill.price.pool), bill.price.kind), bill)
        for bill in (*ledger.nodes, *ledger.unreported)
    )
    spent = [sum((bill.usd for bill in bills), Decimal(0)) for bills in grouped.values()]
    return [
        {
            "pool": pool,
            "kind": kind,
            "nodes": len(bills),
            "usd": float(usd),
            "curve": _read_price_curve(bills),
        }
        for ((pool, kind), bills), usd in zip(
            grouped.items(), apportion(spent, total=ledger.total_usd), strict=True
        )
    ]


def _read_price_curve(bills: Iterable[NodeBill | UnreportedBill]) -> list[list[float]]:
    """Return a pool's price per node over the time for which its nodes were paid.

    Each entry is [Unix time, dollars per hour from then on].
    """
    points: dict[float, float] = {}
    for bill in bills:
        if not isinstance(bill, NodeBill):
            continue
        started = bill.node.started_wall
        points[started] = float(bill.price.curve.price_at(started))
        for micros, usd in bill.price.curve.changes:
            if started < micros / MICRO < bill.node.ended_wall:
                points[micros / MICRO] = float(usd)
    curve: list[list[float]] = []
    for at, usd in sorted(points.items()):
        if not curve or curve[-1][1] != usd:
            curve.append([at, usd])
    return curve


def _describe_price_silence(events: Sequence[Event]) -> str:
    """Describe a problem of the price source at the end of the job; "" if there was none."""
    last = find_last_event(events, PricesPayload)
    if last is None or not last.payload.problem:
        return ""
    ended = max(event.t_wall for event in events)
    asked = last.payload.asked_utc
    if asked is None:
        return f"those of the plan apply, since {last.payload.problem}"
    age = format_duration(ended - asked)
    return f"the last ones, {age} old at the end, apply, since {last.payload.problem}"


def _compute_attempt_figures(events: Sequence[Event], ledger: Ledger) -> list[AttemptRow]:
    """Compute planned and actual figures of each attempt on AWS Batch, oldest first; empty if there
    was none.

    `planned` has the attempt's order: the dollars per hour of all nodes, estimates of the hours and
    dollars to finish the job there, and its limits. `actual` has the seconds for which the attempt
    waited for capacity, the hours for which it ran according to Batch, and its dollars in the
    ledger. `ended` is the cause of its end, empty while unknown. `reason` is the text that Batch
    gave.
    """
    bills = (*ledger.nodes, *ledger.unreported)
    paid = sum_by_key((bill.job.job_id, bill.usd) for bill in bills if bill.job is not None)
    found: list[AttemptRow] = []
    for number, attempt in enumerate(read_attempts(events).attempts, start=1):
        placement = attempt.placement
        created = attempt.created_utc
        started = attempt.started_utc
        stopped = attempt.stopped_utc
        if started is None or stopped is None:
            hours = None
        else:
            hours = max(0.0, stopped - started) / 3600
        if started is not None:
            waited_until = started
        else:
            waited_until = stopped
        if attempt.job_id in paid:
            dollars = float(round_amount(paid[attempt.job_id]))
        else:
            dollars = None
        found.append(
            {
                "number": number,
                "where": str(placement),
                "queue": placement.queue,
                "market": placement.market,
                "instance_type": placement.instance_type,
                "nodes": placement.nodes,
                "why": placement.reason,
                "job_id": attempt.job_id,
                "ended": attempt.cause if attempt.job_id else "",
                "reason": attempt.reason,
                "planned": {
                    "usd_per_hour": placement.gang_usd_per_hour,
                    "hours": placement.expected_hours,
                    "usd": placement.expected_usd,
                    "kind": "estimated",
                    "wall_seconds": placement.wall_seconds,
                    "runnable_seconds": placement.runnable_seconds,
                },
                "actual": {
                    "wait_seconds": None
                    if created is None or waited_until is None
                    else max(0.0, waited_until - created),
                    "hours": hours,
                    "usd": dollars,
                    "usd_per_hour": dollars / hours if dollars is not None and hours else None,
                },
            }
        )
    return found


def _compute_hours(
    bills: Sequence[NodeBill], generations: dict[int, RecordedGeneration], *, ranks: int
) -> tuple[float, float]:
    """Return the hours of the gang's work, and of the first generation's start and shutdown."""
    work = 0
    start = 0
    first = bills[0].node.generation
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


def _read_quotes(plan: PlanJson) -> dict[PoolName, Decimal]:
    """Read the plan's quotes for all pools with the planned number of nodes.

    A quote is the dollars per hour of one node.
    """
    chosen = plan["chosen"]
    same_size = [
        candidate
        for candidate in [*plan.get("ranked", []), chosen]
        if candidate["nodes"] == chosen["nodes"]
    ]
    quotes = {parse_pool(candidate): parse_usd(candidate) for candidate in same_size}
    on_demand_usd = chosen.get("on_demand_usd_per_hour")
    if on_demand_usd is not None:
        region = chosen.get("region") or ""
        on_demand = PoolName(
            instance_type=chosen["instance_type"], market="on_demand", place=region
        )
        quotes.setdefault(on_demand, Decimal(str(on_demand_usd)))
    return quotes


def _add_quotes(
    events: Sequence[Event], history: Mapping[PoolName, Sequence[tuple[float, Decimal]]]
) -> dict[PoolName, Sequence[tuple[float, Decimal]]]:
    """Add the quotes of all plans as price changes of the pools that have no recorded changes.

    The ledger uses the quotes of all plans too. If this function used only the newest plan's
    quotes, the higher prices of earlier plans would appear as regret.
    """
    quoted: dict[PoolName, list[tuple[float, Decimal]]] = {}
    for event in select_plans(events):
        for pool, usd in _read_quotes(read_plan(event)).items():
            quoted.setdefault(pool, []).append((event.t_wall, usd))
    return {**quoted, **{pool: changes for pool, changes in history.items() if changes}}


def _find_optimum(
    curves: dict[PoolName, PriceCurve],
    begin: float,
    end: float,
    nodes: int,
    work: float,
    start: float,
) -> float:
    """Compute the lowest cost in dollars of `work` hours between two Unix times; infinity if the
    time is too short.
    """
    import numpy as np

    from ebbflow.cost.report.optimum import World, optimum_usd

    # The programme rounds times up to whole ticks. The result is scaled back to the exact time.
    hours = (end - begin) / 3600 * (1 + 4 / _TICKS)
    tick = hours / _TICKS
    edges = [round((begin + tick * 3600 * number) * MICRO) for number in range(_TICKS + 1)]
    # The mean price of each tick.
    prices = [
        [float(curve.cost(left, right)) * nodes / tick for left, right in pairwise(edges)]
        for curve in curves.values()
    ]
    # All pools count as one region: a move costs one start, because transfer between regions is not
    # recorded.
    world = World(
        zones=tuple(str(pool) for pool in curves),
        regions=("",) * len(curves),
        available=np.ones((len(curves), _TICKS), dtype=bool),
        usd_per_hour=np.array(prices),
        on_demand_usd_per_hour=math.inf,
        tick_hours=np.full(_TICKS, tick),
    )
    usd = optimum_usd(world, work_hours=work, deadline_hours=hours, changeover_hours=start)
    return usd * (work + start) / (tick * (math.ceil(work / tick) + math.ceil(start / tick)))
