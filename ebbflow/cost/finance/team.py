"""Team budgets in dollars per project and month.

They decide which waiting jobs may start, and in which order.

    # team.yaml
    budgets:
      - {project: vision, month: 2026-11, usd: 400}
      - {project: vision, month: every, usd: 250}      # all other months
    waiting:
      - {job: vit-large, config: configs/vit.yaml, value_usd: 900}
    jobs: [s3://bucket/prefix/jobs/vit-small]          # in addition to the jobs that this machine knows

**Admission.** A job may spend at most `cost.budget_usd`; training stops there. It is admitted if
its unspent budget fits into the remaining budget of every month in which it can run: until
`cost.deadline_hours` or, without a deadline, in all later months. The remaining budget of a month
is the project's budget, less the dollars that its jobs spent in that month, less the dollars that
its running jobs may still spend. A running job without `cost.budget_usd` may spend all of it. Thus
no month is overspent as long as jobs stop at their own budgets and deadlines, and are admitted one
at a time, as `ebbflow.cost.finance.team_store` does.

**Order.** Jobs are ordered by `value_usd` per dollar that they may still spend, highest first. Jobs
without a value come last, in the order of the file. A job that does not fit waits, and smaller jobs
may start before it until the month ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import yaml

from ebbflow.cost.amounts import format_usd, read_decimal
from ebbflow.cost.errors import TeamError
from ebbflow.cost.finance.focus import month_of, month_start, next_month

EVERY_MONTH = "every"
_NO_END = "9999-12"
_FAR_UTC = month_start("9000-01")
Verdict = Literal["start", "wait", "refuse"]


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """Job that team.yaml lists as waiting.

    `value_usd` is the value of its result; None if not stated.
    """

    job: str
    config: str
    value_usd: Decimal | None = None


@dataclass(frozen=True, kw_only=True)
class Team:
    """Content of team.yaml.

    `budgets` maps (project, month) to dollars; the month may be `EVERY_MONTH`.
    """

    budgets: Mapping[tuple[str, str], Decimal] = field(default_factory=dict)
    waiting: tuple[WaitingJob, ...] = ()
    jobs: tuple[str, ...] = ()

    def budget_usd(self, project: str, month: str) -> Decimal | None:
        """Return a project's budget for a month in dollars; None if team.yaml has none."""
        return self.budgets.get((project, month), self.budgets.get((project, EVERY_MONTH)))

    def months(self, job: JobMoney, now_utc: float) -> list[str]:
        """Return the months whose project budget must be checked before the job starts.

        These are the months in which the job can run and the budget differs from that of the month
        before. The months between them have the same budget, and no less of it is left, so they
        need no check.
        """
        now = month_of(now_utc)
        named = {
            now,
            *(
                month
                for project, month in self.budgets
                if project == job.project and month != EVERY_MONTH
            ),
        }
        found = named | set(map(next_month, named))
        return [month for month in sorted(found) if now <= month <= job.last_month(now_utc)]


@dataclass(frozen=True, kw_only=True)
class JobMoney:
    """Dollars that a job has spent and may still spend."""

    job: str
    project: str = ""
    spent: Mapping[str, Decimal] = field(default_factory=dict)  # dollars spent in each month
    limit_usd: Decimal | None = None  # `cost.budget_usd`; None if not set
    # latest possible end of the job (Unix time) if it is running or starts now; None if unknown
    runs_until: float | None = None
    value_usd: Decimal | None = None

    @property
    def spent_usd(self) -> Decimal:
        return sum(self.spent.values(), Decimal(0))

    @property
    def may_spend_usd(self) -> Decimal:
        """Unspent dollars of the job's budget; infinite for a job without a budget."""
        if self.limit_usd is None:
            return Decimal("Infinity")
        return max(Decimal(0), self.limit_usd - self.spent_usd)

    def last_month(self, now_utc: float) -> str:
        """Return the last month in which the job can run."""
        until = self.runs_until
        if until is None or until > _FAR_UTC:
            return _NO_END
        return month_of(max(now_utc, until))


@dataclass(frozen=True, kw_only=True)
class Admission:
    """Decision whether a waiting job may start, with the arithmetic behind it."""

    job: JobMoney
    verdict: Verdict
    words: str


def left_usd(
    team: Team,
    project: str,
    month: str,
    now_utc: float,
    jobs: Iterable[JobMoney],
    running: Iterable[JobMoney],
):
    """Return the dollars left of a project's budget for a month; None if team.yaml has no such
    budget.

    Args:
        jobs: Jobs whose spending in the month is subtracted.
        running: Jobs whose unspent budgets are subtracted if they can run in the month.
    """
    budget = team.budget_usd(project, month)
    if budget is None:
        return None
    spent = sum(
        (job.spent.get(month, Decimal(0)) for job in jobs if job.project == project), Decimal(0)
    )
    held = (
        job.may_spend_usd
        for job in running
        if job.project == project and month <= job.last_month(now_utc)
    )
    return budget - spent - sum(held, Decimal(0))


def order_by_value(waiting: Iterable[JobMoney]) -> list[JobMoney]:
    """Order jobs by value per dollar that they may still spend, highest first.

    Jobs without a value come last.
    """

    def key(job: JobMoney) -> tuple[bool, Decimal]:
        return job.value_usd is None, -(job.value_usd or Decimal(0)) / max(
            job.may_spend_usd, Decimal("0.01")
        )

    return sorted(waiting, key=key)


def admit(
    team: Team,
    now_utc: float,
    jobs: Sequence[JobMoney],
    running: Sequence[JobMoney],
    waiting: Iterable[JobMoney],
) -> list[Admission]:
    """Decide for each waiting job, in the order of `order_by_value`, whether it may start now.

    Args:
        jobs: All jobs that spent money, including running and waiting ones.
    """
    known: dict[tuple[str, str], Decimal | None] = {}
    found = []
    for job in order_by_value(waiting):
        months = team.months(job, now_utc)
        for month in months:
            if (job.project, month) not in known:
                known[job.project, month] = left_usd(
                    team, job.project, month, now_utc, jobs, running
                )
        left = {month: usd for month in months if (usd := known[job.project, month]) is not None}
        verdict, words = _judge(team, job, left)
        found.append(Admission(job=job, verdict=verdict, words=words))
        if verdict == "start":
            known |= {(job.project, month): usd - job.may_spend_usd for month, usd in left.items()}
    return found


def left_text(usd: Decimal) -> str:
    if usd.is_finite():
        return format_usd(usd, 2)
    return "nothing (a running job has no cost.budget_usd)"


def read_team(path: Path) -> Team:
    """Read a YAML file of a team's budgets and waiting jobs.

    Raises TeamError with file:line and the key for an invalid value.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise TeamError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    return parse_team(text, str(path))


def parse_team(text: str, path: str) -> Team:
    """Parse the text of a team file. Error messages name the file as `path`. Raises TeamError."""
    try:
        data = yaml.load(text, Loader=_LineLoader) or {}
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # a date such as 2026-02-30
        raise TeamError(f"{path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise TeamError(f"{path}:1: expected the keys budgets, waiting and jobs")
    _check_keys(path, data, set(), {"budgets", "waiting", "jobs"})
    budgets: dict[tuple[str, str], Decimal] = {}
    for entry in _entries(path, data, "budgets"):
        _check_keys(path, entry, {"project", "month", "usd"}, set())
        month = str(entry["month"])[:7]
        usd = _usd(path, entry, "usd")
        if month != EVERY_MONTH:
            try:
                month = month_of(month_start(month))
                next_month(month)  # the last month of the calendar has none
            except ValueError:
                why = f"{entry['month']!r} is neither a month such as 2026-11 nor {EVERY_MONTH!r}"
                raise TeamError(f"{path}:{entry['line']}: month: {why}") from None
        if (str(entry["project"]), month) in budgets:
            raise TeamError(
                f"{path}:{entry['line']}: project {entry['project']!r} has two budgets for {month}"
            )
        budgets[str(entry["project"]), month] = usd
    waiting = []
    for entry in _entries(path, data, "waiting"):
        _check_keys(path, entry, {"job", "config"}, {"value_usd"})
        if "value_usd" in entry:
            value = _usd(path, entry, "value_usd")
        else:
            value = None
        waiting.append(
            WaitingJob(job=str(entry["job"]), config=str(entry["config"]), value_usd=value)
        )
    jobs = data.get("jobs") or []
    if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
        raise TeamError(f"{path}:{data['line']}: jobs: expected a list of names or URIs of jobs")
    return Team(budgets=budgets, waiting=tuple(waiting), jobs=tuple(jobs))


def _judge(team: Team, job: JobMoney, left: Mapping[str, Decimal]) -> tuple[Verdict, str]:
    """Decide whether the job's unspent budget fits into `left`.

    `left` has the project's remaining dollars in each month of the job.
    """
    needed = job.may_spend_usd
    for month, usd in left.items():
        budget = team.budget_usd(job.project, month) or Decimal(0)
        where = (
            f"project {job.project!r} in {month}: {left_text(usd)} left of {format_usd(budget, 2)}"
        )
        if job.limit_usd is None:
            return (
                "refuse",
                "set cost.budget_usd: without a limit of its own the job may spend anything. "
                f"{where}",
            )
        if needed > usd:
            ever = needed + job.spent.get(month, Decimal(0)) <= budget
            return "wait" if ever else "refuse", f"may spend {format_usd(needed, 2)}. {where}"
    return "start", f"may spend {'anything' if job.limit_usd is None else format_usd(needed, 2)}"


class _LineLoader(yaml.SafeLoader):
    """YAML loader that adds its line number to each mapping, as the key `line`."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep=deep)
        return {**found, "line": node.start_mark.line + 1}


def _entries(path: str, data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    found = data.get(key) or []
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise TeamError(f"{path}:{data['line']}: {key}: expected a list of mappings")
    return found


def _check_keys(path: str, entry: Mapping[str, Any], needed: set[str], optional: set[str]) -> None:
    given = set(entry) - {"line"}
    missing = needed - given
    if missing:
        raise TeamError(f"{path}:{entry['line']}: {', '.join(sorted(missing))} is missing")
    unknown = given - needed - optional
    if unknown:
        known = ", ".join(sorted(needed | optional))
        raise TeamError(
            f"{path}:{entry['line']}: unknown key {', '.join(map(str, unknown))}; known: {known}"
        )


def _usd(path: str, entry: Mapping[str, Any], key: str) -> Decimal:
    with contextlib.suppress(ValueError):
        usd = read_decimal(str(entry[key]))
        if usd >= 0:
            return usd
    raise TeamError(f"{path}:{entry['line']}: {key}: {entry[key]!r} is not dollars, 0 or more")
