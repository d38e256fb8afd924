"""Reserve a team's budget in the store: each job that starts holds the dollars that it may spend.

The reservations of all jobs are one document, team/reservations/<number>.json. A launcher reads the
highest number, judges whether its job fits beside the others, and creates the next number, which
succeeds for one launcher only; the other one judges again. So two launchers never get the same
dollars, unless the store ignores the condition that an object must not exist (OpenStack Swift).

A reservation holds while the job's launcher renews its claim (60 s), or node 0's agent writes
events (`AGENT_SECONDS`), both by the store's clock. After that, and after an outcome, the job
spends nothing more, and the next launcher drops it. A job that AWS Batch may still start without
its launcher keeps its reservation until the time limit of its attempt; one that Slurm may start,
until the end of its Slurm job or an outcome is recorded.
"""

from __future__ import annotations

import getpass
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Self

from ebbflow.core.errors import InfraError, ObjectNotFound, StoreError
from ebbflow.core.event_payloads import (
    BatchAttemptPayload,
    BatchSubmittedPayload,
    PlacedPayload,
    SlurmJobPayload,
)
from ebbflow.core.events import Event, find_last_event, read_events, select_events
from ebbflow.core.launchers import running_launcher
from ebbflow.core.layout import (
    RESERVATIONS_PREFIX,
    TEAM_FILE_KEY,
    job_prefix,
    reservations_key,
)
from ebbflow.core.store import Store
from ebbflow.core.store.objects import StoreClock
from ebbflow.core.team_reservations import damaged_document, read_newest_document
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_usd
from ebbflow.cost.errors import CostError, TeamError
from ebbflow.cost.finance.focus import focus_rows, read_settings, spent_by_month
from ebbflow.cost.finance.team import Admission, JobMoney, Team, admit, parse_team, read_team
from ebbflow.cost.jobs import find_job_uri, list_jobs, list_known_jobs
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.cost.plan.candidates import read_progress
from ebbflow.infra.slurm.commands import SlurmRejected, SlurmUnavailable, look_up

# Value of `cost.team_file` and `ebbflow jobs --team` for the team file in the store.
IN_STORE = "store"
# An agent writes its events every 10 s, and leaves if it cannot read its reservation for half of this
# (`ebbflow.training.launch.budget_lease`).
AGENT_SECONDS = 180.0
_TRIES = 50
_KEPT = 100  # older documents


@dataclass(frozen=True, kw_only=True)
class BudgetReservation:
    """The budget that a running job holds."""

    job: str
    project: str
    limit_usd: str | None  # `cost.budget_usd`, a decimal number
    runs_until: float | None  # latest end (Unix time) by the job's deadline
    holder: str  # user and host
    since_utc: float  # by the store's clock

    @classmethod
    def of(cls, money: JobMoney, since_utc: float) -> Self:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container's user need not have a name
            user = "unknown"
        limit = None if money.limit_usd is None else str(money.limit_usd)
        return cls(
            job=money.job,
            project=money.project,
            limit_usd=limit,
            runs_until=money.runs_until,
            holder=f"{user} on {socket.gethostname()}",
            since_utc=since_utc,
        )

    def money(self, spent: JobMoney | None) -> JobMoney:
        """Return the dollars that the job has spent and may still spend.

        Args:
            spent: the job by its own events; None if it has none yet.
        """
        limit = None if self.limit_usd is None else Decimal(self.limit_usd)
        known = JobMoney(
            job=self.job, project=self.project, limit_usd=limit, runs_until=self.runs_until
        )
        return known if spent is None else replace(known, spent=spent.spent)


@dataclass(frozen=True, kw_only=True)
class TeamState:
    """The spending of a team's jobs, and their reservations."""

    number: int  # of the newest document
    reservations: tuple[BudgetReservation, ...]  # that hold
    spent: tuple[JobMoney, ...]  # jobs of the team's store
    # jobs of other stores, which only spend: their names may be those of the team's store
    spent_elsewhere: tuple[JobMoney, ...] = ()

    def held(self, besides: str = "") -> dict[str, JobMoney]:
        """Return the dollars of each job that holds a reservation, except the job `besides`."""
        spent = {money.job: money for money in self.spent}
        return {
            reservation.job: reservation.money(spent.get(reservation.job))
            for reservation in self.reservations
            if reservation.job != besides
        }


def read_money(events: Sequence[Event], rows: Sequence[dict[str, str]]) -> JobMoney:
    """Summarize a job's spending and limits.

    events: ordered by time; rows: the charges of these events (`focus_rows`)
    """
    settings = read_settings(events)
    limit = settings.get("cost.budget_usd")
    hours = settings.get("cost.deadline_hours")
    started = read_progress(events).started_utc
    return JobMoney(
        job=events[0].job,
        project=str(settings.get("cost.project") or ""),
        spent=spent_by_month(rows),
        limit_usd=None if limit is None else Decimal(str(limit)),
        runs_until=started + 3600 * float(hours) if started is not None and hours else None,
    )


def load_team(name: str, root: Store, folder: Path) -> Team:
    """Read a team file, or the team file in the store if `name` is "store".

    Raises TeamError and StoreError.

    Args:
        folder: to which a path is relative.
    """
    if name != IN_STORE:
        return read_team(folder / name)
    place = f"{root.uri}/{TEAM_FILE_KEY}"
    try:
        text = root.get(TEAM_FILE_KEY).decode()
    except ObjectNotFound:
        raise TeamError(
            f"{place}: missing; fix: ebbflow jobs --team FILE --store {root.uri} --publish"
        ) from None
    except UnicodeDecodeError as error:
        raise TeamError(f"{place}: cannot be read: {error}") from error
    return parse_team(text, place)


def read_state(root: Store, team: Team) -> TeamState:
    """Read the active reservations, and the spending of all jobs.

    The jobs are those of the store, of the team file and of this machine. Raises StoreError.
    """
    number, written = _read_newest(root)
    team_uris = {f"{root.uri}/{job_prefix(job)}".rstrip("/") for job in list_jobs(root.uri)}
    uris = sorted(team_uris)
    for job in (*team.jobs, *list_known_jobs()):
        try:
            uris.append(find_job_uri(job, None))
        except CostError as error:  # such as a job whose folder was deleted
            print(f"team budget: {one_line(job)} is left out: {one_line(error)}", flush=True)
    logs: dict[str, list[Event]] = {}
    spent: list[JobMoney] = []
    spent_elsewhere: list[JobMoney] = []
    clock = StoreClock()
    for uri in dict.fromkeys(uri.rstrip("/") for uri in uris):
        try:
            store = Store.open(uri, create=False)
            events = read_events(store)
            if not events:
                continue
            money = read_money(events, focus_rows(events))
            if uri in team_uris:
                logs[money.job] = events
                spent.append(money)
            else:
                spent_elsewhere.append(money)
        except (CostError, InfraError) as error:
            print(f"team budget: {one_line(uri)} is left out: {one_line(error)}", flush=True)
    holding = tuple(
        reservation
        for reservation in written
        if _holds(root, reservation, logs.get(reservation.job, []), clock)
    )
    return TeamState(
        number=number,
        reservations=holding,
        spent=tuple(spent),
        spent_elsewhere=tuple(spent_elsewhere),
    )


def judge_job(state: TeamState, team: Team, mine: JobMoney, now_utc: float) -> Admission:
    """Decide whether a job may start beside those that hold a reservation."""
    spent = {money.job: money for money in state.spent}
    before = spent.pop(mine.job, None)
    if before is not None:
        mine = replace(mine, spent=before.spent)
    held = list(state.held(besides=mine.job).values())
    every = [*spent.values(), *state.spent_elsewhere, mine]
    [verdict] = admit(team, now_utc, every, held, [mine])
    if verdict.verdict == "start":
        return verdict
    return replace(verdict, words=verdict.words + _describe_holders(state, mine))


def reserve_budget(root: Store, team: Team, mine: JobMoney) -> Admission:
    """Reserve the dollars that a job may still spend, if they fit beside the reservations of other
    jobs.

    Raises StoreError.
    """
    for _ in range(_TRIES):
        now = StoreClock().now(root, time.time())
        state = read_state(root, team)
        verdict = judge_job(state, team, mine, now)
        if verdict.verdict != "start":
            return verdict
        reservation = BudgetReservation.of(mine, now)
        others = [kept for kept in state.reservations if kept.job != mine.job]
        document = {"schema": 1, "reservations": [asdict(kept) for kept in [*others, reservation]]}
        number = state.number + 1
        if not root.create(reservations_key(number), json.dumps(document, indent=1).encode()):
            continue  # another launcher was faster: judge again beside its job
        newest, written = _read_newest(root)
        if newest == number and reservation in written:
            _delete_old(root, number)
            return verdict
    raise StoreError(f"{root.uri}/{RESERVATIONS_PREFIX}: no number was free in {_TRIES} tries")


def _describe_holders(state: TeamState, mine: JobMoney) -> str:
    holders = {reservation.job: reservation for reservation in state.reservations}
    parts = []
    for job, money in state.held(besides=mine.job).items():
        if money.project == mine.project:
            since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(holders[job].since_utc))
            holder = one_line(holders[job].holder)
            usd = format_usd(money.may_spend_usd, 2) if money.may_spend_usd.is_finite() else "all"
            parts.append(f"{one_line(job)} {usd} ({holder}, since {since})")
    if not parts:
        return ""
    return f"; held by {', '.join(parts)}"


def _read_newest(root: Store) -> tuple[int, list[BudgetReservation]]:
    document = read_newest_document(root)
    try:
        return document.number, [BudgetReservation(**row) for row in document.rows]
    except TypeError as error:
        raise damaged_document(root, document.key, error) from error


def _delete_old(root: Store, number: int) -> None:
    for meta in root.list(RESERVATIONS_PREFIX):
        name = meta.key.rpartition("/")[2].removesuffix(".json")
        if name.isdigit() and int(name) <= number - _KEPT:
            root.delete(meta.key)


def _holds(
    root: Store, reservation: BudgetReservation, events: Sequence[Event], clock: StoreClock
) -> bool:
    """Return whether a job with a reservation may still spend money.

    This is so while its launcher or its agents run, or if AWS Batch or Slurm may still start its
    attempt.
    """
    store = root.sub(job_prefix(reservation.job))
    outcome = find_final_outcome(events)
    if running_launcher(store) is not None:
        return True
    if outcome is not None:
        return False
    now = clock.now(root, time.time())
    written = [meta.modified for meta in store.list("events") if "-agent-" in meta.key]
    if written and now - max(written) <= AGENT_SECONDS:
        return True
    if now < _last_attempt_end(store, events):
        return True
    return any(
        not _never_started(reservation.job, slurm_job) for slurm_job in _unended_slurm_jobs(events)
    )


def _unended_slurm_jobs(events: Sequence[Event]) -> set[str]:
    """Return the ids of the Slurm jobs whose end is not recorded.

    They may start without a launcher.
    """
    jobs = [event.payload for event in select_events(events, SlurmJobPayload)]
    ended = {job.job_id for job in jobs if job.does == "ended"}
    return {job.job_id for job in jobs} - ended


def _never_started(job: str, slurm_job: str) -> bool:
    """Return whether this machine's Slurm proves that the job's Slurm job ended in the queue.

    This happens after `scancel` without a launcher. The name is compared, because another cluster
    may have another job with the same id.
    """
    try:
        seen = look_up(slurm_job)
    except (SlurmRejected, SlurmUnavailable):
        return False
    return seen.never_started and seen.name == job


def _last_attempt_end(store: Store, events: Sequence[Event]) -> float:
    """Return the time until which an attempt may still run on AWS Batch.

    This is a Unix time by the store's clock; 0 if the end of every attempt is recorded.
    """
    ended = {event.payload.job_id for event in select_events(events, BatchAttemptPayload)}
    submitted = [event.payload.job_id for event in select_events(events, BatchSubmittedPayload)]
    placed = find_last_event(events, PlacedPayload)
    if set(submitted) <= ended or placed is None or not placed.payload.placement:
        return 0.0
    seconds = placed.payload.placement.get("wall_seconds") or 0.0
    wait = placed.payload.placement.get("runnable_seconds") or 0.0
    newest = max((meta.modified for meta in store.list("events")), default=0.0)
    return newest + float(seconds) + float(wait)
