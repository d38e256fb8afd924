"""What each dollar was paid for: the ledger by cause, so that an interruption carries all that it has cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from ebbflow.cost.ledger.generations import Generation
from ebbflow.cost.money import apportion
from ebbflow.infra.ledger_classes import LedgerClass

WORK = "useful work"
_OWN = {
    LedgerClass.USEFUL_STEP: WORK,
    LedgerClass.DATA_WAIT: "waiting for data",
    LedgerClass.EVALUATION: "evaluation",
    LedgerClass.CHECKPOINT_STALL: "saves",
    LedgerClass.SHUTDOWN: "start and end",
    LedgerClass.UNATTRIBUTED: "unattributed",
    LedgerClass.MINIMUM_CHARGE: "minimum charge",
    LedgerClass.HANG: "interruption: hang",
    LedgerClass.SKIPPED_STEP: "steps left out",
}
# What only a generation's end has made necessary: its own end for the first two, the end before it for the others.
_OF_ITS_END = (LedgerClass.REDONE_STEP, LedgerClass.INTERRUPTION)
_OF_THE_END_BEFORE = (LedgerClass.STARTUP, LedgerClass.RESTORE, LedgerClass.IDLE)
_NOT_RECORDED = "lost without a word"


@dataclass(frozen=True, kw_only=True)
class CauseLine:
    """One cause with its paid time and dollars, as the ledger's lines have them by class."""

    cause: str
    rank_microseconds: int
    usd: Decimal


def blame(generations: Mapping[int, Generation]) -> dict[int, str]:
    """For each generation, the cause of its having to start: the unplanned end before it, or none."""
    found, before = {}, ""
    for number in sorted(generations):
        found[number] = before
        before = interruption(generations[number]) if generations[number].unplanned else ""
    return found


def interruption(generation: Generation) -> str:
    return f"interruption: {str(generation.reason or _NOT_RECORDED).replace('_', ' ')}"


def cause_of(kind: LedgerClass, generation: Generation, started_by: str) -> str:
    """started_by: as `blame` has it. A step redone after a planned end (a budget) was lost to that end."""
    if kind in _OF_ITS_END:
        return interruption(generation)
    if kind is LedgerClass.IDLE:
        return interruption(generation) if generation.unplanned else "idle"
    if kind in _OF_THE_END_BEFORE:
        return started_by or "start and end"
    return _OWN[kind]


def cause_of_job(cause: str) -> str:
    """Of a Batch job that ended, as Batch tells it, before its agents said a word."""
    return "start and end" if cause == "ended" else f"interruption: {cause.replace('_', ' ')} before the first word"


def cause_lines(micros: Mapping[str, int], usd: Mapping[str, Decimal], total_usd: Decimal) -> tuple[CauseLine, ...]:
    """Work first, then the dearest; their dollars sum to the rounded total."""
    names = sorted(micros, key=lambda name: (name != WORK, -usd[name], name))
    amounts = apportion([usd[name] for name in names], total=total_usd)
    return tuple(
        CauseLine(cause=name, rank_microseconds=micros[name], usd=amount)
        for name, amount in zip(names, amounts, strict=True)
        if micros[name]
    )
