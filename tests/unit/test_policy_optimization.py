"""Policy optimization: generation beside the plain forward pass, rewards and their limits, options,
and bad input.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbflow.core.config.schema import ModelConfig, RunConfig
from ebbflow.core.store import Store
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.errors import DataError, TrainingError
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import initialise, materialise
from ebbflow.training.workload import Cursor
from ebbflow.training.workload_loader import make_workload, prepare_data, workload_context
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads import PolicyOptimization
from ebbflow.workloads.language.offloaded_adam import make_offloaded
from ebbflow.workloads.policy.policy_model import Policy
from ebbflow.workloads.policy.policy_prompts import Prompt, addition, additions, read_prompts
from ebbflow.workloads.policy.policy_rewards import Reward
from ebbflow.workloads.policy.policy_rollouts import (
    TorchEngine,
    cache_bytes,
    check_version,
    fit_batch,
    greedy_draws,
    score,
)
from ebbflow.workloads.policy.sandbox import find_missing
from ebbflow.workloads.readers.files import locate
from tests.support.s3.fixture import FailingServer, failing_s3

__all__ = ["failing_s3"]  # a fixture

SHAPE = {
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "sequence_length": 12,
    "vocab_size": 20,
}
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12], [13, 14]]

HERE = "tests.unit.test_policy_optimization"

ATTACKS = """
import ctypes, fcntl, os, resource, signal, socket, subprocess, threading
from pathlib import Path

Path("own").write_text("own")
def refused(attack):
    try:
        attack()
    except (PermissionError, ValueError):  # setrlimit raises the second
        return True
    return False
def call(number, *given):
    if ctypes.CDLL(None, use_errno=True).syscall(number, *given) < 0:
        raise OSError(ctypes.get_errno(), "refused")
def raise_limit():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
attacks = {
    "fork": os.fork, "program": lambda: subprocess.run(["/bin/true"]), "exec": lambda: os.execv("/bin/true", ["true"]),
    "network": lambda: socket.socket(), "local socket": lambda: socket.socket(socket.AF_UNIX),
    "signal": lambda: os.kill(os.getppid(), 0), "session": os.setsid, "limit": raise_limit,
    "read": lambda: open("/etc/passwd"), "read ours": lambda: open("SECRET"), "list": lambda: os.listdir("/"),
    "memory": lambda: open(f"/proc/{os.getppid()}/mem", "rb"), "write": lambda: open("/tmp/from-a-test", "w"),
    "remove": lambda: os.unlink("SECRET"), "empty": lambda: os.truncate("SECRET", 0),
    "signal of a file": lambda: fcntl.fcntl(0, 8, os.getppid()), "which signal": lambda: fcntl.fcntl(0, 10, 9),
    "signal of a terminal": lambda: fcntl.ioctl(0, 0x8901, os.getppid().to_bytes(4, "little")),
    "kernel log": lambda: open("/dev/kmsg"), "syslog": lambda: call(103, 3, ctypes.create_string_buffer(64), 64),
    "size of the kernel log": lambda: call(103, 10, None, 0), "swap": lambda: call(168, b"/none"),
    "accounting": lambda: call(163, None), "ports": lambda: call(172, 3), "clock": lambda: call(159, bytes(208)),
    "schedule": lambda: os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0)),
}
os.chmod("SECRET", 0o777)  # does nothing
passed = sorted(name for name, attack in attacks.items() if not refused(attack))
thread = threading.Thread(target=passed.sort)
thread.start(); thread.join(); resource.getrlimit(resource.RLIMIT_AS); socket.socketpair()
"""
HARMLESS = """
import decimal, fcntl, mimetypes, numpy, os, shutil, signal, sqlite3
from concurrent.futures import ThreadPoolExecutor

assert sorted(os.listdir()) == ["completion.py", "test.py"] and numpy.arange(3).sum() == 3
os.mkdir("folder"); open("folder/a.txt", "w").write("a")
shutil.copytree("folder", "copy"); shutil.copy2("copy/a.txt", "b")
assert open("b").read() == "a" and mimetypes.guess_type("a.txt")[0] == "text/plain"
caught = []
signal.signal(signal.SIGUSR1, lambda *given: caught.append(given)); signal.raise_signal(signal.SIGUSR1)
assert caught and list(ThreadPoolExecutor(2).map(abs, [-1, 2])) == [1, 2] and fcntl.fcntl(0, fcntl.F_GETFD) >= 0
"""


def policy_of(**changes: Any) -> Policy:
    with torch.device("meta"):
        model, blank = (Policy(ModelConfig(**{**SHAPE, **changes}), values=True) for _ in range(2))
    materialise(model, "cpu")
    initialise(model, blank, seed=7)
    for parameter in model.parameters():  # further from uniform probabilities
        if parameter.ndim > 1:
            parameter.data *= 3.0
        else:
            parameter.data *= 1.0
    return model


def engine_of(model: Policy, *, batch: int = 8, temperature: float = 0.8) -> TorchEngine:
    with torch.device("meta"):
        own = Policy(model.config, values=True)
    engine = TorchEngine(
        own, sequence=12, stop=0, temperature=temperature, batch=batch, device=torch.device("cpu")
    )
    engine.update_weights(model, 3)
    return engine


@pytest.mark.parametrize(
    "changes", [{}, {"architecture": "llama", "num_kv_heads": 1}, {"tied_embeddings": True}]
)
def test_generation_with_a_cache_is_that_of_the_whole_sequence(changes: dict[str, Any]) -> None:
    model = policy_of(**changes)
    engine = engine_of(model)
    draws = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))
    cached = engine.generate(PROMPTS, draws)
    engine.cached = False
    plain = engine.generate(PROMPTS, draws)
    assert torch.equal(cached.tokens, plain.tokens) and torch.equal(cached.lengths, plain.lengths)
    assert torch.allclose(cached.log_probs, plain.log_probs, atol=1e-5)
    with torch.no_grad():
        again = score(model, cached.tokens, 0.8)
    assert torch.allclose(again * cached.mask, cached.log_probs, atol=1e-5)
    for row, prompt in enumerate(PROMPTS):
        assert cached.tokens[row, : len(prompt)].tolist() == prompt
        completion = cached.tokens[row, len(prompt) : int(cached.lengths[row])].tolist()
        assert 1 <= len(completion) <= 6 and 0 not in completion[:-1]
        assert completion[-1] == 0 or len(completion) == 6
        assert (cached.tokens[row, int(cached.lengths[row]) :] == 0).all()
    assert cached.mask.sum(dim=1).tolist() == (cached.lengths - cached.prompt_lengths).tolist()


def test_a_rollout_depends_on_its_own_prompt_and_draws_alone() -> None:
    engine = engine_of(policy_of(), batch=2)
    draws = torch.rand(5, 6, generator=torch.Generator().manual_seed(2))
    together = engine.generate(PROMPTS, draws)
    for row in range(5):
        alone = engine.generate(PROMPTS[row : row + 1], draws[row : row + 1])
        assert torch.equal(alone.tokens[0], together.tokens[row])
    other = engine.generate(PROMPTS, torch.rand(5, 6, generator=torch.Generator().manual_seed(3)))
    assert not torch.equal(other.tokens, together.tokens)


def test_tokens_are_drawn_with_their_probabilities() -> None:
    """The cumulative probability up to the token before, and up to the token, are around the draw."""
    model = policy_of()
    engine = engine_of(model, batch=4000)
    draws = torch.rand(4000, 1, generator=torch.Generator().manual_seed(4))
    found = engine.generate([[5, 6]] * 4000, draws).tokens[:, 2]
    with torch.no_grad():
        expected = (model(torch.tensor([[5, 6]]))[0][0, -1] / 0.8).softmax(-1)
    share = torch.bincount(found, minlength=20) / 4000
    assert float((share - expected).abs().max()) < 0.03
    likeliest = engine.generate([[5, 6]], greedy_draws(1, 1)).tokens[0, 2]
    assert int(likeliest) == int(expected.argmax())


def test_less_memory_makes_smaller_batches_and_the_same_rollouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws = torch.rand(5, 6, generator=torch.Generator().manual_seed(5))
    expected = engine_of(policy_of()).generate(PROMPTS, draws)
    engine = engine_of(policy_of())
    forward = Policy.forward

    def limited(self: Policy, tokens: torch.Tensor, past: Any = None) -> Any:
        if len(tokens) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, tokens, past)

    monkeypatch.setattr(Policy, "forward", limited)
    assert torch.equal(engine.generate(PROMPTS, draws).tokens, expected.tokens)
    engine.batch = 5
    monkeypatch.setattr(engine, "_group", object())
    with pytest.raises(
        TrainingError, match=r"with 5 at a time, which a tensor group cannot halve; fix: .*: 2"
    ):
        engine.generate(PROMPTS, draws)


def test_the_share_of_memory_limits_a_generation_batch() -> None:
    # 2 blocks × keys and values × 16 wide × 12 tokens × 4 bytes
    each = cache_bytes(policy_of(), 12)
    assert each == 2 * 2 * 16 * 12 * 4 == 3072
    assert fit_batch(8, 5 * each + 1, each) == 5 and fit_batch(3, 5 * each, each) == 3
    with pytest.raises(TrainingError, match=r"take 3,072 bytes, and .* leaves 3,071"):
        fit_batch(8, each - 1, each)


def test_an_engine_sleeps_and_its_rollouts_carry_their_version() -> None:
    model = policy_of()
    engine = engine_of(model)
    found = engine.generate(PROMPTS, greedy_draws(5, 6))
    check_version(found, 3)
    with pytest.raises(TrainingError, match="weight version 3, the policy has version 4"):
        check_version(found, 4)
    before = [parameter.clone() for parameter in model.parameters()]
    engine.sleep()
    assert all(parameter.is_meta for parameter in engine.model.parameters())
    with pytest.raises(TrainingError, match="no weights"):
        engine.generate(PROMPTS, greedy_draws(5, 6))
    engine.wake()
    with pytest.raises(TrainingError, match="no weights"):
        engine.generate(PROMPTS, greedy_draws(5, 6))
    engine.update_weights(model, 4)
    assert torch.equal(engine.generate(PROMPTS, greedy_draws(5, 6)).tokens, found.tokens)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_additions_are_all_pairs_once() -> None:
    prompts = additions(100, 5)
    assert len(prompts.train) == 8000 and len(prompts.held_out) == 100
    assert len({prompt.text for prompt in [*prompts.train, *prompts.held_out]}) == 8100
    assert addition(0).text == "10+10=" and addition(0).answer == "02"
    assert addition(8099).text == "99+99=" and addition(8099).answer == "891"


def raises(prompt: str, completion: str, row: Any) -> float:
    raise ValueError("no such key")


def hangs(prompt: str, completion: str, row: Any) -> float:
    time.sleep(30)
    return 1.0


def half(prompt: str, completion: str, row: Any) -> float:
    return 0.5


def nan(prompt: str, completion: str, row: Any) -> float:
    return float("nan")


def nothing(prompt: str, completion: str, row: Any) -> Any:
    return None


def reward_of(written: str, *, seconds: float = 10.0, memory_mib: int = 512) -> Reward:
    return Reward(written, seconds=seconds, memory_mib=memory_mib)


def test_rewards_add_up_with_their_weights() -> None:
    prompt = Prompt("1+1=", {"answer": "275"})
    assert [reward_of("exact_match")(prompt, text) for text in ("275", " 275\n", "27", "")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    found = [reward_of("shared_start")(prompt, text) for text in ("275", "27", "2755", "295", "")]
    assert found == pytest.approx([1, 2 / 3, 3 / 4, 1 / 3, 0])
    both = reward_of(f"exact_match=2, {HERE}:half=-1")
    assert both(prompt, "275") == 1.5 and both(prompt, "x") == -0.5


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("", "nothing is named"),
        ("exact", "'exact' is unknown; fix: exact_match"),
        ("exact_match=much", "'much' is no weight"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:absent", "cannot be imported: AttributeError"),
        (f"{HERE}:HERE", "is a str; fix: a function"),
    ],
)
def test_a_reward_that_is_no_reward_is_refused(written: str, problem: str) -> None:
    with pytest.raises(TrainingError, match=problem):
        reward_of(written)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "raises",
            r"test_policy_optimization.py:\d+: .*raises raised ValueError: no such key "
            r".*'2\+2='.*'five'",
        ),
        (
            "hangs",
            r"took longer than 0.2 s for prompt '2\+2=', completion 'five'; fix: a faster reward",
        ),
        ("nan", "returned nan for prompt .*; fix: a finite number"),
        ("nothing", "returned None for prompt"),
    ],
)
def test_a_reward_that_fails_is_named_with_its_prompt(name: str, problem: str) -> None:
    with pytest.raises(TrainingError, match=problem):
        reward_of(f"{HERE}:{name}", seconds=0.2)(Prompt("2+2=", {}), "five")
    with pytest.raises(TrainingError, match="has no answer"):
        reward_of("exact_match")(Prompt("2+2=", {}), "five")


def test_a_unit_test_has_limits_of_time_and_memory() -> None:
    prompt = Prompt("double", {"test": "assert double(4) == 8"})
    judge = reward_of("unit_test", seconds=4.0, memory_mib=256)
    assert judge(prompt, "def double(x):\n    return 2 * x") == 1.0
    assert judge(prompt, "def double(x):\n    return x") == 0.0
    assert judge(prompt, "def double(x) return") == 0.0
    assert (
        judge(prompt, "import os\ndef double(x):\n    return 8 if 'HOME' not in os.environ else 0")
        == 1.0
    )
    for early in ("exit()", "raise SystemExit", "import os; os._exit(0)"):
        assert judge(prompt, early) == 0.0, "it ends before its test"
    assert judge(prompt, "held = bytearray(10**9)\ndouble = lambda x: 8") == 0.0
    begun = time.monotonic()
    assert reward_of("unit_test", seconds=1.0)(prompt, "while True: pass") == 0.0
    assert time.monotonic() - begun < 30
    with pytest.raises(TrainingError, match="has no test"):
        judge(Prompt("double", {}), "")


def test_a_unit_test_cannot_harm_the_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if find_missing():
        pytest.skip(f"this machine cannot keep programs from {find_missing()}")
    secret = tmp_path / "answers"
    secret.write_text("42")
    mode = secret.stat().st_mode
    prompt = Prompt("attack", {"test": "assert not passed, passed"})
    judge = reward_of("unit_test", seconds=4.0)
    assert judge(prompt, ATTACKS.replace("SECRET", str(secret))) == 1.0
    assert (
        secret.read_text() == "42"
        and secret.stat().st_mode == mode
        and capfd.readouterr().out == ""
    )
    assert judge(Prompt("sound", {"test": HARMLESS}), "") == 1.0
    deaf = (
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: print('x' * "
        "100_000)"
    )
    begun = time.monotonic()
    assert (
        reward_of("unit_test", seconds=1.0)(prompt, deaf) == 0.0 and time.monotonic() - begun < 30
    )


def config_of(tmp_path: Path, options: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    own = {"prompt_max_len": 6, "held_out_prompts": 4, "n_samples_per_prompt": 2, **(options or {})}
    model = {
        "hidden_size": 16,
        "num_layers": 1,
        "num_heads": 2,
        "sequence_length": 10,
        **sections.pop("model", {}),
    }
    settings = {"training": {"batch_size": 4}, **sections}
    workload = {"workload": "ebbflow.workloads:PolicyOptimization", "workload_options": own}
    return RunConfig.model_validate(
        {"store": str(tmp_path / "store"), **workload, "model": model, **settings}
    )


def prepare(config: RunConfig) -> Any:
    context = workload_context(config, Gang(), store=Store.open(config.store))
    return replace(context, prepared=prepare_data(config, context))


@pytest.mark.parametrize(
    "options",
    [
        {
            "advantage_estimator": "grpo",
            "kl_target": 0.1,
            "reward": "shared_start",
            "reward_running_norm": True,
        },
        {
            "advantage_estimator": "cpgd",
            "init_kl_coef": 0.0,
            "rollout_batch_size": 8,
            "max_epochs": 2,
        },
        {
            "advantage_estimator": "reinforce++",
            "n_samples_per_prompt": 1,
            "enable_engine_sleep": True,
        },
        {
            "advantage_estimator": "rloo",
            "kl_estimator": "k1",
            "advantages_norm": True,
            "micro_rollout_batch_size": 3,
        },
        {"advantage_estimator": "ppo", "discount": 0.9, "kl_estimator": "k2"},
    ],
    ids=lambda options: options["advantage_estimator"],
)
def test_examine_accepts_every_estimator(options: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, options)
    trial = try_workload(config, prepare(config))
    assert "held_out_reward" in trial.text and not trial.notes
    assert trial.shape is not None and trial.shape.weight_unit == "rollouts"


def test_steps_between_two_rollouts_train_on_the_stored_ones(tmp_path: Path) -> None:
    """Two batches of two prompts, trained on twice: steps 0 to 3 use one rollout, step 4 the next."""
    options = {"rollout_batch_size": 4, "max_epochs": 2}
    config = config_of(tmp_path, options, training={"batch_size": 2})
    workload = make_workload(config, prepare(config))
    model = workload.model()
    blank = workload.model()
    materialise(model, "cpu")
    initialise(model, blank, seed=1)
    steps = [workload.next_batch(model, Cursor(2 * step, 2)) for step in range(5)]
    assert torch.equal(steps[0].tokens, steps[2].tokens) and torch.equal(
        steps[1].tokens, steps[3].tokens
    )
    assert torch.equal(steps[1].old, steps[3].old) and not torch.equal(
        steps[0].tokens, steps[1].tokens
    )
    assert all(not torch.equal(steps[4].tokens, step.tokens) for step in steps[:4])
    assert all(batch.weight == 4 for batch in steps)
    half = workload.next_batch(model, Cursor(9, 1))  # the second of two ranks
    assert torch.equal(half.tokens, steps[4].tokens[2:])


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"clips": 0.2}, "clips is unknown; fix: did you mean clip"),
        ({"clip": "much"}, "clip: 'much' is a str; fix: a float"),
        ({"clip": 1.5}, "clip: 1.5; fix: between 0 and 1"),
        ({"advantage_estimator": "a2c"}, "fix: grpo or cpgd"),
        ({"n_samples_per_prompt": 1}, "grpo compares the rollouts of a prompt"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt: 0; fix: at least 1"),
        ({"generate_max_len": 5}, r"6 \+ 5 = 11 tokens are more than model.sequence_length 10"),
        (
            {"prompt_max_len": 5},
            "8096 of 8096 train prompts have more than workload_options.prompt_max_len 5 tokens",
        ),
        (
            {"rollout_batch_size": 6},
            "6 prompts are not a multiple of training.batch_size 4; fix: .*8",
        ),
        (
            {"rollout_batch_size": 8100},
            r"num_rollouts_per_episodes = 8096 prompts // 8100 prompts per rollout = 0",
        ),
        ({"kl_estimator": "k1"}, "k1 is no penalty in the loss, as with grpo.*fix: k2 or k3"),
        ({"kl_horizon": 0.0}, "kl_horizon: 0.0; fix: a number of rollouts"),
        (
            {"engine_tp_size": 2},
            "splits layers as the policy does, over parallel.tensor_size 1; fix: leave it",
        ),
        ({"engine_mem_util": 0.0}, "engine_mem_util: 0.0; fix: more than 0"),
        ({"kl_target": 0.1, "init_kl_coef": 0.0}, "no reference with init_kl_coef 0"),
        ({"path": "absent.jsonl"}, r"absent.jsonl: no file; fix: name a folder, a file, or a glob"),
        ({"zero_stage": 4}, "zero_stage: 4; fix: 0, 1, 2 or 3"),
        (
            {"zero_stage": 0},
            "zero_stage 0: parallel.mode ddp, where .*; it is fsdp2; fix: parallel.mode: ddp",
        ),
        (
            {"reference": "r.safetensors", "init_kl_coef": 0.0},
            "reference: it is not used with init_kl_coef 0",
        ),
        (
            {"reference": "r.safetensors"},
            "workload_options.reference .*r.safetensors: no such file",
        ),
        (
            {"supervised_start": 2.0, "supervised_steps": 10},
            "the reward is .* after supervised_steps 10, less than 2",
        ),
    ],
)
def test_bad_options_are_refused_before_training(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=problem):
        prepare(config_of(tmp_path, options))


@pytest.mark.parametrize(
    ("options", "sections", "problem"),
    [
        (
            {},
            {"parallel": {"mode": "ddp", "tensor_size": 2}},
            "tensor_size 2: only the layers of the built-in model",
        ),
        (
            {},
            {"parallel": {"tensor_size": 4}},
            r"4 does not divide model.num_heads 2: 2 = 4 × 0 \+ 2; .*one of 1, 2",
        ),
        (
            {"model": "folder"},
            {"parallel": {"tensor_size": 2}},
            "only the layers of the built-in policy .* of folder",
        ),
        (
            {"engine_tp_size": 4},
            {"parallel": {"tensor_size": 2}},
            "engine_tp_size: 4: .* parallel.tensor_size 2; fix",
        ),
        (
            {},
            {"model": {"end_of_document": 3}},
            "model.end_of_document: 3: a rollout is one document",
        ),
    ],
)
def test_policy_optimization_refuses_unsupported_tensor_groups_and_rollouts(
    options: dict[str, Any], sections: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=problem):
        prepare(config_of(tmp_path, options, **sections))


def test_another_workload_without_split_layers_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, parallel={"tensor_size": 2}).model_copy(
        update={
            "workload": "ebbflow.workloads:PointCloudDiffusion",
            "workload_options": {"synthetic_clouds": 8},
        }
    )
    with pytest.raises(TrainingError, match=r"tensor_size 2: .*Denoiser has no split_layers"):
        try_workload(config, prepare(config))


def test_an_engine_that_is_not_installed_is_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, {"engine": "vllm"})
    with pytest.raises(TrainingError, match="vllm"):
        make_workload(config, prepare(config))


def test_stages_of_zero_are_parallel_modes(tmp_path: Path) -> None:
    """What preflight prints about them, beside the number of rollouts."""
    for stage, mode, text in (
        (0, "ddp", "zero_stage 0: parallel.mode ddp, where every rank holds weights"),
        (
            1,
            "fsdp2",
            "zero_stage 1: parallel.mode fsdp2 or hsdp, which shards weights and gradients too",
        ),
        (
            3,
            "hsdp",
            "zero_stage 3: parallel.mode fsdp2 or hsdp, which shards weights, gradients and "
            "optimizer state",
        ),
    ):
        config = config_of(tmp_path, {"zero_stage": stage}, parallel={"mode": mode})
        found = PolicyOptimization.check(
            workload_context(config, Gang(), store=Store.open(config.store))
        )
        assert found.startswith(
            "num_rollouts_per_episodes = 8096 prompts // 4 prompts per rollout = 2024; "
        )
        assert text in found


def test_moments_in_main_memory_change_no_bit(tmp_path: Path) -> None:
    """Five steps of each optimizer with the same gradients, the second after its state was put
    back.
    """
    config = config_of(tmp_path)
    models = [policy_of() for _ in range(2)]
    steps = []
    for model, make in zip(models, (make_optimizer, make_offloaded), strict=True):
        optimizer = make(model, config.training)
        draws = torch.Generator().manual_seed(9)
        for step in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draws)
            optimizer.step()
            if step == 2:
                optimizer.load_state_dict(optimizer.state_dict())
        steps.append(next(iter(optimizer.state.values()))["step"].item())
    assert steps == [5.0, 5.0]
    assert all(
        torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True)
    )


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"prompt": "a"}', "not json"], r"rows.jsonl:2: not JSON"),
        (['{"prompt": "a"}', "[1]"], r"rows.jsonl, row 2: a list; fix: one JSON object"),
        (['{"prompt": "a"}', '{"text": "b"}'], "row 2: no text in 'prompt'; it has text; fix"),
        (['{"prompt": "a"}'] * 4, r"4 rows - 4 held-out prompts leave none to train on"),
        (
            ['{"prompt": "a"}'] * 7,
            r"num_rollouts_per_episodes = 3 prompts // 4 prompts per rollout = 0",
        ),
        (
            ['{"prompt": "a"}'] * 9 + ['{"prompt": "abcdefg"}'],
            "1 of 6 train prompts have more than .* 6 tokens",
        ),
    ],
)
def test_a_bad_file_of_prompts_is_refused(lines: list[str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(TrainingError, match=problem):
        prepare(config_of(tmp_path, {"path": str(tmp_path / "rows.jsonl")}))


def test_prompts_are_read_from_a_file_a_folder_and_a_bucket(
    tmp_path: Path, failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    import pyarrow

    failing_s3.use(monkeypatch)
    bucket = failing_s3.new_bucket()
    rows = [{"answer": str(number), "prompt": f"p{number}"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for part, few in enumerate((rows[:5], rows[5:])):
        content = "\n".join(map(json.dumps, few))
        Path(tmp_path, "parts").mkdir(exist_ok=True)
        Path(tmp_path, "parts", f"{part}.jsonl").write_text(content)
        Store.open(f"s3://{bucket}").put(f"in/{part}.jsonl", content.encode())
    places = [
        "rows.jsonl",
        "rows.parquet",
        "parts",
        "parts/?.jsonl",
        f"s3://{bucket}/in",
        f"s3://{bucket}/in/*.jsonl",
    ]
    found = [read_prompts(locate(tmp_path, place), column="prompt", held_out=4) for place in places]
    assert found == [rows] * len(places)
    prepared = prepare(config_of(tmp_path, {"path": f"s3://{bucket}/in"})).prepared
    assert (prepared["train"], prepared["held_out"]) == (8, 4)
    (tmp_path / "rows.txt").write_text("p")
    with pytest.raises(DataError, match=r"\?\.txt is plain text; fix: a data set of \.jsonl, "):
        read_prompts(tmp_path / "row?.txt", column="prompt", held_out=4)


def test_prompts_and_weights_of_files(tmp_path: Path) -> None:
    """A model that a file gives is the policy's and the reference's first one, and prompts are
    those of the file.
    """
    from safetensors.torch import save_file

    rows = [{"prompt": f"p{number}", "answer": "x"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = policy_of(hidden_size=16, num_layers=1, sequence_length=10, vocab_size=256)
    given = {
        name: value.contiguous()
        for name, value in model.named_parameters()
        if not name.startswith("values")
    }
    save_file(given, tmp_path / "first.safetensors")
    options = {"path": str(tmp_path / "rows.jsonl"), "weights": str(tmp_path / "first.safetensors")}
    config = config_of(tmp_path, {**options, "init_kl_coef": 0.1})
    context = prepare(config)
    assert context.prepared["train"] == 8 and context.prepared["held_out"] == 4
    workload = make_workload(config, context)
    policy = workload.model()
    blank = workload.model()
    materialise(policy, "cpu")
    initialise(policy, blank, seed=1)
    assert all(torch.equal(policy.get_parameter(name), value) for name, value in given.items())
    batch = workload.next_batch(policy, Cursor(0, 4))
    assert torch.allclose(batch.reference * batch.mask, batch.old, atol=1e-5), (
        "the policy is its reference"
    )
    texts = {
        bytes(row[:2]).decode() if row[2] != 48 else bytes(row[:3]).decode()
        for row in batch.tokens.tolist()
    }
    assert all(text.startswith("p") for text in texts)
    save_file(
        {**given, "embeddings.token.weight": torch.zeros(300, 16)}, tmp_path / "other.safetensors"
    )
    with pytest.raises(
        TrainingError, match=r"reference: .* a vocabulary of 300 tokens, the policy has 256; fix: "
    ):
        prepare(config_of(tmp_path, {**options, "reference": str(tmp_path / "other.safetensors")}))
    with pytest.raises(TrainingError, match="reference would have other weights"):
        prepare(
            config_of(tmp_path, training={"batch_size": 4, "initial_weights": "first.safetensors"})
        )


def test_a_supervised_start_is_made_once_and_is_the_reference(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}] * 12
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {
        "path": str(tmp_path / "rows.jsonl"),
        "supervised_start": 0.5,
        "supervised_batch_size": 4,
    }
    config = config_of(tmp_path, {**options, "supervised_steps": 60})
    first = prepare(config)
    again = prepare(config)
    assert first.prepared == again.prepared and first.prepared["start"].startswith("start/")
    workload: Any = make_workload(config, first)
    model = workload.model()
    blank = workload.model()
    materialise(model, "cpu")
    initialise(model, blank, seed=1)
    assert workload.evaluate(model)["held_out_reward"] == 1.0
    assert "<text" in workload.pictures()["completions"]
    without = prepare(config_of(tmp_path, {**options, "path": "", "supervised_start": 0.0}))
    assert without.prepared["fingerprint"] != first.prepared["fingerprint"]
