"""Reinforcement fine-tuning trained by ranks: any world size, killed ranks, rollouts that several
steps use.
"""

from __future__ import annotations

import glob
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import read_events
from ebbflow.core.layout import commit_prefix, job_prefix
from ebbflow.core.store import Store
from ebbflow.workloads.policy.policy_optimization import PolicyOptimization
from tests.support.alone import run_alone
from tests.support.flow import wait_until
from tests.support.gangs import run_ranks

WORKLOAD = "ebbflow.workloads:PolicyOptimization"
DIES = "DIES_AT_CALL"  # of the reward, or of the loss: "reward 70"
# Pattern of the commits that the job has when it dies; a save of the last step may be on its way
COMMITTED = "DIES_AFTER_COMMIT"
OPTIONS = {
    "prompt_max_len": 6,
    "held_out_prompts": 8,
    "n_samples_per_prompt": 4,
    "reward": "tests.gang.test_policy_training:small_bytes",
    "init_kl_coef": 0.05,
}

_calls = {"reward": 0, "loss": 0}


class Mortal(PolicyOptimization):
    def loss(self, model: Any, batch: Any) -> Any:
        die_if_due("loss")
        return super().loss(model, batch)


def die_if_due(name: str) -> None:
    _calls[name] += 1
    if os.environ.get(DIES) == f"{name} {_calls[name]}":
        pattern = os.environ[COMMITTED]
        wait_until(f"a commit in {pattern}", lambda: glob.glob(pattern), 60)
        os.kill(os.getpid(), signal.SIGKILL)


def small_bytes(prompt: str, completion: str, row: Any) -> float:
    """A reward that an untrained model gets often: the share of the completion's characters below
    64.
    """
    die_if_due("reward")
    return sum(ord(letter) < 64 for letter in completion) / max(len(completion), 1)


def config_of(
    folder: Path, *, options: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> RunConfig:
    training = {
        "batch_size": 4,
        "max_steps": 6,
        "evaluation_interval_steps": 3,
        "learning_rate": 0.01,
    }
    training |= {
        "scheduler": {"type": "constant", "warmup_steps": 0},
        **sections.pop("training", {}),
    }
    settings: dict[str, Any] = {
        "checkpoint": {"interval_steps": 3},
        "parallel": {"mode": "ddp"},
        **sections,
    }
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "sequence_length": 10}
    settings = {"model": model, **settings}
    return RunConfig.model_validate(
        {
            "store": str(folder / "store"),
            "workload": WORKLOAD,
            "workload_options": OPTIONS | (options or {}),
        }
        | {"training": training}
        | settings
    )


def numbers_of(config: RunConfig, job: str) -> list[float]:
    """Return the loss and gradient norm of each step, and the metrics of the last evaluation that
    are no speeds.
    """
    events = read_events(Store.open(config.store).sub(job_prefix(job)))
    steps = {
        event.step or 0: event.data for event in events if event.name == "step" and event.rank == 0
    }
    metrics = [event.data["metrics"] for event in events if event.name == "evaluation"][-1]
    kept = [
        metrics[name]
        for name in (
            "held_out_reward",
            "reward",
            "kl",
            "entropy",
            "length",
            "accept_rate",
            "rollouts",
        )
    ]
    figures = []
    for step in sorted(steps):
        figures += (steps[step]["loss"], steps[step]["gradient_norm"])
    return figures + kept


def test_any_world_size_trains_the_same_and_resumes_the_others_commits(tmp_path: Path) -> None:
    """20 steps on 1, 2 and 4 ranks, of which two compute each layer together; and 10 on such two,
    resumed on one.
    """
    found: dict[str, list[float]] = {}
    tensor = {"mode": "fsdp2", "tensor_size": 2}
    for job, world_size, steps, parallel in (
        ("1", 1, 20, {"mode": "ddp"}),
        ("2", 2, 20, {"mode": "ddp"}),
        ("4", 4, 20, tensor),
        ("resumed", 2, 10, tensor),
        ("resumed", 1, 20, {"mode": "fsdp2"}),
    ):
        training = {"max_steps": steps, "evaluation_interval_steps": 10}
        config = config_of(
            tmp_path, training=training, parallel=parallel, checkpoint={"interval_steps": 10}
        )
        found[job] = train(config, job, world_size)
    assert len(found["1"]) == len(found["resumed"]) == 47 and len(set(found["1"])) > 30
    held_out_reward, reward = found["1"][-7:-5]
    assert held_out_reward >= 0.9 and reward > 0.33, "a quarter of random bytes has the reward"
    for job in ("2", "4", "resumed"):
        assert found[job] == pytest.approx(found["1"], rel=1e-5, abs=1e-5), job


def train(config: RunConfig, job: str, world_size: int) -> list[float]:
    path = Path(config.store).parent / "job.yaml"
    path.write_text(config.model_dump_json())
    if world_size == 1:
        run_alone(config, job)
    else:
        run_ranks(world_size, ["-m", "ebbflow.training", str(path), "--job", job])
    return numbers_of(config, job)


def test_a_tensor_group_draws_and_trains_with_values_as_one_process(tmp_path: Path) -> None:
    """Heads of keys are shared by two heads of queries; biases, tied embeddings, a head with values
    and a reference.
    """
    options = {
        "advantage_estimator": "ppo",
        "enable_engine_sleep": True,
        "micro_rollout_batch_size": 3,
    }
    model = {
        "architecture": "llama",
        "num_heads": 4,
        "num_kv_heads": 2,
        "qkv_bias": True,
        "qk_norm": True,
    }
    model |= {"hidden_size": 16, "num_layers": 1, "sequence_length": 10, "tied_embeddings": True}
    found = [
        train(
            config_of(tmp_path, options=options, parallel=parallel, model=model),
            str(world_size),
            world_size,
        )
        for world_size, parallel in ((1, {"mode": "ddp"}), (2, {"mode": "fsdp2", "tensor_size": 2}))
    ]
    assert len(found[0]) == 19 and found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-5)


def test_a_job_killed_in_a_rollout_and_in_an_update_ends_with_the_weights_of_the_quiet_one(
    tmp_path: Path,
) -> None:
    """Four steps train on a rollout, and commits are made in between."""
    options = {
        "rollout_batch_size": 8,
        "max_epochs": 2,
        "kl_target": 0.01,
        "reward_running_norm": True,
    }
    config = config_of(
        tmp_path, options=options, training={"max_steps": 9}, checkpoint={"interval_steps": 3}
    )
    config = config.model_copy(update={"workload": f"{__name__}:Mortal"})
    path = tmp_path / "job.yaml"
    path.write_text(config.model_dump_json())
    quiet = run_alone(config, "quiet")
    assert quiet.weights_sha256
    # Rewards of the examination: three rollouts of eight prompts, and the held-out prompts
    trial = 3 * 32 + 8
    # In the second rollout, before step 5; then in the update of step 8. The examination calls the
    # loss five times.
    for committed, dies in ((3, f"reward {trial + 32 + 8 + 10}"), (6, "loss 10")):
        commits = Path(commit_prefix(committed, generation=0)).parent  # of any generation
        pattern = f"{config.store}/{job_prefix('killed')}/{commits}/*/*.json"
        environment = {**os.environ, DIES: dies, COMMITTED: pattern}
        with pytest.raises(AssertionError):
            command = ["-m", "ebbflow.training", str(path), "--job", "killed"]
            run_ranks(1, command, environment=environment)
    assert run_alone(config, "killed").weights_sha256 == quiet.weights_sha256
    events = read_events(Store.open(config.store).sub(job_prefix("killed")))
    assert [event.step for event in events if event.name == "restore"] == [3, 6]
    assert numbers_of(config, "killed") == numbers_of(config, "quiet")
