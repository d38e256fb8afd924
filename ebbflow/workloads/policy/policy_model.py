"""The policy of reinforcement fine-tuning: its model, its first weights, and its record in commits.

The policy is the built-in language model (`BuiltInModels`), or one of a folder of transformers
(`FolderModels`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from ebbflow.core.config.schema import ModelConfig, RunConfig
from ebbflow.core.footprint import causal_lm_shape
from ebbflow.core.json_values import JsonObject
from ebbflow.training.checkpoint.hugging_face import our_name
from ebbflow.training.data import SampleOrder
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.weights.files import StoredTensor, describe_files, find_weights
from ebbflow.training.weights.load import check_weights_fit, initialise, materialise
from ebbflow.training.workload import WorkloadContext
from ebbflow.workloads.language.language_model import CausalLM, KeyValues, Linear
from ebbflow.workloads.points.point_data import seeded
from ebbflow.workloads.policy.policy_options import PolicyOptions, refuse_option
from ebbflow.workloads.policy.policy_prompts import Codec, Prompt, Prompts
from ebbflow.workloads.policy.policy_rewards import Reward
from ebbflow.workloads.policy.policy_rollouts import TorchEngine

_LOOK_EVERY = 10  # steps of the supervised start between two looks at the reward
_WARM_UP_STEPS = 20
_LOOKED_AT = 256  # prompts of such a look
# Of the rollouts that a commit keeps
COLUMNS = ("old", "reference", "advantages", "values", "returns")
# Sums over the rollouts since the last step that was a multiple of
# training.evaluation_interval_steps.
MEANS = ("rollouts", "reward", "kl", "entropy", "length", "accept_rate")

Weights = Mapping[str, Callable[[], Tensor]]  # functions that read a weight, by the model's names


class Record(nn.Module):
    """State in a commit besides the weights: running metrics, and rollouts that later steps train
    on.

    `figures` has two rows of metrics: before and after the last rollouts. With the first row,
    rollouts can be repeated with the same result.
    """

    figures: Tensor  # float64 `[2, figures]`
    tokens: Tensor  # int32 `[rollouts, sequence]`
    spans: Tensor  # int32 `[rollouts, 2]`: tokens of the prompt, and of prompt and completion
    columns: Tensor  # float32 `[columns, rollouts, sequence - 1]`

    NAMES = (
        "round",
        "reward_count",
        "reward_mean",
        "reward_squares",
        "kl_coefficient",
        "all_rollouts",
        "window",
        *MEANS,
    )

    def __init__(self, options: PolicyOptions, rollouts: int) -> None:
        super().__init__()
        self._coefficient = options.init_kl_coef
        self.register_buffer("figures", torch.empty(2, len(self.NAMES), dtype=torch.float64))
        self.register_buffer("tokens", torch.empty(rollouts, options.sequence, dtype=torch.int32))
        self.register_buffer("spans", torch.empty(rollouts, 2, dtype=torch.int32))
        self.register_buffer("columns", torch.empty(len(COLUMNS), rollouts, options.sequence - 1))

    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()
        self.figures[:, self.NAMES.index("round")] = -1
        self.figures[:, self.NAMES.index("kl_coefficient")] = self._coefficient

    def read(self, *, before_round: int | None = None) -> dict[str, float]:
        """Return the metrics after the last round of rollouts.

        If that round is `before_round`, return the metrics before it.
        """
        first, last = self.figures.tolist()
        before: dict[str, float] = dict(zip(self.NAMES, first, strict=True))
        after: dict[str, float] = dict(zip(self.NAMES, last, strict=True))
        if after["round"] == before_round:
            return before
        return after

    def write(self, before: dict[str, float], after: dict[str, float]) -> None:
        rows = [
            [before[name] for name in self.NAMES],
            [after[name] for name in self.NAMES],
        ]
        self.figures.copy_(torch.tensor(rows, dtype=torch.float64))


class Policy(CausalLM):
    """The built-in causal language model, with a record and, for PPO, a value head."""

    def __init__(
        self, model: ModelConfig, *, values: bool = False, record: Record | None = None
    ) -> None:
        super().__init__(model)
        if values:
            self.values = Linear(model.hidden_size, 1, bias=True)
        else:
            self.values = None
        self.record = record

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]  (no loss of its own)
        self, tokens: Tensor, past: Any = None
    ) -> Any:
        """Compute logits `[batch, length, vocabulary]` and, with a value head, values `[batch,
        length]`.
        """
        x = self.embeddings(tokens, past[0] if past else None)
        for number, block in enumerate(self.blocks):
            if past:
                x = block(x, past[number])
            else:
                x = block(x)
        logits = self.head(x)
        if self.values is None:
            return logits
        return logits, self.values(F.rms_norm(x, x.shape[-1:]))[..., 0]

    def make_cache(self, capacity: int) -> list[KeyValues]:
        """Return an empty cache of keys and values for `capacity` tokens."""
        return [KeyValues(capacity) for _ in self.blocks]

    @property
    def cached_numbers_per_token(self) -> int:
        return 2 * self.config.num_layers * self.config.kv_heads * self.config.head_width


class PolicyModels(Protocol):
    """Interface of a job's models: the policy, and the reference, near which the policy is kept."""

    config: RunConfig  # with the vocabulary and the tokenizer of the policy
    stop: int | None  # token that ends a completion; None: the tokenizer's
    parameters: int

    def policy(self, record: Record | None = None) -> nn.Module:
        """Return the policy on the meta device, set up to start with its first weights."""
        ...

    def reference(self, device: torch.device, dtype: torch.dtype) -> nn.Module | None:
        """Return the reference on a device, not sharded.

        Return None if the reference is the policy without LoRA's matrices.
        """
        ...

    def units(self, model: nn.Module) -> Iterable[nn.Module]: ...

    def flops_per_token(self) -> float:
        """Return the floating point operations per token of forward and backward."""
        ...

    def describe(self) -> JsonObject:
        """Describe the first weights as JSON, so that a change of them can be detected."""
        ...


class BuiltInModels:
    """The built-in language model as policy.

    Its first weights come from a safetensors file, a supervised start or random numbers.
    """

    stop: int | None = None

    def __init__(self, context: WorkloadContext, options: PolicyOptions) -> None:
        self.config = context.config
        self._options = options
        self._context = context
        self.parameters = causal_lm_shape(self.config.model).parameters
        if options.weights:
            self._weights = self._stored("weights", options.weights)
        else:
            self._weights = {}
        if options.reference:
            self._own_reference = self._stored("reference", options.reference)
        else:
            self._own_reference = None

    def policy(self, record: Record | None = None) -> Policy:
        with torch.device("meta"):
            model = Policy(
                self.config.model, values=self._options.advantage_estimator == "ppo", record=record
            )
        start_with(model, self._first_weights())
        return model

    def reference(self, device: torch.device, dtype: torch.dtype) -> Policy:
        if self._own_reference is None:
            first = self._first_weights()
        else:
            first = self._own_reference
        return plain_policy(self.config, first, device=device, dtype=dtype)

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, Policy)
        return model.units()

    def flops_per_token(self) -> float:
        return (
            causal_lm_shape(self.config.model).flops_per_sample / self.config.model.sequence_length
        )

    def describe(self) -> JsonObject:
        given = {name: getattr(self._options, name) for name in ("weights", "reference")}
        root = self._context.project_root
        return {
            name: describe_files(str(root / Path(path).expanduser()))
            for name, path in given.items()
            if path
        }

    def _first_weights(self) -> Weights:
        if "start" in self._context.prepared:
            start = load_tensors(self._context.store.get(self._context.prepared["start"]))
            return {name: partial(_same, value) for name, value in start.items()}
        return self._weights

    def _stored(self, option: str, given: str) -> Weights:
        path = str(self._context.project_root / Path(given).expanduser())
        with torch.device("meta"):
            model = CausalLM(self.config.model)
        try:
            found = find_weights(
                path, our_name if self.config.model.architecture == "llama" else None
            )
            rows = found.get("embeddings.token.weight")
            if rows is not None and rows.shape[:1] != (self.config.model.vocab_size,):
                refuse_option(
                    f"{option}: {path} has a vocabulary of {rows.shape[0]} tokens, the policy "
                    f"has {self.config.model.vocab_size}; fix: weights of the same vocabulary, "
                    "or model.vocab_size"
                )
            check_weights_fit(found, model, path)
        except WorkloadError as error:
            raise WorkloadError(
                str(error).replace("training.initial_weights", f"workload_options.{option}")
            ) from None
        return {name: partial(_read, stored) for name, stored in found.items()}


def unwrap(model: nn.Module) -> Any:
    """Return the policy inside DDP's wrapper, or the policy itself if it is not wrapped."""
    return getattr(model, "module", model)


def plain_policy(
    config: RunConfig,
    start: Weights,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """Return an unsharded policy with its first weights, but without value head and record."""
    with torch.device("meta"):
        model = Policy(config.model)
        blank = Policy(config.model)
    start_with(blank, start)
    return fill(model, blank, config.training.seed, device, dtype)


def fill(
    model: Any, blank: nn.Module, seed: int, device: torch.device | str, dtype: torch.dtype
) -> Any:
    """Initialise a model on the meta device module by module, and return it without gradients.

    Parameters get the given type. Buffers, such as rotary frequencies, keep theirs.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    materialise(model, device)
    initialise(model, blank, seed=seed)
    return model.eval().requires_grad_(False)


def start_with(model: nn.Module, start: Weights) -> None:
    """Let a model on the meta device start with given weights instead of random ones."""
    # Of a tied weight, its first name
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = dict(model.named_parameters(remove_duplicate=False))
    given: dict[str, dict[str, Callable[[], Tensor]]] = {}
    for name, read in start.items():
        owner, _, key = (first[id(every[name])] if name in every else name).rpartition(".")
        given.setdefault(owner, {})[key] = read
    for owner, values in given.items():
        module = model.get_submodule(owner)
        module.reset_parameters = _Stored(module, values)  # type: ignore[assignment]


def make_start(
    context: WorkloadContext, options: PolicyOptions, prompts: Prompts, codec: Codec
) -> str:
    """Train a policy on the right answers, and return the key of its weights in the store.

    The training ends when enough drawn completions are right. Raises DataError if the prompts have
    no answers, or if the training takes too many steps.
    """
    config = context.config
    names = [
        name
        for name in asdict(options)
        if name.startswith(("supervised", "prompt", "generate", "held", "reward"))
    ]
    content = {name: getattr(options, name) for name in [*names, "temperature"]}
    content |= {
        "model": config.model.model_dump(mode="json"),
        "seed": config.training.seed,
        "tokens": codec.identity,
    }
    content |= {"prompts": [(prompt.text, prompt.answer) for prompt in prompts.train]}
    key = f"start/{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}.safetensors"
    if context.store.head(key) is not None:
        return key
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the sums' order, and so the weights, depend on the number of threads
    try:
        weights = _train_start(config, options, prompts, codec)
    finally:
        torch.set_num_threads(threads)
    context.store.put(key, save_tensors(weights))
    return key


def _read(stored: StoredTensor) -> Tensor:
    with safe_open(stored.file, framework="pt") as file:
        return file.get_tensor(stored.name)


def _same(value: Tensor) -> Tensor:
    return value


class _Stored:
    """Replacement of a module's `reset_parameters` that copies given weights over the initial
    ones.
    """

    def __init__(self, module: nn.Module, given: Weights) -> None:
        self._module = module
        self._given = given
        self._own = module.reset_parameters

    @torch.no_grad()
    def __call__(self) -> None:
        self._own()  # type: ignore[operator]  # its buffers
        for name, read in self._given.items():
            self._module.get_parameter(name).copy_(read())


def _train_start(
    config: RunConfig, options: PolicyOptions, prompts: Prompts, codec: Codec
) -> dict[str, Tensor]:
    model = plain_policy(config, {}).requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), fused=True)
    tokens, mask = _answers(prompts.train, options, codec)
    order = SampleOrder(len(tokens), config.training.seed)
    reward = 0.0
    judge = Reward(
        options.reward, seconds=options.reward_seconds, memory_mib=options.test_memory_mib
    )
    engine = TorchEngine(
        Policy(config.model).to("meta"),
        sequence=options.sequence,
        stop=codec.stop,
        temperature=options.temperature,
        batch=_LOOKED_AT,
        device=torch.device("cpu"),
    )
    draws = torch.rand(
        _LOOKED_AT, options.generate_max_len, generator=seeded(config.training.seed, "supervised")
    )
    looked_at = prompts.train[:_LOOKED_AT]
    for step in range(1, options.supervised_steps + 1):
        rows = order.window(
            (step - 1) * options.supervised_batch_size, options.supervised_batch_size
        )
        batch = tokens[rows]
        weight = mask[rows]
        optimizer.param_groups[0]["lr"] = options.supervised_learning_rate * min(
            1.0, step / _WARM_UP_STEPS
        )
        logits = model(batch[:, :-1]).float()
        targets = batch[:, 1:]
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            targets.flatten(),
            reduction="none",
            label_smoothing=options.supervised_smoothing,
        ).view_as(targets)
        optimizer.zero_grad()
        ((losses * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % _LOOK_EVERY == 0:
            engine.update_weights(model, step)
            found = engine.generate(
                [codec.encode(prompt.text) for prompt in looked_at], draws[: len(looked_at)]
            )
            spans = zip(
                found.tokens.tolist(),
                found.prompt_lengths.tolist(),
                found.lengths.tolist(),
                strict=True,
            )
            texts = [codec.decode(row[begin:end]) for row, begin, end in spans]
            reward = sum(map(judge, looked_at, texts)) / len(looked_at)
            if reward >= options.supervised_start:
                print(f"supervised start: reward {reward:.2f} after {step} steps", flush=True)
                return {name: value.detach() for name, value in model.named_parameters()}
    raise DataError(
        f"workload_options.supervised_start: the reward is {reward:.2f} after supervised_steps "
        f"{options.supervised_steps}, less than {options.supervised_start:g}; "
        "fix: more steps, another supervised_learning_rate, or a larger model"
    )


def _answers(
    prompts: Sequence[Prompt], options: PolicyOptions, codec: Codec
) -> tuple[Tensor, Tensor]:
    """Return the tokens of prompts with their answers, and a mask of the answers' tokens."""
    tokens = torch.full((len(prompts), options.sequence), codec.stop)
    mask = torch.zeros(len(prompts), options.sequence - 1)
    for row, prompt in enumerate(prompts):
        if not prompt.answer:
            raise DataError(
                f"workload_options.supervised_start: prompt {prompt.text[:60]!r} has no answer; "
                "fix: add it, or 0"
            )
        first = codec.encode(prompt.text)
        answer = [*codec.encode_plain(prompt.answer), codec.stop]
        if len(answer) > options.generate_max_len:
            raise DataError(
                f"the answer {prompt.answer[:40]!r} has {len(answer)} tokens with its end, more "
                f"than workload_options.generate_max_len {options.generate_max_len}; fix: "
                f"generate_max_len: {len(answer)}"
            )
        tokens[row, : len(first) + len(answer)] = torch.tensor(first + answer)
        mask[row, len(first) - 1 : len(first) + len(answer) - 1] = 1.0
    return tokens, mask
