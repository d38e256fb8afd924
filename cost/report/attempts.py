"""The attempts of a job on AWS Batch: where each was placed and why, what was planned of it, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from ebbflow.cost.capacity.history import UNKNOWN, PastAttempt, history_of
from ebbflow.cost.ledger.ledger import Ledger
from ebbflow.cost.money import rounded
from ebbflow.cost.report.number_text import duration, number, plain, usd
from ebbflow.infra.events import BATCH_ATTEMPT, Event

ATTEMPT_HEADER = ("attempt", "ended", "waited", "hours", "planned", "USD/h", "planned", "USD")
PLACE_HEADER = ("attempt", "where", "why")
_NOTHING_TOLD = "not told"


def attempt_figures(events: Sequence[Event], ledger: Ledger) -> list[dict[str, Any]]:
    """Plain JSON, one for each placement, oldest first; empty where nothing was placed on Batch. events: by time.

    planned: dollars per hour of the gang, and hours and dollars to finish the rest of the job there (estimated).
    actual: wait_seconds for capacity, hours from Batch's start to its stop, dollars of the ledger, and their quotient,
    dollars per hour; None: not told. ended: the cause, "" while nobody told it. reason: Batch's words.
    """
    words = {str(event.data.get("job_id")): event.data for event in events if event.name == BATCH_ATTEMPT}
    paid = _paid(ledger)
    history = history_of(events)
    return [_figures(number, one, words, paid) for number, one in enumerate(history.attempts, start=1)]


def attempt_rows(attempts: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """`ATTEMPT_HEADER` of each: hours and dollars per hour beside what was planned."""
    return [
        (
            str(one["number"]),
            _ended(one),
            duration(one["actual"]["wait_seconds"]),
            number(one["actual"]["hours"]),
            number(one["planned"]["hours"]),
            usd(one["actual"]["usd_per_hour"], 4),
            usd(one["planned"]["usd_per_hour"], 4),
            usd(one["actual"]["usd"], 4),
        )
        for one in attempts
    ]


def place_rows(attempts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """`PLACE_HEADER` of each."""
    return [(str(one["number"]), plain(one["where"]), plain(one["why"])) for one in attempts]


def place_lines(attempts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where each was placed and why, a line for each."""
    return [f"{name}: {where}: {why}" for name, where, why in place_rows(attempts)]


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
    dollars = None if spent is None else float(rounded(spent))
    return {
        "wait_seconds": None if created is None or waited is None else max(0.0, waited - created),
        "hours": hours,
        "usd": dollars,
        "usd_per_hour": dollars / hours if dollars is not None and hours else None,
    }


def _paid(ledger: Ledger) -> dict[str, Decimal]:
    """Dollars by Batch job."""
    found: dict[str, Decimal] = {}
    for bill in (*ledger.nodes, *ledger.silent):
        if bill.job is not None:
            found[bill.job.job_id] = found.get(bill.job.job_id, Decimal(0)) + bill.usd
    return found


def _ended(one: Mapping[str, Any]) -> str:
    cause = plain(one["ended"] or "")
    return _NOTHING_TOLD if cause in ("", UNKNOWN) else cause.replace("_", " ")
