"""Reservations in a team's budget: which runs hold one, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.event_log import EventLog
from ebbflow.core.events import GENERATION_STARTED, OUTCOME, SLURM_JOB, Origin
from ebbflow.core.layout import TEAM_FILE_KEY, job_prefix
from ebbflow.core.store import Store
from ebbflow.core.team_reservations import is_reserved
from ebbflow.cost.finance import team_store
from ebbflow.cost.finance.team import JobMoney, parse_team
from ebbflow.cost.finance.team_store import judge_job, read_state, reserve_budget
from ebbflow.flows import gang
from ebbflow.flows.launch import Launch
from ebbflow.infra.slurm.commands import SlurmJob, SlurmRejected, SlurmUnavailable
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.launch.slurm_node import make_reservation_check

TEAM = "budgets: [{project: vision, month: every, usd: 10}]"
MINE = JobMoney(job="a", project="vision", limit_usd=Decimal(6), runs_until=2e9)
COST = {"project": "vision", "budget_usd": 6, "deadline_hours": 2, "team_file": "store"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("EBBFLOW_RUNS", str(tmp_path / "runs"))
    store = Store.open(str(tmp_path / "store"))
    store.put(TEAM_FILE_KEY, TEAM.encode())
    return store


def write_events(root: Store, job: str, process: str, *events: tuple[str, dict]) -> None:
    origin = Origin(job=job, run="1", generation=1, process=process)
    with EventLog(root.sub(job_prefix(job)), origin) as log:
        for name, data in events:
            log.emit(name, **data)


def holders(root: Store, jobs: Sequence[str] = ()) -> list[str]:
    team = replace(parse_team(TEAM, "team.yaml"), jobs=tuple(jobs))
    return [reservation.job for reservation in read_state(root, team).reservations]


@pytest.mark.parametrize(("words", "is_held"), [((), False), (("--with", "batch"), True)])
def test_a_launcher_reserves_dollars_only_for_a_run_that_pays(
    root: Store, words: tuple[str, ...], is_held: bool
) -> None:
    config = RunConfig.model_validate({"store": root.uri, "cost": COST})
    launch = Launch(["train_flow.py", "run", *words])
    launch.claim_job("a", config, "run")
    launch.release()
    assert is_reserved(root, "a") is is_held


@pytest.mark.parametrize(("decorators", "is_watched"), [([], False), (["batch"], True)])
def test_a_gang_watches_the_reservation_only_where_it_pays(
    root: Store, decorators: list[str], is_watched: bool
) -> None:
    config = RunConfig.model_validate({"store": root.uri, "cost": COST})
    step = SimpleNamespace(decorators=[SimpleNamespace(name=name) for name in decorators])
    flow: Any = SimpleNamespace(
        job="a",
        settings={"config": config.model_dump(mode="json")},
        train=step,
        train_node=step,
    )
    this: Any = SimpleNamespace(run_id="1")
    check = gang._reservation_check(flow, this, 0)
    assert (check is not None) is is_watched


def test_a_job_of_the_same_name_in_another_store_only_adds_what_it_has_spent(
    root: Store, tmp_path: Path
) -> None:
    reserve_budget(root, parse_team(TEAM, "team.yaml"), MINE)
    write_events(root, "a", "agent", (GENERATION_STARTED, {"nodes": 1, "processes_per_node": 1}))
    other = Store.open(str(tmp_path / "other"))
    write_events(other, "a", "flow", (OUTCOME, {"outcome": "completed", "message": ""}))
    assert holders(root, [f"{other.uri}/{job_prefix('a')}"]) == ["a"]

    state = team_store.TeamState(
        number=1,
        reservations=(),
        spent=(replace(MINE, spent={"2026-11": Decimal(1)}),),
        spent_elsewhere=(replace(MINE, spent={"2026-11": Decimal(5)}),),
    )
    november = 1795000000.0
    verdict = judge_job(state, parse_team(TEAM, "team.yaml"), MINE, november)
    assert verdict.words.startswith("may spend $5.00. project 'vision' in 2026-11: $4.00 left")


def test_a_slurm_job_without_a_recorded_end_keeps_its_reservation(root: Store) -> None:
    reserve_budget(root, parse_team(TEAM, "team.yaml"), MINE)
    write_events(root, "a", "slurm-7-submitted", (SLURM_JOB, {"does": "submitted", "job_id": "7"}))
    assert holders(root) == ["a"]
    write_events(root, "a", "slurm-7-adopted", (SLURM_JOB, {"does": "adopted", "job_id": "7"}))
    assert holders(root) == ["a"]
    write_events(root, "a", "slurm-7-ended", (SLURM_JOB, {"does": "ended", "job_id": "7"}))
    assert holders(root) == []


@pytest.mark.parametrize(
    ("seen", "is_held"),
    [
        (SlurmJob(job_id="7", state="CANCELLED", name="a"), False),
        (SlurmJob(job_id="7", state="CANCELLED", name="b"), True),  # of another cluster
        (SlurmJob(job_id="7", state="CANCELLED", nodes="n1", name="a"), True),  # it has a bill
        (SlurmJob(job_id="7", state="PENDING", name="a"), True),
        (SlurmJob(job_id="7", state=""), True),  # Slurm has forgotten it
        (SlurmUnavailable("no answer"), True),
        (SlurmRejected("no scontrol"), True),
    ],
)
def test_a_slurm_job_that_was_cancelled_in_the_queue_releases_its_reservation(
    root: Store, monkeypatch: pytest.MonkeyPatch, seen: SlurmJob | Exception, is_held: bool
) -> None:
    def look_up(job_id: str) -> SlurmJob:
        assert job_id == "7"
        if isinstance(seen, Exception):
            raise seen
        return seen

    monkeypatch.setattr(team_store, "look_up", look_up)
    reserve_budget(root, parse_team(TEAM, "team.yaml"), MINE)
    write_events(root, "a", "slurm-7-submitted", (SLURM_JOB, {"does": "submitted", "job_id": "7"}))
    assert holders(root) == (["a"] if is_held else [])


def test_node_0_of_a_slurm_job_watches_the_reservation_of_a_team(root: Store) -> None:
    config = RunConfig.model_validate({"store": root.uri, "cost": COST})
    spec = GangSpec(
        job="a",
        run="1",
        attempt=0,
        node=0,
        nodes=2,
        processes_per_node=1,
        main_address="",
        config=config,
        store_uri=root.uri,
        prepared={},
        log_folder="",
        terms=None,
    )
    check = make_reservation_check(spec)
    assert check is not None and not check()
    reserve_budget(root, parse_team(TEAM, "team.yaml"), MINE)
    assert check()
    assert make_reservation_check(replace(spec, node=1)) is None
    assert make_reservation_check(replace(spec, config=RunConfig())) is None
