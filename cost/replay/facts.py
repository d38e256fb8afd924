"""What a finished run has shown of itself: the few numbers from which `cost.replay.whatif` runs it again.

All times are of the gang: the mean over its ranks, which step together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from cost.errors import ReplayError
from cost.ledger.bills import machines
from cost.ledger.generations import Generation, read_generations
from cost.ledger.ledger import Ledger, fold
from cost.ledger.timeline import MICRO, rank_times
from infra.events import COMMIT, STEP, Event
from infra.ledger_classes import LedgerClass

_STEPPING = (
    LedgerClass.USEFUL_STEP,
    LedgerClass.DATA_WAIT,
    LedgerClass.EVALUATION,
    LedgerClass.REDONE_STEP,
    LedgerClass.SKIPPED_STEP,
)
_TAIL = (LedgerClass.INTERRUPTION, LedgerClass.HANG)


@dataclass(frozen=True, kw_only=True)
class Life:
    """One generation. begin: Unix time. seconds: paid; of them start: before the first step, tail: after the last sign
    of life, shutdown: after the last step. cut: it did not end as meant. steps, saves: how many it took.
    """

    begin: float
    seconds: float
    start: float
    stepping: float
    stall: float
    tail: float
    shutdown: float
    cut: bool
    steps: int
    saves: int

    @property
    def step_seconds(self) -> float:
        """The mean, with data and evaluations; 0 where it took none."""
        return self.stepping / self.steps if self.steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A run in numbers. nodes: machines that are paid for. steps: that the final weights are made of. interval_steps:
    between saves, the median.

    step_seconds: with data and evaluations, the mean; stall_seconds: of a save; durable_seconds: until it counts;
    shutdown: seconds after the last step of a generation that ended as meant, the mean.
    """

    job: str
    nodes: int
    steps: int
    interval_steps: int
    step_seconds: float
    stall_seconds: float
    durable_seconds: float
    shutdown: float
    lives: tuple[Life, ...]
    paid_seconds: float
    ledger: Ledger


def facts_of(events: Sequence[Event]) -> Facts:
    """events: of one job. Raises ReplayError for a run that took no step, LedgerError for contradictory events."""
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    ledger = fold(ordered)
    generations = read_generations(ordered)
    lives = tuple(_life(ordered, ledger, generation) for generation in generations.values())
    lives = tuple(life for life in lives if life.seconds > 0)
    executed, saves = sum(life.steps for life in lives), sum(life.saves for life in lives)
    steps = _kept(ordered, generations)
    if not executed or not steps:
        raise ReplayError("the run took no step that counts: there is nothing to replay")
    ends = [life.shutdown for life in lives if not life.cut]
    newest = max(generations)
    return Facts(
        job=ordered[0].job,
        nodes=max(1, machines([bill for bill in ledger.nodes if bill.node.generation == newest])),
        steps=steps,
        interval_steps=_interval(ordered, steps),
        step_seconds=sum(life.stepping for life in lives) / executed,
        stall_seconds=sum(life.stall for life in lives) / saves if saves else 0.0,
        durable_seconds=_durable(ordered),
        shutdown=fmean(ends) if ends else 0.0,
        lives=lives,
        paid_seconds=sum(life.seconds for life in lives),
        ledger=ledger,
    )


def _life(events: Sequence[Event], ledger: Ledger, generation: Generation) -> Life:
    mine = [bill.node for bill in ledger.nodes if bill.node.generation == generation.number]
    ranks = [rank for node in mine for rank in rank_times(node, generation)]
    count = max(1, len(ranks)) * MICRO

    def seconds(*kinds: LedgerClass) -> float:
        return sum(rank.classes.get(kind, 0) for rank in ranks for kind in kinds) / count

    own = [event for event in events if event.generation == generation.number]
    return Life(
        begin=min((node.started_wall for node in mine), default=generation.started_wall),
        seconds=sum(rank.paid for rank in ranks) / count,
        start=seconds(LedgerClass.STARTUP, LedgerClass.RESTORE),
        stepping=seconds(*_STEPPING),
        stall=seconds(LedgerClass.CHECKPOINT_STALL),
        tail=seconds(*_TAIL),
        shutdown=seconds(LedgerClass.SHUTDOWN, LedgerClass.UNATTRIBUTED),
        cut=generation.unplanned,
        steps=len({event.step for event in own if event.name == STEP}),
        saves=len({event.step for event in own if event.name == COMMIT}),
    )


def _kept(events: Sequence[Event], generations: dict[int, Generation]) -> int:
    taken = [event for event in events if event.name == STEP and event.step is not None]
    return max((event.step or 0 for event in taken if generations[event.generation].keeps(event.step or 0)), default=0)


def _interval(events: Sequence[Event], steps: int) -> int:
    """The usual distance of two commits, or of the first from the start; all steps where there is no commit."""
    gaps = []
    by_generation: dict[int, set[int]] = {}
    for event in events:
        if event.name == COMMIT and event.step is not None:
            by_generation.setdefault(event.generation, set()).add(event.step)
    for number, committed in by_generation.items():
        mine = [event for event in events if event.name == STEP and event.generation == number]
        reached = [min((event.step or 1 for event in mine), default=1) - 1, *sorted(committed)]
        gaps += [later - earlier for earlier, later in pairwise(reached) if later > earlier]
    return max(1, round(median(gaps))) if gaps else steps


def _durable(events: Sequence[Event]) -> float:
    known = [float(event.data["seconds"]) for event in events if event.name == COMMIT and event.data.get("seconds")]
    return median(known) if known else 0.0
