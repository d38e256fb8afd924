"""Workload for the diffusion of point clouds, which generates clouds or completes partial ones.

Everything random is a function of (seed, sample, epoch): the points of a cloud, its noise and its
timestep. So world size and restarts change nothing. docs/point-clouds.md is the guide.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ebbflow.core.json_values import JsonObject
from ebbflow.training.data.tokens import SampleOrder
from ebbflow.training.errors import DataError
from ebbflow.training.workload import Cursor, Loss, WorkloadContext
from ebbflow.workloads.options import read_options, refuse_option
from ebbflow.workloads.points.diffusion import (
    PREDICTIONS,
    SAMPLERS,
    SCHEDULES,
    NoiseSchedule,
    draw_normal,
    sample,
)
from ebbflow.workloads.points.point_data import (
    SHAPES,
    PackedClouds,
    choose_points,
    known_first,
    normalise,
    pack_folder,
    seeded,
    synthetic_cloud,
)
from ebbflow.workloads.points.point_metrics import (
    chamfer,
    chamfer_rows,
    exact_emd,
    set_metrics,
    sinkhorn_emd,
)
from ebbflow.workloads.points.point_model import PointDenoiser, count_flops
from ebbflow.workloads.readers.step_reader import StepReader

_HELD_OUT = 2**40  # first synthetic shape that is never trained on
_PICTURED = 6
_SIZE = 120  # pixels of a cloud's square
_MARGIN = 6  # pixels of its margin
_LABEL = 16  # pixels of a row's label
_MOST_POINTS = 256
_NEAR = "#0b4f6c"
_FAR = "#7fb7be"
_KNOWN = "#c0571e"
_CHOICES = {"prediction": PREDICTIONS, "schedule": SCHEDULES, "sampler": SAMPLERS}


@dataclass(frozen=True, kw_only=True)
class PointOptions:
    """The `workload_options` of point cloud diffusion, with their defaults."""

    path: str = ""  # folder with the index and the clouds; "": synthetic shapes
    index: str = "index.csv"
    train_split: str = "train"
    held_out_split: str = "test"
    max_bad_files: int = 0  # unusable files that are skipped; more end the job before it starts
    max_stored_points: int = 16384  # of a cloud, points that are copied to the store
    # Clouds with fewer points than num_points: refuse, or repeat their points
    short_clouds: str = "refuse"
    synthetic_clouds: int = 512  # different shapes to train on
    num_points: int = 256  # points of a cloud in training and sampling
    # Points that are given, in completion; 0: clouds are made from noise alone
    known_points: int = 0
    by_category: bool = True  # whether the denoiser sees the category
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    latents: int = 0  # learned tokens that each point attends to; 0: it attends to all points
    prediction: str = "v"  # v or epsilon
    schedule: str = "cosine"  # cosine or linear
    timesteps: int = 1000
    sampler: str = "ddim"  # ddim or ddpm
    sampling_steps: int = 50
    sampling_limit: float = 4.0  # coordinates are clipped to ± this while sampling
    # Clouds that are made, and compared with as many held-out ones, per evaluation
    held_out_clouds: int = 32
    # Largest cloud whose EMD is exact; larger ones get an upper bound with its error
    exact_emd_points: int = 512

    def __post_init__(self) -> None:
        for name, allowed in {**_CHOICES, "short_clouds": ("refuse", "repeat")}.items():
            if getattr(self, name) not in allowed:
                refuse_option(f"{name}: {getattr(self, name)!r}; fix: {' or '.join(allowed)}")
        least = {
            "max_bad_files": 0,
            "known_points": 0,
            "latents": 0,
            "timesteps": 2,
            "num_points": 2,
        }
        for name, value in asdict(self).items():
            if type(value) in (int, float) and value < least.get(name, 1):
                refuse_option(f"{name}: {value}; fix: at least {least.get(name, 1)}")
        if self.known_points >= self.num_points:
            refuse_option(
                f"known_points: {self.known_points} of num_points {self.num_points} leaves no "
                "point to complete; fix: fewer known_points"
            )
        if self.hidden % self.heads:
            refuse_option(
                f"hidden: {self.hidden} is not a multiple of heads {self.heads}; fix: hidden: "
                f"{self.heads * 16}"
            )


class CloudBatch(NamedTuple):
    clean: Tensor  # `[batch, points, 3]`; in completion the known points come first
    noise: Tensor  # of the same shape
    t: Tensor  # timesteps, int64 `[batch]`
    category: Tensor  # int64 `[batch]`

    @property
    def weight(self) -> float:
        return float(len(self.clean))

    def split(self, parts: int) -> list[CloudBatch]:
        split_tensors = [tensor.tensor_split(parts) for tensor in self]
        return [CloudBatch(*part) for part in zip(*split_tensors, strict=True)]


class PointCloudDiffusion:
    """Workload that trains a denoiser of point clouds, and evaluates the clouds that it
    generates.
    """

    weight_unit = "clouds"

    def __init__(self, context: WorkloadContext) -> None:
        self._context = context
        self._options = read_options(PointOptions, context.options)
        options = self._options
        self._seed = context.config.training.seed
        self._schedule = NoiseSchedule(options.schedule, options.timesteps)
        self._categories = list(context.prepared["categories"])
        self._train = self._held_out = None
        self._partial: dict[PackedClouds | None, PackedClouds] = {}
        if options.path:
            fingerprint = context.prepared["packed"]
            self._train, self._held_out = (
                PackedClouds(context.store, fingerprint, split, context.alive)
                for split in ("train", "held_out")
            )
            if options.known_points and context.prepared["partial"]:
                for clouds, split in (
                    (self._train, "train-partial"),
                    (self._held_out, "held_out-partial"),
                ):
                    self._partial[clouds] = PackedClouds(
                        context.store, fingerprint, split, context.alive
                    )
        if self._train:
            self._count = len(self._train)
        else:
            self._count = options.synthetic_clouds
        self._order = SampleOrder(self._count, self._seed)
        batch_size = context.config.training.batch_size
        self._reader = StepReader(self._read, context.device, batch_size)
        self._shown: dict[str, Tensor] = {}

    @classmethod
    def prepare(cls, context: WorkloadContext) -> JsonObject:
        """Copy the clouds of a folder to the store.

        Raises DataError for files that cannot be trained on.
        """
        options = read_options(PointOptions, context.options)
        about: JsonObject = {
            "categories": list(SHAPES),
            "train": options.synthetic_clouds,
            "packed": "",
        }
        if options.path:
            folder = Path(context.project_root, options.path).resolve()
            if not folder.is_dir():
                raise DataError(
                    f"workload_options.path: {folder} is not a folder; fix: one with "
                    f"{options.index}"
                )
            about = pack_folder(
                context.store,
                folder,
                options.index,
                train=options.train_split,
                held_out=options.held_out_split,
                most_bad=options.max_bad_files,
                most_points=options.max_stored_points,
            )
            about["packed"] = about.pop("fingerprint")
            partial = bool(options.known_points and about["partial"])
            free = options.num_points - options.known_points * partial
            for split in ("train", "held_out"):
                _check_sizes(
                    PackedClouds(context.store, str(about["packed"]), split),
                    free,
                    "num_points",
                    options,
                )
                if partial:
                    given = PackedClouds(context.store, str(about["packed"]), f"{split}-partial")
                    _check_sizes(given, options.known_points, "known_points", options)
        # A sample is another one with these
        shapes = ("num_points", "known_points", "short_clouds", "timesteps")
        content = {**about, **{name: getattr(options, name) for name in shapes}, "skipped": None}
        about["fingerprint"] = hashlib.sha256(
            json.dumps(content, sort_keys=True).encode()
        ).hexdigest()
        return about | {"weight_unit": cls.weight_unit}

    def model(self) -> nn.Module:
        options = self._options
        with torch.device("meta"):
            return PointDenoiser(
                hidden=options.hidden,
                layers=options.layers,
                heads=options.heads,
                latents=options.latents,
                categories=len(self._categories) if options.by_category else 0,
            )

    def units(self, model: nn.Module) -> Iterable[nn.Module]:
        assert isinstance(model, PointDenoiser)
        return [model.embedding, *model.blocks, model.head]

    def next_batch(self, model: nn.Module, cursor: Cursor) -> CloudBatch:  # noqa: ARG002 (the interface of Workload)
        return CloudBatch(*self._reader.take(cursor))

    def _read(self, cursor: Cursor) -> list[Tensor]:
        numbers = self._order.window(cursor.first, cursor.count).tolist()
        rows = [
            self._sample(number, (cursor.first + place) // self._count)
            for place, number in enumerate(numbers)
        ]
        if not rows:
            empty = torch.zeros(0, self._options.num_points, 3)
            none = torch.zeros(0, dtype=torch.int64)
            return [empty, empty, none, none]
        return [torch.stack(part) for part in zip(*rows, strict=True)]

    def loss(self, model: nn.Module, batch: CloudBatch) -> Loss:
        options = self._options
        known = self._options.known_points
        noised = self._schedule.add_noise(batch.clean, batch.noise, batch.t)
        target = self._schedule.target(options.prediction, batch.clean, batch.noise, batch.t)
        if known:
            noised = torch.cat([batch.clean[:, :known], noised[:, known:]], dim=1)
        output = model(noised, batch.t, batch.category, known)
        errors = (output[:, known:].float() - target[:, known:]).square()
        return Loss(errors.mean(dim=(1, 2)).sum(), batch.weight)

    def flops(self, batch: CloudBatch) -> float:
        options = self._options
        shape = {name: getattr(options, name) for name in ("hidden", "layers", "latents")}
        return batch.weight * count_flops(points=options.num_points, **shape)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Generate one cloud for each held-out cloud, and compare the two sets.

        Collective.
        """
        options = self._options
        context = self._context
        count = min(
            options.held_out_clouds,
            len(self._held_out) if self._held_out else options.held_out_clouds,
        )
        # Every rank makes equally many, and so as many passes
        share = -(-count // context.world_size)
        mine = [min(context.rank * share + place, count - 1) for place in range(share)]
        real = [self._held_out_cloud(number) for number in mine]
        truth = torch.stack([cloud for cloud, _ in real]).to(context.device)
        category = torch.tensor([kind for _, kind in real], device=context.device)
        generators = [seeded(self._seed, "sampling", number) for number in mine]
        start = draw_normal(generators, options.num_points).to(context.device)
        batch = max(1, context.config.training.batch_size // context.world_size)
        clouds = []
        for first in range(0, share, batch):
            part = slice(first, first + batch)
            clouds.append(
                self._make(model, start[part], truth[part], category[part], generators[part])
            )
        made = torch.cat(clouds)
        if not options.known_points:
            noise = start
        else:
            noise = self._keep_known(start, truth)
        made, truth, noise = (self._everywhere(part)[:count] for part in (made, truth, noise))
        metrics = self._compare(made, truth, noise)
        shown = slice(0, min(_PICTURED, count))
        self._shown = {"made": made[shown].cpu(), "held out": truth[shown].cpu()}
        return metrics

    def pictures(self) -> dict[str, str]:
        """Return an SVG drawing of some clouds from the last evaluation."""
        known = self._options.known_points
        if self._shown:
            return {"clouds": draw_clouds(self._shown, known=known)}
        return {}

    def _sample(self, number: int, epoch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = seeded(self._seed, number, epoch)
        cloud, category = self._cloud(self._train, number, generator)
        noise = torch.randn(self._options.num_points, 3, generator=generator)
        t = torch.randint(self._options.timesteps, (), generator=generator)
        return cloud, noise, t, torch.tensor(category)

    def _held_out_cloud(self, number: int) -> tuple[Tensor, int]:
        if self._held_out:
            first = 0
        else:
            first = _HELD_OUT
        if self._held_out:  # evenly spaced, so that few clouds are of all categories
            count = min(self._options.held_out_clouds, len(self._held_out))
            number = number * len(self._held_out) // count
        return self._cloud(self._held_out, first + number, seeded(self._seed, "held out", number))

    def _cloud(
        self, packed: PackedClouds | None, number: int, generator: torch.Generator
    ) -> tuple[Tensor, int]:
        points = self._options.num_points
        known = self._options.known_points
        if packed is None:
            cloud, category = synthetic_cloud(number, points, generator)
        else:
            whole, category = packed.cloud(number)
            if packed in self._partial:
                given = choose_points(self._partial[packed].cloud(number)[0], known, generator)
                chosen = torch.cat([given, choose_points(whole, points - known, generator)])
                return normalise(chosen, whole), category
            cloud = choose_points(whole, points, generator)
        cloud = normalise(cloud, cloud)
        return (known_first(cloud, known, generator) if known else cloud), category

    def _make(
        self,
        model: nn.Module,
        start: Tensor,
        truth: Tensor,
        category: Tensor,
        generators: list[torch.Generator],
    ) -> Tensor:
        options = self._options
        known = self._options.known_points

        def denoise(x: Tensor, t: Tensor) -> Tensor:
            return model(self._keep_known(x, truth) if known else x, t, category, known).float()

        made = sample(
            denoise,
            self._schedule,
            start,
            generators,
            prediction=options.prediction,
            sampler=options.sampler,
            steps=options.sampling_steps,
            limit=options.sampling_limit,
        )
        if known:
            return self._keep_known(made, truth)
        return made

    def _keep_known(self, x: Tensor, truth: Tensor) -> Tensor:
        known = self._options.known_points
        return torch.cat([truth[:, :known], x[:, known:]], dim=1)

    def _everywhere(self, clouds: Tensor) -> Tensor:
        """Gather the clouds of all ranks, in rank order. Collective."""
        return self._context.gather(clouds.flatten()).view(-1, *clouds.shape[1:])

    def _compare(self, made: Tensor, truth: Tensor, noise: Tensor) -> dict[str, float]:
        """Return metrics that compare generated clouds with held-out ones.

        Each rank computes its rows of the distances, and all gather them. Collective.
        """
        context = self._context
        count = len(made)
        known = self._options.known_points
        both = torch.cat([made, truth])
        share = -(-len(both) // context.world_size)
        rows = torch.arange(context.rank * share, (context.rank + 1) * share).clamp(
            max=len(both) - 1
        )
        pairs = self._everywhere(chamfer_rows(both[rows.to(both.device)], both))[: len(both)]
        metrics = set_metrics(pairs, count)
        if known:
            metrics["chamfer"] = float(chamfer(made, truth).mean())
            base = float(chamfer(noise, truth).mean())
            partner = torch.arange(count)
        else:
            share = -(-count // context.world_size)
            rows = torch.arange(context.rank * share, (context.rank + 1) * share).clamp(
                max=count - 1
            )
            base_rows = self._everywhere(chamfer_rows(truth[rows.to(truth.device)], noise))[:count]
            metrics["chamfer"] = metrics["mmd"]
            base = float(base_rows.amin(dim=1).mean())
            partner = pairs[count:, :count].argmin(dim=1).cpu()
        metrics |= {
            "chamfer_of_noise": base,
            "chamfer_ratio": metrics["chamfer"] / max(base, 1e-12),
        }
        return metrics | self._emd(made[partner.to(made.device)], truth)

    def _emd(self, made: Tensor, truth: Tensor) -> dict[str, float]:
        """Return the mean EMD of all pairs of clouds, and its largest error (0 if the EMD is
        exact).

        Collective.
        """
        context = self._context
        count = len(truth)
        share = -(-count // context.world_size)
        own = torch.zeros(share, 2, dtype=torch.float64, device=made.device)
        for place in range(share):
            pair = min(context.rank * share + place, count - 1)
            found: tuple[float, float] = (0.0, 0.0)
            if made.shape[1] <= self._options.exact_emd_points:
                found = exact_emd(made[pair], truth[pair]), 0.0
            else:
                found = sinkhorn_emd(made[pair], truth[pair])
            own[place] = torch.tensor(found, dtype=torch.float64)
        table = self._everywhere(own)[:count]
        return {"emd": float(table[:, 0].mean()), "emd_error": float(table[:, 1].max())}


def draw_clouds(rows: Mapping[str, Tensor], *, known: int = 0) -> str:
    """Draw clouds as an SVG image, with one labelled row for each entry of `rows`.

    An entry is `[clouds, points, 3]`. Points of the far half are lighter. The first `known` points
    of each cloud have another colour.
    """
    width = _SIZE * max(len(clouds) for clouds in rows.values())
    height = (_SIZE + _LABEL) * len(rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}">'
    ]
    parts.append(f'<rect width="{width}" height="{height}" fill="#fff"/>')
    for number, (label, clouds) in enumerate(rows.items()):
        top = number * (_SIZE + _LABEL)
        parts.append(
            f'<text x="4" y="{top + 12}" font-family="sans-serif" '
            f'font-size="11">{escape(label)}</text>'
        )
        for place, cloud in enumerate(clouds):
            parts += _draw_cloud(cloud, place * _SIZE, top + _LABEL, known)
    return "".join([*parts, "</svg>"])


def _check_sizes(clouds: PackedClouds, needed: int, option: str, options: PointOptions) -> None:
    """Raise DataError if a cloud has fewer points than are needed.

    With `short_clouds: repeat` this is no error, because points are repeated.
    """
    short = [number for number, size in enumerate(clouds.sizes) if size < needed]
    if not short or options.short_clouds == "repeat":
        return
    least = min(short, key=lambda number: clouds.sizes[number])
    raise DataError(
        f"{len(short)} of {len(clouds)} clouds have fewer points than {option} asks for, "
        f"{needed}; the smallest, {clouds.paths[least]}, has {clouds.sizes[least]}; fix: "
        f"workload_options.{option}: {clouds.sizes[least]}, or short_clouds: repeat, which "
        "repeats their points"
    )


def _draw_cloud(cloud: Tensor, left: int, top: int, known: int) -> list[str]:
    step = max(1, math.ceil(len(cloud) / _MOST_POINTS))
    points = cloud[::step].tolist()
    given = -(-known // step)
    groups: dict[str, list[str]] = {_FAR: [], _NEAR: [], _KNOWN: []}
    reach = 2.2
    for point in points:
        reach = max([reach, *(abs(value) for value in point if math.isfinite(value))])
    scale = (_SIZE / 2 - _MARGIN) / min(reach, 4.0) / 1.25
    for number, (x, y, z) in enumerate(points):
        if not all(map(math.isfinite, (x, y, z))):
            continue
        across = (x - y) * math.sqrt(0.5)
        depth = (x + y) * math.sqrt(0.5)
        right = left + _SIZE / 2 + across * scale
        down = top + _SIZE / 2 - (0.9 * z - 0.4 * depth) * scale
        if number < given:
            colour = _KNOWN
        elif depth < 0:
            colour = _FAR
        else:
            colour = _NEAR
        groups[colour].append(f"M{right:.0f} {down:.0f}h0")
    shape = '<path d="{}" stroke="{}" stroke-width="2.4" stroke-linecap="round" fill="none"/>'
    return [shape.format("".join(drawn), colour) for colour, drawn in groups.items() if drawn]
