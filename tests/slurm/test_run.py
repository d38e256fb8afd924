"""`ebbflow run --with slurm` on a real cluster: the flow's training steps as Slurm jobs."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ebbflow.core.config.schema import CheckpointConfig, RunConfig
from ebbflow.core.errors import Outcome
from ebbflow.core.event_payloads import SlurmJobPayload
from ebbflow.core.events import read_events, select_events
from ebbflow.core.layout import TEAM_FILE_KEY
from ebbflow.core.process import children
from ebbflow.core.store import Store
from ebbflow.flows.job import Job
from ebbflow.flows.slurm.attempt import adopt, run_attempt
from ebbflow.infra.slurm.commands import look_up
from ebbflow.training.launch.messages import GangSpec
from ebbflow.training.launch.slurm_node import NodeResult, SlurmOrder, order_key, result_key
from tests.support.flow import ROOT
from tests.support.slurm_cluster import SlurmCluster
from tests.support.slurm_flow import SlurmRunner

pytestmark = pytest.mark.timeout(900)  # for a busy machine

CONFIG = ROOT / "ebbflow/configs/laptop.yaml"
STEPS = 200
SPOT_USD = 12.0
PRICED = [
    {"name": "safe", "usd_per_node_hour": 20.0},
    {"name": "spot", "preemptible": True, "usd_per_node_hour": SPOT_USD},
]


def test_a_supervised_job_survives_its_launcher_and_a_preemption_and_ends_bit_equal(
    runner: SlurmRunner, weights: str
) -> None:
    """The supervisor starts another launcher, which adopts the Slurm job of the killed one."""
    cluster = runner.cluster
    words = runner.words("sent", "--pause-seconds=1", partitions=PRICED, steps=STEPS)
    other = cluster.preempt(600)  # so that the job waits
    supervisor = runner.start(
        "supervise", str(CONFIG), *words[1:], program=("-m", "ebbflow"), cwd=ROOT
    )
    cluster.wait_until("a waiting job", lambda: len(cluster.jobs()) == 2)
    (launcher,) = children(supervisor.pid)
    os.kill(launcher, signal.SIGKILL)
    cluster.wait_until("adoption", lambda: "pending: adopted" in runner.log.read_text())
    (adopted,) = set(cluster.jobs()) - {other}
    cluster.ask("scancel", other)
    runner.await_commit("sent")
    cluster.preempt()
    run = runner.finish(supervisor, 600)
    assert run.exit_code == 0, run.output
    assert run.report["weights_sha256"] == weights, run.output
    assert runner.causes() == ["preempted", "completed"], run.output
    assert runner.slurm_events()[0]["job_id"] == adopted
    rows = run.report["money"]["slurm_jobs"]
    assert (rows[0]["cause"], rows[0]["reason"]) == ("preempted", "FAILED, preempted")
    assert {row["partition"] for row in rows} == {"spot"}, "the cheaper one"
    records = runner.folder.rglob("sysmeta_attempt_order_*.json")
    orders = [json.loads(json.loads(path.read_text())["value"]) for path in records]
    assert len(orders) >= len(rows) == 2, "of the killed launcher's task too"
    assert {order["pool"] for order in orders} == {"partition spot"}
    assert {order["reason"] for order in orders} == {row["why"] for row in rows}
    # Slurm's clock has whole seconds
    assert run.report["total_usd"] == pytest.approx(
        SPOT_USD * sum(row["node_hours"] for row in rows), abs=2 * 2 * SPOT_USD / 3600
    )
    assert "stated in slurm.partitions" in run.report["actual"]["price_kind"]


def test_slurm_tells_a_job_that_was_cancelled_in_the_queue_from_one_that_ran(
    cluster: SlurmCluster,
) -> None:
    queued = cluster.ask("sbatch", "--parsable", "--hold", "--job-name=q", "--wrap=true").strip()
    cluster.ask("scancel", queued)
    ran = cluster.ask("sbatch", "--parsable", "--job-name=r", "--wrap=true").strip()
    cluster.wait_until("both ends", lambda: all(look_up(job).ended for job in (queued, ran)))
    assert (look_up(queued).name, look_up(queued).never_started) == ("q", True)
    assert (look_up(ran).name, look_up(ran).never_started) == ("r", False)


def test_a_job_that_has_lost_its_reservation_and_gets_no_other_is_not_submitted(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    root = Store.open(str(tmp_path / "store"))
    root.put(TEAM_FILE_KEY, b"budgets: [{project: vision, month: every, usd: 4}]")
    cost = {"project": "vision", "budget_usd": 5, "deadline_hours": 2, "team_file": "store"}
    config = RunConfig.model_validate({"store": root.uri, "cost": cost})
    spec = GangSpec(
        job="poor",
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
    end = run_attempt(Job(name="poor", run="1", config=config), spec, number=1)
    assert end.outcome is Outcome.BUDGET and not end.goes_on
    assert end.message.startswith("team budget: may spend $5.00. project 'vision' in ")
    assert cluster.jobs() == []


def test_an_agent_of_a_requeued_job_starts_no_rank(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    command = [
        sys.executable,
        "-m",
        "ebbflow.training.launch.slurm_node",
        str(tmp_path),
        "no-order",
    ]
    done = subprocess.run(["srun", "-N2", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    assert done.stdout.count("left to its launcher") == 2


def test_a_live_job_with_other_settings_leaves_and_its_node_hours_are_recorded(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    config = RunConfig(store=str(tmp_path / "store"), checkpoint=CheckpointConfig(stop_seconds=15))
    job = Job(name="sent", run="2", config=config)
    spec = GangSpec(
        job=job.name,
        run="1",
        attempt=0,
        node=0,
        nodes=2,
        processes_per_node=1,
        main_address="",
        config=RunConfig(store=config.store),
        store_uri=config.store,
        prepared={},
        log_folder="",
    )
    key = order_key("1", 1)
    job.store.put(key, SlurmOrder(gang=spec.to_json(), round=1).model_dump_json().encode())
    token = hashlib.sha256(job.store.uri.encode()).hexdigest()[:12]
    ready = tmp_path / "ready"
    options = ("-N2", f"--comment=ebbflow:{token}:1:1", "-o", "/dev/null")
    agents = f"srun bash -c 'touch {ready}-$SLURM_PROCID; exec sleep 600'"
    job_id = cluster.ask("sbatch", "--parsable", *options, f"--wrap={agents}").strip()
    cluster.wait_until("agents", lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    left = NodeResult(job_id=job_id, outcome=Outcome.INTERRUPTED, step=7)
    job.store.put(result_key(key, 0), left.model_dump_json().encode())
    assert adopt(job, config) is None
    (event,) = select_events(read_events(job.store), SlurmJobPayload)
    end = event.payload
    assert (end.job_id, end.does, end.cause, end.nodes) == (job_id, "ended", "cancelled", 2)
    assert end.started_utc is not None and end.stopped_utc is not None
    assert adopt(job, config) is None
    assert len(select_events(read_events(job.store), SlurmJobPayload)) == 1


def test_a_queue_that_never_grants_ends_the_run(runner: SlurmRunner) -> None:
    blocker = runner.cluster.preempt(600)
    words = runner.words("sent", "--set", "slurm.queue_minutes=0.05", steps=STEPS)
    run = runner.run(*words)
    assert run.exit_code == Outcome.NO_CAPACITY.exit_code, run.output
    assert "spot and safe did not grant 2 nodes within 0.05 min; fix: " in run.output
    assert runner.causes() == ["no nodes in time"] * 2
    assert runner.cluster.jobs() == [blocker]
