"""The configurations of GPU size and the presets: they load, pass their workload's check, and fit
the planned GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.core.footprint import HostGang, gpu_host_bytes
from ebbflow.core.preflight import PreflightContext
from ebbflow.core.program import PROJECT_ROOT
from ebbflow.cost.plan.throughput import memory_fit
from ebbflow.tryout.examine import check_workload
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads import PolicyOptimization
from tests.support.gpu_configs import load_gpu_config, prepared_context

_GIB = 2**30
_TRIED = "ebbflow.tryout.trial.LARGEST_TRIED_BYTES"


@pytest.mark.parametrize(
    ("name", "gpu_gib"),
    [
        ("point-clouds-gpu", 22),
        ("policy-optimization-gpu", 79),
        ("policy-optimization-low-memory", 40),
        ("policy-optimization-ddp", 22),
    ],
)
def test_eight_gpus_hold_the_job(
    name: str, gpu_gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_TRIED, 0)  # shapes suffice; the denoiser takes a minute on a CPU
    config = load_gpu_config(name, tmp_path)
    context = prepared_context(config)
    shape = try_workload(config, context).shape
    assert shape is not None and shape.kind == "measured"
    fit = memory_fit(config, 8, shape, ranks_per_node=8)
    assert fit.total < gpu_gib * _GIB, fit.render()
    if name == "point-clouds-gpu":
        assert config.training.batch_size * int(config.workload_options["num_points"]) > 1.4e6
        return
    # The reference, and in a sharded mode the engine's weights: bfloat16 there, float32 in mode
    # ddp.
    assert shape.other_bytes == (4 if config.parallel.mode == "ddp" else 2 * 2) * shape.parameters
    assert "= 0" not in PolicyOptimization.check(context)


def test_moments_in_main_memory_are_planned_there(tmp_path: Path) -> None:
    """Eight bytes per parameter and rank, in mode ddp without shards."""
    here = load_gpu_config("policy-optimization-ddp", tmp_path)
    there = load_gpu_config(
        "policy-optimization-ddp", tmp_path, "workload_options.adam_offload=false"
    )
    (own, host), (other, other_host) = (
        (
            memory_fit(config, 8, shape).optimizer,
            gpu_host_bytes(config, shape, HostGang(nodes=1, processes_per_node=8)),
        )
        for config, shape in (
            (config, try_workload(config, prepared_context(config)).shape)
            for config in (here, there)
        )
        if shape is not None
    )
    parameters = other // 8
    assert own == 0 and host - other_host == 8 * 8 * parameters


def test_preflight_refuses_a_job_without_rollouts(tmp_path: Path) -> None:
    config = load_gpu_config(
        "policy-optimization-gpu", tmp_path, "workload_options.rollout_batch_size=1024"
    )
    found = check_workload(PreflightContext(config=config, project_root=PROJECT_ROOT))
    assert found.status == "failed"
    assert "num_rollouts_per_episodes = 744 prompts // 1024 prompts per rollout = 0" in found.detail
