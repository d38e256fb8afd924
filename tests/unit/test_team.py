"""Budgets over many jobs: the team file, admission, fair order, charges with FOCUS names, and the
list of jobs.
"""

from __future__ import annotations

import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from ebbflow.core.events import CONFIGURED, Event
from ebbflow.core.layout import event_key
from ebbflow.core.store import Store
from ebbflow.cost.errors import TeamError
from ebbflow.cost.finance.focus import (
    FOCUS_COLUMNS,
    focus_rows,
    month_of,
    month_start,
    next_month,
    spent_by_month,
    write_focus,
)
from ebbflow.cost.finance.team import JobMoney, Team, admit, order_by_value, read_team
from ebbflow.cost.job_list import group_rows, record_job
from ebbflow.cost.ledger.ledger import fold
from tests.support.timelines import WALL, GangLog, event, plan_event

ROOT = Path(__file__).parents[2]
MONTH = month_of(WALL)


def settings(**values: object) -> Event:
    rows = [
        {"key": key.replace("__", "."), "value": value, "source": "file"}
        for key, value in values.items()
    ]
    return event(CONFIGURED, -1.0, settings=rows)


def trained(
    start: float = 0.0, hours: float = 2.0, *, done: bool = True, **known: object
) -> list[Event]:
    """A job of one node at $3.60 per hour; half of its 200 steps are committed if it is not done."""
    gang = GangLog(
        1,
        start,
        [[0]],
        machines=[{"instance_id": "i-1", "instance_type": "g5.xlarge", "market": "spot"}],
    )
    gang.phase("startup", 100.0)
    gang.steps(1, 200 if done else 100, useful_step=(3600 * hours - 200.0) / (200 if done else 100))
    gang.commit(200 if done else 100)
    gang.phase("shutdown", 100.0)
    if done:
        gang.outcome("completed")
    gang.ended("completed" if done else "node_lost", 3600 * hours)
    plan = plan_event(t=start - 1)
    plan.data["chosen"]["usd_per_step"] = 0.05
    given = {"cost__project": "vision", "cost__owner": "ada", "training__max_steps": 200, **known}
    return [settings(**given), plan, *gang.events]


def money(
    name: str,
    limit: float | None,
    *,
    value: float | None = None,
    hours: float | None = 10.0,
    spent: float = 0,
):
    if hours is None:
        until = None
    else:
        until = WALL + 3600 * hours
    return JobMoney(
        job=name,
        project="vision",
        limit_usd=None if limit is None else Decimal(str(limit)),
        runs_until=until,
        value_usd=None if value is None else Decimal(str(value)),
        spent={MONTH: Decimal(str(spent))},
    )


def test_charges_sum_to_the_ledger_and_are_split_at_the_end_of_a_month(tmp_path: Path) -> None:
    border = month_start(next_month(MONTH)) - WALL
    events = trained(border - 3600.0, 3.0, **{"batch__tags": {"team": "a"}})
    rows = focus_rows(events)
    assert sum(Decimal(row["BilledCost"]) for row in rows) == pytest.approx(
        fold(events).total_usd, abs=Decimal("1e-6")
    )
    spent = spent_by_month(rows)
    assert {month: float(usd) for month, usd in spent.items()} == {
        MONTH: pytest.approx(3.6),
        next_month(MONTH): pytest.approx(7.2),
    }
    assert json.loads(rows[0]["Tags"]) == {
        "team": "a",
        "ebbflow-job": "demo",
        "owner": "ada",
        "project": "vision",
    }
    assert (
        group_rows(rows, "tag:team")[MONTH, "a"]
        == group_rows(rows, "project")[MONTH, "vision"]
        == spent[MONTH]
    )
    assert write_focus(tmp_path / "focus.csv", rows) == len(rows) == 2
    with (tmp_path / "focus.csv").open() as file:
        read = list(csv.DictReader(file))
    assert tuple(read[0]) == FOCUS_COLUMNS and read[0]["PricingCategory"] == "Dynamic"
    assert read[0]["ChargePeriodEnd"] == read[1]["ChargePeriodStart"] == read[0]["BillingPeriodEnd"]


def test_a_record_has_state_spent_and_forecast() -> None:
    done = record_job(trained(), running=False)
    half = record_job(trained(done=False), running=True)
    assert (done.state, done.owner, done.money.project) == ("done", "ada", "vision")
    assert float(done.money.spent_usd) == pytest.approx(7.2) and done.forecast_usd == pytest.approx(
        7.2
    )
    assert half.state == "running" and half.forecast_usd == pytest.approx(7.2 + 100 * 0.05)
    assert record_job(trained(done=False), running=False).state == "interrupted"
    limited = record_job(
        trained(**{"cost__budget_usd": 10.0, "cost__deadline_hours": 5.0}), running=True
    ).money
    assert (
        float(limited.may_spend_usd) == pytest.approx(2.8)
        and limited.runs_until == WALL - 1 + 5 * 3600
    )


def test_order_is_by_value_per_dollar_that_may_still_be_spent() -> None:
    jobs = [
        money("none", 10),
        money("poor", 100, value=100),
        money("rich", 100, value=300),
        money("late", 100, value=90, spent=80),
    ]
    assert [job.job for job in order_by_value(jobs)] == ["late", "rich", "poor", "none"]


def test_admission_counts_spent_dollars_and_what_running_jobs_may_spend() -> None:
    team = Team(budgets={("vision", MONTH): Decimal(100), ("vision", "every"): Decimal(50)})
    running = [money("running", 40, spent=10)]
    waiting = [
        money("big", 80, value=800),
        money("fits", 60, value=60),
        money("more", 1),
        money("free", None),
    ]
    verdicts = {
        entry.job.job: (entry.verdict, entry.words)
        for entry in admit(team, WALL, running, running, waiting)
    }
    assert {name: verdict for name, (verdict, _) in verdicts.items()} == {
        "big": "wait",
        "fits": "start",
        "more": "wait",
        "free": "refuse",
    }
    assert (
        verdicts["big"][1]
        == f"may spend $80.00. project 'vision' in {MONTH}: $60.00 left of $100.00"
    )
    assert "set cost.budget_usd" in verdicts["free"][1]
    [too_large] = admit(team, WALL, [], [], [money("huge", 101)])
    assert too_large.verdict == "refuse"
    beyond = money("beyond", 60, hours=24 * 40)
    assert admit(team, WALL, [], [], [beyond])[0].words.startswith(
        f"may spend $60.00. project 'vision' in {next_month(MONTH)}"
    )
    free = [money("free", None)]
    [held] = admit(team, WALL, free, free, [money("one", 1)])
    assert held.verdict == "wait" and "nothing (a running job has no cost.budget_usd)" in held.words
    later = [money("endless", 40, hours=None)]
    named = next_month(next_month(next_month(MONTH)))
    scarce = replace(team, budgets={**team.budgets, ("vision", named): Decimal(5)})
    assert admit(scarce, WALL, [], [], later)[0].words.startswith(
        f"may spend $40.00. project 'vision' in {named}"
    )
    long = money("long", 20, hours=24 * 120)
    assert admit(team, WALL, [], later, [long])[0].verdict == "wait", "held in all later months"
    assert admit(team, WALL, [], [], [money("ages", 20, hours=1e12)])[0].verdict == "start"
    other = replace(money("other", 1000), project="unknown")
    assert admit(team, WALL, [], [], [other])[0].verdict == "start", "no budget, no limit"


def months(seed: int, count: int) -> Iterator[tuple[str, Decimal, Decimal]]:
    """Simulate months of 50 jobs in two projects that start when admitted, spend by chance at most
    their limits, and end by chance before their deadlines. Yield (project and month, spent,
    budget)."""
    draw = random.Random(seed)
    now = month_start("2026-01")
    budgets = {(project, "every"): Decimal(draw.randrange(200, 900)) for project in "ab"}
    team = Team(budgets=budgets)
    waiting = []
    running = []
    ended = []
    end = now + 30.5 * 86400 * count
    step = 30.5 * 86400 / 50
    while now < end:
        hours = draw.choice([None, draw.uniform(5, 900)])
        new = JobMoney(
            job=str(now), project=draw.choice("ab"), limit_usd=Decimal(draw.randrange(5, 150))
        )
        if draw.random() < 0.3:
            value = None
        else:
            value = Decimal(draw.randrange(1, 500))
        waiting.append((replace(new, value_usd=value), hours))
        asked = [
            replace(job, runs_until=None if hours is None else now + 3600 * hours)
            for job, hours in waiting
        ]
        for decision in admit(team, now, [*running, *ended, *asked], running, asked):
            if decision.verdict == "start":
                running.append(decision.job)
        started = {job.job for job in running}
        waiting = [pair for pair in waiting if pair[0].job not in started and draw.random() > 0.1]
        month = month_of(now)
        still = []
        for job in running:
            usd = job.may_spend_usd * Decimal(str(draw.choice([0.0, draw.random(), 1.0])))
            job = replace(job, spent={**job.spent, month: job.spent.get(month, Decimal(0)) + usd})
            last = job.runs_until or float("inf")
            over = draw.random() < 0.1 or now + 2 * step > last or not job.may_spend_usd
            (ended if over else still).append(job)
        running = still
        ended = [job for job in ended if any(name >= month for name in job.spent)]
        after = now + step
        if month_of(after) != month:
            for project in "ab":
                spent = sum(
                    job.spent.get(month, Decimal(0))
                    for job in (*running, *ended)
                    if job.project == project
                )
                yield f"{project} {month}", spent, budgets[project, "every"]
        now = after


def test_no_simulated_month_exceeds_its_budget() -> None:
    found = []
    for seed in range(3):
        found.extend(months(seed, 8))
    assert len(found) >= 40 and all(spent <= budget for _, spent, budget in found)
    assert sum(spent > budget * Decimal("0.7") for _, spent, budget in found) > len(found) / 3, (
        "budgets are used"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("budgets: [{project: a, month: 2026-11}]", "team.yaml:1: usd is missing"),
        (
            "budgets:\n  - {project: a, month: 2026-11, usd: -3}",
            "team.yaml:2: usd: -3 is not dollars",
        ),
        (
            "budgets:\n  - {project: a, month: soon, usd: 3}",
            "team.yaml:2: month: 'soon' is neither",
        ),
        (
            "budgets: [{project: a, month: every, usd: 3}, {project: a, month: every, usd: 4}]",
            "project 'a' has two",
        ),
        (
            "waiting:\n  - {job: x, config: y, worth: 3}",
            "team.yaml:2: unknown key worth; known: config",
        ),
        ("bugdets: []", "team.yaml:1: unknown key bugdets"),
        ("- 3", "team.yaml:1: expected the keys"),
        ("a: [", "cannot be read"),
        ("budgets: [{project: a, month: 2026-02-30, usd: 3}]", "cannot be read: day"),
        ("[" * 5000, "cannot be read: maximum recursion"),
        (
            "budgets: [{project: a, month: 9999-12, usd: 3}]",
            "team.yaml:1: month: '9999-12' is neither",
        ),
        ("jobs: 5", "team.yaml:1: jobs: expected a list of names"),
        ("jobs: abc", "team.yaml:1: jobs: expected a list of names"),
    ],
)
def test_a_wrong_team_file_names_the_line(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "team.yaml").write_text(text)
    with pytest.raises(TeamError) as raised:
        read_team(tmp_path / "team.yaml")
    assert problem in str(raised.value)


def test_the_team_command_lists_jobs_and_which_may_start(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for name, events in (("small", trained()), ("half", trained(done=False))):
        text = "\n".join(replace(event, job=name).to_json() for event in events)
        Store.open(str(store / "jobs" / name)).put(
            event_key(1, 0, "test", "000000.a"), text.encode()
        )
    limits = (
        "cost: {project: vision, budget_usd: %s, deadline_hours: 3}\ntraining: {max_steps: 100}\n"
    )
    for name, usd in (("one", 5), ("two", 90)):
        (tmp_path / f"{name}.yaml").write_text(limits % usd)
    waiting = "".join(
        f"  - {{job: {name}, config: {name}.yaml, value_usd: 9}}\n" for name in ("two", "one")
    )
    (tmp_path / "team.yaml").write_text(
        f"budgets:\n  - {{project: vision, month: every, usd: 60}}\nwaiting:\n{waiting}"
    )
    command = [
        sys.executable,
        "-m",
        "ebbflow",
        "jobs",
        "small",
        "half",
        "--store",
        str(store),
        "--team",
        "team.yaml",
    ]
    given = {
        "cwd": tmp_path,
        # Else the jobs that earlier tests left on this machine would be named too
        "env": {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")},
        "capture_output": True,
        "text": True,
    }
    done = subprocess.run([*command, "--focus", "out.csv"], timeout=180, check=False, **given)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["small", "half", "one", "two"]
    assert "done" in lines[2] and "interrupted" in lines[3] and "$12.20" in lines[3]
    assert (
        "one: start: may spend $5.00" in done.stdout
        and "two: refuse: may spend $90.00" in done.stdout
    )
    assert (tmp_path / "out.csv").read_text().count("\n") == 3
