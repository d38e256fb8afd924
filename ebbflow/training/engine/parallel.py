"""Distribution of a model over the ranks: device mesh, sharding with FSDP2 or HSDP, replication
with DDP.

A unit is a part of the model that is sharded, compiled and recomputed as one. To change how a unit
computes, this module sets the unit's `__class__` to a subclass of its own class. No wrapper module
is added, so parameters keep the names of the unchanged model, and hashes and commits do not depend
on the parallel mode. Units of one class share one subclass, so they are compiled once.
"""

import contextlib
import copy
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ebbflow.core.config.schema import DdpConfig, FsdpConfig, RunConfig
from ebbflow.core.footprint import SMALL_MODEL_BYTES, shard_ranks
from ebbflow.training.checkpoint.model_folder import abbreviate
from ebbflow.training.compat import HashStore, compile_module, set_group_timeout
from ebbflow.training.engine import tensor_parallel
from ebbflow.training.engine.float8 import convert_units
from ebbflow.training.engine.parallel_limits import RankLayout, find_unsupported_options
from ebbflow.training.errors import ParallelError, WorkloadError
from ebbflow.training.gang import Gang
from ebbflow.training.launch.evidence import Frame
from ebbflow.training.weights.load import initialise, materialise
from ebbflow.training.workload import Workload

_POWERSGD_RANK = 2
# torch requires two steps without compression at the start, because DDP may rebuild its buckets
# between them.
_POWERSGD_PLAIN_STEPS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_aten = torch.ops.aten
# Outputs that cost much to compute for their size: matrix products, and attention in each of
# torch's kernels.
_EXPENSIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}


@dataclass(frozen=True, kw_only=True)
class Spread:
    model: nn.Module  # the module to call; its hooks reduce gradients over the ranks
    module: nn.Module  # the module without wrappers, for saving and hashing
    copies: int  # the number of copies of the model over all ranks
    # Whether sharded gradients are reduced only after the last micro-batch of a step
    reduce_once: bool = True
    compiled: bool = False  # whether the units are compiled
    tensor_size: int = 1  # the number of ranks that compute each layer together
    # Resets the state of DDP's gradient compression
    reset_compression: Callable[[], object] = lambda: None

    @contextmanager
    def gradients(self, *, last: bool) -> Iterator[None]:
        """Return a context for forward and backward of a micro-batch.

        If it is the step's `last`, reduce gradients.
        """
        model = self.model
        # A static graph must reduce in its first backward pass, or an assertion in torch fails. So
        # it reduces after every micro-batch, in every step: otherwise a resumed run would add
        # gradients in another order than an uninterrupted one.
        if isinstance(model, DistributedDataParallel) and not last and not model.static_graph:
            with model.no_sync():
                yield
            return
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last or not self.reduce_once)
            model.set_requires_all_reduce(last)  # copies of the model need one reduction per step
            model.set_is_last_backward(last)
        yield

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Return a context that yields the model in evaluation mode.

        Every rank must make the same number of forward passes. Compiled units run uncompiled,
        because the few passes have another batch size and would trigger a new compilation.
        """
        self.module.eval()
        try:
            with (
                torch.no_grad(),
                torch.compiler.set_stance("force_eager") if self.compiled else nullcontext(),
            ):
                yield self.module
        finally:
            self.module.train()
            for unit in self.module.modules():
                if isinstance(unit, FSDPModule):
                    unit.reshard()  # otherwise freed in a backward pass, which evaluation lacks

    def gradient_tensors(self) -> list[Tensor]:
        """Return this rank's shards of all gradients, as plain tensors that share the gradients'
        memory.

        Raises WorkloadError if DDP waits for a gradient that this rank did not compute: the other
        ranks would wait for it until the step deadline.
        """
        gradients = [
            parameter.grad for parameter in self.module.parameters() if parameter.grad is not None
        ]
        refuse_unused_parameters(self.model)
        return [
            gradient.to_local() if isinstance(gradient, DTensor) else gradient
            for gradient in gradients
        ]

    def square_sum(self, gradients: Sequence[Tensor]) -> Tensor:
        """Return this rank's share of the squared norm of the gradient, in float64.

        Summed over all ranks, the shares are the full squared norm.
        """
        if self.tensor_size > 1:
            trained = [
                parameter for parameter in self.module.parameters() if parameter.grad is not None
            ]
            pairs = list(zip(map(tensor_parallel.is_whole, trained), gradients, strict=True))
            whole, split = (
                [gradient for held, gradient in pairs if held is kind] for kind in (True, False)
            )
            return (_square_sum(whole) / self.tensor_size + _square_sum(split)) / self.copies
        # All copies of the model have the same gradient. The ranks of a copy each have a part of
        # it.
        return _square_sum(gradients) / self.copies


def report_compilation(begun: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Call `begun` whenever torch begins a compilation, and call its result when the compilation
    ends.

    Return a function that removes these hooks. If the compiler is not loaded, or if this torch
    release lacks the private hooks, nothing is reported.
    """
    if "torch._dynamo" not in sys.modules:
        return lambda: None
    try:
        from torch._dynamo.callback import callback_handler as handler

        ends: list[Callable[[], None]] = []
        start = handler.register_start_callback(lambda *_: ends.append(begun()))
        end = handler.register_end_callback(lambda *_: ends.pop()() if ends else None)
    except (ImportError, AttributeError):
        return lambda: None

    def stop() -> None:
        with contextlib.suppress(AttributeError, ValueError):
            handler.remove_start_callback(start)
            handler.remove_end_callback(end)

    return stop


def make_mesh(gang: Gang, *, shard: int, tensor: int = 1) -> DeviceMesh:
    """Make the device mesh "replicate" × "shard", where `shard` consecutive ranks hold one model
    copy. Collective.

    If `tensor` is more than 1, the mesh is "replicate" × "shard" × "tensor", where `tensor`
    consecutive ranks compute each layer together. They are among the `shard` ranks.
    """
    if not dist.is_initialized():  # a single rank without torchrun's environment
        if gang.device.type == "cuda":
            backend = "nccl"  # gloo would copy the weights through the host
        else:
            backend = "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    shape: tuple[int, ...] = (gang.world_size // shard, shard // tensor)
    names: tuple[str, ...] = ("replicate", "shard")
    if tensor > 1:
        shape = (*shape, tensor)
        names = (*names, "tensor")
    mesh = init_device_mesh(gang.device.type, shape, mesh_dim_names=names)
    seconds = gang.collective_seconds
    if seconds is not None:  # torch's default is 10 or 30 minutes
        for name in names:
            set_group_timeout(mesh[name].get_group(), seconds)
    return mesh


def replicate_model(
    module: nn.Module, ddp: DdpConfig, gang: Gang
) -> tuple[DistributedDataParallel, Callable[[], object]]:
    """Wrap the model in DDP.

    Return it, and a function that resets its gradient compression. Collective.

    Initial weights are not broadcast, because all ranks already have the same weights.
    """
    group = make_mesh(gang, shard=1)["replicate"].get_group()
    model = DistributedDataParallel(
        module,
        process_group=group,
        forward_sync_buffers=False,
        init_sync=False,
        find_unused_parameters=ddp.find_unused_parameters,
        static_graph=ddp.static_graph,
        gradient_as_bucket_view=ddp.gradient_as_bucket_view,
        bucket_cap_mb=ddp.bucket_cap_mb,
    )
    if not (ddp.static_graph or ddp.find_unused_parameters):
        _build_final_buckets(model)
    return model, compress_gradients(model, ddp.gradient_compression)


def compress_gradients(model: DistributedDataParallel, kind: str) -> Callable[[], object]:
    """Compress gradients before they are sent to other ranks.

    Return a function that resets the compression's state.

    PowerSGD adds the compression error of the previous step to each gradient. This error differs
    between ranks and is not part of a commit. So the error is reset at every commit, and a rank
    that restores the commit computes the same as an uninterrupted rank. Each commit thus discards
    the error of one step, and the two steps after it run without compression.
    """
    if kind == "bfloat16":
        model.register_comm_hook(model.process_group, bf16_compress_hook)
    if kind != "powersgd":
        return lambda: None
    settings = model.process_group, _POWERSGD_RANK, _POWERSGD_PLAIN_STEPS
    state = PowerSGDState(*settings)
    model.register_comm_hook(state, powerSGD_hook)
    return functools.partial(state.__init__, *settings)


def shard_model(
    module: nn.Module,
    units: Iterable[nn.Module],
    fsdp: FsdpConfig,
    mesh: DeviceMesh,
    *,
    keep_gathered: bool,
) -> None:
    """Shard the model in place, while its parameters are on the meta device.

    `mesh` is that of `make_mesh`. Each of the `units` is gathered and freed as a whole. With
    `keep_gathered`, a unit stays gathered from its forward to its backward pass.
    """
    # With one copy of the model, a mesh of one dimension needs one reduction where HSDP's mesh
    # needs two.
    options: dict[str, Any] = {"mesh": mesh["shard"] if mesh.size(0) == 1 else mesh}
    if mesh.ndim == 3:
        if mesh.size(0) == 1:
            options["mesh"] = mesh["shard"]
        else:
            options["mesh"] = mesh["replicate", "shard"]
        options["shard_placement_fn"] = tensor_parallel.choose_sharded_dimension
    if fsdp.mixes_precision:
        param = DTYPES[fsdp.compute_dtype]
        reduce = DTYPES[fsdp.reduce_dtype]
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    # Pinned memory speeds up copies to a GPU; on a CPU the shards are in host memory anyway
    if fsdp.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for unit in units:
        fully_shard(unit, reshard_after_forward=not keep_gathered, **options)
    fully_shard(module, **options)


def recompute_units(units: Iterable[nn.Module], how: str) -> None:
    """Make each unit recompute its activations in the backward pass.

    If `how` is "selective", the outputs of `_EXPENSIVE` operations are kept; if "none", nothing
    changes.
    """
    if how == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(kind: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(kind.forward, self, *args, **options, **kwargs)

        return forward

    _override_forward(units, recomputed)


def autocast(model: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Make the model compute its forward pass under torch.autocast with `dtype`.

    Parameters keep their dtype.
    """

    def in_dtype(kind: type[nn.Module]) -> Callable[..., Any]:
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with torch.autocast(device_type, dtype=dtype):
                return kind.forward(self, *args, **kwargs)

        return forward

    _override_forward([model], in_dtype)


def refuse_unused_parameters(model: nn.Module) -> None:
    """Raise WorkloadError if DDP waits for gradients that this rank did not compute.

    Call it after a backward pass.
    """
    if (
        not isinstance(model, DistributedDataParallel)
        or model.static_graph
        or model.find_unused_parameters
    ):
        return
    ignored = model.parameters_to_ignore
    trained = {
        name: one
        for name, one in model.module.named_parameters()
        if one.requires_grad and name not in ignored
    }
    unused = [name for name, one in trained.items() if one.grad is None]
    if not unused:
        return
    owners = sorted({name.rpartition(".")[0] for name in unused})
    kinds = [
        f"{owner or 'the model'} ({type(model.module.get_submodule(owner)).__name__})"
        for owner in owners
    ]
    uses = [_find_use(model.module, owner) for owner in owners]
    known_uses = [place for place in uses if place]
    places = ", used at ".join([abbreviate(kinds), *known_uses[:1]])
    raise WorkloadError(
        f"rank {dist.get_rank()}: {abbreviate(unused)} of {len(trained)} parameters got no "
        f"gradient in this step, because its forward pass did not use {places}; DDP on the other "
        "ranks waits for them; fix: set ddp.find_unused_parameters to true (in a script, the "
        "option of DDP), or let every rank use every parameter in every step"
    )


def _square_sum(gradients: Sequence[Tensor]) -> Tensor:
    parts = [gradient for gradient in gradients if gradient.numel()]
    if not parts:  # every parameter has fewer rows than there are ranks
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack(torch._foreach_norm(parts))  # pyright: ignore[reportPrivateImportUsage]  no type information
    return norms.double().square().sum()


def _find_use(model: nn.Module, owner: str) -> str:
    """Return the code line where the forward pass of a submodule's parent uses the submodule.

    Return "" if it is not found.
    """
    parent, _, name = owner.rpartition(".")
    forward = type(model.get_submodule(parent)).forward
    with suppress(OSError, TypeError):
        lines, first = inspect.getsourcelines(forward)
        for number, line in enumerate(lines, first):
            if name and re.search(rf"\bself\.{re.escape(name)}\b", line):
                return str(Frame(inspect.getfile(forward), number, forward.__qualname__))
    return ""


def spread_model(
    workload: Workload,
    config: RunConfig,
    gang: Gang,
    *,
    small_model_bytes: int = SMALL_MODEL_BYTES,
    overwritten: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> Spread:
    """Build the workload's model with its initial weights, and distribute it over the ranks.

    Collective.

    The weights are bit-identical in every parallel mode and at any world size. A single rank is
    neither sharded nor replicated, unless mixed precision or offloading needs FSDP2. Models of at
    most `small_model_bytes` keep their weights gathered from forward to backward. Raises
    ParallelError for an unsupported option.

    Args:
        overwritten: whether the caller is about to overwrite the weights; they are then not
            initialised.
        progress: called before each module is initialised.
    """
    module = workload.model()
    units = list(workload.units(module))
    if config.fsdp.float8 != "off":
        names = {id(part): name for name, part in module.named_modules()}
        named = [(names[id(unit)], unit) for unit in units]
        convert_units(named, config.fsdp.float8, gang.device)
    blank = copy.deepcopy(module)
    parameters = sum(parameter.numel() for parameter in module.parameters())
    place = RankLayout(gang.world_size, gang.ranks_per_node, gang.device.type == "cuda", parameters)
    unsupported = find_unsupported_options(config, place)
    if unsupported:
        raise ParallelError("; and ".join(map(str, unsupported)))
    size = shard_ranks(config, place.ranks, place.ranks_per_node)
    tensor = config.parallel.tensor_size
    small = 4 * parameters <= small_model_bytes
    fsdp = config.fsdp
    sharded = config.parallel.mode != "ddp"
    # They recompute their logits themselves
    chunked = [unit for unit in units if getattr(unit, "chunk_tokens", None)]
    recompute_units([unit for unit in units if unit not in chunked], config.parallel.recompute)
    # Compiling units instead of the whole model means that equal blocks are compiled once, and that
    # FSDP2's hooks between them still run. Different units count towards one limit, beyond which
    # torch runs units uncompiled.
    for unit in units if config.parallel.compile else ():
        compile_module(unit, recompile_limit=max(8, 2 * len(units)))
    if fsdp.mixes_precision and not sharded:
        autocast(module, gang.device.type, DTYPES[fsdp.compute_dtype])
    if sharded and (not gang.alone or fsdp.mixes_precision or fsdp.cpu_offload):
        mesh = make_mesh(gang, shard=size, tensor=tensor)
        if tensor > 1:
            tensor_parallel.check_splits(module, tensor)
            layers: dict[nn.Module, tensor_parallel.SplitLayer] = cast(Any, module).split_layers()
            tensor_parallel.split_weights(module, layers, mesh["tensor"])
            tensor_parallel.split_computation(layers, mesh["tensor"])
        shard_model(module, units, fsdp, mesh, keep_gathered=small)
    materialise(module, "cpu" if sharded and fsdp.cpu_offload else gang.device)
    initialise(module, blank, seed=config.training.seed, overwritten=overwritten, progress=progress)
    model = module
    reset_compression = _nothing_to_reset
    if not sharded and not gang.alone:
        model, reset_compression = replicate_model(module, config.ddp, gang)
    return Spread(
        model=model,
        module=module,
        copies=gang.world_size // size,
        reduce_once=small,
        compiled=config.parallel.compile,
        tensor_size=tensor,
        reset_compression=reset_compression,
    )


def _build_final_buckets(model: DistributedDataParallel) -> None:
    """Make DDP build its final gradient buckets now, by a backward pass over the parameters alone.

    Collective.

    By default, DDP builds them after its first backward pass, in the order in which gradients
    arrived. An element's position in its bucket decides the order in which the values of three or
    more ranks are added, and so the last bit of the sum. Without this function, the first step
    after a resume would differ from the same step of an uninterrupted run.

    Do not call this with `find_unused_parameters`, where DDP keeps its first buckets, or with
    `static_graph`, where DDP would count this pass as a step.
    """
    model.reducer.prepare_for_forward()
    model.reducer.prepare_for_backward([])
    torch.stack(
        [parameter.sum() for parameter in model.parameters() if parameter.requires_grad]
    ).sum().backward()
    model.reducer._rebuild_buckets()
    model.zero_grad(set_to_none=True)


def _override_forward(
    units: Iterable[nn.Module], make: Callable[[type[nn.Module]], Callable[..., Any]]
) -> None:
    kinds: dict[type[nn.Module], type[nn.Module]] = {}
    for unit in units:
        kind = type(unit)
        if kind not in kinds:
            kinds[kind] = type(
                kind.__name__, (kind,), {"forward": make(kind), "__module__": kind.__module__}
            )
        unit.__class__ = kinds[kind]


def _policy(_context: object, operation: object, *_: object, **__: object) -> CheckpointPolicy:
    if operation in _EXPENSIVE:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _nothing_to_reset() -> None:
    """Do nothing: no gradients are compressed."""
