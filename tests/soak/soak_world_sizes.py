"""Images and language on 1, 2 and 4 ranks: 20 steps are equal in float32, and another world size
resumes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from tests.gang.test_hugging_face import settings_for
from tests.gang.test_policy_folders import config_of as policy_of
from tests.gang.test_policy_folders import make_folder
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks


def images(tmp_path: Path) -> dict[str, Any]:
    options = {"size": 12, "width": 8, "layers": 2, "norm": "sync", "workers": 0}
    return {
        "store": str(tmp_path / "store"),
        "workload": "ebbflow.workloads:ImageClassifier",
        "workload_options": options,
        "data": {"held_out_samples": 32},
    }


def language(tmp_path: Path) -> dict[str, Any]:
    folder = make_folder(tmp_path)
    rows = [{"prompt": "the tide", "choices": [" comes in", " goes out"], "answer": 0}] * 5
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = settings_for(folder, lora_rank=4, choices=str(tmp_path / "questions.jsonl")).model_dump(
        mode="json"
    )
    return {name: found[name] for name in ("store", "workload", "workload_options", "model")}


def policy(tmp_path: Path) -> dict[str, Any]:
    found = policy_of(tmp_path, make_folder(tmp_path), {"lora_rank": 4}).model_dump(mode="json")
    return {name: found[name] for name in ("store", "workload", "workload_options")}


def numbers_of(config: RunConfig, job: str) -> list[float]:
    """Return the loss of each step, and the metrics of the last evaluation that are no speeds."""
    events = list(read_events(Store.open(config.store).sub(job_prefix(job))))
    steps = {
        event.step or 0: event.data["loss"]
        for event in events
        if event.name == "step" and event.rank == 0
    }
    metrics = [event.data["metrics"] for event in events if event.name == "evaluation"][-1]
    kept = sorted(name for name in metrics if not name.endswith(("_per_second", "_share")))
    return [steps[step] for step in sorted(steps)] + [metrics[name] for name in kept]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [images, language, policy])
def test_any_world_size_trains_the_same_and_resumes_the_others_commits(
    make: Any, tmp_path: Path
) -> None:
    given = make(tmp_path)
    found = dict[str, list[float]]()
    for job, world_size, steps in (
        ("1", 1, 20),
        ("2", 2, 20),
        ("4", 4, 20),
        ("resumed", 2, 10),
        ("resumed", 1, 20),
    ):
        training = {
            "batch_size": 8,
            "max_steps": steps,
            "evaluation_interval_steps": 10,
            "learning_rate": 1e-3,
        }
        training |= {"scheduler": {"type": "constant", "warmup_steps": 0}}
        rest = {
            "training": training,
            "checkpoint": {"interval_steps": 10},
            "cluster": {"device": "cpu"},
        }
        config = RunConfig.model_validate(
            {**given, **rest, "parallel": {"mode": "fsdp2" if job == "2" else "ddp"}}
        )
        if world_size == 1:
            run_alone(config, job)
        else:
            path = tmp_path / "job.yaml"
            path.write_text(config.model_dump_json())
            run_ranks(world_size, ["-m", "ebbflow.training", str(path), "--job", job])
        found[job] = numbers_of(config, job)
    assert len(found["1"]) >= 22 and len(set(found["1"])) > 20
    for job in ("2", "4", "resumed"):
        assert found[job] == pytest.approx(found["1"], rel=1e-5, abs=1e-5), job
