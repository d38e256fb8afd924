"""Diagnosis of an Ebbflow job from the output of its ranks and the events of its agents and guards."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import ebbflow.core.events as ev
from ebbflow.core.errors import Outcome
from ebbflow.core.events import Event, GuardAction
from ebbflow.core.rank_logs import LogLine
from ebbflow.diagnose.judging import Diagnosis, judge
from ebbflow.diagnose.matching import Seen, load_matcher
from ebbflow.diagnose.reading import LogText, time_of
from ebbflow.diagnose.rules import load_rules
from ebbflow.diagnose.series import Series
from ebbflow.infra.notices import NoticeSource


def diagnose_job(events: Sequence[Event], lines: Iterable[LogLine]) -> Diagnosis:
    """Diagnose a job from its events and its ranks' output.

    The causes that its agents recorded count as evidence.

    If the job has failed, only its last generation counts: the job survived what ended the earlier
    ones.
    """
    outcome = next(
        (event.data.get("outcome") for event in reversed(events) if event.name == ev.OUTCOME), None
    )
    last = max(
        (event.generation for event in events if event.name == ev.GENERATION_ENDED), default=None
    )
    if last is not None and outcome not in (
        None,
        *(str(outcome) for outcome in (Outcome.COMPLETED, Outcome.INTERRUPTED)),
    ):
        events = [event for event in events if event.generation == last]
        lines = (line for line in lines if line.generation == last)
    seen: dict[str, Seen] = {}
    series = Series()
    read = load_matcher().collect(series.watch(_log_texts(lines)), seen)
    for order, (symptom, line) in enumerate(_verdicts(events), read + 1):
        rule = load_rules().find(symptom)
        if rule is not None:
            found = seen.setdefault(symptom, Seen(rule))
            found.strong = found.needed = found.verdict = True
            found.add(line, order)
    return judge(seen, series, [])


def _verdicts(events: Sequence[Event]) -> Iterator[tuple[str, LogText]]:
    for number, event in enumerate(events, 1):
        data = event.data
        if event.name not in (
            ev.FAULT_DETECTED,
            ev.GENERATION_ENDED,
            ev.GUARD,
            ev.NOTICE,
            ev.STALL,
        ):
            continue
        if event.name == ev.NOTICE and data.get("source") in (
            NoticeSource.SIGNAL,
            NoticeSource.REHEARSAL,
        ):
            continue  # somebody stopped the job, or rehearses; EC2 has not announced anything
        if event.name == ev.STALL and any(later.name == ev.STEP for later in events[number:]):
            continue  # the rank has continued, or another generation
        words = [
            data.get(key) for key in ("kind", "culprit", "message", "action", "detail", "reason")
        ]
        text = (
            f"{event.name} "
            f"{' '.join(str(word) for word in words if word)}{_price_straggler(event, events)}"
        )
        symptom = load_rules().read_verdict(text)
        if symptom is not None:
            rank = data.get("rank", event.rank)
            yield (
                symptom,
                LogText(
                    "events", number, text, rank if isinstance(rank, int) else None, event.t_wall
                ),
            )


def _price_straggler(guard: Event, events: Sequence[Event]) -> str:
    """Return the time and dollars that a straggler cost in its generation, as text; "" for any
    other event.
    """
    if guard.data.get("action") != GuardAction.SLOW_RANK:
        return ""
    lost = sum(
        event.data.get("slowest_seconds") or 0.0
        for event in events
        if event.name == ev.STEP
        and (event.generation, event.data.get("slowest_rank"))
        == (guard.generation, guard.data.get("rank"))
    )
    share = guard.data.get("share") or 0.0
    hourly = guard.data.get("usd_per_hour") or 0.0
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
