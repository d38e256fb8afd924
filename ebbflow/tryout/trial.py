"""Trial of a workload before money is spent: build the model, compute sample losses, and evaluate.

The trial runs on the CPU, as if in a gang of one rank.
"""

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.footprint import ModelShape
from ebbflow.core.json_values import JsonObject
from ebbflow.training.checkpoint.model_folder import abbreviate
from ebbflow.training.engine import tensor_parallel
from ebbflow.training.engine.optimizer import hidden_matrices
from ebbflow.training.errors import WorkloadError
from ebbflow.training.time_limit import TimeIsUp, at_most
from ebbflow.training.weights.files import find_weights
from ebbflow.training.weights.load import check_weights_fit, initialise, materialise, tied_names
from ebbflow.training.workload import (
    Batch,
    Cursor,
    Loss,
    Workload,
    WorkloadContext,
    as_numbers,
    check_best_metric,
)
from ebbflow.training.workload_loader import DEFAULT_WEIGHT_UNIT, make_workload, user_code

_FLOAT32_BYTES = 4

# The time limit of `evaluate`, less than EXAMINE_SECONDS. An evaluation that is fast on many GPUs
# may be slow on a CPU, and the job must not be refused for that.
LONGEST_SECONDS = 20.0

# The limit of weights plus gradients up to which a model is run. For larger models, only shapes are
# computed.
LARGEST_TRIED_BYTES = 2 << 30
_MOST_SAMPLES = 4
# Micro-batches may use other kernels, and add float32 numbers in another order.
_TOLERANCE = 1e-3

# Each library whose models have their own rules for initial weights, and the workload that applies
# these rules.
_LIBRARIES = {
    "transformers": "ebbflow.workloads:HuggingFace",
    "timm": "ebbflow.workloads:ImageModel",
}


@dataclass
class SavedBytes:
    """Counter of the bytes that autograd saves for the backward pass.

    Each tensor storage counts once.
    """

    model: frozenset[int]  # the storages of the model's own tensors, which are not counted
    seen: dict[int, int] = field(default_factory=dict)  # bytes by storage

    @property
    def total(self) -> int:
        return sum(self.seen.values())

    def note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # The address of the storage, because fake tensors have no data
        if storage._cdata not in self.model:
            self.seen[storage._cdata] = storage.nbytes()
        return tensor


@dataclass
class Trial:
    """Result of trying a workload: its measured shape, the checks that it passed, and remarks."""

    name: str  # the name of the workload
    shape: ModelShape | None = None  # the measured shape; None if it was not measured
    done: list[str] = field(default_factory=list)  # the checks that were made, and their figures
    # Remarks about the workload that do not prevent training
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "; ".join([f"{self.name}: {', '.join(self.done)}", *self.notes])

    def to_json(self) -> JsonObject:
        return {"text": self.text, "shape": self.shape and self.shape.to_json()}


class FirstCrossEntropy(TorchFunctionMode):
    """Context that judges whether the first cross-entropy inside it is plausible for a new model.

    It is compared with that of a uniform guess among all classes.

    Attributes:
        remark: what is implausible; "" if it is plausible, or if there was no cross-entropy.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen = False
        self.remark = ""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (functional.cross_entropy, functional.nll_loss) and not self._seen:
            given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
            scores = given["input"].float()
            target = given["target"]
            ignored = given.get("ignore_index", -100)
            self._seen = not target.is_floating_point()  # not probabilities
            if self._seen:
                self._judge(
                    float(func(scores, target, ignore_index=ignored)),
                    scores.shape[min(1, scores.ndim - 1)],
                )
        return result

    def _judge(self, mean: float, classes: int) -> None:
        usual = math.log(max(classes, 2))
        if not usual / 4 <= mean <= 2 * usual:
            if mean > usual:
                fix = "fix: check the initial weights"
            else:
                fix = "only trained weights give less"
            self.remark = (
                f"the first loss is {mean:.3g} per prediction, and ln({classes}) = {usual:.3g} "
                f"is usual for {classes} classes; {fix}"
            )


def measure_shape(workload: Workload, model: nn.Module, batch: Batch) -> tuple[ModelShape, Loss]:
    """Run the forward pass on a batch of one sample; return the model's measured shape and the
    loss.

    Activations, including logits, are counted as autograd saves them: in the precision of the
    model's own code, in eager mode and without recomputation. FLOPs come from the workload's own
    `flops`. The model may consist of fake tensors.
    """
    own = [*model.parameters(), *model.buffers()]
    saved = SavedBytes(frozenset(tensor.untyped_storage()._cdata for tensor in own))
    with saved_tensors_hooks(saved.note, lambda tensor: tensor):
        loss = workload.loss(model, batch)
    units = list(workload.units(model))
    shape = ModelShape(
        parameters=_numel(model),
        frozen_parameters=sum(
            parameter.numel() for parameter in model.parameters() if not parameter.requires_grad
        ),
        largest_unit_parameters=max([_numel(part) for part in units] + [_outside(model, units)]),
        activation_bytes_per_sample=saved.total,
        logits_bytes_per_sample=0,
        flops_per_sample=float(workload.flops(batch)),
        tokens_per_sample=float(batch.weight),
        units=len(units),
        other_bytes=int(getattr(workload, "other_bytes", int)()),
        optimizer_in_host_memory=bool(getattr(workload, "offloads_optimizer", False)),
        hidden_parameters=sum(
            matrix.numel() for matrix in hidden_matrices(model) if matrix.requires_grad
        ),
        weight_unit=_unit(workload),
        kind="measured",
    )
    return shape, loss


def try_evaluate(
    name: str,
    workload: Workload,
    model: nn.Module,
    *,
    seconds: float = LONGEST_SECONDS,
    config: RunConfig | None = None,
) -> str:
    """Call the workload's `evaluate` once, as if in a gang of one rank, and describe the result.

    After `seconds`, `evaluate` is stopped, and the description says so. Raises WorkloadError if
    `evaluate` raises an exception, if a metric is not a finite number, or if `checkpoint.keep_best`
    names a metric that `evaluate` does not return.
    """
    if distributed.is_initialized():  # a collective in `evaluate` would wait for the other ranks
        return "evaluate not tried, because the ranks of the gang are not all here"
    torch.manual_seed(0)
    try:
        with user_code(f"{name}.evaluate"), torch.no_grad(), at_most(seconds):
            metrics = as_numbers(workload.evaluate(model))
    except TimeIsUp:
        return f"evaluate not tried to its end, because it takes longer than {seconds:g} s here"
    bad = {key: value for key, value in metrics.items() if not math.isfinite(value)}
    if bad:
        found = ", ".join(f"{key} = {value}" for key, value in bad.items())
        raise WorkloadError(
            f"{name}.evaluate: {found}; fix: finite numbers, at the initial weights too"
        )
    if config is not None:
        check_best_metric(config, metrics)
    return f"evaluate gives {', '.join(metrics) or 'no metrics'}"


def try_workload(config: RunConfig, context: WorkloadContext) -> Trial:
    """Try out a workload, and return the checks that it passed.

    Raises WorkloadError for the first check that fails.
    """
    trial = Trial(config.workload or "text")
    workload = make_workload(config, context)
    with user_code(f"{trial.name}.model()"):
        model = workload.model()
    check_model(trial.name, model)
    with user_code(f"{trial.name}.units()"):
        units = list(workload.units(model))
    check_units(trial.name, model, units)
    tensor_parallel.check_splits(model, config.parallel.tensor_size)
    if config.parallel.mode != "ddp":
        check_tied(trial.name, model, units)
    parameters = _numel(model)
    trial.done.append(f"{parameters:,} parameters in {len(units)} units")
    weights = config.training.initial_weights
    if weights is not None:
        check_weights_fit(
            find_weights(weights, getattr(workload, "translate_weights", None)), model, weights
        )
        trial.done.append("initial weights fit by name and shape")
    if norms := [name for name, part in model.named_modules() if isinstance(part, _BatchNorm)]:
        trial.notes.append(
            f"{norms[0]} keeps running statistics, which differ by rank and are saved from one "
            "rank only; GroupNorm and LayerNorm have none"
        )
    if 2 * _FLOAT32_BYTES * parameters <= LARGEST_TRIED_BYTES:
        _try_samples(trial, workload, model, config)
    else:
        _look_at_sample(trial, workload, model)
    return trial


def check_model(name: str, model: Any) -> None:
    """Check that the model is a module with trainable parameters and with all tensors on the meta
    device.
    """
    if not isinstance(model, nn.Module):
        raise WorkloadError(
            f"{name}.model() returned a {type(model).__name__}; fix: return a torch.nn.Module"
        )
    tensors = [*model.named_parameters(), *model.named_buffers()]
    real = [key for key, value in tensors if not value.is_meta]
    if real:
        raise WorkloadError(
            f"{name}.model(): {abbreviate(real)} of {len(tensors)} tensors {'is' if len(real) == 1 else 'are'} not on "
            "the meta device, so every rank would make the whole model; "
            'fix: build it under `with torch.device("meta"):`'
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            f"{name}.model() has no parameter that requires a gradient: there is nothing to train"
        )


def check_units(name: str, model: nn.Module, units: Iterable[Any]) -> None:
    """Check the FSDP units: submodules of the model that do not overlap.

    There must be at least one, and none may be inside another.
    """
    units = list(units)
    names = {id(part): path for path, part in model.named_modules()}
    if not units:
        raise WorkloadError(
            f"{name}.units() is empty; fix: name the blocks that are to be sharded as one"
        )
    for unit in units:
        if id(unit) not in names or unit is model:
            if unit is model:
                what = "the model itself"
            else:
                what = f"a {type(unit).__name__} that is no part of the model"
            raise WorkloadError(
                f"{name}.units() holds {what}; fix: return its blocks, such as list(model.blocks)"
            )
    for outer in units:
        inside = {id(part) for part in outer.modules()} - {id(outer)}
        twice = sum(unit is outer for unit in units) > 1
        if twice:
            inner = outer
        else:
            inner = next((unit for unit in units if id(unit) in inside), None)
        if inner is not None:
            if twice:
                where = "named twice"
            else:
                where = f"inside {names[id(outer)]}, which is a unit too"
            raise WorkloadError(
                f"{name}.units(): {names[id(inner)]} is {where}; fix: units must not overlap"
            )


def check_tied(name: str, model: nn.Module, units: list[nn.Module]) -> None:
    """Check that all names of a tied parameter are in the same unit, or all outside of units.

    Otherwise the parameter would be sharded twice.
    """

    def unit_of(parameter: str) -> int | None:
        parts = parameter.split(".")[:-1]
        holders = {
            id(model.get_submodule(".".join(parts[:number]))) for number in range(1, len(parts) + 1)
        }
        return next((number for number, unit in enumerate(units) if id(unit) in holders), None)

    for alias, first in tied_names(model).items():
        if unit_of(alias) != unit_of(first):
            raise WorkloadError(
                f"{name}.units(): {first} and {alias} are one parameter and not of one unit, "
                "which would be sharded as two; fix: a unit that holds both, or leave both out "
                "of the units, or set parallel.mode to ddp"
            )


def find_bypassed_rules(model: nn.Module) -> str:
    """Return a remark if torch's default initialization fills weights of a transformers or timm
    model.

    These libraries have their own rules for initial weights. Return "" if there is no such weight.
    """
    for part in model.modules():
        library = next(
            (
                top
                for kind in type(part).mro()
                if (top := kind.__module__.split(".")[0]) in _LIBRARIES
            ),
            "",
        )
        found = [
            name
            for name, child in part.named_modules()
            if ".lora_" not in name and _is_filled_by_torch(child)
        ]
        if library and found:
            return (
                f"{type(part).__name__} of {library}: torch fills {abbreviate(found)} instead of "
                "the library's own rules, so training begins elsewhere; fix: "
                f"{_LIBRARIES[library]}, or reset_parameters by these rules"
            )
    return ""


def _unit(workload: Workload) -> str:
    return str(getattr(workload, "weight_unit", DEFAULT_WEIGHT_UNIT))


def _numel(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _outside(model: nn.Module, units: list[nn.Module]) -> int:
    """Return the number of parameters outside all FSDP units.

    FSDP2 shards these together, as the root module.
    """
    inside: set[int] = set()
    for unit in units:
        inside.update(map(id, unit.parameters()))
    return sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in inside)


def _try_samples(trial: Trial, workload: Workload, model: nn.Module, config: RunConfig) -> None:
    blank = workload.model()
    materialise(model, "cpu")
    with user_code(f"{trial.name}: reset_parameters"):
        initialise(model, blank, seed=config.training.seed)
    count = min(_MOST_SAMPLES, config.training.batch_size)
    batch = _draw(trial.name, workload, model, count)
    model.eval()  # no dropout, which differs between batches
    with torch.no_grad():
        whole = _loss(trial.name, workload, model, batch)
        _check_same_again(trial.name, workload, model, count, whole)
        _check_sum(trial, workload, model, batch, whole)
    trial.done.append(try_evaluate(trial.name, workload, model, config=config))
    model.train()
    # Which would replace the weights that are judged here
    if config.training.initial_weights is None:
        with torch.no_grad(), FirstCrossEntropy() as first:
            _loss(trial.name, workload, model, batch)
        trial.notes += [remark for remark in (first.remark, find_bypassed_rules(blank)) if remark]
    single = _draw(trial.name, workload, model, 1)
    with user_code(f"{trial.name}.loss"):
        trial.shape, loss = measure_shape(workload, model, single)
    _check_flops(trial.name, trial.shape)
    _check_backward(trial, model, loss, config)


def _look_at_sample(trial: Trial, workload: Workload, model: nn.Module) -> None:
    single = _draw(trial.name, workload, model, 1)
    # Shapes, but no data
    with user_code(f"{trial.name}.loss"), FakeTensorMode(allow_non_fake_inputs=True):
        materialise(model, "cpu")
        trial.shape, _ = measure_shape(workload, model, single)
    _check_flops(trial.name, trial.shape)
    trial.done.append(
        "one sample's shapes; no numbers, because weights and gradients of "
        f"{_numel(model) / 2**27:.1f} GiB exceed the {LARGEST_TRIED_BYTES >> 30} GiB that are "
        "tried"
    )


def _is_filled_by_torch(module: nn.Module) -> bool:
    reset = getattr(module, "reset_parameters", None)
    has_matrix = any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    return has_matrix and getattr(reset, "__module__", "").startswith("torch.nn")


def _draw(name: str, workload: Workload, model: nn.Module, count: int) -> Batch:
    torch.manual_seed(0)  # as the engine does before each step
    with user_code(f"{name}.next_batch"):
        batch = workload.next_batch(model, Cursor(0, count))
    weight = getattr(batch, "weight", None)
    if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
        raise WorkloadError(
            f"{name}.next_batch returned a {type(batch).__name__} whose weight is {weight!r}; "
            "fix: a batch has a weight ≥ 0, the number of what its loss is averaged over, as a "
            "float"
        )
    return batch


def _loss(name: str, workload: Workload, model: nn.Module, batch: Batch) -> Loss:
    torch.manual_seed(0)
    with user_code(f"{name}.loss"):
        loss = workload.loss(model, batch)
    if not isinstance(loss, Loss):
        raise WorkloadError(
            f"{name}.loss returned a {type(loss).__name__}; fix: return Loss(sum, weight)"
        )
    if loss.sum.numel() != 1 or not math.isfinite(float(loss.sum)):
        shape = list(loss.sum.shape)
        if loss.sum.numel() == 1:
            value = f"{float(loss.sum)}"
        else:
            value = f"a tensor of shape {shape}"
        raise WorkloadError(
            f"{name}.loss: the sum is {value}; fix: one finite number, at the initial weights too"
        )
    return loss


def _check_same_again(
    name: str, workload: Workload, model: nn.Module, count: int, first: Loss
) -> None:
    again = _loss(name, workload, model, _draw(name, workload, model, count))
    if float(again.sum) != float(first.sum):
        raise WorkloadError(
            f"{name}.next_batch gives other samples for the same cursor: their loss is "
            f"{float(first.sum):.6g}, then {float(again.sum):.6g}, so that a resumed job would "
            "not be the same; fix: let every sample depend on its index alone "
            "(torch.Generator().manual_seed(index)), or on torch's own random numbers"
        )


def _check_sum(
    trial: Trial, workload: Workload, model: nn.Module, batch: Batch, whole: Loss
) -> None:
    """Check that the losses of two micro-batches sum to the loss of the whole batch.

    Then the number of micro-batches changes nothing.
    """
    with user_code(f"{trial.name}: batch.split"):
        parts = batch.split(2)
    if len(parts) != 2:
        raise WorkloadError(
            f"{trial.name}: batch.split(2) made {len(parts)} parts; fix: make exactly as many as "
            "asked"
        )
    losses = [_loss(trial.name, workload, model, part) for part in parts]
    weights = [loss.weight for loss in losses]
    if not math.isclose(sum(weights), whole.weight, rel_tol=1e-9):
        raise WorkloadError(
            f"{trial.name}: the parts of a batch weigh {weights[0]:g} + {weights[1]:g} = "
            f"{sum(weights):g}, the whole {whole.weight:g}; fix: weights must add up, whatever "
            "the split"
        )
    sums = [float(loss.sum) for loss in losses]
    total = float(whole.sum)
    added = f"{sums[0]:.6g} + {sums[1]:.6g} = {sum(sums):.6g}"
    if not math.isclose(sum(sums), total, rel_tol=_TOLERANCE, abs_tol=1e-6):
        mean = math.isclose(sum(sums), 2 * total, rel_tol=0.2)
        if mean:
            why = "about twice as much, as of a mean"
        else:
            why = "which is not the same"
        raise WorkloadError(
            f"{trial.name}.loss must be a sum: a batch of weight {whole.weight:g} gives {total:.6g}, its two parts "
            f'{added}, {why}; fix: reduction="sum" in place of "mean", and let no sample\'s loss depend on the others'
        )
    tried = f"loss of {whole.weight:g} {_unit(workload)} tried on the CPU"
    trial.done.append(f"{tried}: {total:.6g} = {sums[0]:.6g} + {sums[1]:.6g}")


def _check_flops(name: str, shape: ModelShape) -> None:
    if not math.isfinite(shape.flops_per_sample) or shape.flops_per_sample <= 0:
        raise WorkloadError(
            f"{name}.flops gives {shape.flops_per_sample} for one sample; fix: forward and "
            "backward, a multiply-add counted as two: 6 × parameters × positions is a good "
            "estimate for matrices"
        )


def _check_backward(trial: Trial, model: nn.Module, loss: Loss, config: RunConfig) -> None:
    if not loss.sum.requires_grad:
        raise WorkloadError(f"{trial.name}.loss: the sum has no gradient; fix: do not detach it")
    with user_code(f"{trial.name}: backward"):
        loss.sum.backward()
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if not unused:
        return
    said = (
        f"{abbreviate(unused)} of {len(list(model.parameters()))} parameters got no gradient "
        "from one sample"
    )
    if config.parallel.mode == "ddp" and not (
        config.ddp.find_unused_parameters or config.ddp.static_graph
    ):
        raise WorkloadError(
            f"{trial.name}: {said}, which ddp waits for; fix: set ddp.find_unused_parameters to "
            "true"
        )
    trial.notes.append(said)
