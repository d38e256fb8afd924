"""What went wrong, first failure first, and what else is worth telling. Later ones usually follow from the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ebbflow.cost.capacity.history import history_of
from ebbflow.cost.ledger.generations import Generation
from ebbflow.infra.events import (
    BATCH_ATTEMPT,
    BUDGET,
    FAULT_DETECTED,
    FAULT_INJECTED,
    GENERATION_ENDED,
    GUARD,
    NOTICE,
    OUTCOME,
    PLAN,
    PREFLIGHT,
    RESTORE,
    ROLLBACK,
    Event,
)

_NOTABLE = {BUDGET, FAULT_DETECTED, FAULT_INJECTED, GENERATION_ENDED, GUARD, NOTICE, OUTCOME}


def failures(events: Sequence[Event], generations: dict[int, Generation]) -> list[dict[str, Any]]:
    """{seconds, generation, what, culprit} of each failure, by time; seconds count from the first event.

    A failure is a generation that ended unplanned, a job of AWS Batch that did not succeed, a failed check, a refused
    plan, a commit that could not be restored, or a store that was restored from an older snapshot.
    """
    found = [_cut_short(events, generation) for generation in generations.values() if generation.unplanned]
    causes = {attempt.job_id: attempt.cause for attempt in history_of(events).attempts}
    for event in events:
        found += _other(event)
    last = {str(event.data.get("job_id")): event for event in events if event.name == BATCH_ATTEMPT}  # of each job
    for event in last.values():
        found += _of_batch(event, causes)
    start = min((event.t_wall for event in events), default=0.0)
    found.sort(key=lambda failure: failure["t_wall"])
    return [{"seconds": failure["t_wall"] - start, **failure} for failure in found]


def notable(events: Sequence[Event]) -> list[dict[str, Any]]:
    """{seconds, generation, name, step, text} of the events that a reader wants to see, by time."""
    start = min((event.t_wall for event in events), default=0.0)
    return [
        {
            "seconds": event.t_wall - start,
            "generation": event.generation,
            "name": event.name,
            "step": event.step,
            "text": ", ".join(f"{key} {value}" for key, value in event.data.items() if value not in (None, "")),
        }
        for event in events
        if event.name in _NOTABLE or (event.name == RESTORE and event.data.get("rejected"))
    ]


def _cut_short(events: Sequence[Event], generation: Generation) -> dict[str, Any]:
    """Dated by its first sign: the detected fault, else the recorded end, else the last thing heard of it."""
    mine = [event for event in events if event.generation == generation.number]
    detected = next((event for event in mine if event.name == FAULT_DETECTED), None)
    ended = next((event for event in mine if event.name == GENERATION_ENDED), None)
    sign = detected or ended
    culprit = str(detected.data.get("culprit") or "") if detected is not None else ""
    notice = next((event for event in mine if event.name == NOTICE and event.data.get("does") == "leave"), None)
    told = (
        "" if notice is None else f"node {notice.node} had a notice by {notice.data['source']}: {notice.data['action']}"
    )
    what = generation.reason or "no end recorded: killed or lost"
    return _failure(
        generation.ended_wall if sign is None else sign.t_wall,
        generation.number,
        f"generation {generation.number}: {what}",
        culprit or generation.culprit or told,
    )


def _other(event: Event) -> list[dict[str, Any]]:
    if event.name == PREFLIGHT:
        return [
            _failure(event.t_wall, event.generation, f"preflight: {result.get('title') or result.get('id')}",
                     str(result.get("detail") or ""))
            for result in event.data.get("results", [])
            if isinstance(result, dict) and result.get("status") == "failed" and result.get("severity") != "warning"
        ]  # fmt: skip
    if event.name == PLAN and event.data.get("refusal"):
        refusal = event.data["refusal"]
        return [_failure(event.t_wall, event.generation, f"plan refused: {refusal['outcome']}", refusal["message"])]
    if event.name == RESTORE:
        return [
            _failure(event.t_wall, event.generation, f"commit {rejected.get('key')} rejected",
                     str(rejected.get("reason")) + (f"; lost: {rejected['lost']}" if "lost" in rejected else ""))
            for rejected in event.data.get("rejected") or []
        ]  # fmt: skip
    if event.name == ROLLBACK:
        has = f"goes on from step {event.data.get('found_step')}" if event.data.get("found_key") else "begins anew"
        what = f"the store was restored from an older snapshot: the commit of step {event.step} is missing"
        return [_failure(event.t_wall, event.generation, what, f"accepted with --accept-rollback; the job {has}")]
    return []


def _of_batch(event: Event, causes: Mapping[str, str]) -> list[dict[str, Any]]:
    """causes: by the job's id, as the agents' events correct Batch's."""
    cause = causes.get(str(event.data.get("job_id"))) or str(event.data.get("cause") or "unknown")
    if cause == "ended":
        return []
    at = min(event.t_wall, event.data.get("stopped_utc") or event.t_wall)
    what = f"Batch job in queue {event.data.get('queue') or '?'}: {cause.replace('_', ' ')}"
    return [_failure(at, event.generation, what, str(event.data.get("reason") or ""))]


def _failure(t_wall: float, generation: int, what: str, culprit: str) -> dict[str, Any]:
    return {"t_wall": t_wall, "generation": generation, "what": what, "culprit": culprit}
