"""`ebbflow jobs`: list the jobs of a team with state, spent dollars and forecast, and the jobs that
may start next.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path

from ebbflow.core.config.load import load_config
from ebbflow.core.config.problems import ConfigError
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.errors import InfraError, Outcome
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import Event, select_events
from ebbflow.core.grouping import sum_by_key
from ebbflow.core.json_values import JsonObject
from ebbflow.core.layout import TEAM_FILE_KEY
from ebbflow.core.program import DEFAULT_CONFIG, PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.untrusted_text import one_line
from ebbflow.cost.amounts import format_count, format_usd, round_amount
from ebbflow.cost.errors import CostError, ReportError
from ebbflow.cost.finance.focus import (
    focus_rows,
    month_of,
    read_settings,
    write_focus,
)
from ebbflow.cost.finance.team import (
    Admission,
    JobMoney,
    Team,
    WaitingJob,
    admit,
    left_text,
    left_usd,
    read_team,
)
from ebbflow.cost.finance.team_store import (
    IN_STORE,
    TeamState,
    load_team,
    read_money,
    read_state,
)
from ebbflow.cost.jobs import find_running_launcher, list_jobs, read_job
from ebbflow.cost.ledger.generations import find_final_outcome
from ebbflow.cost.ledger.pricing import select_plans
from ebbflow.cost.plan.candidates import read_progress
from ebbflow.cost.plan.plan import make_plan
from ebbflow.cost.prices.source import open_prices
from ebbflow.cost.report.render_text import format_table
from ebbflow.cost.report.report import RunReport

RUNNING = "running"
WAITING = "waiting"
DONE = "done"
_HEADER = ("job", "project", "owner", "state", "spent", "forecast", "limit")


@dataclass(frozen=True, kw_only=True)
class TeamJob:
    """A job of a team, with its state, dollars and forecast."""

    money: JobMoney
    # "running", "waiting", "done", "interrupted", or the outcome with which the job stopped
    state: str
    owner: str = ""
    forecast_usd: float | None = None  # estimated dollars of the whole job; None if unknown
    # The job's charges as FOCUS rows (`cost.focus`)
    rows: tuple[dict[str, str], ...] = field(default=(), repr=False)
    # For a waiting job, a text that says whether it may start, and why; empty for other jobs
    words: str = ""
    slurm_job: str = ""  # id of its newest Slurm job, if the end of that is not recorded

    @property
    def expected_usd(self) -> Decimal:
        """The forecast in dollars; the spent dollars if these are higher or there is no forecast."""
        return max(self.money.spent_usd, Decimal(str(self.forecast_usd or 0)))

    @property
    def simulated_usd(self) -> Decimal:
        """Simulated dollars of the job, which are not billed because it ran on this machine."""
        return sum((Decimal(row.get("x_SimulatedCost") or 0) for row in self.rows), Decimal(0))

    def to_json(self) -> JsonObject:
        money = self.money
        return {
            "job": money.job,
            "project": money.project,
            "owner": self.owner,
            "state": self.state,
            "spent_usd": str(money.spent_usd),
            "simulated_usd": str(round_amount(self.simulated_usd)),
            "spent_by_month": {month: str(usd) for month, usd in sorted(money.spent.items())},
            "forecast_usd": self.forecast_usd,
            "limit_usd": None if money.limit_usd is None else str(money.limit_usd),
            "value_usd": None if money.value_usd is None else str(money.value_usd),
            "words": self.words,
            "slurm_job": self.slurm_job or None,
        }


def record_job(events: Sequence[Event], *, running: bool) -> TeamJob:
    """Summarize a job from its events, ordered by time.

    Raises LedgerError if the events contradict each other.
    """
    settings = read_settings(events)
    rows = focus_rows(events)
    outcome = find_final_outcome(events)
    done = outcome is not None and outcome.payload.outcome is Outcome.COMPLETED
    if running:
        state = RUNNING
    elif done:
        state = DONE
    elif outcome:
        state = str(outcome.payload.outcome)
    else:
        state = "interrupted"
    money = read_money(events, rows)
    return TeamJob(
        money=money,
        state=state,
        owner=str(settings.get("cost.owner") or ""),
        forecast_usd=float(money.spent_usd) if done else _forecast_usd(events, settings, money),
        rows=tuple(rows),
        slurm_job=_find_slurm_job(events),
    )


def read_records(jobs: Sequence[str], store: str | None) -> list[TeamJob]:
    """Summarize the named jobs. An unreadable job is left out with a message."""
    found = []
    for job in jobs:
        try:
            events = read_job(job, store)
            found.append(
                record_job(events, running=find_running_launcher(job, events, store) is not None)
            )
        except (CostError, InfraError) as error:
            print(f"{one_line(job)} is left out: {one_line(error)}", file=sys.stderr)
    return found


def config_money(job: str, config: RunConfig, now_utc: float) -> JobMoney:
    """Return the budget of a new job with this configuration, and the latest time at which it ends
    if it starts now.
    """
    limit = config.cost.budget_usd
    hours = config.cost.deadline_hours
    return JobMoney(
        job=job,
        project=config.cost.project or "",
        limit_usd=None if limit is None else Decimal(str(limit)),
        runs_until=None if hours is None else now_utc + 3600 * hours,
    )


def admit_waiting(team: Team, now_utc: float, records: Sequence[TeamJob]) -> list[Admission]:
    """Decide which waiting jobs may start (`cost.finance.team.admit`).

    Omit jobs whose configuration or plan is refused.
    """
    every = [team_job.money for team_job in records]
    running = [team_job.money for team_job in records if team_job.state == RUNNING]
    waiting = [
        team_job.money for team_job in records if team_job.state == WAITING and not team_job.words
    ]
    return admit(team, now_utc, every, running, waiting)


def render_jobs(records: Sequence[TeamJob], team: Team, now_utc: float) -> str:
    lines = [
        (
            one_line(team_job.money.job),
            one_line(team_job.money.project),
            one_line(team_job.owner),
            team_job.state,
            _format_spent(team_job),
            format_usd(team_job.forecast_usd, 2),
            format_usd(team_job.money.limit_usd, 2),
        )
        for team_job in records
    ]
    text = format_table(lines, _HEADER, left=4, width=None)
    text += [
        f"· {one_line(team_job.money.job)}: {one_line(team_job.words)}"
        for team_job in records
        if team_job.words
    ]
    text += [
        f"· {one_line(team_job.money.job)}: Slurm job {one_line(team_job.slurm_job)}"
        for team_job in records
        if team_job.slurm_job
    ]
    month = month_of(now_utc)
    projects = sorted(
        {project for project, _ in team.budgets} | {team_job.money.project for team_job in records}
    )
    for project in projects:
        mine = [team_job for team_job in records if team_job.money.project == project]
        spent = sum((job.money.spent.get(month, Decimal(0)) for job in mine), Decimal(0))
        running = [job.money for job in mine if job.state == RUNNING]
        left = left_usd(team, project, month, now_utc, [job.money for job in mine], running)
        budget = format_usd(team.budget_usd(project, month), 2)
        if left is None:
            limit = "no budget"
        else:
            limit = f"of {budget}; {left_text(left)} left to admit"
        total = sum((job.expected_usd for job in mine), Decimal(0))
        if project:
            name = f"project {one_line(project)}"
        else:
            name = "no project"
        text.append(
            f"{name}, {month}: {format_usd(spent, 2)} spent {limit}; all its jobs: "
            f"{format_usd(total, 2)} (e)"
        )
    return "\n".join(line.rstrip() for line in text)


def group_rows(rows: Sequence[dict[str, str]], key: str) -> dict[tuple[str, str], Decimal]:
    """Sum the dollars of charges by (month, value of `key`).

    `key` is "job", "owner", "project" or "tag:NAME".
    """
    kind, _, tag = key.partition(":")

    def value(row: dict[str, str]) -> str:
        if kind == "tag":
            return json.loads(row["Tags"]).get(tag, "")
        return row[f"x_{key.capitalize()}"]

    found = sum_by_key(
        ((row["BillingPeriodStart"][:7], value(row)), Decimal(row["BilledCost"])) for row in rows
    )
    return dict(sorted(found.items()))


def add_command(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "jobs", help="all jobs: running, waiting, done, spent, forecast, and who may start next"
    )
    parser.add_argument(
        "job",
        nargs="*",
        metavar="RUN",
        help="names, folders or s3:// URIs; none: all of --store, else of this machine",
    )
    parser.add_argument(
        "--team",
        nargs="?",
        const=IN_STORE,
        default=None,
        metavar="FILE",
        help="budgets by project and month, waiting jobs, and what running jobs hold; without FILE, "
        "of the team file in the store",
    )
    parser.add_argument(
        "--publish", action="store_true", help="put the file of --team into the store"
    )
    parser.add_argument("--store", default=None, metavar="URI", help="the store of the jobs")
    parser.add_argument(
        "--by",
        type=_group_key,
        default=None,
        metavar="KEY",
        help="dollars by month and job, owner, project or tag:NAME",
    )
    parser.add_argument(
        "--focus",
        type=Path,
        default=None,
        metavar="CSV",
        help="write all charges with FOCUS column names",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, dollars as exact strings")
    parser.add_argument(
        "--html", type=Path, default=None, metavar="FILE", help="write all jobs as one HTML page"
    )
    parser.set_defaults(run=_jobs)


def _forecast_usd(events: Sequence[Event], settings: JsonObject, money: JobMoney) -> float | None:
    """Forecast the dollars of the whole job; None without a plan.

    They are the spent dollars plus remaining steps × the newest plan's dollars per step.
    """
    plans = select_plans(events)
    if not plans:
        return None
    plan = plans[-1].payload
    if plan.chosen is None or not plan.chosen.usd_per_step:
        return None
    if settings.get("script"):
        total = plan.steps
    else:
        total = settings.get("training.max_steps")
    steps = total if isinstance(total, int) else 0
    left = steps - read_progress(events).done_steps
    return float(money.spent_usd) + max(0, left) * float(plan.chosen.usd_per_step)


def _waiting_records(team: Team, folder: Path, known: Sequence[TeamJob]) -> Iterator[TeamJob]:
    """Yield a record for each waiting job in team.yaml that is neither running nor done.

    A job that ran before without completing keeps its spent dollars, which are copied from its
    record in `known`.
    """
    by_name = {team_job.money.job: team_job for team_job in known}
    for waiting in team.waiting:
        before = by_name.get(waiting.job)
        if before is None or before.state not in (RUNNING, DONE):
            yield _waiting_record(waiting, folder, before)


def _waiting_record(waiting: WaitingJob, folder: Path, before: TeamJob | None) -> TeamJob:
    config = load_config(folder / waiting.config, project_root=PROJECT_ROOT).config
    now = time.time()
    plan = None
    if config.user_code is None:
        plan = make_plan(
            config,
            now_utc=now,
            prices=open_prices(config, now, project_root=PROJECT_ROOT, network=False),
        )
    if plan is None or plan.chosen is None:
        expected = None
    else:
        expected = plan.chosen.expected_usd
    money = config_money(waiting.job, config, now)
    money = replace(
        money, value_usd=waiting.value_usd, spent={} if before is None else before.money.spent
    )
    if plan and plan.refusal:
        refused = f"plan refused ({plan.refusal.outcome}): {plan.refusal.message}"
    else:
        refused = ""
    if before is None:
        rows = ()
    else:
        rows = before.rows
    return TeamJob(
        money=money,
        state=WAITING,
        owner=config.cost.owner or "",
        forecast_usd=expected,
        rows=rows,
        words=refused,
    )


def _find_slurm_job(events: Sequence[Event]) -> str:
    """Return the id of the newest Slurm job; "" if there is none or its end is recorded."""
    jobs = select_events(events, SlurmJobPayload)
    if not jobs or jobs[-1].payload.does == "ended":
        return ""
    return jobs[-1].payload.job_id


def _group_key(text: str) -> str:
    if text not in ("job", "owner", "project") and not (text.startswith("tag:") and text[4:]):
        raise argparse.ArgumentTypeError(f"{text}: expected job, owner, project or tag:NAME")
    return text


def _jobs(arguments: argparse.Namespace) -> int:
    store = arguments.store
    if arguments.team == IN_STORE and store is None:
        store = load_config(DEFAULT_CONFIG, [], project_root=PROJECT_ROOT).config.store
    if arguments.publish:
        return _publish(arguments.team, store)
    team = Team()
    root = None
    if arguments.team is not None and store is not None:
        root = Store.open(store, create=False)
        team = load_team(arguments.team, root, Path())
    elif arguments.team is not None:
        team = read_team(Path(arguments.team))
    records = read_records(arguments.job or [*list_jobs(store), *team.jobs], store)
    if root is not None:
        records = _with_reservations(records, read_state(root, team))
    now = time.time()
    if arguments.team is not None:
        records = _with_waiting(team, arguments.team, now, records)
    if not records:
        raise ReportError(
            f"no job in {store or 'the list of this machine; fix: name one, or give --store'}"
        )
    rows = [row for record in records for row in record.rows]
    if arguments.focus is not None:
        print(f"{arguments.focus}: {write_focus(arguments.focus, rows)} charges", file=sys.stderr)
    if arguments.html is not None:
        _write_page(arguments.html, records, store)
    if arguments.by is not None:
        grouped = group_rows(rows, arguments.by)
        lines = [
            (month, one_line(value) or "-", format_usd(usd, 4))
            for (month, value), usd in grouped.items()
        ]
        print("\n".join(format_table(lines, ("month", arguments.by, "spent"), left=2, width=None)))
    elif arguments.json:
        print(json.dumps([record.to_json() for record in records], indent=1, allow_nan=False))
    else:
        print(render_jobs(records, team, now))
    return 0


def _with_waiting(
    team: Team, file: str, now_utc: float, records: Sequence[TeamJob]
) -> list[TeamJob]:
    """Return the records, followed by one for each waiting job, which says whether it may start."""
    folder = Path() if file == IN_STORE else Path(file).parent
    try:
        waiting = list(_waiting_records(team, folder, records))
    except ConfigError as error:
        raise ReportError(f"{file}: a waiting job's configuration is invalid:\n{error}") from error
    named = {record.money.job for record in waiting}
    every = [*(record for record in records if record.money.job not in named), *waiting]
    said = {
        admission.job.job: f"{admission.verdict}: {admission.words}"
        for admission in admit_waiting(team, now_utc, every)
    }
    order = {name: number for number, name in enumerate(said)}
    every = [replace(record, words=said.get(record.money.job, record.words)) for record in every]
    return sorted(
        every,
        key=lambda record: (record.state == WAITING, order.get(record.money.job, len(order))),
    )


def _publish(file: str | None, store: str | None) -> int:
    """Put a team file into the store."""
    if file in (None, IN_STORE) or store is None:
        raise ReportError("--publish needs --team FILE and --store URI")
    path = Path(str(file))
    read_team(path)
    root = Store.open(store)
    root.put(TEAM_FILE_KEY, path.read_bytes())
    print(f"{root.uri}/{TEAM_FILE_KEY}: written; use it with cost.team_file={IN_STORE}")
    return 0


def _with_reservations(records: Sequence[TeamJob], state: TeamState) -> list[TeamJob]:
    """Return the records, with each job that holds a reservation shown as running."""
    by_name = {record.money.job: record for record in records}
    held = state.held()
    for reservation in state.reservations:
        money = held[reservation.job]
        words = f"holds {left_text(money.may_spend_usd)}, {reservation.holder}"
        known = by_name.get(reservation.job) or TeamJob(money=money, state=RUNNING)
        by_name[reservation.job] = replace(known, money=money, state=RUNNING, words=words)
    return list(by_name.values())


def _write_page(path: Path, records: Sequence[TeamJob], store: str | None) -> None:
    from ebbflow.cost.jobs import load_report
    from ebbflow.cost.report.render_jobs import render_jobs_page

    reports: dict[str, RunReport] = {}
    for team_job in records:
        with contextlib.suppress(CostError, InfraError):  # a job that waits has no events yet
            reports[team_job.money.job] = load_report(team_job.money.job, store=store)
    rows = [
        (
            team_job.money.job,
            team_job.money.project,
            team_job.owner,
            team_job.state,
            float(team_job.money.spent_usd + team_job.simulated_usd),
            team_job.forecast_usd,
        )
        for team_job in records
    ]
    page = render_jobs_page(rows, reports, [row for record in records for row in record.rows])
    try:
        path.write_text(page, errors="backslashreplace")
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from error
    print(f"{path}: {format_count(len(records), 'job')}", file=sys.stderr)


def _format_spent(team_job: TeamJob) -> str:
    if team_job.simulated_usd:
        return f"{format_usd(team_job.simulated_usd)} simulated"
    return format_usd(team_job.money.spent_usd, 2)
