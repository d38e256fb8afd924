"""Image classification in plain torch: any world size, batch statistics of all ranks, users' data,
wrong options.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from ebbflow.core.config.schema import RunConfig
from ebbflow.core.events import read_events
from ebbflow.core.layout import job_prefix
from ebbflow.core.store import Store
from ebbflow.training.errors import DataError, WorkloadError
from ebbflow.training.gang import Gang
from ebbflow.training.workload import Cursor, WorkloadContext
from ebbflow.training.workload_loader import prepare_data, workload_context
from ebbflow.tryout.trial import try_workload
from ebbflow.workloads.vision.classifier import ImageClassifier, SyncNorm, draw_confusion
from tests.support.alone import run_alone
from tests.support.gangs import run_ranks
from tests.support.s3.fixture import FailingServer, failing_s3

__all__ = ["failing_s3"]

OPTIONS = {"size": 12, "width": 8, "layers": 3, "workers": 0}


def config_of(
    folder: Path, options: dict[str, Any] | None = None, mode: str = "ddp", **training: Any
) -> RunConfig:
    known = {
        "batch_size": 8,
        "max_steps": 20,
        "evaluation_interval_steps": 10,
        "learning_rate": 0.01,
    }
    return RunConfig.model_validate(
        {
            "store": str(folder / "store"),
            "workload": "ebbflow.workloads:ImageClassifier",
            "workload_options": OPTIONS | (options or {}),
            "training": known | {"scheduler": {"type": "constant", "warmup_steps": 0}} | training,
            "data": {"held_out_samples": 20, "held_out_fraction": 0.3},
            "parallel": {"mode": mode},
            "checkpoint": {"interval_steps": 10},
        }
    )


def context_of(config: RunConfig) -> WorkloadContext:
    return workload_context(config, Gang(), store=Store.open(config.store))


@pytest.mark.parametrize(
    ("options", "mode", "sizes"),
    [({"norm": "sync"}, "ddp", (1, 2, 4)), ({"model": "vit", "width": 16}, "fsdp2", (1, 2))],
)
def test_any_world_size_trains_the_same(
    options: dict[str, Any], mode: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    losses: dict[str, list[float]] = {}
    for job, world_size in zip(map(str, sizes), sizes, strict=True):
        config = config_of(tmp_path, options, mode if job == "2" else "ddp")
        path = tmp_path / "job.yaml"
        path.write_text(config.model_dump_json())
        run_ranks(world_size, ["-m", "ebbflow.training", str(path), "--job", job])
        events = read_events(Store.open(config.store).sub(job_prefix(job)))
        losses[job] = [
            event.data["loss"] for event in events if event.name == "step" and event.rank == 0
        ]
        found = [event.data["metrics"] for event in events if event.name == "evaluation"][-1]
        losses[job] += [found["accuracy"], found["held_out_loss"]]
    assert len(losses["1"]) == 22 and losses["1"][19] < losses["1"][0]
    for job in losses:
        assert losses[job] == pytest.approx(losses["1"], rel=1e-5, abs=1e-5), job


def test_a_net_learns_shapes_and_draws_its_confusion(tmp_path: Path) -> None:
    scheduler = {
        "scheduler": {"type": "cosine", "warmup_steps": 10},
        "evaluation_interval_steps": 50,
    }
    config = config_of(
        tmp_path, {"size": 16, "augment": False}, batch_size=32, max_steps=150, **scheduler
    )
    assert run_alone(config, "learns").step == 150
    events = [
        event
        for event in read_events(Store.open(config.store).sub(job_prefix("learns")))
        if event.name == "evaluation"
    ]
    assert events[-1].data["metrics"]["accuracy"] >= 0.95, "0.25 is chance"
    assert "disc" in events[-1].data["pictures"]["confusion"]
    assert "&lt;b&gt;" in draw_confusion(torch.eye(2), ["<b>", "x"])


def test_batch_statistics_are_those_of_torchs_batch_normalisation(tmp_path: Path) -> None:
    x = torch.randn(7, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.multiprocessing.start_processes(
        _normalise, (2, str(tmp_path), x), nprocs=2, start_method="fork"
    )
    parts = [torch.load(tmp_path / str(rank)) for rank in range(2)]
    reference = nn.BatchNorm2d(3)
    whole = x.clone().requires_grad_()
    (reference(whole).square() * torch.arange(1.0, 6.0)).sum().backward()
    torch.testing.assert_close(
        torch.cat([part[0] for part in parts]), whole.grad, rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(parts[0][1], reference.weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[1][2], reference.running_var, rtol=1e-5, atol=1e-6)
    own = SyncNorm(3, 1).eval()
    assert own.reset_parameters() is None and torch.allclose(
        own(x), nn.BatchNorm2d(3).eval()(x), atol=1e-6
    )


def test_arrays_and_folders_of_images_are_read_and_split(tmp_path: Path) -> None:
    from PIL import Image

    images = np.random.default_rng(0).integers(0, 256, (40, 16, 20, 3), dtype=np.uint8)
    np.savez(
        tmp_path / "own.npz",
        images=images,
        labels=np.arange(40) % 3,
        classes=np.array(["a", "b", "c"]),
    )
    for number, image in enumerate(images):
        folder = tmp_path / "images" / ("cats" if number % 2 else "dogs")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    for name, classes in (("own.npz", ["a", "b", "c"]), ("images", ["cats", "dogs"])):
        config = config_of(tmp_path, {"dataset": str(tmp_path / name)})
        context = context_of(config)
        workload = ImageClassifier(context)
        assert (
            workload._train.classes == classes
            and len(workload._train) + len(workload._evaluated) == 40
        )
        first, again = (workload.next_batch(nn.Identity(), Cursor(3, 4)).content for _ in range(2))
        assert all(
            torch.equal(tensor, other) for tensor, other in zip(first, again, strict=True)
        ), "the crops are the same"
        assert first[0].shape == (4, 3, 12, 12)
        assert try_workload(config, replace(context, prepared=prepare_data(config, context))).done
    torn = Path(workload._train.describe(0))
    torn.write_bytes(torn.read_bytes()[:60])
    options = {"dataset": str(tmp_path / "images"), "workers": 0}
    with pytest.raises(RuntimeError, match=rf"index 0 \({torn}\): .*Error: "):
        read_epoch(ImageClassifier(context_of(config_of(tmp_path, options))))
    workload = ImageClassifier(context_of(config_of(tmp_path, {**options, "corrupt_samples": 1})))
    read_epoch(workload)
    assert workload._loader.corrupt_count == 1


def read_epoch(workload: ImageClassifier) -> None:
    for number in range(len(workload._train) // 4):
        workload.next_batch(nn.Identity(), Cursor(4 * number, 4))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"modle": "vit"}, r"workload_options.modle is unknown; fix: did you mean model\?"),
        ({"norm": "batch"}, "norm: 'batch'; fix: group or sync"),
        ({"model": "vit", "patch": 5}, "size: 12 is not a multiple of 5; fix: size: 15"),
        ({"width": 12}, "width: 12 is not a multiple of 8 groups; fix: width: 16"),
        ({"layers": 0}, "layers: 0; fix: at least 1"),
    ],
)
def test_a_wrong_option_is_refused_with_its_fix(
    options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(WorkloadError, match=says):
        ImageClassifier(context_of(config_of(tmp_path, options)))


def test_arrays_that_do_not_fit_are_refused_with_their_shapes(tmp_path: Path) -> None:
    good = {"images": np.zeros((4, 12, 12, 3), np.uint8), "labels": np.arange(4)}
    cases = {
        "images is float32": good | {"images": np.zeros((4, 12, 12, 3), np.float32)},
        r"labels is int64 \[3\] for 4 images": good | {"labels": np.arange(3)},
        "labels are 0 to 3; fix: 0 to 1": good | {"classes": np.array(["a", "b"])},
        "fix: a .npz file with the arrays": {"pictures": good["images"]},
    }
    for says, arrays in cases.items():
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(DataError, match=says):
            ImageClassifier(context_of(config_of(tmp_path, {"dataset": str(tmp_path / "bad.npz")})))


def test_images_in_a_bucket_are_those_of_the_folder(
    tmp_path: Path, failing_s3: FailingServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    server = failing_s3
    server.use(monkeypatch)
    bucket = failing_s3.new_bucket()
    store = Store.open(f"s3://{bucket}/pictures")
    here = tmp_path / "pictures"
    for number in range(12):
        path = (
            here
            / ("val" if number > 7 else "train")
            / ("cats" if number % 2 else "dogs")
            / f"{number}.png"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (16, 16), (number, 0, 0)).save(path)
        store.put(path.relative_to(here).as_posix(), path.read_bytes())
    found = []
    for dataset in (str(here), f"s3://{bucket}/pictures/"):
        workload = ImageClassifier(
            context_of(config_of(tmp_path, {"dataset": dataset, "augment": False}))
        )
        for train in (True, False):
            images = workload.dataset(train)
            found.append([images.classes, *((pixels.tolist(), label) for pixels, label in images)])
    assert found[:2] == found[2:] and [len(folder) for folder in found[:2]] == [9, 5]
    with pytest.raises(DataError, match=r"pictures/train/cats/none: no file that ends in"):
        ImageClassifier(
            context_of(config_of(tmp_path, {"dataset": f"s3://{bucket}/pictures/train/cats/none"}))
        )


def _normalise(rank: int, world_size: int, folder: str, x: torch.Tensor) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    norm = SyncNorm(3, world_size)
    part = x.tensor_split(world_size)[rank].clone().requires_grad_()
    (norm(part).square() * torch.arange(1.0, 6.0)).sum().backward()
    gradient = norm.weight.grad
    assert gradient is not None
    dist.all_reduce(gradient)
    torch.save((part.grad, gradient, norm.running_var), f"{folder}/{rank}")
    dist.destroy_process_group()
