"""The job's record in its store, and the verdict on each run."""

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
    """One run of the flow as it was recorded. commit: the job's newest one at its end. failures: what it counts for.
    seconds: how long it took."""

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
    """interruptions, failures: numbers of the generations that ended unplanned, the failures by the program's own
    fault. attempts: of AWS Batch, job id and cause of the end (`infra.batch.attempts.Cause`); unsettled: there are some
    of whose end nothing is told. commit: key of the newest commit. spells: oldest first. report: None where the job has
    not begun, or where no account can be made of its events (why says so). finished: it is complete, under the settings
    that are asked for. passed: under these it has passed preflight before, and a gang was started. deadline_utc: Unix
    time by which the newest plan is to be done; None: it has none.
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
        """The same with runs that have ended since it was read."""
        return replace(self, runs=tuple(sorted((*self.runs, *runs), key=lambda past_run: past_run.ended_utc)))

    def cost(self) -> str:
        """What the job has cost so far, in words."""
        if self.report is None:
            return f"what it has cost is not known: {self.why}"
        simulated = " at a simulated price" if (self.report.plan or {}).get("simulated") else ""
        return f"it has cost ${_money(self.report.total_usd)}{simulated}"


def _money(usd: Decimal) -> str:
    return f"{usd:.4f}" if usd < 1 else f"{usd:.2f}"


def read_record(job_store: Store, config: RunConfig) -> JobRecord:
    """Read everything anew. Raises StoreError; an account that cannot be made is told, and costs only the figures."""
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
    """By the job's own clock, which began with its first plan, and the deadline as it is configured now."""
    started = [event.data.get("started_utc") for event in events if event.name == PLAN]
    hours = config.cost.deadline_hours
    return None if hours is None or not started or started[-1] is None else started[-1] + hours * 3600


def _newest_commit(job_store: Store) -> str | None:
    try:
        newest = next(newest_commits(job_store), None)
    except TrainingError:  # a lineage that cannot be followed: the next start will say what is wrong with it
        return None
    return None if newest is None else newest.key


def _report(events: Sequence[Event]) -> tuple[RunReport | None, str]:
    try:
        return build_report(events), ""
    except CostError as error:
        return None, str(error)


def _written_config(job_store: Store) -> dict | None:
    """Of the newest run that passed preflight."""
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
# Between two runs, beyond the usual pause: for so long no supervisor was there, and what was waited for before is over.
# A machine of AWS Batch that fails is replaced within it.
ALONE_SECONDS = 3600.0

# The same start would end alike, or a limit that the user has set is reached. Preflight is final for settings
# that have never passed it: whoever has just written them is to be told at once.
FINAL = frozenset({
    Outcome.CONFIG, Outcome.PREFLIGHT, Outcome.BUDGET, Outcome.CRASH_LOOP, Outcome.NON_FINITE, Outcome.DEADLINE,
    Outcome.NO_RESTORE, Outcome.ROLLED_BACK,
})  # fmt: skip


class RunVerdict(StrEnum):
    """How a run of the flow ended, as far as going on is concerned."""

    COMPLETED = "completed"
    FINAL = "final"  # its outcome ends the job
    INTERRUPTION = "interruption"  # from outside: goes on, however often
    NO_CAPACITY = "no_capacity"  # asks again after a pause
    NOT_READY = "not_ready"  # preflight refused what it has let through before: something does not answer now
    FAILURE = "failure"  # the program's fault, or a run that came to nothing: only so often without a new commit


def judge_run(exit_code: int, before: JobRecord, after: JobRecord) -> RunVerdict:
    """exit_code: of the flow, negative when a signal ended it. before, after: what the store knew around it.

    An exit code of 1 or 75 says little: also a run that died before it trained anything has it. So the record decides:
    an interruption is what has left an interrupted generation, or an attempt that AWS Batch says was reclaimed.
    """
    if exit_code == Outcome.COMPLETED.exit_code:
        return RunVerdict.COMPLETED
    if exit_code == Outcome.PREFLIGHT.exit_code and after.passed:
        return RunVerdict.NOT_READY  # what has passed will pass again, and a refusal costs nothing
    if exit_code in {outcome.exit_code for outcome in FINAL}:
        return RunVerdict.FINAL
    if exit_code == Outcome.NO_CAPACITY.exit_code:
        return RunVerdict.NO_CAPACITY
    if after.failures - before.failures:
        return RunVerdict.FAILURE
    if after.interruptions - before.interruptions:
        return RunVerdict.INTERRUPTION
    # Batch's word last: to it, a container that drained after a notice has merely failed.
    causes = {cause for job, cause in after.attempts.items() if job not in before.attempts}
    if "user_code" in causes:
        return RunVerdict.FAILURE
    if {"reclaimed", "terminated"} & causes:
        return RunVerdict.INTERRUPTION
    return RunVerdict.NO_CAPACITY if "never_started" in causes else RunVerdict.FAILURE


def count_failures(before: JobRecord, after: JobRecord) -> int:
    """What a run that failed counts for: each of its Batch jobs that the program ended, where none led to a commit."""
    if before.commit != after.commit:
        return 1
    return max(1, sum(cause == "user_code" for job, cause in after.attempts.items() if job not in before.attempts))


def count_in_a_row(record: JobRecord, verdict: RunVerdict) -> int:
    """How often runs ended so, back to the newest commit; of failures, how many they were. What is in between of
    another kind does not break the row: interruptions are counted apart from failures. A time without a supervisor
    does, but for failures, which nobody's absence cures."""
    failure = verdict is RunVerdict.FAILURE
    runs = record.runs if failure else _since_alone(record.runs, LONGEST_PAUSE_SECONDS)
    ended = (past_run for past_run in runs if past_run.verdict == verdict and past_run.commit == record.commit)
    return sum(past_run.failures if failure else 1 for past_run in ended)


def pause_seconds(record: JobRecord, verdict: RunVerdict, first_seconds: float) -> float:
    """After a run that is the last one in `record`: none when it was interrupted after a new commit; otherwise
    first_seconds, and twice as long each time that the job comes no further, at most 600 s."""
    times = count_in_a_row(record, verdict)
    if verdict is RunVerdict.INTERRUPTION:
        times -= 1  # the first one that ends with this commit may have made it
    return min(first_seconds * 2 ** (times - 1), LONGEST_PAUSE_SECONDS) if times > 0 else 0.0


def waited_seconds(
    record: JobRecord, verdict: RunVerdict, now_utc: float, *, usual_pause_seconds: float = LONGEST_PAUSE_SECONDS
) -> float:
    """Since when all runs have ended so, for want of capacity or not ready; 0 where the last one did not. Before a time
    without a supervisor nothing is counted: nobody waited in it, and whoever starts one anew asks it to wait anew.

    usual_pause_seconds: the longest that a supervisor makes between two runs.
    """
    since = now_utc
    for past_run in reversed(_since_alone(record.runs, usual_pause_seconds)):
        if past_run.verdict != verdict:
            break
        since = past_run.ended_utc
    return now_utc - since


def _since_alone(runs: tuple[SupervisedRun, ...], usual_pause_seconds: float) -> tuple[SupervisedRun, ...]:
    """Those that followed each other under a supervisor, up to the last one."""
    longest = usual_pause_seconds + ALONE_SECONDS
    pairs = enumerate(itertools.pairwise(runs), start=1)
    first = max((at for at, (before, after) in pairs if after.began_utc - before.ended_utc > longest), default=0)
    return runs[first:]
