"""Compute paid time from events: how long each node was paid for, and what each of its ranks did
with that time.

All times within a node come from its monotonic clock, so that corrections of the wall clock do not
matter. Seconds are converted to whole microseconds before any calculation, so that every sum is
exact.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import (
    InvalidPayload,
    NodeEndedPayload,
    NodeHeartbeatPayload,
    NodeStartedPayload,
    PhasePayload,
    StepPayload,
)
from ebbflow.core.events import PHASE, EndReason, Event, LedgerClass, find_last_event, is_event
from ebbflow.core.grouping import group_by_key, sum_by_key
from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.generations import RecordedGeneration, accounts_for_time, proves_generation

MICRO = 1_000_000
MACHINE_KEYS = (
    "instance_id",
    "instance_type",
    "zone",
    "zone_id",
    "region",
    "market",
    "uptime_seconds",
    "host",
    "batch_job_id",
)
# A rank's intervals may exceed its paid time by this much: clocks are read one after the other, and
# the start of a process is known to a hundredth of a second. Beyond it the events contradict each
# other.
TOLERANCE_SHARE = 0.005
TOLERANCE_SECONDS = 0.05
# Longest gap between phases that a rank emits together, on a loaded machine
_SAME_MOMENT_SECONDS = 0.5

# If a step was discarded, skipped or never completed, these classes of its time are waste.
# Checkpoint stall and profiling are not.
_WASTED = (
    LedgerClass.USEFUL_STEP,
    LedgerClass.DATA_WAIT,
    LedgerClass.EVALUATION,
    LedgerClass.SCRIPT,
)


@dataclass(frozen=True)
class Span:
    """Interval of a rank's time, divided into ledger classes.

    `start` and `end` are microseconds since the start of the rank's node.
    """

    start: int
    end: int
    classes: dict[LedgerClass, int]  # microseconds of each class


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Paid time of one rank in one generation."""

    rank: int
    paid: int  # all paid microseconds of the rank
    classes: dict[LedgerClass, int]  # microseconds by class; they sum to `paid`
    # The classes whose time was inferred, not measured
    estimated: frozenset[LedgerClass] = frozenset()
    # the same time as a list of intervals, so that it can be priced if the price changes over time
    spans: tuple[Span, ...] = ()


@dataclass(kw_only=True)
class NodeTime:
    """Paid time of one node in one generation."""

    generation: int
    node: int
    started_wall: float  # Unix time of the start
    # start, end: seconds by the node's monotonic clock
    start: float
    end: float
    measured: bool  # whether an event recorded the node's end
    ranks: list[int]  # numbers of the ranks on the node
    events: dict[int, list[Event]]  # the events of each rank
    # facts about the machine such as instance_id and zone (`infra.instance`), as far as known
    machine: dict[str, Any]
    rank_times: dict[RecordedGeneration, list[RankTime]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def paid_seconds(self) -> float:
        return self.end - self.start

    @property
    def paid_micros(self) -> int:
        return _micros(self.paid_seconds)

    @property
    def ended_wall(self) -> float:
        """Unix time of the end: the start by the wall clock, plus the paid seconds by the monotonic
        clock.
        """
        return self.started_wall + self.paid_seconds

    @property
    def instance_id(self) -> str | None:
        return self.machine.get("instance_id") or None


def read_paid_nodes(events: Sequence[Event]) -> list[NodeTime]:
    """Read every node that was paid for, with the events of its ranks.

    A node ends with its `node_ended` event. If that event is missing, the node is billed to its
    last heartbeat or the last event of its ranks, whichever is later. Ranks without an agent are
    billed from the start of their process to their last event. If `node_started` is missing, the
    start follows from the agent's other events, else from the first rank.
    """
    numbers = {event.generation for event in events if proves_generation(event)}
    grouped = group_by_key(
        ((event.run, event.attempt, event.generation, event.node), event)
        for event in events
        if event.generation in numbers
    )
    found = (_node(sorted(group, key=lambda event: event.t_mono)) for group in grouped.values())
    nodes = [node for node in found if node is not None]
    per_node = max([1, *(len(node.ranks) for node in nodes)])
    for node in nodes:
        if not node.ranks:  # its list of ranks is lost, and none of them has an event
            node.ranks = list(range(node.node * per_node, (node.node + 1) * per_node))
    return sorted(nodes, key=lambda node: (node.generation, node.node))


def compute_rank_times(node: NodeTime, generation: RecordedGeneration) -> list[RankTime]:
    """Divide the paid time of each rank of a node into classes. The result is cached in the node.

    Raises:
        LedgerError: The intervals of a rank contradict each other.
    """
    if generation not in node.rank_times:
        node.rank_times[generation] = [_rank_time(node, rank, generation) for rank in node.ranks]
    return node.rank_times[generation]


def compute_rate(event: Event, key: Literal["tokens", "flops"]) -> float | None:
    """Return a step's throughput, in tokens or FLOPs (`key`) per second; None if it is unknown.

    The seconds are those of useful work and of waits for data.
    """
    if not is_event(event, StepPayload):
        return None
    step = event.payload
    seconds = step.seconds or {}
    if key == "tokens":
        amount = step.tokens
    else:
        amount = step.flops
    busy = seconds.get(LedgerClass.USEFUL_STEP, 0.0) + seconds.get(LedgerClass.DATA_WAIT, 0.0)
    if amount and busy > 0:
        return amount / busy
    return None


def _node(events: list[Event]) -> NodeTime | None:
    by_rank = group_by_key((event.rank, event) for event in events if event.rank >= 0)
    started = next((event for event in events if is_event(event, NodeStartedPayload)), None)
    ended = find_last_event(events, NodeEndedPayload)
    if started is None:
        start_times = _infer_start(events, by_rank)
    else:
        start_times = (started.t_mono, started.t_wall)
    if start_times is None:
        return None
    start, started_wall = start_times
    if ended is not None:
        seconds = ended.payload.seconds
        end = start + float(ended.t_mono - start if seconds is None else seconds)
    else:
        rank_events = [event.t_mono for group in by_rank.values() for event in group]
        heartbeats = [
            start + float(event.payload.seconds or 0.0)
            for event in events
            if is_event(event, NodeHeartbeatPayload)
        ]
        end = max([start, *rank_events, *heartbeats])
    if started is not None:
        machine = started.payload
    else:
        machine = NodeStartedPayload()
    return NodeTime(
        generation=events[0].generation,
        node=events[0].node,
        started_wall=started_wall,
        start=start,
        end=end,
        measured=ended is not None,
        ranks=sorted(set(machine.ranks or []) | set(by_rank)),
        events=by_rank,
        machine={key: getattr(machine, key) for key in MACHINE_KEYS if getattr(machine, key)},
    )


def _infer_start(
    events: Sequence[Event], by_rank: Mapping[int, list[Event]]
) -> tuple[float, float] | None:
    """Infer the start of a node without a `node_started` event, as monotonic and Unix seconds.

    Heartbeats and `node_ended` events contain the seconds since the start. If there are none, the
    node is assumed to have started with its first rank. Return None if no rank recorded an
    interval.
    """
    starts = [
        (event.t_mono - float(event.payload.seconds), event)
        for event in events
        if (is_event(event, NodeHeartbeatPayload) or is_event(event, NodeEndedPayload))
        and event.payload.seconds is not None
    ]
    if not starts:
        clocks = (
            [event for event in group if accounts_for_time(event)] for group in by_rank.values()
        )
        starts = [(_find_first_start(mine), mine[0]) for mine in clocks if mine]
    if not starts:
        return None
    start, event = min(starts, key=lambda pair: pair[0])
    return start, event.t_wall - (event.t_mono - start)


def _find_first_start(clocks: Sequence[Event]) -> float:
    """Return the start of a rank's first recorded interval, in monotonic seconds.

    At the end of an interval a rank emits one event for each phase in it, all at nearly the same
    time. The interval therefore started at the time of these events minus the seconds of all the
    phases.
    """
    start = clocks[0].t_mono - sum(_seconds(clocks[0]).values())
    before = clocks[0]
    phases = set(_seconds(before))
    for event in clocks[1:]:
        if (
            before.name != PHASE
            or event.name != PHASE
            or event.t_mono - before.t_mono > _SAME_MOMENT_SECONDS
        ):
            break
        # An interval has each phase once, so this is already the next interval
        if phases & set(_seconds(event)):
            break
        start = start - sum(_seconds(event).values())
        before = event
        phases |= set(_seconds(event))
    return start


def _rank_time(node: NodeTime, rank: int, generation: RecordedGeneration) -> RankTime:
    clocks = [event for event in node.events.get(rank, []) if accounts_for_time(event)]
    paid = _micros(node.paid_seconds)
    leaving = any(
        event.name == PHASE and LedgerClass.SHUTDOWN in _seconds(event) for event in clocks[-1:]
    )
    tail_class = _classify_end(
        generation, LedgerClass.SHUTDOWN if leaving else LedgerClass.UNATTRIBUTED
    )
    if not any(node.events.values()) and (
        generation.running or generation.reason == Outcome.BUDGET
    ):
        # The ranks are about to start, or the budget did not allow them to
        tail_class = LedgerClass.STARTUP
    if not clocks:
        if node.measured:
            estimated = frozenset()
        else:
            estimated = frozenset({tail_class})
        whole = {tail_class: paid}
        return RankTime(
            rank=rank, paid=paid, classes=whole, estimated=estimated, spans=(Span(0, paid, whole),)
        )
    started = _paid_micros_at(_find_first_start(clocks), node)
    reached = _paid_micros_at(clocks[-1].t_mono, node)
    spans = [Span(0, started, {LedgerClass.STARTUP: started})]
    for event in clocks:
        seconds = {
            kind: _micros(value) for kind, value in _clip_seconds(event, node, generation).items()
        }
        end = _paid_micros_at(event.t_mono, node)
        spans.append(Span(max(0, end - sum(seconds.values())), end, seconds))
    spans.append(Span(reached, paid, {tail_class: paid - reached}))
    classes = sum_by_key(pair for span in spans for pair in span.classes.items())
    _balance(classes, paid, f"generation {node.generation}, node {node.node}, rank {rank}")
    if node.measured or reached == paid:
        estimated = frozenset()
    else:
        estimated = frozenset({tail_class})
    return RankTime(rank=rank, paid=paid, classes=classes, estimated=estimated, spans=tuple(spans))


def _paid_micros_at(t_mono: float, node: NodeTime) -> int:
    """Convert a time of a node's monotonic clock to microseconds of its paid time."""
    return min(node.paid_micros, max(0, _micros(t_mono - node.start)))


def _classify_end(generation: RecordedGeneration, planned: LedgerClass) -> LedgerClass:
    """Return the ledger class of the time that was lost when a generation ended.

    Return `planned` if the generation ended as planned or is still running.
    """
    if generation.reason == EndReason.HANG:
        return LedgerClass.HANG
    if generation.unplanned:
        return LedgerClass.INTERRUPTION
    return planned


def _seconds(event: Event) -> dict[LedgerClass, float]:
    """Return the seconds by class that an event records."""
    where = f"generation {event.generation}, node {event.node}, rank {event.rank}"
    problem = f"{where}: a {event.name} event without classes and seconds: {event.data}"
    try:
        payload = event.payload
    except InvalidPayload as error:
        raise LedgerError(problem) from error
    if isinstance(payload, PhasePayload):
        return {payload.ledger_class: max(0.0, float(payload.seconds))}
    if isinstance(payload, StepPayload) and payload.seconds is not None:
        return {kind: max(0.0, float(value)) for kind, value in payload.seconds.items()}
    raise LedgerError(problem)


def _clip_seconds(
    event: Event, node: NodeTime, generation: RecordedGeneration
) -> Mapping[LedgerClass, float]:
    """Return the event's seconds by class, without the part that is outside the node's paid time.

    Step time is useful only if the step completed and is in the final weights. Otherwise its time
    is moved to a class such as redone steps.
    """
    seconds = _seconds(event)
    outside = max(0.0, node.start - (event.t_mono - sum(seconds.values()))) + max(
        0.0, event.t_mono - node.end
    )
    for kind in sorted(seconds, key=seconds.__getitem__, reverse=True):
        taken = min(outside, seconds[kind])
        seconds[kind] -= taken
        outside -= taken
    if event.name == PHASE:
        # Without an end the job is running, and after its completion the ranks exit. Other planned
        # ends, such as that by a non-finite loss, discard the step.
        shut_down = generation.reason in (None, Outcome.COMPLETED)
        waste = _classify_end(
            generation, LedgerClass.SHUTDOWN if shut_down else LedgerClass.REDONE_STEP
        )
        # A planned end cuts off no step, so evaluation and waiting for data keep the classes that
        # the rank recorded.
        if waste is LedgerClass.SHUTDOWN:
            wasted_kinds = (LedgerClass.USEFUL_STEP,)
        else:
            wasted_kinds = _WASTED
    elif event.step is None or not generation.keeps(event.step):
        waste = LedgerClass.REDONE_STEP
        wasted_kinds = _WASTED
    elif is_event(event, StepPayload) and event.payload.skipped:
        waste = LedgerClass.SKIPPED_STEP
        wasted_kinds = _WASTED
    else:
        return seconds
    wasted = sum(seconds.pop(kind, 0.0) for kind in wasted_kinds)
    if wasted:
        seconds[waste] = seconds.get(waste, 0.0) + wasted
    return seconds


def _balance(classes: dict[LedgerClass, int], paid: int, where: str) -> None:
    """Change `classes` so that they sum to the paid time.

    A gap is added as unattributed time. A small excess is subtracted from the largest class; a
    larger excess raises a LedgerError whose message begins with `where`.
    """
    rest = paid - sum(classes.values())
    if rest >= 0:
        classes[LedgerClass.UNATTRIBUTED] = classes.get(LedgerClass.UNATTRIBUTED, 0) + rest
        return
    if -rest > max(TOLERANCE_SECONDS * MICRO, TOLERANCE_SHARE * paid):
        listed = " + ".join(
            f"{kind} {micros / MICRO:.3f}" for kind, micros in classes.items() if micros
        )
        excess = f"its intervals exceed its paid time by {-rest / MICRO:.3f} s"
        raise LedgerError(f"{where}: {excess}: {listed} > paid {paid / MICRO:.3f} s")
    classes[max(classes, key=classes.__getitem__)] += rest


def _micros(seconds: float) -> int:
    return round(seconds * MICRO)
