"""Train an image classifier of timm on folders of images, without code of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ebbflow.training.attached_state import random_numbers_of
from ebbflow.training.data.build import is_held_out
from ebbflow.training.errors import WorkloadError
from ebbflow.training.workload import WorkloadContext
from ebbflow.workloads.datasets import DatasetWorkload, Samples
from ebbflow.workloads.readers import ImageFolder

try:
    import timm  # pyright: ignore[reportMissingImports]
    from timm.data import create_transform  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise WorkloadError(f"timm cannot be imported ({error}); fix: pip install timm torchvision") from error

_HELD_OUT = ("val", "validation", "test")
_OPTIONS = ("model", "dataset", "size", "workers")


class ImageModel(DatasetWorkload):
    """A model of timm, initialised as timm does it, with timm's standard augmentation.

    `workload_options`: `model` (timm's name), `dataset` (folder with one subfolder for each class, or with `train` and
    `val`), `size` (of an image, in pixels; 224), `workers` (2).
    """

    def __init__(self, context: WorkloadContext) -> None:
        options = context.options
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise WorkloadError(f"workload_options: there is no {', '.join(unknown)}; fix: {', '.join(_OPTIONS)}")
        self._name, self._size = str(options.get("model", "")), int(options.get("size", 224))
        if not timm.is_model(self._name):
            close = ", ".join(timm.list_models(f"*{self._name}*")[:5]) or "python -c 'import timm; timm.list_models()'"
            raise WorkloadError(f"workload_options.model: timm has no {self._name!r}; fix: one of {close}")
        self._root = context.project_root / Path(str(options.get("dataset", "."))).expanduser()
        self._flops = 0.0
        super().__init__(context)

    def dataset(self, train: bool) -> ImageFolder | None:
        found = {name: self._root / name for name in ("train", *_HELD_OUT) if (self._root / name).is_dir()}
        own = [name for name in found if (name == "train") == train]
        if found and not own:
            return None
        transform = create_transform(self._size, is_training=train)
        if found:
            return ImageFolder(found[own[0]], transform)
        fraction = self.context.config.data.held_out_fraction
        return ImageFolder(self._root, transform, keep=lambda name: is_held_out(name, fraction) != train)

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = self._make()
        built = _Built(self)
        for name, module in model.named_modules():
            own = _Copy(module, built, f"{name}." if name else "")
            module.reset_parameters = own  # type: ignore[assignment]
        return model

    def _make(self) -> nn.Module:
        return timm.create_model(self._name, num_classes=len(self._train.classes))

    def loss_sum(self, model: nn.Module, samples: list[Tensor]) -> Tensor:
        images, labels = samples
        return F.cross_entropy(model(images).float(), labels, reduction="sum")

    def flops(self, batch: Samples) -> float:
        """Return three times the forward pass, as torch counts it."""
        if not self._flops:
            with torch.device("meta"), FlopCounterMode(display=False) as counter:
                self._make()(torch.empty(2, 3, self._size, self._size))
            self._flops = 3.0 * counter.get_total_flops() / 2
        return self._flops * batch.weight


class _Built:
    """A model that timm has built and initialised on the CPU, on first use. Its tensors are handed out once."""

    def __init__(self, workload: ImageModel) -> None:
        self._workload = workload
        self._state: dict[str, Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> _Built:
        return self

    def take(self, name: str) -> Tensor:
        if self._state is None:
            with random_numbers_of(self._workload.context.config.training.seed):
                model = self._workload._make()
            self._state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return self._state.pop(name)


class _Copy:
    """`reset_parameters` of one module: copy its tensors from the built model."""

    def __init__(self, module: nn.Module, built: _Built, prefix: str) -> None:
        self._module, self._built, self._prefix = module, built, prefix

    @torch.no_grad()
    def __call__(self) -> None:
        own = [*self._module.named_parameters(recurse=False), *self._module.named_buffers(recurse=False)]
        for name, tensor in own:
            tensor.copy_(self._built.take(self._prefix + name))
