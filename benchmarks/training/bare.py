"""The loop of a script with torch alone: no step sync, no events, no heartbeat, no seeds.

Model, initial weights, data order, AdamW and clipping are those of the engine; wrapping is torch's
own.
"""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.laps import Lap
from ebbflow.core.config.schema import RunConfig
from ebbflow.training.engine.optimizer import make_optimizer
from ebbflow.training.engine.parallel import DTYPES
from ebbflow.training.gang import Gang
from ebbflow.training.weights.load import initialise, materialise
from ebbflow.training.workload import Cursor
from ebbflow.workloads.language.language_model import CausalLM


class BareLoop:
    """windows: which piece of `tokens` each sample is, int64, looked up here where the engine
    computes it.

    tuned: the options that the engine gives DDP and FSDP2, instead of torch's defaults. Of the
    configuration's other options it has parallel.compile (of each block) and, for a rank alone,
    fsdp.mixes_precision (by autocast).
    """

    def __init__(
        self, config: RunConfig, gang: Gang, tokens: np.ndarray, windows: np.ndarray, *, tuned: bool
    ) -> None:
        self._config = config
        self._gang = gang
        self._tokens = tokens
        self._windows = windows
        self._model, module = _spread(config, gang, tuned=tuned)
        self._optimizer = make_optimizer(module, config.training)
        mixed = config.fsdp.mixes_precision
        dtype = DTYPES[config.fsdp.compute_dtype]
        if mixed:
            self._precision = torch.autocast(gang.device.type, dtype)
        else:
            self._precision = contextlib.nullcontext()
        if config.parallel.compile:
            for block in module.blocks:
                block.compile(dynamic=False)
        self._steps = 0

    def run(self, steps: int) -> Lap:
        training = self._config.training
        device = self._gang.device
        model = self._model
        optimizer = self._optimizer
        loss = torch.zeros((), device=device)
        torch.use_deterministic_algorithms(False)  # the engine turns it on, and pays for it
        began = time.monotonic()
        cpu_began = time.process_time()
        for step in range(self._steps, self._steps + steps):
            inputs, targets = self._next_batch(step)
            with self._precision:
                logits = model(inputs)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            if training.gradient_clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - began
        cpu_seconds = time.process_time() - cpu_began
        self._steps += steps
        return Lap(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            steps=self._steps,
            loss=self._mean(loss.detach()),
        )

    def _next_batch(self, step: int) -> tuple[Tensor, Tensor]:
        batch = self._config.training.batch_size
        length = self._config.model.sequence_length
        own = Cursor(step * batch, batch).share(self._gang.rank, self._gang.world_size)
        offsets = self._windows[own.first : own.first + own.count, None] * length + np.arange(
            length + 1
        )
        text = torch.from_numpy(self._tokens[offsets].astype(np.int64))
        if self._gang.device.type == "cuda":
            text = text.pin_memory().to(self._gang.device, non_blocking=True)
        return text[:, :-1], text[:, 1:]

    def _mean(self, loss: Tensor) -> float:
        """Over ranks, outside the measured time: for the comparison alone."""
        if not self._gang.alone:
            dist.all_reduce(loss)
        return loss.item() / self._gang.world_size


def _spread(config: RunConfig, gang: Gang, *, tuned: bool) -> tuple[nn.Module, CausalLM]:
    """(what to call, what holds the parameters).

    Blocks are the units, as torch's FSDP2 tutorial has it.
    """
    with torch.device("meta"):
        module = CausalLM(config.model)
    blank = copy.deepcopy(module)
    sharded = config.parallel.mode == "fsdp2" and not gang.alone
    if sharded:
        mesh = init_device_mesh(gang.device.type, (gang.world_size,))
        if tuned:
            units = [module.embeddings, *module.blocks, module.head]
        else:
            units = module.blocks
        if tuned:
            options: dict[str, Any] = {"reshard_after_forward": False}
        else:
            options = {}
        for unit in units:
            fully_shard(unit, mesh=mesh, **options)
        fully_shard(module, mesh=mesh)
    materialise(module, gang.device)  # keeps tied weights tied
    initialise(module, blank, seed=config.training.seed)
    if sharded or gang.alone:
        return module, module
    if tuned:
        wrapped: dict[str, Any] = {
            "gradient_as_bucket_view": True,
            "forward_sync_buffers": False,
            "init_sync": False,
        }
    else:
        wrapped = {}
    return DistributedDataParallel(module, **wrapped), module
