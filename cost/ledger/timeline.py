"""From events to paid time: which node was paid for how long, and what each of its ranks did with it.

Within a node all times come from its monotonic clock, so that a corrected wall clock shifts nothing. Seconds become
whole microseconds at once: from here on every sum is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ebbflow.cost.errors import LedgerError
from ebbflow.cost.ledger.generations import RecordedGeneration, accounts_for_time, proves_generation
from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import NODE_ENDED, NODE_HEARTBEAT, NODE_STARTED, PHASE, EndReason, Event, LedgerClass

MICRO = 1_000_000
_INSTANCE_KEYS = ("instance_id", "instance_type", "zone", "zone_id", "region", "market", "uptime_seconds")
MACHINE_KEYS = (*_INSTANCE_KEYS, "host", "batch_job_id")
# How far a rank's intervals may exceed its paid time before the events count as contradictory: clocks are read one
# after the other, and a process start is known to a hundredth of a second.
TOLERANCE_SHARE = 0.005
TOLERANCE_SECONDS = 0.05
_TOGETHER_SECONDS = 0.5  # between the phases that a rank emits at once, on a machine that is loaded

# The time of a step that was thrown away, skipped or never completed. Its checkpoint stall keeps its class.
_WASTED = (LedgerClass.USEFUL_STEP, LedgerClass.DATA_WAIT, LedgerClass.EVALUATION)


@dataclass(frozen=True)
class Span:
    """A piece of a rank's time, microseconds since its node started, and what it was spent on."""

    start: int
    end: int
    classes: dict[LedgerClass, int]


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """One rank's paid time in one generation, microseconds by class; `estimated`: the classes inferred, not seen.

    spans: when what was spent, for prices that change; `classes` is their sum, balanced to the paid time.
    """

    rank: int
    paid: int
    classes: dict[LedgerClass, int]
    estimated: frozenset[LedgerClass] = frozenset()
    spans: tuple[Span, ...] = ()


@dataclass(kw_only=True)
class NodeTime:
    """One paid node in one generation. start, end: monotonic seconds; measured: its end was recorded.

    machine: what the agent knew of its machine (`infra.instance`), such as instance_id and zone; empty: nothing.
    """

    generation: int
    node: int
    started_wall: float
    start: float
    end: float
    measured: bool
    ranks: list[int]
    events: dict[int, list[Event]] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def paid_seconds(self) -> float:
        return self.end - self.start

    @property
    def paid_micros(self) -> int:
        return _micros(self.paid_seconds)

    @property
    def ended_wall(self) -> float:
        """Unix time, by the clock that stood when the node started."""
        return self.started_wall + self.paid_seconds

    @property
    def instance_id(self) -> str | None:
        return self.machine.get("instance_id") or None


def read_paid_nodes(events: Sequence[Event]) -> list[NodeTime]:
    """Every node that was paid for, with the events of its ranks.

    A node's end is its `node_ended`. Without one it is billed to its last heartbeat or its ranks' last event,
    whichever is later. Ranks without any agent are billed from their process start to their last event. A node whose
    `node_started` is lost began where its agent's other events put it, else where its first rank did.
    """
    grouped: dict[tuple[str, int, int, int], list[Event]] = {}
    numbers = {event.generation for event in events if proves_generation(event)}
    for event in events:
        if event.generation not in numbers:
            continue
        if event.rank >= 0 or event.name in (NODE_STARTED, NODE_HEARTBEAT, NODE_ENDED):
            grouped.setdefault((event.run, event.attempt, event.generation, event.node), []).append(event)
    found = (_node(sorted(group, key=lambda event: event.t_mono)) for group in grouped.values())
    nodes = [node for node in found if node is not None]
    per_node = max((len(node.ranks) for node in nodes), default=0) or 1
    for node in nodes:
        if not node.ranks:  # its list of ranks is lost, and none of them has an event
            node.ranks = list(range(node.node * per_node, (node.node + 1) * per_node))
    return sorted(nodes, key=lambda node: (node.generation, node.node))


def compute_rank_times(node: NodeTime, generation: RecordedGeneration) -> list[RankTime]:
    """What each rank of the node did. Raises LedgerError when a rank's intervals cannot all be true."""
    return [_rank_time(node, rank, generation) for rank in node.ranks]


def _node(events: list[Event]) -> NodeTime | None:
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        if event.rank >= 0:
            by_rank.setdefault(event.rank, []).append(event)
    started = next((event for event in events if event.name == NODE_STARTED), None)
    ended = next((event for event in reversed(events) if event.name == NODE_ENDED), None)
    beginning = _beginning(events, by_rank) if started is None else (started.t_mono, started.t_wall)
    if beginning is None:
        return None
    start, started_wall = beginning
    signs_of_life = [event.t_mono for group in by_rank.values() for event in group]
    beats = [start + float(event.data.get("seconds", 0.0)) for event in events if event.name == NODE_HEARTBEAT]
    if ended is not None:
        end = start + float(ended.data.get("seconds", ended.t_mono - start))
    else:
        end = max([start, *signs_of_life, *beats])
    listed = [int(rank) for rank in (started.data.get("ranks") or [])] if started is not None else []
    return NodeTime(
        generation=events[0].generation,
        node=events[0].node,
        started_wall=started_wall,
        start=start,
        end=end,
        measured=ended is not None,
        ranks=sorted(set(listed) | set(by_rank)),
        events=by_rank,
        machine={} if started is None else {key: started.data[key] for key in MACHINE_KEYS if started.data.get(key)},
    )


def _beginning(events: Sequence[Event], by_rank: Mapping[int, list[Event]]) -> tuple[float, float] | None:
    """When a node without `node_started` began, monotonic and Unix seconds; None: no event says.

    Its agent's heartbeats and its `node_ended` count seconds since then; without them it is when its first rank began.
    """
    told = [event for event in events if event.name in (NODE_HEARTBEAT, NODE_ENDED) and "seconds" in event.data]
    starts = [(event.t_mono - float(event.data["seconds"]), event) for event in told]
    if not starts:
        clocks = ([event for event in group if accounts_for_time(event)] for group in by_rank.values())
        starts = [(_clock_start(mine), mine[0]) for mine in clocks if mine]
    if not starts:
        return None
    start, event = min(starts, key=lambda pair: pair[0])
    return start, event.t_wall - (event.t_mono - start)


def _clock_start(clocks: Sequence[Event]) -> float:
    """When a rank's first clock event that is left began, monotonic seconds.

    A rank emits the phases of one stretch of time one right after the other, so that the seconds of all of them come
    off its end, and not only those of the first.
    """
    start, before = clocks[0].t_mono - _total(clocks[0]), clocks[0]
    for event in clocks[1:]:
        if before.name != PHASE or event.name != PHASE or event.t_mono - before.t_mono > _TOGETHER_SECONDS:
            break
        start, before = start - _total(event), event
    return start


def _rank_time(node: NodeTime, rank: int, generation: RecordedGeneration) -> RankTime:
    clocks = [event for event in node.events.get(rank, []) if accounts_for_time(event)]
    paid = _micros(node.paid_seconds)
    classes: dict[LedgerClass, int] = {}
    tail_class = _tail_class(clocks, generation)
    if not any(node.events.values()) and (generation.running or generation.reason == Outcome.BUDGET):
        tail_class = LedgerClass.STARTUP  # its ranks are still to come, or were not started for want of money
    if not clocks:
        estimated = frozenset() if node.measured else frozenset({tail_class})
        whole = {tail_class: paid}
        return RankTime(rank=rank, paid=paid, classes=whole, estimated=estimated, spans=(Span(0, paid, whole),))
    spans = []
    for event in clocks:
        seconds = {kind: _micros(value) for kind, value in _clipped(event, node, generation).items()}
        end = min(_micros(event.t_mono - node.start), paid)
        spans.append(Span(max(0, end - sum(seconds.values())), end, seconds))
    before = _clock_start(clocks) - node.start
    after = node.end - clocks[-1].t_mono
    spans.insert(0, Span(0, max(0, _micros(before)), {LedgerClass.STARTUP: max(0, _micros(before))}))
    spans.append(Span(min(paid, paid - _micros(after)), paid, {tail_class: max(0, _micros(after))}))
    for span in spans:
        for kind, spent in span.classes.items():
            classes[kind] = classes.get(kind, 0) + spent
    _balance(classes, paid, f"generation {node.generation}, node {node.node}, rank {rank}")
    estimated = frozenset() if node.measured or after <= 0 else frozenset({tail_class})
    return RankTime(rank=rank, paid=paid, classes=classes, estimated=estimated, spans=tuple(spans))


def _tail_class(clocks: list[Event], generation: RecordedGeneration) -> LedgerClass:
    """What a rank's time after its last event is."""
    if generation.reason == EndReason.HANG:
        return LedgerClass.HANG
    if generation.unplanned:
        return LedgerClass.INTERRUPTION
    leaving = bool(clocks) and clocks[-1].name == PHASE and clocks[-1].data.get("class") == LedgerClass.SHUTDOWN
    return LedgerClass.SHUTDOWN if leaving else LedgerClass.UNATTRIBUTED


def _seconds(event: Event) -> dict[LedgerClass, float]:
    """The seconds that a clock event accounts for, by class."""
    data = event.data
    try:
        seconds = {data["class"]: data["seconds"]} if event.name == PHASE else data["seconds"]
        return {LedgerClass(kind): max(0.0, float(value)) for kind, value in seconds.items()}
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        who = f"generation {event.generation}, node {event.node}, rank {event.rank}"
        raise LedgerError(f"{who}: a {event.name} event without classes and seconds: {data}") from error


def _total(event: Event) -> float:
    return sum(_seconds(event).values())


def _clipped(event: Event, node: NodeTime, generation: RecordedGeneration) -> Mapping[LedgerClass, float]:
    """The event's seconds within the node's paid time; time outside it costs nothing.

    Only a completed step that is in the final weights is useful: all other step time is given the class of its waste.
    """
    seconds = _seconds(event)
    outside = max(0.0, node.start - (event.t_mono - sum(seconds.values()))) + max(0.0, event.t_mono - node.end)
    for kind in sorted(seconds, key=seconds.__getitem__, reverse=True):
        taken = min(outside, seconds[kind])
        seconds[kind] -= taken
        outside -= taken
    if event.name == PHASE:
        turned = _incomplete_class(generation)
        # After a planned end, evaluation and waiting are what the rank says: no step was cut off in them.
        wasted_kinds = (LedgerClass.USEFUL_STEP,) if turned is LedgerClass.SHUTDOWN else _WASTED
    elif event.step is None or not generation.keeps(event.step):
        turned, wasted_kinds = LedgerClass.REDONE_STEP, _WASTED
    elif event.data.get("skipped"):
        turned, wasted_kinds = LedgerClass.SKIPPED_STEP, _WASTED
    else:
        return seconds
    wasted = sum(seconds.pop(kind, 0.0) for kind in wasted_kinds)
    if wasted:
        seconds[turned] = seconds.get(turned, 0.0) + wasted
    return seconds


def _incomplete_class(generation: RecordedGeneration) -> LedgerClass:
    """The class of step time that a rank reports at its end: the step that it belongs to was never completed."""
    if generation.reason == EndReason.HANG:
        return LedgerClass.HANG
    if generation.unplanned:
        return LedgerClass.INTERRUPTION
    if generation.reason in (None, Outcome.COMPLETED):  # running, or between the last step and the exit
        return LedgerClass.SHUTDOWN
    return LedgerClass.REDONE_STEP  # such as the step that gave a non-finite loss


def _balance(classes: dict[LedgerClass, int], paid: int, who: str) -> None:
    """Make the classes sum to the paid time: a gap is unattributed, a small overlap comes off the largest class."""
    rest = paid - sum(classes.values())
    if rest >= 0:
        classes[LedgerClass.UNATTRIBUTED] = classes.get(LedgerClass.UNATTRIBUTED, 0) + rest
        return
    if -rest > max(TOLERANCE_SECONDS * MICRO, TOLERANCE_SHARE * paid):
        listed = " + ".join(f"{kind} {micros / MICRO:.3f}" for kind, micros in classes.items() if micros)
        raise LedgerError(
            f"{who}: its intervals exceed its paid time by {-rest / MICRO:.3f} s: {listed} > paid {paid / MICRO:.3f} s"
        )
    classes[max(classes, key=classes.__getitem__)] += rest


def _micros(seconds: float) -> int:
    return round(seconds * MICRO)
