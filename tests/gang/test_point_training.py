"""Point-cloud diffusion trained by ranks: averages of weights, commits kept for a metric, pictures,
any world size.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ebbflow.core.config import ConfigError, load_config
from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.cost.report.render_html import render
from ebbflow.cost.report.report import build_report
from ebbflow.training.checkpoint.commands import main as checkpoints
from ebbflow.training.checkpoint.portable_state import read_commit
from ebbflow.training.engine.optimizer import averaged_weights, keep_average
from ebbflow.training.errors import WorkloadError
from ebbflow.training.gang import Gang
from ebbflow.training.workload import check_best_metric
from ebbflow.training.workload_loader import prepare_data, workload_context
from ebbflow.tryout.trial import try_workload
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks

WORKLOAD = "ebbflow.workloads:PointCloudDiffusion"
OPTIONS = {
    "num_points": 24,
    "hidden": 16,
    "layers": 1,
    "heads": 2,
    "held_out_clouds": 4,
    "sampling_steps": 3,
}


def config_of(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    training = {
        "batch_size": 4,
        "max_steps": 4,
        "evaluation_interval_steps": 2,
        "learning_rate": 0.01,
    }
    training |= {
        "scheduler": {"type": "constant", "warmup_steps": 0},
        **sections.pop("training", {}),
    }
    settings: dict[str, Any] = {
        "checkpoint": {"interval_steps": 2},
        "parallel": {"mode": "ddp"},
        **sections,
    }
    return RunConfig.model_validate(
        {
            "store": str(folder / "store"),
            "workload": WORKLOAD,
            "workload_options": OPTIONS,
            "training": training,
        }
        | settings
    )


def job_store(config: RunConfig, job: str) -> Store:
    return Store.open(config.store).sub(job_prefix(job))


def commits_of(config: RunConfig, job: str) -> dict[int, dict[str, torch.Tensor]]:
    store = job_store(config, job)
    found = {}
    for meta in store.list("commits"):
        content = read_commit(store, meta.key)
        found[content.step] = {
            name: tensor.clone() for name, tensor in content.stream(content.named())
        }
    return found


def test_the_average_is_the_formula_and_an_evaluation_leaves_the_weights_as_they_were() -> None:
    weight = torch.nn.Parameter(torch.randn(5, generator=torch.Generator().manual_seed(0)))
    unused = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weight, unused], lr=0.1)
    keep_average(optimizer, 0.3)
    expected = None
    for step in range(1, 6):
        weight.grad = weight.detach() * step
        optimizer.step()
        now = weight.detach().clone()
        decay = min(0.3, (1 + step) / (10 + step))
        if expected is None:
            expected = now
        else:
            expected = decay * expected + (1 - decay) * now
    before = weight.detach().clone()
    with averaged_weights(optimizer):
        assert expected is not None and torch.allclose(weight.detach(), expected, atol=1e-7)
    assert torch.equal(weight.detach(), before) and not optimizer.state[unused]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Four steps with an average, each with a commit, of which the last and the highest chamfer
    distance are kept.
    """
    best = {"metric": "chamfer", "mode": "max", "count": 1}
    config = config_of(
        tmp_path_factory.mktemp("averaged"),
        training={"ema": 0.5, "evaluation_interval_steps": 1},
        checkpoint={"interval_steps": 1, "keep_last": 1, "keep_best": best},
    )
    assert run_alone(config, "averaged").step == 4
    return config


def test_an_average_changes_no_weight_and_is_exported(trained: RunConfig, tmp_path: Path) -> None:
    plain = config_of(tmp_path)
    run_alone(plain, "plain")
    averaged = commits_of(trained, "averaged")[4]
    without = commits_of(plain, "plain")[4]
    assert all(torch.equal(averaged[name], tensor) for name, tensor in without.items())
    target = tmp_path / "average.safetensors"
    assert (
        checkpoints(["export", job_store(trained, "averaged").uri, str(target), "--averaged"]) == 0
    )
    assert (
        checkpoints(
            ["export", job_store(plain, "plain").uri, str(tmp_path / "no.pt"), "--averaged"]
        )
        != 0
    )
    exported = load_file(target)
    names = [name.removeprefix("model.") for name in without if name.startswith("model.")]
    assert sorted(exported) == sorted(names)
    for name in names:
        assert torch.equal(exported[name], averaged[f"optimizer.{name}.ema"])
    assert any(not torch.equal(exported[name], averaged[f"model.{name}"]) for name in names)


def test_the_best_commits_by_an_own_metric_are_kept_and_the_report_has_metrics_and_pictures(
    trained: RunConfig,
) -> None:
    store = job_store(trained, "averaged")
    events = read_events(store)
    evaluations = [event for event in events if event.name == "evaluation"]
    distances = {event.step: event.data["metrics"]["chamfer"] for event in evaluations}
    assert list(distances) == [1, 2, 3, 4]
    highest = max(distances, key=distances.get)
    lowest = min(distances, key=distances.get)
    assert 4 != highest != lowest, "the newest or the lowest would be kept by another rule"
    assert sorted(commits_of(trained, "averaged")) == [highest, 4]
    picture = evaluations[-1].data["pictures"]["clouds"]
    page = render(build_report(events))
    assert f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}" in page
    assert (
        "<th>chamfer of noise</th>" in page.replace(' scope="col"', "") and "img-src data:" in page
    )


def test_a_metric_that_the_evaluation_lacks_is_an_error(tmp_path: Path) -> None:
    config = config_of(
        tmp_path, checkpoint={"interval_steps": 2, "keep_best": {"metric": "chamfr"}}
    )
    with pytest.raises(
        WorkloadError, match=r"returns no chamfr, .*fix: one of mmd, coverage, .*chamfer"
    ):
        context = workload_context(config, Gang(), store=Store.open(config.store))
        try_workload(config, replace(context, prepared=prepare_data(config, context)))
    with pytest.raises(WorkloadError, match="returns no chamfr"):
        check_best_metric(config, {"chamfer": 1.0})
    check_best_metric(
        config_of(tmp_path, checkpoint={"interval_steps": 2, "keep_best": 2}), {"chamfer": 1.0}
    )


@pytest.mark.parametrize(
    ("given", "count", "mode"),
    [(2, 2, "min"), ({"metric": "held_out_loss", "mode": "max"}, 1, "max"), ({}, 0, "min")],
)
def test_the_objective_is_given_as_a_number_or_a_section(
    given: Any, count: int, mode: str, tmp_path: Path
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps({"checkpoint": {"keep_best": given}}))
    best = load_config(path, project_root=tmp_path, environment={}).config.checkpoint.keep_best
    assert (best.count, best.mode) == (count, mode)
    again = load_config(
        path, ["checkpoint.keep_best=3"], project_root=tmp_path, environment={}
    ).config.checkpoint.keep_best
    assert (again.count, again.mode) == (3, mode)
    with pytest.raises(ConfigError, match="keep_best"):
        load_config(
            path,
            ["workload=null", "checkpoint.keep_best.metric=mmd"],
            project_root=tmp_path,
            environment={},
        )
    with pytest.raises(ConfigError, match="does not apply to a script"):
        load_config(
            path, ["script=train.py", "training.ema=0.9"], project_root=tmp_path, environment={}
        )
    with pytest.raises(ConfigError, match="keep_best"):
        load_config(path, ["checkpoint.keep_best=many"], project_root=tmp_path, environment={})


def test_any_world_size_trains_the_same_and_resumes_the_others_commits(tmp_path: Path) -> None:
    """20 steps on 1, 2 and 4 ranks; and 10 on four ranks, resumed on one."""
    losses: dict[str, list[float]] = {}
    for job, world_size, steps in (
        ("1", 1, 20),
        ("2", 2, 20),
        ("4", 4, 20),
        ("resumed", 4, 10),
        ("resumed", 1, 20),
    ):
        training = {"max_steps": steps, "ema": 0.9, "evaluation_interval_steps": 10}
        if job == "2":
            mode = "fsdp2"
        else:
            mode = "ddp"
        config = config_of(
            tmp_path, training=training, parallel={"mode": mode}, checkpoint={"interval_steps": 10}
        )
        path = tmp_path / "job.yaml"
        path.write_text(config.model_dump_json())
        run_ranks(world_size, ["-m", "ebbflow.training", str(path), "--job", job])
        events = [
            event
            for event in read_events(job_store(config, job))
            if event.name in ("step", "evaluation")
        ]
        losses[job] = [
            event.data["loss"] for event in events if event.name == "step" and event.rank == 0
        ]
        losses[job] += [
            event.data["metrics"]["chamfer"] for event in events if event.name == "evaluation"
        ][-1:]
    assert len(losses["1"]) == len(losses["resumed"]) == 21 and losses["1"][0] != losses["1"][19]
    for job in ("2", "4", "resumed"):
        assert losses[job] == pytest.approx(losses["1"], rel=1e-5, abs=1e-5), job
