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


def summarize_slurm_jobs(events: Sequence[Event]) -> list[SlurmJobRow]:
    """Return the job's Slurm jobs in the order of their submission."""
    newest: dict[str, SlurmJobPayload] = {}
    for event in select_events(events, SlurmJobPayload):
        known = newest.get(event.payload.job_id)
        if known is None or known.does != "ended":
            newest[event.payload.job_id] = event.payload
    return [_make_row(payload) for payload in newest.values()]


def format_slurm_rows(rows: Sequence[SlurmJobRow]) -> list[tuple[str, ...]]:
    """Format the Slurm jobs as rows with the columns of `HEADER`."""
    return [_format_row(row) for row in rows]


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


def _make_row(payload: SlurmJobPayload) -> SlurmJobRow:
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
    }
