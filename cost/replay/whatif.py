"""Run a finished run again on paper: its own interruptions at their moments, with another price, speed or interval.

A generation that ended before the work was done lives as long as it did; within it steps take what they took in it on
the mean, with a save each `interval` steps. If it was cut short, what came after the last durable one is done again by
the next. The last recorded generation lives until the work is done. Wall time between generations is as it was. Where
an interruption falls beside the moment of a save, it may come out either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from cost.ledger.price_curve import PriceCurve
from cost.ledger.timeline import MICRO
from cost.replay.facts import Facts, Life


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to change. curve: price of one node; speed: work per second over the run's; interval_steps: of saves."""

    pool: str
    curve: PriceCurve
    interval_steps: int
    speed: float = 1.0
    interruptions: bool = True


@dataclass(frozen=True, kw_only=True)
class Answer:
    """usd, seconds: paid, of the gang. finished_wall: Unix time of the end."""

    usd: Decimal
    paid_seconds: float
    redone_steps: int
    saves: int
    interruptions: int
    finished_wall: float


@dataclass
class _Run:
    facts: Facts
    ask: Question
    done: int = 0  # steps in the newest commit
    usd: Decimal = Decimal(0)
    paid: float = 0.0
    redone: int = 0
    saves: int = 0
    cuts: int = 0

    def pay(self, begin: float, seconds: float) -> float:
        """Returns the end."""
        start = round(begin * MICRO)
        self.usd += self.ask.curve.usd(start, start + round(seconds * MICRO)) * self.facts.nodes
        self.paid += seconds
        return begin + seconds


def answer(facts: Facts, ask: Question) -> Answer:
    """Deterministic; the same question as the run itself is how well this predicts (`error_share`)."""
    run = _Run(facts, ask)
    end = at = facts.lives[0].begin
    previous: Life | None = None
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
    return Answer(
        usd=run.usd,
        paid_seconds=run.paid,
        redone_steps=run.redone,
        saves=run.saves,
        interruptions=run.cuts,
        finished_wall=end,
    )


def error_share(facts: Facts, predicted: Answer) -> float:
    """Predicted less measured dollars over measured."""
    measured = facts.ledger.total_usd
    return float((predicted.usd - measured) / measured) if measured else 0.0


def _rest(run: _Run, step: float) -> float:
    """Seconds of all that is left to do, its saves included. step: seconds of one."""
    left = run.facts.steps - run.done
    saves = -(-left // run.ask.interval_steps)
    run.saves += saves
    return left * step + saves * run.facts.stall_seconds


def _cut_short(run: _Run, begin: float, life: Life, step: float) -> float:
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
