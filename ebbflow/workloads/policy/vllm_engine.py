"""Inference engine that asks vLLM servers for rollouts by HTTP, without importing vLLM.

Each server is started on `workload_options.engine_weights`, a folder that the ranks and the servers
share. Rank 0 writes the policy's weights there, with LoRA's matrices added, and each server reads
them again.
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ebbflow.training.errors import TrainingError, WorkloadError
from ebbflow.training.weights.load import tied_names
from ebbflow.workloads.policy.policy_options import PolicyOptions
from ebbflow.workloads.policy.policy_rollouts import Rollouts

_ASK_SECONDS = 600.0
_GENERATE_SECONDS = 1800.0
_SEEDS = 2**62
_OTHERS = "*.safetensors*"  # files of the folder that an update replaces


class VllmEngine:
    """Inference engine that lets vLLM servers draw the tokens.

    Each request has a seed of its own; the random numbers are vLLM's.

    Args:
        options: `engine_url` has the servers, separated by commas. Rank r asks the server r %
            servers.
        stop: the token that ends a completion, also used as padding.
        batch: requests that a rank has under way; halved if the server runs out of memory.
        dtype: of the weights' file.
        gather: a collective call, at which ranks wait for each other.
    """

    def __init__(
        self,
        options: PolicyOptions,
        *,
        stop: int,
        batch: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        gather: Callable[[Tensor], Tensor] = lambda row: row[None],
    ) -> None:
        self.version = -1
        self.batch = batch
        urls = [url.strip().rstrip("/") for url in options.engine_url.split(",")]
        self._options = options
        self._stop = stop
        self._dtype = dtype
        self._device = device
        self._url = urls[rank % len(urls)]
        self._leads = rank < len(urls)
        self._writes = rank == 0
        self._gather = gather
        self._folder = Path(options.engine_weights).expanduser()
        self._model = ""
        self._asleep = False

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Write the policy's weights to a file, and let each server read them.

        Collective.
        """
        weights = {name: value for name, value in full_weights(model, self._dtype) if self._writes}
        if self._writes:
            self._write(weights)
        del weights
        self._gather(torch.zeros(1, device=self._device))  # the file is there
        if self._leads:
            self._ask("POST", "/collective_rpc", {"method": "reload_weights"})
            if self._asleep:
                self._ask("POST", "/wake_up?tags=kv_cache")
            self._ask("POST", "/reset_prefix_cache")  # keys and values of the weights before
        self._gather(torch.zeros(1, device=self._device))  # the servers have read it
        self._asleep = False
        self.version = version

    def generate(self, prompts: Sequence[Sequence[int]], draws: Tensor) -> Rollouts:
        if self._asleep or self.version < 0:
            raise TrainingError(
                "the engine has no weights; fix: wake it and update its weights before it generates"
            )
        version = self.version
        device = self._device
        seeds = [int(row[0] * _SEEDS) if row[0] >= 0 else None for row in draws.double().tolist()]
        found: dict[int, tuple[list[int], list[float]]] = {}
        while len(found) < len(prompts):
            left = [row for row in range(len(prompts)) if row not in found]
            with ThreadPoolExecutor(self.batch, thread_name_prefix="rollout") as pool:
                asked = {
                    row: pool.submit(self._complete, prompts[row], seeds[row], draws.shape[1])
                    for row in left
                }
            problems = [call.exception() for call in asked.values() if call.exception() is not None]
            found |= {row: call.result() for row, call in asked.items() if call.exception() is None}
            if problems and not (isinstance(problems[0], _OutOfMemory) and self.batch > 1):
                raise TrainingError(str(problems[0])) from problems[0]
            if problems:
                self.batch //= 2
                print(
                    f"rollouts: {self._url} is out of memory; asking for {self.batch} at a time",
                    flush=True,
                )
        tokens = torch.full((len(prompts), self._options.sequence), self._stop)
        log_probs = torch.zeros(len(prompts), self._options.sequence - 1)
        begins = torch.tensor([len(prompt) for prompt in prompts])
        ends = torch.zeros(len(prompts), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            drawn, found_log_probs = found[row]
            begin = len(prompt)
            end = len(prompt) + len(drawn)
            tokens[row, :end] = torch.tensor([*prompt, *drawn])
            log_probs[row, begin - 1 : end - 1] = torch.tensor(found_log_probs)
            ends[row] = end
        moved = (tensor.to(device) for tensor in (tokens, begins, ends, log_probs))
        return Rollouts(*moved, version=version)

    def sleep(self) -> None:
        if not self._asleep and self._leads:
            self._ask("POST", "/sleep?level=2")
        self._asleep = True
        self.version = -1

    def wake(self) -> None:
        """Let the server allocate memory for the weights; `update_weights` does so for the cache.

        The first call checks the server.
        """
        if not self._model:
            served = self._ask("GET", "/v1/models")["data"][0]
            longest = served.get("max_model_len")
            if isinstance(longest, int) and longest < self._options.sequence:
                raise WorkloadError(
                    f"{self._url} takes {longest} tokens, less than prompt_max_len + "
                    f"generate_max_len = {self._options.sequence}; fix: start it with "
                    f"--max-model-len {self._options.sequence}"
                )
            self._model = str(served["id"])
            # A killed attempt may have left the server asleep
            if self._options.enable_engine_sleep and self._leads:
                self._asleep = bool(self._ask("GET", "/is_sleeping").get("is_sleeping"))
        if self._asleep and self._leads:
            self._ask("POST", "/wake_up?tags=weights")

    def _complete(
        self, prompt: Sequence[int], seed: int | None, most: int
    ) -> tuple[list[int], list[float]]:
        """Request one completion, and return its tokens and their log-probabilities.

        The tokens include the one that ends the completion.
        """
        asked = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": min(most, self._options.sequence - len(prompt)),
            "temperature": 0.0 if seed is None else self._options.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "seed": seed,
            "logprobs": 0,
            "stop_token_ids": [self._stop],
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        choice = self._ask("POST", "/v1/completions", asked, seconds=_GENERATE_SECONDS)["choices"][
            0
        ]
        tokens = choice.get("token_ids")
        if tokens is None:
            raise WorkloadError(f"{self._url} returns no token_ids; fix: vLLM 0.10.2 or newer")
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if len(log_probs) != len(tokens) or not tokens:
            raise WorkloadError(
                f"{self._url} returned {len(tokens)} tokens and {len(log_probs)} "
                "log-probabilities; fix: its log"
            )
        return list(tokens), [float(prob) for prob in log_probs]

    def _write(self, weights: dict[str, Tensor]) -> None:
        if not (self._folder / "config.json").is_file():
            raise WorkloadError(
                f"workload_options.engine_weights {self._folder} has no config.json; fix: a copy "
                f"of {self._options.model}, on which the servers are started"
            )
        fresh = self._folder / "model.safetensors.new"
        save_file(weights, fresh, metadata={"format": "pt"})
        target = self._folder / "model.safetensors"
        os.replace(fresh, target)  # first: a server that starts meanwhile finds weights
        for old in self._folder.glob(_OTHERS):
            if old != target:
                old.unlink()

    def _ask(
        self, method: str, path: str, body: Any = None, *, seconds: float = _ASK_SECONDS
    ) -> Any:
        if body is None:
            data = None
        else:
            data = json.dumps(body).encode()
        asked = urllib.request.Request(
            self._url + path, data=data, method=method, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(asked, timeout=seconds) as answer:
                content = answer.read()
                if content.strip():
                    return json.loads(content)
                return {}
        except urllib.error.HTTPError as error:
            text = " ".join(error.read().decode(errors="replace").split())[:300]
            if "out of memory" in text.lower():
                fix = "a smaller workload_options.micro_rollout_batch_size or engine_mem_util"
                raise _OutOfMemory(f"{self._url}{path}: {text}; fix: {fix}") from error
            if error.code == 404:
                hint = "VLLM_SERVER_DEV_MODE=1 and --enable-sleep-mode"
            else:
                hint = "its log"
            raise WorkloadError(
                f"{self._url}{path} answered {error.code}: {text}; fix: {hint}"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise WorkloadError(
                f"{self._url}{path}: {reason}; fix: start it: {describe_server(self._options)}"
            ) from error


def describe_server(options: PolicyOptions) -> str:
    """Return the command line that starts a server for a job."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {options.engine_weights} --enable-sleep-mode "
        f"--logprobs-mode processed_logprobs --max-model-len {options.sequence} "
        f"--tensor-parallel-size {options.engine_tp_size or 1} --gpu-memory-utilization "
        f"{options.engine_mem_util:g}"
    )


@torch.no_grad()
def full_weights(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of a transformers policy on the CPU, with LoRA's matrices merged.

    Collective.
    """
    language: Any = getattr(model, "module", model).language
    adapted: dict[str, Any] = {
        f"{name}.base_layer": module
        for name, module in language.named_modules()
        if hasattr(module, "lora_A")
    }
    tied = tied_names(language)
    for name, parameter in language.named_parameters():
        if ".lora_" in name or name in tied:
            continue
        value = _whole(parameter)
        (owner, _, key) = name.rpartition(".")
        if owner in adapted and key == "weight":
            layer = adapted[owner]
            for adapter, scale in layer.scaling.items():
                added = (
                    _whole(layer.lora_B[adapter].weight)
                    @ _whole(layer.lora_A[adapter].weight)
                    * scale
                )
                value = value + (added.T if getattr(layer, "fan_in_fan_out", False) else added)
        yield name.replace(".base_layer.", "."), value.to("cpu", dtype).contiguous()


class _OutOfMemory(WorkloadError):
    pass


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
