"""One real Slurm cluster for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.slurm_cluster import SlurmCluster, slurm_cluster, why_missing
from tests.support.slurm_flow import SlurmRunner


@pytest.fixture(scope="session")
def session_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    missing = why_missing()
    if missing:
        pytest.skip(missing)
    with slurm_cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def weights(session_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The final weights of a job of 200 steps, trained without Slurm, an agent or an interruption."""
    return SlurmRunner(tmp_path_factory.mktemp("alone"), session_cluster).train_alone(200)


@pytest.fixture
def cluster(
    session_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SlurmCluster]:
    """The cluster, idle at the beginning and at the end; Slurm's commands in this process reach it."""
    for name, value in session_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield session_cluster
    session_cluster.cancel_all()


@pytest.fixture
def runner(cluster: SlurmCluster, tmp_path: Path) -> Iterator[SlurmRunner]:
    runner = SlurmRunner(tmp_path, cluster)
    yield runner
    runner.kill_all()
