"""The judgement of each injection by the job's events: time to the verdict, culprit, recovery."""

from __future__ import annotations

import math
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
    """Return one finding for each injection of the trial, by the events of its job."""
    ordered = sorted(events, key=lambda event: event.t_mono)
    findings = []
    for number, injection in enumerate(trial.injections):
        begin = injection.strike.t_mono
        if number + 1 < len(trial.injections):
            end = trial.injections[number + 1].strike.t_mono
        else:
            end = math.inf
        since = [event for event in ordered if begin <= event.t_mono < end]
        findings.append(_find(injection, since, ordered))
    return findings


def _find(injection: Injection, since: list[Event], events: list[Event]) -> Finding:
    fault = injection.fault
    aim = injection.aim
    began = injection.strike.t_mono
    verdict = _verdict(injection, since)
    before = [event for event in events if event.name == STEP and event.t_mono < began]
    taken = max((event.step or 0 for event in before), default=0)
    old_generation = max((event.generation for event in before), default=0)
    back = None
    caught_up = None
    expected = fault.symptom in (Symptom.VERDICT, Symptom.OUTCOME)
    if old_generation and expected and fault.means is not Means.LAUNCH:
        for event in since:
            if event.name != STEP or event.generation <= old_generation:
                continue
            if back is None:
                back = event.t_mono - began
            if (event.step or 0) > taken:
                caught_up = event.t_mono - began
                break
    seconds = None
    said = ""
    place = ""
    if verdict is not None:
        seconds = verdict.t_mono - began
        said = _said(verdict)
        place = str(verdict.data.get("where") or "")
    guilty = None
    named_place = None
    named_reason = None
    in_time = None
    if expected:
        guilty = _is_guilty(injection, verdict)
        in_time = seconds is not None and seconds <= fault.limit_seconds
        if fault.where is not None:
            text = f"{place} {said}"
            named_place = _has_place(text) and fault.where in text
        if fault.reasons:
            named_reason = verdict is not None and _reason(verdict, since) in fault.reasons
    shown = (said.splitlines() or [""])[0][:200]
    return Finding(
        kind=fault.kind,
        target=f"node {aim.node}" if fault.node_is_guilty else f"rank {aim.rank}",
        step=injection.strike.step,
        verdict_seconds=seconds,
        back_seconds=back,
        caught_up_seconds=caught_up,
        guilty=guilty,
        place=named_place,
        reason=named_reason,
        in_time=in_time,
        false_kill=fault.symptom is Symptom.NOTHING and verdict is not None,
        overdue=injection.overdue,
        said=f"{shown} [{place}]" if place else shown,
    )


def _verdict(injection: Injection, since: list[Event]) -> Event | None:
    if injection.fault.symptom is Symptom.OUTCOME:
        return next((event for event in since if event.name in (OUTCOME, FAULT_DETECTED)), None)
    return next((event for event in since if event.name == FAULT_DETECTED), None)


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
