"""What to do next with a job that is not completed: for each outcome the command that really goes on with it."""

from __future__ import annotations

import math
import shlex
from decimal import ROUND_CEILING, Decimal
from typing import Any, NamedTuple

from ebbflow.cost.report.figures import plain
from ebbflow.cost.report.report import RunReport
from ebbflow.infra.outcome import Outcome

PYTHON = ".venv/bin/python"
_FLOW = "flows/train_flow.py"
# `run` reads the configuration anew; the events do not hold where it came from.
_AS_BEFORE = "(add the --config and --set of before)"
_SENT_AS_BEFORE = "(add the --with, --config and --set of before)"


# What a person must allow before a start gives up commits.
_PERMITS = {Outcome.NO_RESTORE: "--from-scratch", Outcome.ROLLED_BACK: "--accept-rollback"}


class NextStep(NamedTuple):
    """words: when and why, without a full stop; command: a line for a shell in the project's folder."""

    words: str
    command: str


def resume_line(report: RunReport, *, python: str = PYTHON) -> NextStep | None:
    """How to go on with a job; None when it is completed or running. python: the interpreter to name.

    `resume` repeats the steps of a run with its plan and configuration as they were: it cures what came from outside.
    What a limit or a value stopped needs a new `run` of the same job, which restores the job's last commit.
    """
    if report.outcome in (None, Outcome.COMPLETED):
        return None
    words, settings = _advice(report)
    if settings is None and _was_sent_away(report):
        words, settings = f"{words} {_SENT_AS_BEFORE}", []
    interpreter = shlex.quote(plain(python))
    run = plain(report.events.get("run") or "")
    if settings is None and run:
        return NextStep(words, f"{interpreter} {_FLOW} resume train --origin-run-id {shlex.quote(run)}")
    command = f"{interpreter} {_FLOW} run --job {shlex.quote(plain(report.job))}"
    permits = [_PERMITS[report.outcome]] if report.outcome in _PERMITS else []
    return NextStep(words, " ".join([command, *permits, *(f"--set {setting}" for setting in settings or [])]))


def _was_sent_away(report: RunReport) -> bool:
    """Training ran on other machines: where it goes next is planned anew, and not as one step of an old run."""
    return bool(report.money.get("attempts"))


def _advice(report: RunReport) -> tuple[str, list[str] | None]:
    """The words, and what to set in a new run; None: resume the run as it is."""
    outcome = report.outcome
    if outcome is Outcome.INTERRUPTED:
        return "to go on from the last commit", None
    if outcome in (Outcome.FAILED, Outcome.CRASH_LOOP):
        return "fix what went wrong, then go on from the last commit", None
    if outcome is Outcome.BUDGET:
        return f"to go on with a larger budget {_AS_BEFORE}", [f"cost.budget_usd={_budget(report)}"]
    if outcome is Outcome.DEADLINE:
        words = f"to go on with a later deadline, which counts anew from the next start {_AS_BEFORE}"
        return words, [f"cost.deadline_hours={_deadline(report)}"]
    if outcome is Outcome.NON_FINITE:
        return _non_finite(report)
    if outcome is Outcome.NO_RESTORE:
        return f"bring back a sound commit and go on, or give up all steps and begin anew {_AS_BEFORE}", []
    if outcome is Outcome.ROLLED_BACK:
        return f"bring the newer commits back and go on, or go on from the older one {_AS_BEFORE}", []
    hint = plain(_refusal(report).get("hint") or "")
    return f"fix what went wrong{f' ({hint})' if hint else ''} and run again {_AS_BEFORE}", []


def _budget(report: RunReport) -> str:
    """As much again as was spent, on top of the old budget, and what the plan needs: its refusal must not come back."""
    plan = report.plan or {}
    spent = float(report.total_usd)
    again = spent + max(spent, plan.get("budget_usd") or 0.0) if spent else 0.0
    return _rounded_up(max(again, _refusal(report).get("enough") or 0.0), "DOLLARS")


def _deadline(report: RunReport) -> str:
    """What the plan said would do, else twice the deadline that did not."""
    enough = _refusal(report).get("enough")
    given = (report.plan or {}).get("deadline_hours") or report.actual.get("wall_hours") or 0.0
    return _rounded_up(enough or 2 * given, "HOURS")


def _non_finite(report: RunReport) -> tuple[str, list[str]]:
    """Half the highest learning rate that was used, which after the warm-up is half the configured one."""
    steps = [step for step, loss in report.loss_curve if loss is None]
    at = f" at step {max(steps):,}" if steps else ""
    words = f"the same run would fail again{at}: lower the learning rate {_AS_BEFORE}"
    rate = report.actual.get("learning_rate")
    return words, [f"training.learning_rate={f'{rate / 2:.3g}' if rate else 'RATE'}"]


def _refusal(report: RunReport) -> dict[str, Any]:
    return (report.plan or {}).get("refusal") or {}


def _rounded_up(value: float, unknown: str) -> str:
    """To two significant digits, never down; `unknown` for what is no amount."""
    if not math.isfinite(value) or value <= 0:
        return unknown
    exact = Decimal(str(value))
    return f"{exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), ROUND_CEILING).normalize():f}"
