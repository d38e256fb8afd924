"""Run a finished job again on paper, with another pool, price or checkpoint interval.

All times are of the gang: the mean over its ranks, which step together.

A generation that ended before the work was done lives as long as it did; within it steps take what they took in it on
the mean, with a save each `interval` steps. If it was cut short, what came after the last durable one is done again by
the next. The last recorded generation lives until the work is done. Wall time between generations is as it was. Where
an interruption falls beside the moment of a save, it may come out either way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ebbflow.cost.amounts import format_duration, format_percent, format_usd
from ebbflow.cost.errors import ReplayError
from ebbflow.cost.jobs import read_job
from ebbflow.cost.ledger.bills import count_machines
from ebbflow.cost.ledger.generations import RecordedGeneration, read_generations
from ebbflow.cost.ledger.ledger import Ledger, fold
from ebbflow.cost.ledger.pricing import PoolName, PriceCurve, Pricing, parse_pool
from ebbflow.cost.ledger.timeline import MICRO, compute_rank_times
from ebbflow.cost.report.figures import read_price_curves
from ebbflow.infra.events import COMMIT, PLAN, STEP, Event, LedgerClass

_STEPPING = (
    LedgerClass.USEFUL_STEP,
    LedgerClass.DATA_WAIT,
    LedgerClass.EVALUATION,
    LedgerClass.REDONE_STEP,
    LedgerClass.SKIPPED_STEP,
)
_TAIL = (LedgerClass.INTERRUPTION, LedgerClass.HANG)


@dataclass(frozen=True, kw_only=True)
class GenerationTimes:
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
class RecordedRun:
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
    lives: tuple[GenerationTimes, ...]
    paid_seconds: float
    ledger: Ledger


def measure_run(events: Sequence[Event]) -> RecordedRun:
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
    return RecordedRun(
        job=ordered[0].job,
        nodes=max(1, count_machines([bill for bill in ledger.nodes if bill.node.generation == newest])),
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


def _life(events: Sequence[Event], ledger: Ledger, generation: RecordedGeneration) -> GenerationTimes:
    mine = [bill.node for bill in ledger.nodes if bill.node.generation == generation.number]
    ranks = [rank for node in mine for rank in compute_rank_times(node, generation)]
    count = max(1, len(ranks)) * MICRO

    def seconds(*kinds: LedgerClass) -> float:
        return sum(rank.classes.get(kind, 0) for rank in ranks for kind in kinds) / count

    own = [event for event in events if event.generation == generation.number]
    return GenerationTimes(
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


def _kept(events: Sequence[Event], generations: dict[int, RecordedGeneration]) -> int:
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


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """What to change. curve: price of one node; speed: work per second over the run's; interval_steps: of saves."""

    pool: str
    curve: PriceCurve
    interval_steps: int
    speed: float = 1.0
    interruptions: bool = True


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """usd, seconds: paid, of the gang. finished_wall: Unix time of the end."""

    usd: Decimal
    paid_seconds: float
    redone_steps: int
    saves: int
    interruptions: int
    finished_wall: float


@dataclass
class _Run:
    facts: RecordedRun
    ask: WhatIf
    done: int = 0  # steps in the newest commit
    usd: Decimal = Decimal(0)
    paid: float = 0.0
    redone: int = 0
    saves: int = 0
    cuts: int = 0

    def pay(self, begin: float, seconds: float) -> float:
        """Returns the end."""
        start = round(begin * MICRO)
        self.usd += self.ask.curve.cost(start, start + round(seconds * MICRO)) * self.facts.nodes
        self.paid += seconds
        return begin + seconds


def simulate_run(facts: RecordedRun, ask: WhatIf) -> ReplayResult:
    """Deterministic; the same question as the run itself is how well this predicts (`compute_error_share`)."""
    run = _Run(facts, ask)
    end = at = facts.lives[0].begin
    previous: GenerationTimes | None = None
    for number, life in enumerate(facts.lives):
        at = life.begin if previous is None else at + max(0.0, life.begin - previous.begin - previous.seconds)
        step = (life.step_seconds or facts.step_seconds) if ask.interruptions else facts.step_seconds
        step /= ask.speed
        if not ask.interruptions or number == len(facts.lives) - 1:
            end = run.pay(at, life.start + _rest(run, step) + facts.shutdown)
            run.done = facts.steps
            break
        at = end = _cut_short(run, at, life, step)
        previous = life
        if run.done >= facts.steps:
            break
    return ReplayResult(
        usd=run.usd,
        paid_seconds=run.paid,
        redone_steps=run.redone,
        saves=run.saves,
        interruptions=run.cuts,
        finished_wall=end,
    )


def compute_error_share(facts: RecordedRun, predicted: ReplayResult) -> float:
    """Predicted less measured dollars over measured."""
    measured = facts.ledger.total_usd
    return float((predicted.usd - measured) / measured) if measured else 0.0


def _rest(run: _Run, step: float) -> float:
    """Seconds of all that is left to do, its saves included. step: seconds of one."""
    left = run.facts.steps - run.done
    saves = -(-left // run.ask.interval_steps)
    run.saves += saves
    return left * step + saves * run.facts.stall_seconds


def _cut_short(run: _Run, begin: float, life: GenerationTimes, step: float) -> float:
    """One generation up to its recorded end, or to the end of the work where that comes first; returns its end."""
    facts, ask = run.facts, run.ask
    working = max(0.0, life.seconds - life.tail - life.start - (0.0 if life.cut else life.shutdown))
    cycle = ask.interval_steps * step + facts.stall_seconds
    left = facts.steps - run.done
    needed = left * step + -(-left // ask.interval_steps) * facts.stall_seconds
    if needed <= working:
        end = run.pay(begin, life.start + _rest(run, step) + facts.shutdown)
        run.done = facts.steps
        return end
    cycles, rest = divmod(working, cycle) if cycle > 0 else (0.0, 0.0)
    taken = int(cycles) * ask.interval_steps + min(ask.interval_steps, int(rest / step) if step > 0 else 0)
    durable = int(max(0.0, working - facts.durable_seconds) / cycle) if cycle > 0 else 0
    # An end that was meant (a budget, a deadline) saves before it, and nothing is done again.
    kept = min(durable * ask.interval_steps if life.cut else taken, taken, left)
    run.saves += int(cycles)
    run.redone += min(taken, left) - kept
    run.done += kept
    run.cuts += life.cut
    return run.pay(begin, life.seconds)


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
    facts = measure_run(events)
    own_pool, own_curve = _own(facts)
    own = simulate_run(facts, WhatIf(pool=str(own_pool), curve=own_curve, interval_steps=facts.interval_steps))
    name, curve, speed = _asked(events, pool, own_pool, own_curve)
    if usd_per_hour is not None:
        curve = PriceCurve(usd_per_hour)
    interval = interval_steps or facts.interval_steps
    ask = WhatIf(pool=str(name), curve=curve, interval_steps=interval, speed=speed, interruptions=interruptions)
    other = simulate_run(facts, ask)
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
        "predicted": {"error_share": compute_error_share(facts, own), **_json(own)},
        "what_if": {"pool": str(name), "interval_steps": interval, "speed": speed, **_json(other)},
        "kind": "simulated",
    }


def render(found: dict[str, Any]) -> str:
    """Render the result of `replay` as text."""
    measured, predicted, what_if = found["measured"], found["predicted"], found["what_if"]

    def describe(run: dict[str, Any]) -> str:
        pool = f"{run['pool']}, a checkpoint every {run['interval_steps']} steps"
        return f"{pool}, {format_duration(run['paid_seconds'])} paid, {run['redone_steps']} steps redone"

    error = format_percent(predicted["error_share"], 2)
    difference = format_usd(what_if["usd"] - predicted["usd"])
    speed = "" if what_if["speed"] == 1.0 else f"; speed × {what_if['speed']:.3g} as the plan estimated"
    return "\n".join(
        [
            f"replay of job {found['job']} (prices: {found['price_kind']})",
            f"  measured   {format_usd(measured['usd'])}  {describe(measured)}",
            f"  predicted  {format_usd(predicted['usd'])}  the same run by the model: error {error}",
            f"  what if    {format_usd(what_if['usd'])}  {describe(what_if)}, simulated",
            f"  difference {difference}  what if less predicted, so that the model's error cancels out",
            f"  interruptions keep their recorded times; the other pool's own hazard is not replayed{speed}",
        ]
    )


def _json(found: ReplayResult) -> dict[str, Any]:
    return {
        "usd": float(found.usd),
        "paid_seconds": found.paid_seconds,
        "redone_steps": found.redone_steps,
        "saves": found.saves,
        "interruptions": found.interruptions,
    }


def _own(facts: RecordedRun) -> tuple[PoolName, PriceCurve]:
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
    curves = read_price_curves(plan, Pricing.of(events).history)
    wanted = words.lower().replace("on_demand", "on-demand").split()
    found = [pool for pool in curves if all(word in str(pool).lower().split() for word in wanted)]
    if len(found) != 1:
        known = "\n".join(f"  {pool}" for pool in sorted(map(str, found or curves)))
        which = "more than one recorded pool is" if found else "no recorded pool is"
        raise ReplayError(f"{which} {words!r}; name one of\n{known}\nor state a price with --usd-per-hour")
    return found[0], curves[found[0]], _speed(plan, found[0])


def _speed(plan: dict[str, Any], pool: PoolName) -> float:
    own = plan["chosen"].get("tokens_per_second")
    speeds = [one.get("tokens_per_second") for one in plan.get("ranked", []) if parse_pool(one) == pool]
    return speeds[0] / own if speeds and speeds[0] and own else 1.0
