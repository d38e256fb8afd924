"""A team's budget in the store: real launchers that race for it, on a bucket, with clocks apart."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.errors import StoreError
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import GENERATION_STARTED, OUTCOME, Origin
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.core.team_reservations import is_reserved
from ebbflow.cost.finance import team_store
from ebbflow.cost.finance.team import JobMoney, parse_team
from ebbflow.training.launch.budget_lease import BudgetLease
from tests.support.flow import wait_until
from tests.support.s3.fixture import FailingServer, failing_s3

__all__ = ["failing_s3"]  # a fixture

ROOT = Path(__file__).parents[2]
TEAM = "budgets: [{project: vision, month: every, usd: 10}]"
LAUNCHER = """
import sys, time
real = time.time
time.time = lambda: real() + float(sys.argv[3])
from ebbflow.core.config.schema import RunConfig
from ebbflow.flows.launch import Launch
cost = {"project": "vision", "budget_usd": 6, "deadline_hours": 2, "team_file": "store"}
config = RunConfig.model_validate({"store": sys.argv[1], "cost": cost})
print("ready", flush=True)
sys.stdin.readline()
launch = Launch(["train_flow.py", "run", "--with", "batch"])
launch.claim_job(sys.argv[2], config, "run")
print("started", flush=True)
sys.stdin.readline()
launch.release()
"""


def start(uri: str, job: str, clock_seconds: float = 0.0) -> subprocess.Popen[str]:
    """Start a launcher whose clock is wrong, up to the line on which it claims its job."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, uri, job, str(clock_seconds)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    """ "started", or why the launcher ended."""
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline().strip()
    if line:
        return line
    assert process.wait(30) == 3
    return process.stderr.read()


def write_event(uri: str, job: str, name: str, **data: Any) -> None:
    origin = Origin(job=job, run="1", generation=1, process="agent")
    with EventLog(Store.open(uri).sub(job_prefix(job)), origin) as log:
        log.emit(name, **data)


def test_of_two_launchers_that_race_for_the_last_dollars_one_starts_and_its_death_frees_them(
    failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    failing_s3.use(monkeypatch)
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "runs"))
    uri = f"s3://{failing_s3.new_bucket()}/team-a"
    (tmp_path / "team.yaml").write_text(TEAM)
    command = [sys.executable, "-m", "ebbflow", "jobs", "--store", uri, "--team"]
    published = [*command, str(tmp_path / "team.yaml"), "--publish"]
    subprocess.run(published, cwd=ROOT, check=True, capture_output=True)
    first = start(uri, "a", -300.0)
    second = start(uri, "b", +300.0)
    try:
        go(first)
        go(second)
        answers = {"a": answer(first), "b": answer(second)}
        assert "started" in answers.values(), answers
        [winner] = [job for job, said in answers.items() if said == "started"]
        [loser] = {"a", "b"} - {winner}
        refused = answers[loser]
        assert refused.count("\n") == 1, "one line"
        for part in ("may spend $6.00", "$4.00 left of $10.00", f"held by {winner} $6.00 ("):
            assert part in refused, refused
        assert abs(time.time() - since(refused)) < 120.0, "by the store's clock"
        shown = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert f"{winner}: holds $6.00" in shown and f"{loser}: holds" not in shown, shown

        # Its machine is lost: while its agents run on, the dollars are not free
        held = {"a": first, "b": second}[winner]
        held.kill()
        held.wait()
        write_event(uri, winner, GENERATION_STARTED, nodes=1, processes_per_node=1)
        again = start(uri, loser)
        go(again)
        assert f"held by {winner} $6.00" in answer(again)
        write_event(uri, winner, OUTCOME, outcome="failed", message="")
        last = start(uri, loser)
        go(last)
        assert answer(last) == "started"
        last.kill()
        assert not is_reserved(Store.open(uri), winner)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()


def since(refusal: str) -> float:
    text = refusal.partition("since ")[2].partition(" UTC")[0]
    return time.mktime(time.strptime(text, "%Y-%m-%d %H:%M")) - time.timezone


def test_an_expired_reservation_frees_only_what_the_job_can_no_longer_spend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "runs"))
    root = Store.open(str(tmp_path / "store"))
    team = parse_team(TEAM, "team.yaml")
    mine = JobMoney(job="a", project="vision", limit_usd=Decimal(6), runs_until=time.time() + 3600)
    other = replace(mine, job="b")
    monkeypatch.setattr(team_store, "_holds", lambda *_: True)
    assert team_store.reserve_budget(root, team, mine).verdict == "start"
    assert team_store.reserve_budget(root, team, other).verdict == "wait"
    assert (
        team_store.reserve_budget(root, team, replace(other, limit_usd=Decimal(4))).verdict
        == "start"
    )
    monkeypatch.undo()
    # Neither has a launcher, agents, or a submitted attempt: what they have spent stays spent
    assert (
        team_store.reserve_budget(root, team, replace(mine, limit_usd=Decimal(10))).verdict
        == "start"
    )
    assert [kept.job for kept in team_store.read_state(root, team).reservations] == []


def test_a_gang_leaves_when_its_reservation_is_gone_or_unknown_for_too_long() -> None:
    drained: list[str] = []
    reserved = [True, True, False]
    lease = BudgetLease(lambda: reserved.pop(0), lambda: drained.append("gone"), look_seconds=0.01)
    wait_until("the drain", lambda: drained, 10, pause=0.01)
    lease.close()
    assert not reserved

    def fail() -> bool:
        raise StoreError("no answer")

    silent = BudgetLease(
        fail, lambda: drained.append("silent"), look_seconds=0.01, unknown_seconds=0.1
    )
    wait_until("the drain", lambda: len(drained) == 2, 10, pause=0.01)
    silent.close()
    assert drained == ["gone", "silent"]
