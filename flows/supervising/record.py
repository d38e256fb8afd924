"""The job's record in its store, by which the supervisor judges, and the verdict on each run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import StrEnum

from ebbflow.cost.errors import CostError
from ebbflow.cost.ledger.generations import read_generations
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows.attempts.settlement import unsettled_jobs
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.errors import Outcome
from ebbflow.infra.events import BATCH_ATTEMPT, PLAN, SUPERVISED, Event, read_events
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.lineage import newest_commits
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class SupervisedRun:
    """One recorded run of the flow.

    Attributes:
        commit: key of the job's newest commit at its end.
        failures: how many failures it counts for.
        seconds: its duration.
    """

    verdict: str
    commit: str | None
    ended_utc: float
    failures: int = 1
    seconds: float = 0.0

    @property
    def began_utc(self) -> float:
        return self.ended_utc - self.seconds


@dataclass(frozen=True, kw_only=True)
class JobRecord:
    """The job's state in its store.

    Attributes:
        interruptions: numbers of generations that were interrupted.
        failures: numbers of generations that the program itself failed.
        attempts: cause of the end of each AWS Batch job, by id (`infra.batch.Cause`).
        unsettled: some Batch jobs have no recorded end.
        commit: key of the newest commit.
        runs: oldest first.
        report: None if the job has not begun or its events allow no report.
        why: why there is no report.
        finished: complete under the current settings.
        passed: preflight passed under these settings and a gang was started.
        deadline_utc: of the newest plan, Unix time; None: no deadline.
    """

    interruptions: frozenset[int] = frozenset()
    failures: frozenset[int] = frozenset()
    attempts: dict[str, str] = field(default_factory=dict)
    unsettled: bool = False
    commit: str | None = None
    runs: tuple[SupervisedRun, ...] = ()
    report: RunReport | None = None
    why: str = "nothing was recorded"
    run: str = ""
    finished: bool = False
    passed: bool = False
    deadline_utc: float | None = None

    @property
    def begun(self) -> bool:
        return bool(self.run)

    def with_runs(self, *runs: SupervisedRun) -> JobRecord:
        """Return the record with runs added that have ended since it was read."""
        return replace(self, runs=tuple(sorted((*self.runs, *runs), key=lambda past_run: past_run.ended_utc)))

    def cost(self) -> str:
        """Describe the job's cost so far."""
        if self.report is None:
            return f"its cost is unknown: {self.why}"
        simulated = " at a simulated price" if (self.report.plan or {}).get("simulated") else ""
        return f"it has cost ${_money(self.report.total_usd)}{simulated}"


def _money(usd: Decimal) -> str:
    return f"{usd:.4f}" if usd < 1 else f"{usd:.2f}"


def read_record(job_store: Store, config: RunConfig) -> JobRecord:
    """Read the record from the store. Raises StoreError; without a ledger only the figures are missing."""
    use_signing_key(config.checkpoint.signing_key_env)
    events = read_events(job_store)
    if not events:
        return JobRecord(commit=_newest_commit(job_store))
    generations = read_generations(events)
    ended = [generation for generation in generations.values() if generation.unplanned]
    report, why = _report(events)
    same_settings = _written_config(job_store) == config.model_dump(mode="json")
    return JobRecord(
        interruptions=frozenset(generation.number for generation in ended if not generation.user_code),
        failures=frozenset(generation.number for generation in ended if generation.user_code),
        attempts={event.data["job_id"]: event.data["cause"] for event in events if event.name == BATCH_ATTEMPT},
        unsettled=bool(unsettled_jobs(events)),
        commit=_newest_commit(job_store),
        runs=tuple(_read_past_run(event) for event in events if event.name == SUPERVISED),
        report=report,
        why=why,
        run=events[-1].run,
        finished=report is not None and report.outcome is Outcome.COMPLETED and same_settings,
        passed=bool(generations) and same_settings,
        deadline_utc=_deadline_utc(events, config),
    )


def _deadline_utc(events: Sequence[Event], config: RunConfig) -> float | None:
    """Return the deadline as configured now, counted from the job's first plan."""
    started = [event.data.get("started_utc") for event in events if event.name == PLAN]
    hours = config.cost.deadline_hours
    return None if hours is None or not started or started[-1] is None else started[-1] + hours * 3600


def _newest_commit(job_store: Store) -> str | None:
    try:
        newest = next(newest_commits(job_store), None)
    except TrainingError:  # a broken lineage, which the next start reports
        return None
    return None if newest is None else newest.key


def _report(events: Sequence[Event]) -> tuple[RunReport | None, str]:
    try:
        return build_report(events), ""
    except CostError as error:
        return None, str(error)


def _written_config(job_store: Store) -> dict | None:
    """Return the configuration of the newest run that passed preflight."""
    if job_store.head("config.json") is None:
        return None
    return json.loads(job_store.get("config.json")).get("config")


def _read_past_run(event: Event) -> SupervisedRun:
    data = event.data
    return SupervisedRun(
        verdict=data["verdict"],
        commit=data.get("commit"),
        ended_utc=event.t_wall,
        failures=int(data.get("failures") or 1),
        seconds=float(data.get("seconds") or 0.0),
    )


LONGEST_PAUSE_SECONDS = 600.0
# A gap between two runs beyond the usual pause in which no supervisor was running. A failing machine of AWS Batch is
# replaced within this time.
ALONE_SECONDS = 3600.0

# Outcomes that another start would repeat, or limits that the user has set. Preflight is final for settings that have
# never passed it, so that the user hears at once.
FINAL = frozenset({
    Outcome.CONFIG, Outcome.PREFLIGHT, Outcome.BUDGET, Outcome.CRASH_LOOP, Outcome.NON_FINITE, Outcome.DEADLINE,
    Outcome.NO_RESTORE, Outcome.ROLLED_BACK,
})  # fmt: skip


class RunVerdict(StrEnum):
    """How a run of the flow ended, for the decision to go on."""

    COMPLETED = "completed"
    FINAL = "final"  # its outcome ends the job
    INTERRUPTION = "interruption"  # from outside: continue, however often
    NO_CAPACITY = "no_capacity"  # try again after a pause
    NOT_READY = "not_ready"  # preflight refused what passed before: a service does not answer
    FAILURE = "failure"  # the program's fault or a run without effect: limited without a new commit


def judge_run(exit_code: int, before: JobRecord, after: JobRecord) -> RunVerdict:
    """Judge one run by its exit code and the job's record before and after.

    Exit codes 1 and 75 say little, since a run that died before any training has them too. So the record decides: an
    interruption left an interrupted generation, or an attempt that AWS Batch calls reclaimed.

    Args:
        exit_code: of the flow, negative for a signal.
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
    # Batch's causes come last, because a container that drained after a notice looks failed to Batch.
    causes = {cause for job, cause in after.attempts.items() if job not in before.attempts}
    if "user_code" in causes:
        return RunVerdict.FAILURE
    if {"reclaimed", "terminated"} & causes:
        return RunVerdict.INTERRUPTION
    return RunVerdict.NO_CAPACITY if "never_started" in causes else RunVerdict.FAILURE


def count_failures(before: JobRecord, after: JobRecord) -> int:
    """Return how many failures a run counts for: 1 after a new commit, else its failed Batch jobs, at least 1."""
    if before.commit != after.commit:
        return 1
    return max(1, sum(cause == "user_code" for job, cause in after.attempts.items() if job not in before.attempts))


def count_in_a_row(record: JobRecord, verdict: RunVerdict) -> int:
    """Count runs with this verdict (of failures: the failures) since the newest commit.

    Runs with other verdicts in between do not end the row. A time without a supervisor does, except for failures.
    """
    failure = verdict is RunVerdict.FAILURE
    runs = record.runs if failure else _since_alone(record.runs, LONGEST_PAUSE_SECONDS)
    ended = (past_run for past_run in runs if past_run.verdict == verdict and past_run.commit == record.commit)
    return sum(past_run.failures if failure else 1 for past_run in ended)


def pause_seconds(record: JobRecord, verdict: RunVerdict, first_seconds: float) -> float:
    """Return the pause after the record's last run.

    None after an interruption with a new commit; otherwise first_seconds, doubled with each run without progress, at
    most 600 s.
    """
    times = count_in_a_row(record, verdict)
    if verdict is RunVerdict.INTERRUPTION:
        times -= 1  # the first run with this commit may have created it
    return min(first_seconds * 2 ** (times - 1), LONGEST_PAUSE_SECONDS) if times > 0 else 0.0


def waited_seconds(
    record: JobRecord, verdict: RunVerdict, now_utc: float, *, usual_pause_seconds: float = LONGEST_PAUSE_SECONDS
) -> float:
    """Return since when all runs have had this verdict (no capacity, or not ready); 0 if the last one did not.

    Times before a period without a supervisor do not count: nothing was waiting then.

    Args:
        usual_pause_seconds: the longest pause of a supervisor between two runs.
    """
    since = now_utc
    for past_run in reversed(_since_alone(record.runs, usual_pause_seconds)):
        if past_run.verdict != verdict:
            break
        since = past_run.ended_utc
    return now_utc - since


def _since_alone(runs: tuple[SupervisedRun, ...], usual_pause_seconds: float) -> tuple[SupervisedRun, ...]:
    """Return the last runs without a longer time between them than under a supervisor."""
    longest = usual_pause_seconds + ALONE_SECONDS
    pairs = enumerate(itertools.pairwise(runs), start=1)
    first = max((at for at, (before, after) in pairs if after.began_utc - before.ended_utc > longest), default=0)
    return runs[first:]
