"""Rollouts: completions that an inference engine draws from a policy, with log-probabilities.

A rollout's tokens depend on its prompt, the policy and its own uniform random numbers, one for each
token. The size of a generation batch changes nothing but the rounding of the log-probabilities. In
a tensor group (`parallel.tensor_size`), the ranks draw the same rollouts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ebbflow.training.engine.tensor_parallel import split_computation
from ebbflow.training.errors import TrainingError, WorkloadError

_GREEDY = -1.0  # a draw that takes the likeliest token

# Mean difference of log-probabilities; numerics of bfloat16 make about a hundredth
_OTHER_WEIGHTS = 0.5


@dataclass(frozen=True)
class Rollouts:
    """Completions of a batch of prompts, with their log-probabilities.

    A row of `tokens` has the prompt, the completion with its stop token, and padding.
    """

    tokens: Tensor  # int64 `[rollouts, sequence]`
    prompt_lengths: Tensor  # int64 `[rollouts]`
    lengths: Tensor  # int64 `[rollouts]`, of prompt and completion
    # Of the token after each position, float32 `[rollouts, sequence - 1]`; 0 outside the completion
    log_probs: Tensor
    version: int  # of the weights that drew them

    @property
    def mask(self) -> Tensor:
        """Mask `[rollouts, sequence - 1]`: 1 where a position predicts a token of the completion,
        else 0.
        """
        return completion_mask(self.tokens.shape[1], self.prompt_lengths, self.lengths)


class Engine(Protocol):
    """Interface of an inference engine that draws rollouts.

    `update_weights` is collective; the other methods are not, except in a tensor group.
    """

    version: int  # of its weights: the number of updates of the policy

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Copy the policy's weights, sharded or not, into the engine."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], draws: Tensor) -> Rollouts:
        """Complete each prompt.

        Args:
            draws: `[prompts, new tokens]`, a uniform random number in [0, 1) for each token. A negative
                number takes the likeliest token.
        """
        ...

    def sleep(self) -> None:
        """Free weights and caches until the next `wake`."""
        ...

    def wake(self) -> None: ...


class TorchEngine:
    """Inference engine in plain torch, with a cache of keys and values.

    Weights that are not sharded are shared with the policy, sharded ones are gathered. In a tensor
    group, each rank has its part of them, and the keys and values of its attention heads. Prompts
    of a batch may have different lengths: they start at the same position, and where one is over,
    its completion begins.

    Args:
        model: a policy on the meta device, which gets the weights.
        sequence: tokens of prompt and completion at most.
        stop: the token that ends a completion, also used as padding.
        batch: rollouts that are generated together; halved if the memory does not suffice.
        memory_share: on a GPU, share of its whole memory that the keys and values of a batch may
            take, since what is free depends on the moment, and a resumed job would choose another
            batch.
        dtype: of gathered weights, as a sharded policy computes with them.
    """

    def __init__(  # noqa: PLR0913 - the options of sampling
        self,
        model: nn.Module,
        *,
        sequence: int,
        stop: int,
        temperature: float,
        batch: int,
        device: torch.device,
        memory_share: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.version = -1
        self._model = model
        self._sequence = sequence
        self._stop = stop
        self._temperature = temperature
        self.batch = batch
        self._device = device
        self._awake = True
        self._memory_share = memory_share
        self.cached = True
        self._dtype = dtype
        self._group: DeviceMesh | None = None  # the tensor group

    @property
    def model(self) -> nn.Module:
        """The engine's copy of the policy, for scoring rollouts without collectives."""
        return self._model

    @torch.no_grad()
    def update_weights(self, model: nn.Module, version: int) -> None:
        model = getattr(model, "module", model)  # without DDP's wrapper
        if self._group is None and (group := find_tensor_group(model)) is not None:
            policy: Any = self._model
            split_computation(policy.split_layers(), group)
            self._group = group
        # All names of tied weights
        own = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(self._model.named_buffers())
        given = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }
        for name in [*own, *buffers]:
            value = given[name].detach()
            if isinstance(value, DTensor):
                moved = value.to(self._device, self._dtype if name in own else value.dtype)
                assert isinstance(moved, DTensor)
                value = gather_shards(moved)
            owner, _, key = name.rpartition(".")
            part = self._model.get_submodule(owner)
            setattr(part, key, nn.Parameter(value, requires_grad=False) if name in own else value)
        self._model.eval()
        self.version = version

    def sleep(self) -> None:
        self._model.to_empty(device="meta")
        self.version = -1
        self._awake = False
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake(self) -> None:
        self._awake = True

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], draws: Tensor) -> Rollouts:
        if not self._awake or self.version < 0:
            raise TrainingError(
                "the engine has no weights; fix: wake it and update its weights before it generates"
            )
        if self._device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self._device)
            each = cache_bytes(self._model, self._sequence) // (
                1 if self._group is None else self._group.size()
            )
            self.batch = fit_batch(self.batch, int(total * self._memory_share), each)
        first = 0
        parts = []
        while first < len(prompts):
            last = first + self.batch
            try:
                parts.append(self._generate(prompts[first:last], draws[first:last]))
            except torch.OutOfMemoryError as error:
                # The other ranks of the group wait within the forward pass
                if self._group is not None:
                    raise TrainingError(
                        f"rollouts: out of memory with {self.batch} at a time, which a tensor "
                        "group cannot halve; fix: workload_options.micro_rollout_batch_size: "
                        f"{max(1, self.batch // 2)}"
                    ) from error
                if self.batch == 1:
                    raise
                self.batch //= 2
                print(
                    f"rollouts: out of memory; generating {self.batch} at a time from now on",
                    flush=True,
                )
                continue
            first = last
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        return Rollouts(*columns, version=self.version)

    def _generate(self, prompts: Sequence[Sequence[int]], draws: Tensor) -> tuple[Tensor, ...]:
        count = len(prompts)
        device = self._device
        filled = torch.full((count, self._sequence), self._stop)
        for row, prompt in enumerate(prompts):
            filled[row, : len(prompt)] = torch.tensor(prompt)
        counts = torch.tensor([len(prompt) for prompt in prompts])
        shortest = int(counts.min())
        longest = min(int(counts.max()) + draws.shape[1], self._sequence)
        tokens, begins, draws = (send(part, device) for part in (filled, counts, draws))
        lengths = (begins + draws.shape[1]).clamp(max=self._sequence)
        log_probs = torch.zeros(count, self._sequence - 1, device=device)
        policy: Any = self._model
        if self.cached:
            past = policy.make_cache(longest)
        else:
            past = None
        rows = torch.arange(count, device=device)
        fresh = tokens[:, :shortest]
        for at in range(shortest, longest):
            logits = self._logits(fresh, past)
            place = at - begins  # of the token within its completion
            active = (place >= 0) & (at < lengths)
            drawn, found = draw_tokens(
                logits, draws[rows, place.clamp(0, draws.shape[1] - 1)], self._temperature
            )
            # By a mask, a GPU's host would wait to learn how many there are
            tokens[:, at] = torch.where(active, drawn, tokens[:, at])
            log_probs[:, at - 1] = torch.where(active, found, log_probs[:, at - 1])
            lengths = torch.where(active & (drawn == self._stop), at + 1, lengths)
            if not bool((at + 1 < lengths).any()):
                break
            if past is not None:
                fresh = tokens[:, at : at + 1]
            else:
                fresh = tokens[:, : at + 1]
        return tokens, begins, lengths, log_probs

    def _logits(self, tokens: Tensor, past: Any) -> Tensor:
        return policy_logits(self._model, tokens, past)[:, -1]


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. Copies to a GPU are asynchronous."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def completion_mask(sequence: int, prompt_lengths: Tensor, lengths: Tensor) -> Tensor:
    at = torch.arange(1, sequence, device=lengths.device)
    return ((at >= prompt_lengths[:, None]) & (at < lengths[:, None])).float()


def find_tensor_group(model: nn.Module) -> DeviceMesh | None:
    """Return the device mesh of this rank's tensor group, or None without tensor parallelism.

    The ranks of a tensor group compute each layer of the model together.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and "tensor" in (
            parameter.device_mesh.mesh_dim_names or ()
        ):
            return parameter.device_mesh["tensor"]
    return None


def gather_shards(weight: DTensor) -> Tensor:
    """Gather a weight that FSDP2 has sharded, and return it as a plain tensor.

    In a tensor group, this is the rank's part of the weight. Collective.
    """
    mesh = weight.device_mesh
    names = weight.device_mesh.mesh_dim_names or ()
    if "tensor" not in names:
        return weight.full_tensor()
    placements: dict[str, Any] = dict(zip(names, weight.placements, strict=True))
    shape = list(weight.shape)
    split = placements.pop("tensor")
    if not split.is_replicate():
        shape[split.dim] //= mesh["tensor"].size()
    part = weight.to_local()
    for (
        name,
        placement,
    ) in placements.items():  # FSDP2 shards another dimension than the tensor group
        if not placement.is_replicate():
            whole = torch.empty(shape, device="meta")
            about: dict[str, Any] = {
                "shape": whole.shape,
                "stride": whole.stride(),
                "run_check": False,
            }
            part = DTensor.from_local(
                part, mesh[name], [Shard(placement.dim)], **about
            ).full_tensor()
    return part


def split_policy(policy: Any, group: DeviceMesh) -> None:
    """Split an unsharded policy over a tensor group, and keep only this rank's part of the weights.

    The group then computes the policy together.
    """
    layers = policy.split_layers()
    parts = {}
    for module, layer in layers.items():
        whole = module.weight
        if layer.dimension is not None:
            if whole not in parts:  # tied weights are split once
                rows = whole.detach().unflatten(layer.dimension, (layer.parts, group.size(), -1))
                own = rows.select(layer.dimension + 1, group.get_local_rank())
                own = own.flatten(layer.dimension, layer.dimension + 1).clone()
                parts[whole] = nn.Parameter(own, requires_grad=False)
            module.weight = parts[whole]
    split_computation(layers, group)


def cache_bytes(model: nn.Module, sequence: int) -> int:
    """Return the bytes that the float32 keys and values of one rollout take, for all attention
    heads.
    """
    policy: Any = model
    return 4 * policy.cached_numbers_per_token * sequence


def fit_batch(batch: int, free_bytes: int, bytes_per_rollout: int) -> int:
    """Return how many rollouts fit into the free memory, at most `batch`.

    Raises WorkloadError if none does.
    """
    if free_bytes < bytes_per_rollout:
        raise WorkloadError(
            f"the keys and values of one rollout take {bytes_per_rollout:,} bytes, and "
            f"workload_options.engine_mem_util leaves {free_bytes:,}; fix: a larger "
            "engine_mem_util, enable_engine_sleep, or shorter sequences"
        )
    return min(batch, free_bytes // bytes_per_rollout)


def policy_logits(model: nn.Module, tokens: Tensor, past: Any = None) -> Tensor:
    """Compute the policy's logits `[batch, length, vocabulary]`, without the values of a value
    head.
    """
    found = model(tokens, past)
    if isinstance(found, tuple):
        return found[0]
    return found


def draw_tokens(logits: Tensor, draws: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Draw one token per row of logits `[batch, vocabulary]`; return tokens and log-probabilities.

    The token is where the cumulative probability exceeds the draw. A negative draw takes the
    likeliest token.
    """
    spread = (logits.float() / temperature).log_softmax(-1)
    cumulative = spread.double().exp().cumsum(-1)
    drawn = torch.searchsorted(
        cumulative, (draws.double() * cumulative[:, -1])[:, None], right=True
    )[:, 0]
    drawn = torch.where(draws < 0, spread.argmax(-1), drawn.clamp(max=spread.shape[1] - 1))
    return drawn, spread.gather(1, drawn[:, None])[:, 0]


def greedy_draws(count: int, length: int) -> Tensor:
    """Return draws `[count, length]` with which an engine takes the likeliest tokens."""
    return torch.full((count, length), _GREEDY)


def score(model: nn.Module, tokens: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of all tokens but the first, `[batch, sequence - 1]`.

    The logits are divided by `temperature`.
    """
    logits = policy_logits(model, tokens[:, :-1])
    return token_log_probs(logits, tokens[:, 1:], temperature)


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    spread = (logits.float() / temperature).log_softmax(-1)
    return spread.gather(2, targets[..., None])[..., 0]


def check_version(rollouts: Rollouts, expected: int, *, staleness: int = 0) -> None:
    """Raise TrainingError if the rollouts' weights are more than `staleness` steps behind the
    policy.
    """
    if not 0 <= expected - rollouts.version <= staleness:
        if staleness:
            allowed = f" (at most {staleness} less is allowed)"
        else:
            allowed = ""
        raise TrainingError(
            f"the rollouts were drawn by weight version {rollouts.version}, the policy has "
            f"version {expected}{allowed}; fix: the engine's update_weights before each rollout"
        )


def correct_importance(
    old: Tensor, drawn: Tensor, mask: Tensor, *, most: float, current: bool
) -> Tensor:
    """Return importance weights for tokens, because an engine's probabilities differ from the
    policy's.

    The weight is policy / engine, at most `most`: truncated importance sampling (Ionides 2008).

    Args:
        old, drawn: log-probabilities by the policy and by the engine.
        current: whether the engine has the policy's weights. Raises TrainingError if it plainly has
            not.
    """
    apart = float(((old - drawn).abs() * mask).sum() / mask.sum().clamp(min=1))
    if current and not apart < _OTHER_WEIGHTS:
        raise TrainingError(
            f"the engine's log-probabilities differ from the policy's by {apart:.2f} nats per "
            "token; fix: start the servers on workload_options.engine_weights, and with "
            "--logprobs-mode processed_logprobs"
        )
    return (old - drawn).exp().clamp(max=most)
