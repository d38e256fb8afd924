"""Commits from a model in `FullyShardedDataParallel` (FSDP1), for scripts that call
`ebbflow.attach`.

FSDP1 keeps the parameters of a module in one flat buffer, cut where a rank's share ends. torch's
sharded state dict cuts each parameter along its first dimension instead. So a commit holds
DTensors, which any number of ranks can read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as ShardPlacement
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from ebbflow.training.attach.capture import ScriptState, Stateful
from ebbflow.training.errors import AttachError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.messages import WorkerSpec
from ebbflow.training.weights.load import weights_sha256

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class Fsdp1State(ScriptState):
    """State of a script that trains a model in FSDP1."""

    def __init__(
        self,
        gang: Gang,
        model: nn.Module,
        optimizer: Optimizer | None,
        states: Mapping[str, Stateful],
    ) -> None:
        if optimizer is None or not isinstance(model, FullyShardedDataParallel):
            fix = "fix: attach(model, optimizer), with the outermost FullyShardedDataParallel"
            raise AttachError(f"attach: FSDP1 needs its outermost model and its optimizer; {fix}")
        self._sharded = _ShardedState(model, optimizer)
        states = {"model": self._sharded, **states}
        super().__init__(gang, model, optimizer, states, by_library=True)

    def digest(self) -> str:
        return weights_sha256(_Parameters(self._sharded.parameters()))


def make_state(
    _spec: WorkerSpec,
    gang: Gang,
    model: nn.Module,
    optimizer: Optimizer | None,
    states: Mapping[str, Stateful],
) -> Fsdp1State:
    """Return the state to save for a script with an FSDP1 model.

    Raises AttachError for a model that cannot be saved.
    """
    return Fsdp1State(gang, model, optimizer, states)


class _ShardedState:
    """State of model and optimizer, as DTensors that are sharded along their first dimension."""

    def __init__(self, model: FullyShardedDataParallel, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        strategies = {
            module.sharding_strategy for module in FullyShardedDataParallel.fsdp_modules(model)
        }
        whole = ShardingStrategy.NO_SHARD in strategies
        if strategies & set(_HYBRID) or (whole and len(strategies) > 1):
            fix = (
                "fix: FULL_SHARD, SHARD_GRAD_OP or NO_SHARD for all modules, or fully_shard (FSDP2)"
            )
            raise AttachError(
                "attach: FSDP1 with "
                f"{', '.join(sorted(strategy.name for strategy in strategies))}; {fix}"
            )
        self._options = StateDictOptions(full_state_dict=whole)
        self._group: Any = model.process_group
        device: Any = model.compute_device
        if whole:
            self._mesh = None
        else:
            self._mesh = DeviceMesh.from_group(self._group, device.type)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer, options=self._options)
        return {
            "model": tree_map(self._to_dtensor, model),
            "optimizer": tree_map(self._to_dtensor, optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        model, optimizer = (
            tree_map(self._from_dtensor, state[name]) for name in ("model", "optimizer")
        )
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=self._options,
        )

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by their names in the unwrapped model.

        Collective.
        """
        buffers = {
            name.replace("_fsdp_wrapped_module.", "") for name, _ in self._model.named_buffers()
        }
        return {
            name: value for name, value in self.state_dict()["model"].items() if name not in buffers
        }

    def _to_dtensor(self, value: Any) -> Any:
        if not isinstance(value, ShardedTensor):
            return value
        shards = value.local_shards()
        size = value.size()
        if shards:
            local = shards[0].tensor
        else:
            local = torch.empty((0, *size[1:]), dtype=value.dtype)
        stride = torch.empty(size, device="meta").stride()
        assert self._mesh is not None
        return DTensor.from_local(
            local, self._mesh, [ShardPlacement(0)], run_check=False, shape=size, stride=stride
        )

    def _from_dtensor(self, value: Any) -> Any:
        if not isinstance(value, DTensor) or self._model._device_mesh is not None:
            return value
        rank = dist.get_rank(self._group)
        local = value.to_local()
        rows = -(-value.shape[0] // self._group.size())
        shards = [
            Shard.from_tensor_and_offsets(
                local, [rank * rows, *[0] * (value.ndim - 1)], dist.get_rank()
            )
        ]
        if local.numel():
            kept = shards
        else:
            kept = []
        return ShardedTensor._init_from_local_shards(kept, value.size(), process_group=self._group)


class _Parameters(nn.Module):
    """Module that has the unflattened parameters of an FSDP1 model under their own names."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        super().__init__()
        self._named = parameters

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()  # type: ignore[misc]
