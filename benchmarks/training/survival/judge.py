"""What the events of a tormented job say of each injection: noticed when, who was blamed, back
when.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.chaos.fault import Means, Symptom
from benchmarks.chaos.trial import Injection, Trial
from ebbflow.core.events import FAULT_DETECTED, GENERATION_ENDED, OUTCOME, STEP, Event

_RANK = re.compile(r"\brank (\d+)\b")
_NODE = re.compile(r"\bnode (\d+)\b")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One injection. Seconds are counted from the moment of the fault, None where it never came.

    verdict_seconds: until the culprit was named. back_seconds: until the next generation's first
    step was done; caught_up_seconds: until a step was done that had not been done before. guilty,
    place, reason: whether rightly named; None where there is nothing to be named. false_kill: the
    gang was ended for a fault that it ought to bear.
    """

    kind: str
    target: str
    step: int
    verdict_seconds: float | None
    back_seconds: float | None
    caught_up_seconds: float | None
    guilty: bool | None
    place: bool | None
    reason: bool | None
    in_time: bool | None
    false_kill: bool
    overdue: bool
    said: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def judge(trial: Trial, events: Sequence[Event]) -> list[Finding]:
    """One finding for each injection of the trial. events: of its job."""
    ordered = sorted(events, key=lambda event: event.t_mono)
    edges = [injection.strike.t_mono for injection in trial.injections] + [float("inf")]
    return [
        _find(injection, [event for event in ordered if begin <= event.t_mono < end], ordered)
        for injection, begin, end in zip(trial.injections, edges, edges[1:], strict=False)
    ]


def _find(injection: Injection, since: list[Event], events: list[Event]) -> Finding:
    fault = injection.fault
    aim = injection.aim
    began = injection.strike.t_mono
    verdict = _verdict(injection, since)
    taken = max(
        (event.step or 0 for event in events if event.name == STEP and event.t_mono < began),
        default=0,
    )
    old = max(
        (event.generation for event in events if event.name == STEP and event.t_mono < began),
        default=0,
    )
    steps = [event for event in since if event.name == STEP and event.generation > old]
    if steps and old:
        back = steps[0].t_mono - began
    else:
        back = None
    if old:
        caught_up = next(
            (event.t_mono - began for event in steps if (event.step or 0) > taken), None
        )
    else:
        caught_up = None
    expected = fault.symptom in (Symptom.VERDICT, Symptom.OUTCOME)
    if verdict:
        seconds = verdict.t_mono - began
    else:
        seconds = None
    if verdict:
        said = _said(verdict)
    else:
        said = ""
    if verdict:
        named = str(verdict.data.get("where") or "")
    else:
        named = ""
    where = f"{named} {said}"
    wants_place = expected and fault.where is not None
    return Finding(
        kind=fault.kind,
        target=f"node {aim.node}" if fault.node_is_guilty else f"rank {aim.rank}",
        step=injection.strike.step,
        verdict_seconds=seconds,
        back_seconds=None if fault.means is Means.LAUNCH or not expected else back,
        caught_up_seconds=None if fault.means is Means.LAUNCH or not expected else caught_up,
        guilty=_is_guilty(injection, verdict) if expected else None,
        place=(_has_place(where) and (fault.where or "") in where) if wants_place else None,
        reason=_is_reason(injection, verdict, since) if expected and fault.reasons else None,
        in_time=(seconds is not None and seconds <= fault.limit_seconds) if expected else None,
        false_kill=fault.symptom is Symptom.NOTHING and verdict is not None,
        overdue=injection.overdue,
        said=(f"{said.splitlines()[0][:200]} [{named}]" if named else said[:200]) if said else "",
    )


def _verdict(injection: Injection, since: list[Event]) -> Event | None:
    if injection.fault.symptom is Symptom.OUTCOME:
        return next((event for event in since if event.name in (OUTCOME, FAULT_DETECTED)), None)
    return next((event for event in since if event.name == FAULT_DETECTED), None)


def _is_reason(injection: Injection, verdict: Event | None, since: list[Event]) -> bool:
    fault = injection.fault
    return (
        verdict is not None
        and _reason(verdict, since) in fault.reasons
        and fault.says in _said(verdict)
    )


def _said(verdict: Event) -> str:
    return str(verdict.data.get("culprit") or verdict.data.get("message") or "")


def _reason(verdict: Event, since: list[Event]) -> str:
    if verdict.name == OUTCOME:
        return str(verdict.data.get("outcome"))
    if "reason" in verdict.data:
        return str(verdict.data["reason"])
    ended = (
        event
        for event in since
        if event.name == GENERATION_ENDED and event.generation == verdict.generation
    )
    return str(next((event.data.get("reason") for event in ended), ""))


def _is_guilty(injection: Injection, verdict: Event | None) -> bool:
    """Whether the rank (or node) that was struck is the first that is named; a launch fault names
    it as missing.
    """
    if verdict is None:
        return False
    fault = injection.fault
    aim = injection.aim
    said = _said(verdict)
    if fault.means is Means.LAUNCH:
        return f"missing: node {aim.node}" in said
    if fault.node_is_guilty:
        found = _NODE.search(said)
        return found is not None and int(found[1]) == aim.node
    if isinstance(verdict.data.get("rank"), int):
        return verdict.data["rank"] == aim.rank
    found = _RANK.search(said)
    return found is not None and int(found[1]) == aim.rank


def _has_place(text: str) -> bool:
    return re.search(r"\S+\.\w+:\d+", text) is not None
