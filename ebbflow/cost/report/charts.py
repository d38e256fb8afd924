"""Data of the plots on a job's page.

The plots show series of values per step, marks for events, lanes (one bar over time per node), and
ranks.

All times are seconds since the job's first event. A series has at most 600 points, so that a
browser can show a job of any length. Longer series are divided into buckets. Each bucket keeps its
lowest and its highest value, and a gap (None) if a value was not finite.
"""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import TypeVar, overload

import ebbflow.core.events as ev
from ebbflow.core.event_payloads import (
    ConfiguredPayload,
    EvaluationPayload,
    NodeHeartbeatPayload,
    NodeStartedPayload,
    PlanPayload,
    StepPayload,
)
from ebbflow.core.events import Event, LedgerClass, find_last_event, is_event, select_events
from ebbflow.cost.ledger.bills import NodeBill, UnreportedBill
from ebbflow.cost.ledger.generations import RecordedGeneration
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.ledger.pricing import PriceCurve, select_plans
from ebbflow.cost.ledger.timeline import MICRO, Span, compute_rank_times, compute_rate
from ebbflow.cost.report.figures import find_peaks, list_gpu_memory, read_number
from ebbflow.cost.report.parts import (
    ChartPlace,
    Charts,
    Column,
    Columns,
    EvaluationRow,
    Evaluations,
    Lane,
    Mark,
    ProgressFigures,
    RankRow,
)

LARGEST_POINTS = 600
STARTING = "starting"
RUNNING = "running"
RESTARTING = "restarting"
_BUCKETS = LARGEST_POINTS // 3  # two points each, and one more for a gap
_RECENT_STEPS = 200
_MOST_MARKS = 200
_MOST_LANES = 64
_MOST_SEGMENTS = 40
_MOST_RANKS = 1024
_MOST_EVALUATIONS = 20
_SILENT_SECONDS = 60.0
_MACHINE = (
    "gpu_busy_percent",
    "gpu_memory_used_bytes",
    "gpu_celsius",
    "gpu_watts",
    "resident_bytes",
    "memory_available_bytes",
)
_SECONDS = {
    "useful": LedgerClass.USEFUL_STEP,
    "data": LedgerClass.DATA_WAIT,
    "stall": LedgerClass.CHECKPOINT_STALL,
}
# What a starting job does after its newest event of each kind, the newest kind first
_START_STEPS = (
    (ev.NODE_STARTED, "the ranks import, restore and take their first step"),
    (ev.GENERATION_STARTED, "the ranks start"),
    (ev.PREPARED, "machines and their agents start"),
    (ev.PLAN, "the data is prepared"),
    (ev.PREFLIGHT, "the capacity is planned"),
)
_BUSY = (LedgerClass.USEFUL_STEP, LedgerClass.DATA_WAIT)
_X = ("step", "seconds", "usd")
Row = TypeVar("Row")


def build_charts(
    events: Sequence[Event], generations: dict[int, RecordedGeneration], ledger: Ledger
) -> Charts:
    """Build the data of all plots as JSON values.

    Args:
        events: Events of the job, ordered by time.

    Returns:
        A dictionary with

        - steps: Columns with one row per step (its last execution): step, seconds, usd (spent so
          far), loss, smooth (the smoothed loss), speed, mfu, learning_rate, gradient_norm, and the
          seconds of the step by use: useful, data, wait (for other ranks; a part of useful) and
          stall.
        - held_out: Columns with one row per evaluation: step, seconds, usd, and value (the held-out
          loss).
        - evaluations: Steps and metrics of the newest evaluations, oldest first, and the newest
          pictures.
        - machine: Columns over time: step, seconds, usd, and means of all nodes' heartbeats, such
          as the GPU load.
        - marks: Interruptions, generations, commits and non-finite losses with kind, step, seconds,
          usd and text.
        - lanes: One lane per node and generation: machine, price, dollars, and segments (start,
          end, class).
        - ranks: Figures of each rank (`_ranks`), the slowest rank first.
    """
    origin = min((event.t_wall for event in events if event.name != ev.PRICES), default=0.0)
    spent = _SpendCurve(ledger, origin)
    kept = find_kept_steps(events, generations)
    steps = [event.step for event in kept]
    # Times may decrease because the clocks of machines differ.
    seconds = list(accumulate((max(0.0, event.t_wall - origin) for event in kept), max))

    def place(at: float) -> ChartPlace:
        before = bisect_right(seconds, at)
        return {
            "step": float(steps[before - 1] or 0) if before else 0.0,
            "seconds": at,
            "usd": spent.at(at),
        }

    return {
        "origin_utc": origin,
        "steps": thin_columns(_step_columns(kept, find_peaks(events), seconds, spent)),
        "held_out": _held_out(events, origin, place),
        "evaluations": _evaluations(events),
        "machine": _machine(events, origin, place),
        "marks": _marks(events, generations, origin, place),
        "lanes": _lanes(ledger, generations, origin),
        "lanes_left_out": max(0, len(ledger.nodes) - _MOST_LANES),
        "ranks": _ranks(events, origin, _newest_gang(ledger)[1]),
    }


def compute_progress(
    events: Sequence[Event],
    charts: Charts,
    ledger: Ledger,
    generations: Mapping[int, RecordedGeneration],
    *,
    running: bool,
) -> ProgressFigures:
    """Compute the job's progress and forecast cost, and the work that killing the job now would
    lose.

    While the job runs, `phase` is "starting", "running" or "restarting" (`_describe_phase`).

    `eta_seconds`, `forecast_usd` and the band `low_usd` to `high_usd` are estimates. They assume
    the current price, and the speed of the last 200 plotted steps of the newest generation. They
    are None unless the job is running.
    """
    plans = select_plans(events)
    if plans:
        plan = plans[-1].payload
        recorded = plans[-1].data
    else:
        plan = PlanPayload()
        recorded = {}
    total = _count_planned_steps(events, plan)
    columns = charts.get("steps") or {}
    origin = charts.get("origin_utc", 0.0)
    steps = _numbers(columns["step"])
    seconds = _numbers(columns["seconds"])
    spent = float(ledger.total_usd)
    newest, stepped = _find_last_kept_step(events, generations)
    done = newest
    committed = max((event.step or 0 for event in events if event.name == ev.COMMIT), default=0)
    gang, rate = _newest_gang(ledger)
    at_risk = max(0, done - committed)
    found: ProgressFigures = {
        "step": done,
        "steps": total,
        "budget_usd": plan.budget_usd,
        "commit_step": committed or None,
        "at_risk_steps": at_risk,
        "at_risk_usd": None,
        "at_risk_seconds": None,
        "eta_seconds": None,
        "forecast_usd": None,
        "low_usd": None,
        "high_usd": None,
    }
    if running:
        phase = _describe_phase(events, generations, committed)
        found.update(phase)
        if phase.get("phase") == RESTARTING:
            done = phase.get("resume_step", 0)
            at_risk = 0
            found.update({"step": done, "at_risk_steps": 0})
    since = min((bill.node.started_wall for bill in gang), default=0.0) - origin
    # Steps after the newest one are of lost generations, and will be executed again
    recent = [
        (second, step)
        for second, step in zip(seconds, steps, strict=True)
        if second >= since and step < newest
    ][-_RECENT_STEPS:]
    if newest and stepped - origin >= since:
        recent.append((stepped - origin, newest))
    paces = sorted(
        (late - early) / (after - before)
        for (early, before), (late, after) in pairwise(recent)
        if after > before
    )
    ended = _find_last_ended(events)
    silent = max((event.t_wall for event in events if event.name == ev.NODE_HEARTBEAT), default=0.0)
    silent -= origin + (recent[-1][0] if recent else 0.0)  # since the newest step
    if not paces or not running or (gang[0].node.generation <= ended and done != total):
        return found  # after the loss of a generation, nobody knows when the next one steps
    if silent > _SILENT_SECONDS + 20 * paces[-1]:  # the ranks hang, or a node is lost
        return found
    pace = (recent[-1][0] - recent[0][0]) / (recent[-1][1] - recent[0][1])
    found["at_risk_seconds"] = at_risk * pace
    found["at_risk_usd"] = at_risk * pace * rate
    if total:
        left = max(0, total - done)
        low = min(pace, paces[len(paces) // 10])
        high = max(pace, paces[9 * (len(paces) - 1) // 10])
        ahead = recorded.get("live") or (recorded.get("chosen") or {}).get("outlook") or {}
        tail = (ahead.get("p90_usd") or 0.0) - (
            ahead.get("mean_usd") or ahead.get("p50_usd") or 0.0
        )
        found["eta_seconds"] = left * pace
        found["forecast_usd"] = spent + left * pace * rate
        found["low_usd"] = spent + left * low * rate
        # The plan's risk of the rest
        found["high_usd"] = spent + left * high * rate + max(0.0, tail) * left / total
    return found


def find_kept_steps(
    events: Sequence[Event], generations: dict[int, RecordedGeneration]
) -> list[Event[StepPayload]]:
    """Return one event for each step, ordered by step.

    It is the lowest rank's event of the step's last execution.
    """
    latest: dict[int, Event[StepPayload]] = {}
    for event in select_events(events, StepPayload):
        if event.step is None or event.generation not in generations:
            continue
        known = latest.get(event.step)
        if known is None or (-event.generation, event.rank) < (-known.generation, known.rank):
            latest[event.step] = event
    return [latest[step] for step in sorted(latest)]


def has_values(column: Iterable[float | None]) -> bool:
    return any(value is not None for value in column)


def thin_columns(columns: Columns) -> Columns:
    """Reduce columns of equal length to two or three rows per bucket.

    The rows of a bucket keep each column's minimum and maximum.

    The columns step, seconds, usd and smooth keep the values of the bucket's first and last row
    instead. If any other column lacks some of its values in a bucket, the bucket gets a third row
    in the middle, which is None in this column.
    """
    count = len(columns["step"])
    if count <= 3 * _BUCKETS:
        return {name: list(map(_short, values)) for name, values in columns.items()}
    found: dict[str, list[float | None]] = {name: [] for name in columns}
    for bucket in range(_BUCKETS):
        first = bucket * count // _BUCKETS
        last = (bucket + 1) * count // _BUCKETS - 1
        ends: dict[str, tuple[float | None, float | None]] = {}
        gaps: set[str] = set()
        for name, values in columns.items():
            if name in _X or name == "smooth":
                ends[name] = values[first], values[last]
                continue
            piece = values[first : last + 1]
            finite = [value for value in piece if value is not None]
            if not finite:
                ends[name] = None, None
                continue
            low = min(finite)
            high = max(finite)
            rising = piece.index(low) <= piece.index(high)
            if rising:
                ends[name] = (low, high)
            else:
                ends[name] = (high, low)
            if len(finite) < len(piece):
                gaps.add(name)
        for name, (begin, other) in ends.items():
            if gaps:
                middle = [None if name in gaps else begin]
            else:
                middle = []
            found[name] += [_short(begin), *map(_short, middle), _short(other)]
    return found


def _count_planned_steps(events: Sequence[Event], plan: PlanPayload) -> int | None:
    """Return the number of steps that the job is to take; None if unknown.

    A script takes as many steps as its loop says, or as were measured for the plan.
    """
    configured = find_last_event(events, ConfiguredPayload)
    if configured is None:
        known = {}
    else:
        known = {setting.key: setting.value for setting in configured.payload.settings}
    if known.get("script"):
        total = _find_script_steps(events) or plan.steps
    else:
        total = known.get("training.max_steps") or plan.steps
    if isinstance(total, int):
        return total
    return None


def _newest_gang(ledger: Ledger) -> tuple[list[NodeBill], float]:
    """Return the bills of the newest generation's nodes, and the nodes' total price in US dollars
    per second.
    """
    if ledger.nodes:
        newest = ledger.nodes[-1].node.generation
    else:
        newest = 0
    gang = [bill for bill in ledger.nodes if bill.node.generation == newest]
    return gang, sum(float(bill.node_curve.price_at(bill.node.ended_wall)) for bill in gang) / 3600


class _SpendCurve:
    """Piecewise linear curve of the dollars that a job spent over time, from the bills of all
    nodes.
    """

    def __init__(self, ledger: Ledger, origin: float) -> None:
        changes: list[tuple[float, float]] = []
        for bill in (*ledger.nodes, *ledger.unreported):
            for start, end, curve in _stays(bill):
                rate = 0.0
                inside = [at / MICRO for at, _ in curve.changes if start < at / MICRO < end]
                for at in (start, *inside):
                    now = float(curve.price_at(at)) / 3600
                    changes.append((at - origin, now - rate))
                    rate = now
                changes.append((end - origin, -rate))
        self._times = [0.0]
        self._usd = [0.0]
        self._rates = [0.0]
        for at, change in sorted(changes):
            last = self._rates[-1]
            if at > self._times[-1]:
                self._usd.append(self._usd[-1] + last * (at - self._times[-1]))
                self._times.append(at)
                self._rates.append(last)
            self._rates[-1] += change

    def at(self, seconds: float) -> float:
        before = max(0, bisect_right(self._times, seconds) - 1)
        ahead = max(0.0, seconds - self._times[before])
        return self._usd[before] + max(0.0, self._rates[before]) * ahead


def _stays(bill: NodeBill | UnreportedBill) -> Iterable[tuple[float, float, PriceCurve]]:
    """Yield (start, end, price curve) for each paid interval of a bill.

    Start and end are Unix seconds.
    """
    if isinstance(bill, NodeBill):
        yield bill.node.started_wall, bill.node.ended_wall, bill.node_curve
        for extra in bill.extras:
            yield extra.start, extra.start + extra.micros / MICRO, bill.price.node_curve
    else:
        stay = bill.job.stay(bill.node)
        yield stay.started, stay.started + stay.micros / MICRO, bill.price.node_curve


def _step_columns(
    kept: Sequence[Event[StepPayload]],
    peaks: dict[int, float],
    seconds: list[float],
    spent: _SpendCurve,
) -> dict[str, list[float | None]]:
    steps = [event.payload for event in kept]
    loss = [read_number(step.loss) for step in steps]
    flops = [(compute_rate(event, "flops"), peaks.get(event.generation)) for event in kept]
    # A peak that was measured on a busy machine is too low (`cost.report.figures`).
    mfu = [None if rate is None or not peak else 100 * rate / peak for rate, peak in flops]
    columns: dict[str, list[float | None]] = {
        "step": [float(event.step or 0) for event in kept],
        "seconds": [*seconds],
        "usd": [spent.at(at) for at in seconds],
        "loss": loss,
        "smooth": _smooth(loss),
        "speed": [compute_rate(event, "tokens") for event in kept],
        "mfu": mfu
        if sum(share > 100 for share in mfu if share is not None) <= len(kept) / 20
        else [None] * len(kept),
        "learning_rate": [read_number(step.learning_rate) for step in steps],
        "gradient_norm": [read_number(step.gradient_norm) for step in steps],
    }
    waits = [(step, _waited(step)) for step in steps]
    for name, kind in _SECONDS.items():
        columns[name] = [
            read_number((step.seconds or {}).get(kind, 0.0) / (step.merged or 1)) for step in steps
        ]
    columns["wait"] = [None if wait is None else wait / (step.merged or 1) for step, wait in waits]
    return {name: values for name, values in columns.items() if name in _X or has_values(values)}


def _waited(step: StepPayload) -> float | None:
    """Return the seconds for which a rank waited for other ranks in a step; None in older logs."""
    own = read_number(step.own_seconds)
    parts = step.seconds or {}
    if own is None:
        return None
    return max(0.0, sum(parts.get(kind, 0.0) for kind in _BUSY) - own)


def _smooth(values: Sequence[float | None]) -> list[float | None]:
    """Return an exponential moving average with a span of about 1/40 of the values.

    Ignore missing values.
    """
    share = 2 / (1 + min(1000, max(5, len(values) // 40)))
    found: list[float | None] = []
    mean: float | None = None
    for value in values:
        if value is not None:
            if mean is None:
                mean = value
            else:
                mean = mean + share * (value - mean)
        found.append(mean)
    return found


def _held_out(
    events: Sequence[Event], origin: float, place: Callable[[float], ChartPlace]
) -> Columns:
    found: dict[int, tuple[float, float]] = {}
    for event in select_events(events, EvaluationPayload):
        value = read_number((event.payload.metrics or {}).get("held_out_loss"))
        if value is not None and event.step is not None:
            found[event.step] = event.t_wall - origin, value
    rows = [
        {**place(at), "step": step, "value": value} for step, (at, value) in sorted(found.items())
    ]
    return _columns(_spread(rows, LARGEST_POINTS), (*_X, "value"))


def _evaluations(events: Sequence[Event]) -> Evaluations:
    found = {
        event.step: event.payload
        for event in select_events(events, EvaluationPayload)
        if event.step is not None
    }
    rows: list[EvaluationRow] = [
        {
            "step": step,
            "metrics": {
                str(name): read_number(value) for name, value in (shown.metrics or {}).items()
            },
        }
        for step, shown in sorted(found.items())[-_MOST_EVALUATIONS:]
    ]
    drawn = next((step for step in sorted(found, reverse=True) if found[step].pictures), None)
    return {
        "rows": rows,
        "pictures": {} if drawn is None else found[drawn].pictures,
        "pictures_step": drawn,
    }


def _machine(
    events: Sequence[Event], origin: float, place: Callable[[float], ChartPlace]
) -> Columns:
    """Average the machine figures of all nodes' heartbeats, such as the GPU load, per bucket of
    time.
    """
    beats = [
        event
        for event in select_events(events, NodeHeartbeatPayload)
        if any(getattr(event.payload, name) for name in _MACHINE)
    ]
    if not beats:
        return {}
    start = beats[0].t_wall
    end = max(beat.t_wall for beat in beats)
    width = max(1.0, (end - start) / (LARGEST_POINTS // 2))
    sums: dict[int, dict[str, list[float]]] = {}
    for beat in beats:
        bucket = sums.setdefault(int((beat.t_wall - start) / width), {})
        for name in _MACHINE:
            value = read_number(getattr(beat.payload, name))
            if value is not None:
                bucket.setdefault(name, []).append(value)
    rows = []
    for number, bucket in sorted(sums.items()):
        means = {name: sum(values) / len(values) for name, values in bucket.items()}
        rows.append({**place(start - origin + width * number), **means})
    seen = set().union(*sums.values())
    names = [name for name in _MACHINE if name in seen]
    return _columns(rows, (*_X, *names))


def _marks(
    events: Sequence[Event],
    generations: dict[int, RecordedGeneration],
    origin: float,
    place: Callable[[float], ChartPlace],
) -> list[Mark]:
    commits: list[Mark] = [
        {
            **place(event.t_wall - origin),
            "step": event.step,
            "kind": "commit",
            "text": f"commit of step {event.step:,}",
        }
        for event in events
        if event.name == ev.COMMIT and event.step is not None
    ]
    found = _spread(commits, _MOST_MARKS)
    starts: list[Mark] = []
    for generation in generations.values():
        starts.append(
            {
                **place(generation.started_wall - origin),
                "kind": "generation",
                "text": f"generation {generation.number}",
            }
        )
        if generation.unplanned:
            why = str(generation.reason or "no end recorded").replace("_", " ")
            text = f"generation {generation.number} ended: {why}"
            starts.append(
                {**place(generation.ended_wall - origin), "kind": "interruption", "text": text}
            )
    # Interruptions are drawn above
    found += sorted(_spread(starts, _MOST_MARKS), key=lambda mark: mark["kind"])
    bad = {
        event.step: place(event.t_wall - origin)
        for event in select_events(events, StepPayload)
        if event.payload.loss is not None and read_number(event.payload.loss) is None
    }
    for step, where in list(bad.items())[:_MOST_MARKS]:
        if step is not None:
            text = f"non-finite loss at step {step:,}"
            found.append({**where, "step": step, "kind": "non-finite", "text": text})
    return [
        {**mark, "seconds": _short(mark["seconds"]), "usd": _short(mark["usd"])} for mark in found
    ]


def _lanes(ledger: Ledger, generations: dict[int, RecordedGeneration], origin: float) -> list[Lane]:
    """Return one lane (a bar over time) per node and generation.

    Its segments show how the node's first rank spent the paid time.
    """
    found: list[Lane] = []
    if len(ledger.nodes) <= _MOST_LANES:
        nodes = ledger.nodes
    else:
        nodes = ledger.nodes[-_MOST_LANES:]
    for bill in nodes:
        node = bill.node
        generation = generations.get(bill.node.generation)
        if generation is None or not node.ranks:
            continue
        times = compute_rank_times(node, generation)[0]
        found.append(
            {
                "generation": node.generation,
                "node": node.node,
                "machine": str(node.machine.get("instance_id") or node.machine.get("host") or ""),
                "pool": "" if bill.price.pool is None else str(bill.price.pool),
                "usd_per_hour": float(bill.price.node_curve.price_at(node.started_wall)),
                "usd": float(bill.usd),
                "start": _short(node.started_wall - origin),
                "end": _short(node.ended_wall - origin),
                "ended": "running"
                if generation.running
                else str(generation.reason or "no end recorded"),
                "step": generation.parent_step,
                "segments": _segments(times.spans, node.started_wall - origin),
            }
        )
    return found


def _segments(spans: Sequence[Span], start: float) -> list[list[float | str]]:
    """Convert spans to segments [start, end, ledger class with the most time].

    Join equal neighbours; above 40, merge short ones.
    """
    joined: list[tuple[float, float, str]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if span.end <= span.start:
            continue
        kind = str(max(span.classes, key=span.classes.__getitem__))
        if joined and joined[-1][2] == kind:
            joined[-1] = (joined[-1][0], span.end, kind)
        else:
            joined.append((span.start, span.end, kind))
    if len(joined) > _MOST_SEGMENTS:
        longest = sorted((end - begin for begin, end, _ in joined), reverse=True)[
            _MOST_SEGMENTS - 1
        ]
        merged: list[tuple[float, float, str]] = []
        for begin, end, kind in joined:
            if merged and (end - begin < longest or merged[-1][2] == kind):
                merged[-1] = (merged[-1][0], end, merged[-1][2])
            else:
                merged.append((begin, end, kind))
        joined = merged
    return [
        [_short(start + begin / MICRO), _short(start + end / MICRO), kind]
        for begin, end, kind in joined
    ]


def _ranks(events: Sequence[Event], origin: float, usd_per_second: float) -> list[RankRow]:
    """Describe each rank of the newest generation: seconds per step, waits and last event.

    The slowest rank is first.

    All ranks wait for each other, so the duration of a step does not show which rank is a
    straggler. For each step, rank 0 therefore records the rank with the longest own time, the ratio
    of this time to the median of the other ranks, and the seconds beyond this median. All ranks
    wait these seconds; `lost_seconds` is their sum.
    """
    newest = max((event.generation for event in events if event.name == ev.STEP), default=0)
    mine = [event for event in events if event.generation == newest and event.rank >= 0]
    hosts: dict[int, tuple[int, str]] = {}
    memory: dict[int, float] = {}
    for event in events:
        if event.generation != newest:
            continue
        payload = event.payload
        if isinstance(payload, NodeStartedPayload):
            host = payload.instance_id or payload.host or ""
            hosts |= dict.fromkeys(payload.ranks or [], (event.node, host))
        elif isinstance(payload, NodeHeartbeatPayload):
            used = read_number(payload.resident_bytes)
            if used:
                memory[event.node] = used
    slowest: Counter[int] = Counter()
    counted: Counter[int] = Counter()
    ratios: dict[int, list[float]] = {}
    lost: defaultdict[int, float] = defaultdict(float)
    # Waits for other ranks, of the ranks that know them
    idle: defaultdict[int, float] = defaultdict(float)
    seconds: dict[int, list[float]] = {}
    waits: defaultdict[int, float] = defaultdict(float)
    spent: defaultdict[int, float] = defaultdict(float)
    last: dict[int, float] = {}
    steps: dict[int, int] = {}
    for event in mine:
        last[event.rank] = max(last.get(event.rank, 0.0), event.t_wall)
        if not is_event(event, StepPayload):
            continue
        step = event.payload
        steps[event.rank] = max(steps.get(event.rank, 0), event.step or 0)
        parts = step.seconds or {}
        merged = step.merged or 1  # `ebbflow.observe.watch.merge_committed_steps`
        seconds.setdefault(event.rank, []).append(sum(parts.values()) / merged)
        waits[event.rank] += parts.get(LedgerClass.DATA_WAIT, 0.0)
        spent[event.rank] += sum(parts.values())
        named = step.slowest_rank
        ratio = read_number(step.slowest_ratio)
        if named is not None and ratio is not None:
            slowest[named] += 1
            ratios.setdefault(named, []).append(ratio)
            beyond = read_number(step.slowest_seconds)
            if beyond is not None:
                lost[named] += beyond
                counted[named] += merged
        waited = _waited(step)
        if waited is not None:
            idle[event.rank] += waited
    peaks = {row["rank"]: row for row in list_gpu_memory(mine)}
    judged = sum(slowest.values())
    found: list[RankRow] = [
        {
            "rank": rank,
            "generation": newest,
            "node": hosts.get(rank, (0, ""))[0],
            "host": hosts.get(rank, (0, ""))[1],
            "step": steps.get(rank),
            "step_seconds": median(seconds[rank]) if seconds.get(rank) else None,
            "data_share": waits[rank] / spent[rank] if spent[rank] else None,
            "slowest_share": slowest[rank] / judged if judged else None,
            "wait_share": idle[rank] / spent[rank] if rank in idle and spent[rank] else None,
            "slowest_ratio": median(ratios[rank]) if rank in ratios else None,
            "lost_step_seconds": lost[rank] / counted[rank] if rank in lost else None,
            "lost_seconds": lost.get(rank),
            "lost_usd": lost[rank] * usd_per_second if rank in lost else None,
            "node_resident_bytes": memory.get(hosts.get(rank, (0, ""))[0]),
            "gpu_allocated_bytes": peaks[rank]["allocated_bytes"] if rank in peaks else None,
            "gpu_reserved_bytes": peaks[rank]["reserved_bytes"] if rank in peaks else None,
            "last_seconds": _short(last[rank] - origin),
        }
        for rank in sorted(last)
    ]
    return sorted(
        found,
        key=lambda row: (-(row["slowest_share"] or 0) * (row["slowest_ratio"] or 0), row["rank"]),
    )[:_MOST_RANKS]


def _numbers(column: Column) -> list[float]:
    """Return a column that has no missing values, such as the steps."""
    return [value for value in column if value is not None]


def _columns(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> Columns:
    columns = {}
    for name in names:
        columns[name] = [_short(row.get(name)) for row in rows]
    return columns


def _spread(rows: list[Row], largest: int) -> list[Row]:
    """Return at most `largest` evenly spaced rows, including the first and the last row."""
    if len(rows) <= largest:
        return rows
    return [rows[number * (len(rows) - 1) // (largest - 1)] for number in range(largest)]


@overload
def _short(value: float) -> float: ...
@overload
def _short(value: float | None) -> float | None: ...
def _short(value: float | None) -> float | None:
    """Round a float to seven significant digits, which is enough for a plot and halves the size of
    the page.
    """
    if not isinstance(value, float):
        return value
    if math.isfinite(value):
        return float(f"{value:.7g}")
    return None


def _describe_phase(
    events: Sequence[Event], generations: Mapping[int, RecordedGeneration], committed: int
) -> ProgressFigures:
    """Describe the phase of a running job.

    Returns:
        `phase`: "starting" before the newest run's first step, "restarting" from the failure of a
        generation until the first step of the next, else "running". `doing`: what is done instead
        of steps while the job starts. `resume_step` and `lost_steps`: the step from which a
        restarting job goes on, and the number of steps that it takes again.
    """
    run = events[-1].run
    last_step: dict[int, int] = {}  # of each generation of this run
    mine: set[int] = set()
    for event in events:
        if event.run != run or event.generation not in generations:
            continue
        mine.add(event.generation)
        if event.name == ev.STEP and event.step is not None:
            last_step[event.generation] = max(last_step.get(event.generation, 0), event.step)
    if not last_step:
        return {"phase": STARTING, "doing": _describe_start(events, run)}
    newest = max(mine)
    failed = newest <= _find_last_ended(events) and not generations[newest].planned
    if newest in last_step and not failed:
        return {"phase": RUNNING}
    resume_step = committed
    if newest not in last_step and not failed:
        resume_step = generations[newest].parent_step
    lost = last_step[max(last_step)] - resume_step
    return {"phase": RESTARTING, "resume_step": resume_step, "lost_steps": max(0, lost)}


def _describe_start(events: Sequence[Event], run: str) -> str:
    recorded = {event.name for event in events if event.run == run}
    return next((doing for name, doing in _START_STEPS if name in recorded), "preflight checks")


def _find_last_kept_step(
    events: Sequence[Event], generations: Mapping[int, RecordedGeneration]
) -> tuple[int, float]:
    """Return the last executed step that is part of the weights so far, and its end in Unix
    seconds; (0, 0.0) if none.
    """
    return max(
        (
            (event.step, event.t_wall)
            for event in events
            if event.name == ev.STEP
            and event.step is not None
            and event.generation in generations
            and generations[event.generation].keeps(event.step)
        ),
        default=(0, 0.0),
    )


def _find_script_steps(events: Sequence[Event]) -> int | None:
    """Return the number of steps that the script's loop reported last."""
    told = (event.payload.max_steps for event in select_events(events, StepPayload))
    return next((steps for steps in reversed(list(told)) if steps is not None), None)


def _find_last_ended(events: Sequence[Event]) -> int:
    """Return the newest generation that has failed or ended; 0 if none."""
    ends = (ev.FAULT_DETECTED, ev.GENERATION_ENDED)
    return max((event.generation for event in events if event.name in ends), default=0)
