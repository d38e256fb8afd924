"""The limit for a job that starts again and again without a new commit.

Each start of the gang that ended since the newest commit is one of three kinds. A failure of the
program has a fingerprint. An end of which nothing is known, such as a node that vanished with all
its processes, may be any failure: a container that is killed for memory as a group leaves nothing
else. Neither counts if a notice or the scheduler proves that the machine was taken away; such
starts are bounded by their time and dollars alone.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ebbflow.core.events as ev
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import (
    BatchAttemptPayload,
    BatchSubmittedPayload,
    CommitPayload,
    GenerationEndedPayload,
    NodeEndedPayload,
    NodeStartedPayload,
    NoticePayload,
    OutcomePayload,
)
from ebbflow.core.events import EndReason, Event, select_events
from ebbflow.core.grouping import group_by_key
from ebbflow.infra.notices import RECLAIMS

SAME_LIMIT = 3  # equal failures, or ends without a known reason, since the newest commit
ANY_LIMIT = 10  # failures of any kind since the newest commit
# The scheduler's causes that prove that the program did not end its job.
_PROVEN = ("reclaimed", "terminated", "never_started", "ended")
# Events that prove that a generation began
_BEGUN = (ev.GENERATION_STARTED, ev.NODE_STARTED, ev.GENERATION_ENDED)
_SHOWN_CHARACTERS = 300


@dataclass(frozen=True, kw_only=True)
class FailedGeneration:
    """A start of the gang that has ended, and the time since its last commit."""

    generation: int
    fingerprint: str  # "" for an end without a known reason
    rank_seconds: float  # sum of each node's paid seconds × the node's ranks
    counts: bool = True  # whether it counts towards a crash loop
    run: str = ""  # id of its run
    why: str = ""  # what the scheduler says of its end, else its culprit
    idle_seconds: float = 0.0  # since its last commit, or its begin
    ranks: int = 0
    same_limit: int = SAME_LIMIT  # number of equal failures that are a crash loop


@dataclass(frozen=True)
class ProgressBound:
    """The maximum that a job may spend without a new commit; None means no limit."""

    hours: float | None = None
    usd: float | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "ProgressBound":
        survival = config.survival
        return cls(survival.no_progress_hours, survival.no_progress_usd)


def read_failed_generations(events: Sequence[Event]) -> list[FailedGeneration]:
    """Return the starts of the gang that the events record, oldest first.

    All of them must have ended, so pass no events of a running gang.
    """
    by_generation = group_by_key((event.generation, event) for event in events if event.generation)
    begun = {event.generation for event in events if event.name in _BEGUN}
    ends = _read_scheduler(events)
    return [
        _read_generation(number, by_generation[number], ends)
        for number in sorted(by_generation.keys() & begun)
    ]


def find_crash_loop(
    failures: Iterable[FailedGeneration], newest_commit_generation: int
) -> list[FailedGeneration]:
    """Return the failures since the newest commit, oldest first, if they form a crash loop; else
    [].
    """
    since = [
        failure
        for failure in failures
        if failure.counts and failure.generation >= newest_commit_generation
    ]
    if not since:
        return []
    run = since[-1].run
    # A person may have mended what failed in an earlier run
    marks = Counter(
        failure.fingerprint for failure in since if failure.fingerprint and failure.run == run
    )
    mark = since[-1].fingerprint
    if not mark and marks:
        mark = marks.most_common(1)[0][0]
    same = [failure for failure in since if failure.fingerprint in ("", mark)]
    if len(same) >= SAME_LIMIT:
        return same
    equal = [failure for failure in same if failure.fingerprint]
    if equal and len(equal) >= equal[-1].same_limit:
        return equal
    if len(since) >= ANY_LIMIT:
        return since
    return []


def describe_crash_loop(
    loop: Sequence[FailedGeneration], culprit: str, *, usd_per_rank_second: float | None
) -> str:
    seconds = sum(failure.rank_seconds for failure in loop)
    cost = f"{seconds:.0f} rank-seconds"
    if usd_per_rank_second is not None:
        cost += f", ${seconds * usd_per_rank_second:.4f} at the planned price"
    numbers = ", ".join(str(failure.generation) for failure in loop)
    what = f"{len(loop)} failures"
    marks = {failure.fingerprint for failure in loop if failure.fingerprint}
    unexplained = sum(not failure.fingerprint for failure in loop)
    if unexplained:
        what = f"{len(loop)} starts, {unexplained} of which ended without a known reason,"
    elif len(marks) == 1:
        what = f"the same failure {len(loop)} times ({loop[-1].fingerprint})"
    return (
        f"crash loop: {what} with no new commit in between, in generations {numbers}, which cost "
        f"{cost}; the last one: {_shorten(culprit)}"
    )


def exceeded_bound(
    failures: Iterable[FailedGeneration],
    newest_commit_generation: int,
    bound: ProgressBound,
    *,
    usd_per_rank_second: float | None,
) -> str:
    """Return why the job must not start again, or "" if it may.

    It must not if it spent more than `bound` since its newest commit.
    """
    since = [failure for failure in failures if failure.generation >= newest_commit_generation]
    hours = sum(failure.idle_seconds for failure in since) / 3600
    rank_seconds = sum(failure.idle_seconds * failure.ranks for failure in since)
    exceeded = ""
    if bound.hours is not None and hours > bound.hours:
        exceeded = f"{hours:.1f} h, more than survival.no_progress_hours ({bound.hours:g})"
    elif bound.usd is not None and usd_per_rank_second is not None:
        usd = rank_seconds * usd_per_rank_second
        if usd > bound.usd:
            exceeded = f"${usd:.2f}, more than survival.no_progress_usd ({bound.usd:g})"
    if not exceeded:
        return ""
    starts = "1 start" if len(since) == 1 else f"{len(since)} starts"
    return (
        f"crash loop: {starts} without a new commit took {exceeded}; the last one: "
        f"{_shorten(since[-1].why) or 'its reason is not known'}; fix: save more often "
        "(checkpoint.interval_steps), use machines that are interrupted less, or raise the limit"
    )


def since_last_verdict(events: Sequence[Event]) -> list[Event]:
    """Return the events after the last time that a crash loop ended the job.

    A user who starts the job again afterwards begins a new count.
    """
    verdicts = [
        event.t_wall
        for event in select_events(events, OutcomePayload)
        if event.payload.outcome is Outcome.CRASH_LOOP
    ]
    if not verdicts:
        return list(events)
    begun = {
        event.generation
        for event in events
        if event.name == ev.GENERATION_STARTED and event.t_wall > max(verdicts)
    }
    return [
        event
        for event in events
        if event.generation in begun or event.name in (ev.BATCH_ATTEMPT, ev.BATCH_SUBMITTED)
    ]


def newest_commit_in_events(events: Sequence[Event]) -> int:
    """Return the generation of the newest commit, or 0."""
    return max((event.generation for event in select_events(events, CommitPayload)), default=0)


@dataclass(frozen=True)
class _SchedulerEnds:
    """The ends of jobs as the scheduler reports them.

    `by_job` has a cause and a text by job id; `jobs` has the ids of jobs by run and attempt.
    """

    by_job: dict[str, tuple[str, str]]
    jobs: dict[tuple[str, int], set[str]]


def _read_scheduler(events: Sequence[Event]) -> _SchedulerEnds:
    by_job: dict[str, tuple[str, str]] = {}
    for event in select_events(events, BatchAttemptPayload):
        text = event.payload.reason or ""
        code = event.payload.exit_code
        if code and str(code) not in str(text):
            text = f"{text} (exit code {code})".strip()
        by_job[event.payload.job_id] = (event.payload.cause or "unknown", str(text))
    jobs: dict[tuple[str, int], set[str]] = {}
    for event in select_events(events, BatchSubmittedPayload):
        if event.payload.job_id:
            jobs.setdefault((event.run, event.attempt), set()).add(event.payload.job_id)
    return _SchedulerEnds(by_job, jobs)


def _read_generation(
    number: int, events: Sequence[Event], scheduler: _SchedulerEnds
) -> FailedGeneration:
    ranks: dict[int, int] = {}
    jobs: set[str] = set()
    for event in select_events(events, NodeStartedPayload):
        ranks[event.node] = len(event.payload.ranks or [])
        if event.payload.batch_job_id:
            jobs.add(event.payload.batch_job_id.partition("#")[0])
    paid = 0.0
    for event in select_events(events, NodeEndedPayload):
        paid += float(event.payload.seconds or 0.0) * ranks.get(event.node, 0)
    first = min(events, key=lambda event: event.t_wall)
    last_wall = max(event.t_wall for event in events)
    if not paid:
        paid = (last_wall - first.t_wall) * sum(ranks.values())
    commits = [event.t_wall for event in select_events(events, CommitPayload)]
    jobs |= scheduler.jobs.get((first.run, first.attempt), set())
    told = [scheduler.by_job[job] for job in sorted(jobs) if job in scheduler.by_job]
    ended = [event.payload for event in select_events(events, GenerationEndedPayload)]
    end = ended[-1] if ended else GenerationEndedPayload()
    texts = [f"the scheduler says: {text}" for _, text in told if text] or [end.culprit or ""]
    return FailedGeneration(
        generation=number,
        fingerprint=end.fingerprint or "",
        rank_seconds=paid,
        counts=_counts(events, end, [cause for cause, _ in told]),
        run=first.run,
        why=texts[-1],
        idle_seconds=last_wall - max([first.t_wall, *commits]),
        ranks=sum(ranks.values()),
        same_limit=int(end.same_limit or SAME_LIMIT),
    )


def _counts(events: Sequence[Event], end: GenerationEndedPayload, causes: Sequence[str]) -> bool:
    """Return whether an ended start counts towards a crash loop.

    It counts if its program failed, or if nothing proves that something else ended it.
    """
    if end.fingerprint:
        return True
    if end.reason not in (None, EndReason.NODE_LOST) or end.known_cause:
        return False
    if end.ranks_started is False or select_events(events, OutcomePayload):
        return False
    noticed = any(
        event.payload.action in RECLAIMS and event.payload.does != "wait"
        for event in select_events(events, NoticePayload)
    )
    return not noticed and not any(cause in _PROVEN for cause in causes)


def _shorten(text: str) -> str:
    return " ".join(text.split())[:_SHOWN_CHARACTERS]
