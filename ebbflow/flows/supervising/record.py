"""The state of a job as the supervisor reads it from the store, and the verdict on each run."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum

from pydantic import ValidationError

from ebbflow.core.config.device_settings import renew_defaults
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import (
    BatchAttemptPayload,
    PlannedPool,
    PlanPayload,
    SupervisedPayload,
)
from ebbflow.core.events import (
    Event,
    find_last_event,
    read_events,
    select_events,
)
from ebbflow.core.layout import parse_commit_key
from ebbflow.core.store import Store
from ebbflow.cost.capacity import read_attempts
from ebbflow.cost.errors import CostError
from ebbflow.cost.ledger.generations import find_final_outcome, read_generations
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows.attempts.placement import operator_stop_reason
from ebbflow.flows.attempts.settlement import unsettled_jobs
from ebbflow.training.checkpoint.lineage import newest_commits
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.errors import TrainingError
from ebbflow.training.launch.crash_loop import (
    ProgressBound,
    describe_crash_loop,
    exceeded_bound,
    find_crash_loop,
    newest_commit_in_events,
    read_failed_generations,
    since_last_verdict,
)

LONGEST_PAUSE_SECONDS = 600.0
# If the gap between two runs exceeds the usual pause by more than this, no supervisor was running
# in between. AWS Batch replaces a failing machine within this time.
ALONE_SECONDS = 3600.0

# Outcomes that another run would repeat, or limits that the user has set. PREFLIGHT ends the job
# only if its settings have never passed preflight, so that the user learns of the problem at once.
FINAL = frozenset(
    outcome for outcome in Outcome if outcome.is_final and outcome is not Outcome.NO_CAPACITY
)


@dataclass(frozen=True, kw_only=True)
class SupervisedRun:
    """One run of the flow, as the supervisor recorded it."""

    verdict: str  # value of `RunVerdict`
    commit: str | None  # key of the job's newest commit when the run ended, None without one
    ended_utc: float  # Unix time
    failures: int = 1  # the number of failures that the run counts as (`count_failures`)
    seconds: float = 0.0  # duration of the run


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The state of a job, read from its store."""

    # Numbers of the generations that an interruption ended
    interruptions: frozenset[int] = frozenset()
    # Numbers of the generations that a failure of the user's program ended
    failures: frozenset[int] = frozenset()
    # Cause of each Batch job's end, by job id
    attempts: dict[str, str] = field(default_factory=dict)
    unsettled: bool = False  # the end of at least one Batch job is not recorded
    commit: str | None = None  # key of the newest commit, None without one
    runs: tuple[SupervisedRun, ...] = ()  # supervised runs, oldest first
    # None if the job has not begun, or if no report can be built from its events
    report: RunReport | None = None
    why: str = "nothing was recorded"  # why there is no report
    run: str = ""  # Metaflow run of the newest event, "" if the job has not begun
    finished: bool = False  # the job is complete, and its configuration has not changed since
    passed: bool = False  # preflight passed with the present configuration, and a gang was started
    deadline_utc: float | None = None  # Unix time; None: no deadline, or no plan yet
    # Outcome that ended the job for good under the present configuration, and its message; None if
    # it may go on
    final: Outcome | None = None
    final_message: str = ""
    # Why it must not start again, or "": too many starts without a new commit
    no_progress: str = ""
    # Likewise: more time or dollars without a new commit than the configuration allows
    exceeded_bound: str = ""
    # How an operator ended the newest run, with the attempt's id; "" if none did
    operator_stop: str = ""

    @property
    def begun(self) -> bool:
        return bool(self.run)

    def with_runs(self, *runs: SupervisedRun) -> JobRecord:
        return replace(
            self, runs=tuple(sorted((*self.runs, *runs), key=lambda past_run: past_run.ended_utc))
        )

    def cost(self) -> str:
        if self.report is None:
            return f"its cost is unknown: {self.why}"
        if (self.report.plan or {}).get("simulated"):
            simulated = " at a simulated price"
        else:
            simulated = ""
        return f"it has cost ${_money(self.report.total_usd)}{simulated}"


class RunVerdict(StrEnum):
    """Verdict on one run of the flow, from which the supervisor decides whether and when to start
    the next run.
    """

    COMPLETED = "completed"
    FINAL = "final"  # its outcome ends the job
    INTERRUPTION = "interruption"  # not the job's fault: continue, however often it happens
    NO_CAPACITY = "no_capacity"  # try again after a pause
    NOT_READY = "not_ready"  # preflight failed after an earlier pass: a service does not answer
    # The program failed or did nothing: only a few are allowed without a new commit
    FAILURE = "failure"


def read_record(job_store: Store, config: RunConfig) -> JobRecord:
    """Read the job's record from its store. Raises StoreError.

    If no cost report can be built from the job's events, `report` is None and `why` has the reason.
    """
    use_signing_key(config.checkpoint.signing_key_env)
    events = read_events(job_store)
    if not events:
        return JobRecord(commit=_newest_commit(job_store))
    generations = read_generations(events)
    ended = [generation for generation in generations.values() if generation.unplanned]
    try:
        report = build_report(events)
        why = ""
    except CostError as error:
        report = None
        why = str(error)
    hours = config.cost.deadline_hours
    plan = find_last_event(events, PlanPayload)
    if plan is None:
        started = None
    else:
        started = plan.payload.started_utc
    same_settings = _written_config(job_store) == config
    newest_commit = _newest_commit(job_store)
    no_progress, exceeded = _describe_no_progress(events, plan, config, newest_commit)
    last = find_final_outcome(events)
    passed = bool(generations) and same_settings
    if passed and last is not None and last.payload.outcome in FINAL - {Outcome.PREFLIGHT}:
        final = last.payload
    else:
        final = None
    return JobRecord(
        interruptions=frozenset(
            generation.number for generation in ended if not generation.user_code
        ),
        failures=frozenset(generation.number for generation in ended if generation.user_code),
        attempts={
            event.payload.job_id: event.payload.cause or "unknown"
            for event in select_events(events, BatchAttemptPayload)
        },
        unsettled=bool(unsettled_jobs(events)),
        commit=newest_commit,
        runs=tuple(
            SupervisedRun(
                verdict=event.payload.verdict,
                commit=event.payload.commit,
                ended_utc=event.t_wall,
                failures=event.payload.failures or 1,
                seconds=float(event.payload.seconds or 0.0),
            )
            for event in select_events(events, SupervisedPayload)
        ),
        report=report,
        why=why,
        run=events[-1].run,
        finished=report is not None and report.outcome is Outcome.COMPLETED and same_settings,
        passed=passed,
        deadline_utc=None if hours is None or started is None else started + hours * 3600,
        final=None if final is None else final.outcome,
        final_message="" if final is None else final.message or "",
        no_progress=no_progress,
        exceeded_bound=exceeded,
        operator_stop=operator_stop_reason(read_attempts(events), run=events[-1].run),
    )


# Rules in order, of which the first that applies decides.
def judge_run(exit_code: int, before: JobRecord, after: JobRecord) -> RunVerdict:  # noqa: PLR0911 - one return for each rule, in the order of their precedence
    """Return the verdict on one run, from its exit code and the job's record before and after the
    run.

    The exit code is negative if a signal ended the run. Exit codes 1 and 75 are ambiguous, because
    a run that died before any training has them too. In this case the record decides: the run was
    interrupted if it left an interrupted generation, or a Batch job that was reclaimed or
    terminated.
    """
    if exit_code == Outcome.COMPLETED.exit_code:
        return RunVerdict.COMPLETED
    if exit_code == Outcome.PREFLIGHT.exit_code and after.passed:
        return RunVerdict.NOT_READY  # what passed before will pass again
    if exit_code in {outcome.exit_code for outcome in FINAL}:
        return RunVerdict.FINAL
    if exit_code == Outcome.NO_CAPACITY.exit_code:
        return RunVerdict.NO_CAPACITY
    if after.failures - before.failures:
        return RunVerdict.FAILURE
    if after.interruptions - before.interruptions:
        return RunVerdict.INTERRUPTION
    # Batch's causes come last, because a container that drained after a notice looks failed to
    # Batch.
    causes = {cause for job, cause in after.attempts.items() if job not in before.attempts}
    if "user_code" in causes:
        return RunVerdict.FAILURE
    if {"reclaimed", "terminated"} & causes:
        return RunVerdict.INTERRUPTION
    if "never_started" in causes:
        return RunVerdict.NO_CAPACITY
    return RunVerdict.FAILURE


def count_failures(before: JobRecord, after: JobRecord) -> int:
    """Return how many failures a failed run counts as.

    A run that made a commit counts as one failure. Any other run counts as one failure per failed
    Batch job, but at least as one failure.
    """
    if before.commit != after.commit:
        return 1
    return max(
        1,
        sum(
            cause == "user_code"
            for job, cause in after.attempts.items()
            if job not in before.attempts
        ),
    )


def count_in_a_row(record: JobRecord, verdict: RunVerdict) -> int:
    """Count the runs with this verdict since the newest commit.

    For FAILURE, return the sum of the runs' failures.

    Runs with other verdicts are skipped. For verdicts other than FAILURE, runs before a gap in
    which no supervisor ran are skipped too.
    """
    failure = verdict is RunVerdict.FAILURE
    if failure:
        runs = record.runs
    else:
        runs = _since_alone(record.runs, LONGEST_PAUSE_SECONDS)
    ended = (
        past_run
        for past_run in runs
        if past_run.verdict == verdict and past_run.commit == record.commit
    )
    return sum(past_run.failures if failure else 1 for past_run in ended)


def pause_seconds(record: JobRecord, verdict: RunVerdict, first_seconds: float) -> float:
    """Return the pause in seconds before the next run.

    The pause is 0 after an interrupted run that made a commit. Otherwise the pause is
    `first_seconds` after the first run since the newest commit that ended with `verdict`, and
    doubles with each further such run, up to 600 s.
    """
    times = count_in_a_row(record, verdict)
    if verdict is RunVerdict.INTERRUPTION:
        times -= 1  # the first run with this commit may have created it
    if times > 0:
        return min(first_seconds * 2 ** (times - 1), LONGEST_PAUSE_SECONDS)
    return 0.0


def waited_seconds(
    record: JobRecord,
    verdict: RunVerdict,
    now_utc: float,
    *,
    usual_pause_seconds: float = LONGEST_PAUSE_SECONDS,
) -> float:
    """Return for how many seconds the job's runs have all ended with this verdict.

    The verdict is "no capacity" or "not ready". The time starts at the end of the first of the
    latest runs that all have this verdict. It is 0 if the newest run has another verdict. Runs
    before a gap in which no supervisor ran do not count. Such a gap is a pause much longer than
    `usual_pause_seconds`, the longest pause that a supervisor makes between runs.
    """
    since = now_utc
    for past_run in reversed(_since_alone(record.runs, usual_pause_seconds)):
        if past_run.verdict != verdict:
            break
        since = past_run.ended_utc
    return now_utc - since


def _describe_no_progress(
    events: list[Event],
    plan: Event[PlanPayload] | None,
    config: RunConfig,
    newest_commit: str | None,
) -> tuple[str, str]:
    """Return two reasons why the job must not start again, each "" if it does not apply.

    The first reason is the number of starts without a new commit, the second their time and
    dollars. Agents apply the same rules, but to the starts of their own run alone.
    """
    failed = read_failed_generations(since_last_verdict(events))
    newest = newest_commit_in_events(events)
    if newest_commit is not None:  # whose event may be lost with its machine
        newest = max(newest, parse_commit_key(newest_commit)[1])
    usd = None
    if plan is not None and plan.payload.chosen is not None:
        usd = _usd_per_rank_second(plan.payload.chosen)
    loop = find_crash_loop(failed, newest)
    repeated = ""
    if loop and failed[-1].counts:
        repeated = describe_crash_loop(loop, failed[-1].why, usd_per_rank_second=usd)
    bound = ProgressBound.of(config)
    return repeated, exceeded_bound(failed, newest, bound, usd_per_rank_second=usd)


def _usd_per_rank_second(pool: PlannedPool) -> float:
    # The prices are those of one node
    usd_per_hour = float(pool.usd_per_hour) + float(pool.volume_usd_per_hour or 0)
    return usd_per_hour / (3600 * int(pool.processes_per_node or 1))


def _money(usd: Decimal) -> str:
    if usd < 1:
        return f"{usd:.4f}"
    return f"{usd:.2f}"


def _newest_commit(job_store: Store) -> str | None:
    try:
        newest = next(newest_commits(job_store), None)
    except TrainingError:  # a broken lineage, which the next start reports
        return None
    if newest is None:
        return None
    return newest.key


def _written_config(job_store: Store) -> RunConfig | None:
    """Return the configuration of the newest run that passed preflight, or None if there is none.

    Keys that it lacks get today's defaults. Return None also if another version wrote it and it
    cannot be read.
    """
    if job_store.head("config.json") is None:
        return None
    try:
        document = json.loads(job_store.get("config.json"))
        return RunConfig.model_validate(renew_defaults(document))
    except ValidationError:
        return None


def _since_alone(
    runs: tuple[SupervisedRun, ...], usual_pause_seconds: float
) -> tuple[SupervisedRun, ...]:
    """Return the runs since the last gap in which no supervisor ran.

    A gap is a pause that exceeds the supervisor's usual pause by more than `ALONE_SECONDS`.
    """
    longest = usual_pause_seconds + ALONE_SECONDS
    pairs = enumerate(itertools.pairwise(runs), start=1)
    first = max(
        (
            at
            for at, (before, after) in pairs
            if after.ended_utc - after.seconds - before.ended_utc > longest
        ),
        default=0,
    )
    return runs[first:]
