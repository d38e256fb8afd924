"""Replay of a finished job, which estimates the cost of the job with another pool, price or
checkpoint interval.

All times are means over the ranks of the gang, which step together.

Each generation except the last lasts as long as recorded. Its steps take their recorded mean time,
with one checkpoint every `interval` steps. If the generation was interrupted, the next one redoes
the steps after its last durable checkpoint. The last generation lasts until all steps are done.
Pauses between generations keep their length.

An interruption just before a checkpoint undoes a whole interval more than one just after it, and
which of the two occurs is chance. With another interval or speed, the run is therefore replayed
many times, with start-up and step times that vary as much as the recorded times. The result is the
mean and the central 90 % range of these replays.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from statistics import fmean, median, pstdev
from typing import Any

from ebbflow.core.event_payloads import CommitPayload, StepPayload
from ebbflow.core.events import COMMIT, STEP, Event, LedgerClass, select_events
from ebbflow.core.grouping import group_by_key
from ebbflow.cost.amounts import format_duration, format_percent, format_usd, read_decimal
from ebbflow.cost.errors import ReplayError
from ebbflow.cost.jobs import read_job
from ebbflow.cost.ledger.bills import NodeBill, count_machines
from ebbflow.cost.ledger.generations import RecordedGeneration, read_generations
from ebbflow.cost.ledger.ledger import Ledger, fold
from ebbflow.cost.ledger.pricing import PoolName, PriceCurve, Pricing, parse_pool, select_plans
from ebbflow.cost.ledger.timeline import MICRO, compute_rank_times
from ebbflow.cost.report.figures import read_price_curves

_DRAWS = 200
_SEED = 17
_STEPPING = (
    LedgerClass.USEFUL_STEP,
    LedgerClass.DATA_WAIT,
    LedgerClass.EVALUATION,
    LedgerClass.REDONE_STEP,
    LedgerClass.SKIPPED_STEP,
)


@dataclass(frozen=True, kw_only=True)
class GenerationTimes:
    """Paid time of one generation by use, in seconds.

    The times are means over the generation's ranks.
    """

    begin: float  # Unix time of the start
    seconds: float  # the whole paid time
    start: float  # time before the first step
    stepping: float  # time in steps, including waiting for data and evaluations
    stall: float  # time in which checkpoints stalled training
    tail: float  # time of a hang, and time after the last event of an interrupted generation
    shutdown: float  # time after the last step, and unattributed time
    interrupted: bool  # whether the generation's end was unplanned
    steps: int
    saves: int
    nodes: int  # number of machines that are paid for
    curve: PriceCurve  # price of one machine with its root volume


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """Measured figures of a finished job, which are the input of a replay."""

    steps: int  # number of steps in the final weights
    interval_steps: int  # median number of steps between two checkpoints
    step_seconds: float  # mean seconds of a step, with data and evaluations
    stall_seconds: float  # mean seconds for which a checkpoint stalls the gang
    durable_seconds: float  # median seconds until a checkpoint is durable
    shutdown: float  # mean seconds after the last step of a generation with a planned end
    # step_deviation, start_deviation: standard deviations of the duration of a step and of a start,
    # in seconds
    step_deviation: float
    start_deviation: float
    generations: tuple[GenerationTimes, ...]


def replay(
    events: Sequence[Event],
    *,
    pool: str | None = None,
    usd_per_hour: Decimal | None = None,
    interval_steps: int | None = None,
    interruptions: bool = True,
) -> dict[str, Any]:
    """Compute three costs of a run: as measured, as predicted for the same settings, and for
    changed settings.

    The difference between measured and predicted dollars shows how well the model fits this run.

    Args:
        pool: Words that together match exactly one recorded pool, such as "g5.xlarge spot
            use1-az4"; None for the pool of the run.
        usd_per_hour: Dollars per hour of one node, without its root volume, in place of recorded
            prices.
        interval_steps: Steps between two checkpoints; None for the interval of the run.
        interruptions: Whether the recorded interruptions happen in the replay.

    Returns:
        JSON values: "measured", "predicted" and "what_if" each have dollars, paid seconds and
        redone steps.

    Raises:
        ReplayError: The pool is unknown or ambiguous, or there is nothing to replay.
        LedgerError: The events contradict each other.
    """
    if usd_per_hour is not None and not (usd_per_hour.is_finite() and usd_per_hour >= 0):
        raise ReplayError(f"--usd-per-hour {usd_per_hour}: must be a number of dollars, 0 or more")
    if interval_steps is not None and interval_steps < 1:
        raise ReplayError(f"--interval {interval_steps}: must be at least 1 step")
    ordered = sorted(events, key=lambda event: (event.t_wall, event.t_mono))
    ledger = fold(ordered)
    run = _measure_run(ordered, ledger)
    price = ledger.nodes[-1].price
    if price.pool is None:
        raise ReplayError("the events hold no plan, so that the run has no price")
    predicted = _Replay(run=run, interval_steps=run.interval_steps).simulate()
    name: PoolName | str = " → ".join(_list_pools(ledger))
    curve = None
    speed = 1.0
    if pool is not None:
        name, curve, speed = _find_pool(ordered, pool)
    if usd_per_hour is not None:
        curve = PriceCurve(usd_per_hour + price.volume_usd_per_hour)
    interval = interval_steps or run.interval_steps
    asked = {
        "run": run,
        "curve": curve,
        "interval_steps": interval,
        "speed": speed,
        "interruptions": interruptions,
    }
    chance = random.Random(_SEED)
    varied = interruptions and (interval, speed) != (run.interval_steps, 1.0)
    if varied:
        runs = [_Replay(**asked, chance=chance).simulate() for _ in range(_DRAWS)]
    else:
        runs = [_Replay(**asked).simulate()]
    measured = ledger.total_usd
    return {
        "job": ordered[0].job,
        "price_kind": ledger.price_kind,
        "measured": {
            "pool": " → ".join(_list_pools(ledger)),
            "interval_steps": run.interval_steps,
            "usd": float(measured),
            "paid_seconds": sum(generation.seconds for generation in run.generations),
            "redone_steps": ledger.redone_steps,
        },
        "predicted": {
            "error_share": float((predicted.usd - measured) / measured) if measured else 0.0,
            **predicted.to_json(),
        },
        "what_if": {
            "pool": str(name),
            "interval_steps": interval,
            "speed": speed,
            **_summarize(runs),
        },
        "kind": "simulated",
    }


def render(found: dict[str, Any]) -> str:
    """Render the result of `replay` as text."""
    measured = found["measured"]
    predicted = found["predicted"]
    what_if = found["what_if"]

    def describe(run: dict[str, Any]) -> str:
        pool = f"{run['pool']}, a checkpoint every {run['interval_steps']} steps"
        return (
            f"{pool}, {format_duration(run['paid_seconds'])} paid, {run['redone_steps']} steps "
            "redone"
        )

    error = format_percent(predicted["error_share"], 2)
    low, high = map(format_usd, what_if["usd_range"])
    difference = format_usd(what_if["usd"] - predicted["usd"])
    if what_if["speed"] == 1.0:
        speed = ""
    else:
        speed = f"; speed × {what_if['speed']:.3g} as the plan estimated"
    return "\n".join(
        [
            f"replay of job {found['job']} (prices: {found['price_kind']})",
            f"  measured   {format_usd(measured['usd'])}  {describe(measured)}",
            f"  predicted  {format_usd(predicted['usd'])}  the same run by the model: error "
            f"{error}",
            f"  what if    {format_usd(what_if['usd'])}  {describe(what_if)}, simulated",
            *(
                [
                    f"             {low} to {high} in nine of ten replays with other start-ups "
                    "and step times"
                ]
                if low != high
                else []
            ),
            f"  difference {difference}  what if less predicted, so that the model's error "
            "cancels out",
            "  interruptions keep their recorded times; the other pool's own hazard is not "
            f"replayed{speed}",
        ]
    )


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help=(
            "what a finished run would have cost in another pool, or with another checkpoint "
            "interval"
        ),
    )
    parser.add_argument(
        "job", metavar="RUN", help="a job's name, 'latest', or the folder or s3:// URI of a job"
    )
    parser.add_argument(
        "--pool",
        default=None,
        metavar="WORDS",
        help="such as 'g5.xlarge spot use1-az4', as recorded",
    )
    parser.add_argument(
        "--usd-per-hour", default=None, help="another price of a node, without its volume"
    )
    parser.add_argument(
        "--interval", type=int, default=None, metavar="STEPS", help="steps between checkpoints"
    )
    parser.add_argument(
        "--no-interruptions", action="store_true", help="as if the run had not been interrupted"
    )
    parser.add_argument(
        "--store", default=None, metavar="URI", help="the job's store, if not known to this machine"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_replay)


def _measure_run(ordered: Sequence[Event], ledger: Ledger) -> RecordedRun:
    recorded = read_generations(ordered)
    measured = [
        _measure_generation(ordered, ledger, generation) for generation in recorded.values()
    ]
    generations = tuple(generation for generation in measured if generation.seconds > 0)
    executed = sum(generation.steps for generation in generations)
    saves = sum(generation.saves for generation in generations)
    taken = [event for event in select_events(ordered, StepPayload) if event.step is not None]
    kept = [event.step or 0 for event in taken if recorded[event.generation].keeps(event.step or 0)]
    steps = max(kept, default=0)
    if not executed or not steps:
        raise ReplayError("the run took no step that counts: there is nothing to replay")
    durable = [
        float(event.payload.seconds)
        for event in select_events(ordered, CommitPayload)
        if event.payload.seconds
    ]
    shutdowns = [generation.shutdown for generation in generations if not generation.interrupted]
    return RecordedRun(
        steps=steps,
        interval_steps=_measure_interval(ordered) or steps,
        step_seconds=sum(generation.stepping for generation in generations) / executed,
        stall_seconds=sum(generation.stall for generation in generations) / saves if saves else 0.0,
        durable_seconds=median(durable) if durable else 0.0,
        shutdown=fmean(shutdowns) if shutdowns else 0.0,
        step_deviation=_step_deviation(taken),
        start_deviation=pstdev(generation.start for generation in generations),
        generations=generations,
    )


def _list_pools(ledger: Ledger) -> list[str]:
    """Return the pools in which the job ran, in order of first use."""
    return list(dict.fromkeys(str(bill.price.pool) for bill in ledger.nodes))


def _step_deviation(taken: Sequence[Event[StepPayload]]) -> float:
    """Return the standard deviation of one rank's step times in seconds.

    It is measured within each generation.
    """
    first = min(event.rank for event in taken)
    spent = (
        (event.generation, event.payload.seconds or {}) for event in taken if event.rank == first
    )
    seconds = group_by_key(
        (number, sum(float(classes.get(kind, 0.0)) for kind in _STEPPING))
        for number, classes in spent
    )
    return math.sqrt(
        sum(len(second) * pstdev(second) ** 2 for second in seconds.values())
        / sum(map(len, seconds.values()))
    )


def _measure_generation(
    events: Sequence[Event], ledger: Ledger, generation: RecordedGeneration
) -> GenerationTimes:
    bills = [bill for bill in ledger.nodes if bill.node.generation == generation.number]
    nodes = [bill.node for bill in bills]
    ranks = [rank for node in nodes for rank in compute_rank_times(node, generation)]
    count = max(1, len(ranks)) * MICRO

    def seconds(*kinds: LedgerClass) -> float:
        return sum(rank.classes.get(kind, 0) for rank in ranks for kind in kinds) / count

    mine = [event for event in events if event.generation == generation.number]
    boot = sum(map(_boot_seconds, bills)) / max(1, len(nodes))
    begin = min((node.started_wall for node in nodes), default=generation.started_wall)
    return GenerationTimes(
        begin=begin - boot,
        seconds=boot + sum(rank.paid for rank in ranks) / count,
        start=boot + seconds(LedgerClass.STARTUP, LedgerClass.RESTORE),
        stepping=seconds(*_STEPPING),
        stall=seconds(LedgerClass.CHECKPOINT_STALL),
        tail=seconds(LedgerClass.INTERRUPTION, LedgerClass.HANG),
        shutdown=seconds(LedgerClass.SHUTDOWN, LedgerClass.PROFILING, LedgerClass.UNATTRIBUTED),
        interrupted=generation.unplanned,
        steps=len({event.step for event in mine if event.name == STEP}),
        saves=len({event.step for event in mine if event.name == COMMIT}),
        nodes=max(1, count_machines(bills)),
        curve=bills[0].price.node_curve if bills else PriceCurve(Decimal(0)),
    )


def _boot_seconds(bill: NodeBill) -> float:
    return sum(extra.seconds for extra in bill.extras if extra.ledger_class is LedgerClass.BOOT)


def _measure_interval(events: Sequence[Event]) -> int | None:
    """Return the median number of steps from a start or commit to the next commit; None without
    commits.
    """
    gaps = []
    commits = (event for event in events if event.name == COMMIT)
    by_generation = group_by_key(
        (event.generation, event.step) for event in commits if event.step is not None
    )
    for number, committed in by_generation.items():
        mine = [event for event in events if event.name == STEP and event.generation == number]
        reached = [min((event.step or 1 for event in mine), default=1) - 1, *sorted(committed)]
        gaps += [later - earlier for earlier, later in pairwise(reached) if later > earlier]
    if gaps:
        return max(1, round(median(gaps)))
    return None


@dataclass(kw_only=True)
class _Replay:
    """Replay in progress: the changed settings, and totals over the generations replayed so far."""

    run: RecordedRun
    interval_steps: int
    curve: PriceCurve | None = None  # of another pool; None: each generation has its own
    speed: float = 1.0
    interruptions: bool = True
    chance: random.Random | None = None
    done: int = 0
    usd: Decimal = Decimal(0)
    paid_seconds: float = 0.0
    redone_steps: int = 0
    saves: int = 0
    interrupted: int = 0

    def simulate(self) -> _Replay:
        """Replay all generations, and return self."""
        run = self.run
        at = run.generations[0].begin
        previous = None
        for number, generation in enumerate(run.generations):
            if previous is not None:
                at += max(0.0, generation.begin - previous.begin - previous.seconds)
            if generation.steps and self.interruptions:
                own = generation.stepping / generation.steps
            else:
                own = 0.0
            step = (own or run.step_seconds) / self.speed
            if not self.interruptions or number == len(run.generations) - 1:
                seconds = generation.start + self._finish(step) + run.shutdown
                self._pay(at, seconds, generation)
                break
            at = self._simulate_generation(at, generation, step)
            previous = generation
            if self.done >= run.steps:
                break
        return self

    def _pay(self, begin: float, seconds: float, generation: GenerationTimes) -> float:
        """Charge the whole gang of a generation for `seconds` from the Unix time `begin` on.

        Return the Unix time of the end.
        """
        start = round(begin * MICRO)
        curve = self.curve or generation.curve
        self.usd += curve.cost(start, start + round(seconds * MICRO)) * generation.nodes
        self.paid_seconds += seconds
        return begin + seconds

    def _remaining_seconds(self, step: float) -> float:
        """Return the seconds that all remaining steps and checkpoints take.

        step: seconds of one step
        """
        left = self.run.steps - self.done
        return left * step + -(-left // self.interval_steps) * self.run.stall_seconds

    def _finish(self, step: float) -> float:
        """Count all remaining steps as done.

        Return the seconds that these steps and their checkpoints take.
        """
        seconds = self._remaining_seconds(step)
        self.saves += -(-(self.run.steps - self.done) // self.interval_steps)
        self.done = self.run.steps
        return seconds

    def _simulate_generation(self, begin: float, generation: GenerationTimes, step: float) -> float:
        """Replay one generation until its recorded end or the job's last step.

        Return the Unix time of its end.
        """
        run = self.run
        working = (
            generation.seconds
            - generation.tail
            - generation.start
            - (0.0 if generation.interrupted else generation.shutdown)
        )
        if self.chance is not None:
            working += self.chance.gauss(
                0.0, math.hypot(run.start_deviation, run.step_deviation * generation.steps**0.5)
            )
        working = max(0.0, working)
        if self._remaining_seconds(step) <= working:
            seconds = generation.start + self._finish(step) + run.shutdown
            return self._pay(begin, seconds, generation)
        cycle = self.interval_steps * step + run.stall_seconds
        if cycle > 0:
            cycles, rest = divmod(working, cycle)
        else:
            cycles, rest = (0.0, 0.0)
        if step > 0:
            partial = int(rest / step)
        else:
            partial = 0
        taken = int(cycles) * self.interval_steps + min(self.interval_steps, partial)
        if cycle > 0:
            durable = int(max(0.0, working - run.durable_seconds) / cycle)
        else:
            durable = 0
        left = run.steps - self.done
        # Before a planned end (budget, deadline) the gang saves, so that no step is redone.
        kept = min(durable * self.interval_steps if generation.interrupted else taken, taken, left)
        self.saves += int(cycles)
        self.redone_steps += min(taken, left) - kept
        self.done += kept
        self.interrupted += generation.interrupted
        return self._pay(begin, generation.seconds, generation)

    def to_json(self) -> dict[str, Any]:
        return {
            "usd": float(self.usd),
            "paid_seconds": self.paid_seconds,
            "redone_steps": self.redone_steps,
            "saves": self.saves,
            "interruptions": self.interrupted,
        }


def _summarize(runs: Sequence[_Replay]) -> dict[str, Any]:
    """Return the means of several replays, and the central 90 % range of their dollars."""
    every = [run.to_json() for run in runs]
    usd = sorted(run["usd"] for run in every)
    edge = len(usd) // 20
    counts = {
        name: round(fmean(run[name] for run in every))
        for name in ("redone_steps", "saves", "interruptions")
    }
    means = {name: fmean(run[name] for run in every) for name in ("usd", "paid_seconds")}
    return {**means, "usd_range": [usd[edge], usd[-1 - edge]], **counts}


def _find_pool(events: Sequence[Event], words: str) -> tuple[PoolName, PriceCurve, float]:
    """Find the only recorded pool whose name contains all words.

    Return its name, prices and relative speed.
    """
    plan = select_plans(events)[-1].data
    curves = read_price_curves(plan, Pricing.of(events).history)
    wanted = words.lower().replace("on_demand", "on-demand").split()
    found = [pool for pool in curves if all(word in str(pool).lower().split() for word in wanted)]
    if len(found) != 1:
        known = "\n".join(f"  {pool}" for pool in sorted(map(str, found or curves)))
        if found:
            which = "more than one recorded pool is"
        else:
            which = "no recorded pool is"
        raise ReplayError(
            f"{which} {words!r}; name one of\n{known}\nor state a price with --usd-per-hour"
        )
    own = plan["chosen"].get("tokens_per_second")
    speeds = [
        candidate.get("tokens_per_second")
        for candidate in plan.get("ranked", [])
        if parse_pool(candidate) == found[0]
    ]
    return found[0], curves[found[0]], speeds[0] / own if speeds and speeds[0] and own else 1.0


def _replay(arguments: argparse.Namespace) -> int:
    try:
        if arguments.usd_per_hour is None:
            price = None
        else:
            price = read_decimal(arguments.usd_per_hour)
    except ValueError as error:
        raise ReplayError(f"--usd-per-hour: {error}") from None
    found = replay(
        read_job(arguments.job, arguments.store),
        pool=arguments.pool,
        usd_per_hour=price,
        interval_steps=arguments.interval,
        interruptions=not arguments.no_interruptions,
    )
    print(json.dumps(found, indent=1, allow_nan=False) if arguments.json else render(found))
    return 0
