"""Rollouts by a server with vLLM's interface: weights of the policy, sleep, memory, staleness, and
bad servers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ebbflow.core.events import read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.errors import TrainingError
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload
from ebbflow.workloads.policy.policy_rollouts import Rollouts, check_version, correct_importance
from tests.gang.test_hugging_face import GPT2, TIED
from tests.gang.test_policy_folders import config_of, make_folder, prepare, start
from tests.support.alone import run_alone
from tests.support.fake_vllm import FakeVllm, serve_vllm
from tests.support.gangs import run_ranks


def options_of(folder: Path, address: str, **more: Any) -> dict[str, Any]:
    return {"engine": "vllm", "engine_url": address, "engine_weights": str(folder), **more}


def make_served(tmp_path: Path, settings: Any = TIED) -> tuple[Path, Path]:
    folder = make_folder(tmp_path, settings)
    served = tmp_path / "served"
    shutil.copytree(folder, served)
    return folder, served


@pytest.mark.parametrize(
    ("settings", "rank"), [(TIED, 4), (GPT2, 4), (TIED, 0)], ids=["lora", "gpt2-lora", "all"]
)
def test_a_server_draws_with_the_policys_weights(settings: Any, rank: int, tmp_path: Path) -> None:
    """Its log-probabilities are those that the policy computes, before and after the policy has
    moved.
    """
    folder, served = make_served(tmp_path, settings)
    fake = FakeVllm(served)
    with serve_vllm(fake) as address:
        config = config_of(
            tmp_path, folder, options_of(served, address, lora_rank=rank, enable_engine_sleep=True)
        )
        workload: Any = make_workload(config, prepare(config))
        model = start(workload)
        first = workload.next_batch(model, Cursor(0, 4))
        again = workload.next_batch(model, Cursor(0, 4))
        assert torch.equal(first.tokens, again.tokens), (
            "a rollout is a function of its place and the weights"
        )
        assert torch.allclose(first.reference * first.mask, first.old, atol=1e-5), (
            "the policy is its reference"
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.03 * parameter.requires_grad * torch.randn(parameter.shape))
        moved = workload.next_batch(model, Cursor(4, 4))
        assert not torch.allclose(moved.reference * moved.mask, moved.old, atol=1e-3)
        engine = workload._engine
        engine.wake()
        engine.update_weights(model, 9)
        found = engine.generate([[5, 6, 7], [8]], torch.rand(2, 4))
        own = workload._score(model, found.tokens)[0]
        assert found.version == 9 and torch.allclose(found.log_probs, own * found.mask, atol=1e-4)
        assert not any("lora" in name for name in load_file(served / "model.safetensors"))
        engine.sleep()
        with pytest.raises(TrainingError, match="no weights; fix: wake it"):
            engine.generate([[5]], torch.rand(1, 4))
    order = ["/sleep?level=2", "/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]
    assert [request for request in fake.requests if request in order][1:5] == order


def test_a_server_without_memory_gets_fewer_requests_at_a_time(tmp_path: Path) -> None:
    folder, served = make_served(tmp_path)
    found = []
    for most in (0, 3):
        with serve_vllm(FakeVllm(served, most_at_once=most)) as address:
            config = config_of(tmp_path, folder, options_of(served, address))
            workload: Any = make_workload(config, prepare(config))
            found.append(workload.next_batch(start(workload), Cursor(0, 4)))
            assert workload._engine.batch == (2 if most else 8)
    assert torch.equal(found[0].tokens, found[1].tokens) and torch.equal(found[0].old, found[1].old)


def test_jobs_on_two_ranks_and_ahead_of_the_policy(tmp_path: Path) -> None:
    """Two sharded ranks with a server each; and a job whose next rollouts are drawn while it trains
    on the last.
    """
    folder, served = make_served(tmp_path)
    with serve_vllm(FakeVllm(served)) as one, serve_vllm(FakeVllm(served)) as two:
        options = options_of(served, f"{one}, {two}", lora_rank=4)
        training = config_of(tmp_path, folder).training.model_dump() | {"max_steps": 3}
        config = config_of(tmp_path, folder, options, parallel={"mode": "fsdp2"}, training=training)
        path = tmp_path / "job.yaml"
        path.write_text(config.model_dump_json())
        run_ranks(2, ["-m", "ebbflow.training", str(path), "--job", "two"])
        options = options_of(served, one, lora_rank=4, max_staleness=1)
        run_alone(config_of(tmp_path, folder, options, training=training), "ahead")
    for job in ("two", "ahead"):
        events = list(read_events(Store.open(config.store).sub(job_prefix(job))))
        assert max(event.step or 0 for event in events if event.name == "step") == 3
        metrics = [event.data["metrics"] for event in events if event.name == "evaluation"][-1]
        assert metrics["rollouts"] == 24 and 0 <= metrics["reward"] <= 1
        assert metrics["rollout_tokens_per_second"] > 0
        assert metrics["rollout_time_share"] > 0.5 or job == "ahead", "slow generation shows"


def test_unexpected_answers_of_vllm_end_the_step(tmp_path: Path) -> None:
    folder, served = make_served(tmp_path)
    fake = FakeVllm(served)
    with serve_vllm(fake) as address:
        config = config_of(tmp_path, folder, options_of(served, address))
        context = prepare(config)
        workload: Any = make_workload(config, context)
        model = start(workload)
        workload.next_batch(model, Cursor(0, 4))
        fake.reads_weights = False
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3.0)
        with pytest.raises(
            TrainingError,
            match=r"differ from the policy's by [\d.]+ nats per token; fix: start the",
        ):
            workload.next_batch(model, Cursor(4, 4))
        fake.longest = 20
        with pytest.raises(
            TrainingError,
            match=r"takes 20 tokens, less than .* = 28; fix: start it with --max-model",
        ):
            make_workload(config, context).next_batch(model, Cursor(0, 4))
        fake.longest = 64
        fake.awake = {"weights"}
        with pytest.raises(
            TrainingError, match=r"/v1/completions answered 500: .*not ready.*; fix: its log"
        ):
            make_workload(config, context).next_batch(model, Cursor(0, 4))
    with pytest.raises(
        TrainingError, match=r"/v1/models: .*refused.*; fix: start it: VLLM_SERVER_DEV_MODE=1 vllm"
    ):
        make_workload(config, context).next_batch(model, Cursor(0, 4))
    for changes, problem in (
        (
            {"engine_url": ""},
            "vllm needs engine_url, such as http://127.0.0.1:8000, and engine_weights",
        ),
        ({"advantage_estimator": "ppo"}, "ppo needs values, which vllm has not"),
        ({"max_staleness": 2}, "max_staleness: 2; fix: 0, or 1"),
        (
            {"max_staleness": 1, "enable_engine_sleep": True},
            "an engine that draws ahead cannot sleep",
        ),
        (
            {"engine": "torch"},
            "max_staleness, engine_url and engine_weights are for servers; fix: engine: vllm",
        ),
        ({"importance_cap": 0.5}, "importance_cap: 0.5; fix: at least 1"),
    ):
        with pytest.raises(TrainingError, match=problem):
            prepare(
                config_of(tmp_path, folder, options_of(served, "http://127.0.0.1:1", **changes))
            )


def test_weights_of_importance_and_their_limits() -> None:
    """By hand: ratios of e^0.1 and e^-0.1, and one of e^1 that is cut to 2.

    The last token counts for nothing.
    """
    old = torch.tensor([[-1.0, -2.0, -1.0, -9.0]])
    drawn = torch.tensor([[-1.1, -1.9, -2.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    found = correct_importance(old, drawn, mask, most=2.0, current=True)
    assert found[0, :3].tolist() == pytest.approx([1.10517, 0.904837, 2.0], abs=1e-5)
    with pytest.raises(TrainingError, match=r"differ from the policy's by [\d.]+ nats"):
        correct_importance(old, drawn * 2, mask, most=2.0, current=True)
    # Weights that are a round old
    correct_importance(old, drawn * 2, mask, most=2.0, current=False)
    rollouts = Rollouts(*(torch.zeros(1, 4) for _ in range(4)), version=6)
    check_version(rollouts, 8, staleness=2)
    with pytest.raises(
        TrainingError, match=r"version 6, the policy has version 9 \(at most 2 less is allowed\)"
    ):
        check_version(rollouts, 9, staleness=2)
