"""What the job's store knows of the job: all that the supervisor judges by, and the little that it adds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal

from ebbflow.cost.errors import CostError
from ebbflow.cost.ledger.generations import read_generations
from ebbflow.cost.report.report import RunReport, build_report
from ebbflow.flows.attempts.past import unsettled_jobs
from ebbflow.infra.config.schema import RunConfig
from ebbflow.infra.events import BATCH_ATTEMPT, PLAN, SUPERVISED, Event, read_events
from ebbflow.infra.outcome import Outcome
from ebbflow.infra.store import Store
from ebbflow.training.checkpoint.lineage import newest_commits
from ebbflow.training.checkpoint.signing import use_signing_key
from ebbflow.training.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Spell:
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
class Record:
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
    spells: tuple[Spell, ...] = ()
    report: RunReport | None = None
    why: str = "nothing was recorded"
    run: str = ""
    finished: bool = False
    passed: bool = False
    deadline_utc: float | None = None

    @property
    def begun(self) -> bool:
        return bool(self.run)

    def with_spells(self, *spells: Spell) -> Record:
        """The same with runs that have ended since it was read."""
        return replace(self, spells=tuple(sorted((*self.spells, *spells), key=lambda spell: spell.ended_utc)))

    def cost(self) -> str:
        """What the job has cost so far, in words."""
        if self.report is None:
            return f"what it has cost is not known: {self.why}"
        simulated = " at a simulated price" if (self.report.plan or {}).get("simulated") else ""
        return f"it has cost ${_money(self.report.total_usd)}{simulated}"


def _money(usd: Decimal) -> str:
    return f"{usd:.4f}" if usd < 1 else f"{usd:.2f}"


def read_record(job_store: Store, config: RunConfig) -> Record:
    """Read everything anew. Raises StoreError; an account that cannot be made is told, and costs only the figures."""
    use_signing_key(config.checkpoint.signing_key_env)
    events = read_events(job_store)
    if not events:
        return Record(commit=_newest_commit(job_store))
    generations = read_generations(events)
    ended = [generation for generation in generations.values() if generation.unplanned]
    report, why = _report(events)
    same_settings = _written_config(job_store) == config.model_dump(mode="json")
    return Record(
        interruptions=frozenset(generation.number for generation in ended if not generation.user_code),
        failures=frozenset(generation.number for generation in ended if generation.user_code),
        attempts={event.data["job_id"]: event.data["cause"] for event in events if event.name == BATCH_ATTEMPT},
        unsettled=bool(unsettled_jobs(events)),
        commit=_newest_commit(job_store),
        spells=tuple(_spell(event) for event in events if event.name == SUPERVISED),
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


def _spell(event: Event) -> Spell:
    data = event.data
    return Spell(
        verdict=data["verdict"],
        commit=data.get("commit"),
        ended_utc=event.t_wall,
        failures=int(data.get("failures") or 1),
        seconds=float(data.get("seconds") or 0.0),
    )
