"""Comparison of a job with a reference job of the same configuration
(`ebbflow diagnose JOB --against SOUND`).

This module calls the reference job sound, because it ran as expected.
"""

import itertools
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ebbflow.core.event_payloads import CommitPayload, ConfiguredPayload, PhasePayload, StepPayload
from ebbflow.core.events import STEP, Event, LedgerClass, select_events
from ebbflow.core.rank_logs import LogLine
from ebbflow.core.untrusted_text import one_line

SLOWER = 1.3  # a duration this many times the sound job's is reported
_RARELY_SLOWER = 2.0  # the same of a duration with fewer than `_FEW` values
_FEW = 10
_SHORTEST_SECONDS = 0.01  # a shorter difference is noise
_WARM_UP_STEPS = 3
# For "since", this many steps must be slow, beyond two for each other one: `_LONGER_THAN_A_BURST`,
# or a quarter of a longer job's steps up to `_MOST_NEEDED`. Of a short job, half of its steps must
# be slow, and at least `_LEAST_SLOW`.
_LEAST_SLOW = 3
_LONGER_THAN_A_BURST = 10  # a burst of load on one machine passes sooner
_MOST_NEEDED = 50
_MOST_LINES = 5
# If no rank computes or reads slower, collectives or the network are slow
_WAIT = "waiting for other ranks"
_Timed = tuple[int | None, int, float]  # step (None: not of a step), node, seconds
_DIGITS = re.compile(r"0x[0-9a-f]+|[0-9]+(?:[.:,][0-9]+)*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class SlowerPart:
    """A part of a step, or an operation, that is slower than in the reference job."""

    part: str  # ledger class of a step, "commit", or the class of a phase such as startup
    rank: int | None  # None: every rank is slower
    node: int | None
    seconds: float  # median
    sound_seconds: float  # median over all ranks of the sound job
    # First of enough slow steps; None: no such stretch, or not a part of steps
    since_step: int | None

    def render(self) -> str:
        if self.since_step is None:
            since = ""
        else:
            since = f" since step {self.since_step}"
        if self.sound_seconds:
            ratio = self.seconds / self.sound_seconds
        else:
            ratio = float("inf")
        if self.rank is None:
            who = "every rank"
        else:
            who = f"node {self.node} rank {self.rank}"
        return (
            f"{who}: {self.part} takes {self.seconds:.3g} s, in the sound job "
            f"{self.sound_seconds:.3g} s ({ratio:.1f} times){since}"
        )


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """The rank that was the slowest in most slow steps.

    Time spent waiting for other ranks does not count.
    """

    rank: int
    node: int | None  # None: unknown
    ratio: float  # median over its steps of its own time divided by the median of all ranks
    steps: int  # number of steps in which it was the slowest
    since_step: int | None  # first of a stretch with mostly such steps

    def render(self) -> str:
        if self.since_step is None:
            since = ""
        else:
            since = f" since step {self.since_step}"
        if self.node is None:
            node = ""
        else:
            node = f"node {self.node} "
        return (
            f"{node}rank {self.rank} is {self.ratio:.1f} times as slow as the median "
            f"rank{since}, in {self.steps} steps"
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between a job and a reference job."""

    # (key, value, value in the reference job) of each setting that differs, except for the store
    settings: tuple[tuple[str, Any, Any], ...]
    # a rank that slows down the other ranks. None if there is no such rank, or if the same rank was
    # about as slow in the reference job.
    straggler: Straggler | None
    slower: tuple[SlowerPart, ...]
    # The first log lines that the reference job did not print. Digits are ignored.
    new_lines: tuple[LogLine, ...]
    missing: tuple[str, ...]  # names of events that only the reference job has, such as commits

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "new_lines": [_line_to_json(line) for line in self.new_lines]}

    def render(self) -> str:
        parts = [
            f"setting {key}: {mine}, in the sound job {sound}" for key, mine, sound in self.settings
        ]
        if self.straggler is not None:
            parts += [self.straggler.render()]
        parts += [each.render() for each in self.slower]
        parts += [f"missing: {name}" for name in self.missing]
        parts += [
            f"new line of node {line.node} rank {line.rank}, step "
            f"{'?' if line.step is None else line.step}: {one_line(line.text)[:200]}"
            for line in self.new_lines
        ]
        return "\n".join(parts) or "no difference in settings, times, events or lines"


def compare_jobs(
    events: Sequence[Event],
    lines: Iterable[LogLine],
    sound: Sequence[Event],
    sound_lines: Iterable[LogLine],
) -> Comparison:
    """Compare the events and log lines of a job with those of a reference job."""
    known = {_form(line.text) for line in sound_lines}
    new: dict[str, LogLine] = {}
    for line in lines:
        form = _form(line.text)
        if form and form not in known:
            new.setdefault(form, line)
    names = {event.name for event in events}
    sound_names = {event.name for event in sound}
    slower = sorted(
        _slower(events, sound),
        key=lambda part: (part.since_step is None, part.sound_seconds - part.seconds),
    )
    # The other ranks wait for this one
    if any(slow.part in ("compute", LedgerClass.DATA_WAIT) for slow in slower):
        slower = [slow for slow in slower if slow.part != _WAIT]
    straggler = _straggler(events)
    usual = _straggler(sound)
    if (
        straggler
        and usual
        and usual.rank == straggler.rank
        and straggler.ratio < SLOWER * usual.ratio
    ):
        straggler = None
    return Comparison(
        settings=tuple(_settings(events, sound)),
        straggler=straggler,
        slower=tuple(slower[:_MOST_LINES]),
        new_lines=tuple(list(new.values())[:_MOST_LINES]),
        missing=tuple(sorted(sound_names - names)),
    )


def _form(text: str) -> str:
    return _DIGITS.sub("0", text).strip()


def _line_to_json(line: LogLine) -> dict[str, Any]:
    return {
        "generation": line.generation,
        "node": line.node,
        "rank": line.rank,
        "step": line.step,
        "t": line.t,
        "text": line.text,
    }


def _configured_values(events: Sequence[Event]) -> dict[str, Any]:
    values = {}
    for event in select_events(events, ConfiguredPayload):
        for setting in event.payload.settings:
            values[setting.key] = setting.value
    return values


def _settings(events: Sequence[Event], sound: Sequence[Event]) -> Iterator[tuple[str, Any, Any]]:
    mine = _configured_values(events)
    theirs = _configured_values(sound)
    for key in sorted(mine.keys() & theirs.keys()):
        if mine[key] != theirs[key] and key != "store":
            yield key, mine[key], theirs[key]


def _straggler(events: Sequence[Event]) -> Straggler | None:
    steps: list[tuple[int, int, float]] = []
    for event in select_events(events, StepPayload):
        taken = event.payload
        if event.step is None or taken.slowest_rank is None or taken.slowest_ratio is None:
            continue
        if taken.slowest_seconds is None or taken.slowest_seconds > _SHORTEST_SECONDS:
            steps.append((event.step, taken.slowest_rank, taken.slowest_ratio))
        else:
            steps.append((event.step, -1, 1.0))
    slow = [(rank, ratio) for _, rank, ratio in steps if ratio > SLOWER]
    if not slow:
        return None
    rank, count = Counter(rank for rank, _ in slow).most_common(1)[0]
    ratio = statistics.median(ratio for slowest, ratio in slow if slowest == rank)
    since = _since([(step, slowest == rank and ratio > SLOWER) for step, slowest, ratio in steps])
    if since is None or 2 * count < max(len(slow), sum(step >= since for step, _, _ in steps)):
        return None
    node = next((event.node for event in events if event.name == STEP and event.rank == rank), None)
    return Straggler(rank=rank, node=node, ratio=ratio, steps=count, since_step=since)


def _slower(events: Sequence[Event], sound: Sequence[Event]) -> Iterator[SlowerPart]:
    for mine, theirs in (
        (_step_parts(events), _step_parts(sound)),
        (_operations(events), _operations(sound)),
    ):
        for part in dict.fromkeys(part for part, _ in mine):
            reference = []
            for (name, _), timed in theirs.items():
                if name == part:
                    reference += [seconds for _, _, seconds in timed]
            ranks = {rank: timed for (name, rank), timed in mine.items() if name == part}
            slow = {}
            for rank, timed in ranks.items():
                found = _compare(timed, reference)
                if found:
                    slow[rank] = found
            if len(slow) == len(ranks) > 1:  # ranks wait for each other
                everyone = sorted(
                    itertools.chain.from_iterable(ranks.values()),
                    key=lambda timed: timed[0] or 0,
                )
                found = _compare(everyone, reference)
                if found:
                    yield from _part(part, None, everyone, found)
                continue
            for rank, found in slow.items():
                yield from _part(part, rank, ranks[rank], found)


def _part(
    part: str, rank: int | None, values: Sequence[_Timed], found: tuple[float, float]
) -> Iterator[SlowerPart]:
    """Yield a `SlowerPart`, unless it is a part of steps and too few steps in a row are slow."""
    steps = sorted(
        (step, second > sum(found) / 2) for step, _, second in values if step is not None
    )
    if rank is None:
        node = None
    else:
        node = values[0][1]
    since = _since(steps)
    if since is not None or not steps:
        yield SlowerPart(
            part=part,
            rank=rank,
            node=node,
            seconds=found[0],
            sound_seconds=found[1],
            since_step=since,
        )


def _compare(values: Sequence[_Timed], sound: list[float]) -> tuple[float, float] | None:
    """Return the median seconds of both jobs if this job is clearly slower, else None.

    For this job, the median of its last third of values is used if it is higher than that of all.
    """
    if not values or not sound:
        return None
    seconds = [second for _, _, second in values]
    mine = max(statistics.median(seconds), statistics.median(seconds[-(len(seconds) // 3 + 1) :]))
    other = statistics.median(sound)
    if len(values) >= _FEW:
        ratio = SLOWER
    else:
        ratio = _RARELY_SLOWER
    if mine > ratio * other and mine - other > _SHORTEST_SECONDS:
        return (mine, other)
    return None


def _step_parts(events: Sequence[Event]) -> dict[tuple[str, int], list[_Timed]]:
    """Collect the seconds of each part of the steps, by (part, rank).

    The parts are ledger classes. If the rank recorded its own time, a step is also divided into the
    rank's own computation and its wait for other ranks. The first three steps of each rank in each
    generation are left out as warm-up.
    """
    found: dict[tuple[str, int], list[_Timed]] = defaultdict(list)
    taken: Counter[tuple[int, int]] = Counter()
    for event in select_events(events, StepPayload):
        if event.step is None:
            continue
        taken[event.generation, event.rank] += 1
        if taken[event.generation, event.rank] <= _WARM_UP_STEPS:
            continue
        parts: dict[str, float] = {}
        for kind, seconds in (event.payload.seconds or {}).items():
            parts[str(kind)] = seconds
        own = event.payload.own_seconds
        if own is not None and own > 0:
            parts["compute"] = max(own - parts.get(LedgerClass.DATA_WAIT, 0.0), 0.0)
            parts[_WAIT] = max(parts.pop(LedgerClass.USEFUL_STEP, 0.0) - parts["compute"], 0.0)
        for part, seconds in parts.items():
            found[str(part), event.rank].append((event.step, event.node, seconds))
    return found


def _operations(events: Sequence[Event]) -> dict[tuple[str, int], list[_Timed]]:
    """Collect the seconds of commits and phases, by (operation, rank).

    A phase is named by its ledger class, a commit by its event.
    """
    found: dict[tuple[str, int], list[_Timed]] = defaultdict(list)
    for event in events:
        payload = event.payload
        if isinstance(payload, PhasePayload):
            part = str(payload.ledger_class)
        else:
            part = event.name
        if isinstance(payload, PhasePayload | CommitPayload) and payload.seconds is not None:
            found[part, event.rank].append((None, event.node, payload.seconds))
    return found


def _since(steps: Sequence[tuple[int, bool]]) -> int | None:
    """Find the longest stretch in which at least two thirds of the steps are slow.

    Return its first step, or None if it has too few slow steps.

    steps: (step, whether the step was slow).
    """
    most = 0
    found = None
    beyond = 0
    begin = None
    for step, slow in steps:
        if beyond <= 0:
            beyond = 0
            begin = step
        if slow:
            beyond += 1
        else:
            beyond -= 2
        if beyond > most:
            most = beyond
            found = begin
    count = len({step for step, _ in steps})
    least = max(_LEAST_SLOW, min(count // 2, max(count // 4, _LONGER_THAN_A_BURST), _MOST_NEEDED))
    if most >= least * len(steps) / max(count, 1):
        return found
    return None
