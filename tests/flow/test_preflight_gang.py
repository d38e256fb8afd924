"""Checks of sums: batches, shards and whatever else is divided, on the whole gang and on what may
be left of it.
"""

from __future__ import annotations

import resource

import pytest

from ebbflow.core.preflight import failed_results
from tests.support.checks import failed, passed, skipped


def test_batch() -> None:
    assert passed("batch").detail == "32 = 2 ranks × 1 accumulation × 16 samples per micro-batch"
    assert "+ 1" in failed("batch", training={"batch_size": 33}).detail
    skipped("batch", cluster={"nodes": "auto"})


def test_preflight_shows_derived_sizes_and_requires_at_least_one() -> None:
    whole = passed("derived", parallel={"mode": "hsdp", "shard_size": 1})
    assert whole.detail == (
        "samples per micro-batch 16, commits of the job 6, copies of the model 2, width of an "
        "attention head 32"
    )
    broken = failed(
        "derived", training={"batch_size": 3, "max_steps": 40}, cluster={"processes_per_node": 2}
    )
    assert "= 3 / (1 × 2 × 2) = 0.75" in broken.detail
    assert "training.max_steps / checkpoint.interval_steps = 40 / 50 = 0.8" in broken.detail
    assert failed_results([broken])
    # Where the plan is to choose the ranks, at least the accumulation can be known.
    auto = {"nodes": "auto", "processes_per_node": "auto"}
    parts = {"batch_size": 3, "gradient_accumulation_steps": 4}
    assert (
        "training.batch_size / training.gradient_accumulation_steps = 3 / 4"
        in failed("derived", training=parts, cluster=auto).detail
    )


def test_a_gang_that_shrinks() -> None:
    assert passed("elastic", cluster={"nodes": 2}).detail == "32 samples divide on 2, 1 nodes"
    skipped("elastic", cluster={"nodes": 1})
    skipped("elastic", cluster={"nodes": "auto"})
    uneven = failed("elastic", cluster={"nodes": 4})
    assert uneven.detail.splitlines() == [
        "the job could go on with 4, 2, 1 nodes, and not with",
        "3 nodes, 3 ranks: no accumulation does: 32 = 3 × 10 + 2",
    ]
    assert "training.batch_size to 24 or 36" in uneven.fix
    assert not failed_results([uneven])
    for batch_size in (24, 36):  # what the fix proposes is one
        passed("elastic", training={"batch_size": batch_size}, cluster={"nodes": 4})


def test_a_gang_that_shrinks_with_another_accumulation_or_in_groups() -> None:
    parts = {"batch_size": 24, "gradient_accumulation_steps": 2}
    result = failed("elastic", training=parts | {"batch_size": 8 * 3}, cluster={"nodes": 8})
    assert (
        "8 nodes, 8 ranks: 3 samples per rank do not divide by 2 accumulation; 1 or 3 would do"
        in result.detail
    )
    groups = {"mode": "hsdp", "shard_size": 4}
    result = failed("elastic", parallel=groups, cluster={"nodes": 4, "processes_per_node": 2})
    assert (
        "3 nodes, 6 ranks: groups of parallel.shard_size do not divide the ranks: 6 = 4 × 1 + 2"
        in result.detail
    )
    assert "1 node: groups of parallel.shard_size" in result.detail
    assert "parallel.shard_size to 2, the ranks of a node" in result.fix


def test_preflight_warns_about_ranks_that_share_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    passed("cores", cluster={"nodes": 2})
    result = failed("cores", cluster={"nodes": 2, "processes_per_node": 2})
    assert result.detail.startswith("2 × 2 = 4 ranks on ")
    assert not failed_results([result])
    skipped("cores", cluster={"nodes": "auto"})
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/nvidia0"])
    skipped("cores", cluster={"nodes": 8})


def test_locked_memory_matters_where_there_is_an_rdma_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr("ebbflow.infra.checks.gpu.RDMA_DEVICES", tmp_path)
    skipped("locked-memory")
    (tmp_path / "efa_0").mkdir()
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (65536, 65536))
    assert "64.0 KiB may be locked" in failed("locked-memory").detail
    monkeypatch.setattr(
        resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    passed("locked-memory")
