"""Reservation of a job's dollars in its team's budget, made by the job's launcher."""

from __future__ import annotations

import time

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.core.store import Store
from ebbflow.core.store.objects import StoreClock
from ebbflow.core.team_reservations import is_reserved

_FIX = "fix: lower cost.budget_usd, wait, or raise the budget (ebbflow jobs --team)"


def reserve_team_budget(root: Store, job: str, config: RunConfig) -> str:
    """Reserve the job's dollars in the team's budget. Return "", or why they do not fit.

    Raises:
        TeamError: the team file is invalid.
        StoreError: the store has no valid answer.
    """
    # Late, since they import what reads prices and configurations
    from ebbflow.cost.finance.team_store import load_team, reserve_budget
    from ebbflow.cost.job_list import config_money

    team = load_team(str(config.cost.team_file), root, PROJECT_ROOT)
    now = StoreClock().now(root, time.time())
    verdict = reserve_budget(root, team, config_money(job, config, now))
    if verdict.verdict == "start":
        return ""
    return f"team budget: {verdict.words}; {_FIX}"


def restore_reservation(root: Store, job: str, config: RunConfig) -> str:
    """Renew a running job's reservation if it is lost. Return "", or why the dollars do not fit.

    Without a reservation, the job's next attempt would leave at once.

    Raises as `reserve_team_budget` does.
    """
    if config.cost.team_file is None or is_reserved(root, job):
        return ""
    return reserve_team_budget(root, job, config)
