"""Workload that trains an image classifier of timm on folders of images, without code of your
own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ebbflow.training.attach.state import random_numbers_of
from ebbflow.training.errors import WorkloadError
from ebbflow.training.workload import WorkloadContext
from ebbflow.workloads.libraries import describe_import_failure
from ebbflow.workloads.readers.files import ImageFolder, locate
from ebbflow.workloads.vision.classifier import ImageWorkload

try:
    import timm  # pyright: ignore[reportMissingImports]
    from timm.data import create_transform  # pyright: ignore[reportMissingImports]
except (
    Exception
) as error:  # a torchvision that was built for another torch raises RuntimeError or OSError
    raise WorkloadError(describe_import_failure("timm", error)) from error

_OPTIONS = ("model", "dataset", "size", "workers", "worker_start", "corrupt_samples")


class ImageModel(ImageWorkload):
    """Image classifier of timm, with timm's initialisation and standard augmentation.

    `workload_options`: `model` (timm's name), `dataset` (folder with one subfolder for each class,
    or with `train` and `val`), `size` (of an image, in pixels; 224), `workers` (2), `worker_start`
    (fork), `corrupt_samples` (0).
    """

    def __init__(self, context: WorkloadContext) -> None:
        options = context.options
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise WorkloadError(
                f"workload_options: there is no {', '.join(unknown)}; fix: {', '.join(_OPTIONS)}"
            )
        self._name = str(options.get("model", ""))
        self.size = int(options.get("size", 224))
        if not timm.is_model(self._name):
            close = (
                ", ".join(timm.list_models(f"*{self._name}*")[:5])
                or "python -c 'import timm; timm.list_models()'"
            )
            raise WorkloadError(
                f"workload_options.model: timm has no {self._name!r}; fix: one of {close}"
            )
        self._root = locate(context.project_root, str(options.get("dataset", ".")))
        super().__init__(context)

    def dataset(self, train: bool) -> ImageFolder | None:
        return self.open_folder(self._root, train, create_transform(self.size, is_training=train))

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = self.make()
        built = _Built(self)
        for name, module in model.named_modules():
            own = _Copy(module, built, f"{name}." if name else "")
            module.reset_parameters = own  # type: ignore[assignment]
        return model

    def make(self) -> nn.Module:
        return timm.create_model(self._name, num_classes=len(self._train.classes))


class _Built:
    """Model that timm builds and initialises on the CPU when its first tensor is taken.

    Its tensors are handed out once.
    """

    def __init__(self, workload: ImageModel) -> None:
        self._workload = workload
        self._state: dict[str, Tensor] | None = None

    def __deepcopy__(self, memo: Any) -> _Built:
        return self

    def take(self, name: str) -> Tensor:
        if self._state is None:
            with random_numbers_of(self._workload.context.config.training.seed):
                model = self._workload.make()
            self._state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return self._state.pop(name)


class _Copy:
    """Replacement of a module's `reset_parameters` that copies its tensors from the built model."""

    def __init__(self, module: nn.Module, built: _Built, prefix: str) -> None:
        self._module = module
        self._built = built
        self._prefix = prefix

    @torch.no_grad()
    def __call__(self) -> None:
        own = [
            *self._module.named_parameters(recurse=False),
            *self._module.named_buffers(recurse=False),
        ]
        for name, tensor in own:
            tensor.copy_(self._built.take(self._prefix + name))
