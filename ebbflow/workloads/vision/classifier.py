"""Image classification in plain torch: a residual network or a vision transformer.

Images come from folders or arrays, or are drawn shapes.

Crops, flips and drawn shapes are functions of (seed, sample, epoch). docs/images.md is the guide.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ebbflow.training.data.build import is_held_out
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, WorkloadContext
from ebbflow.workloads.options import read_options, refuse_option
from ebbflow.workloads.readers.datasets import DatasetWorkload, Samples
from ebbflow.workloads.readers.files import IMAGE_SUFFIXES, ImageFolder, find_files, locate

_HELD_OUT = ("val", "validation", "test")
_KINDS = ("disc", "square", "cross", "ring")
_DRAWN = 4096  # synthetic images to train on
_DRAWN_HELD_OUT = 512  # synthetic images to evaluate on
_GROUPS = 8  # of channels, in a group normalisation
_MARGIN = 1.15  # an image is scaled to this multiple of the crop
# Images are normalised by these values of pixels between 0 and 1
_MEAN = 0.5
_DEVIATION = 0.25
_MOST_CELLS = 20  # classes that a drawn confusion matrix can have


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """The `workload_options` of image classification, with their defaults."""

    dataset: str = ""  # folder with one subfolder for each class, or a .npz file; "": drawn shapes
    size: int = 32  # height and width of an image, in pixels
    model: str = "resnet"  # resnet or vit
    norm: str = "group"  # of a resnet: group (per image), or sync (batch statistics over all ranks)
    width: int = 32  # channels of the first stage, or of each token
    layers: int = 6  # residual or transformer blocks
    heads: int = 4  # of a vit
    patch: int = 4  # of a vit: height and width of a patch, in pixels
    augment: bool = True  # random crops and flips
    workers: int = 2  # processes of each rank that read ahead; -1: as many as suit the machine
    worker_start: str = "fork"  # how they start: fork, forkserver or spawn
    # Images that may be corrupt; each is named and replaced by the next one
    corrupt_samples: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("model", ("resnet", "vit")), ("norm", ("group", "sync"))):
            if getattr(self, name) not in allowed:
                refuse_option(f"{name}: {getattr(self, name)!r}; fix: {' or '.join(allowed)}")
        for field in fields(self):
            value = getattr(self, field.name)
            least = {"workers": -1, "corrupt_samples": 0}.get(field.name, 1)
            if type(value) is int and value < least:
                refuse_option(f"{field.name}: {value}; fix: at least {least}")
        if self.model == "vit":
            for name, part in (("size", self.patch), ("width", self.heads)):
                value = getattr(self, name)
                if value % part:
                    refuse_option(
                        f"{name}: {value} is not a multiple of {part}; fix: {name}: "
                        f"{part * -(-value // part)}"
                    )
        elif self.width % _GROUPS:
            fix = _GROUPS * -(-self.width // _GROUPS)
            refuse_option(
                f"width: {self.width} is not a multiple of {_GROUPS} groups; fix: width: {fix}"
            )


class ImageWorkload(DatasetWorkload):
    """Base class of image classifiers.

    A subclass sets `size`, and builds its model in `make`.
    """

    size: int  # height and width of an image, in pixels
    _flops = 0.0  # per image; 0: not counted yet

    def make(self) -> nn.Module:
        """Return a new model, on torch's default device."""
        raise NotImplementedError

    def open_folder(
        self, root: str | Path, train: bool, transform: Callable[[Any], Any]
    ) -> ImageFolder | None:
        """Open the images in a folder or bucket to train on or, with `train` False, to evaluate on.

        Subfolders `train` and `val` split the images; otherwise a hash of their names does. Return
        None if there are no images to evaluate on. Raises DataError.
        """
        names = ["train", *_HELD_OUT]
        if isinstance(root, Path):
            found_here = {name for name in names if (root / name).is_dir()}
        else:
            found_here = {file.name.partition("/")[0] for file in find_files(root, IMAGE_SUFFIXES)}
        parts = {name: f"{root}/{name}" for name in names if name in found_here}
        own = [folder for name, folder in parts.items() if (name == "train") == train]
        if parts and not own and train:
            raise DataError(
                f"{root}: there is {', '.join(parts)} but no train; fix: a subfolder train"
            )
        if parts:
            if own:
                return ImageFolder(own[0], transform)
            return None
        fraction = self.context.config.data.held_out_fraction
        found = ImageFolder(
            root,
            transform,
            keep=lambda name: (fraction > 0 and is_held_out(name, fraction)) != train,
        )
        if train or len(found):
            return found
        return None

    def loss_sum(self, model: nn.Module, samples: list[Tensor]) -> Tensor:
        images, labels = samples
        return F.cross_entropy(model(images).float(), labels, reduction="sum")

    def flops(self, batch: Samples) -> float:
        """Return the FLOPs of forward and backward: three times those that torch counts in the
        forward pass.
        """
        if not self._flops:
            with torch.device("meta"), FlopCounterMode(display=False) as counter:
                self.make().eval()(torch.empty(2, 3, self.size, self.size))
            self._flops = 3.0 * counter.get_total_flops() / 2
        return self._flops * batch.weight


class ImageClassifier(ImageWorkload):
    """Workload that trains an image classifier, and evaluates accuracy and confusion matrix."""

    weight_unit = "images"

    def __init__(self, context: WorkloadContext) -> None:
        self._options = read_options(VisionOptions, context.options)
        if self._options.dataset:
            self._root = locate(context.project_root, self._options.dataset)
        else:
            self._root = None
        self.size = self._options.size
        # [classes, classes] counts; row: true class, column: predicted class
        self._confusion: Tensor | None = None
        super().__init__(context)
        if self._options.norm == "sync" and context.config.parallel.recompute != "none":
            refuse_option(
                "norm: sync counts each image twice with parallel.recompute; fix: group, or "
                "recompute: none"
            )
        if self._held_out_count and self._evaluated.classes != self._train.classes:
            missing = sorted(set(self._train.classes) ^ set(self._evaluated.classes))
            raise DataError(
                f"{self._root}: the classes {', '.join(missing[:5])} are not in both the "
                "training and the held-out images; fix: the same subfolders in both"
            )

    def dataset(self, train: bool) -> Any:
        options = self._options
        root = self._root
        change = _Change(options.size, augment=options.augment and train)
        if root is None:
            found: Any = DrawnShapes(
                options.size, 0 if train else _DRAWN, _DRAWN if train else _DRAWN_HELD_OUT, change
            )
        elif isinstance(root, Path) and root.suffix == ".npz":
            found = ImageArrays(root, train, self.context.config.data.held_out_fraction, change)
        else:
            found = self.open_folder(root, train, change.of_picture)
        if not train:
            self._evaluated = found
        if train or (found is not None and len(found)):
            return found
        return None

    def model(self) -> nn.Module:
        with torch.device("meta"):
            return self.make()

    def make(self) -> nn.Module:
        options = self._options
        classes = len(self._train.classes)
        if options.model == "vit":
            return VisionTransformer(
                size=options.size,
                patch=options.patch,
                width=options.width,
                layers=options.layers,
                heads=options.heads,
                classes=classes,
            )
        ranks = self.context.world_size

        def norm(channels: int) -> nn.Module:
            if options.norm == "sync":
                return SyncNorm(channels, ranks)
            return nn.GroupNorm(_GROUPS, channels)

        return ResidualNetwork(
            width=options.width, blocks=options.layers, classes=classes, norm=norm
        )

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, ResidualNetwork | VisionTransformer)
        return [model.stem, *model.blocks, model.head]

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on the first `data.held_out_samples` held-out images.

        Collective.
        """
        count = self._held_out_count
        context = self.context
        size = self.context.config.training.batch_size
        if not count:
            return {}
        classes = len(self._train.classes)
        # The last is the loss
        table = torch.zeros(classes * classes + 1, dtype=torch.float64, device=context.device)
        for first in range(0, count, size):  # equally many passes on every rank
            share = Cursor(first, min(size, count - first)).share(context.rank, context.world_size)
            content = self._held_out[share if share.count else Cursor(first, 1)]
            images, labels = (part.to(context.device) for part in content)
            scores = model(images).float()
            if share.count:
                cells = labels * classes + scores.argmax(dim=1)
                table[:-1] += torch.bincount(cells, minlength=classes * classes)
                table[-1] += F.cross_entropy(scores, labels, reduction="sum")
        total = context.gather(table).sum(dim=0)
        self._confusion = total[:-1].view(classes, classes).cpu()
        metrics = {
            "accuracy": float(self._confusion.trace()) / count,
            "held_out_loss": float(total[-1]) / count,
        }
        if not self._options.corrupt_samples:
            return metrics
        corrupt = torch.tensor(
            [self._loader.corrupt_count + self._held_out.corrupt_count], device=context.device
        )
        return metrics | {"corrupt_samples": float(context.gather(corrupt.double()).sum())}

    def pictures(self) -> dict[str, str]:
        """Return an SVG of the last evaluation's confusion matrix, if there are at most 20
        classes.
        """
        if self._confusion is None or len(self._confusion) > _MOST_CELLS:
            return {}
        return {"confusion": draw_confusion(self._confusion, self._train.classes)}


class ImageArrays:
    """Dataset of images in a `.npz` file with the arrays `images` and `labels`.

    `images` is uint8 `[samples, height, width, 3]` or `[samples, height, width]`, and `labels` are
    integers `[samples]`. Without `held_out_images` and `held_out_labels`, `data.held_out_fraction`
    of the images are held out. `classes` may have the names of the classes. CIFAR is often kept in
    such a file.
    """

    def __init__(self, path: Path, train: bool, fraction: float, change: _Change) -> None:
        if train:
            prefix = ""
        else:
            prefix = "held_out_"
        try:
            with np.load(path, allow_pickle=False) as arrays:
                own = "held_out_images" in arrays
                if not own:
                    prefix = ""
                images = arrays[f"{prefix}images"]
                labels = arrays[f"{prefix}labels"]
                if "classes" in arrays:
                    names = arrays["classes"].tolist()
                else:
                    names = None
                every = [arrays[name] for name in ("labels", "held_out_labels") if name in arrays]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{path}: {error}; fix: a .npz file with the arrays images and labels"
            ) from error
        if (
            images.dtype != np.uint8
            or images.ndim not in (3, 4)
            or (images.ndim == 4 and images.shape[3] != 3)
        ):
            raise DataError(
                f"{path}: {prefix}images is {images.dtype} {list(images.shape)}; fix: uint8 "
                "[samples, height, width, 3]"
            )
        if labels.shape != (len(images),) or not np.issubdtype(labels.dtype, np.integer):
            raise DataError(
                f"{path}: {prefix}labels is {labels.dtype} {list(labels.shape)} for "
                f"{len(images)} images; fix: integers [{len(images)}]"
            )
        if names:
            count = len(names)
        else:
            count = 1 + max(int(targets.max(initial=0)) for targets in every)
        if len(labels) and not 0 <= labels.min() <= labels.max() < count:
            raise DataError(
                f"{path}: {prefix}labels are {labels.min()} to {labels.max()}; fix: 0 to "
                f"{count - 1}"
            )
        kept = np.array(
            [
                own or (fraction > 0 and is_held_out(str(at), fraction)) != train
                for at in range(len(images))
            ]
        )
        self._images = images[kept]
        self._labels = labels[kept]
        self._change = change
        self.classes = [str(name) for name in names or range(count)]
        self.fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = torch.from_numpy(self._images[index])
        if pixels.ndim == 3:
            pixels = pixels.permute(2, 0, 1)
        else:
            pixels = pixels.expand(3, -1, -1)
        size = self._change._size
        if min(pixels.shape[1:]) < size:
            raise DataError(
                f"the images are {list(pixels.shape[1:])} pixels, fewer than "
                f"workload_options.size {size}"
            )
        return self._change.of_pixels(pixels), int(self._labels[index])


class DrawnShapes:
    """Dataset of drawn discs, squares, crosses and rings in noise.

    Each image is a function of its number.
    """

    def __init__(self, size: int, first: int, count: int, change: _Change) -> None:
        self._size = size
        self._first = first
        self._count = count
        self._change = change
        self.classes = list(_KINDS)
        self.fingerprint = f"drawn shapes {size} {first} {count}"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self._first + index)
        kind = (self._first + index) % len(_KINDS)
        x, y, radius = (
            torch.rand(3, generator=generator) * torch.tensor([0.3, 0.3, 0.15]) * self._size
        ).tolist()
        radius += 0.18 * self._size
        across = (torch.arange(self._size) - x - 0.35 * self._size).abs()
        down = (torch.arange(self._size)[:, None] - y - 0.35 * self._size).abs()
        far = torch.maximum(across, down)
        near = torch.minimum(across, down)
        distance = torch.hypot(across, down)
        thick = 0.07 * self._size
        drawn = [
            distance < radius,
            far < radius,
            (near < thick) & (far < radius),
            (distance - radius).abs() < thick,
        ]
        colours = torch.rand(2, 3, 1, 1, generator=generator)
        image = torch.where(drawn[kind], 0.6 + 0.4 * colours[0], 0.4 * colours[1])
        image = image + 0.1 * torch.randn(3, self._size, self._size, generator=generator)
        return self._change.of_pixels((image.clamp(0, 1) * 255).to(torch.uint8)), kind


class SyncNorm(nn.Module):
    """Batch normalisation with statistics over the images of all ranks.

    The input is `[images, channels, height, width]`. torch's SyncBatchNorm works on GPUs only. The
    statistics are those of a micro-batch: more micro-batches change them, more ranks do not.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self, channels: int, ranks: int, momentum: float = 0.1, epsilon: float = 1e-5
    ) -> None:
        super().__init__()
        # 1 where rank 0 tries the workload out, alone in an initialised process group
        self._ranks = ranks
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_var", torch.empty(channels))
        self._momentum = momentum
        self._epsilon = epsilon
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for tensor, value in (
            (self.weight, 1),
            (self.bias, 0),
            (self.running_mean, 0),
            (self.running_var, 1),
        ):
            tensor.fill_(value)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.running_mean
        variance = self.running_var
        if self.training:
            wide = x.float()
            count = wide.new_tensor([float(x.numel() // x.shape[1])])
            sums = torch.cat([wide.sum(dim=(0, 2, 3)), wide.square().sum(dim=(0, 2, 3)), count])
            if self._ranks > 1:
                sums = _SumOverRanks.apply(sums)
            total, squares, count = sums.split([x.shape[1], x.shape[1], 1])
            mean = total / count.clamp(min=1)
            variance = (squares / count.clamp(min=1) - mean.square()).clamp(min=0)
            with torch.no_grad():
                unbiased = variance * (count / (count - 1).clamp(min=1))
                self.running_mean.lerp_(mean, self._momentum)
                self.running_var.lerp_(unbiased, self._momentum)
        scale = self.weight * torch.rsqrt(variance + self._epsilon)
        return (x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]).to(x.dtype)


class ResidualNetwork(nn.Module):
    """ResNet for small images (He et al., 2016, arXiv:1512.03385, section 4.2), with three stages.

    The first block of the second and third stage halves height and width, and doubles the channels.
    There is no pooling before the last layer.
    """

    def __init__(
        self, *, width: int, blocks: int, classes: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), norm(width), nn.ReLU()
        )
        stages = [min(2, 3 * number // blocks) for number in range(blocks)]
        channels = [width, *(width * 2**stage for stage in stages)]
        self.blocks = nn.ModuleList(
            _Residual(inputs, outputs, 1 if inputs == outputs else 2, norm)
            for inputs, outputs in itertools.pairwise(channels)
        )
        self.head = nn.Linear(channels[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=(2, 3)))


class VisionTransformer(nn.Module):
    """Vision transformer that classifies by the mean of all tokens instead of a class token.

    Source: Dosovitskiy et al., 2021, arXiv:2010.11929.
    """

    def __init__(
        self, *, size: int, patch: int, width: int, layers: int, heads: int, classes: int
    ) -> None:
        super().__init__()
        self.stem = _Patches(size, patch, width)
        self.blocks = nn.ModuleList(_Attention(width, heads) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def draw_confusion(counts: Tensor, classes: list[str]) -> str:
    """Draw a confusion matrix `counts`, `[classes, classes]`, as an SVG table.

    A row is a true class. A cell is darker the more images it has.
    """
    cell = 34
    left = 90
    top = 24
    side = cell * len(classes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + side} {top + side + 8}" '
        f'width="{left + side}" height="{top + side + 8}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="#fff"/><text x="4" y="14">true '
        "class; columns: predicted</text>"
    ]
    for row, name in enumerate(classes):
        y = top + row * cell
        parts.append(
            f'<text x="{left - 6}" y="{y + 21}" text-anchor="end">{escape(name[:12])}</text>'
        )
        total = max(1.0, float(counts[row].sum()))
        for column, count in enumerate(counts[row].tolist()):
            share = count / total
            parts.append(
                f'<rect x="{left + column * cell}" y="{y}" width="{cell - 1}" '
                f'height="{cell - 1}" fill="#0b4f6c" '
                f'fill-opacity="{0.04 + 0.9 * share:.2f}"/><text '
                f'x="{left + column * cell + cell / 2:.0f}" y="{y + 21}" text-anchor="middle" '
                f'fill="{"#fff" if share > 0.5 else "#000"}">{int(count)}</text>'
            )
    return "".join([*parts, "</svg>"])


class _Change:
    """Transformation of an image to a normalised tensor `[3, size, size]`.

    With `augment`, the image is cropped and flipped at random.
    """

    def __init__(self, size: int, *, augment: bool) -> None:
        self._size = size
        self._augment = augment

    def of_picture(self, picture: Any) -> Tensor:
        """Scale a `PIL.Image` by its shorter side, then crop and normalise it."""
        scale = self._size * _MARGIN / min(picture.size)
        scaled = picture.resize([max(self._size, round(side * scale)) for side in picture.size])
        return self.of_pixels(torch.from_numpy(np.array(scaled)).permute(2, 0, 1))

    def of_pixels(self, pixels: Tensor) -> Tensor:
        """Crop and normalise pixels, uint8 `[3, height, width]`.

        With `augment`, an image of the crop's size is first padded by reflection.
        """
        height, width = pixels.shape[1:]
        image = pixels.float()[None] / 255
        if self._augment and height == width == self._size:
            pad = max(1, self._size // 8)
            image = F.pad(image, [pad] * 4, mode="reflect")
            height = height + 2 * pad
            width = width + 2 * pad
        top = (height - self._size) // 2
        left = (width - self._size) // 2
        if self._augment:
            top = random.randint(0, height - self._size)
            left = random.randint(0, width - self._size)
        image = image[0, :, top : top + self._size, left : left + self._size]
        if self._augment and random.random() < 0.5:
            image = image.flip(2)
        return (image - _MEAN) / _DEVIATION


class _SumOverRanks(torch.autograd.Function):
    """Differentiable sum of a tensor over all ranks. Its gradient is the sum of the ranks'
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004 (torch's interface)
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004 (torch's interface)
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class _Residual(nn.Module):
    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]
    ) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([norm(outputs), norm(outputs)])
        if stride > 1:
            self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        else:
            self.short = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.short(x))


class _Patches(nn.Module):
    """Embedding of an image's patches as tokens `[images, patches, width]`, with learned
    positions.
    """

    def __init__(self, size: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(torch.empty(1, (size // patch) ** 2, width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.positions.normal_(std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2) + self.positions


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        images, tokens, width = x.shape
        parts = self.mix(self.norms[0](x)).view(
            images, tokens, 3, self._heads, width // self._heads
        )
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = (
            F.scaled_dot_product_attention(query, key, value)
            .transpose(1, 2)
            .reshape(images, tokens, width)
        )
        x = x + self.out(mixed)
        return x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
