"""Diagnosis of an Ebbflow job from the output of its ranks and the events of its agents and guards."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import ebbflow.core.events as ev
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import (
    ConfiguredPayload,
    FaultPayload,
    GenerationEndedPayload,
    GuardPayload,
    NoticePayload,
    OutcomePayload,
    StepPayload,
)
from ebbflow.core.events import Event, GuardAction, find_last_event, is_event, select_events
from ebbflow.core.rank_logs import LogLine
from ebbflow.diagnose.evidence import Evidence
from ebbflow.diagnose.judging import Diagnosis, judge
from ebbflow.diagnose.reading import LogText, time_of
from ebbflow.diagnose.rules import load_rules
from ebbflow.infra.notices import NoticeSource

# Notices by which nobody has announced a reclamation: the remark of a rank has no source, a signal
# is a user's or an operator's, and a rehearsal is one
_NO_RECLAMATION = (None, NoticeSource.SIGNAL, NoticeSource.REHEARSAL)


def diagnose_job(events: Sequence[Event], lines: Iterable[LogLine]) -> Diagnosis:
    """Diagnose a job from its events and its ranks' output.

    The causes that its agents recorded count as evidence.

    If the job has failed, only its last generation counts: the job survived what ended the earlier
    ones. A job that has ended well has no root; what its agents recorded is history.
    """
    events_of_job = events
    ended = find_last_event(events, OutcomePayload)
    if ended is None:
        outcome = None
    else:
        outcome = ended.payload.outcome
    last = max(
        (event.generation for event in events if event.name == ev.GENERATION_ENDED), default=None
    )
    if last is not None and outcome not in (None, Outcome.COMPLETED, Outcome.INTERRUPTED):
        events = [event for event in events if event.generation == last]
        lines = (line for line in lines if line.generation == last)
    evidence = Evidence()
    evidence.read(_log_texts(lines))
    for symptom, line in _verdicts(events):
        evidence.add_verdict(symptom, line)
    diagnosis = judge(evidence, ended_well=outcome is Outcome.COMPLETED)
    return _with_keys(diagnosis, events_of_job)


def _with_keys(diagnosis: Diagnosis, events: Sequence[Event]) -> Diagnosis:
    """Add fixes that name the job's configuration keys and the values to set."""
    configured = find_last_event(events, ConfiguredPayload)
    if configured is None:
        return diagnosis
    values = {setting.key: setting.value for setting in configured.payload.settings}
    findings = []
    for finding in diagnosis.findings:
        changes = []
        for change in finding.rule.keys:
            text = change.describe_from(values[change.key]) if change.key in values else None
            changes += [] if text is None else [text]
        rule = replace(finding.rule, fix=(*changes, *finding.rule.fix))
        findings.append(replace(finding, rule=rule))
    return replace(diagnosis, findings=tuple(findings))


def _verdicts(events: Sequence[Event]) -> Iterator[tuple[str, LogText]]:
    for number, event in enumerate(events, 1):
        payload = event.payload
        if not isinstance(
            payload, FaultPayload | GenerationEndedPayload | GuardPayload | NoticePayload
        ):
            continue
        if isinstance(payload, NoticePayload) and payload.source in _NO_RECLAMATION:
            continue
        if event.name == ev.STALL and any(later.name == ev.STEP for later in events[number:]):
            continue  # the rank has continued, or another generation
        words = _evidence_words(payload)
        text = (
            f"{event.name} "
            f"{' '.join(str(word) for word in words if word)}{_price_straggler(event, events)}"
        )
        symptom = load_rules().read_verdict(text)
        if symptom is not None:
            if isinstance(payload, GenerationEndedPayload) or payload.rank is None:
                rank = event.rank
            else:
                rank = payload.rank
            yield symptom, LogText("events", number, text, rank, event.t_wall)


def _evidence_words(
    payload: FaultPayload | GenerationEndedPayload | GuardPayload | NoticePayload,
) -> list[str | None]:
    if isinstance(payload, FaultPayload):
        return [payload.kind, payload.culprit, payload.message, payload.detail, payload.reason]
    if isinstance(payload, GenerationEndedPayload):
        return [payload.culprit, payload.reason]
    if isinstance(payload, GuardPayload):
        return [payload.action, payload.reason]
    return [payload.message, payload.action, payload.detail]


def _price_straggler(guard: Event, events: Sequence[Event]) -> str:
    """Describe the time and dollars that a straggler cost in its generation.

    Return "" for an event that reports no straggler.
    """
    if not is_event(guard, GuardPayload) or guard.payload.action is not GuardAction.SLOW_RANK:
        return ""
    lost = sum(
        event.payload.slowest_seconds or 0.0
        for event in select_events(events, StepPayload)
        if (event.generation, event.payload.slowest_rank) == (guard.generation, guard.payload.rank)
    )
    share = guard.payload.share or 0.0
    hourly = guard.payload.usd_per_hour or 0.0
    if share and hourly:
        usd = f" and ${lost * hourly / share / 3600:.4f}"
    else:
        usd = ""
    if lost:
        return f"; in all {lost:.1f} s{usd}"
    return ""


def _log_texts(lines: Iterable[LogLine]) -> Iterator[LogText]:
    numbers: Counter[str] = Counter()
    for line in lines:
        file = f"generation {line.generation} node {line.node} rank {line.rank}"
        numbers[file] += 1
        yield LogText(file, numbers[file], line.text, line.rank, time_of(line.t))
