"""Users' own flows with `@ebbflow`, whose configuration sends their trainings to a real Slurm cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.own_flow import OwnFlow
from tests.support.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.timeout(900)  # for a busy machine

SPOT_USD = 12.0
PARTITIONS = [{"name": "spot", "preemptible": True, "usd_per_node_hour": SPOT_USD}]
TO_SLURM = {
    "EBBFLOW__CLUSTER__PLAN_FOR": "slurm",
    "EBBFLOW__CLUSTER__NODES": "1",
    "EBBFLOW__SLURM__PARTITIONS": json.dumps(PARTITIONS),
    "EBBFLOW__CHECKPOINT__STOP_SECONDS": "15",
    "GLOO_SOCKET_IFNAME": "lo",
}
SLOW = "0.5"  # seconds for each step, so that a preemption comes in mid-job


def on_slurm(folder: Path, name: str) -> OwnFlow:
    flow = OwnFlow(folder, name)
    flow.environment |= TO_SLURM
    return flow


def test_three_own_flows_train_on_slurm_and_one_preemption_changes_no_weight(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """All three run at the same time, so that one job in the high partition preempts all trainings."""
    here = OwnFlow(tmp_path / "here", "single")
    wanted = here.model(here.succeed("run")).weights_sha256
    names = ("single", "configured", "repeated")
    flows = {name: on_slurm(tmp_path / name, name) for name in names}
    (tmp_path / "repeated" / "fixed").touch()
    launchers = {name: flow.start("run", STEP_SECONDS=SLOW) for name, flow in flows.items()}
    flows["single"].await_commit(4)
    cluster.preempt()
    runs = {name: flow.finish(launchers[name]) for name, flow in flows.items()}
    for name, run in runs.items():
        assert run.exit_code == 0, f"{name}: {run.output}"
    model = flows["single"].model(runs["single"])
    assert (model.outcome, model.steps, model.weights_sha256) == ("completed", 24, wanted)
    jobs = model.report.get("money", {}).get("slurm_jobs") or []
    assert [job["cause"] for job in jobs] == ["preempted", "completed"]
    assert model.usd == pytest.approx(
        SPOT_USD * sum(job["node_hours"] or 0.0 for job in jobs), abs=2 * SPOT_USD / 3600
    )
    assert model.price_kind == "stated in slurm.partitions"
    assert flows["configured"].model(runs["configured"]).steps == 16
    assert len(flows["repeated"].artifacts(runs["repeated"], "end", "models")[0][0]) == 2


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gang", "fix: call the step without num_parallel, and set cluster.nodes"),
        ("branches", "current.ebbflow.attach trains in the step itself; fix: "),
    ],
)
def test_a_step_that_is_itself_the_training_is_not_sent_to_slurm(
    tmp_path: Path, name: str, reason: str
) -> None:
    run = on_slurm(tmp_path, name).run("run")
    assert run.exit_code != 0 and reason in " ".join(run.output.split()), run.output
