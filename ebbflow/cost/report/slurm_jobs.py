"""Slurm jobs of a training job, as rows of its report: where each ran, for how long, and why it
ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, TypedDict

from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import Event, select_events
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_usd

HEADER = ("Slurm job", "partition", "nodes", "node-hours", "dollars", "ended", "by Slurm")
_UNKNOWN = "unknown"


class SlurmJobRow(TypedDict):
    """One Slurm job, as JSON in the report."""

    job_id: str
    partition: str | None
    nodes: int | None
    node_hours: float | None  # None before its end, or without a start
    # None without a stated price; missing in reports of versions that knew no prices
    usd: NotRequired[float | None]
    cause: str | None  # why it ended; None if its end is not recorded
    state: str | None  # Slurm's word
    reason: str | None
    # Why this partition, and the time limit of the order; missing in reports of older versions
    why: NotRequired[str | None]
    most_minutes: NotRequired[int | None]  # None: the partition's own


def summarize_slurm_jobs(events: Sequence[Event]) -> list[SlurmJobRow]:
    """Return the job's Slurm jobs in the order of their submission."""
    newest: dict[str, SlurmJobPayload] = {}
    submitted: dict[str, SlurmJobPayload] = {}
    for event in select_events(events, SlurmJobPayload):
        payload = event.payload
        known = newest.get(payload.job_id)
        if known is None or known.does != "ended":
            newest[payload.job_id] = payload
        if payload.does != "ended":
            submitted.setdefault(payload.job_id, payload)
    return [_make_row(payload, submitted.get(payload.job_id)) for payload in newest.values()]


def format_slurm_rows(rows: Sequence[SlurmJobRow]) -> list[tuple[str, ...]]:
    """Format the Slurm jobs as rows with the columns of `HEADER`."""
    return [_format_row(row) for row in rows]


def list_reasons(rows: Sequence[SlurmJobRow]) -> list[tuple[str, str]]:
    """Return pairs of a Slurm job's id and the reason for its partition and time limit.

    Jobs without a recorded reason are left out.
    """
    reasons = []
    for row in rows:
        why = row.get("why")
        minutes = row.get("most_minutes")
        if why:
            limit = f", {minutes} min at most" if minutes else ""
            reasons.append((one_line(row["job_id"]), one_line(why) + limit))
    return reasons


def _format_row(row: SlurmJobRow) -> tuple[str, ...]:
    hours = row["node_hours"]
    usd = row.get("usd")
    return (
        one_line(row["job_id"]),
        one_line(row["partition"] or "default"),
        str(row["nodes"] or _UNKNOWN),
        _UNKNOWN if hours is None else f"{hours:.4f}",
        _UNKNOWN if usd is None else format_usd(usd, 4),
        one_line(row["cause"] or _UNKNOWN),
        one_line(row["reason"] or row["state"] or ""),
    )


def _count_node_hours(payload: SlurmJobPayload) -> float | None:
    """Return the node-hours of an ended Slurm job, by Slurm's clock; None if its times are unknown."""
    if not payload.nodes or not payload.started_utc or not payload.stopped_utc:
        return None
    return payload.nodes * max(0.0, payload.stopped_utc - payload.started_utc) / 3600


def _make_row(payload: SlurmJobPayload, submitted: SlurmJobPayload | None) -> SlurmJobRow:
    """Make the row of a Slurm job from its newest event and the event of its submission."""
    hours = _count_node_hours(payload)
    price = payload.usd_per_node_hour
    return {
        "job_id": payload.job_id,
        "partition": payload.partition,
        "nodes": payload.nodes,
        "node_hours": hours,
        "usd": None if hours is None or price is None else hours * price,
        "cause": payload.cause,
        "state": payload.state,
        "reason": payload.reason,
        "why": None if submitted is None else submitted.why,
        "most_minutes": None if submitted is None else submitted.most_minutes,
    }
