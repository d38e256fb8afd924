"""Preflight checks `slurm-*` against a real cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import PartitionConfig, RunConfig, SlurmConfig
from ebbflow.core.preflight import CheckResult, PreflightContext, render_results, run_checks
from ebbflow.infra.slurm.checks import CHECKS, judge_probes
from ebbflow.infra.slurm.probe import NodeProbe
from tests.support.slurm_cluster import GRACE_SECONDS, SlurmCluster


def results(
    *partitions: PartitionConfig, options: tuple[str, ...] = (), **sections: Any
) -> dict[str, CheckResult]:
    slurm = sections.pop("slurm", {})
    config = RunConfig(
        slurm=SlurmConfig(partitions=list(partitions), options=list(options), **slurm), **sections
    )
    context = PreflightContext(config=config, project_root=Path("/"), target="slurm")
    found = run_checks(CHECKS, context)
    assert all("\n" not in result.detail for result in found), render_results(found)
    return {result.id.removeprefix("slurm-"): result for result in found}


def test_a_sound_job_passes_all_checks(cluster: SlurmCluster) -> None:
    spot = PartitionConfig(name="spot", preemptible=True)
    found = results(
        spot, checkpoint={"stop_seconds": 15.0}, cost={"deadline_hours": 3.0}, store="s3://b/p"
    )
    assert found.pop("nodes").detail == "skipped, because slurm.probe is false"
    assert {result.status for result in found.values()} == {"passed"}, found
    assert found["commands"].detail.endswith(", the controller answers")
    assert found["time"].detail == "spot: 1 h per Slurm job, so up to 3 until the deadline"
    assert found["grace"].detail == (
        f"spot: GraceTime {GRACE_SECONDS} s; checkpoint.stop_seconds 15 s"
    )
    default = results(checkpoint={"stop_seconds": 15.0}, store="s3://b/p")
    assert default["partitions"].detail == "the default partition spot"


@pytest.mark.parametrize(
    ("partition", "check", "detail"),
    [
        (PartitionConfig(name="gpu"), "partitions", "there is no partition gpu"),
        (PartitionConfig(name="closed"), "partitions", "closed is DOWN"),
        (
            PartitionConfig(name="safe", gres="gpu:8"),
            "partitions",
            "safe has (null), and no gpu:8",
        ),
        (PartitionConfig(name="spot", max_hours=2.0), "time", "would wait for ever"),
        (
            PartitionConfig(name="safe", max_hours=0.02),
            "time",
            "safe: a time limit of 1.2 min, and saving begins",
        ),
    ],
)
def test_a_partition_that_cannot_run_the_job_is_refused(
    cluster: SlurmCluster, partition: PartitionConfig, check: str, detail: str
) -> None:
    found = results(partition)[check]
    assert found.status == "failed" and detail in found.detail and found.fix


def test_sizes_devices_and_options_are_compared(cluster: SlurmCluster) -> None:
    spot = PartitionConfig(name="spot", preemptible=True)
    many = results(spot, cluster={"nodes": 3})
    assert many["partitions"].detail == "spot allows 2 nodes, cluster.nodes is 3"
    assert many["limits"].status == "failed"
    cuda = results(spot, cluster={"device": "cuda"})
    assert "names no gres, and cluster.device is cuda" in cuda["partitions"].detail
    wrong = results(spot, options=("--reservation=none",))
    assert "reservation" in wrong["limits"].detail.lower()
    slow = results(spot, checkpoint={"stop_seconds": 60.0})["grace"]
    assert slow.status == "warning"
    assert slow.fix == f"--set checkpoint.stop_seconds={GRACE_SECONDS}, or a larger GraceTime"


def test_a_probe_job_tries_store_clocks_and_ports_on_the_nodes(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    settings = {"probe": True, "activate": f"export PATH={Path(sys.executable).parent}:$PATH"}
    found = results(store=str(tmp_path), cluster={"nodes": 2}, slurm=settings)["nodes"]
    assert found.status == "passed", found
    assert "share the store, reach each other, clocks within 0.0" in found.detail
    assert not list(tmp_path.glob("jobs/*")), "the probe leaves nothing in the store"
    blocker = cluster.preempt(600)
    busy = results(store=str(tmp_path), cluster={"nodes": 2}, slurm=settings)["nodes"]
    assert busy.status == "skipped" and "no 2 nodes were free" in busy.detail, busy
    cluster.ask("scancel", blocker)


@pytest.mark.parametrize(
    ("probes", "status", "detail"),
    [
        ([], "failed", "0 of 2 nodes answered"),
        (
            [
                NodeProbe(node=0, name="n1"),
                NodeProbe(node=1, name="n2", problem="cannot reach port"),
            ],
            "failed",
            "n2: cannot reach port",
        ),
        (
            [NodeProbe(node=0, name="n1"), NodeProbe(node=1, name="n2", clock_seconds=90.0)],
            "failed",
            "clocks differ from that of n1: n2 +90.0 s",
        ),
    ],
)
def test_what_nodes_find_is_judged(probes: list[NodeProbe], status: str, detail: str) -> None:
    found = judge_probes(RunConfig.model_validate({"cluster": {"nodes": 2}}), probes)
    assert found.status == status and detail in found.detail and found.fix


def test_a_host_without_munge_gets_one_line(
    cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configuration = (cluster.folder / "slurm.conf").read_text()
    away = tmp_path / "slurm.conf"
    away.write_text(configuration.replace("munge.socket", "no.socket"))
    monkeypatch.setenv("SLURM_CONF", str(away))
    found = results()["partitions"]
    assert found.status == "failed" and found.fix is not None, found
    assert "munge does not work on this host" in found.fix


def test_a_store_on_a_disk_of_this_host_is_named(cluster: SlurmCluster, tmp_path: Path) -> None:
    found = results(store=str(tmp_path))["store"]
    assert found.status == "warning" and str(tmp_path) in found.detail


def test_a_host_without_slurm_or_controller_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "missing.conf"))
    away = results()["partitions"]
    assert away.status == "failed" and "there is no such file" in away.detail and away.fix
    monkeypatch.setenv("PATH", str(tmp_path))
    absent = results()["commands"]
    assert absent.detail == "not on PATH: sbatch, srun, squeue, scontrol, scancel"
